"""Exactness in float64: no cut, order, window or masked value changes a gradient; what advantages add up to."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, tensor

from ragen_agent.algos import BRPO, GRPO, PPO, RLOO, DrGRPO, StarPO, Totals
from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import written
from ragen_agent.batch import Batch
from tests.algo_parts import CASES, FURTHER, GROUPS, ROWS, SCORES, VOCAB, algo, batch, batch_of, gradient, moved

ALL = [*CASES, *FURTHER]
EVERY = pytest.mark.parametrize(("kind", "settings"), ALL, ids=[f"{kind.__name__}-{i}" for i, (kind, _) in enumerate(ALL)])
WRITTEN = ("old", "ref", "value", "advantage", "target", "weight")
FLAT_GROUP = [(6, "..00.1"), (7, "..0")]  # what the filter drops


def precise(data: Batch) -> Batch:
    """The same in float64, so that sums of returns are exact to 1e-15 too."""
    data.score, data.reward, data.logprob = data.score.double(), data.reward.double(), data.logprob.double()
    return data


def filtered() -> Batch:
    """A batch of three groups of which the filter kept two: the rows of the flat one are gone, its place among the episodes is not."""
    data = batch_of([*ROWS, *FLAT_GROUP], [*SCORES, 1.0, 1.0], [*GROUPS, 2, 2])
    data.state = data.group[data.episode][:, None] * 2 + data.turn.clamp(min=0) % 2
    return precise(data.rows(data.episode < 6))


def cuts() -> list[list[list[int]]]:
    """Rows in micro-batches: one by one, by two, by three, by five, and shuffled, cut anywhere."""
    chance = torch.Generator().manual_seed(1)
    found = [[list(range(8))[i : i + size] for i in range(0, 8, size)] for size in (1, 2, 3, 5)]
    order = torch.randperm(8, generator=chance).tolist()
    return [*found, [order[:3], order[3:4], order[4:]]]


@EVERY
def test_gradient_is_the_same_for_every_cut_with_filter_and_clipping(kind, settings):
    agent, data = algo(kind, settings), filtered()
    agent.prepare(data, scale=0.75)
    moved(agent)
    whole, metrics = gradient(agent, data, [list(range(8))])
    assert whole.dtype == torch.float64 and whole.abs().max() > 1e-4
    assert abs(metrics["ratio_max"] - 1) > 1e-3
    for parts in cuts():
        cut, same = gradient(agent, data, parts)
        torch.testing.assert_close(cut, whole, atol=1e-10, rtol=0)
        assert same == pytest.approx(metrics, abs=1e-5)


def test_the_clip_binds_in_these_tests():
    agent, data = algo(GRPO, {}), filtered()
    agent.prepare(data)
    assert gradient(moved(agent), data, [list(range(8))])[1]["clip_fraction"] > 0.05


def renumbered(data: Batch, order: Tensor, places: Tensor) -> Batch:
    """Rows in another `order`, and episode e called `places[e]`."""
    other = data.rows(order)
    back = places.argsort()
    other.episode = places[other.episode]
    for name in ("group", "score", "truncated", "world"):
        setattr(other, name, vars(data)[name][back])
    return other


@EVERY
def test_order_and_names_and_micro_rows_of_prepare_change_nothing(kind, settings):
    one, two, data = algo(kind, settings), algo(kind, settings), precise(batch())
    order, places = tensor([4, 7, 0, 3, 6, 1, 5, 2]), tensor([3, 5, 0, 4, 1, 2])
    other = renumbered(data, order, places)
    assert two.prepare(other, micro_rows=3) == pytest.approx(one.prepare(data), abs=1e-6)
    for name in WRITTEN:
        mine, theirs = vars(data)[name], vars(other)[name]
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(theirs, mine[order], atol=1e-10, rtol=0)
    moved(one)
    moved(two)
    mine, theirs = gradient(one, data, [list(range(8))])[0], gradient(two, other, [[0, 1, 2], [3, 4], [5, 6, 7]])[0]
    torch.testing.assert_close(theirs, mine, atol=1e-10, rtol=0)


@EVERY
@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_what_is_not_sampled_changes_nothing_bit_for_bit(kind, settings, junk):
    one, two, data, dirty = algo(kind, settings), algo(kind, settings), batch(), batch()
    blank = ~dirty.sampled
    for field in (dirty.reward, dirty.logprob):
        field[blank] = junk
    dirty.turn[blank], dirty.state[blank], dirty.ids[~dirty.real] = 77, 77, VOCAB - 1
    assert two.prepare(dirty) == one.prepare(data)
    for name in WRITTEN:
        if (field := vars(dirty)[name]) is not None:
            assert torch.equal(field[dirty.sampled], vars(data)[name][data.sampled]), name
            field[blank] = junk
    parts = [[0, 1, 2], [3, 4, 5], [6, 7]]
    clean, found = gradient(moved(one), data, parts), gradient(moved(two), dirty, parts)
    assert torch.equal(found[0], clean[0]) and found[1] == clean[1]
    assert found[0].isfinite().all() and all(map(math.isfinite, found[1].values()))


# ---- several processes ----


def shared() -> Batch:
    """The batch of both processes; a group belongs to the process that played it."""
    data = precise(batch())
    data.group = tensor([0, 0, 0, 1, 2, 2])
    data.state = data.group[data.episode][:, None] * 2 + data.turn.clamp(min=0) % 2
    return data


def one_of_two(rank: int, folder: str) -> None:
    """A process with half of the batch: its gradients and metrics, as DDP would average them, and its adapted coefficients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = []
    for kind, settings in ALL:
        agent, data = algo(kind, settings), shared().rows(tensor([[0, 1, 2, 3, 4], [5, 6, 7]][rank]))
        mine = torch.arange(6) < 4 if rank == 0 else torch.arange(6) >= 4  # its own episodes are counted from 0
        data.episode -= [0, 4][rank]
        for name in ("group", "score", "truncated", "world"):
            setattr(data, name, vars(data)[name][mine])
        agent.prepare(data)
        found.append((*gradient(moved(agent), data, [[0, 1], list(range(2, len(data)))]), agent.kl_now))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    mp.start_processes(one_of_two, args=(str(tmp_path),), nprocs=2, start_method="spawn")  # pyright: ignore[reportPrivateImportUsage]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (kind, settings), one, two in zip(ALL, *ranks, strict=True):
        agent, data = algo(kind, settings), shared()
        agent.prepare(data)
        whole, metrics = gradient(moved(agent), data, [list(range(8))])
        torch.testing.assert_close((one[0] + two[0]) / 2, whole, atol=1e-10, rtol=0)
        assert one[2] == two[2] == pytest.approx(agent.kl_now, abs=1e-6)
        for name, value in metrics.items():
            both = max(one[1][name], two[1][name]) if name.endswith("_max") else (one[1][name] + two[1][name]) / 2
            assert both == pytest.approx(value, abs=1e-5), name


# ---- what advantages add up to ----


def per_episode(agent: StarPO, data: Batch) -> Tensor:
    """The advantage of each episode's first sampled token (E,)."""
    agent.prepare(data)
    found = torch.zeros(len(data.group), dtype=torch.float64)
    for row in range(len(data)):
        found[data.episode[row]] = written(data, "advantage")[row][data.sampled[row]][0].double()
    return found


@pytest.mark.parametrize("kind", [GRPO, DrGRPO, RLOO])
def test_a_group_adds_up_to_nothing_and_takes_no_shift(kind):
    data, shifted, larger = precise(batch()), precise(batch()), precise(batch())
    shifted.score += 5.0
    larger.score *= 2.0
    found, same, twice = (per_episode(algo(kind, {}), x) for x in (data, shifted, larger))
    torch.testing.assert_close(torch.zeros(2).double().index_add(0, data.group, found), torch.zeros(2).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(same, found, atol=1e-12, rtol=0)
    torch.testing.assert_close(twice, found if kind is GRPO else 2 * found, atol=1e-5 if kind is GRPO else 1e-12, rtol=0)


def test_the_batch_adds_up_to_nothing():
    assert abs(per_episode(algo(BRPO, {}), precise(batch())).sum()) < 1e-12


@pytest.mark.parametrize("credit", ["token", "bi-level", "turn"])
def test_whitened_advantages_have_mean_zero_and_spread_one(credit):
    agent, data = algo(PPO, {"credit": credit}), precise(batch())
    agent.prepare(data)
    taken = written(data, "advantage")[data.sampled]
    assert abs(taken.mean()) < 1e-12 and abs(taken.std() - 1) < 1e-5


@pytest.mark.parametrize("credit", ["token", "bi-level", "turn"])
def test_undiscounted_targets_are_the_rewards_to_come_whatever_the_critic_says(credit):
    agent, data = algo(PPO, {"credit": credit, "turn_gamma": 1.0, "whiten": False}), precise(batch())
    agent.prepare(data)
    begins = F.firsts(data.sampled, data.turn) & (data.turn == 0)  # an episode's first token: all of its return is to come
    paid = F.episode_sum(data.reward, data.sampled, data.episode, 6)
    torch.testing.assert_close(written(data, "target")[begins], paid[data.episode[begins.any(1)]], atol=1e-12, rtol=0)


# ---- one ratio for an episode in several rows ----


def explicit_gspo(agent: StarPO, data: Batch, low: float, high: float) -> Tensor:
    """The gradient of mean over episodes of -min(s A, clip(s) A), written out episode by episode."""
    agent.zero_grad()
    new, episodes = agent.see(data).logprob, int(data.episode.max()) + 1
    loss = torch.zeros((), dtype=torch.float64)
    for e in range(episodes):
        mine = data.sampled & (data.episode == e)[:, None]
        s = (new[mine] - written(data, "old")[mine]).mean().exp()
        a = written(data, "advantage")[mine][0]
        loss = loss - torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a) / episodes
    loss.backward()
    return torch.cat([w.grad.flatten() for w in agent.parameters() if w.grad is not None])


@pytest.mark.parametrize("bounds", [(0.2, 0.28), (0.02, 0.02)])
@pytest.mark.parametrize("ratio", ["sequence", "sequence-token"])
def test_a_sequence_ratio_is_that_of_the_episode_however_its_rows_are_cut(ratio, bounds):
    low, high = bounds
    settings = {"ratio": ratio, "aggregation": "seq-mean-token-mean", "clip_low": low, "clip_high": high}
    agent, data = algo(GRPO, settings), precise(batch())
    agent.prepare(data)
    moved(agent)
    wanted = explicit_gspo(agent, data, low, high)
    for parts in cuts():
        found, metrics = gradient(agent, data, parts)
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    assert (metrics["clip_fraction"] > 0) is (low < 0.1)


@pytest.mark.parametrize("micro_rows", [1, 3, None])
def test_totals_hold_the_ratios_of_the_whole_minibatch_however_it_is_read(micro_rows):
    agent, data = algo(GRPO, {"ratio": "sequence"}), precise(batch())
    agent.prepare(data)
    moved(agent)
    found, new = agent.totals(data, micro_rows).log_ratio, agent.see(data).logprob.detach()
    assert found is not None and algo(GRPO, {}).totals(data).log_ratio is None  # a token's ratio needs no second look
    wanted = [(new - written(data, "old"))[data.sampled & (data.episode == e)[:, None]].sum() for e in range(6)]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-12, rtol=0)


def test_a_sequence_ratio_of_part_of_an_episode_is_an_error():
    agent, data = algo(GRPO, {"ratio": "sequence"}), batch()
    agent.prepare(data)
    agent(data)  # its own totals: all rows are here
    agent(data.rows(tensor([3, 4])))
    with pytest.raises(ValueError, match=r"algo.totals\(minibatch\)"):
        agent(data.rows(tensor([3])), Totals.of(data))
