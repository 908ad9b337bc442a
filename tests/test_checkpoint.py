"""Checkpoints: whatever a run dies of, the last whole one is found again."""

import random
import signal
import subprocess
import sys
import time

import pytest

from ragen_agent import checkpoint

SAVE_FOR_EVER = """
import sys
from pathlib import Path
from ragen_agent import checkpoint

def write(folder):
    (folder / "model").mkdir()
    for name in ("a.bin", "b.bin", "model/c.bin"):
        (folder / name).write_bytes(str(step).encode() * 100_000)

run, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    checkpoint.save(run, step, write)
    print(step, flush=True)
"""


def writes(text):
    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "state.json").write_text("{}")

    return write


def names(run):
    return sorted(path.name for path in run.iterdir())


def test_save_then_latest(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    path = checkpoint.save(tmp_path, 10, writes("ten"))
    assert path == tmp_path / "step-000010" == checkpoint.latest(tmp_path)
    assert (path / "model" / "weights").read_text() == "ten"


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_only_the_newest_are_kept(tmp_path, keep):
    for step in range(1, 4):
        checkpoint.save(tmp_path, step, writes(str(step)), keep=keep)
    assert names(tmp_path) == [f"step-{step:06d}" for step in range(1, 4)][-keep:]


def test_steps_are_ordered_as_numbers(tmp_path):
    checkpoint.save(tmp_path, 999_999, writes("a"))
    checkpoint.save(tmp_path, 1_000_000, writes("b"))
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000000"


def test_a_failing_write_leaves_the_old_one(tmp_path):
    checkpoint.save(tmp_path, 1, writes("one"))

    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, 2, fail, keep=1)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    checkpoint.save(tmp_path, 2, writes("two"), keep=1)
    assert names(tmp_path) == ["step-000002"]


def spoil(folder):
    data = bytearray((folder / "model" / "weights").read_bytes())
    data[0] ^= 1
    (folder / "model" / "weights").write_bytes(data)


DAMAGE = {
    "a bit": spoil,
    "a file shorter": lambda folder: (folder / "model" / "weights").write_text(""),
    "a file missing": lambda folder: (folder / "state.json").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: (folder / "manifest.json").write_text('{"state.json": {"si'),
    "a strange manifest": lambda folder: (folder / "manifest.json").write_text('{"state.json": {}}'),
    "a list for a manifest": lambda folder: (folder / "manifest.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_passed_over_and_written_anew(tmp_path, damage):
    checkpoint.save(tmp_path, 1, writes("one"))
    damage(checkpoint.save(tmp_path, 2, writes("two")))
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    checkpoint.save(tmp_path, 2, writes("again"))
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000002"
    assert (tmp_path / "step-000002" / "model" / "weights").read_text() == "again"


def test_pruning_counts_whole_ones_only(tmp_path):
    checkpoint.save(tmp_path, 1, writes("one"))
    DAMAGE["a file missing"](checkpoint.save(tmp_path, 2, writes("two")))
    checkpoint.save(tmp_path, 3, writes("three"), keep=2)
    assert names(tmp_path) == ["step-000001", "step-000003"]


def test_a_whole_step_is_left_as_it_is(tmp_path):
    path = checkpoint.save(tmp_path, 1, writes("one"))
    assert checkpoint.save(tmp_path, 1, writes("other")) == path
    assert (path / "model" / "weights").read_text() == "one"


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        checkpoint.save(tmp_path, 1, writes("one"), keep=0)
    assert names(tmp_path) == []


def test_killed_at_any_moment(tmp_path):
    """Nine times a process that saves without end is killed; what it last reported is there, whole, and a new process goes on."""
    chance, done = random.Random(0), 0
    for _ in range(9):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path), str(done)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(chance.uniform(0, 0.1))
            child.send_signal(signal.SIGKILL)
            last = child.stdout.read().split()
        found = checkpoint.latest(tmp_path)
        assert found is not None
        assert found == checkpoint.steps(tmp_path)[-1], "a folder got its name before it was whole"
        step = checkpoint.number(found)
        assert step >= (int(last[-1]) if last else done + 1)
        for name in ("a.bin", "b.bin", "model/c.bin"):
            assert (found / name).read_bytes() == str(step).encode() * 100_000
        done = step
