"""A kill or a full disk at any byte of a save leaves the last checkpoint whole: by the clock, by the byte, and by the call."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragen_agent import checkpoint

resource = pytest.importorskip("resource", reason="needs the signals and limits of POSIX")
SIZES = {"model.safetensors": 60_000, "training.pt": 100_000}  # floats: 240 and 400 kB
FORK = multiprocessing.get_context("forkserver")  # torch is imported once, and every process that dies here is a fork of that
FORK.set_forkserver_preload(["tests.test_kill"])


def weights(step, size):
    return torch.arange(size, dtype=torch.float32) + step


def files_of(step):
    """What a run saves: weights by safetensors in a folder, a state by torch, JSON; every value depends on the step."""

    def write(folder):
        (folder / "model").mkdir()
        save_file({"w": weights(step, SIZES["model.safetensors"])}, folder / "model" / "model.safetensors")
        (folder / "model" / "config.json").write_text(json.dumps({"step": step}))
        torch.save({"step": step, "w": weights(step, SIZES["training.pt"])}, folder / "training.pt")

    return write


def same(folder, step):
    state = torch.load(folder / "training.pt", weights_only=True)
    model = load_file(folder / "model" / "model.safetensors")["w"]
    assert state["step"] == json.loads((folder / "model" / "config.json").read_text())["step"] == step
    assert torch.equal(state["w"], weights(step, SIZES["training.pt"])) and torch.equal(model, weights(step, SIZES["model.safetensors"]))


def holds(run, at_least):
    """The law: the last whole checkpoint is there, is none older than `at_least`, and holds what was written. Returns its step."""
    found = checkpoint.latest(run)
    assert found is not None, f"nothing is left of step {at_least}"
    step = checkpoint.number(found)
    assert step >= at_least
    same(found, step)
    return step


def goes_on(run, step):
    """The next save works, and clears what a dead one left."""
    assert checkpoint.save(run, step, files_of(step)) == run / f"step-{step:06d}"
    assert holds(run, step) == step
    assert not list(run.glob(".*"))
    assert len(checkpoint.steps(run)) <= 2


def alone(target, *arguments):
    """A process of its own, ready to run `target(pipe, *arguments)`, and the end of its pipe."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=target, args=(there, *arguments))
    process.start()
    there.close()
    return process, here


def told(pipe):
    """All that a process said before it died."""
    said = []
    try:
        while True:
            said.append(pipe.recv())
    except (EOFError, OSError):
        return said


def save_for_ever(pipe, run, first):
    torch.set_num_threads(1)
    for step in count(first):
        pipe.send(("begin", step))
        checkpoint.save(run, step, files_of(step))
        pipe.send(("end", step))


@pytest.mark.slow
def test_killed_by_the_clock(tmp_path):
    """Fifty processes that save without end are killed at seeded moments of their first saves."""
    checkpoint.save(tmp_path, 1, files_of(1))
    times = []
    for step in range(2, 8):
        times.append(time.monotonic())
        checkpoint.save(tmp_path, step, files_of(step))
    typical = sorted(b - a for a, b in pairwise(times))[2]
    chance, last, inside, whole = random.Random(0), 7, 0, 0
    for _ in range(50):
        process, pipe = alone(save_for_ever, tmp_path, last + 1)
        assert pipe.recv() == ("begin", last + 1)
        time.sleep(chance.uniform(0, 3 * typical))
        process.kill()
        process.join()
        said = [("begin", last + 1), *told(pipe)]
        inside += said[-1][0] == "begin"
        whole += len(said) > 1
        last = holds(tmp_path, max([last, *(step for word, step in said if word == "end")]))
    sys.stdout.write(f"{inside} of 50 kills fell inside a save of {1000 * typical:.0f} ms, {whole} after another had been reported\n")
    assert inside >= 25 and whole
    goes_on(tmp_path, last + 1)


def cut_at_byte(pipe, run, step, size, kill):
    """Save while no file may grow over `size` bytes; at the byte after them the kernel kills the process, or refuses the write."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kill else signal.SIG_IGN)
    report(pipe, run, step)


def report(pipe, run, step):
    try:
        checkpoint.save(run, step, files_of(step))
        pipe.send("saved")
    except OSError as error:
        pipe.send(str(error))


LIMITS = [0, 1, 11, 300, 4096, 70_000, 239_000, 240_010, 300_000, 399_999, 400_500]  # bytes; the state takes about 401 kB


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "refused"])
def test_cut_at_a_byte_of_a_file(tmp_path, kill):
    checkpoint.save(tmp_path, 1, files_of(1))
    for size in LIMITS:
        process, pipe = alone(cut_at_byte, tmp_path, 2, size, kill)
        said = told(pipe)
        process.join()
        assert process.exitcode == (-signal.SIGXFSZ if kill else 0)
        assert said == [] if kill else "saving step 2 failed" in said[0] and said[0].endswith("step-000001"), said
        assert holds(tmp_path, 1) == 1
        assert kill or not list(tmp_path.glob(".*")), "a failed save must give its space back"
    goes_on(tmp_path, 2)


def cut_at_call(pipe, run, step, number, kill):
    """Save until the `number`-th change of the file system: there the process is killed, or told that the disk is full."""
    torch.set_num_threads(1)
    calls = 0

    def change():
        nonlocal calls
        calls += 1
        if calls == number:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")

    def watch(event, arguments):
        if event in ("os.mkdir", "os.rename", "os.rmdir", "os.remove") or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            change()

    sync = os.fsync
    os.fsync = lambda handle: (change(), sync(handle))[1]
    sys.addaudithook(watch)
    report(pipe, run, step)
    if calls < number:
        pipe.send("over")


@pytest.mark.slow
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "refused"])
def test_cut_at_a_call(tmp_path, kill):
    """Every mkdir, open, fsync, rename and remove of a save in turn, the clearing of the oldest checkpoint among them."""
    for number in count(1):
        run = tmp_path / str(number)
        for step in (1, 2):
            checkpoint.save(run, step, files_of(step))
        process, pipe = alone(cut_at_call, run, 3, number, kill)
        said = told(pipe)
        process.join()
        step = holds(run, 2)
        if said[-1:] == ["over"]:
            break
        assert process.exitcode == (-signal.SIGKILL if kill else 0)
        goes_on(run, step + 1)
    sys.stdout.write(f"a save makes {number - 1} changes of the file system\n")
    assert step == 3 and number > 20


def test_a_full_disk_before_the_first_checkpoint(tmp_path):
    process, pipe = alone(cut_at_byte, tmp_path / "new", 1, 100, False)
    assert "there is no whole checkpoint" in told(pipe)[0]
    process.join()
    assert checkpoint.latest(tmp_path / "new") is None
    assert Path(tmp_path / "new").is_dir() and not list((tmp_path / "new").iterdir())
