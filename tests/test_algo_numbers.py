"""The optimizers against numbers worked by hand: advantages, log-probabilities, entropy, values and the parts of the loss."""

import copy
import math

import pytest
import torch
from torch import tensor

from ragen_agent.algos import ARPO, BRPO, GRPO, PPO, DrGRPO, Totals
from ragen_agent.algos.starpo import written
from tests.algo_parts import batch, batch_of, gradient, policy
from tests.parts import BigramLM

# ---- advantages ----

PAIRS = batch_of([(0, ".00"), (1, ".0"), (2, ".000"), (3, ".0")], [1, 0, 1, 1], [0, 0, 1, 1])
ADVANTAGES = [
    (ARPO, {}, [1, 0, 1, 1]),
    (BRPO, {}, [0.499999, -1.499997, 0.499999, 0.499999]),
    (GRPO, {}, [0.7071058, -0.7071058, 0, 0]),
    (DrGRPO, {}, [0.5, -0.5, 0, 0]),
    (PPO, {"whiten": False}, [1, 0, 1, 1]),  # the critic begins at 0, gamma and lambda are 1
    (PPO, {}, [0.3779635, -2.2677808, 0.3779635, 0.3779635]),  # seven tokens, six of 1 and one of 0: mean 6/7, sample std 1/sqrt(7)
]


@pytest.mark.parametrize(("kind", "settings", "wanted"), ADVANTAGES)
def test_advantages_by_hand(kind, settings, wanted):
    data = copy.deepcopy(PAIRS)
    kind(policy(), **settings).prepare(data)
    spread = tensor(wanted)[:, None] * data.sampled
    torch.testing.assert_close(written(data, "advantage").float(), spread.float(), atol=1e-6, rtol=0)


def test_asymmetric_clamp_of_brpo():
    data = batch_of([(i, ".0") for i in range(16)], [0.0] * 15 + [1.0], [0] * 16)
    BRPO(policy(), clamp_low=-1.0, clamp_high=3.0).prepare(data)
    torch.testing.assert_close(written(data, "advantage")[:, 1], tensor([-0.249999] * 15 + [3.0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [ARPO, BRPO, GRPO, DrGRPO])
def test_an_episode_of_many_rows_counts_once(kind):
    """Cutting an episode into windows changes no advantage, no loss and no gradient of a policy that reads one token back."""
    one = batch_of([(0, "..00.11.2"), (1, "..0"), (2, ".00"), (3, ".0")], [2, 0, 3, 0], [0, 0, 0, 0])
    cut = batch_of([(0, "..00"), (0, "..11"), (0, "..2"), (1, "..0"), (2, ".00"), (3, ".0")], [2, 0, 3, 0], [0, 0, 0, 0])
    for data in (one, cut):
        data.ids = torch.where(data.episode[:, None] == 2, 2, torch.ones_like(data.ids))
    grads = []
    for data in (one, cut):
        agent = kind(BigramLM.of(torch.eye(3, dtype=torch.float64)).double())
        agent.prepare(data)
        grads.append(gradient(agent, data, [list(range(len(data)))])[0])
        assert Totals.of(data).episodes == 4 and Totals.of(data).length.tolist() == [5, 1, 2, 1]
    standing = [written(x, "advantage")[x.sampled].tolist() for x in (one, cut)]
    assert standing[0] == standing[1]
    torch.testing.assert_close(*grads, atol=1e-12, rtol=0)
    assert grads[0].abs().max() > 1e-3


# ---- logprobs, entropy and the loss by hand ----

TABLE = tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])


def test_old_is_the_choice_given_what_came_before():
    data = batch_of([(0, ".000")], [1], [0])
    data.ids = tensor([[0, 1, 2, 2]])
    ARPO(BigramLM.of(TABLE.log())).prepare(data)
    torch.testing.assert_close(written(data, "old")[0].exp(), tensor([1, 0.2, 0.3, 0.5]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("temperature", "wanted"), [(0.5, -0.142932), (1.0, -0.407606), (0.0, -0.407606)])
def test_every_pass_has_the_temperature_of_the_sampler(temperature, wanted):
    logits = tensor([[2.0, 1.0, 0.0]] * 3)
    data = batch_of([(0, ".0")], [1], [0])
    data.ids = tensor([[1, 0]])
    data.logprob = tensor([[0.0, wanted]])
    agent = ARPO(BigramLM.of(logits), reference=BigramLM.of(logits), kl_coef=1.0, temperature=temperature)
    notes = agent.prepare(data)
    torch.testing.assert_close(written(data, "old")[0, 1], tensor(wanted), atol=1e-6, rtol=0)
    assert torch.equal(written(data, "old"), written(data, "ref")) and notes["sampler_gap_max"] < 1e-6
    _, metrics = agent(data)
    assert metrics["ratio_max"] == 1 and metrics["kl"] == 0
    data.old = tensor([[0.0, -0.142932]])  # forgetting the temperature in one of the two
    if temperature == 1.0:
        assert agent(data)[1]["ratio_max"].item() == pytest.approx(0.767456, abs=1e-6)


@pytest.mark.parametrize(("kind", "wanted"), [("k1", 1.0), ("k2", 0.5), ("k3", 0.3678794)])
def test_the_kl_is_a_cost(kind, wanted):
    data = batch_of([(0, ".0")], [0.0], [0])
    data.ids.fill_(0)
    agent = ARPO(BigramLM.of(TABLE.log()), reference=BigramLM.of(TABLE.log()), kl_coef=2.0, kl_kind=kind)
    agent.prepare(data)
    data.ref = written(data, "old") - 1.0
    loss, metrics = agent(data)
    assert metrics["kl"].item() == pytest.approx(wanted, abs=1e-6)
    assert loss.item() == pytest.approx(2 * wanted, abs=1e-6)


def test_entropy_of_a_masked_vocabulary():
    data = batch_of([(0, ".0")], [0.0], [0])
    data.ids = tensor([[0, 1]])
    agent = ARPO(BigramLM.of(tensor([[0.0, 0.0, -1e30]] * 3)), entropy_coef=1.0)
    agent.prepare(data)
    loss, metrics = agent(data)
    loss.backward()
    assert metrics["entropy"].item() == pytest.approx(math.log(2), abs=1e-6)
    assert loss.item() == pytest.approx(-math.log(2), abs=1e-6)
    assert all(w.grad.isfinite().all() for w in agent.parameters() if w.grad is not None)


@pytest.mark.parametrize(("mode", "loss"), [("token-mean", 0.5), ("seq-mean-token-mean", 0), ("seq-mean-token-sum", 1)])
@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]]])
def test_accumulation_is_not_a_mean_of_means(mode, loss, parts):
    data = batch_of([(0, ".0"), (1, ".000")], [1, -1], [0, 0])
    data.ids.clamp_(max=2)
    agent = ARPO(BigramLM.of(torch.zeros(3, 3)), aggregation=mode)
    agent.prepare(data)
    assert gradient(agent, data, parts)[1]["pg_loss"] == pytest.approx(loss, abs=1e-6)


def test_constant_length():
    data = batch_of([(0, ".0"), (1, ".000")], [1, -1], [0, 0])
    agent = ARPO(policy(), aggregation="seq-mean-token-sum-norm", horizon=4)
    agent.prepare(data)
    assert agent(data)[1]["loss"].item() == pytest.approx(0.25, abs=1e-6)


# ---- ratios ----


@pytest.mark.parametrize(
    ("ratio", "loss", "clipped", "largest"),
    [("token", -0.1033333, 0.4, 4.0), ("sequence", -0.24, 1.0, 2.0), ("sequence-token", -0.24, 1.0, 2.0)],
)
def test_the_ratio_of_a_token_and_of_an_episode(ratio, loss, clipped, largest):
    """Token ratios 4 and 1 under A = 1, of geometric mean 2; 1/4, 1 and 1 under A = -1, of geometric mean .62996.

    By token: (-1.28 - 1) / 2 and (.8 + 1 + 1) / 3, their mean -.103333; by episode: -1.28 and .8, their mean -.24.
    """
    data = batch_of([(0, ".00"), (1, ".000")], [1, -1], [0, 0])
    agent = ARPO(policy(), ratio=ratio, aggregation="seq-mean-token-mean")
    agent.prepare(data)
    data.old = written(data, "old") - tensor([[1, 4, 1, 1], [1, 0.25, 1, 1]]).log()
    _, metrics = agent(data)
    assert metrics["pg_loss"].item() == pytest.approx(loss, abs=1e-6)
    assert metrics["clip_fraction"].item() == pytest.approx(clipped, abs=1e-6)
    assert metrics["ratio_max"].item() == pytest.approx(largest, abs=1e-6)


def test_one_ratio_one_advantage():
    """Under "sequence" an episode trains on the mean of its tokens' advantages: rewards to come 2, 1 and 1 are 4 / 3 each."""
    for ratio, wanted in (("sequence", [4 / 3] * 3), ("sequence-token", [2, 1, 1])):
        data = batch_of([(0, ".0"), (0, "..11")], [2], [0])
        PPO(policy(), ratio=ratio, whiten=False).prepare(data)
        torch.testing.assert_close(written(data, "advantage")[data.sampled].float(), tensor(wanted).float(), atol=1e-6, rtol=0)


# ---- weights of groups, rounds and tokens ----


def test_soft_reweighting_by_the_spread_of_the_group():
    """Spreads .707107, 1.414214 and 0: half, all (less 1e-6 of it) and nothing of the advantages +-.5, +-1 and 0."""
    data = batch_of([(i, ".0") for i in range(6)], [1, 0, 2, 0, 5, 5], [0, 0, 1, 1, 2, 2])
    DrGRPO(policy(), reweight=True).prepare(data)
    wanted = tensor([0.2499998, -0.2499998, 0.9999993, -0.9999993, 0, 0])
    torch.testing.assert_close(written(data, "advantage")[:, 1].float(), wanted, atol=1e-6, rtol=0)


def test_the_scale_of_a_filtered_round_comes_last():
    data = copy.deepcopy(PAIRS)
    BRPO(policy(), clamp_low=-1.0).prepare(data, scale=0.5)
    torch.testing.assert_close(written(data, "advantage")[:, 1], tensor([0.2499995, -0.5, 0.2499995, 0.2499995]), atol=1e-6, rtol=0)


CORRECTED = [  # settings, loss, mean weight, share corrected: importance 1.5 and 4 under A = 1
    ({"correction": "truncate"}, -1.75, 1.75, 0.5),
    ({"correction": "mask"}, -0.75, 0.75, 0.5),  # the dropped token still counts among the two
    ({"correction": "mask", "correction_low": 2.0, "correction_high": 5.0}, -2.0, 2.0, 0.5),
    ({"correction": "truncate", "correction_level": "sequence", "correction_high": 5.0}, -5.0, 5.0, 1.0),  # 1.5 * 4 = 6
    ({"correction": "truncate", "correction_level": "sequence", "correction_high": 7.0}, -6.0, 6.0, 0.0),
]


@pytest.mark.parametrize(("settings", "loss", "mean", "share"), CORRECTED)
@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]]])
def test_importance_correction(settings, loss, mean, share, parts):
    data = batch_of([(0, ".0"), (0, ".1")], [1], [0])
    agent = ARPO(policy(), **settings)
    agent.prepare(data)
    data.logprob = written(data, "old") - tensor([[0, math.log(1.5)], [0, math.log(4)]])
    notes = agent.prepare(data)
    assert (notes["correction_mean"], notes["correction_share"]) == pytest.approx((mean, share), abs=1e-6)
    assert gradient(agent, data, parts)[1]["pg_loss"] == pytest.approx(loss, abs=1e-6)


def test_without_correction_there_is_no_weight():
    data = batch()
    assert "correction_mean" not in ARPO(policy()).prepare(data) and data.weight is None


# ---- the coefficient of the KL ----


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_an_adaptive_coefficient_follows_the_kl_and_is_saved(kl_in):
    """A KL more than a fifth under its target: three episodes of 15 move the coefficient by -.2 * 3 / 15, from .5 to .48."""
    settings = {"kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 15, "kl_kind": "k2", "kl_in": kl_in}
    table = tensor([[0.0, 0, 0]] * 3)
    far = table.clone()
    far[:, 0] = -0.4
    agent = ARPO(BigramLM.of(table), reference=BigramLM.of(far), **settings)
    data = batch_of([(i, ".0") for i in range(3)], [1, 1, 1], [0] * 3)
    data.ids.fill_(0)
    d = math.log(1 / 3) - (-0.4 - math.log(2 + math.exp(-0.4)))
    assert d * d / 2 < 0.08
    notes = agent.prepare(data)
    assert notes["kl_old"] == pytest.approx(d * d / 2, abs=1e-6) and notes["kl_weight"] == pytest.approx(0.5, abs=1e-6)
    assert agent.kl_now == pytest.approx(0.48, abs=1e-6)
    first = 1 - 0.5 * d * d / 2 if kl_in == "reward" else 1.0
    assert written(data, "advantage")[0, 1].item() == pytest.approx(first, abs=1e-6)
    loss, metrics = agent(data)
    if kl_in == "loss":  # the round's own loss has the coefficient that the round's KL called for
        assert (loss - metrics["pg_loss"]).item() == pytest.approx(0.48 * d * d / 2, abs=1e-6)
    again = ARPO(BigramLM.of(table), reference=BigramLM.of(far), **settings)
    again.load_state_dict(agent.state_dict())
    assert again.kl_now == agent.kl_now
    assert "kl_weight" not in ARPO(policy(), reference=policy(), kl_coef=0.1).state_dict()


# ---- what cannot be ----


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_an_error(bad):
    data = batch()
    data.score[3] = bad
    with pytest.raises(ValueError, match=r"\[3\]"):
        GRPO(policy()).prepare(data)
