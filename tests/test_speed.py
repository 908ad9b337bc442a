"""The speed benchmark: its contenders compute one and the same update, and what it reports is right."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import compare, measure, speed
from benchmarks.contenders import KINDS, WAYS, Sizes, batch_of, look, model_of, parts_of

TINY = Sizes(vocab=300, hidden=64, layers=1, episodes=4, shortest=24, longest=60, rows=2, micro_tokens=100)
FLAGS = ["--vocab", "300", "--repeats", "1"]
FLAGS += [f"--{name.replace('_', '-')}={asdict(TINY)[name]}" for name in ("hidden", "layers", "episodes", "shortest", "longest", "rows")]
ROOT = Path(__file__).parents[1]
NO_TRL = importlib.util.find_spec("trl") is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("speed")
    torch.save(look(TINY), place / measure.OLD)
    (place / measure.SIZES).write_text(json.dumps(asdict(TINY)))
    return place


def gradient(name, folder):
    way, model = WAYS[name], model_of(TINY)
    step = KINDS[way.kind](way, TINY, model, measure.prepared(TINY, folder), measure.ready_optimizer(model, 1e-3))
    return step(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def reference(folder):
    """The gradient of the form that is easiest to check by reading."""
    return gradient("plain-lean", folder)


@pytest.mark.parametrize("name", [n for n in WAYS if not n.startswith("trl") and n != "plain-lean"])
def test_ours_and_the_plain_form_compute_the_same_gradient(name, folder, reference):
    loss, grad = gradient(name, folder)
    assert reference[0].abs() > 1e-3 and reference[1].norm() > 0.1
    torch.testing.assert_close(loss, reference[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(grad, reference[1], atol=1e-5, rtol=0)


@pytest.mark.slow  # importing TRL takes longer than the rest
@pytest.mark.skipif(NO_TRL, reason="needs trl")
@pytest.mark.parametrize("name", [n for n in WAYS if n.startswith("trl")])
def test_trl_computes_the_same_gradient(name, folder, reference, monkeypatch):
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_use_triton", utils._use_triton)  # trl-cut changes it
    loss, grad = gradient(name, folder)
    torch.testing.assert_close(loss, reference[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(grad, reference[1], atol=1e-5, rtol=0)


def test_micro_batches_hold_every_row_once():
    batch = batch_of(TINY)
    for way in WAYS.values():
        assert sorted(torch.cat(list(parts_of(way, TINY, batch))).tolist()) == list(range(len(batch)))
    assert [len(part) for part in parts_of(WAYS["plain-rows"], TINY, batch)] == [2, 2]
    assert [len(part) for part in parts_of(WAYS["plain-lean"], TINY, batch)] == [1, 1, 1, 1]


def test_the_batch_is_one_of_many_turns():
    batch = batch_of(Sizes(vocab=1000))
    lengths = batch.real.sum(1)
    assert len(batch) == 16 == len(lengths.unique())  # an episode is one row
    assert lengths.min() == 150 and lengths.max() == 500
    assert 0.25 <= batch.tokens / int(lengths.sum()) <= 0.5
    assert batch.turn.max() >= 4
    assert torch.equal(batch.ids, batch_of(Sizes(vocab=1000)).ids)


def test_the_ready_optimizer_has_moved_nothing():
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    optimizer = measure.ready_optimizer(model, 0.1)
    assert torch.equal(model.weight, before) and model.weight.grad is None
    assert "exp_avg" in optimizer.state[model.weight]


@pytest.mark.skipif(not measure.STATUS.exists(), reason="needs /proc")
def test_the_peak_is_that_of_memory_held_in_between():
    """In a process of its own: one that has computed before holds freed memory, which the system counts."""
    code = """
import torch
from benchmarks import measure
if not measure.forget_peak():
    print("no")
else:
    rest = measure.resident()[0]
    held = torch.ones(50 << 18)  # 50 MiB
    del held
    now, peak = measure.resident()
    assert 45 << 20 < peak - rest < 80 << 20, (rest, now, peak)
    assert now - rest < 20 << 20, (rest, now, peak)
    assert measure.forget_peak() and measure.resident()[1] - rest < 20 << 20
"""
    if "no" in subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout:
        pytest.skip("the system does not let a process reset its peak")


def row(extra, seconds):
    done = [{"loss": 1.0, "grad_norm": 2.0, "seconds": s, "cpu_seconds": s, "peak": (100 + extra) << 20} for s in (9.0, *seconds)]
    return {"rest": 100 << 20, "peak_was_reset": True, "updates": done}


def test_ratios_by_hand():
    made = {"ours-rows": row(30, [2.0, 4.0]), "plain-rows": row(60, [3.0, 6.0]), "trl-fast": row(50, [8.0, 8.0])}
    rows = {way: compare.summary(r, 600) for way, r in made.items()}
    assert rows["ours-rows"]["extra_mib"] == 30 and rows["ours-rows"]["tokens_per_s"] == 200
    (found,) = compare.ratios(rows, 10.0).values()
    assert found["plain"]["memory"] == 0.5 and found["plain"]["speed"] == 1.5 and found["plain"]["memory_beyond_gradients"] == 0.4
    assert found["trl"]["memory"] == 0.6 and found["trl"]["speed_range"] == [2.0, 4.0] and found["trl"]["speed"] == 3.0
    assert found["better"]["memory"] == 0.6 and found["better"]["leanest"] == "trl-fast"
    assert found["better"]["speed"] == 1.5 and found["better"]["fastest"] == "plain-rows"


@pytest.mark.parametrize(
    ("key", "value", "agree"), [("loss", 1.0, True), ("loss", 1.001, False), ("loss", float("nan"), False), ("grad_norm", 2.01, False)]
)
def test_a_contender_that_computes_something_else_is_found(key, value, agree):
    rows = {"ours": row(1, [1.0])["updates"], "plain": row(1, [1.0])["updates"]}
    rows["plain"][0][key] = value
    assert compare.agreement(rows)["agree"] is agree


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ways ours theirs", "unknown contender 'theirs'; known: ours"),
        ("--repeats 0", "--repeats must be at least 1"),
        ("--vocab 3", "--vocab must be at least 16"),
        ("--hidden 100", "--hidden must be a multiple of 64"),
        ("--episodes 6", "--episodes must be a multiple of 4"),
        ("--shortest 600", "in this order"),
    ],
)
def test_bad_input_is_told(flags, says, capsys):
    assert speed.main(["update", *flags.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow  # starts three processes that import transformers
def test_end_to_end(tmp_path, capsys):
    out = tmp_path / "speed.json"
    out.write_text('{"other": 1}')
    assert speed.main(["update", *FLAGS, "--ways", "ours-rows", "plain-rows", "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["other"] == 1  # another section stays
    (case,) = told["update"]["cases"]
    assert case["agreement"]["agree"] and case["tokens"] > case["sampled_tokens"] > 0
    for contender in case["contenders"].values():
        assert contender["tokens_per_s"] > 0 and contender["extra_mib"] > 0 and len(contender["loss"]) == 2
    (found,) = case["ratios"].values()
    assert found["plain"]["memory"] > 0 and found["plain"]["speed"] > 0
    assert {"cpu", "cores", "versions"} <= told["update"]["machine"].keys()
    assert "| ours-rows |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_contender_that_dies_is_told(monkeypatch, capsys):
    monkeypatch.setattr(speed, "OLD", "absent.pt")
    monkeypatch.setattr(
        speed, "begin", lambda way, folder, stack, begin=speed.begin: begin("nobody" if way == "look" else way, folder, stack)
    )
    assert speed.main(["update", *FLAGS, "--ways", "ours"]) == 2
    assert "contender nobody ended with status 1" in capsys.readouterr().err
