"""Episodes become numbers: rates with their intervals, returns, lengths, and how much the episodes of a group differ."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import comb, isfinite, sqrt
from statistics import fmean, stdev

from ragen_agent.types import Trajectory

Z = 1.959964  # two-sided 95 %
FLAT = 1e-6  # a group whose returns spread less than this has nothing to say about its policy
GRAM = 3  # tokens in a row that count as a phrase in `repetition`


def wilson(successes: int, n: int, z: float = Z) -> tuple[float, float]:
    """The score interval (low, high) of a proportion (Wilson 1927). Of no trials nothing is known: (0, 1)."""
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n, not {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def difference(a: int, n: int, b: int, m: int, z: float = Z) -> tuple[float, float]:
    """The interval (low, high) of a/n - b/m for independent samples: Newcombe's hybrid score interval (1998, method 10).

    Sampling players on the same levels are treated as independent; where pairs agree, the true interval is narrower. No trials: ValueError.
    """
    if n == 0 or m == 0:
        raise ValueError(f"a difference needs trials on both sides, not {n} and {m}")
    (low_a, high_a), (low_b, high_b) = wilson(a, n, z), wilson(b, m, z)
    p, q = a / n, b / m
    return p - q - sqrt((p - low_a) ** 2 + (high_b - q) ** 2), p - q + sqrt((high_a - p) ** 2 + (q - low_b) ** 2)


def pass_at(k: int, n: int, successes: int) -> float:
    """The chance that k of n episodes, drawn without replacement, hold a success: the unbiased pass@k (Chen et al. 2021)."""
    if not (1 <= k <= n and 0 <= successes <= n):
        raise ValueError(f"needs 1 <= k <= n and 0 <= successes <= n, not k={k}, n={n}, successes={successes}")
    return 1 - comb(n - successes, k) / comb(n, k)


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The numbers of a set of episodes, each of which counts once; no episodes: ValueError.

    `episodes`, `success` with its Wilson interval `success_low`, `success_high`; `truncated` (cut by a limit) and `no_room` (by a full
    context); of the returns that are finite `return`, the mean, with its standard error `return_se` (absent for one); per episode
    `turns`, `moves` (carried out) and `tokens` (sampled); per turn `valid` (well-formed), `reply_tokens` and `cut` (by max_tokens); per
    token `surprise`, the mean of -logprob as sampled, an unbiased estimate of the policy's token entropy (absent where no logprob is
    known); and what `spread` says of the groups.
    """
    if not trajectories:
        raise ValueError("no episodes to summarise")
    n = len(trajectories)
    wins = sum(t.success for t in trajectories)
    low, high = wilson(wins, n)
    returns = [t.reward for t in trajectories if isfinite(t.reward)]
    row = {"episodes": n, "success": wins / n, "success_low": low, "success_high": high}
    row |= {
        "no_room": fmean(t.no_room for t in trajectories),
        "truncated": fmean(t.truncated for t in trajectories),
    }
    if returns:
        row["return"] = fmean(returns)
    if len(returns) > 1:
        row["return_se"] = stdev(returns) / sqrt(len(returns))
    return row | _lengths(trajectories) | spread(trajectories)


def spread(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How the episodes of a group differ; a group is what shares `Trajectory.level`.

    `groups`; and where some group has two episodes or more: `group_std` (the mean over those of the sample standard deviation of the
    returns that are finite), `flat_groups` (the share of them whose returns are all equal: they train nothing), and `pass_k`, the mean
    pass@k for `k`, the size of the smallest; and where their first replies have tokens, what `likeness` says of those.
    """
    groups: dict[tuple[str, int], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.level].append(trajectory)
    row: dict[str, float] = {"groups": len(groups)}
    several = [group for group in groups.values() if len(group) > 1]
    if several:
        sound = [[t.reward for t in group if isfinite(t.reward)] for group in several]
        k = min(map(len, several))
        if returns := [r for r in sound if len(r) > 1]:
            row["group_std"] = fmean(map(stdev, returns))
            row["flat_groups"] = fmean(max(r) - min(r) < FLAT for r in returns)
        row["pass_k"] = fmean(pass_at(k, len(group), sum(t.success for t in group)) for group in several)
        row["k"] = k
    return row | likeness([[t.turns[0].reply.ids for t in group if t.turns and t.turns[0].reply.ids] for group in groups.values()])


def likeness(groups: Sequence[Sequence[Sequence[int]]], n: int = GRAM) -> dict[str, float]:
    """How alike the first replies (token ids) of the episodes of a group are: they all answer the same words. All in [0, 1].

    `distinct`: the mean over groups of two replies or more of (different replies - 1) / (replies - 1); 0: one reply, 1: no two equal.
    `repetition`: of pairs within a group, the n-grams that the two have in common over the n-grams of one, both as sums over all pairs
    (`shared`); 0: nothing in common, 1: equal. `repetition_across`: the same of pairs from different groups, so of replies to different
    words, which a high success does not explain. A reply shorter than n is one gram. What no pair speaks of is absent.
    """
    bags = [[_grams(ids, n) for ids in group] for group in groups]
    several = [group for group in groups if len(group) > 1]
    row = {"distinct": fmean((len(set(map(tuple, g))) - 1) / (len(g) - 1) for g in several)} if several else {}
    parts = [shared(group) for group in bags]
    inside = sum(common for common, _ in parts), sum(size for _, size in parts)
    common, size = shared([bag for group in bags for bag in group])
    if inside[1]:
        row["repetition"] = inside[0] / inside[1]
    if size > inside[1]:
        row["repetition_across"] = (common - inside[0]) / (size - inside[1])
    return row


def shared(bags: Sequence[Counter]) -> tuple[float, float]:
    """Over all pairs of bags: the sum of what the two have in common, and the sum of their mean sizes. Linear in the bags' sizes."""
    held: dict[object, list[int]] = defaultdict(list)
    for bag in bags:
        for gram, count in bag.items():
            held[gram].append(count)
    common = sum(count * after for counts in held.values() for after, count in enumerate(sorted(counts, reverse=True)))
    return common, (len(bags) - 1) * sum(bag.total() for bag in bags) / 2


def _grams(ids: Sequence[int], n: int) -> Counter:
    return Counter(tuple(ids[i : i + n]) for i in range(max(1, len(ids) - n + 1)))


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    n = len(trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    tokens = sum(len(turn.reply.ids) for turn in turns)
    row = {"turns": len(turns) / n, "moves": sum(len(turn.info["moves"]) for turn in turns) / n, "tokens": tokens / n}
    row["valid"] = sum(bool(turn.info["valid"]) for turn in turns) / max(1, len(turns))
    if turns:
        row["reply_tokens"] = tokens / len(turns)
        row["cut"] = fmean(turn.reply.finish == "length" for turn in turns)
    if logprobs := [value for turn in turns for value in turn.reply.logprobs]:
        row["surprise"] = 0.0 - fmean(logprobs)
    return row
