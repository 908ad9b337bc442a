"""The loss per token, the KL estimators and the aggregations against numbers worked by hand."""

import math

import pytest
import torch
from torch import Tensor, tensor

from ragen_agent.algos import functional as F


def close(x: Tensor, wanted) -> None:
    """Equal within 1e-6, absolute only."""
    torch.testing.assert_close(x.double(), tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)


def row(values: list[float]) -> Tensor:
    return tensor([values], dtype=torch.float64)


CLIPS = [  # advantage, ratio, low, high, dual, loss, does the clip bind
    (1, 1.5, 0.2, 0.2, None, -1.2, True),
    (1, 1.25, 0.2, 0.2, None, -1.2, True),
    (1, 0.5, 0.2, 0.2, None, -0.5, False),
    (-1, 1.5, 0.2, 0.2, None, 1.5, False),
    (-1, 0.5, 0.2, 0.2, None, 0.8, True),
    (1, 1.25, 0.2, 0.28, None, -1.25, False),
    (1, 1.5, 0.2, 0.28, None, -1.28, True),
    (-1, 10, 0.2, 0.2, 3, 3, False),
    (-1, 2, 0.2, 0.2, 3, 2, False),
    (1, 10, 0.2, 0.2, 3, -1.2, True),
    (0, 10, 0.2, 0.2, 3, 0, False),
]


@pytest.mark.parametrize(("advantage", "ratio", "low", "high", "dual", "loss", "bound"), CLIPS)
def test_clip(advantage, ratio, low, high, dual, loss, bound):
    r = tensor(float(ratio), requires_grad=True)
    found = F.clipped(r, tensor(float(advantage)), low, high, dual)
    close(found.detach(), float(loss))
    (slope,) = torch.autograd.grad(found, r)
    assert bool(F.clips(r, tensor(float(advantage)), low, high)) is bound
    assert slope.item() == (0 if bound or (dual and ratio > dual) else -advantage)


@pytest.mark.parametrize(
    ("kind", "logp", "ref", "wanted", "slope"),
    [("k1", -1, -1.5, 0.5, 1), ("k2", -1, -1.5, 0.125, 0.5), ("k3", -1, -1.5, 0.1065307, 0.3934693), ("k1", -1.5, -1, -0.5, 1)]
    + [("k3", -1.5, -1, 0.1487213, -0.6487213)]
    + [(kind, -0.7, -0.7, 0, slope) for kind, slope in (("k1", 1), ("k2", 0), ("k3", 0))],
)
def test_kl(kind, logp, ref, wanted, slope):
    x = tensor(float(logp), dtype=torch.float64, requires_grad=True)
    found = F.kl(x, tensor(float(ref), dtype=torch.float64), kind)
    found.backward()
    close(found.detach(), float(wanted))
    assert x.grad is not None
    close(x.grad, float(slope))


@pytest.mark.parametrize("width", [1e-8, 1e-4, 1e-2, 1, 30, 300])
def test_k3_is_never_negative_nor_infinite(width):
    chance = torch.Generator().manual_seed(0)
    a, b = -width * torch.rand(10_000, generator=chance), -width * torch.rand(10_000, generator=chance)
    found = F.kl(a, b, "k3")
    assert found.min() >= 0 and found.isfinite().all()


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        F.kl(tensor(0.0), tensor(0.0), "k4")
    with pytest.raises(ValueError, match="token-mean, seq-mean-token-mean"):
        F.aggregate(row([0]), row([1]) > 0, "mean")


# One row of one token with advantage +1 and one of three with -1, ratio 1, d logp / d theta = .5 everywhere.
TWO_ROWS = tensor([[True, False, False], [True, True, True]])
MODES = [("token-mean", 0.5), ("seq-mean-token-mean", 0.0), ("seq-mean-token-sum", 1.0), ("seq-mean-token-sum-norm", 0.25)]


def slope_and_loss(mode: str, parts: list[list[int]]) -> tuple[float, float]:
    theta = tensor(0.0, dtype=torch.float64, requires_grad=True)
    advantage = tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 3)
    loss = tensor(0.0, dtype=torch.float64)
    for part in parts:
        term = F.clipped((0.5 * theta * torch.ones(len(part), 3, dtype=torch.float64)).exp(), advantage[part])
        length = TWO_ROWS.sum(1)[part]
        loss = loss + F.aggregate(term, TWO_ROWS[part], mode, tokens=4, sequences=2, length=length, horizon=4)
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad.item()


@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]], [[1], [0]]])
@pytest.mark.parametrize(("mode", "loss"), MODES)
def test_aggregation_means_its_name_however_the_batch_is_cut(mode, loss, parts):
    close(tensor(slope_and_loss(mode, parts)), [loss, loss / 2])


@pytest.mark.parametrize(("mode", "loss"), MODES[:3])
def test_aggregation_defaults_to_the_rows_given(mode, loss):
    term = tensor([[-1.0, math.nan, math.inf], [1, 1, 1], [5, 5, 5]])
    mask = torch.cat([TWO_ROWS, torch.zeros(1, 3, dtype=torch.bool)])  # a row without a sampled token does not count
    close(F.aggregate(term, mask, mode), loss)
