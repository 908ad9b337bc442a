"""Metrics against numbers worked by hand and from the literature."""

from collections import Counter
from itertools import combinations
from math import sqrt
from random import Random

import pytest
from scipy.stats import binomtest

from ragen_agent.metrics import difference, likeness, pass_at, shared, summarise, wilson
from ragen_agent.types import Reply, Trajectory, Turn


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe 1998 (single proportion), table I, the score method
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5, rel=0)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (3, 8), (256, 512), (94, 512), (512, 512)])
def test_wilson_as_scipy(successes, n):
    interval = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((interval.low, interval.high), abs=1e-6, rel=0)


def test_of_nothing_nothing_is_known():
    assert wilson(0, 0) == (0, 1)


def test_wilson_by_hand():
    """p = 1/2, n = 4, z = 2: centre 1/2, half-width (2 / 2) * sqrt(1/16 + 1/16) = 0.353553."""
    assert wilson(2, 4, z=2) == pytest.approx((0.5 - sqrt(1 / 8), 0.5 + sqrt(1 / 8)), abs=1e-12, rel=0)


@pytest.mark.parametrize("bad", [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(bad):
    with pytest.raises(ValueError, match="between 0 and n"):
        wilson(*bad)


@pytest.mark.parametrize(
    ("a", "n", "b", "m", "low", "high"),
    [
        (56, 70, 48, 80, 0.0524, 0.3339),  # Newcombe 1998 (two proportions), table II, method 10
        (9, 10, 3, 10, 0.1705, 0.8090),
        (5, 56, 0, 29, -0.0381, 0.1926),
        (10, 10, 0, 10, 0.6075, 1.0),
        (0, 10, 0, 10, -0.2775, 0.2775),
    ],
)
def test_difference(a, n, b, m, low, high):
    assert difference(a, n, b, m) == pytest.approx((low, high), abs=5e-5, rel=0)
    assert difference(b, m, a, n) == pytest.approx((-high, -low), abs=5e-5, rel=0)


def test_a_difference_of_nothing_is_refused():
    with pytest.raises(ValueError, match="both sides"):
        difference(0, 0, 1, 2)


@pytest.mark.parametrize(("k", "n", "c", "value"), [(1, 4, 1, 0.25), (2, 4, 1, 0.5), (2, 4, 2, 5 / 6), (3, 4, 2, 1.0), (4, 4, 0, 0.0)])
def test_pass_at(k, n, c, value):
    assert pass_at(k, n, c) == pytest.approx(value, abs=1e-12, rel=0)


def episode(seed, rewards, success, valid=True, ids=2, finish="stop", truncated=False):
    turns = []
    for i, reward in enumerate(rewards):
        info = {"success": success and i == len(rewards) - 1, "valid": valid, "moves": ["Up", "Up"] if valid else []}
        turns.append(Turn(Reply("", "", [0], [1] * ids, [-1.0] * ids, finish), "", reward, info))
    return Trajectory("e", seed, 0, "", {"rules": ""}, turns, not truncated, truncated, no_room=finish == "context")


EPISODES = [
    episode(1, [0.0, 1.0], True),
    episode(1, [-0.1], False, valid=False, ids=6, finish="length", truncated=True),
    episode(2, [0.5], False),
    episode(2, [0.5], False),
    episode(3, [0.0, 0.0, 0.1], False, finish="context", truncated=True),
]


def test_summarise_by_hand():
    row = summarise(EPISODES)
    low, high = wilson(1, 5)
    # returns 1, -.1, .5, .5, .1: mean .4; squared deviations .36, .25, .01, .01, .09 = .72; se = sqrt(.72 / 4 / 5)
    expected = {
        "episodes": 5,
        "success": 0.2,
        "success_low": low,
        "success_high": high,
        "truncated": 0.4,
        "return": 0.4,
        "return_se": sqrt(0.036),
        "turns": 8 / 5,
        "moves": 14 / 5,
        "tokens": 20 / 5,
        "valid": 7 / 8,
        "reply_tokens": 20 / 8,
        "cut": 1 / 8,
        "no_room": 1 / 5,
        "groups": 3,
        "group_std": (1.1 / sqrt(2) + 0) / 2,  # the group of one says nothing
        "flat_groups": 0.5,
        "pass_k": 0.5,
        "k": 2,
        "surprise": 1.0,
        "distinct": 0.5,  # groups 1 and 2: two replies and one
        # trigrams: (1, 1) is a reply of two, (1, 1, 1) four times in the reply of six; group 1 shares none, group 2 one of one
        "repetition": 1 / 3.5,
        "repetition_across": (6 - 1) / (4 * 8 / 2 - 3.5),  # (1, 1) four times: six pairs, one of them within group 2
    }
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, abs=1e-12, rel=0), name


def test_order_does_not_matter_and_an_episode_counts_once():
    assert summarise(EPISODES[::-1]) == pytest.approx(summarise(EPISODES), abs=1e-12, rel=0)
    assert summarise([EPISODES[0]])["success"] == 1 and "return_se" not in summarise([EPISODES[0]])


def test_returns_equal_but_for_rounding_are_flat():
    """.1 + .2 and .3 are one return."""
    assert summarise([episode(1, [0.1 + 0.2], False), episode(1, [0.3], False)])["flat_groups"] == 1


def test_groups_of_several_sizes():
    """k is the smallest size, 2. One win in 2: 1. One win in 3: 1 - C(2,2)/C(3,2) = 2/3. Their mean is 5/6."""
    row = summarise([episode(seed, [0.0], won) for seed, won in [(1, True), (1, False), (2, False), (2, True), (2, False)]])
    assert row["k"] == 2 and row["pass_k"] == pytest.approx(5 / 6, abs=1e-12, rel=0)


def test_no_episodes_is_an_error():
    with pytest.raises(ValueError, match="no episodes"):
        summarise([])


ABC, ABD, XYZ = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[ABC, ABC]], {"distinct": 0, "repetition": 1}),
        ([[ABC, XYZ]], {"distinct": 1, "repetition": 0}),
        ([[ABC, ABD]], {"distinct": 1, "repetition": 2 / 3}),  # 123 and 234 of 123, 234, 345
        ([[ABC, ABC, XYZ]], {"distinct": 0.5, "repetition": 3 / 7}),  # common 3; (3 + 3) / 2 + 2 * (3 + 1) / 2
        ([[ABC], [ABC]], {"repetition_across": 1}),
        ([[ABC, ABC], [XYZ]], {"distinct": 0, "repetition": 1, "repetition_across": 0}),
        ([[ABC, XYZ], [ABC, XYZ]], {"distinct": 1, "repetition": 0, "repetition_across": 0.5}),
        ([[[1], [1]], [[1, 2]]], {"distinct": 0, "repetition": 1, "repetition_across": 0}),  # short replies: one gram each
        ([[[1] * 4, [1] * 5]], {"distinct": 1, "repetition": 2 / 2.5}),  # a gram counts as often as it is there
        ([[], [ABC]], {}),
        ([], {}),
    ],
)
def test_likeness_by_hand(groups, expected):
    assert likeness(groups) == pytest.approx(expected, abs=1e-12, rel=0)


def test_what_pairs_share_is_counted_as_pair_by_pair():
    chance = Random(0)
    bags = [Counter(chance.choices(range(6), k=chance.randrange(9))) for _ in range(12)]
    common, size = shared(bags)
    assert common == sum((a & b).total() for a, b in combinations(bags, 2)) > 0
    assert size == sum((a.total() + b.total()) / 2 for a, b in combinations(bags, 2))


def test_only_first_replies_are_compared():
    """Later turns answer to boards of their own."""
    one, two = episode(1, [0.0, 0.0], False), episode(1, [0.0, 0.0], False)
    two.turns[1].reply = Reply("", "", [0], [9] * 5, [-1.0] * 5)
    assert summarise([one, two])["repetition"] == 1
    two.turns[0].reply = two.turns[1].reply
    assert summarise([one, two])["repetition"] == 0


def test_surprise_is_a_token_mean():
    """Two tokens of probability 1/e and six of 1/e^3: (2 + 18) / 8."""
    one, two = episode(1, [0.0], False), episode(2, [0.0], False, ids=6)
    two.turns[0].reply = two.turns[0].reply._replace(logprobs=[-3.0] * 6)
    assert summarise([one, two])["surprise"] == pytest.approx(20 / 8, abs=1e-12, rel=0)


def test_who_samples_no_tokens_has_no_surprise():
    row = summarise([episode(1, [0.0], False, ids=0), episode(1, [0.0], False, ids=0)])
    assert not row.keys() & {"surprise", "distinct", "repetition", "repetition_across"}
