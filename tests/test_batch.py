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


def test_a_state_is_the_level_and_its_key_where_the_turn_began():
    """Told by the world's key, never by text: equal keys of one level meet across episodes; of another level they do not."""

    def keyed(turns, keys, **place):
        made = episode(turns, **place)
        made.info["state"] = keys[0]
        for turn, key in zip(made.turns, keys[1:], strict=True):
            turn.info["state"] = key
        return made

    one = keyed(TWO_TURNS, [[1, 2], [3], [1, 2]])
    twin = keyed([([1], [2], 0.0), ([4], [5], 0.0)], [[3], [1, 2], [9]], luck=1)
    other = keyed([([1], [2], 0.0)], [[3], [9]], seed=1)
    batch = collate([one, twin, other])
    assert batch.state[0].tolist() == [0] * 4 + [1] * 4
    assert [row[:2] for row in batch.state[1:].tolist()] == [[1, 1], [0, 0], [2, 2]]
    assert batch.state[1:, 2:].eq(-1).all()
    assert collate([episode(TWO_TURNS)]).state.eq(-1).all()  # a world that tells none


def test_worlds_are_numbered_in_order_of_appearance():
    made = [episode([([1], [2], 0.0)], seed=seed) for seed in range(3)]
    made[1].env_id = "ragen/Y-v0"
    assert collate(made).world.tolist() == [0, 1, 0]


def test_the_place_ahead_of_a_cut_episode_is_read_and_not_trained():
    cut, over = episode(TWO_TURNS, truncated=True), episode([([7], [8], 1.0)], seed=1, terminated=True)
    context = [1, 2, 3, 9, 4, 5, 6, 9, 7]
    batch = collate([cut, over], ahead=[context, None])
    assert batch.ids[0].tolist() == [*context, 0] and batch.real[0].all()
    assert batch.ahead.nonzero().tolist() == [[0, 9]] and batch.turn[0].tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert batch.tokens == 6 and batch.reward.sum().item() == pytest.approx(2.9, abs=1e-6)
    moved = collate([cut, over], ahead=[[5, 5], None])  # a window: the next context does not extend the row
    assert moved.ids[1].tolist()[:3] == [5, 5, 0] and moved.episode.tolist() == [0, 0, 1]
    assert moved.ahead.nonzero().tolist() == [[1, 2]] and not moved.sampled[1].any()
