"""The filter: whole groups, by a statistic of their episodes, with numbers worked by hand and RAGEN's."""

import math
import random
from functools import partial

import pytest

from ragen_agent.filters import DIRECTIONS, SCALINGS, STATISTICS, STRATEGIES, Kept, Measures, measures, uncertain
from ragen_agent.types import Reply, Trajectory, Turn

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
        (2, "top_k_abs", True, [0, 1]),
        (9, "top_k_abs", True, [0, 1, 2, 3]),
        (9, "top_k_abs", False, list(range(8))),
        (0.37, "variance", True, [0]),  # the variances .25 .25 .16 .01 add up to .67, of which .25 is .3731
        (0.38, "variance", True, [0, 1]),
        (0.98, "variance", True, [0, 1, 2]),  # .66 / .67 = .9851
        (0.99, "variance", False, [0, 1, 2, 3]),
        (1.0, "variance", False, list(range(8))),
        (1.0, "min_p", True, [0, 1]),
    ],
)
def test_numbers_of_ragen(share, strategy, drop_flat, wanted):
    score, group = pairs(STDS)
    kept = uncertain(score, group, share, strategy, drop_flat)
    assert groups(kept, group) == wanted
    assert (kept.groups, kept.of, kept.flat, kept.broken) == (len(wanted), 8, 4, 0)
    assert kept.spread == pytest.approx(1.5 / 8, abs=1e-6)


# Four groups whose statistics are told apart by hand:  return       entropy     length
WORLD = {  #                                             mean  sum  std   mean  std   mean
    "A": ([0, 2], [1, 3], [10, 20]),  #                     1    2  1.41  2    1.41   15
    "B": ([3] * 5, [0.5] * 5, [4] * 5),  #                  3   15  0      .5  0       4
    "C": ([4, 8], [3, 3], [8, 8]),  #                       6   12  2.83  3    0       8
    "D": ([-1, -2, -3], [0, 1, 2], [2, 2, 2]),  #          -2   -6  1     1    1       2
}
KEPT = {  # statistic: strategy: (largest first, smallest first), at share .5, of top_k_abs one group
    "std": {
        "variance": ("C", "ACD"),  # of 2 + 8 + 1 = 11, the goal is 5.5: 8 | 1, 3, 11
        "top_k": ("AC", "AD"),
        "top_k_abs": ("C", "D"),
        "top_p": ("C", "ACD"),  # goal .5 * 5.2426 - .01 = 2.6113: 2.8284 | 1, 2.4142, 5.2426
        "softmax": ("C", "D"),  # 1 of 1 + .2431 + .1607 | 1 of 1 + .6609 + .1607
        "min_p": ("AC", "AD"),  # 1.4142 | 2
    },
    "mean": {
        "variance": ("C", "ABCD"),  # of 1 + 9 + 36 + 4 = 50: 36 | 4, 5, 14, 50
        "top_k": ("BC", "AD"),
        "top_k_abs": ("C", "D"),
        "top_p": ("C", ""),  # goal 3.99: 6 | -2 ends it before
        "softmax": ("C", "D"),
        "min_p": ("BC", ""),  # 3 | -4
    },
    "sum": {
        "variance": ("B", "ABCD"),  # of 4 + 225 + 144 + 36 = 409: 225 | 36, 40, 184, 409
        "top_k": ("BC", "AD"),
        "top_k_abs": ("B", "D"),
        "top_p": ("B", ""),  # goal 11.49: 15
        "softmax": ("B", "D"),
        "min_p": ("BC", ""),  # 7.5 | -12
    },
    "entropy": {
        "variance": ("C", "ABCD"),  # of 4 + .25 + 9 + 1 = 14.25: 9 | .25, 1.25, 5.25, 14.25
        "top_k": ("AC", "BD"),
        "top_k_abs": ("C", "B"),
        "top_p": ("AC", "ABD"),  # goal 3.24: 3, 5 | .5, 1.5, 3.5
        "softmax": ("C", "B"),  # 1 of 1.5853 | 1 of 1.9117
        "min_p": ("AC", "BD"),  # 1.5 | 1
    },
    "entropy_variance": {
        "variance": ("A", "AD"),  # of 2 + 1: 2 | 1, 3
        "top_k": ("AD", "AD"),
        "top_k_abs": ("A", "D"),
        "top_p": ("A", "AD"),  # goal 1.1971: 1.4142 | 1, 2.4142
        "softmax": ("A", "D"),  # 1 of 1.6609
        "min_p": ("AD", "AD"),  # .7071 | 2
    },
    "length": {
        "variance": ("A", "ABCD"),  # of 225 + 16 + 64 + 4 = 309: 225 | 4, 20, 84, 309
        "top_k": ("AC", "BD"),
        "top_k_abs": ("A", "D"),
        "top_p": ("A", "ABCD"),  # goal 14.49: 15 | 2, 6, 14, 29
        "softmax": ("A", "D"),
        "min_p": ("AC", "BD"),  # 7.5 | 4
    },
}


def world() -> tuple[list[str], list[float], list[float], list[float]]:
    """The episodes of WORLD, one group after the other: group, return, entropy, length."""
    rows = [(name, *row) for name, columns in WORLD.items() for row in zip(*columns, strict=True)]
    names, score, entropy, length = (list(column) for column in zip(*rows, strict=True))
    return names, score, entropy, length


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_strategy_with_every_statistic_both_ways(statistic, strategy, direction):
    names, score, entropy, length = world()
    share = 1 if strategy == "top_k_abs" else 0.5
    kept = uncertain(score, names, share, strategy, statistic=statistic, direction=direction, entropy=entropy, length=length)
    wanted = KEPT[statistic][strategy][DIRECTIONS.index(direction)]
    assert sorted(groups(kept, names)) == list(wanted)
    assert (kept.groups, kept.of, kept.flat, kept.broken, kept.empty) == (len(wanted), 4, 1, 0, not wanted)
    assert kept.spread == pytest.approx((3 * math.sqrt(2) + 1) / 4, abs=1e-6)  # always of the returns


@pytest.mark.parametrize(
    ("statistic", "strategy", "direction", "wanted"),
    [
        ("std", "variance", "smallest", [0, 1, 2, 3]),  # of 5, the goal is 2.5: 0, 0, 1, 5
        ("std", "top_k", "smallest", [0, 1]),  # int(.5 * 4)
        ("std", "top_p", "smallest", []),  # a flat group ends it
        ("std", "min_p", "smallest", [0, 1]),  # at most 0 / .5
        ("std", "softmax", "largest", [2, 3]),  # weights 1, .3679, .1353, .1353: at .7 the goal is 1.147
        ("mean", "top_p", "smallest", []),
    ],
)
def test_zeros_that_are_not_dropped(statistic, strategy, direction, wanted):
    score, group = pairs([0.0, 0.0, 1.0, 2.0])
    share = 0.7 if strategy == "softmax" else 0.5
    score = [x - 3 for x in score] if statistic == "mean" else score
    assert sorted(groups(uncertain(score, group, share, strategy, False, statistic=statistic, direction=direction), group)) == wanted


@pytest.mark.parametrize(("statistic", "dropped"), [("mean", "Z"), ("sum", "Z"), ("entropy", "Y"), ("length", "Z"), ("std", "Y")])
def test_a_group_is_dropped_whose_statistic_is_zero(statistic, dropped):
    score, group, entropy, length = [-1, 1, 2, 2], ["Z", "Z", "Y", "Y"], [1, 1, 0, 0], [0, 0, 1, 1]
    kept = uncertain(score, group, 1.0, statistic=statistic, entropy=entropy, length=length)
    assert groups(kept, group) == ["Y" if dropped == "Z" else "Z"]


# -- laws over random returns ------------------------------------------------------------------------------------------------

SHARES = {"top_k_abs": [1, 2, 3, 5]}


def shares(strategy: str) -> list[float]:
    return SHARES.get(strategy, [0.1, 0.3, 0.5, 0.8, 0.95, 1.0])


def drawn(seed: int) -> tuple[list[float], list[int]]:
    """Nine groups of 2 to 6 episodes, of wins and losses (many ties) or of real numbers."""
    rng = random.Random(seed)
    group = [g for g in range(9) for _ in range(rng.randint(2, 6))]
    return [rng.gauss(0, 2) if seed % 2 else float(rng.random() < 0.3) for _ in group], group


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_order_of_episodes_and_names_of_groups_do_not_matter(strategy, seed):
    score, group = drawn(2 * seed + 1)  # without ties: those go by order
    share = shares(strategy)[2]
    kept = {(g, s) for g, s, k in zip(group, score, uncertain(score, group, share, strategy).mask, strict=True) if k}
    order = list(range(len(score)))
    random.Random(seed).shuffle(order)
    shuffled = uncertain([score[i] for i in order], [("env", group[i]) for i in order], share, strategy).mask
    assert {(group[i], score[i]) for i, k in zip(order, shuffled, strict=True) if k} == kept


@pytest.mark.parametrize("strategy", ["variance", "top_k", "top_k_abs", "min_p"])
@pytest.mark.parametrize(("scale", "shift"), [(11, -1), (-3, 0.1), (1e-3, 7), (1e4, -0.3), (0.1, 0.2)])
def test_the_unit_and_the_zero_of_the_reward_do_not_matter(strategy, scale, shift):
    for seed in range(40):
        score, group = drawn(seed)
        for share in shares(strategy):
            there = uncertain([scale * x + shift for x in score], group, share, strategy)
            assert there.mask == uncertain(score, group, share, strategy).mask


def test_a_tiny_unit_does_not_matter_to_the_share_of_variance():
    score, group = drawn(4)
    assert uncertain([1e-12 * x for x in score], group, 0.8).mask == uncertain(score, group, 0.8).mask


def test_the_unit_matters_to_top_p():
    score, group = pairs([0.5, 0.5, 0.4, 0.1])
    assert uncertain(score, group, 0.9, "top_p").groups == 3
    assert uncertain([x / 1000 for x in score], group, 0.9, "top_p").groups == 0  # its .01 is more than their sum


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_share_never_keeps_less(strategy):
    for seed in range(40):
        score, group = drawn(seed)
        masks = [uncertain(score, group, share, strategy).mask for share in shares(strategy)]
        masks = masks[::-1] if strategy == "min_p" else masks  # whose share is a bar
        assert all(a <= b for less, more in zip(masks, masks[1:], strict=False) for a, b in zip(less, more, strict=True))
        assert masks[0] != masks[-1]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_share_of_variance_is_kept_and_no_group_too_many(share):
    for seed in range(40):
        score, group = drawn(seed)
        kept = uncertain(score, group, share)
        chosen = groups(kept, group)
        every = {g: [s for s, h in zip(score, group, strict=True) if h == g] for g in set(group)}
        variances = {g: sum((x - sum(v) / len(v)) ** 2 for x in v) / (len(v) - 1) for g, v in every.items()}
        goal, parts = share * sum(variances.values()), [variances[g] for g in chosen]
        assert sum(parts) >= goal - 1e-6 > sum(parts) - min(parts) - 2e-6
        assert min(parts) >= max([v for g, v in variances.items() if g not in chosen], default=0) - 1e-6


# -- edges -------------------------------------------------------------------------------------------------------------------


def test_ragged_groups_are_kept_whole():
    score, group = [0, 1, 0, 5, 9, 0, 0, 0], ["a", "b", "a", "b", "b", "c", "c", "c"]
    assert uncertain(score, group, 0.34).mask == [False, True, False, True, True, False, False, False]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("score", [[1.0] * 4, [0.1 + 0.2, 0.3, 0.3, 0.3], [sum([0.1] * 10), 1.0, 1.0, 1.0], [0.0] * 4])
def test_nothing_uncertain_is_an_empty_answer(strategy, score):
    share = 1 if strategy == "top_k_abs" else 0.9
    assert uncertain(score, [0, 0, 1, 1], share, strategy) == Kept([False] * 4, 0, 2, 2, 0, 0.0, 1.0, True)


@pytest.mark.parametrize(("strategy", "wanted"), [("variance", 0), ("top_k", 1), ("top_p", 0), ("softmax", 2), ("min_p", 2)])
def test_flat_groups_that_are_not_dropped(strategy, wanted):
    assert uncertain([1.0] * 4, [0, 0, 1, 1], 0.9, strategy, drop_flat=False).groups == wanted


def test_a_group_of_one_has_no_spread():
    assert uncertain([5.0, 0.0, 1.0], [0, 1, 1], 1.0).mask == [False, True, True]
    assert uncertain([5.0, 0.0, 1.0], [0, 1, 1], 1.0, drop_flat=False).mask == [True, True, True]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_broken_return_drops_its_episode_and_not_its_group(bad):
    kept = uncertain([0, 9, bad, 0, 1, 1], [0, 0, 0, 1, 1, 1], 1.0)
    assert kept == Kept([True, True, False, True, True, True], 2, 2, 0, 1, pytest.approx((9 / math.sqrt(2) + math.sqrt(1 / 3)) / 2))
    left = uncertain([bad, 1, 0, 1], [0, 0, 1, 1], 1.0)  # alone, an episode has no spread
    assert (left.mask, left.groups, left.flat, left.broken) == ([False, False, True, True], 1, 1, 1)
    assert uncertain([bad, bad], [0, 0], 1.0) == Kept([False, False], 0, 1, 0, 2, 0.0, 1.0, True)


def test_a_broken_measure_drops_its_episode_where_it_is_looked_at():
    score, group, entropy = [0, 1, 0, 1], [0, 0, 1, 1], [1.0, math.nan, 1.0, None]
    assert uncertain(score, group, 1.0, statistic="entropy", entropy=entropy).mask == [True, False, True, False]
    assert uncertain(score, group, 1.0, entropy=entropy).mask == [True] * 4


@pytest.mark.parametrize(("scaling", "wanted"), [("none", 1.0), ("linear", 0.25), ("sqrt", 0.5)])
def test_loss_is_scaled_by_the_share_of_episodes_that_is_kept(scaling, wanted):
    score, group = [0, 4, 0, 1, 2, 2, 2, math.nan], [0, 0, 1, 1, 2, 2, 2, 2]
    kept = uncertain(score, group, 1, "top_k_abs", scaling=scaling)
    assert sum(kept.mask) == 2 and kept.scale == pytest.approx(wanted, abs=1e-6)


def test_a_loss_of_nothing_is_scaled_to_nothing():
    assert [uncertain([1, 1], [0, 0], scaling=scaling).scale for scaling in SCALINGS] == [1.0, 0.0, 0.0]


def test_no_episodes():
    assert uncertain([], [], 0.25) == Kept([], 0, 0, 0, 0, 0.0, 1.0, True)


def test_a_share_is_not_lost_to_rounding():
    score, group = pairs([float(i) for i in range(1, 101)])
    assert uncertain(score, group, 0.29, "top_k").groups == 29  # .29 * 100 is 28.999999999999996


def test_equals_by_rounding_alone_stay_in_order():
    score, group = [0.2, 0.2, 0.3, 0.1, 0.1, 0.2], [0, 0, 0, 1, 1, 1]  # .3 - .2 < .2 - .1 in floating point
    assert uncertain(score, group, 1, "top_k_abs").mask == [True] * 3 + [False] * 3
    assert uncertain(score[::-1], group, 1, "top_k_abs").mask == [True] * 3 + [False] * 3
    assert uncertain([0, 1, 0, 0.7], [0, 0, 1, 1], 0.7, "min_p").groups == 2  # in floating point std([0, .7]) < .7 * std([0, 1])


@pytest.mark.parametrize(
    ("args", "named", "told"),
    [
        ((0.5, "std"), {}, "variance, top_k, top_k_abs, top_p, softmax, min_p"),
        ((0.5,), {"statistic": "variance"}, "std, mean, sum, entropy, entropy_variance, length"),
        ((0.5,), {"direction": "up"}, "largest, smallest"),
        ((0.5,), {"scaling": "log"}, "none, linear, sqrt"),
        ((0.5,), {"statistic": "entropy_variance"}, "entropy: see measures"),
        ((0.5,), {"statistic": "length"}, "length: see measures"),
        ((0.0,), {}, "share"),
        ((1.5,), {}, "share"),
        ((math.nan,), {}, "share"),
        ((0.5, "top_k_abs"), {}, "number of groups"),
        ((1.5, "top_k_abs"), {}, "number of groups"),
        ((math.inf, "top_k_abs"), {}, "number of groups"),
    ],
)
def test_unknown_choices_are_errors(args, named, told):
    with pytest.raises(ValueError, match=told):
        uncertain([0, 1], [0, 0], *args, **named)


def test_a_group_for_each_score():
    with pytest.raises(ValueError):
        uncertain([0, 1], [0])


# -- several processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 3, 8, 20])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_decide_alike_on_all_groups(strategy, cut):
    """The episodes cut in two at `cut`, also within a group or before the first: each part gets its part of the whole's answer."""
    for seed in range(8):
        score, group = drawn(seed)
        score[1] = math.nan
        told = {"share": shares(strategy)[2], "strategy": strategy, "scaling": "linear"}
        whole = uncertain(score, group, **told)
        halves = [(score[part], group[part]) for part in (slice(None, cut), slice(cut, None))]
        sent: list[list] = []
        for half in halves:
            uncertain(*half, **told, gather=partial(keep_and_return, sent))
        parts = [uncertain(*half, **told, gather=partial(answer, sent[0] + sent[1])) for half in halves]
        assert parts[0].mask + parts[1].mask == whole.mask
        assert parts[0]._replace(mask=[]) == parts[1]._replace(mask=[]) == whole._replace(mask=[])


def keep_and_return(sent: list[list], own: list) -> list:
    sent.append(own)
    return own


def answer(everything: list, own: list) -> list:
    assert all(row in everything or row[1] != row[1] for row in own)
    return everything


# -- what a filter looks at --------------------------------------------------------------------------------------------------


def test_measures():
    def episode(*turns: tuple[float | None, list[float]], missing: int = 0) -> Trajectory:
        made = [Turn(Reply("", "", ids=[7] * (len(p) + missing), logprobs=p), "", reward, {}) for reward, p in turns]  # type: ignore[arg-type]
        return Trajectory("e", 0, 0, "", {}, made)

    episodes = [
        episode((1.0, [-1.0, -2.0]), (-0.5, [-0.3])),
        episode((2.0, [])),
        episode((None, [-1.0])),
        episode((0.0, [-1.0]), missing=1),
    ]
    found = measures([*episodes, episode()])
    nan = math.nan
    wanted = Measures([0.5, 2.0, nan, 0.0, 0.0], [1.1, nan, 1.0, nan, nan], [3, 0, 1, 2, 0])  # 3.3 / 3 nats a token
    for mine, column in zip(found, wanted, strict=True):
        assert mine == pytest.approx(column, abs=1e-6, nan_ok=True)


def test_the_mean_logprob_estimates_the_entropy():
    """20,000 draws from (.5, .3, .2), whose entropy is 1.0297 nats; the estimate's standard error is .0024."""
    draws = random.Random(0).choices([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], k=20_000)
    reply = Reply("", "", ids=[0] * len(draws), logprobs=[math.log(p) for p in draws])
    found = measures([Trajectory("e", 0, 0, "", {}, [Turn(reply, "", 0.0, {})])])
    assert found.entropy[0] == pytest.approx(1.0296530, abs=0.01)
