"""The log-probability as an autograd function: hand-known numbers, gradients, tiles, masked vocabulary, peak memory (L20, L22)."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ragen_agent import logprob as m
from ragen_agent.logprob import Curve, tile_shape, token_logprob

CURVES = {
    "plain": Curve(),
    "tempered": Curve(temperature=0.7),
    "scaled": Curve(scale=0.25, temperature=1.3),
    "capped": Curve(cap=3.0),
    "all": Curve(scale=0.5, cap=2.0, temperature=0.6),
}
TILES = {"one": (100, 100), "rows": (2, 100), "columns": (100, 3), "both": (3, 4), "single": (1, 1)}


def problem(count=7, width=4, vocabulary=11, dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=make, dtype=dtype) for shape in ((count, width), (vocabulary, width), (vocabulary,))
    )
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), torch.randint(0, vocabulary, (count,), generator=make)


def plain(hidden, weight, token, curve=m.PLAIN, bias=None):
    """The textbook form: all logits at once."""
    logits = nn.functional.linear(hidden, weight, bias) * curve.scale
    logits = logits if curve.cap is None else torch.tanh(logits / curve.cap) * curve.cap
    logp = (logits / curve.temperature).log_softmax(-1)
    return logp.gather(1, token[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


def test_two_equal_logits_and_an_impossible_one():  # L20
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.zeros(3, 1, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf], requires_grad=True)
    for tile in ((1, 3), (1, 2), (1, 1)):
        logprob, entropy = token_logprob(hidden, weight, torch.tensor([0]), bias=bias, tile=tile)
        assert logprob.item() == pytest.approx(-math.log(2), abs=1e-6, rel=0)
        assert entropy.item() == pytest.approx(0.693147, abs=1e-6, rel=0)
        for gradient in torch.autograd.grad((logprob + entropy).sum(), (hidden, weight, bias)):
            assert gradient.isfinite().all()
    slope = torch.autograd.grad(token_logprob(hidden, weight, torch.tensor([0]), bias=bias)[0].sum(), bias)[0]
    torch.testing.assert_close(slope, torch.tensor([0.5, -0.5, 0.0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]])
def test_a_tile_of_impossible_tokens_only_changes_nothing(order):
    bias = torch.tensor([1.0, 0.0, -torch.inf, -torch.inf])[order].requires_grad_()
    token = torch.tensor([order.index(0)])
    logprob, entropy = token_logprob(torch.ones(1, 1), torch.zeros(4, 1), token, bias=bias, tile=(1, 2))
    assert logprob.item() == pytest.approx(-0.313262, abs=1e-6, rel=0)
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6, rel=0)
    (logprob + entropy).sum().backward()
    assert bias.grad.isfinite().all() and (bias.grad[bias.isneginf()] == 0).all()


def test_a_token_that_cannot_be_has_no_probability():
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    logprob, entropy = token_logprob(torch.ones(1, 1), torch.zeros(3, 1), torch.tensor([2]), bias=bias)
    assert logprob.item() == -torch.inf and entropy.isfinite().all()


def test_what_is_not_a_number_stays_visible():
    logprob, entropy = token_logprob(torch.tensor([[torch.nan]]), torch.ones(3, 1), torch.tensor([0]), tile=(1, 1))
    assert logprob.isnan().all() and entropy.isnan().all()


def test_large_logits_lose_no_digits():
    weight = torch.tensor([[1000.0], [999.0], [-1000.0]])
    for tile in ((1, 3), (1, 1)):
        logprob, entropy = token_logprob(torch.ones(1, 1), weight, torch.tensor([1]), tile=tile)
        assert logprob.item() == pytest.approx(-1.313262, abs=1e-6, rel=0)
        assert entropy.item() == pytest.approx(0.582203, abs=1e-6, rel=0)


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_it_is_the_plain_form_in_value_and_gradient(curve, tile):
    hidden, weight, bias, token = problem()
    for offset in (None, bias):
        leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
        want, got = plain(hidden, weight, token, curve, offset), token_logprob(hidden, weight, token, curve, offset, tile)
        sums = [(a * torch.linspace(-1, 2, 7) - 0.3 * b.cos()).sum() for a, b in (want, got)]
        for mine, theirs in zip(got + torch.autograd.grad(sums[1], leaves), want + torch.autograd.grad(sums[0], leaves), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_gradcheck(curve):
    hidden, weight, bias, token = problem()
    assert torch.autograd.gradcheck(
        lambda *leaves: token_logprob(leaves[0], leaves[1], token, curve, leaves[2], (3, 4)), (hidden, weight, bias)
    )


def test_each_result_alone_has_its_gradient():
    hidden, weight, _, token = problem()
    for which in (0, 1):
        mine, theirs = (torch.autograd.grad(f(hidden, weight, token)[which].sum(), (hidden, weight)) for f in (token_logprob, plain))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_a_second_call_and_one_without_gradients_say_the_same():
    hidden, weight, bias, token = problem()
    first, second = (token_logprob(hidden, weight, token, bias=bias) for _ in range(2))
    with torch.no_grad():
        third = token_logprob(hidden, weight, token, bias=bias)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))
    assert first[0].requires_grad and not third[0].requires_grad
    once = torch.autograd.grad(first[0].sum(), weight, retain_graph=True)
    assert torch.equal(once[0], torch.autograd.grad(first[0].sum(), weight)[0])


@pytest.mark.parametrize("dtype, kept", [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_results_are_fp32_or_wider_and_gradients_as_their_leaves(dtype, kept):
    hidden, weight, bias, token = problem(dtype=dtype)
    results = token_logprob(hidden, weight, token, bias=bias, tile=(3, 4))
    assert {result.dtype for result in results} == {kept}
    sum(result.sum() for result in results).backward()
    assert {leaf.grad.dtype for leaf in (hidden, weight, bias)} == {dtype}
    for mine, theirs in zip(results, plain(hidden.double(), weight.double(), token, bias=bias.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=0.1 if dtype == torch.bfloat16 else 1e-6, rtol=0)


def test_autocast_rounds_the_logits_as_it_does_a_linear_layers():
    hidden, weight, bias, token = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = token_logprob(hidden, weight, token, bias=bias, tile=(3, 4))
        logits = nn.functional.linear(hidden, weight, bias)
    assert logits.dtype == torch.bfloat16
    want = logits.float().log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    torch.testing.assert_close(got[0], want, atol=1e-6, rtol=0)
    for mine, theirs in zip(
        torch.autograd.grad(got[0].sum(), (hidden, weight)), torch.autograd.grad(want.sum(), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0)


def test_a_weight_that_needs_no_gradient_costs_none():
    hidden, weight, _, token = problem(dtype=torch.float32)
    with Largest() as seen:
        token_logprob(hidden, weight.detach(), token, tile=(2, 2))[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None and seen.largest < weight.numel()


class Largest(TorchDispatchMode):
    """Watches every operation: the most numbers that a new tensor had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {
            leaf.untyped_storage().data_ptr() for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in old:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def test_no_tensor_of_tokens_times_vocabulary_is_made():
    hidden, weight, _, token = problem(count=300, width=4, vocabulary=500, dtype=torch.float32)
    with Largest() as seen:
        plain(hidden, weight, token)[0].sum().backward()
    assert seen.largest == 300 * 500  # the watcher sees what there is
    for curve in CURVES.values():
        with Largest() as seen:
            sum(result.sum() for result in token_logprob(hidden, weight, token, curve, tile=(50, 100))).backward()
        assert seen.largest == 50 * 100


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("count, vocabulary", [(1, 1), (0, 7), (2048, 268), (2048, 49152), (3, 150_000), (100_000, 3)])
def test_a_tile_has_a_bounded_size_and_covers_small_problems(device, count, vocabulary):
    rows, columns = tile_shape(count, vocabulary, device)
    size = m.CPU_TILE if device == "cpu" else m.CUDA_TILE
    assert 1 <= rows * columns <= size and 1 <= columns <= vocabulary and 1 <= rows <= max(1, count)
    if count * vocabulary <= size and count <= 512:
        assert (rows, columns) == (max(1, count), vocabulary)


def test_no_tokens_at_all():
    hidden, weight, _, _ = problem()
    logprob, entropy = token_logprob(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == entropy.shape == (0,) and not weight.grad.any()
