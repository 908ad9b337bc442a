"""The optimizers against numbers worked by hand: advantages, log-probabilities, entropy, values and the parts of the loss."""

import copy
import math

import pytest
import torch
from torch import nn, tensor

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


@pytest.mark.parametrize("settings", [{}, {"gamma": 0.9, "lam": 0.8}, {"bi_level": True, "lam": 0.9}])
def test_gae_runs_through_the_rows_of_an_episode(settings):
    one = batch_of([(0, "..00.11.2"), (1, ".0")], [3, 0], [0, 0])
    cut = batch_of([(0, "..00"), (0, "..11"), (0, "..2"), (1, ".0")], [3, 0], [0, 0])
    found = []
    for data in (one, cut):
        data.ids.fill_(1)
        agent = PPO(BigramLM.of(torch.eye(3)), whiten=False, **settings)
        nn.init.constant_(agent.critic.bias, 0.5)
        agent.prepare(data)
        found.append((written(data, "advantage")[data.sampled].tolist(), written(data, "target")[data.sampled].tolist()))
    assert found[0] == found[1]
    if not settings:
        assert found[0] == ([2.5, 2.5, 1.5, 1.5, 0.5, -0.5], [3, 3, 2, 2, 1, 0])


@pytest.mark.parametrize(("bi_level", "wanted"), [(False, [0.38545344, 0.42424, 0.492, 0.6]), (True, [0.53792, 0.636, 0.492, 0.6])])
def test_gae_by_hand_with_the_settings_of_the_optimizer(bi_level, wanted):
    """The numbers of test_functional, by way of a batch in which the two turns are two rows."""
    data = batch_of([(0, ".00"), (0, "...11")], [0], [0])
    data.reward[1, 4] = 1.0
    data.value = tensor([[9, 0.1, 0.2, 9, 9], [9, 9, 9, 0.3, 0.4]])
    agent = PPO(policy(), gamma=0.9, lam=0.8, bi_level=bi_level, whiten=False)
    torch.testing.assert_close(agent.advantage(data)[data.sampled], tensor(wanted), atol=1e-6, rtol=0)


def test_rewards_less_the_kl_to_the_reference():
    data = batch_of([(0, ".00")], [1], [0])
    agent = PPO(policy(), reference=policy(7), kl_reward=0.5, whiten=False, lam=0.0, gamma=0.0)
    agent.prepare(data)
    k1 = (written(data, "old") - written(data, "ref"))[0, 1:]
    torch.testing.assert_close(written(data, "advantage")[0, 1:], tensor([0.0, 1.0]) - 0.5 * k1, atol=1e-12, rtol=0)


# ---- logprobs, entropy and the loss by hand ----

TABLE = tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])


def test_old_is_the_choice_given_what_came_before():
    data = batch_of([(0, ".000")], [1], [0])
    data.ids = tensor([[0, 1, 2, 2]])
    ARPO(BigramLM.of(TABLE.log())).prepare(data)
    torch.testing.assert_close(written(data, "old")[0].exp(), tensor([1, 0.2, 0.3, 0.5]), atol=1e-6, rtol=0)


def test_the_critic_sees_the_state_before_the_choice():
    data = batch_of([(0, ".000")], [1], [0])
    data.ids = tensor([[0, 1, 2, 2]])
    agent = PPO(BigramLM.of(TABLE))
    nn.init.constant_(agent.critic.bias, 1.0)
    with torch.no_grad():
        agent.critic.weight.copy_(tensor([[1.0, 0, 0]]))
    agent.prepare(data)
    torch.testing.assert_close(written(data, "value")[0, 1:], tensor([1.7, 1.1, 1.25]), atol=1e-6, rtol=0)


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


def test_importance_weight_of_the_sampler_is_capped():
    data = batch_of([(0, ".00")], [1], [0])
    agent = ARPO(policy(), sampler_cap=2.0)
    agent.prepare(data)
    data.logprob = written(data, "old") - tensor([[0, math.log(1.5), 5]])
    assert agent(data)[1]["pg_loss"].item() == pytest.approx(-(1.5 + 2) / 2, abs=1e-6)


@pytest.mark.parametrize(("clip", "wanted"), [(None, 0.81), (0.05, 0.9025)])
def test_value_loss(clip, wanted):
    """Old value 0, new .1, target 1: (.1 - 1)^2, or (.05 - 1)^2 where the value may move by .05."""
    data = batch_of([(0, ".0")], [1], [0])
    agent = PPO(policy(), value_clip=clip, value_coef=0.5)
    agent.prepare(data)
    nn.init.constant_(agent.critic.bias, 0.1)
    loss, metrics = agent(data)
    assert metrics["value_loss"].item() == pytest.approx(wanted, abs=1e-6)
    assert (loss - metrics["pg_loss"]).item() == pytest.approx(wanted / 2, abs=1e-6)


def test_a_term_without_weight_never_meets_the_loss():
    data = batch_of([(0, ".0")], [1], [0])
    agent = PPO(policy(), value_coef=0.0)
    agent.prepare(data)
    written(data, "target").fill_(math.inf)
    loss, metrics = agent(data)
    assert metrics["value_loss"] == math.inf and loss.item() == metrics["pg_loss"].item() == 0


@pytest.mark.parametrize("detach", [True, False])
def test_detach_keeps_the_value_loss_out_of_the_policy(detach):
    data = batch_of([(0, ".00"), (1, ".0")], [1, 1], [0, 0])  # flat: whitened advantages are 0, only the value loss is left
    agent = PPO(policy(), detach=detach)
    agent.prepare(data)
    nn.init.constant_(agent.critic.weight, 0.1)
    gradient(agent, data, [[0, 1]])
    moving = max(w.grad.abs().max().item() for w in agent.policy.parameters() if w.grad is not None)
    assert (moving == 0) is detach
    assert agent.critic.weight.grad is not None and agent.critic.weight.grad.abs().max() > 0


def test_explained_variance():
    data = batch_of([(0, ".0"), (1, ".0")], [1, 0], [0, 0])
    data.ids = tensor([[0, 0], [1, 0]])
    agent = PPO(BigramLM.of(torch.eye(3)))
    assert agent.prepare(data)["explained_variance"] == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        agent.critic.weight.copy_(tensor([[0.5, 0, 0]]))  # half of the truth: (1 - .5)^2 of the variance is left
    assert agent.prepare(data)["explained_variance"] == pytest.approx(0.75, abs=1e-6)
    alone = data.rows(tensor([0]))  # one token has no variance to explain
    assert agent.prepare(alone)["explained_variance"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_an_error(bad):
    data = batch()
    data.score[3] = bad
    with pytest.raises(ValueError, match=r"\[3\]"):
        GRPO(policy()).prepare(data)
