"""The watcher on curves whose verdict is known, on recorded runs, across a resume; and the command."""

import json
import math
from io import StringIO
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console

from ragen_agent import diagnose, records
from ragen_agent.checkpoint import save as save_checkpoint
from ragen_agent.diagnose import Diagnose, Verdict, Watch, action
from ragen_agent.pretrained import Pretrained, save
from ragen_agent.prompts import Prompt
from ragen_agent.signs import climbing, fresh, level, noise, now, rise, take, was
from tests import parts

RUNS = Path(__file__).parents[1] / "benchmarks/results/watched"
NAN = math.nan


def ramp(step, first, last, low, high):
    """From `low` until step `first` to `high` from step `last`, straight in between."""
    return low + (high - low) * min(1.0, max(0.0, (step - first) / (last - first)))


def row(step, success, std, entropy, grad=1.0, **more):
    base = {"step": step, "success": success, "group_std": std, "flat_groups": 0.1, "entropy": entropy, "grad_norm": grad}
    return {**base, "reply_tokens": 60, "valid": 0.95, "kept": 0.5, "sampler_gap_max": 1e-5, "clip_fraction": 0.01, **more}


def mastering(step):
    """Success to 1, and with it all spread and entropy go; the last groups differ by accident, which makes gradients jump."""
    success = ramp(step, 0, 60, 0.2, 0.99)
    std, gone = math.sqrt(success * (1 - success)), ramp(step, 0, 80, 1.0, 0.05)
    late = {"kept": 0.0, "flat_groups": 1.0} if step > 90 else {"flat_groups": ramp(step, 30, 80, 0.1, 0.95)}
    return row(step, success, std * ramp(step, 0, 80, 1.0, 0.02), 0.9 * gone, 30.0 if step % 3 == 0 and step > 80 else gone, **late)


def paper(step):
    """RAGEN's FrozenLake-PPO: the spread goes at step 40, success at 90, where the gradient jumps; random play has .18."""
    success = ramp(step, 0, 40, 0.18, 0.32) if step < 90 else ramp(step, 90, 100, 0.32, 0.05)
    narrow = ramp(step, 39, 42, 1.0, 0.06)
    return row(step, success, 1.2 * narrow, 0.9 * ramp(step, 39, 48, 1.0, 0.1), 8.0 if step > 90 and step % 2 else 1.0)


def early(step):
    """Spread, entropy and success fall together near step 10, as Sokoban-PPO's."""
    return row(step, ramp(step, 8, 14, 0.25, 0.02), ramp(step, 8, 12, 2.0, 0.05), ramp(step, 8, 14, 0.8, 0.05))


def at_once(step):
    """The first rounds of the embedded model on Sokoban with --algo GRPO --lr 3e-3 --keep 1: gone by the third."""
    begun = [(0.484, 4.66, 0.339), (0.062, 0.58, 0.352), (0.0, 0.11, 0.465), (0.0, 0.01, 0.226), (0.0, 0.0, 0.106), (0.0, 0.0, 0.016)]
    return row(step, *(begun[step - 1] if step <= 6 else (0.0, 0.0, 0.004)), 0.01, kept=1.0)


def parrot(step):
    """Entropy is not logged; replies become one phrase."""
    made = row(step, 0.3, ramp(step, 30, 40, 1.0, 0.05), 0, repetition=ramp(step, 30, 40, 0.3, 0.97))
    del made["entropy"]
    return made


def lost_mastery(step):
    """Mastered at 50; at 100 it falls for one phrase."""
    if step < 100:
        return mastering(min(step, 80)) | {"step": step}
    return row(step, ramp(step, 100, 106, 0.99, 0.1), 0.001, 0.01, flat_groups=1.0)


CASES = {  # name -> (curve, rounds, noise, what is said at the end, what may be said before, the steps between which it holds since)
    "mastering": (mastering, 120, 0.03, "mastered", {"learning"}, (35, 65)),
    "paper": (paper, 130, 0.02, "echo trap", {"learning"}, (41, 48)),
    "early": (early, 40, 0.02, "echo trap", {"learning", "unstable"}, (9, 14)),
    "at once": (at_once, 30, 0, "echo trap", {"unstable"}, (2, 2)),
    "parrot": (parrot, 70, 0.02, "echo trap", {"learning"}, (33, 42)),
    "lost mastery": (lost_mastery, 130, 0.01, "echo trap", {"learning", "mastered"}, (101, 108)),
    "no signal": (lambda t: row(t, 0.0, 0.0, 0.9, 0.0, flat_groups=1.0, kept=0.0), 30, 0, "no signal", set(), (5, 5)),
    "all alike but not mastered": (lambda t: row(t, 0.5, 0.0, 0.9, 0.0, flat_groups=1.0), 30, 0, "no signal", set(), (5, 5)),
    "no form": (  # a prompt the model was never taught: a penalty differs here and there, and entropy falls all the same
        lambda t: row(t, 0.0, 0.03 if t < 4 else 0.001, ramp(t, 1, 15, 0.5, 0.05), flat_groups=0.95, valid=0.01),
        40,
        0,
        "no signal",
        set(),
        (5, 5),
    ),
    "spread goes, entropy stays": (
        lambda t: row(t, 0.3, ramp(t, 30, 35, 1, 0.01), 0.9),
        70,
        0.02,
        "no signal",
        {"learning", "stalled"},
        (40, 50),
    ),
    "slow learner": (lambda t: row(t, 0.2 + 0.003 * t, 1.0, 0.9 - 0.002 * t), 150, 0.05, "learning", set(), (5, 5)),
    "noisy plateau": (lambda t: row(t, 0.4, 1.0, 0.6), 90, 0.08, "stalled", {"learning"}, (40, 60)),
    "rise, then plateau": (lambda t: row(t, ramp(t, 0, 30, 0.2, 0.6), 1.0, 0.6), 120, 0.04, "stalled", {"learning"}, (45, 115)),
    "entropy rises": (lambda t: row(t, 0.3, 1.0, ramp(t, 20, 40, 0.8, 4.0)), 60, 0.02, "unstable", {"learning"}, (25, 40)),
    "entropy rises with success": (
        lambda t: row(t, ramp(t, 0, 60, 0.1, 0.8), 1.0, ramp(t, 0, 60, 0.2, 0.9)),
        60,
        0.01,
        "learning",
        set(),
        (5, 5),
    ),
    "gradient jumps": (
        lambda t: row(t, 0.3, 1.0, 0.8, 50.0 if t > 30 and t % 3 == 0 else 1.0),
        60,
        0.02,
        "unstable",
        {"learning"},
        (33, 50),
    ),
    "success falls, spread stays": (
        lambda t: row(t, ramp(t, 40, 60, 0.6, 0.2), 1.0, 0.8),
        80,
        0.03,
        "unstable",
        {"learning", "stalled"},
        (45, 65),
    ),
    "form is lost": (  # StarPO driven at a rate of 1e-3: noise between rounds hides how success sinks
        lambda t: row(t, ramp(t, 1, 20, 0.3, 0.15), 2.0, 0.4, valid=ramp(t, 20, 24, 0.98, 0.35)),
        45,
        0.08,
        "unstable",
        {"learning"},
        (21, 30),
    ),
    "form is lost on the way up": (
        lambda t: row(t, ramp(t, 0, 60, 0.1, 0.7), 1.0, 0.8, valid=ramp(t, 20, 24, 0.98, 0.6)),
        60,
        0.01,
        "learning",
        set(),
        (5, 5),
    ),
    "clipped": (lambda t: row(t, 0.3, 1.0, 0.8, clip_fraction=0.5 if t > 20 else 0.1), 40, 0.02, "unstable", {"learning"}, (21, 27)),
    "another sampler": (lambda t: row(t, 0.3, 1.0, 0.8, sampler_gap_max=3.0), 40, 0.02, "unstable", set(), (5, 5)),
    "rounds of NaN": (lambda t: row(t, 0.3, 1.0, 0.8, NAN if t > 20 else 1.0), 40, 0.02, "unstable", {"learning"}, (22, 22)),
    "skipped steps": (lambda t: row(t, 0.3, 1.0, 0.8, skipped=2 if t > 20 else 0), 40, 0.02, "unstable", {"learning"}, (22, 22)),
    "success alone": (lambda t: {"step": t, "success": ramp(t, 0, 60, 0.1, 0.7)}, 60, 0.02, "learning", set(), (5, 5)),
    "nothing": (lambda t: {}, 30, 0, "learning", set(), (5, 5)),
}


def noisy(made, chance, noise):
    """The same row with noise on what is measured: success absolutely, the rest relatively."""
    out = dict(made)
    for name, scale in (("group_std", 0.15), ("entropy", 0.05), ("grad_norm", 0.2)):
        if name in out and noise and math.isfinite(out[name]):
            out[name] = max(0.0, out[name] * (1 + scale * chance.gauss(0, 1)))
    if "success" in out:
        out["success"] = min(1.0, max(0.0, out["success"] + noise * chance.gauss(0, 1)))
    return out


def curve(name, seed=0):
    made, rounds, noise, *_ = CASES[name]
    chance = Random(seed)
    return [noisy(made(step), chance, noise) for step in range(1, rounds + 1)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_each_curve_gets_its_verdict_and_nothing_worse_before(name, seed):
    *_, end, before, (low, high) = CASES[name]
    told = diagnose.told_of(curve(name, seed))
    said = [change["name"] for change in told["history"]]
    assert said[-1] == end and said[0] == "starting"
    assert set(said[1:]) <= {end} | before, [change["text"] for change in told["history"]]
    assert low <= told["verdict"]["since"] <= high, told["verdict"]["text"]


@pytest.mark.parametrize("seed", range(3))
def test_the_trap_is_told_long_before_success_falls(seed):
    change = next(c for c in diagnose.told_of(curve("paper", seed))["history"] if c["name"] == "echo trap")
    assert change["step"] <= 65  # success falls at 90
    assert {"spread", "entropy"} <= change["signs"].keys()
    for part in ("echo trap since step", "std 0.", "(was 1.", "entropy 0.", "(was 0.", "--keep 0.25"):
        assert part in change["text"], change["text"]


def test_mastery_says_why_it_is_no_trap():
    """Every sign of the trap stands, RAGEN's rules would have stopped the run, and it is mastery all the same."""
    verdict = diagnose.told_of(curve("mastering"))["verdict"]
    assert {"spread", "entropy", "flat", "ragen_variance", "ragen_empty", "spikes"} <= verdict["signs"].keys()
    assert "spread and entropy may fall" in verdict["text"]


@pytest.mark.parametrize(
    ("exact", "random", "name"), [(None, None, "stalled"), (0.48, 0.2, "mastered"), (1.0, 0.2, "stalled"), (0.45, 0.45, "mastered")]
)
def test_mastery_is_measured_by_the_exact_player(exact, random, name):
    """Success .46 is all that ice lets an exact player reach."""
    assert diagnose.told_of([row(t, 0.46, 1.0, 0.8) for t in range(1, 60)], exact, random)["verdict"]["name"] == name


@pytest.mark.parametrize("name", CASES)
def test_one_bad_row_flips_nothing(name):
    rows = curve(name)
    for bad in (row(0, 0.0, 0.0, 0.0, 1e6), row(0, 1.0, 9.0, 9.0, 0.0), row(0, NAN, NAN, NAN, NAN)):
        watch = Watch()
        for made in rows:
            last = watch.see(made)
        assert watch.see({**bad, "step": len(rows) + 1}).name == last.name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cut", [1, 4, 6, 25])
def test_a_watch_resumes_exactly(name, cut):
    rows = curve(name)
    whole, first = Watch(0.9, 0.1), Watch(0.9, 0.1)
    wanted = [whole.see(made) for made in rows]
    begun = [first.see(made) for made in rows[:cut]]
    saved = json.loads(json.dumps(first.state))
    again = Watch(state=saved)
    assert begun + [again.see(made) for made in rows[cut:]] == wanted
    assert saved == first.state and again.state == whole.state  # neither shares its state


def test_a_checkpoint_can_hold_the_state(tmp_path):
    watch = Watch(0.5, 0.1)
    for made in curve("paper"):
        watch.see(made)
    torch.save({"watch": watch.state}, tmp_path / "training.pt")
    assert torch.load(tmp_path / "training.pt", weights_only=True)["watch"] == watch.state


RECORDED = {  # run -> (the last verdict, the others that were told, the signs at the end)
    "default": ("learning", set(), {"rising"}),
    "mastering": ("no signal", {"learning", "mastered", "unstable", "stalled"}, {"spread", "entropy", "flat"}),  # and one board forgotten
    "silent": ("no signal", {"learning"}, {"flat"}),  # it never had a form to lose: one reply in 150
    "collapse-0": ("unstable", set(), {"fell", "spread", "form"}),  # noise to the last token: its entropy does not fall
    "collapse-1": ("echo trap", set(), {"spread", "entropy", "repeats", "template", "fell"}),
    "collapse-2": ("echo trap", set(), {"spread", "repeats", "template", "fell"}),
}


@pytest.mark.parametrize("run", sorted(path.name for path in RUNS.iterdir()))
def test_recorded_runs(run):
    told = diagnose.told_of(records.read(RUNS / run / "metrics.jsonl"), *diagnose.players(RUNS / run))
    end, others, standing = RECORDED[run]
    assert told["verdict"]["name"] == end and {change["name"] for change in told["history"]} == {"starting", end} | others
    assert standing <= told["verdict"]["signs"].keys()


def test_the_recorded_mastery_is_told_and_never_called_a_trap():
    told = diagnose.told_of(records.read(RUNS / "mastering/metrics.jsonl"), *diagnose.players(RUNS / "mastering"))
    names = [change["name"] for change in told["history"]]
    assert names[:3] == ["starting", "learning", "mastered"] and "echo trap" not in names
    assert next(change["step"] for change in told["history"] if change["name"] == "mastered") == 20


# -- the parts ---------------------------------------------------------------------------------------------------------------


def state_of(rows, **players):
    state = fresh(**players)
    for made in rows:
        take(state, made)
    return state


def test_smoothing_and_bases_by_hand():
    """1 then 2, newest weighs .3: (.7 * .3 * 1 + .3 * 2) / (.7 * .3 + .3) = .81 / .51; the base: the median of five, or the first."""
    assert now(state_of([{"success": 1.0}, {"success": 2.0}]), "success") == pytest.approx(0.81 / 0.51, abs=1e-12, rel=0)
    state = state_of([{"entropy": value} for value in (1.0, 9.0, 2.0, 3.0, 2.5, 50.0)])
    assert was(state, "entropy") == 2.5 and now(state, "success") is None and was(state, "success") == 0
    assert was(state_of([{"entropy": value} for value in (4.0, 1.0, 2.0, 3.0, 2.5)]), "entropy") == 4


def test_a_spread_that_grows_first_is_measured_from_its_height():
    state = state_of([{"group_std": 0.1}] * 5 + [{"group_std": 2.0}] * 40)
    assert was(state, "group_std") == pytest.approx(2, abs=1e-5, rel=0)


def test_noise_by_hand():
    """Differences 1, 1, 5: the median is 1; a jump does not count. For many normal draws it is their standard deviation."""
    assert noise(state_of([{"success": float(v)} for v in (0, 1, 2, 7)])) == pytest.approx(1 / 0.9539, abs=1e-12, rel=0)
    assert noise(state_of([{"success": 1.0}])) == 0
    drawn = [noise(state_of([{"success": Random(100 * i + j).gauss(0, 1)} for j in range(40)])) for i in range(40)]
    assert 0.9 < sum(drawn) / len(drawn) < 1.1


def test_rise_by_hand():
    """0 1 0 1 0 | 2 3 2 3 2: means .4 and 2.4; squared deviations 1.2 each, so s^2 = 2.4 / 8 and se = sqrt(2 * .3 / 5)."""
    gain, error = rise(state_of([{"success": float(v)} for v in (0, 1, 0, 1, 0, 2, 3, 2, 3, 2)]))
    assert (gain, error) == pytest.approx((2.0, math.sqrt(0.12)), abs=1e-12, rel=0)
    assert rise(state_of([{"success": 1.0}] * 9)) == (0.0, 1.0)  # too few to say
    assert climbing(state_of([{"success": v / 100} for v in range(20)])) and not climbing(state_of([{"success": 0.3}] * 20))


@pytest.mark.parametrize(
    ("exact", "random", "success", "value"),
    [(None, None, 0.3, 0.3), (0.5, 0.1, 0.3, 0.5), (1.0, 0.2, 0.1, -0.125), (0.4, 0.4, 0.4, 1), (0.4, 0.4, 0.3, 0), (0.0, 0.0, 0.0, 0)],
)
def test_level(exact, random, success, value):
    assert level(fresh(exact, random), success) == pytest.approx(value, abs=1e-12, rel=0)


def test_the_samplers_estimate_stands_in_for_the_entropy():
    assert now(state_of([{"surprise": 0.5}]), "entropy") == 0.5
    assert now(state_of([{"surprise": 0.5, "entropy": 0.7}]), "entropy") == 0.7


@pytest.mark.parametrize(
    ("rows", "sign", "rounds"),
    [  # RAGEN's own rules, by the round at which they stand: ten rounds are the base, then ten are thin; five empty; five without success
        ([row(t, 0.3, 1.0 if t <= 10 else 0.09, 0.8) for t in range(1, 31)], "ragen_variance", 20),
        ([row(t, 0.3, 1.0 if t <= 10 else 0.11, 0.8) for t in range(1, 31)], "ragen_variance", None),
        ([row(t, 0.3, 1.0 if t <= 10 or t == 18 else 0.09, 0.8) for t in range(1, 31)], "ragen_variance", 28),
        ([row(t, 0.3, 1.0, 0.8, kept=0.0 if t > 7 else 1.0) for t in range(1, 31)], "ragen_empty", 12),
        ([row(t, 0.3, 1.0, 0.8, kept=0.0 if t % 5 else 1.0) for t in range(1, 31)], "ragen_empty", None),
        ([row(t, 0.3, 1.0, 0.8, **({"evaluation": {"success": 0.009}} if t % 2 == 0 else {})) for t in range(1, 31)], "ragen_failing", 10),
        ([row(t, 0.3, 1.0, 0.8, evaluation={"success": 0.01}) for t in range(1, 31)], "ragen_failing", None),
    ],
)
def test_ragens_rules(rows, sign, rounds):
    watch = Watch()
    assert next((made["step"] for made in rows if sign in watch.see(made).signs), None) == rounds


@pytest.mark.parametrize(
    ("more", "sign", "names"),
    [
        ({"reply_tokens": 20}, "length", ("learning", "stalled")),
        ({"reply_tokens": 200}, "length", ("learning", "stalled")),
        ({"valid": 0.4}, "form", ("unstable",)),
        ({"repetition_across": 0.99}, "template", ("learning", "stalled")),
    ],
)
def test_what_replies_lose(more, sign, names):
    rows = [row(t, 0.3, 1.0, 0.8, repetition_across=0.4) | (more if t > 20 else {}) for t in range(1, 41)]
    verdict = diagnose.told_of(rows)["verdict"]
    assert set(verdict["signs"]) - {"stuck"} == {sign} and verdict["name"] in names


@pytest.mark.parametrize("name", ["starting", "learning", "mastered", "stalled", "no signal", "unstable", "echo trap"])
def test_actions(name):
    verdict = Verdict(name, 3, "", {})
    assert action(verdict, "off") == action(verdict, "tell") == "go"
    assert action(verdict, "stop") == ("stop" if name in ("no signal", "unstable", "echo trap") else "go")
    with pytest.raises(ValueError, match="known: off, tell, stop"):
        action(verdict, "maybe")


# -- the command -------------------------------------------------------------------------------------------------------------


def said(config):
    told = StringIO()
    return diagnose.run(config, Console(file=told, width=60)), told.getvalue()


def test_the_command_tells_the_changes(tmp_path):
    for made in curve("paper"):
        records.append(tmp_path / "metrics.jsonl", made)
    records.write_json(tmp_path / "before.json", {"random": {"success": 0.18}, "exact": {"success": 0.95}, "before": {"success": 0.2}})
    told, text = said(Diagnose(tmp_path))
    lines = text.splitlines()
    assert [change["name"] for change in told["history"]] == ["starting", "learning", "echo trap"]
    assert lines[2].startswith(f"step {told['history'][2]['step']}: echo trap since step") and lines[3].startswith(
        "now, at step 130: echo trap"
    )
    assert [line.split(":")[0].strip() for line in lines[4:]] == list(told["verdict"]["signs"])
    _, text = said(Diagnose(tmp_path, json=True))
    assert json.loads(text) == told


def test_the_players_are_found_in_either_file(tmp_path):
    assert diagnose.players(tmp_path) == (None, None)
    records.write_json(tmp_path / "result.json", {"rows": {"random": {"success": 0.1}, "exact": {"success": 0.9}}})
    assert diagnose.players(tmp_path) == (0.9, 0.1)
    records.write_json(tmp_path / "before.json", {"random": {"success": 0.2}})
    assert diagnose.players(tmp_path) == (None, 0.2)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metrics.jsonl"):
        diagnose.run(Diagnose(tmp_path))
    records.append(tmp_path / "metrics.jsonl", {"step": 1})
    with pytest.raises(ValueError, match="whole checkpoint"):
        diagnose.run(Diagnose(tmp_path, information=True))


def test_the_information_of_a_checkpoint(tmp_path):
    model = Pretrained(parts.tiny(), parts.byte_tokenizer(), Prompt(style="brief"))
    save_checkpoint(tmp_path, 1, lambda folder: save(folder, model))
    config = {"env": "ragen/FrozenLake-v0", "env_args": ["turns_per_episode=1"], "max_tokens": 6, "threads": 1, "temperature": 1.0}
    records.write_json(tmp_path / "config.json", {**config, "model": "gone", "eval_split": "val", "eval_levels": None, "steps": 1})
    records.append(tmp_path / "metrics.jsonl", {"step": 1, "success": 0.1})
    told, text = said(Diagnose(tmp_path, information=True, prompts=3, replies=6))
    assert told["information"]["sequences"] == 18 and 0 < told["information"]["mi"] < math.log(3)
    assert "I(X;Z)" in text and "18 sequences scored" in text.replace("\n", " ")
    _, text = said(Diagnose(tmp_path, information=True, prompts=3, replies=6, json=True))
    assert json.loads(text)["information"]["retrieval"].keys() == {"1", "2"}
