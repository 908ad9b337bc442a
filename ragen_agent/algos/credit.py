"""Who earned what: pure formulas that give credit by turn, by state and by kind of world; E episodes of at most K turns."""

from collections.abc import Callable

import torch
from torch import Tensor

from ragen_agent.algos import functional as F


def standing(
    x: Tensor, key: Tensor, std: bool = True, eps: float = 1e-6, reduce: Callable[[Tensor], Tensor] = F.alone, ddof: int = 1
) -> Tensor:
    """How far each of `x` (N,) is from the mean of those with the same `key` (N,), over their sample std + eps when `std`.

    Keys are integers >= 0. Flat or alone gives exactly 0. The same numbers as `functional.group_standardise`, in memory that grows
    with N instead of N times the keys, and over all processes when `reduce` adds over them; then equal keys must mean the same on each.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    names = int(reduce(key.max() + 1 if len(key) else key.new_zeros(())))  # a sum over processes: at least what any of them has

    def total(y: Tensor) -> Tensor:
        return reduce(y.new_zeros(names).index_add(0, key, y))[key]

    size = total(torch.ones_like(x))
    mean = total(x) / size
    centred = x - mean
    spread = (total(centred.square()) / (size - ddof).clamp(min=1)).sqrt()
    flat = spread <= F.FLAT * mean.abs().clamp(min=1)
    return torch.where(flat, 0.0, centred / (spread + eps) if std else centred)


def per_turn(x: Tensor, sampled: Tensor, episode: Tensor, turn: Tensor, episodes: int) -> tuple[Tensor, Tensor]:
    """Sums of `x` (B, T) over the tokens sampled in each turn (E, K), and True where something was sampled (E, K)."""
    row, column = sampled.nonzero(as_tuple=True)
    when = turn[row, column]
    turns = int(when.max()) + 1 if len(when) else 1
    place = episode[row] * turns + when
    paid = x.new_zeros(episodes * turns).index_add(0, place, x[row, column])
    there = sampled.new_zeros(episodes * turns).index_fill(0, place, True)
    return paid.view(episodes, turns), there.view(episodes, turns)


def of_turn(x: Tensor, sampled: Tensor, episode: Tensor, turn: Tensor, shape: tuple[int, int]) -> Tensor:
    """What the sampled tokens of a turn have in common, (B, T) -> (E, K) = `shape`; -1 where nothing was sampled."""
    row, column = sampled.nonzero(as_tuple=True)
    return x.new_full(shape, -1).index_put((episode[row], turn[row, column]), x[row, column])


def on_tokens(x: Tensor, sampled: Tensor, episode: Tensor, turn: Tensor) -> Tensor:
    """One number per turn (E, K) on each token sampled in it: (B, T), 0 elsewhere."""
    return torch.where(sampled, x[episode[:, None], torch.where(sampled, turn, 0)], 0.0)


def discounted(paid: Tensor, gamma: float = 1.0) -> Tensor:
    """G_k = sum over j >= k of gamma^(j - k) r_j, of the turns' rewards (E, K); the clock is the number of the turn."""
    out, ahead = torch.zeros_like(paid), torch.zeros_like(paid[:, 0])
    for k in reversed(range(paid.shape[1])):
        ahead = out[:, k] = paid[:, k] + gamma * ahead
    return out


def token_returns(reward: Tensor, sampled: Tensor, episode: Tensor, turn: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of an episode's rewards from each sampled token on (B, T), through all rows of the episode; 0 elsewhere."""
    row, column, line, place = F.pack(sampled, episode, turn)
    if not len(row):
        return torch.zeros_like(reward)
    shape = (int(line.max()) + 1, int(place.max()) + 1)
    packed = reward.new_zeros(shape).index_put((line, place), reward[row, column])
    taken = sampled.new_zeros(shape).index_put((line, place), sampled[row, column])
    return torch.zeros_like(reward).index_put((row, column), F.returns(packed, taken, gamma)[line, place])


def by_state(paid: Tensor, there: Tensor, state: Tensor, gamma: float = 1.0, std: bool = True) -> Tensor:
    """GiGPO's step advantage (E, K): a turn's discounted return among all turns that began in the same `state` (E, K).

    A state that was met once gives 0. Feng et al. 2025 (arXiv 2505.10978).
    """
    gain = discounted(paid, gamma)
    return torch.zeros_like(gain).masked_scatter(there, standing(gain[there], state[there], std).to(gain.dtype))


def by_turn(paid: Tensor, there: Tensor, group: Tensor, lam: float = 1.0, std: bool = True) -> Tensor:
    """MT-GRPO's advantage (E, K), generalised to any number of turns (arXiv 2505.11821 has two).

    The outcome of an episode is the reward of its last turn; O is its standing in the group. Before the last turn A_k = S_k + lam O,
    where S_k is the standing of the turn's reward among the group's episodes that have a turn k; in the last turn A = O.
    """
    turns = torch.arange(paid.shape[1], device=paid.device)
    number = group[:, None] * len(turns) + turns
    played = there.any(1)
    last = torch.where(there, turns, -1).max(1).values
    outcome = paid.gather(1, last.clamp(min=0)[:, None]).squeeze(1)
    final = torch.zeros_like(outcome).masked_scatter(played, standing(outcome[played], group[played], std).to(paid.dtype))[:, None]
    step = torch.zeros_like(paid).masked_scatter(there, standing(paid[there], number[there], std).to(paid.dtype))
    return torch.where(there, torch.where(turns == last[:, None], final, step + lam * final), 0.0)


def overlong(length: Tensor, limit: float, cache: float) -> Tensor:
    """DAPO's soft punishment of a reply's length: 0 up to limit - cache, falling in a line to -1 at `limit`, and -1 beyond it.

    arXiv 2503.14476, equation 13.
    """
    return ((limit - cache - length) / cache).clamp(-1, 0)
