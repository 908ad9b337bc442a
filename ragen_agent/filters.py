"""Which groups train: StarPO-S keeps the prompts whose outcome is uncertain, by the spread of the raw return within the group."""

from collections.abc import Hashable, Sequence
from math import exp, isfinite
from statistics import fmean, stdev
from typing import NamedTuple

FLAT = 1e-6  # as in the advantages: a spread below this share of max(1, |mean|) is rounding noise
STRATEGIES = ("top_k", "top_p", "softmax", "min_p")
EPS = 0.01  # RAGEN's tolerance of the linear top_p


class Kept(NamedTuple):
    """What a filter keeps, and what it dropped before it looked: all counts are of groups."""

    mask: list[bool]  # (E,) True: the episode trains; all False where nothing is worth training on
    groups: int  # kept
    of: int  # seen
    flat: int  # without spread: equal returns, or a single episode
    broken: int  # with a return that is NaN or infinite; never kept
    spread: float  # mean standard deviation within the groups that are not broken


def uncertain(
    score: Sequence[float],
    group: Sequence[Hashable],
    share: float = 0.25,
    strategy: str = "top_k",
    drop_flat: bool = True,
) -> Kept:
    """Keep whole groups by the sample standard deviation of their raw returns (RAGEN, arXiv 2504.20073), the largest first.

    `score` (E,) and `group` (E,), any hashable identity. Strategies: top_k, int(share * groups seen), at least 1; top_p, the
    shortest list whose spreads add up to share * their sum - 0.01; softmax, the nucleus of mass `share` under their softmax; min_p,
    all with at least `share` times the largest. Share 1 keeps all. `drop_flat` takes groups without spread out first. Equal spreads
    stay in the order of their first episodes. Nothing left is an empty answer, not an error: the caller skips the update.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown filter strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    members: dict[Hashable, list[float]] = {}
    for value, name in zip(score, group, strict=True):
        members.setdefault(name, []).append(float(value))
    sound = {name: _spread(values) for name, values in members.items() if all(map(isfinite, values))}
    flat = [name for name, std in sound.items() if std == 0]
    left = [name for name in sound if not (drop_flat and sound[name] == 0)]
    left.sort(key=lambda name: -sound[name])
    wanted = len(left) if share == 1 else _prefix([sound[name] for name in left], share, strategy, len(members))
    kept = set(left[:wanted])
    mask = [name in kept for name in group]
    return Kept(mask, len(kept), len(members), len(flat), len(members) - len(sound), fmean(sound.values()) if sound else 0.0)


def _spread(values: list[float]) -> float:
    """The sample standard deviation; exactly 0 for one value and where it is rounding noise."""
    std = stdev(values) if len(values) > 1 else 0.0
    return std if std > FLAT * max(1.0, abs(fmean(values))) else 0.0


def _prefix(spreads: list[float], share: float, strategy: str, groups: int) -> int:
    """How many of the `spreads`, largest first, to keep."""
    if strategy == "top_k":
        return max(1, int(share * groups + 1e-9))  # .29 of 100 is 29
    if strategy == "min_p":
        return sum(std > 0 and std >= share * spreads[0] for std in spreads)
    if strategy == "top_p":
        weights, goal = spreads, share * sum(spreads) - EPS
    else:
        weights = [exp(std - spreads[0]) for std in spreads]
        goal = share * sum(weights)
    total = 0.0
    for place, weight in enumerate(weights):
        if weight <= 0:
            return place
        total += weight
        if total >= goal:
            return place + 1
    return len(weights)
