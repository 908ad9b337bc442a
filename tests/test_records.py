"""Records: what is written is what is read, after a kill too."""

import json
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest

from ragen_agent import records
from ragen_agent.types import Reply, Trajectory, Turn

TRAJECTORY = Trajectory(
    env_id="ragen/Sokoban-v0",
    seed=7,
    luck=2**40,
    observation="# # #\n# P √\u2028\x00 \ud800 😀",
    info={"rules": 'say "Up"', "frames": [[[0, 1]]], "moves": [], "valid": True, "success": False, "seed": None},
    turns=[
        Turn(Reply("<think>a</think>\r\n", "", [1, 2], [3, 4], [-0.1, -1e-300], "length"), "o", -0.1, {"valid": False, "success": False}),
        Turn(Reply("Up", "Up"), "", 0.1 + 0.2, {"valid": True, "success": True}),
    ],
    terminated=True,
    truncated=False,
)


def test_a_trajectory_comes_back_equal(tmp_path):
    path = tmp_path / "t.jsonl"
    records.append(path, {"step": 3, **records.to_row(TRAJECTORY)})
    (row,) = records.read(path)
    again = records.from_row(row)
    assert again == TRAJECTORY
    assert row["step"] == 3
    assert isinstance(again.turns[0].reply, Reply) and again.reward == TRAJECTORY.reward and again.success


def test_a_reward_that_is_not_finite_is_null_and_comes_back_as_nan():
    row = records.to_row(
        Trajectory("w", 1, 2, "", {}, [Turn(Reply("", "", [1], [2], [-1.0]), "", reward, {}) for reward in (inf, nan, 2.0)])
    )
    again = records.from_row(json.loads(records.dumps(row)))
    assert [turn["reward"] for turn in row["turns"]] == [None, None, 2.0]
    assert [isnan(turn.reward) for turn in again.turns] == [True, True, False] and again.turns[2].reward == 2.0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_names_the_file(tmp_path):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left.*m\.jsonl"):
        records.append(tmp_path / "m.jsonl", {"step": 1})


def test_without_ids_only_the_tokens_are_gone():
    row = json.loads(records.dumps(records.to_row(TRAJECTORY, ids=False)))
    assert row["turns"][0]["reply"] == {"text": "<think>a</think>\r\n", "action": "", "finish": "length"}
    again = records.from_row(row)
    assert again.turns[1] == TRAJECTORY.turns[1]
    assert again.turns[0].reply == TRAJECTORY.turns[0].reply._replace(prompt_ids=[], ids=[], logprobs=[])


def test_a_missing_key_is_an_error():
    row = records.to_row(TRAJECTORY)
    del row["truncated"]
    with pytest.raises(KeyError, match="truncated"):
        records.from_row(row)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_torn_last_line_is_dropped_and_the_next_append_heals_the_file(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    for step in range(3):
        records.append(path, {"step": step})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = [{"step": 0}, {"step": 1}] + [{"step": 2}] * (cut == 1)  # only the newline is missing: the row is whole
    assert records.read(path) == kept
    records.append(path, {"step": 9})
    assert records.read(path) == [*kept, {"step": 9}]
    assert path.read_bytes().endswith(b'{"step": 9}\n')


@pytest.mark.parametrize("bad", ['{"step": 1', "null", "[1]", "\x00\x00"])
def test_a_broken_middle_line_is_an_error_with_its_place(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match="m.jsonl, line 2"):
        records.read(path)


def test_truncate_keeps_the_rows_it_is_told_to(tmp_path):
    path = tmp_path / "m.jsonl"
    for step in range(5):
        records.append(path, {"step": step})
    records.truncate(path, lambda row: row["step"] < 3)
    assert records.read(path) == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("nan")])
def test_what_is_not_a_number_is_refused_and_nothing_is_written(tmp_path, bad):
    for write in (records.append, records.write_json):
        path = tmp_path / "x.json"
        with pytest.raises(ValueError):
            write(path, {"loss": bad})
        assert not path.exists()


def test_numpy_scalars_become_plain_and_other_types_are_refused():
    row = {"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)}
    assert json.loads(records.dumps(row)) == {"a": 3, "b": 0.5, "c": True}
    with pytest.raises(TypeError, match="ndarray"):
        records.dumps({"a": np.zeros(2)})


def test_write_json_replaces_the_whole_file(tmp_path):
    path = tmp_path / "state.json"
    records.write_json(path, {"step": 1, "long": "x" * 1000})
    records.write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
