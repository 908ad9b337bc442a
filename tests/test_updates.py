"""Updates: micro-batches by tokens, the kinds of optimizer, fp32 master weights, the schedule."""

import copy
import io
import sys

import pytest
import torch
from torch import nn, tensor

from ragen_agent.updates import OPTIMIZERS, MasterWeights, load_trained_state, micro_batches, optimizer_of, schedule, trained_state
from tests.algo_parts import batch_of
from tests.parts import tiny

KINDS = list(OPTIMIZERS)


def needs(kind):
    if kind == "adamw8bit":
        pytest.importorskip("bitsandbytes")


def low(seed=0):
    """A small network with bf16 weights: a matrix of 4096 numbers, the least that adamw8bit keeps in 8 bits, and a vector."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1, bias=False)).bfloat16()


def train(model, optimizer, steps, first=0, rate=None):
    for step in range(first, first + steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        (model(x) - x.sum(1, keepdim=True)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rate is not None:
            rate.step()


def on_disk(state):
    """A state after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- micro-batches ----------------------------------------------------------------------------------------------------------

ROWS = [(0, ".0"), (0, ".000000"), (1, ".00"), (2, "..0"), (2, ".0"), (3, ".0000")]  # lengths 2, 7, 3, 3, 2, 5


@pytest.mark.parametrize(
    ("tokens", "whole", "wanted"),
    [
        (10, False, [[0, 4, 2], [3, 5], [1]]),  # 2, 2, 3: 9 tokens; 3, 5: 10; 7
        (6, False, [[0, 4], [2, 3], [5], [1]]),
        (1, False, [[0], [4], [2], [3], [5], [1]]),
        (10, True, [[2, 3, 4], [5], [0, 1]]),  # three rows of 3: 9 tokens; episode 0 takes 14 and stays whole
        (99, True, [[2, 3, 4, 5, 0, 1]]),
    ],
)
def test_micro_batches_by_hand(tokens, whole, wanted):
    batch = batch_of(ROWS, [0.0] * 4, [0, 0, 1, 1])
    assert [part.tolist() for part in micro_batches(batch, tokens, whole)] == wanted


# -- the optimizer -----------------------------------------------------------------------------------------------------------


def test_matrices_decay_and_vectors_do_not():
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = optimizer_of(model.parameters(), lr=0.1, weight_decay=0.5)
    model.weight.grad, model.bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(model.weight, tensor(0.95), atol=1e-6, rtol=0)  # 1 - 0.1 * 0.5
    assert torch.equal(model.bias, torch.ones(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_has_a_rate_of_its_own(kind):
    """AdamW's first step is the rate times the sign of the gradient."""
    needs(kind)
    policy, critic = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_of([{"params": [policy]}, {"params": [critic], "lr": 0.5}], lr=0.125, weight_decay=0.0, kind=kind)
    policy.grad, critic.grad = torch.full((2, 2), 3.0), torch.full((2, 2), -7.0)
    optimizer.step()
    assert torch.allclose(policy, tensor(0.875), atol=1e-6, rtol=0)
    assert torch.allclose(critic, tensor(1.5), atol=1e-6, rtol=0)
    rate = schedule(optimizer, updates=100, warm=0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0625, 0.25]  # the first of two warm updates
    rate.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]


def test_what_is_frozen_is_left_out():
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    assert [group["params"] for group in optimizer_of(model.parameters(), 0.1, 0.1).param_groups] == [[model.bias]]
    with pytest.raises(ValueError, match="no parameter trains"):
        optimizer_of(model.requires_grad_(False).parameters(), 0.1, 0.1)


def test_an_unknown_kind_names_the_known(monkeypatch):
    with pytest.raises(ValueError, match="'sgd'; known: adamw, adamw8bit"):
        optimizer_of(nn.Linear(2, 2).parameters(), 0.1, 0.0, "sgd")
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(ValueError, match=r"pip install \"ragen-gym\[optim8\]\""):
        optimizer_of(nn.Linear(2, 2).parameters(), 0.1, 0.0, "adamw8bit")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_trains_and_resumes_bit_for_bit(kind, dtype):
    """20 updates = 8, a state through a file into a fresh model, and 12; the loss falls on the way."""
    needs(kind)
    model = low().to(dtype)
    optimizer = optimizer_of(model.parameters(), 0.01, 0.01, kind)
    rate = schedule(optimizer, 20)
    assert isinstance(optimizer, MasterWeights) == (dtype == torch.bfloat16)
    train(model, optimizer, 8, rate=rate)
    state = on_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rate": rate.state_dict()})
    train(model, optimizer, 12, first=8, rate=rate)
    other = low(seed=9).to(dtype)
    again = optimizer_of(other.parameters(), 0.01, 0.01, kind)
    anew = schedule(again, 20)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    anew.load_state_dict(state["rate"])
    train(other, again, 12, first=8, rate=anew)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(99)).to(dtype)
    loss = [(m(x) - x.sum(1, keepdim=True)).float().square().mean().item() for m in (low().to(dtype), model)]
    assert loss[1] < 0.8 * loss[0]


def test_eight_bits_are_eight_bits():
    pytest.importorskip("bitsandbytes")
    model = low().float()
    optimizer = optimizer_of(model.parameters(), 0.01, 0.0, "adamw8bit")
    train(model, optimizer, 1)
    kinds = {p.numel(): optimizer.state[p]["state1"].dtype for p in model.parameters()}
    assert kinds[4096] == torch.uint8


# -- master weights ----------------------------------------------------------------------------------------------------------


def one(masters, lr=1e-4):
    """A bf16 weight 1 under plain gradient descent with gradient 1."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    inner = torch.optim.SGD([weight], lr=lr)
    return weight, MasterWeights(inner) if masters else inner


def push(weight, optimizer, steps):
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()


def test_small_steps_add_up_in_the_master():
    """bf16 below 1 goes by 1/256: 1 - 1e-4 rounds back to 1, for ever. 200 of them in fp32 are 0.98, which is 251/256 in bf16."""
    weight, optimizer = one(masters=False)
    push(weight, optimizer, 200)
    assert weight.item() == 1.0
    weight, optimizer = one(masters=True)
    push(weight, optimizer, 19)
    assert weight.item() == 1.0  # 0.9981 is nearer to 1 than to 255/256 = 0.99609
    push(weight, optimizer, 1)
    assert weight.item() == 255 / 256  # 0.9980
    push(weight, optimizer, 180)
    assert abs(float(optimizer.state_dict()["masters"][0]) - 0.98) < 1e-5
    assert weight.item() == 251 / 256


def test_only_what_is_low_has_a_master():
    model = nn.ModuleDict({"policy": nn.Linear(2, 2, bias=False).bfloat16(), "critic": nn.Linear(2, 1, bias=False)})
    optimizer = optimizer_of(model.parameters(), 0.1, 0.0)
    assert len(optimizer.state_dict()["masters"]) == 1
    assert any(p is model["critic"].weight for group in optimizer.param_groups for p in group["params"])
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert new.grad is None and new.dtype == old.dtype
        assert torch.allclose((old - new).float(), tensor(0.1), atol=0.005, rtol=0)  # bf16 near 0.5 goes by 1/256
    plain = optimizer_of(model.parameters(), 0.1, 0.0, masters=False)
    assert not isinstance(plain, MasterWeights)


def test_clipping_sees_the_models_gradients():
    """A gradient of 4 cut to norm 1 moves the master by the rate; a parameter without a gradient stays."""
    weight, idle = (nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterWeights(torch.optim.SGD([weight, idle], lr=0.25))
    weight.grad = torch.full_like(weight, 4.0)
    nn.utils.clip_grad_norm_([weight, idle], 1.0)
    optimizer.step()
    assert [p.item() for p in (weight, idle)] == [0.75, 1.0]
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad is not None and weight.grad.item() == 0


def test_a_state_of_another_model_is_refused():
    _, optimizer = one(masters=True)
    with pytest.raises(ValueError, match="another model"):
        optimizer_of(low().parameters(), 0.1, 0.0).load_state_dict(optimizer.state_dict())
    weight, stepped = one(masters=False)
    stepped = torch.optim.AdamW([weight])
    push(weight, stepped, 1)
    with pytest.raises(ValueError, match="before the first step"):
        MasterWeights(stepped)


# -- what a checkpoint holds of a partly frozen model -------------------------------------------------------------------------


def test_a_checkpoint_of_what_trains():
    model, other = tiny(seed=0), tiny(seed=0)
    for frozen in (model, other):
        frozen.requires_grad_(False)
        frozen.lm_head.weight.requires_grad_(True)
    nn.init.ones_(model.lm_head.weight)
    state = trained_state(model)
    assert list(state) == ["lm_head.weight"]
    load_trained_state(other, on_disk(state))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="lm_head"):
        load_trained_state(other, {})
