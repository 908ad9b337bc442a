"""The formulas against numbers worked by hand; what is masked can hold anything."""

import math

import pytest
import torch
from torch import Tensor, tensor

from ragen_agent.algos import functional as F

JUNK = [math.nan, math.inf, -math.inf, 1e30]


def close(x: Tensor, wanted) -> None:
    """Equal within 1e-6, absolute only."""
    torch.testing.assert_close(x.double(), tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)


def row(values: list[float]) -> Tensor:
    return tensor([values], dtype=torch.float64)


# ---- means and standards ----


def test_masked_mean():
    x, mask = tensor([0.7, 0.3, 99.0]), tensor([True, True, False])
    close(F.masked_mean(x, mask), 0.5)
    close(F.masked_mean(x, mask, 4.0), 0.25)
    close(F.masked_mean(x, torch.zeros(3, dtype=torch.bool)), 0.0)


@pytest.mark.parametrize("junk", JUNK)
def test_masked_mean_and_its_gradient_ignore_what_is_masked(junk):
    x = tensor([0.7, 0.3, junk], requires_grad=True)
    mean = F.masked_mean(x, tensor([True, True, False]))
    mean.backward()
    assert mean.item() == F.masked_mean(tensor([0.7, 0.3]), tensor([True, True])).item()
    assert x.grad is not None and x.grad.tolist() == [0.5, 0.5, 0.0]


BIG = [0.0] * 15 + [1.0]


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        ([1.0, 0.0, 0.0, 1.0], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),  # sample std .57735 + 1e-6; population std would be 1
        ([1.0, 0.0, 1.0, 1.0], [0.499999, -1.499997, 0.499999, 0.499999]),
        (BIG, [-0.249999] * 15 + [3.749985]),
        ([5.0], [0.0]),
    ],
)
def test_standardise(x, wanted):
    close(F.standardise(tensor(x)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("x", [[1.0] * 4, [0.1 + 0.2, 0.3, 0.3], [10.9] * 7, [-1234.567] * 5, [0.0, 0.0]])
def test_flat_is_exactly_zero(x, dtype):
    same = torch.zeros(len(x), dtype=torch.int64)
    for answer in (F.standardise(tensor(x, dtype=dtype)), F.group_standardise(tensor(x, dtype=dtype), same)):
        assert answer.eq(0).all() and answer.dtype == torch.promote_types(dtype, torch.float32)
    assert F.group_standardise(tensor(x, dtype=dtype), same, std=False).eq(0).all()


def test_float32_noise_is_flat():
    sums = tensor([sum([0.1] * 10), 1.0, 1.0 + 6e-8])  # the same return, added up in three ways
    assert F.standardise(sums).eq(0).all()
    assert F.group_standardise(sums, tensor([4, 4, 4])).eq(0).all()


@pytest.mark.parametrize("junk", JUNK)
def test_standardise_ignores_what_is_masked(junk):
    x, mask = row([1, junk, 0, 0, 1, junk]), tensor([[True, False, True, True, True, False]])
    assert F.standardise(x, mask).tolist() == F.standardise(row([1, 7, 0, 0, 1, 7]), mask).tolist()
    close(F.standardise(x, mask), [[0.8660239, 0, -0.8660239, -0.8660239, 0.8660239, 0]])


def test_standardise_over_two_processes_is_that_over_all():
    x = tensor([1.0, 0.0, 0.0, 1.0, 5.0])
    there = iter([tensor([2.0, 6.0]), (tensor([1.0, 5.0]) - 7 / 5).square().sum()])  # what the other process adds: count and sum, squares
    close(F.standardise(x[:3], reduce=lambda mine: mine + next(there)), F.standardise(x)[:3].tolist())


THREE_OF_EIGHT = [1.0] * 3 + [0.0] * 5
GROUPED = [  # kind, scores, groups, advantages
    ("grpo", [1, 0, 0, 1], [0] * 4, [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
    ("grpo", [0, 0, 1, 1], [0] * 4, [-0.8660239, -0.8660239, 0.8660239, 0.8660239]),
    ("grpo", THREE_OF_EIGHT, [0] * 8, [1.2076124] * 3 + [-0.7245674] * 5),  # .625 and .375 over .517549 + 1e-6
    ("centred", THREE_OF_EIGHT, [0] * 8, [0.625] * 3 + [-0.375] * 5),
    ("rloo", THREE_OF_EIGHT, [0] * 8, [0.7142857] * 3 + [-0.4285714] * 5),
    ("centred", [0, 0, 1, 1], [0] * 4, [-0.5, -0.5, 0.5, 0.5]),
    ("grpo", [1, 0, 1, 1], [0, 0, 1, 1], [0.7071058, -0.7071058, 0, 0]),
    ("grpo", [1, 1, 0, 1], [9, -3, 9, -3], [0.7071058, 0, -0.7071058, 0]),  # the same, ids and order of no meaning
    (
        "grpo",
        [1, 0, 0, 1, 1, 0, 0, 0],
        [0, 1, 0, 1, 0, 1, 1, 1],
        [0.5773493, -0.4472126, -1.1546985, 1.7888502, 0.5773493] + [-0.4472126] * 3,
    ),
    ("grpo", [7], [0], [0]),  # alone: nothing to compare with
    ("centred", [7, 1, 0], [0, 1, 1], [0, 0.5, -0.5]),
    ("rloo", [7, 1, 0], [0, 1, 1], [0, 1, -1]),
]
KINDS = {"grpo": F.group_standardise, "centred": lambda x, g: F.group_standardise(x, g, std=False), "rloo": F.rloo}


@pytest.mark.parametrize(("kind", "score", "group", "wanted"), GROUPED)
def test_group_baselines(kind, score, group, wanted):
    close(KINDS[kind](tensor(score, dtype=torch.float32), tensor(group)), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_group_baselines_follow_a_permutation(kind):
    chance = torch.Generator().manual_seed(0)
    score, group = torch.rand(40, generator=chance), torch.randint(7, (40,), generator=chance)
    order = torch.randperm(40, generator=chance)
    close(KINDS[kind](score[order], group[order]), KINDS[kind](score, group)[order].tolist())


def test_rloo_is_k_over_k_minus_one_times_centred():
    score = tensor([0.3, 2.0, -1.0, 5.5])
    close(F.rloo(score, torch.zeros(4)), (4 / 3 * (score - score.mean())).tolist())


# ---- advantages per token ----

MASK = tensor([[True, True, False, False, True, True]])
VALUE = [0.1, 0.2, 9, 9, 0.3, 0.4]
PAID = row([0, 0, 0, 0, 0, 1])


def test_gae_steps_over_observation_tokens():
    wanted = [0.385453, 0.42424, 0, 0, 0.492, 0.6]
    close(F.gae(PAID, row(VALUE), MASK, 0.9, 0.8), [[0.38545344, 0.424240, 0, 0, 0.492, 0.6]])
    alone = F.gae(row([0, 0, 0, 1]), row([0.1, 0.2, 0.3, 0.4]), torch.ones(1, 4, dtype=torch.bool), 0.9, 0.8)
    close(alone[0].float(), [0.38545344, 0.424240, 0.492, 0.6])
    assert [round(x, 6) for x in F.gae(PAID, row(VALUE), MASK, 0.9, 0.8)[0].tolist()] == wanted
    naive = F.gae(PAID, row(VALUE), torch.ones_like(MASK), 0.9, 0.8)  # running through them
    assert [round(x, 3) for x in naive[0, :2].tolist()] == [2.175, 2.910]


@pytest.mark.parametrize("junk", JUNK)
def test_gae_ignores_what_is_masked(junk):
    paid, worth = row([0, 0, junk, junk, 0, 1]), row([0.1, 0.2, junk, junk, 0.3, 0.4])
    turn = tensor([[0, 0, -5, 9, 1, 1]])
    assert F.gae(paid, worth, MASK, 0.9, 0.8).tolist() == F.gae(PAID, row(VALUE), MASK, 0.9, 0.8).tolist()
    assert F.returns(paid, MASK, 0.9).tolist() == F.returns(PAID, MASK, 0.9).tolist()
    plain = F.bi_level_gae(PAID, row(VALUE), MASK, tensor([[0, 0, 1, 1, 1, 1]]), 0.9, 0.8)
    assert F.bi_level_gae(paid, worth, MASK, turn, 0.9, 0.8).tolist() == plain.tolist()


def test_returns():
    close(F.returns(row([1, 0, 7, 7, 0, 2]), MASK), [[3, 2, 0, 0, 2, 2]])
    close(F.returns(row([1, 0, 7, 7, 0, 2]), MASK, 0.5), [[1.25, 0.5, 0, 0, 1, 2]])


def test_gae_at_lambda_one_is_the_return_minus_the_value():
    close(F.gae(PAID, row(VALUE), MASK), [[0.9, 0.8, 0, 0, 0.7, 0.6]])


def test_gae_bootstraps_only_on_demand():
    close(F.gae(PAID, row(VALUE), MASK, bootstrap=tensor([2.0], dtype=torch.float64)), [[2.9, 2.8, 0, 0, 2.7, 2.6]])


def test_rows_of_different_length_do_not_touch():
    mask = tensor([[True, True, True], [False, True, False]])
    both = F.gae(tensor([[0.0, 0, 1], [5, 2, 5]]), tensor([[0.5, 0.5, 0.5], [9, 1, 9]]), mask, 1.0, 0.5)
    close(both, [[0.125, 0.25, 0.5], [0, 1, 0]])


TURNS = tensor([[0, 0, 1, 1, 1, 1]])


def test_bi_level_gae_discounts_once_a_turn():
    paid = row([0, 1, 0, 0, 0, 2])
    target = F.bi_level_gae(paid, row(VALUE), MASK, TURNS) + row(VALUE) * MASK
    close(target, [[2.9, 2.9, 0, 0, 2, 2]])  # 1 + .95 * 2, whatever the critic says


def test_bi_level_gae_by_hand():
    # turn ends: V .2 and .4. High, backwards: A_1 = 1 - .4 = .6, G_1 = 1; A_0 = .95 * .4 - .2 + .95 * .8 * .6 = .636, G_0 = .836.
    # Low, gamma .9, lambda .8: turn 1: .6, then .9 * .4 - .3 + .72 * .6 = .492; turn 0: .636, then .9 * .2 - .1 + .72 * .636 = .53792.
    close(F.bi_level_gae(PAID, row(VALUE), MASK, TURNS, 0.9, 0.8), [[0.53792, 0.636, 0, 0, 0.492, 0.6]])


def test_bi_level_gae_of_one_turn_is_gae():
    one = tensor([[0, 0, 5, 5, 0, 0]])  # whatever the masked tokens say
    close(F.bi_level_gae(PAID, row(VALUE), MASK, one, 0.9, 0.8), F.gae(PAID, row(VALUE), MASK, 0.9, 0.8).tolist())


def test_turn_gae_by_hand():
    # turn 1: 2 - .3 = 1.7; turn 0: (1 + .5) + .9 * .3 - .1 + .72 * 1.7 = 2.894: all its rewards, the value at its first token alone
    found = F.turn_gae(row([0.5, 1, 7, 7, 0, 2]), row([0.1, 99, 9, 9, 0.3, 99]), MASK, TURNS, 0.8, 0.9)
    close(found, [[2.894, 2.894, 0, 0, 1.7, 1.7]])


def test_turn_gae_of_turns_of_one_token_is_gae():
    turn, mask = tensor([[0, 1, 1, 2, 3]]), tensor([[True, True, False, True, True]])
    paid, worth = row([1, 0, 9, 0.5, 2]), row([0.1, 0.2, 9, 0.3, 0.4])
    close(F.turn_gae(paid, worth, mask, turn, 0.8, 0.9), F.gae(paid, worth, mask, 0.9, 0.8).tolist())


@pytest.mark.parametrize("junk", JUNK)
def test_turn_gae_ignores_what_is_masked(junk):
    paid, worth, turn = row([0, 0, junk, junk, 0, 1]), row([0.1, junk, junk, junk, 0.3, junk]), tensor([[0, 0, -5, 9, 1, 1]])
    assert F.turn_gae(paid, worth, MASK, turn).tolist() == F.turn_gae(PAID, row(VALUE), MASK, TURNS).tolist()


def test_first_tokens_of_turns():
    mask = tensor([[False, True, True, False, True, True], [True, False, True, False, False, False], [False] * 6])
    turn = tensor([[0, 0, 0, 7, 1, 2], [3, 9, 3, -1, -1, -1], [0] * 6])  # what is not sampled may say anything
    assert F.firsts(mask, turn).tolist() == [[False, True, False, False, True, True], [True] + [False] * 5, [False] * 6]


def test_episode_sum():
    x, mask = tensor([[1.0, math.nan], [2.0, 4.0], [8.0, math.inf]]), tensor([[True, False], [True, True], [True, False]])
    assert F.episode_sum(x, mask, tensor([2, 0, 2]), 4).tolist() == [6, 0, 9, 0]
    assert F.episode_sum(mask.long(), mask, tensor([2, 0, 2]), 4).tolist() == [2, 0, 2, 0]


def test_group_std():
    close(F.group_std(tensor([1.0, 0, 0, 1, 7, 2, 2]), tensor([0, 0, 0, 0, 1, 2, 2])), [0.5773503] * 4 + [0, 0, 0])
    assert F.group_std(tensor([0.1 + 0.2, 0.3], dtype=torch.float64), tensor([0, 0])).eq(0).all()


def test_an_episode_of_two_rows_is_one_line():
    # rows 0 and 2 are windows of episode 1 (turns 1 and 0, in the wrong order), row 1 is episode 0
    mask = tensor([[False, True, True], [True, False, True], [True, True, False]])
    turn = tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    place = F.pack(mask, tensor([1, 0, 1]), turn)
    assert [x.tolist() for x in place] == [[1, 1, 2, 2, 0, 0], [0, 2, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 2, 3]]
