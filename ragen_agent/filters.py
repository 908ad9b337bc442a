"""Which groups train: StarPO-S keeps the prompts whose outcome is uncertain, by the spread of the raw return within the group."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from math import exp, fsum, isfinite, nan, sqrt
from statistics import fmean
from typing import Any, NamedTuple

from ragen_agent.types import Trajectory

STRATEGIES = (  # s: a group's statistic; groups are gone through by s, the largest first, or the smallest
    "variance",  # the shortest list whose s^2 add up to share * their total: neither the scale nor the zero of the reward matters
    "top_k",  # int(share * groups seen), at least 1
    "top_k_abs",  # `share` is the number of groups
    "top_p",  # the shortest list whose s add up to share * their sum - EPS, ended by an s <= 0; empty where it does not get there
    "softmax",  # the nucleus of mass `share` under the softmax of s (of -s: smallest)
    "min_p",  # s >= share * the largest; smallest: s <= the smallest / share
)
STATISTICS = (
    "std",  # of the returns, of the sample: what RAGEN calls reward_variance
    "mean",  # of the returns: RAGEN's reward
    "sum",  # of the returns: RAGEN's reward_sum
    "entropy",  # mean over the episodes
    "entropy_variance",  # the standard deviation of the episodes' entropies, as RAGEN's
    "length",  # mean over the episodes
)
DIRECTIONS = ("largest", "smallest")
SCALINGS = ("none", "linear", "sqrt")  # of the loss: 1, the kept share of the episodes, its square root
FLAT = 1e-6  # a spread below this share of the batch's largest number is rounding noise; as a share it means the same at every scale
SAME = 1e-9  # statistics closer than this share of the largest are equal: what differs by rounding alone must not decide
ZERO = 1e-10  # RAGEN's bound of a mean, sum, entropy or length that counts as zero
EPS = 0.01  # RAGEN's tolerance of the linear top_p, in units of the statistic
Row = tuple[Hashable, float | None, float | None]  # an episode: its group, its return, and what the statistic looks at


class Kept(NamedTuple):
    """What a filter keeps, and what it saw. With `gather`, `mask` is of this process's episodes and all else of everybody's."""

    mask: list[bool]  # (E,) True: the episode trains; all False where nothing is worth training on
    groups: int  # kept
    of: int  # groups seen
    flat: int  # groups without spread: equal returns, or a single sound episode
    broken: int  # episodes dropped because their return (or the measure asked for) is missing, NaN or infinite
    spread: float  # mean standard deviation of the returns, over the groups with a sound episode
    scale: float = 1.0  # what the advantages are to be multiplied with
    empty: bool = False  # True: no group is kept, the caller skips the update


class Measures(NamedTuple):
    """What a filter can look at, a number per episode; NaN where it cannot be told."""

    reward: list[float]  # (E,) the raw return
    entropy: list[float]  # (E,) in nats a token
    length: list[float]  # (E,) sampled tokens


def measures(trajectories: Sequence[Trajectory]) -> Measures:
    """The return, entropy and length of each episode.

    The entropy is minus the mean logprob of the episode's sampled tokens: an unbiased estimate of the policy's, from one draw a token
    (RAGEN computes it from the 20 likeliest tokens). NaN: no token was sampled, some logprobs are missing, a turn has no reward.
    """
    made = Measures([], [], [])
    for trajectory in trajectories:
        said = [turn.reply for turn in trajectory.turns]
        length, logprobs = sum(len(reply.ids) for reply in said), [p for reply in said for p in reply.logprobs]
        made.reward.append(nan if any(turn.reward is None for turn in trajectory.turns) else trajectory.reward)
        made.entropy.append(-fmean(logprobs) if logprobs and len(logprobs) == length else nan)
        made.length.append(float(length))
    return made


def uncertain(
    score: Sequence[float | None],
    group: Sequence[Hashable],
    share: float = 0.9,
    strategy: str = "variance",
    drop_flat: bool = True,
    *,
    statistic: str = "std",
    direction: str = "largest",
    entropy: Sequence[float | None] | None = None,
    length: Sequence[float | None] | None = None,
    scaling: str = "none",
    gather: Callable[[list[Any]], list[Any]] | None = None,
) -> Kept:
    """Keep whole groups by a statistic of their episodes (RAGEN, arXiv 2504.20073 and 2604.06268); the names are explained above.

    `score` (E,): raw returns; `group` (E,): any hashable identity; `entropy`, `length` (E,): of `measures`, needed by their statistics.
    An episode with a number that is None, NaN or infinite is dropped and counted; its group goes on without it. `drop_flat` takes
    groups with s = 0 out first. Share 1 keeps all but by min_p. Equal s stay in the order of their first episodes. `gather` returns
    the concatenation of every process's list, by rank: all decide alike on all groups, each applies it to its own; every process must
    call, also one without episodes. Nothing left is an empty answer, not an error. Unknown names and shares: `ValueError`.
    """
    _check(share, strategy, statistic=(statistic, STATISTICS), direction=(direction, DIRECTIONS), scaling=(scaling, SCALINGS))
    measure = {"entropy": entropy, "entropy_variance": entropy, "length": length}.get(statistic, score)
    if measure is None:
        raise ValueError(f"statistic {statistic!r} needs the episodes' {statistic.removesuffix('_variance')}: see measures()")
    own = list(zip(group, score, measure, strict=True))
    rows = own if gather is None else gather(own)
    sound = [row for row in rows if _sound(row)]
    seen = len({row[0] for row in rows})
    scores = _statistics(sound, statistic, drop_flat)
    names = list(scores)
    kept = {names[i] for i in _choose(list(scores.values()), share, strategy, direction == "largest", seen)}
    mask = [row[0] in kept and _sound(row) for row in own]
    stds = _spreads(_by_group((name, value) for name, value, _ in sound)).values()
    ratio = sum(row[0] in kept for row in sound) / max(1, len(rows))
    scale = {"none": 1.0, "linear": ratio, "sqrt": sqrt(ratio)}[scaling]
    flat, broken = sum(std == 0 for std in stds), len(rows) - len(sound)
    return Kept(mask, len(kept), seen, flat, broken, fmean(stds) if stds else 0.0, scale, not kept)


def _check(share: float, strategy: str, **named: tuple[str, tuple[str, ...]]) -> None:
    for what, (name, known) in {"strategy": (strategy, STRATEGIES), **named}.items():
        if name not in known:
            raise ValueError(f"unknown filter {what} {name!r}; known: {', '.join(known)}")
    if strategy == "top_k_abs":
        if share < 1 or not float(share).is_integer():
            raise ValueError(f"the share of top_k_abs is a number of groups, 1 or more, not {share}")
    elif not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")


def _sound(row: Row) -> bool:
    """Whether both numbers of an episode are there and finite."""
    return all(value is not None and isfinite(value) for value in row[1:])


def _by_group(pairs: Iterable[tuple[Hashable, float | None]]) -> dict[Hashable, list[float]]:
    """Group -> the numbers of its episodes, in the order of the first of each; those that are missing are left out."""
    found: dict[Hashable, list[float]] = {}
    for name, value in pairs:
        if value is not None:
            found.setdefault(name, []).append(float(value))
    return found


def _spreads(groups: dict[Hashable, list[float]]) -> dict[Hashable, float]:
    """The sample standard deviation of each group; exactly 0 for a single number and where it is rounding noise."""
    noise = FLAT * max((abs(value) for values in groups.values() for value in values), default=0.0)
    stds = {name: _std(values) for name, values in groups.items()}
    return {name: std if std > noise else 0.0 for name, std in stds.items()}


def _std(values: list[float]) -> float:
    """Of the sample; `fsum` rounds once, so that the order of the episodes is no matter. (`statistics.stdev` takes 30 times as long.)"""
    mean = fmean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def _statistics(rows: list[Row], statistic: str, drop_flat: bool) -> dict[Hashable, float]:
    """Group -> s, in the order of their first sound episodes; without those where it is 0, if `drop_flat`."""
    groups = _by_group((name, value) for name, _, value in rows)
    if statistic in ("std", "entropy_variance"):
        found, zero = _spreads(groups), 0.0
    else:
        found, zero = {name: sum(values) if statistic == "sum" else fmean(values) for name, values in groups.items()}, ZERO
    return {name: value for name, value in found.items() if not drop_flat or abs(value) > zero}


def _order(keys: list[float]) -> list[int]:
    """The places of `keys`, largest first; what differs by rounding alone stays in the order of appearance."""
    order = sorted(range(len(keys)), key=lambda i: -keys[i])
    same = SAME * max(map(abs, keys), default=0.0)
    tier = [0] * len(keys)
    for before, after in pairwise(order):
        tier[after] = tier[before] + (keys[before] - keys[after] > same)
    return sorted(order, key=lambda i: (tier[i], i))


def _choose(scores: list[float], share: float, strategy: str, largest: bool, seen: int) -> list[int]:
    """The places of the `scores` to keep; `seen`: the groups there were before any was dropped."""
    if not scores:
        return []
    keys = scores if largest else [-score for score in scores]
    order = _order(keys)
    if strategy == "top_k_abs":
        return order[: int(share)]
    if strategy == "top_k":
        return order[: max(1, int(share * seen + SAME))]  # .29 of 100 is 29
    if strategy == "min_p":
        same = SAME * max(map(abs, scores))
        best = scores[order[0]]
        return [i for i in order if (scores[i] >= share * best - same if largest else scores[i] <= best / share + same)]
    if share == 1:
        return order
    if strategy == "top_p":
        return order[: _prefix([scores[i] for i in order], share * sum(scores) - EPS, positive=True) or 0]
    weights = [scores[i] ** 2 if strategy == "variance" else exp(keys[i] - keys[order[0]]) for i in order]
    return order[: _prefix(weights, share * sum(weights))]


def _prefix(weights: list[float], goal: float, positive: bool = False) -> int | None:
    """How many of the `weights`, from the first on, reach the `goal`, rounding aside; None: it is out of reach.

    `positive`: no weight is taken from the first one on that is not.
    """
    total, slack = 0.0, SAME * abs(goal)
    for place, weight in enumerate([*weights, 0.0]):
        if total >= goal - slack:
            return place
        if positive and weight <= 0:
            return None
        total += weight
    return None
