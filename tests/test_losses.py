"""The loss per token, KL estimators, aggregations and importance against numbers worked by hand; reuse of a rollout set."""

import copy
import math

import pytest
import torch
from torch import Tensor, tensor

from ragen_agent.algos import ALGOS, ARPO, PPO, divergence
from ragen_agent.algos import functional as F
from ragen_agent.algos.correction import importance
from ragen_agent.algos.starpo import written
from ragen_agent.batch import EPISODE_FIELDS
from tests.algo_parts import batch_of, policy
from tests.parts import BigramLM


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
    assert bool(F.clips(r, tensor(float(advantage)), low, high, dual)) is (bound or bool(dual and ratio > dual and advantage < 0))
    assert slope.item() == (0 if bound or (dual and ratio > dual) else -advantage)


@pytest.mark.parametrize(
    ("kind", "logp", "ref", "wanted", "slope"),
    [("k1", -1, -1.5, 0.5, 1), ("k2", -1, -1.5, 0.125, 0.5), ("k3", -1, -1.5, 0.1065307, 0.3934693), ("k1", -1.5, -1, -0.5, 1)]
    + [("k3", -1.5, -1, 0.1487213, -0.6487213)]
    + [(kind, -0.7, -0.7, 0, slope) for kind, slope in (("k1", 1), ("k2", 0), ("k3", 0))],
)
def test_kl(kind, logp, ref, wanted, slope):
    x = tensor(float(logp), dtype=torch.float64, requires_grad=True)
    found = divergence.kl(x, tensor(float(ref), dtype=torch.float64), kind)
    found.backward()
    close(found.detach(), float(wanted))
    assert x.grad is not None
    close(x.grad, float(slope))


@pytest.mark.parametrize("width", [1e-8, 1e-4, 1e-2, 1, 30, 300])
def test_k3_is_never_negative_nor_infinite(width):
    chance = torch.Generator().manual_seed(0)
    a, b = -width * torch.rand(10_000, generator=chance), -width * torch.rand(10_000, generator=chance)
    found = divergence.kl(a, b, "k3")
    assert found.min() >= 0 and found.isfinite().all()


@pytest.mark.parametrize("gap", [-19.9, -20.1, -25, -300])
def test_k3_never_pushes_the_policy_away_from_the_reference(gap):
    """Far below the reference its value is the wall's, and its slope 0, no longer 1 - exp(-gap)."""
    x = tensor(float(gap), dtype=torch.float64, requires_grad=True)
    found = divergence.kl(x, tensor(0.0, dtype=torch.float64), "k3")
    found.backward()
    assert x.grad is not None and x.grad <= 0 and found <= math.exp(F.WALL)
    assert (x.grad == 0) == (gap < -F.WALL)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        divergence.kl(tensor(0.0), tensor(0.0), "k4")
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


# ---- sampler and trainer, target and KL ----

# Two episodes; the first has a row of two tokens and one of one. old - logprob = log of 2, .5 and 3 in the first, 1.5 in the second.
IMPORTANCE = tensor([[2.0, 0.5], [3.0, math.nan], [1.5, math.nan]])
WEIGHED = [  # kind, level, low, high, weights, where corrected
    ("truncate", "token", 0, 2, [[2, 0.5], [2, 0], [1.5, 0]], [[0, 0], [1, 0], [0, 0]]),
    ("truncate", "token", 1, 9, [[2, 0.5], [3, 0], [1.5, 0]], [[0, 0], [0, 0], [0, 0]]),
    ("mask", "token", 0.6, 2, [[2, 0], [0, 0], [1.5, 0]], [[0, 1], [1, 0], [0, 0]]),
    ("truncate", "sequence", 0, 2, [[2, 2], [2, 0], [1.5, 0]], [[1, 1], [1, 0], [0, 0]]),
    ("truncate", "sequence", 0, 5, [[3, 3], [3, 0], [1.5, 0]], [[0, 0], [0, 0], [0, 0]]),
    ("mask", "sequence", 0, 2, [[0, 0], [0, 0], [1.5, 0]], [[1, 1], [1, 0], [0, 0]]),
    ("mask", "sequence", 2, 5, [[3, 3], [3, 0], [0, 0]], [[0, 0], [0, 0], [1, 0]]),
]


@pytest.mark.parametrize(("kind", "level", "low", "high", "weights", "corrected"), WEIGHED)
def test_importance_of_trainer_over_sampler(kind, level, low, high, weights, corrected):
    mask = ~IMPORTANCE.isnan()
    old = torch.full((3, 2), -1.0)
    found, cut = importance(old, old - IMPORTANCE.log(), mask, tensor([0, 0, 1]), 2, kind, level, low, high)
    close(found, weights)
    assert cut.int().tolist() == corrected


def test_a_long_episode_cannot_overflow_its_importance():
    mask = torch.ones(1, 500, dtype=torch.bool)
    for shift in (-1.0, 1.0):
        weight, _ = importance(torch.zeros(1, 500), torch.full((1, 500), shift), mask, tensor([0]), 1, "truncate", "sequence", 0, math.inf)
        assert weight.isfinite().all()


@pytest.mark.parametrize(("kind", "level", "known"), [("cut", "token", "truncate, mask"), ("mask", "episode", "token, sequence")])
def test_unknown_corrections_list_the_known(kind, level, known):
    with pytest.raises(ValueError, match=known):
        importance(row([0]), row([0]), row([1]) > 0, tensor([0]), 1, kind, level, 0, 1)


@pytest.mark.parametrize(("kl", "factor"), [(0.1, 1), (0.11, 1.005), (0.12, 1.01), (5, 1.01), (0.09, 0.995), (0, 0.99), (-3, 0.99)])
def test_adaptive_coefficient(kl, factor):
    """Target .1, 50 of 1000 episodes: a twentieth of the error, which is clipped to a fifth."""
    assert divergence.adaptation(kl, 0.1, 50, 1000) == pytest.approx(factor, abs=1e-9)
    assert divergence.adaptation(math.nan, 0.1, 50, 1000) == 1 and divergence.adaptation(math.inf, 0.1, 50, 1000) == pytest.approx(
        1.01, abs=1e-9
    )
    assert divergence.adaptation(kl, 0.1, 6000, 1000) == pytest.approx(1 + 20 * (factor - 1), abs=1e-9)  # never beyond a fifth, nor below 0


def test_a_term_without_weight_never_meets_the_loss():
    data = batch_of([(0, ".0")], [1], [0])
    agent = PPO(policy(), value_coef=0.0)
    agent.prepare(data)
    written(data, "target").fill_(math.inf)
    loss, metrics = agent(data)
    assert metrics["value_loss"] == math.inf and loss.item() == metrics["pg_loss"].item() == 0


# ---- a process with nothing to train on ----


@pytest.mark.parametrize("kind", ALGOS.values())
def test_a_batch_without_rows_is_prepared_and_counted(kind):
    """Where other processes have rows, this one still takes part in the sums of all."""
    data = batch_of([(0, ".0")], [1], [0]).rows(torch.arange(0))
    for name in EPISODE_FIELDS:
        setattr(data, name, vars(data)[name][:0])
    agent = kind(policy(), reference=policy(7), kl_coef=0.1, reweight=True, correction="mask")
    assert all(map(math.isfinite, agent.prepare(data).values()))
    totals = agent.totals(data)
    assert written(data, "advantage").shape == (0, 1) and totals.tokens == totals.episodes == totals.turns == 1


# ---- reuse of a rollout set (Online-k) ----


def test_a_second_pass_is_measured_against_the_policy_that_played():
    """Two epochs over one prepared set: old stays, so ratios grow with each step and the clip holds all of them together."""
    data = batch_of([(0, ".0"), (1, ".0")], [1, -1], [0, 0])
    data.ids = tensor([[0, 1], [0, 2]])
    agent = ARPO(BigramLM.of(torch.zeros(3, 3, dtype=torch.float64)).double(), clip_low=0.2, clip_high=0.2)
    agent.prepare(data)
    played, optimizer, highest = written(data, "old").clone(), torch.optim.SGD(agent.parameters(), lr=0.5), []
    for _ in range(6):
        loss, metrics = agent(data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        highest.append(metrics["ratio_max"].item())
        now = agent.see(data).logprob.detach()
        assert torch.equal(written(data, "old"), played)
        assert agent(data)[1]["ratio_max"].item() == pytest.approx((now - played)[0, 1].exp().item(), abs=1e-12)
    assert highest[0] == 1 and highest[1] > 1 and highest == sorted(highest)
    assert agent(data)[1]["clip_fraction"] == 1  # both tokens have left the trust region, and neither moves any more
    assert highest[-1] == highest[-2] > 1.2
    fresh = copy.deepcopy(data)
    agent.prepare(fresh)  # a new round: the first ratio is 1 again
    assert agent(fresh)[1]["ratio_max"] == 1
