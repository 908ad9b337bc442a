"""Trajectories -> tensors, by hand: the mask, the turns, the rewards, the rows of windows, the groups (T03, T09, L30)."""

import pytest
import torch

from ragen_agent.batch import collate
from ragen_agent.types import Reply, Trajectory, Turn


def episode(turns, seed=0, luck=0, **ending):
    made = [Turn(Reply("", "", prompt, ids, [-0.5] * len(ids)), "", reward, {"success": False}) for prompt, ids, reward in turns]
    return Trajectory("ragen/X-v0", seed, luck, "", {"rules": ""}, made, **ending)


TWO_TURNS = [([1, 2], [3, 9], -0.1), ([1, 2, 3, 9, 4], [5, 6, 9], 2.0)]


def test_one_growing_context_is_one_row():
    batch = collate([episode(TWO_TURNS), episode([([7], [8], 1.0)], seed=1, truncated=True)])
    assert batch.ids.tolist() == [[1, 2, 3, 9, 4, 5, 6, 9], [7, 8, 0, 0, 0, 0, 0, 0]]
    assert batch.real.sum(1).tolist() == [8, 2]
    assert batch.sampled.int().tolist() == [[0, 0, 1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.turn.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0] + [-1] * 6]
    torch.testing.assert_close(batch.reward[0], torch.tensor([0, 0, 0, -0.1, 0, 0, 0, 2.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(batch.score, torch.tensor([1.9, 1.0]), atol=1e-6, rtol=0)
    assert batch.group.tolist() == [0, 1] and batch.truncated.tolist() == [False, True]
    assert batch.logprob[0].tolist() == [0, 0, -0.5, -0.5, 0, -0.5, -0.5, -0.5]
    assert batch.tokens == 6


def test_a_context_that_moved_begins_a_new_row_of_the_same_episode():
    batch = collate([episode([([1], [2], 0.5), ([4], [5], 0.25)]), episode([([1], [3], 1.0)], seed=0, luck=1)])
    assert batch.ids.tolist() == [[1, 2], [4, 5], [1, 3]]
    assert batch.episode.tolist() == [0, 0, 1] and batch.group.tolist() == [0, 0]
    assert batch.turn.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert batch.score.tolist() == [0.75, 1.0] and batch.reward.sum().item() == pytest.approx(1.75, abs=1e-6)


def test_padding_is_known_by_position_not_by_id():  # T03: 0 is an ordinary token here, and ends a turn in mid-row
    batch = collate([episode([([0, 0], [5, 0], 1.0), ([0, 0, 5, 0, 0], [0], 0.0)]), episode([([1], [2], 0.0)], seed=1)])
    assert batch.real[0].tolist() == [True] * 6
    assert batch.sampled[0].int().tolist() == [0, 0, 1, 1, 0, 1]


def test_a_turn_without_tokens_has_no_place_but_its_reward_stays():
    batch = collate([episode([([1], [2], 0.5), ([1, 2, 3], [], -0.1)]), episode([([1], [], -0.2), ([1, 4], [5], 1.0)], seed=1)])
    assert batch.ids.tolist() == [[1, 2, 0], [1, 4, 5]]
    torch.testing.assert_close(batch.score, torch.tensor([0.4, 0.8]), atol=1e-6, rtol=0)
    torch.testing.assert_close(batch.reward.sum(1), batch.score, atol=1e-6, rtol=0)


def test_nothing_sampled_is_an_error():
    with pytest.raises(ValueError, match="no token was sampled"):
        collate([episode([([1], [], 1.0)])])


def test_rows_cut_common_padding_and_keep_episodes_whole():
    batch = collate([episode(TWO_TURNS), episode([([7], [8], 1.0)], seed=1)])
    part = batch.rows(torch.tensor([1]))
    assert part.ids.tolist() == [[7, 8]] and part.score.shape == (2,) and part.episode.tolist() == [1]
    assert len(batch.rows(torch.tensor([True, False]))) == 1
