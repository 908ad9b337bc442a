"""Two processes learn what one does: the same weights and metrics from the same episodes, whole or sharded; checkpoints go both ways."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks import traffic
from ragen_agent import parallel
from ragen_agent.algos import ARPO
from ragen_agent.batch import collate
from ragen_agent.engines import Engine, engine_of
from ragen_agent.steps import minibatches
from tests.algo_parts import policy
from tests.parallel_parts import TABLE, episodes, learned, run

CASES = [(name, kind) for name in TABLE for kind in ("whole", "sharded")]
QUICK = [("GRPO-kl", "whole"), ("BRPO-lopsided", "whole"), ("PPO", "sharded"), ("GSPO-lopsided", "sharded")]
REST = [case for case in CASES if case not in QUICK]
OTHER = {"explained_variance"}  # a ratio of variances, which its optimizer tells of its own process's tokens


def launched(tmp_path_factory, cases: list[tuple]) -> dict[tuple, dict]:
    return dict(zip(cases, run(tmp_path_factory.mktemp("two"), cases), strict=True))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return launched(tmp_path_factory, QUICK)


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    return launched(tmp_path_factory, REST)


def compare(name: str, two: dict) -> None:
    """The weights after clipped steps of plain gradient descent differ by the gradients: to 1e-10 in float64."""
    one = learned(name, Engine)
    assert one["rows"][0]["updates"] > 1 and one["rows"][0]["grad_norm"] > 0.05  # there is something to compare, and the clip is on
    close(one["state"]["algo"], two["state"]["algo"])
    first, second = ({key: value for key, value in made["rows"][0].items() if key not in OTHER} for made in (one, two))
    assert first == pytest.approx(second, abs=1e-6, rel=1.2e-7)  # some are told in fp32, which has no more digits


def close(one: dict, two: dict) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(two[name]), atol=1e-10, rtol=0)


@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_two_processes_learn_what_one_does(quick, name, kind):
    compare(name, quick[name, kind])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), REST)
def test_so_they_do_with_every_kind_of_optimizer(rest, name, kind):
    compare(name, rest[name, kind])


@pytest.mark.slow
def test_a_checkpoint_of_two_goes_on_with_one_and_back(tmp_path):
    """Three rounds: of two processes, of one, of two again; whole and sharded, with AdamW's state."""
    one = learned("PPO", Engine, range(1, 4), None, True)
    kinds = ("whole", "sharded")
    firsts = run(tmp_path, [("PPO", kind, range(1, 2), None, True) for kind in kinds])
    for first in firsts:  # what is written is the same, however the weights were held
        assert first["state"]["optimizer"]["param_groups"] == firsts[0]["state"]["optimizer"]["param_groups"]
        for i, own in firsts[0]["state"]["optimizer"]["state"].items():
            close(own, first["state"]["optimizer"]["state"][i])
    seconds = [learned("PPO", Engine, range(2, 3), first["state"], True) for first in firsts]
    thirds = run(tmp_path, [("PPO", kind, range(3, 4), second["state"], True) for kind, second in zip(kinds, seconds, strict=True)])
    for first, second, third in zip(firsts, seconds, thirds, strict=True):
        close(one["state"]["algo"], third["state"]["algo"])
        for row, (other,) in zip(one["rows"], (first["rows"], second["rows"], third["rows"]), strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-6) and row["grad_norm"] == pytest.approx(other["grad_norm"], abs=1e-6)


# -- what processes share out, without any ----------------------------------------------------------------------------------------


def as_rank(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setattr(parallel, "rank", lambda: rank)
    monkeypatch.setattr(parallel, "size", lambda: size)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 12])
def test_the_shares_put_together_are_the_whole(monkeypatch, size, count):
    found = []
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        own = list(parallel.share(range(100, 100 + count)))
        assert len(own) in (count // size, -(-count // size))
        found += own
    assert found == list(range(100, 100 + count))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("counts", [(18, 0), (7, 11), (0, 18), (1, 17)])
def test_the_parts_of_a_batch_are_those_of_the_union(monkeypatch, size, counts):
    played = episodes()

    def cut(some, counts) -> list[list[list[int]]]:
        if not some:
            return []
        parts = minibatches(collate(some), size, torch.Generator().manual_seed(1), counts)
        return [sorted(part.ids[i, part.real[i]].tolist() for i in range(len(part))) for part in parts]

    whole = cut(played, [len(played)])
    shares = []
    for rank, (first, last) in enumerate([(0, counts[0]), (counts[0], 18)]):
        as_rank(monkeypatch, rank, 2)
        shares.append(cut(played[first:last], list(counts)))
    empty: list[list[list[int]]] = [[] for _ in whole]
    one, two = (share or empty for share in shares)
    assert len(one) == len(two) == len(whole) and len(whole) > 1
    assert [sorted(a + b) for a, b in zip(one, two, strict=True)] == whole


def test_metrics_of_a_step_are_means_and_maxima(monkeypatch):
    rows = [{"loss": 1.0, "ratio_max": 1.5}], [{"loss": 2.0, "ratio_max": 1.25}], [{}]
    as_rank(monkeypatch, 0, 3)
    monkeypatch.setattr(parallel, "union", lambda own: [*own, rows[1], rows[2]])
    assert parallel.merged(rows[0]) == [{"loss": 1.0, "ratio_max": 1.5}]  # (1 + 2 + 0) / 3


def test_metrics_of_tokens_are_weighed_by_them(monkeypatch):
    """Tokens 1, 3 in one process and 5 in the other: mean 3, std sqrt(8 / 3)."""
    first, second = {"a_mean": 2.0, "a_std": 1.0, "gap_max": 0.5}, {"a_mean": 5.0, "a_std": 0.0, "gap_max": 0.25}
    nothing = {"a_mean": 0.0, "a_std": 0.0, "gap_max": 0.0}
    as_rank(monkeypatch, 0, 3)
    monkeypatch.setattr(parallel, "union", lambda own: [*own, (1, second), (0, nothing)])
    found = parallel.pooled(first, 2)
    assert found == pytest.approx({"a_mean": 3.0, "a_std": math.sqrt(8 / 3), "gap_max": 0.5}, abs=1e-6)
    monkeypatch.setattr(parallel, "union", lambda own: [(0, nothing), (0, nothing)])
    assert parallel.pooled(nothing, 0) == nothing


def test_the_launcher_says_how_weights_are_held(monkeypatch):
    def plain(made):
        return torch.optim.SGD(made.parameters(), lr=1.0)

    for name in ("FSDP", "DEEPSPEED"):
        monkeypatch.delenv(f"ACCELERATE_USE_{name}", raising=False)
    assert type(engine_of(ARPO(policy()), plain)) is Engine
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert type(engine_of(ARPO(policy()), plain)) is Engine  # one process has nothing to shard over
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(ValueError, match="fsdp2.yaml"):
        engine_of(ARPO(policy()), plain)


def test_gradients_travel_in_runs_of_one_type():
    sizes = [(3, torch.float32), (4, torch.float32), (2, torch.float64), (9, torch.float64), (1, torch.float64)]
    parts = parallel.buckets([torch.zeros(n, dtype=kind) for n, kind in sizes], most=7)
    assert [[len(x) for x in part] for part in parts] == [[3, 4], [2], [9], [1]]


# -- what it costs: docs/scaling.md ------------------------------------------------------------------------------------------------


def test_traffic_by_hand():
    """A model of 10 weights of 2 bytes, 3 layers of 4 channels, and 5 processes."""
    small = traffic.Model("small", 10, 4, 3)
    assert traffic.ring(20, 5) == 16 and traffic.ring(20, 1) == 0
    assert traffic.whole(small, 5) == 32 and traffic.sharded(small, 5, passes=2) == 96 and traffic.refresh(small, 5) == 16
    assert traffic.tensor_parallel(small, 2, tokens=7) == 7 * 3 * 2 * 2 * (8 / 2)  # two all-reduces a layer, each twice half of 8 bytes
    assert traffic.training_memory(small, 5) == (160, 52)
    assert traffic.trajectories(episodes=2, turns=2, context=5, reply=1) == 2 * (3 * 5 + 3 * 11 + 2 * (12 + 8192))
    assert traffic.seconds(5e9, 2.5) == 2


def test_the_page_shows_what_the_formulas_give():
    page = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
    assert all(f"| {' | '.join(row)} |" in page for row in traffic.table())
