"""The uncertainty filter: whole groups, by the spread of the raw return, with RAGEN's numbers."""

import math
import random

import pytest

from ragen_agent.filters import Kept, uncertain

STDS = [0.5, 0.5, 0.4, 0.1, 0.0, 0.0, 0.0, 0.0]


def pairs(stds: list[float]) -> tuple[list[float], list[int]]:
    """Two episodes a group, whose sample standard deviation is as given."""
    score = [x for std in stds for x in (3.0, 3.0 + std * math.sqrt(2))]
    return score, [g for g in range(len(stds)) for _ in range(2)]


def groups(kept: Kept, group: list) -> list:
    return list(dict.fromkeys(g for g, k in zip(group, kept.mask, strict=True) if k))


@pytest.mark.parametrize(
    ("share", "strategy", "drop_flat", "wanted"),
    [
        (0.25, "top_k", True, [0, 1]),  # int(.25 * 8)
        (0.5, "top_k", True, [0, 1, 2, 3]),
        (0.3, "top_k", True, [0, 1]),
        (0.01, "top_k", True, [0]),  # at least one
        (0.75, "top_k", True, [0, 1, 2, 3]),  # no more than have any spread
        (0.75, "top_k", False, [0, 1, 2, 3, 4, 5]),  # ties in the order of the groups
        (0.9, "top_p", True, [0, 1, 2]),  # 1.4 >= .9 * 1.5 - .01
        (0.9, "top_p", False, [0, 1, 2]),
        (0.94, "top_p", True, [0, 1, 2]),  # 1.4 >= 1.41 - .01
        (0.95, "top_p", True, [0, 1, 2, 3]),
        (0.9, "softmax", False, list(range(8))),  # the first seven have .899
        (0.89, "softmax", False, list(range(7))),
        (0.9, "softmax", True, [0, 1, 2, 3]),
        (0.5, "min_p", True, [0, 1, 2]),
        (1.0, "top_p", True, [0, 1, 2, 3]),
        (1.0, "top_k", False, list(range(8))),
    ],
)
def test_numbers_of_ragen(share, strategy, drop_flat, wanted):
    score, group = pairs(STDS)
    kept = uncertain(score, group, share, strategy, drop_flat)
    assert groups(kept, group) == wanted
    assert (kept.groups, kept.of, kept.flat, kept.broken) == (len(wanted), 8, 4, 0)
    assert kept.spread == pytest.approx(1.5 / 8, abs=1e-6)


@pytest.mark.parametrize("strategy", ["top_k", "top_p", "softmax", "min_p"])
def test_order_of_episodes_and_names_of_groups_do_not_matter(strategy):
    score, group = pairs([0.1, 0.7, 0.3, 0.2, 0.0, 1.4])
    kept = {(g, s) for g, s, k in zip(group, score, uncertain(score, group, 0.5, strategy).mask, strict=True) if k}
    order = list(range(len(score)))
    random.Random(0).shuffle(order)
    shuffled = uncertain([score[i] for i in order], [("env", group[i]) for i in order], 0.5, strategy).mask
    assert {(group[i], score[i]) for i, k in zip(order, shuffled, strict=True) if k} == kept


def test_ragged_groups_are_kept_whole():
    score, group = [0, 1, 0, 5, 9, 0, 0, 0], ["a", "b", "a", "b", "b", "c", "c", "c"]
    assert uncertain(score, group, 0.34).mask == [False, True, False, True, True, False, False, False]


@pytest.mark.parametrize("strategy", ["top_k", "top_p", "softmax", "min_p"])
@pytest.mark.parametrize("score", [[1.0] * 4, [0.1 + 0.2, 0.3, 0.3, 0.3], [sum([0.1] * 10), 1.0, 1.0, 1.0]])
def test_nothing_uncertain_is_an_empty_answer(strategy, score):
    assert uncertain(score, [0, 0, 1, 1], 0.9, strategy) == Kept([False] * 4, 0, 2, 2, 0, 0.0)


@pytest.mark.parametrize(("strategy", "wanted"), [("top_k", 1), ("top_p", 0), ("softmax", 2), ("min_p", 0)])
def test_flat_groups_that_are_not_dropped(strategy, wanted):
    assert uncertain([1.0] * 4, [0, 0, 1, 1], 0.9, strategy, drop_flat=False).groups == wanted


def test_a_group_of_one_has_no_spread():
    assert uncertain([5.0, 0.0, 1.0], [0, 1, 1], 1.0).mask == [False, True, True]
    assert uncertain([5.0, 0.0, 1.0], [0, 1, 1], 1.0, drop_flat=False).mask == [True, True, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_return_drops_its_whole_group_and_is_counted(bad):
    kept = uncertain([0, 9, bad, 0, 1, 1], [0, 0, 0, 1, 1, 1], 1.0, drop_flat=False)
    assert kept.mask == [False] * 3 + [True] * 3 and (kept.groups, kept.of, kept.broken) == (1, 2, 1)
    assert uncertain([bad, 1], [0, 0], 1.0) == Kept([False, False], 0, 1, 0, 1, 0.0)


def test_no_episodes():
    assert uncertain([], [], 0.25) == Kept([], 0, 0, 0, 0, 0.0)


def test_a_share_is_not_lost_to_rounding():
    score, group = pairs([float(i) for i in range(1, 101)])
    assert uncertain(score, group, 0.29).groups == 29  # .29 * 100 is 28.999999999999996


@pytest.mark.parametrize(
    ("args", "told"), [((0.5, "std"), "top_k, top_p, softmax, min_p"), ((0.0,), "share"), ((1.5,), "share"), ((math.nan,), "share")]
)
def test_unknown_choices_are_errors(args, told):
    with pytest.raises(ValueError, match=told):
        uncertain([0, 1], [0, 0], *args)


def test_a_group_for_each_score():
    with pytest.raises(ValueError):
        uncertain([0, 1], [0])
