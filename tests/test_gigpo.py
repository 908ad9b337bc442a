"""Credit by turn: GiGPO's two levels, MT-GRPO's turns and outcomes, and the formulas under them, against numbers worked by hand."""

import math

import pytest
import torch
from torch import tensor

from ragen_agent.algos import MTGRPO, GiGPO, ReBN, credit
from ragen_agent.algos import functional as F
from tests.algo_parts import policy
from tests.table_parts import by_turns, game, rich


def close(found: list[list[float]], wanted: list[list[float]]) -> None:
    assert [len(turns) for turns in found] == [len(turns) for turns in wanted]
    for got, want in zip(found, wanted, strict=True):
        assert got == pytest.approx(want, abs=1e-6, rel=0)


# ---- GiGPO ----

# Three episodes of one level, which all begin in state 7; two of them meet again in 8, one goes to 9. One more of another level.
PATHS = (
    [(0, "..00.1"), (1, "..0.11"), (2, ".0.1"), (3, ".0")],
    [[0, 1], [0, 0], [0, 0.5], [5]],
    [0, 0, 0, 1],
    [[7, 8], [7, 9], [7, 8], [3]],
)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # gamma .5: in 7 the returns are .5, 0, .25 (mean .25, std .25); in 8 they are 1 and .5; whole: 1, 0, .5 (mean .5, std .5)
        ({"gamma": 0.5}, [[0.999998 + 0.999996, 0.999998 + 0.7071048], [-1.999994, -0.999998], [0, -0.7071048], [0]]),
        ({"gamma": 0.5, "std": False}, [[0.75, 0.75], [-0.75, -0.5], [0, -0.25], [0]]),
        ({"gamma": 0.5, "std": False, "omega": 0.4}, [[0.6, 0.6], [-0.6, -0.5], [0, -0.1], [0]]),
        ({"gamma": 1.0, "std": False}, [[1, 0.75], [-1, -0.5], [0, -0.25], [0]]),
        ({"gamma": 0.0, "std": False}, [[0.5, 0.75], [-0.5, -0.5], [0, -0.25], [0]]),
        ({"omega": 0.0}, [[0.999998, 0.999998], [-0.999998, -0.999998], [0, 0], [0]]),
    ],
)
def test_gigpo_by_hand(settings, wanted):
    close(by_turns(GiGPO(policy(), **settings), game(*PATHS)), wanted)


def test_the_default_of_gigpo_is_the_paper():
    """gamma .95, omega 1, with std: in state 7 the returns are .95, 0, .475 (std .475)."""
    close(by_turns(GiGPO(policy()), game(*PATHS))[:1], [[0.999998 + 0.9999979, 0.999998 + 0.7071048]])


def test_a_state_met_twice_by_one_episode_is_compared_with_itself():
    """Both turns begin in 4, with the returns .5 and 1: mean .75; the episode is alone in its group."""
    data = game([(0, ".0.1")], [[0, 1]], [0], [[4, 4]])
    close(by_turns(GiGPO(policy(), gamma=0.5, std=False), data), [[-0.25, 0.25]])


def test_states_met_once_leave_the_episode_advantage_alone():
    data = game(PATHS[0], PATHS[1], PATHS[2], [[0, 1], [2, 3], [4, 5], [6]])
    close(by_turns(GiGPO(policy(), std=False), data), [[0.5, 0.5], [-0.5, -0.5], [0, 0], [0]])


def test_a_flat_state_gives_exactly_0():
    data = game([(i, ".0") for i in range(4)], [[0.3000001], [0.3], [0.3], [0.3]], [0, 0, 0, 0], [[2]] * 4)
    assert by_turns(GiGPO(policy()), data) == [[0.0]] * 4


@pytest.mark.parametrize("row", [0, 4])
def test_a_state_that_is_not_told_is_an_error_that_says_who(row):
    data = rich()
    data.state[row, data.sampled[row]] = -1
    with pytest.raises(ValueError, match=rf'info\["state"\].*\[{int(data.episode[row])}\]'):
        GiGPO(policy()).prepare(data)
    with pytest.raises(ValueError, match="info"):
        GiGPO(policy()).prepare(game(*PATHS[:3]))


def test_a_state_that_is_not_told_where_nothing_was_sampled_is_no_error():
    data, same = rich(), rich()
    data.state[~data.sampled] = -1
    same.state[~same.sampled] = 10**12
    assert by_turns(GiGPO(policy()), data) == by_turns(GiGPO(policy()), same)


# ---- MT-GRPO ----

# One level: an episode paid 1 then 2, one paid nothing in two turns, one of a single turn paid .5; another level with one episode.
TURNS = ([(0, ".00.1"), (1, ".0.11"), (2, ".0"), (3, ".0.1")], [[1, 2], [0, 0], [0.5], [3, 4]], [0, 0, 0, 1])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # outcomes 2, 0, .5 (mean 5/6, std 1.0408330); first turns 1, 0, .5 (mean .5, std .5)
        ({}, [[2.1208930, 1.1208960], [-1.8006378, -0.8006400], [-0.3202560], [0, 0]]),
        ({"lam": 0.5}, [[0.999998 + 0.5604480, 1.1208960], [-0.999998 - 0.4003200, -0.8006400], [-0.3202560], [0, 0]]),
        ({"std": False}, [[0.5 + 7 / 6, 7 / 6], [-0.5 - 5 / 6, -5 / 6], [-1 / 3], [0, 0]]),
        ({"std": False, "lam": 0.0}, [[0.5, 7 / 6], [-0.5, -5 / 6], [-1 / 3], [0, 0]]),
    ],
)
def test_mt_grpo_by_hand(settings, wanted):
    close(by_turns(MTGRPO(policy(), **settings), game(*TURNS)), wanted)


def test_mt_grpo_of_the_paper_has_two_turns():
    """Turn rewards 1 and 0, outcomes 0 and 1: A_1 = A_turn + A_outcome, A_2 = A_outcome."""
    data = game([(0, ".0.1"), (1, ".0.1")], [[1, 0], [0, 1]], [0, 0])
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    close(by_turns(MTGRPO(policy()), data), [[0, -half], [0, half]])
    close(by_turns(MTGRPO(policy(), lam=0.0), data), [[half, -half], [-half, half]])


def test_episodes_of_one_turn_make_mt_grpo_grpo():
    data = game([(0, ".0"), (1, ".00"), (2, ".0"), (3, ".0")], [[1], [0], [0], [1]], [0, 0, 1, 1])
    score = F.group_standardise(data.score, data.group)[:, None].tolist()
    close(by_turns(MTGRPO(policy()), data), score)


# ---- ReBN ----


def test_rebn_by_hand():
    """gamma .5: returns 2 2 | 0 | 1 2 4 of six turns, mean 11/6, sample std 1.3291601; long replies count once."""
    data = game([(0, ".0000.1"), (1, ".0"), (2, ".0.11.2")], [[1, 2], [0], [0, 0, 4]], [0, 0, 1])
    close(by_turns(ReBN(policy(), gamma=0.5), data), [[0.1253923, 0.1253923], [-1.3793163], [-0.6269619, 0.1253923, 1.6301008]])


# ---- the formulas ----


def test_turns_and_tokens_and_back():
    data = rich()
    paid, there = credit.per_turn(data.reward, data.sampled, data.episode, data.turn, 10)
    assert paid.shape == (10, 4) and there.sum() == 21
    torch.testing.assert_close(paid.sum(1), data.score, atol=1e-6, rtol=0)
    length, _ = credit.per_turn(torch.ones_like(data.reward), data.sampled, data.episode, data.turn, 10)
    assert length[3].tolist() == [1, 1, 1, 2] and length.sum() == data.tokens
    where = (data.sampled, data.episode, data.turn)
    spread = credit.on_tokens(paid, *where)
    again, _ = credit.per_turn(spread / credit.on_tokens(length, *where).clamp(min=1), *where, 10)
    torch.testing.assert_close(again, paid, atol=1e-6, rtol=0)
    state = credit.of_turn(data.state, *where, (10, 4))
    assert state[3].tolist() == [2, 3, 2, 4] and state[1].tolist() == [0, -1, -1, -1]


def test_nothing_sampled_gives_nothing():
    data = rich()
    data.sampled[:] = False
    where = (data.sampled, data.episode, data.turn)
    paid, there = credit.per_turn(data.reward, *where, 10)
    assert not paid.any() and not there.any()
    for found in (credit.by_state(paid, there, paid.long()), credit.by_turn(paid, there, data.group), credit.on_tokens(paid, *where)):
        assert not found.any()
    assert not credit.token_returns(data.reward, *where).any() and credit.standing(paid[there], data.group[:0]).shape == (0,)


@pytest.mark.parametrize(("gamma", "wanted"), [(1.0, [3.0, 1.0, 2.0]), (0.5, [1.75, -0.5, 1.0]), (0.0, [2.0, -1.0, 0.0])])
def test_discounted_returns_of_turns(gamma, wanted):
    paid = tensor([[2.0, -1.0, 0.0, 2.0]])
    assert credit.discounted(paid, gamma)[0, :3].tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("gamma", "wanted"), [(1.0, [[3, 3, 2], [0]]), (0.5, [[1, 2, 2], [0]]), (0.0, [[0, 1, 2], [0]])])
def test_token_returns_run_through_the_rows_of_an_episode(gamma, wanted):
    for rows in ([(0, ".00.1"), (1, ".0")], [(1, ".0"), (0, ".00"), (0, "...1")]):
        data = game(rows, [[1, 2], [0]], [0, 0])
        found = credit.token_returns(data.reward, data.sampled, data.episode, data.turn, gamma)
        lines = [found[data.episode == e][data.sampled[data.episode == e]].tolist() for e in (0, 1)]
        assert lines == wanted and not found[~data.sampled].any()


@pytest.mark.parametrize("std", [True, False])
def test_standing_has_the_numbers_of_group_standardise(std):
    chance = torch.Generator().manual_seed(0)
    x, key = 10 * torch.rand(200, generator=chance) - 3, torch.randint(40, (200,), generator=chance)
    torch.testing.assert_close(credit.standing(x, key, std), F.group_standardise(x, key, std), atol=1e-6, rtol=0)
    assert not credit.standing(x, torch.arange(200), std).any()
    assert credit.standing(tensor([1.0, 0, 0, 1], dtype=torch.bfloat16), tensor([0, 0, 2, 2]), False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_standing_over_processes_adds_their_sums():
    """Two processes with the same numbers: sums double, so that two values per key count as four and the sample std falls."""
    x, key = tensor([1.0, 0.0]), tensor([3, 3])
    found = credit.standing(x, key, reduce=lambda sums: 2 * sums)
    assert found.tolist() == pytest.approx([0.8660239, -0.8660239], abs=1e-6)
