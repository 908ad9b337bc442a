"""Numbers over seeds: intervals by Student's t, paired tests, and their correction for being several."""

from collections.abc import Sequence
from math import isnan, nan, sqrt
from statistics import fmean, stdev


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) at 95 % by Student's t; one value has no interval (NaN), none no mean either."""
    from scipy.stats import t

    n = len(values)
    if n < 2:
        return (values[0] if n else nan), nan, nan
    mean, half = fmean(values), float(t.ppf(0.975, n - 1)) * stdev(values) / sqrt(n)
    return mean, mean - half, mean + half


def t_test(values: Sequence[float]) -> float:
    """The two-sided p of the mean being 0; NaN for fewer than two values. Values all alike: 1 where they are 0, else 0."""
    from scipy.stats import t

    if len(values) < 2:
        return nan
    mean, error = fmean(values), stdev(values) / sqrt(len(values))
    if error == 0:
        return float(mean == 0)
    return float(2 * t.sf(abs(mean) / error, len(values) - 1))


def holm(values: Sequence[float]) -> list[float]:
    """Each p corrected for there being several (Holm 1979), in the order given; NaN stays and counts for nothing."""
    order = sorted((i for i, p in enumerate(values) if not isnan(p)), key=lambda i: values[i])
    made, most = [nan] * len(values), 0.0
    for place, i in enumerate(order):
        most = max(most, min(1.0, (len(order) - place) * values[i]))
        made[i] = most
    return made
