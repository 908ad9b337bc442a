"""The formulas of policy optimisation: pure functions on tensors; a mask is True where a token was sampled, and nothing else matters."""

from collections.abc import Callable

import torch
from torch import Tensor

FLAT = 1e-6  # a spread below this share of max(1, |mean|) is rounding noise: no preference, so exactly 0
WALL = 20.0  # log-ratios are clamped to +-WALL before exp: finite in fp32, and far outside any clip range
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def masked_mean(x: Tensor, mask: Tensor, denominator: Tensor | float | None = None) -> Tensor:
    """The sum of `x` where `mask`, over `denominator` (default: how many are True, at least 1); what is masked may be NaN or inf."""
    total = torch.where(mask, x, 0.0).sum()
    return total / (mask.sum().clamp(min=1) if denominator is None else denominator)


def alone(x: Tensor) -> Tensor:
    """What one process does where several would add their sums."""
    return x


def standardise(
    x: Tensor, mask: Tensor | None = None, ddof: int = 1, eps: float = 1e-6, reduce: Callable[[Tensor], Tensor] = alone
) -> Tensor:
    """(x - mean) / (std + eps) over the entries where `mask`, 0 elsewhere; in at least float32; flat input gives exactly 0.

    `reduce` adds a tensor of sums over processes, so that the statistics span them all.
    """
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    x = torch.where(mask, x, 0.0).to(torch.promote_types(x.dtype, torch.float32))
    count, total = reduce(torch.stack([mask.sum().to(x.dtype), x.sum()]))
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, x - mean, 0.0)
    std = (reduce(centred.square().sum()) / (count - ddof).clamp(min=1)).sqrt()
    return torch.where(std <= FLAT * mean.abs().clamp(min=1), 0.0, centred / (std + eps))


def _groups(x: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each entry of `x` (E,): its group's size, its distance from the group's mean, and the group's sum of squared distances."""
    names, number = group.unique(return_inverse=True)
    member = number[:, None] == torch.arange(len(names), device=x.device)  # sums by mask: exact in every matmul precision, in fixed order

    def total(y: Tensor) -> Tensor:
        return torch.where(member, y[:, None], 0.0).sum(0)[number]

    size = total(torch.ones_like(x))
    centred = x - total(x) / size
    return size, centred, total(centred.square())


def group_standardise(score: Tensor, group: Tensor, std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO's advantage (E,): distance from the mean of one's group, over its sample standard deviation + eps when `std`.

    A flat group gives exactly 0. So does a group of one: nothing to compare with (RAGEN passes the raw reward on; use ARPO for that).
    Shao et al. 2024 (arXiv 2402.03300); `std=False` is Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783).
    """
    centred, spread = _groups(score.to(torch.promote_types(score.dtype, torch.float32)), group)[1], group_std(score, group)
    return torch.where(spread == 0, 0.0, centred / (spread + eps) if std else centred)


def group_std(score: Tensor, group: Tensor) -> Tensor:
    """The sample standard deviation of each episode's group (E,); exactly 0 in a flat group and in a group of one."""
    x = score.to(torch.promote_types(score.dtype, torch.float32))
    size, centred, squares = _groups(x, group)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return torch.where(std <= FLAT * (x - centred).abs().clamp(min=1), 0.0, std)


def rloo(score: Tensor, group: Tensor) -> Tensor:
    """Leave-one-out advantage (E,): distance from the mean of the others of one's group; 0 in a group of one. arXiv 2402.14740."""
    x = score.to(torch.promote_types(score.dtype, torch.float32))
    size, centred, _ = _groups(x, group)
    return centred * size / (size - 1).clamp(min=1)


def spread(x: Tensor, episode: Tensor, mask: Tensor) -> Tensor:
    """One number per episode (E,) on every sampled token of its rows: (B, T), 0 where not `mask`."""
    return torch.where(mask, x[episode][:, None], 0.0)


def episode_sum(x: Tensor, mask: Tensor, episode: Tensor, count: int) -> Tensor:
    """The sum of `x` (B, T) where `mask` over all rows of each of `count` episodes: (count,)."""
    row = torch.where(mask, x, 0).sum(1)
    return row.new_zeros(count).index_add(0, episode, row)


def firsts(mask: Tensor, turn: Tensor) -> Tensor:
    """True at the first sampled token of each turn of a row (B, T); a turn's sampled tokens stand in one row, as `collate` lays them."""
    order = torch.arange(mask.shape[1], device=mask.device)
    latest = torch.where(mask, order, -1).cummax(1).values  # the last sampled token up to here
    before = torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], 1)
    return mask & ((before < 0) | (turn != turn.gather(1, before.clamp(min=0))))


def returns(reward: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each sampled token on (B, T); only sampled tokens count as steps."""
    return gae(reward, torch.zeros_like(reward), mask, gamma, 1.0)


def gae(reward: Tensor, value: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0, bootstrap: Tensor | None = None) -> Tensor:
    """Generalised advantage estimation over the sampled tokens of each row (B, T), stepping over all others (arXiv 1506.02438).

    A_t = r_t + gamma V_t' - V_t + gamma lam A_t', where t' is the next sampled token; after the last one V is `bootstrap` (B,), default 0.
    """
    reward, value = torch.where(mask, reward, 0.0), torch.where(mask, value, 0.0)
    ahead = torch.zeros_like(value[:, 0]) if bootstrap is None else bootstrap
    carry = torch.zeros_like(ahead)
    out = torch.zeros_like(value)
    for t in reversed(range(value.shape[1])):
        here = reward[:, t] + gamma * ahead - value[:, t] + gamma * lam * carry
        out[:, t] = torch.where(mask[:, t], here, 0.0)
        carry = torch.where(mask[:, t], here, carry)
        ahead = torch.where(mask[:, t], value[:, t], ahead)
    return out


def bi_level_gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    turn: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_gamma: float = 0.95,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """RAGEN's two-level GAE (B, T): `turn_gamma` discounts between turns, `gamma` between the tokens of one (arXiv 2504.20073).

    Over the turns' last tokens e_k: A_k = r_k + turn_gamma V(e_k+1) - V(e_k) + turn_gamma lam A_k+1, where r_k is the reward on e_k and
    V after the last turn is `bootstrap` (B,), default 0. Inside turn k plain GAE that ends at e_k with the reward A_k + V(e_k).
    `turn` (B, T) says which turn a sampled token belongs to.
    """
    reward, value = torch.where(mask, reward, 0.0), torch.where(mask, value, 0.0)
    high, ahead, carry = (torch.zeros_like(value[:, 0]) for _ in range(3))
    high_value = torch.zeros_like(high) if bootstrap is None else bootstrap
    latest = torch.full_like(turn[:, 0], -1)  # the turn of the sampled token to the right
    out = torch.zeros_like(value)
    for t in reversed(range(value.shape[1])):
        now = value[:, t]
        end = mask[:, t] & (turn[:, t] != latest)
        above = reward[:, t] + turn_gamma * high_value - now + turn_gamma * lam * high
        gain = torch.where(end, above + now, reward[:, t])
        here = gain - now + torch.where(end, 0.0, gamma * ahead + gamma * lam * carry)
        high_value, high = torch.where(end, now, high_value), torch.where(end, above, high)
        out[:, t] = torch.where(mask[:, t], here, 0.0)
        carry, ahead = torch.where(mask[:, t], here, carry), torch.where(mask[:, t], now, ahead)
        latest = torch.where(mask[:, t], turn[:, t], latest)
    return out


def turn_gae(
    reward: Tensor, value: Tensor, mask: Tensor, turn: Tensor, lam: float = 1.0, turn_gamma: float = 1.0, bootstrap: Tensor | None = None
) -> Tensor:
    """GAE with the turn as the step (B, T), the same for every sampled token of a turn; `turn` (B, T) says which it belongs to.

    A_k = r_k + turn_gamma V_k+1 - V_k + turn_gamma lam A_k+1: r_k the sum of the rewards in turn k, V_k the value at its first sampled
    token; after the last turn V is `bootstrap` (B,), default 0.
    """
    first = firsts(mask, turn)
    number = (first.cumsum(1) - 1).clamp(min=0)  # 0, 1, 2...: the turns of a row in a line
    paid = torch.zeros_like(value).scatter_add(1, number, torch.where(mask, reward, 0.0).to(value.dtype))
    worth = torch.zeros_like(value).scatter_add(1, number, torch.where(first, value, 0.0))
    there = torch.arange(mask.shape[1], device=mask.device) < first.sum(1, keepdim=True)
    return torch.where(mask, gae(paid, worth, there, turn_gamma, lam, bootstrap).gather(1, number), 0.0)


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """log(new / old) of the sampled tokens (B, T), exactly 0 elsewhere, clamped so that its exp is finite."""
    return torch.where(mask, new - old, 0.0).clamp(-WALL, WALL)


def clipped(ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Tensor:
    """PPO's loss per token: max(-A r, -A clip(r, 1-low, 1+high)) (arXiv 1707.06347); `high` > `low` is clip-higher (arXiv 2503.14476).

    `dual` (> 1) bounds the loss of a negative advantage by -A dual, however large the ratio (arXiv 1912.09729).
    """
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return loss if dual is None else torch.where(advantage < 0, torch.minimum(loss, -advantage * dual), loss)


def clips(ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Tensor:
    """True where a clip of `clipped` binds, so that the token gives no gradient."""
    below = (ratio < 1 - low) | (ratio > (torch.inf if dual is None else dual))
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & below)


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    *,
    tokens: float | Tensor | None = None,
    sequences: float | Tensor | None = None,
    length: Tensor | None = None,
    horizon: float = 1.0,
) -> Tensor:
    """One number from the loss per token (B, T). The denominators are arguments, so parts of a batch add up to the whole:

    token-mean: sum / `tokens`; seq-mean-token-mean: sum of sum_row / `length` (B,), over `sequences`; seq-mean-token-sum: sum /
    `sequences`; seq-mean-token-sum-norm: sum / (`sequences` * `horizon`), `horizon` a constant. Defaults are those of the rows given,
    rows without a sampled token not counted.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(AGGREGATIONS)}")
    row = torch.where(mask, loss, 0.0).sum(1)
    if mode == "token-mean":
        return row.sum() / (mask.sum().clamp(min=1) if tokens is None else tokens)
    sequences = mask.any(1).sum().clamp(min=1) if sequences is None else sequences
    if mode == "seq-mean-token-mean":
        row = row / (mask.sum(1) if length is None else length).clamp(min=1)
    return row.sum() / (sequences * (horizon if mode == "seq-mean-token-sum-norm" else 1.0))


def pack(mask: Tensor, episode: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each sampled token goes when every episode's tokens, over all its rows, stand in one line: (row, column, line, place).

    `x[row, column]` are the tokens of `x` (B, T) and `packed[line, place]` the same in (E, L). The order is by turn, then row, then column.
    """
    row, column = mask.nonzero(as_tuple=True)
    order = turn[row, column].argsort(stable=True)
    order = order[episode[row[order]].argsort(stable=True)]
    row, column = row[order], column[order]
    line = episode[row]
    count = line.bincount(minlength=1)
    place = torch.arange(len(line), device=line.device) - (count.cumsum(0) - count)[line]
    return row, column, line, place
