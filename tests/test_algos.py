"""The laws of every optimizer: cutting, order and masked values never matter, the first ratio is 1, each one learns."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, tensor

from ragen_agent.algos import (
    ALGOS,
    ARPO,
    CISPO,
    DAPO,
    GSPO,
    MTGRPO,
    PPO,
    RLOO,
    GiGPO,
    GSPOToken,
    Normalised,
    ReBN,
    ReinforcePP,
    ReinforcePPBaseline,
)
from ragen_agent.algos.starpo import written
from ragen_agent.batch import EPISODE_FIELDS
from ragen_agent.model import score
from tests.algo_parts import CASES, SMALL, VOCAB, WHOLE, algo, batch, batch_of, gradient, moved
from tests.parts import tiny

TABLE = [  # the rest of the optimizers, with settings that put all of their formula to work
    (CISPO, {"clip_high": 0.1}),
    (DAPO, {"overlong_length": 4.0, "overlong_cache": 2.0}),
    (GiGPO, {"omega": 0.5}),
    (GSPO, {"clip_low": 0.2, "clip_high": 0.3}),
    (GSPOToken, {"clip_low": 0.2, "clip_high": 0.3}),
    (MTGRPO, {"lam": 0.5}),
    (Normalised, {}),
    (Normalised, {"grouping": "env", "method": "mean_std"}),
    (ReBN, {}),
    (ReinforcePP, {"gamma": 0.9, "kl_coef": 0.1}),
    (ReinforcePPBaseline, {"kl_coef": 0.1}),
    (RLOO, {"kl_coef": 0.1}),
]
ALL = [*CASES, *TABLE]
EVERY = pytest.mark.parametrize(("kind", "settings"), ALL, ids=[f"{kind.__name__}-{i}" for i, (kind, _) in enumerate(ALL)])


def test_every_optimizer_is_put_to_the_laws():
    assert {kind for kind, _ in ALL} == set(ALGOS.values())


@EVERY
def test_gradient_is_that_of_the_whole_however_it_is_cut(kind, settings):
    agent, data = algo(kind, settings), batch()
    agent.prepare(data)
    moved(agent)
    whole, metrics = gradient(agent, data, WHOLE)
    assert whole.abs().max() > 1e-3
    for parts in ([[i] for i in range(8)], [[7, 2, 0], [4], [6, 5, 3, 1]], [[5, 6, 7], [0, 1, 2, 3, 4]]):
        cut, same = gradient(agent, data, parts)
        torch.testing.assert_close(cut, whole, atol=1e-10, rtol=0)
        assert same.keys() == metrics.keys()
        for name, value in same.items():
            assert value == pytest.approx(metrics[name], abs=1e-5), name


@EVERY
def test_order_and_micro_rows_of_prepare_do_not_matter(kind, settings):
    agent, data = algo(kind, settings), batch()
    notes = agent.prepare(data)
    order = tensor([4, 7, 0, 3, 6, 1, 5, 2])
    other = batch().rows(order)
    assert agent.prepare(other, micro_rows=3) == pytest.approx(notes, abs=1e-6)
    for name in ("old", "ref", "value", "advantage", "target"):
        one, two = getattr(data, name), getattr(other, name)
        assert (one is None) == (two is None), name
        if one is not None:
            torch.testing.assert_close(two, one[order], atol=1e-6, rtol=0)
    moved(agent)
    torch.testing.assert_close(gradient(agent, other, WHOLE)[0], gradient(agent, data, WHOLE)[0], atol=1e-6, rtol=0)


@EVERY
@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_masked_values_change_nothing_bit_for_bit(kind, settings, junk):
    agent, data, dirty = algo(kind, settings), batch(), batch()
    for field in (dirty.reward, dirty.logprob):
        field[~dirty.sampled] = junk
    dirty.turn[~dirty.sampled] = 77
    dirty.state[~dirty.sampled] = -5
    assert agent.prepare(dirty) == agent.prepare(data)
    moved(agent)
    clean = gradient(agent, data, WHOLE)
    for name in ("old", "ref", "value", "advantage", "target"):
        if (field := getattr(dirty, name)) is not None:
            field[~dirty.sampled] = junk
    found = gradient(agent, dirty, WHOLE)
    assert torch.equal(found[0], clean[0]) and found[1] == clean[1]
    new = agent.see(dirty)
    for term in (agent.surrogate(new, dirty), *(term for _, term in agent.extra(new, dirty).values())):
        assert not term[~dirty.sampled].any()


@EVERY
def test_every_sampled_token_trains_and_no_other_does(kind, settings, monkeypatch):
    """The loss reaches the hidden state before a token if and only if the policy chose that token."""
    monkeypatch.setattr("ragen_agent.packing.plan", lambda *_: None)  # rows as they lie, so that hidden states do too
    agent, data, seen = algo(kind, settings), batch(), []
    agent.prepare(data)
    agent.policy.base_model.register_forward_hook(lambda _body, _args, out: seen.append(out.last_hidden_state))  # pyright: ignore
    loss, _ = agent(data)
    reached = torch.autograd.grad(loss, seen)[0].abs().sum(-1) > 0
    assert torch.equal(reached[:, :-1], data.sampled[:, 1:]) and not reached[:, -1].any()


@EVERY
def test_first_ratio_is_one_with_dropout(kind, settings):
    shaky = tiny("gpt2", vocab_size=VOCAB, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).train()
    agent = kind(shaky, reference=tiny("gpt2", vocab_size=VOCAB, seed=1), **settings)
    assert not shaky.training
    agent.train()
    assert agent.training and not shaky.training
    data = batch()
    agent.prepare(data, micro_rows=3)
    _, metrics = gradient(agent, data, [[0, 1], [2, 3, 4, 5], [6, 7]])
    assert abs(metrics["ratio_max"] - 1) < 1e-5 and metrics["clip_fraction"] == 0 and metrics["approx_kl"] < 1e-9


@EVERY
def test_flat_and_token_less_batches_are_harmless(kind, settings):
    flat = batch_of([(0, ".00"), (1, ".0"), (2, ".0")], [1, 1, 1], [0, 0, 0])
    none = batch_of([(0, "..."), (1, "..")], [1, 0], [0, 0])
    for data in (flat, none):
        data.state[:] = data.group[data.episode][:, None]
        agent = algo(kind, settings)
        assert all(map(math.isfinite, agent.prepare(data).values()))
        paid = agent.kl_coef and agent.kl_in == "reward"  # then the KL tells the episodes apart
        assert kind in (ARPO, PPO) or paid or not written(data, "advantage").any()
        grads, metrics = gradient(agent, data, [list(range(len(data)))])
        assert grads.isfinite().all() and all(map(math.isfinite, metrics.values()))


# ---- the module ----


@EVERY
def test_the_reference_is_neither_parameter_nor_state(kind, settings):
    agent = algo(kind, settings)
    critic = sum(w.numel() for w in agent.critic.parameters()) if isinstance(agent, PPO) else 0
    assert sum(w.numel() for w in agent.parameters()) == sum(w.numel() for w in agent.policy.parameters()) + critic
    assert all(name.startswith(("policy.", "critic.")) for name in agent.state_dict())
    assert len(list(agent.modules())) == len(list(agent.policy.modules())) + 1 + isinstance(agent, PPO)
    data = batch()
    agent.prepare(data)
    before = [w.clone() for w in agent._reference[0].parameters()]
    moved(agent)
    assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(before, agent._reference[0].parameters(), strict=True))


@EVERY
def test_state_dict_round_trip(kind, settings):
    one, two, data = moved(algo(kind, settings)), algo(kind, settings, seed=5), batch()
    two.load_state_dict(one.state_dict())
    one.prepare(data)
    moved(one)
    moved(two)
    first, second = gradient(one, data, WHOLE), gradient(two, data, WHOLE)
    assert torch.equal(first[0], second[0]) and first[1] == second[1]


# ---- several processes ----


def one_of_two(rank: int, folder: str) -> None:
    """A process with half of the batch: write its gradients, as DDP would average them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = []
    for kind, settings in ALL:
        agent, data = algo(kind, settings), batch().rows(tensor([[0, 1, 2, 3, 4], [5, 6, 7]][rank]))
        mine = torch.arange(6) < 4 if rank == 0 else torch.arange(6) >= 4  # its own episodes, as a process has them: counted from 0
        data.episode -= [0, 4][rank]
        for name in EPISODE_FIELDS:
            setattr(data, name, vars(data)[name][mine])
        agent.prepare(data)
        moved(agent)
        found.append(gradient(agent, data, [[0, 1], list(range(2, len(data)))])[0])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_gradient_is_the_same_for_two_processes(tmp_path):
    mp.start_processes(one_of_two, args=(str(tmp_path),), nprocs=2, start_method="spawn")  # pyright: ignore[reportPrivateImportUsage]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (kind, settings), one, two in zip(ALL, *ranks, strict=True):
        agent, data = algo(kind, settings), batch()
        data.group = tensor([0, 0, 0, 1, 2, 2])  # a group belongs to the process that played it, and so do its states
        data.state = data.group[data.episode][:, None] * 2 + data.turn.clamp(min=0) % 2
        agent.prepare(data)
        moved(agent)
        mean, whole = (one + two) / 2, gradient(agent, data, WHOLE)[0]
        assert (mean - whole).abs().max() < 1e-6, f"{kind.__name__} {settings}"


# ---- learning ----


@EVERY
def test_learns(kind, settings):
    """Groups of eight answers of two tokens to one of two prompts; the prompt's own token is worth 1. Fourteen updates of two epochs."""
    agent = kind(tiny("llama", vocab_size=4, **SMALL), reference=tiny("llama", vocab_size=4, **SMALL), **settings)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    chance = torch.Generator().manual_seed(1)
    temperature = agent.temperature
    before = after = None
    for _ in range(14):
        prompt = tensor([2, 3]).repeat_interleave(8)
        ids = prompt[:, None]
        with torch.no_grad():
            for _ in range(2):
                chances = (agent.policy(ids).logits[:, -1] / temperature).softmax(-1)
                ids = torch.cat([ids, torch.multinomial(chances, 1, generator=chance)], 1)
        paid = (ids[:, 1:] == prompt[:, None]).float()
        data = batch_of([(i, ".00") for i in range(16)], paid.sum(1).tolist(), (prompt - 2).tolist())
        data.state[:] = prompt[:, None]
        data.ids, data.reward = ids, torch.cat([torch.zeros(16, 1), torch.zeros(16, 1), paid.sum(1, keepdim=True)], 1)
        data.logprob = score(agent.policy, ids, data.real, temperature).logprob.detach()
        after = data.score.mean().item() / 2
        before = after if before is None else before
        agent.prepare(data)
        for _ in range(2):
            for part in torch.randperm(16, generator=chance).split(8):
                mini = data.rows(part)
                optimizer.zero_grad()
                agent(mini, agent.totals(mini))[0].backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
                optimizer.step()
    assert before is not None and after is not None and before < 0.5 and after > 0.8
