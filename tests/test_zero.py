"""ZeRO by DeepSpeed: two processes learn what one does, skip a bad step alike, and share checkpoints with one; configs it does not know."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ragen_agent import adapters, learn, parallel
from ragen_agent.algos import ALGOS, GRPO, StarPO
from ragen_agent.engines import Engine, engine_of
from ragen_agent.learn import Learn, improve
from ragen_agent.steps import Standing
from ragen_agent.zero import asked, needed, one_type, plain
from tests.algo_parts import algo, policy
from tests.parallel_parts import FLAGS, TABLE, WORLD, ahead, episodes

ROUNDS = (1, 2, 3)
STAGES = (1, 2)
NAMES = ("GRPO-kl", "PPO", "BRPO-lopsided")  # the last has a process without a row
SINGLE = 1e-5  # what weights in fp32 may differ by (measured: 1.3e-6, and as much between one process and two with whole copies)
HALF = 0.002  # and the mean of fp32 copies of weights in bf16, which have moved by 0.038 (measured: 0.0009)
launches = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def made(name: str, low: bool) -> StarPO:
    """An optimizer of the table; "adapters": around a policy whose weights are frozen but for adapters."""
    if name == "adapters":
        return GRPO(adapters.add(policy().float(), 2))
    kind, settings, _, _ = TABLE[name]
    agent = algo(ALGOS[kind], settings)
    for module in (agent, *agent._reference):
        module.to(torch.bfloat16 if low else torch.float32)
    return agent


def learned(name: str, rounds: tuple[int, ...] = ROUNDS, state: dict | None = None, low: bool = False, ill: int | None = None) -> dict:
    """What a case comes to by clipped steps of AdamW from `state`: a round's metrics each, and the states before, between and after.

    In round `ill` the gradients of the last process are not numbers.
    """
    _, _, flags, lopsided = TABLE.get(name, TABLE["GRPO"])
    config = Learn(**{**FLAGS, **flags})
    engine = engine_of(made(name, low), lambda agent: learn.optimizer(config, agent))
    if state is not None:
        engine.load(copied(state))
    standing, rows, states = Standing(), [], [copied(engine.state())]
    for step in rounds:
        hooks = []
        if step == ill and parallel.rank() == parallel.size() - 1:
            hooks = [p.register_hook(lambda grad: grad * torch.nan) for p in engine.algo.parameters() if p.requires_grad]
        rows.append(improve(config, engine, parallel.share(episodes(lopsided)), step, standing, contexts=ahead))
        for hook in hooks:
            hook.remove()
        states.append(copied(engine.state()))
    mine = sum(value.numel() for own in engine.optimizer.state.values() for value in own.values())
    return {"rows": rows, "states": states, "engine": type(engine).__name__, "held": parallel.union([mine])}


def copied(x):
    """A state as it is now: what an engine gives are its own tensors."""
    if isinstance(x, dict):
        return {name: copied(value) for name, value in x.items()}
    if isinstance(x, list):
        return [copied(value) for value in x]
    return x.clone() if isinstance(x, torch.Tensor) else x


def run(folder: Path, cases: list[tuple[int, dict]]) -> list[dict]:
    """What two processes make of `cases`, a stage and the arguments of `learned` each: the main process's word."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.save(cases, folder / "cases.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(WORLD), "--master_port", str(port)]
    command += ["-m", "tests.test_zero", str(folder)]
    shared = {**os.environ, "ACCELERATE_USE_DEEPSPEED": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=shared, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / "made.pt", weights_only=False)


def main(folder: Path) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    parallel.start()
    found = []
    for stage, case in torch.load(folder / "cases.pt", weights_only=False):
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
        found.append(learned(**case))
    if parallel.main():
        torch.save(found, folder / "made.pt")
    parallel.barrier()


def close(one, two, most: float) -> None:
    """The same structure, and numbers that differ by at most `most`."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for name, value in one.items():
            close(value, two[name], most)
    elif isinstance(one, list):
        for a, b in zip(one, two, strict=True):
            close(a, b, most)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, atol=most, rtol=0)
    else:
        assert one == two


def apart(one: dict, two: dict) -> float:
    """How much the fp32 copies of two states differ in the mean."""
    pairs = zip(*(state["optimizer"]["masters"] for state in (one, two)), strict=True)
    return float(torch.cat([(a - b).flatten() for a, b in pairs]).abs().mean())


# -- two processes ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(name, stage, what else) -> what two processes made of it, all in one launch."""
    cases = [(name, stage, "") for name in (*NAMES, "adapters") for stage in STAGES]
    cases += [case for stage in STAGES for case in (("PPO", stage, "ill"), ("GRPO", stage, "low"))]
    if importlib.util.find_spec("peft") is None:
        cases = [case for case in cases if case[0] != "adapters"]
    more = {"": {}, "ill": {"ill": 2}, "low": {"low": True}}
    return dict(zip(cases, run(tmp_path_factory.mktemp("two"), [(s, {"name": n, **more[m]}) for n, s, m in cases]), strict=True))


@launches
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [*NAMES, "adapters"])
def test_two_processes_learn_what_one_does(two, name, stage):
    """To fp32's rounding: DeepSpeed steps fp32 weights and no wider ones."""
    if name == "adapters":
        pytest.importorskip("peft")
    one, other = learned(name), two[name, stage, ""]
    assert (one["engine"], other["engine"]) == ("Engine", "Zero")
    assert one["rows"][0]["updates"] > 1 and one["rows"][0]["grad_norm"] > FLAGS["grad_clip"]  # the clip is on
    for first, second in zip(one["rows"], other["rows"], strict=True):
        norms = {key: value for key, value in first.items() if key.endswith("grad_norm")}
        assert len(norms) == (2 if name == "PPO" else 1)
        assert norms == pytest.approx({key: second[key] for key in norms}, abs=2e-6, rel=0)
    close(one["states"][1:], other["states"][1:], SINGLE)
    assert other["states"][0]["optimizer"]["state"] == {}  # as torch's, before the first step


@launches
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_each_process_holds_half_of_the_moments(two, stage):
    (whole,), shards = learned("GRPO-kl")["held"], two["GRPO-kl", stage, ""]["held"]
    assert len(shards) == WORLD and max(shards) < 0.51 * whole and sum(shards) >= 0.99 * whole


@launches
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_gradient_in_one_process_skips_the_step_in_all(two, stage):
    """Neither weights nor moments move, and the run goes on as if the round had not been."""
    bad = two["PPO", stage, "ill"]
    assert bad["rows"][1]["skipped"] > 1 and bad["rows"][1]["updates"] == 0
    close(bad["states"][1], bad["states"][2], 0)
    close(learned("PPO", (1, 3))["states"][-1], bad["states"][-1], SINGLE)


@launches
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_weights_in_bf16_have_copies_in_fp32(two, stage):
    one, other = (x["states"] for x in (learned("GRPO", low=True), two["GRPO", stage, "low"]))
    close(one[0], other[0], 0)
    assert apart(one[-1], other[-1]) < HALF < 0.1 * apart(one[0], one[-1])
    for state in other:  # what is trained is the copies, rounded
        rounded = [master.bfloat16() for master in state["optimizer"]["masters"]]
        assert all(any(weight.equal(copy) for copy in rounded) for weight in state["algo"].values())


@launches
@pytest.mark.slow
@pytest.mark.parametrize("low", [False, True])
def test_a_checkpoint_of_two_goes_on_with_one_and_back(tmp_path, two, low):
    name, kind = ("GRPO", "low") if low else ("PPO", "")
    saved = [two[name, stage, kind]["states"][1] for stage in STAGES]
    alone = [learned(name, (2,), state, low) for state in saved]
    close([x["states"][0] for x in alone], saved, 0)  # what one process takes up is what two have saved
    cases = [{"name": name, "rounds": (3,), "state": x["states"][1], "low": low} for x in alone]
    back = run(tmp_path, list(zip(STAGES, cases, strict=True)))
    for first, third in zip(alone, back, strict=True):
        close(first["states"][1], third["states"][0], 0)  # and the reverse
        straight, last = learned(name, low=low)["states"][-1], third["states"][-1]
        if low:
            assert apart(straight, last) < HALF
        else:
            close(straight, last, SINGLE)


# -- what it does not know ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    """Sets the variables of accelerate's launcher, from a stage, or more of `zero_optimization` by a DeepSpeed config file."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)

    def told(section: dict) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        if section.keys() == {"stage"}:
            monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(section["stage"]))
        else:
            (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": section}))
            monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "zero.json"))

    return told


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_is_the_launchers(launcher, stage):
    launcher({"stage": stage})
    sizes = {"reduce_bucket_size": parallel.BUCKET, "allgather_bucket_size": parallel.BUCKET}
    assert asked() == {"stage": stage, **sizes}
    launcher({"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": "auto"})
    assert asked() == {"stage": stage, **sizes, "reduce_bucket_size": 1000}


def test_one_process_has_nothing_to_shard_over(launcher):
    launcher({"stage": 2})
    assert type(engine_of(made("GRPO", False), lambda agent: torch.optim.AdamW(agent.parameters()))) is Engine


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"stage": 0}, "stage 0; known: 1 and 2. fsdp2.yaml"),
        ({"stage": 3}, "stage 3; known: 1 and 2. fsdp2.yaml"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer to cpu"),
        ({"stage": 2, "overlap_comm": True}, "overlap_comm; known: stage, reduce_bucket_size, allgather_bucket_size"),
    ],
)
def test_a_config_that_is_not_known_says_so(launcher, section, word):
    launcher(section)
    with pytest.raises(ValueError, match=word):
        engine_of(made("GRPO", False), lambda agent: torch.optim.AdamW(agent.parameters()))


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ValueError, match=r"ragen-gym\[deepspeed\]"):
        needed(torch.device("cpu"))


def test_only_what_can_be_cut_anywhere_is_cut():
    single, half = (torch.nn.Parameter(torch.zeros(2, dtype=kind)) for kind in (torch.float32, torch.bfloat16))
    assert one_type([half, half]) == torch.bfloat16
    for weights in ([single, half], [torch.nn.Parameter(torch.zeros(2).double())]):
        with pytest.raises(ValueError, match="fsdp2.yaml"):
            one_type(weights)
    with pytest.raises(ValueError, match="Adagrad; known: AdamW"):
        plain(torch.optim.Adagrad([single]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
