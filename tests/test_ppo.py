"""PPO: its three credits, bootstraps and value losses by hand; a critic on the policy's states or in a model of its own."""

import pytest
import torch
from torch import Tensor, nn, tensor

from ragen_agent.algos import GRPO, PPO, StarPO
from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import written
from ragen_agent.batch import Batch, collate
from ragen_agent.types import Reply, Trajectory, Turn
from tests.algo_parts import algo, batch, batch_of, gradient, policy
from tests.parts import BigramLM

TABLE = tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
MASK, TURNS = tensor([[True, True, False, False, True, True]]), tensor([[0, 0, 1, 1, 1, 1]])
VALUE = [0.1, 0.2, 9, 9, 0.3, 0.4]


def row(values: list[float]) -> Tensor:
    return tensor([values], dtype=torch.float64)


PAID = row([0, 0, 0, 0, 0, 1])


def close(x: Tensor, wanted) -> None:
    """Equal within 1e-6, absolute only."""
    torch.testing.assert_close(x.detach().double(), tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)


# ---- the formulas ----


@pytest.mark.parametrize(
    ("levels", "wanted"),
    [
        # tokens from the right: 1 + .9 * .5 - .4 = 1.05; .36 - .3 + .72 * 1.05 = .816; .27 - .2 + .72 * .816; .18 - .1 + .72 * .65752
        ("token", [0.5534144, 0.65752, 0, 0, 0.816, 1.05]),
        # high: 1 + .95 * .5 - .4 = 1.075; .38 - .2 + .76 * 1.075 = .997. Low: .06 + .72 * 1.075 = .834; .08 + .72 * .997 = .79784
        ("bi-level", [0.79784, 0.997, 0, 0, 0.834, 1.075]),
        # turns by their first values: 1 + .95 * .5 - .3 = 1.175; 0 + .95 * .3 - .1 + .76 * 1.175 = 1.078
        ("turn", [1.078, 1.078, 0, 0, 1.175, 1.175]),
    ],
)
def test_bootstrap_by_hand(levels, wanted):
    after = tensor([0.5], dtype=torch.float64)
    found = {
        "token": lambda: F.gae(PAID, row(VALUE), MASK, 0.9, 0.8, after),
        "bi-level": lambda: F.bi_level_gae(PAID, row(VALUE), MASK, TURNS, 0.9, 0.8, 0.95, after),
        "turn": lambda: F.turn_gae(PAID, row(VALUE), MASK, TURNS, 0.8, 0.95, after),
    }
    close(found[levels](), [wanted])


# ---- the optimizer ----


@pytest.mark.parametrize("settings", [{}, {"gamma": 0.9, "lam": 0.8}, {"credit": "bi-level", "lam": 0.9}, {"credit": "turn", "lam": 0.9}])
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


@pytest.mark.parametrize(
    ("credit", "wanted"),
    [("token", [0.38545344, 0.42424, 0.492, 0.6]), ("bi-level", [0.53792, 0.636, 0.492, 0.6]), ("turn", [0.717, 0.717, 0.7, 0.7])],
)
def test_gae_by_hand_with_the_settings_of_the_optimizer(credit, wanted):
    """The numbers of test_functional, by way of a batch in which the two turns are two rows. By turn: .95 * .3 - .1 + .76 * .7 = .717."""
    data = batch_of([(0, ".00"), (0, "...11")], [0], [0])
    data.reward[1, 4] = 1.0
    data.value = tensor([[9, 0.1, 0.2, 9, 9], [9, 9, 9, 0.3, 0.4]])
    agent = PPO(policy(), gamma=0.9, lam=0.8, credit=credit, whiten=False)
    torch.testing.assert_close(agent.advantage(data)[data.sampled], tensor(wanted), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [None, "k1", "k2", "k3"])
def test_rewards_less_the_kl_to_the_reference(kind):
    """With lambda and gamma 0 an advantage is the token's own reward; the KL is k1 unless told otherwise, and no term of the loss."""
    data = batch_of([(0, ".00")], [1], [0])
    agent = PPO(policy(), reference=policy(7), kl_coef=0.5, kl_in="reward", kl_kind=kind, whiten=False, lam=0.0, gamma=0.0)
    notes = agent.prepare(data)
    d = (written(data, "old") - written(data, "ref"))[0, 1:]
    cost = {None: d, "k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[kind]
    close(written(data, "advantage")[0, 1:], (tensor([0.0, 1.0]) - 0.5 * cost).tolist())
    close(agent.scores(data), [1 - 0.5 * cost.sum().item()])
    assert notes["kl_old"] == pytest.approx(cost.mean().item(), abs=1e-6)
    assert "kl" not in agent(data)[1]


def test_the_critic_sees_the_state_before_the_choice():
    data = batch_of([(0, ".000")], [1], [0])
    data.ids = tensor([[0, 1, 2, 2]])
    agent = PPO(BigramLM.of(TABLE))
    nn.init.constant_(agent.critic.bias, 1.0)
    with torch.no_grad():
        agent.critic.weight.copy_(tensor([[1.0, 0, 0]]))
    agent.prepare(data)
    torch.testing.assert_close(written(data, "value")[0, 1:], tensor([1.7, 1.1, 1.25]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("clip", "target", "wanted"), [(None, 1, 0.81), (0.05, 1, 0.9025), (None, -1, 1.21), (0.05, -1, 1.21)])
def test_value_loss(clip, target, wanted):
    """Old value 0, new .1, target 1: (.1 - 1)^2, or (.05 - 1)^2 where the value may move by .05; the larger of the two: target -1."""
    data = batch_of([(0, ".0")], [target], [0])
    agent = PPO(policy(), value_clip=clip, value_coef=0.5)
    agent.prepare(data)
    nn.init.constant_(agent.critic.bias, 0.1)
    loss, metrics = agent(data)
    assert metrics["value_loss"].item() == pytest.approx(wanted, abs=1e-6)
    assert (loss - metrics["pg_loss"]).item() == pytest.approx(wanted / 2, abs=1e-6)


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


# ---- one value a turn ----


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("parts", [[[0, 1]], [[1], [0]]])
def test_with_credit_by_turn_a_turn_is_one_value_and_one_loss(aggregation, parts):
    """Turns worth 1.5 and 1.5, and one worth 1; values are 0, so targets are 3, 1.5 and 1: (9 + 2.25 + 1) / 3, however many tokens."""
    data = batch_of([(0, "..00.111"), (1, ".0")], [3, 1], [0, 0])
    agent = PPO(policy(), credit="turn", turn_gamma=1.0, whiten=False, value_coef=1.0, aggregation=aggregation)
    agent.prepare(data)
    close(written(data, "advantage"), [[0, 0, 3, 3, 0, 1.5, 1.5, 1.5], [0, 1, 0, 0, 0, 0, 0, 0]])
    close(written(data, "target"), [[0, 0, 3, 0, 0, 1.5, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]])
    _, metrics = gradient(agent, data, parts)
    assert metrics["value_loss"] == pytest.approx(12.25 / 3, abs=1e-6)
    assert metrics["loss"] - metrics["pg_loss"] == pytest.approx(12.25 / 3, abs=1e-6)
    assert agent.critic.bias.grad is not None
    close(agent.critic.bias.grad, [-2 * (3 + 1.5 + 1) / 3])


# ---- beyond a limit ----


def cut_short(ahead: list[int] | None) -> Batch:
    """One token sampled, worth 1, then a limit; the next reply would have had the context `ahead`."""
    turn = Turn(Reply("", "", prompt_ids=[0], ids=[1], logprobs=[-1.6]), "", 1.0, {})
    ended = Trajectory("w", 0, 0, "", {}, [turn], truncated=True)
    return collate([ended], None if ahead is None else [ahead])


@pytest.mark.parametrize("credit", ["token", "bi-level", "turn"])
@pytest.mark.parametrize("context", [[0, 1, 2], [2]])  # in the row of the reply, and where a window moved, in its own
@pytest.mark.parametrize("bootstrap", [True, False])
def test_gae_begins_at_the_value_of_the_last_observation(credit, context, bootstrap):
    """V is the first logit of what the token before says: .7 before the reply, .25 after the last observation. 1 + .9 * .25 - .7."""
    agent = PPO(BigramLM.of(TABLE), credit=credit, gamma=0.9, turn_gamma=0.9, whiten=False, bootstrap=bootstrap)
    with torch.no_grad():
        agent.critic.weight.copy_(tensor([[1.0, 0, 0]]))
    assert agent.bootstraps is bootstrap and not StarPO.bootstraps.fget(agent)  # pyright: ignore
    data = cut_short(context)
    agent.prepare(data, micro_rows=1)
    close(written(data, "advantage")[data.sampled], [0.525 if bootstrap else 0.3])
    close(written(data, "target")[data.sampled], [1.225 if bootstrap else 1.0])
    assert not written(data, "advantage")[data.ahead].any() and not written(data, "target")[data.ahead].any()
    whole = cut_short(None)  # an episode that is not to be bootstrapped
    agent.prepare(whole)
    close(written(whole, "advantage")[whole.sampled], [0.3])


# ---- a model of its own ----


def test_who_wants_a_critic():
    assert not PPO.wants_critic() and PPO.wants_critic(critic_model=True) and not GRPO.wants_critic()
    with pytest.raises(ValueError, match="critic=a causal model"):
        PPO(policy(), critic_model=True)
    with pytest.raises(ValueError, match="critic_model=True"):
        PPO(policy(), critic=policy(5))
    with pytest.raises(ValueError, match="detach"):
        PPO(policy(), critic=policy(5), critic_model=True, detach=True)


def test_a_critic_model_judges_and_learns_alone():
    """Values are those of a PPO on the critic; the value loss moves the critic alone, the policy's loss the policy alone."""
    agent, other, data, same = algo(PPO, {"critic_model": True}), PPO(policy(5)), batch(), batch()
    nn.init.constant_(other.critic.weight, 0.1)
    nn.init.constant_(other.critic.bias, 0.3)
    agent.prepare(data)
    other.prepare(same)
    assert torch.equal(written(data, "value"), written(same, "value"))
    flat = batch_of([(0, ".00"), (1, ".0")], [1, 1], [0, 0])
    for agent, moves in ((algo(PPO, {"critic_model": True, "value_coef": 0.0}), "policy"), (algo(PPO, {"critic_model": True}), "critic")):
        seen = flat if moves == "critic" else batch()
        agent.prepare(seen)
        written(seen, "advantage").mul_(moves == "policy")
        gradient(agent, seen, [list(range(len(seen)))])
        for name, weight in agent.named_parameters():
            moved = weight.grad is not None and bool(weight.grad.any())
            assert moved or not name.startswith(moves) or "k_proj" in name or "q_proj" in name or "embed" in name, name
            assert not moved or name.startswith(moves), name


def test_a_critic_model_is_trained_saved_and_kept_from_dropout():
    agent = algo(PPO, {"critic_model": True})
    assert isinstance(agent, PPO)
    body, names = agent.critic_body, [name for name, _ in agent.named_parameters()]
    assert any(name.startswith("critic_body.") for name in names) and not any("critic" in name and "lm_head" in name for name in names)
    assert {name for name in agent.state_dict() if name.startswith("critic")} == {name for name in names if name.startswith("critic")}
    assert agent.train().training and not body.training
    actor, critic = agent.parameter_groups(1e-6, 1e-5)
    assert actor["lr"] == 1e-6 and critic["lr"] == 1e-5
    assert {id(p) for p in actor["params"]} == {id(p) for p in agent.policy.parameters()}
    assert {id(p) for p in critic["params"]} == {id(p) for p in [*body.parameters(), *agent.critic.parameters()]}
    assert {name: [id(p) for p in part] for name, part in agent.trained().items()} == {
        name: [id(p) for p in group["params"]] for name, group in (("policy", actor), ("critic", critic))
    }
    assert PPO(policy()).parameter_groups(1e-3)[1]["lr"] == 1e-3
    assert len(GRPO(policy()).parameter_groups(1e-3, 1.0)) == 1
    two = algo(PPO, {"critic_model": True}, seed=3)
    assert isinstance(two, PPO)
    nn.init.constant_(next(two.critic_body.parameters()), 0.5)
    two.load_state_dict(agent.state_dict())
    data, same = batch(), batch()
    assert agent.prepare(data) == two.prepare(same)
