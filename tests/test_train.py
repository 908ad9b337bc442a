"""Training from the command down: resume bit for bit after a kill, errors that name the known, what a run leaves (K01)."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen_agent import cli, evaluate, records, teach, train
from ragen_agent.backends import HFBackend
from ragen_agent.checkpoint import latest, number
from ragen_agent.pretrained import Pretrained, load, save
from ragen_agent.prompts import Prompt
from tests import parts

TIMED = ("seconds", "seconds_play", "seconds_learn", "tokens_per_second")
SMALL = {"groups": 2, "group_size": 3, "minibatch": 3, "max_tokens": 8, "eval_episodes": 4, "save_every": 1, "threads": 1, "lr": 1e-2}
SMALL |= {"env_args": ("turns_per_episode=2",), "grad_clip": 0.5}
SMALL |= {"algo": "ARPO", "keep": 1.0}  # a random model's returns are all alike: only a raw reward moves it


@pytest.fixture
def model(tmp_path):
    """A folder with a tiny random model that speaks bytes."""
    folder = tmp_path / "model"
    save(folder, Pretrained(parts.tiny("llama"), parts.byte_tokenizer(), Prompt(style="brief")))
    return str(folder)


def weights(run):
    folder = latest(run)
    assert folder is not None
    return torch.load(folder / "training.pt", weights_only=True)


def rows(run):
    return [{k: v for k, v in row.items() if k not in TIMED} for row in records.read(run / "metrics.jsonl")]


@pytest.mark.parametrize("algo", ["ARPO", "PPO"])
def test_six_steps_are_three_and_three(tmp_path, model, algo):
    one, two = tmp_path / "one", tmp_path / "two"
    train.run(train.Train(model=model, steps=6, out=one, **{**SMALL, "algo": algo}))
    train.run(train.Train(model=model, steps=3, out=two, **{**SMALL, "algo": algo}))
    torch.manual_seed(12345)  # a new process has another global state
    train.run(train.Train(resume=two, steps=6))
    done, again = weights(one), weights(two)
    assert done["algo"].keys() == again["algo"].keys()
    first = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any(not torch.equal(done["algo"][f"policy.{name}"], value) for name, value in first.items())  # it did train
    assert all(torch.equal(done["algo"][name], again["algo"][name]) for name in done["algo"])
    for a, b in zip(done["optimizer"]["state"].values(), again["optimizer"]["state"].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
    assert [{**row, "evaluation": 0} for row in rows(one)] == [{**row, "evaluation": 0} for row in rows(two)]
    assert rows(one)[-1]["evaluation"] == rows(two)[-1]["evaluation"]


def test_adapters_train_go_on_and_are_merged_at_the_end(tmp_path, model):
    """Their KL is measured from the model without them: 0 at first. The merged model says what model and adapters say."""
    one, two, more = tmp_path / "one", tmp_path / "two", {**SMALL, "lora_rank": 2, "algo_args": ("kl_coef=0.1",)}
    train.run(train.Train(model=model, steps=3, out=one, **more))
    train.run(train.Train(model=model, steps=1, out=two, **more))
    shutil.rmtree(two / train.MERGED)  # of one round
    train.run(train.Train(resume=two, steps=3))
    done, again = weights(one)["algo"], weights(two)["algo"]
    assert done.keys() == again.keys() and all(".lora_" in name for name in done)
    assert all(torch.equal(done[name], again[name]) for name in done)
    told = rows(one)
    assert told[0]["kl_old"] == 0 < told[1]["kl_old"]
    folder, ids = latest(two), torch.arange(1, 9)[None]
    assert folder is not None
    plain = AutoModelForCausalLM.from_pretrained(two / train.MERGED)
    with torch.no_grad():
        gap = (plain(ids).logits - load(str(folder)).model(ids).logits).abs().max()
        moved = (plain(ids).logits - load(model).model(ids).logits).abs().max()
    assert gap < 1e-5 < moved


def test_the_moments_may_be_held_in_8_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = str(tmp_path / "model")  # its embedding has more than the 4096 numbers that are worth it
    save(Path(model), Pretrained(parts.tiny("llama"), parts.byte_tokenizer(), Prompt(style="brief")))
    for name, steps in (("one", 2), ("two", 1)):
        train.run(train.Train(model=model, steps=steps, out=tmp_path / name, optimizer="adamw8bit", **SMALL))
    train.run(train.Train(resume=tmp_path / "two", steps=2))
    done, again = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(done["algo"][name], again["algo"][name]) for name in done["algo"])
    moments = [state["__bnb_optimizer_quant_state__"]["state1"] for state in done["optimizer"]["state"].values()]
    assert {x.dtype for x in moments if x.numel() >= 4096} == {torch.uint8}


def test_a_kill_at_any_moment_loses_nothing(tmp_path, model):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train.run(train.Train(model=model, steps=5, out=straight, **SMALL))
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items() if k != "env_args"] + ["--env-args", "turns_per_episode=2"]
    start = ["train", "--model", model, "--steps=5", f"--out={killed}", *flags]
    resume = ["train", f"--resume={killed}"]
    for attempt in range(8):
        begun = (killed / "config.json").exists()
        command = [sys.executable, "-m", "ragen_agent.cli", *(resume if begun else start)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ)
        step = len(records.read(killed / "metrics.jsonl")) if (killed / "metrics.jsonl").exists() else 0
        while child.poll() is None and not _beyond(killed, step):  # kill in the middle of what follows the next round
            time.sleep(0.01)
        time.sleep(0.013 * attempt)
        if child.poll() is not None:
            break
        child.send_signal(signal.SIGKILL)
        child.wait()
    else:
        pytest.fail("the run never ended")
    assert child.returncode == 0, child.stdout.read().decode() if child.stdout else ""
    assert attempt > 0
    done, again = weights(straight), weights(killed)
    assert all(torch.equal(done["algo"][name], again["algo"][name]) for name in done["algo"])
    assert rows(straight) == rows(killed)
    assert json.loads((straight / "result.json").read_text())["rows"] == json.loads((killed / "result.json").read_text())["rows"]


def _beyond(run, step):
    path = run / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") > step


def test_what_a_run_leaves(tmp_path, model):
    out = tmp_path / "run"
    results = train.run(train.Train(model=model, steps=2, out=out, keep_checkpoints=1, **SMALL))
    assert set(results) == {"random", "exact", "before", "after"}
    assert results["exact"]["success"] == 1.0
    folder = latest(out)
    assert folder is not None and number(folder) == 2
    assert len(list(out.glob("step-*"))) == 1
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    state = torch.load(folder / "training.pt", weights_only=True)["algo"]
    for name, value in loaded.state_dict().items():
        assert torch.equal(state[f"policy.{name}"], value)
    assert AutoTokenizer.from_pretrained(folder).chat_template == parts.CHATML
    assert json.loads((out / "config.json").read_text())["steps"] == 2
    last = rows(out)[-1]
    for name in ("success", "return", "group_std", "entropy", "grad_norm", "clip_fraction", "sampler_gap_max", "evaluation"):
        assert name in last
    assert last["sampler_gap_max"] < 1e-4
    told = (Path(__file__).parents[1] / "docs/algorithms.md").read_text()
    assert [name for name in (*last, *last["evaluation"]) if f"`{name}`" not in told] == []
    transcript = records.from_row(records.read(out / "transcripts.jsonl")[0])
    assert transcript.turns and transcript.turns[0].reply.ids
    assert (out / "learning.png").stat().st_size > 1000


def test_a_second_run_does_not_overwrite_the_first(tmp_path, model):
    config = train.Train(model=model, steps=1, out=tmp_path / "run", **SMALL)
    train.run(config)
    with pytest.raises(ValueError, match="--resume"):
        train.run(config)


def test_a_resumed_run_keeps_its_settings(tmp_path, model, capsys):
    train.run(train.Train(model=model, steps=1, out=tmp_path / "run", **SMALL))
    with pytest.raises(ValueError, match="keeps its settings.*lr"):
        train.run(train.Train(resume=tmp_path / "run", lr=0.5))
    for flag in ("--groups=32", "--lr=0.0003", "--no-checkpointing", "--eval_split=val"):  # the defaults, which the run does not have
        assert cli.main(["train", "--resume", str(tmp_path / "run"), flag]) == 2
        assert flag.removeprefix("--no-").strip("-").partition("=")[0] in capsys.readouterr().err
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/config.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"torn.config\.json: not JSON"):
        train.run(train.Train(resume=tmp_path / "torn"))
    with pytest.raises(ValueError, match=r"no config\.json"):
        train.run(train.Train(resume=tmp_path / "nowhere"))


def test_resuming_a_finished_run_changes_nothing_and_takes_more_steps(tmp_path, model):
    results = train.run(train.Train(model=model, steps=1, out=tmp_path / "run", **SMALL))
    assert train.run(train.Train(resume=tmp_path / "run")) == results
    train.run(train.Train(resume=tmp_path / "run", steps=2))
    with pytest.raises(ValueError, match="has 2 rounds already"):
        train.run(train.Train(resume=tmp_path / "run", steps=1))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_a_resumed_run_remembers_how_many_rounds_it_was_to_have(tmp_path, model, monkeypatch):
    """More rounds are asked for, it is stopped, and goes on by the command that it named then."""
    train.run(train.Train(model=model, steps=1, out=tmp_path / "run", **SMALL))
    append = train.append

    def stopping(path, row):
        append(path, row)
        if path.name == "metrics.jsonl" and row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train, "append", stopping)
    with pytest.raises(SystemExit):
        train.run(train.Train(resume=tmp_path / "run", steps=3))
    results = train.run(train.Train(resume=tmp_path / "run"))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert results["after"] == rows(tmp_path / "run")[-1]["evaluation"]
    assert json.loads((tmp_path / "run/config.json").read_text())["resume"] is None


def test_a_run_that_the_watch_ends_is_evaluated(tmp_path, model):
    flat = {**SMALL, "group_size": 1, "keep": 0.5, "max_empty": 100}  # nothing differs: no signal
    results = train.run(train.Train(model=model, steps=40, watch="stop", out=tmp_path / "run", **{**flat, "eval_episodes": 5}))
    assert rows(tmp_path / "run")[-1]["step"] < 40 and results["after"] == rows(tmp_path / "run")[-1]["evaluation"]
    assert all("evaluation" not in row for row in rows(tmp_path / "run")[:-1])


NOT_A_NUMBER = """
import gymnasium as gym
from ragen_envs.sokoban import Sokoban

class Broken(Sokoban):
    def step(self, action):
        seen, reward, *rest = super().step(action)
        return seen, {reward} if self.np_random.random() < {share} else reward, *rest

gym.register("ragen/{name}-v0", Broken)
"""


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("reward", ["nan", "inf"])
def test_rewards_that_are_not_finite_are_dropped_and_counted(tmp_path, monkeypatch, reward, share):
    name = f"{reward}{share:.0f}"
    (tmp_path / f"{name}.py").write_text(NOT_A_NUMBER.format(name=name, reward=f'float("{reward}")', share=share))
    monkeypatch.chdir(tmp_path)
    flags = {**SMALL, "groups": 4, "max_tokens": 48}
    results = train.run(train.Train(env=f"{name}:ragen/{name}-v0", steps=2, out=tmp_path / "run", **flags))
    row, said = rows(tmp_path / "run")[0], [records.from_row(row) for row in records.read(tmp_path / "run/transcripts.jsonl")]
    assert 0 < row["broken"] <= 12 and (row["broken"] == 12) == (share == 1) and row["kept"] == 1 - row["broken"] / 12
    assert ("return" in row) == ("return" in results["after"]) == ("grad_norm" in row) == (share < 1)
    assert share < 1 or all(math.isnan(turn.reward) for episode in said for turn in episode.turns)


def test_both_the_player_and_the_judge_get_the_new_weights(tmp_path, model, monkeypatch):
    loaded = []
    monkeypatch.setattr(HFBackend, "load", lambda self, policy: loaded.append(id(self)))
    train.run(train.Train(model=model, steps=2, out=tmp_path / "run", **SMALL))
    assert len(set(loaded)) == 2 and len(loaded) == 4


def test_an_evaluation_in_between_changes_nothing(tmp_path, model):  # V05
    for name, every in (("never", 0), ("each", 1)):
        train.run(train.Train(model=model, steps=3, eval_every=every, out=tmp_path / name, **SMALL))
    never, each = weights(tmp_path / "never"), weights(tmp_path / "each")
    assert all(torch.equal(never["algo"][name], each["algo"][name]) for name in never["algo"])


def test_a_greedy_evaluation_is_reproducible_and_says_how_it_was_made(tmp_path, model):  # V05
    told = []
    for name in ("one", "two"):
        flags = {"episodes": 5, "temperature": 0.0, "max_tokens": 8, "threads": 1, "batch_rows": 1 if name == "one" else 4}
        out, transcripts = tmp_path / name / "result.json", tmp_path / name / "episodes.jsonl"
        state = torch.get_rng_state()
        evaluate.run(evaluate.Evaluate(model=model, out=out, transcripts=transcripts, **flags))
        assert torch.equal(state, torch.get_rng_state())
        texts = [[turn["reply"]["ids"] for turn in row["turns"]] for row in records.read(transcripts)]
        told.append((texts, json.loads(out.read_text())))
    assert len(told[0][0]) == 5 and told[0][0] == told[1][0]
    result = told[0][1]
    for name, row in result["rows"].items():  # the entropy is a sum of logprobs, whose last bits depend on the batch
        assert row == pytest.approx(told[1][1]["rows"][name], abs=1e-6), name
    assert (result["temperature"], result["levels"], result["rows"]["model"]["episodes"]) == (0.0, [123, 127], 5)


@pytest.mark.parametrize("flags", [{"env": "ragen/BanditTest-v0"}, {"env_args": ("split=null",)}, {"env_args": ("split=val",)}])
def test_held_out_levels_are_neither_taught_nor_trained_on(tmp_path, model, flags):
    with pytest.raises(ValueError, match="split"):
        teach.run(teach.Teach(model=model, out=tmp_path / "t", **flags))
    split = "test" if "env" in flags else "val"
    with pytest.raises(ValueError, match="held-out"):
        train.run(train.Train(model=model, out=tmp_path / "r", eval_split=split, **flags))
    assert not (tmp_path / "r").exists()


def test_the_uncertainty_filter_and_its_empty_set(tmp_path, model):
    train.run(train.Train(model=model, steps=1, out=tmp_path / "run", **{**SMALL, "keep": 0.5}))
    row = rows(tmp_path / "run")[0]
    assert row["kept"] <= 0.5
    flat = train.Train(model=model, steps=1, out=tmp_path / "flat", **{**SMALL, "keep": 0.5, "group_size": 1})
    train.run(flat)
    assert rows(tmp_path / "flat")[0]["kept"] == 0 and "grad_norm" not in rows(tmp_path / "flat")[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env", "ragen/Chess-v0"], "ragen/Sokoban-v0"),
        (["--model", "./nowhere"], "embedded, smollm2"),
        (["--algo", "SAC"], "BRPO"),
        (["--algo-args", "clip=3"], "clip_high"),
        (["--env-args", "views=coord"], "views"),
        (["--env-args", "view=cord"], "grid_coord"),
        (["--env-args", "coord"], "name=value"),
        (["--eval-levels", "nope"], "ragen/simple"),
        (["--filter", "bad"], "top_k"),
        (["--device", "abacus"], "cuda"),
        (["--seed", "-1"], "--seed is at least 0"),
        (["--seed", str(2**64)], "--seed is at most"),
        (["--save-every", "0"], "--save-every is at least 1"),
        (["--env", "CartPole-v1"], "TextEnv"),
        (["--env-args", "split=foo"], "val"),
        *(
            (["--" + name, value], f"--{name} is at least 0")
            for name in ("lr", "critic-lr", "weight-decay")
            for value in ("-1", "nan", "inf")
        ),
        *((["--" + name, "-1"], f"--{name} is at least 0") for name in ("steps", "minibatch", "eval-temperature", "samples", "window")),
        *((["--" + name, "0"], f"--{name} is at least 1") for name in ("threads", "context", "max-tokens", "micro-tokens", "groups")),
        *((["--grad-clip", value], "--grad-clip is a finite number above 0") for value in ("0", "-1", "nan", "inf")),
        (["--lora-rank", "2", "--lora-alpha", "0"], "--lora-alpha is a finite number above 0"),
    ],
)
def test_what_cannot_be_is_said_in_a_line_and_leaves_no_run_behind(tmp_path, model, flags, message, capsys):
    base = ["train", "--steps", "1", "--out", str(tmp_path / "run"), "--eval-episodes", "2"]
    base += [] if "--model" in flags else ["--model", model]
    assert cli.main([*base, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_flag_is_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--learning-rates", "1"])
    assert stop.value.code == 2
    assert "learning-rates" in capsys.readouterr().err


def test_every_flag_is_documented(capsys):
    for verb, (settings, _) in cli.VERBS.items():
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        text = capsys.readouterr().out
        hints = get_type_hints(settings, include_extras=True)
        for name in settings.__dataclass_fields__:
            positional = tyro.conf.Positional[int].__metadata__[0] in getattr(hints[name], "__metadata__", ())
            assert (f" {name.upper()} " if positional else f"--{name.replace('_', '-')}") in text, name


def test_teaching_teaches(tmp_path, model):
    out = tmp_path / "taught"
    common = {"model": model, "out": out, "lessons": 24, "batch": 8, "epochs": 12, "lr": 1e-2, "eval_episodes": 4, "threads": 1}
    teach.run(teach.Teach(**common, max_tokens=60, env_args=("moves_per_turn=1",)))
    losses = [row["loss"] for row in records.read(out / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    AutoModelForCausalLM.from_pretrained(out)


def test_teaching_stays_on_the_train_split():
    with pytest.raises(ValueError, match="split"):
        teach.run(teach.Teach(model="embedded", env_args=("split=test",)))


@pytest.mark.slow
def test_the_embedded_model_learns(tmp_path):
    results = train.run(train.Train(steps=8, out=tmp_path / "run", threads=1))
    assert results["random"]["success_high"] < results["before"]["success_low"]
    assert results["after"]["success_low"] > results["before"]["success_high"]
