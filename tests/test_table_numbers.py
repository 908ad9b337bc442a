"""The table of optimizers against numbers worked by hand: advantages, RAGEN's normalisation, DAPO's length, GSPO's and CISPO's ratios."""

import math

import pytest
import torch
from torch import tensor

from ragen_agent.algos import (
    ARPO,
    BRPO,
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    DrGRPO,
    GSPOToken,
    Normalised,
    ReinforcePP,
    ReinforcePPBaseline,
    StarPO,
)
from ragen_agent.algos.credit import overlong
from ragen_agent.algos.starpo import written
from tests.algo_parts import algo, batch_of, moved, policy
from tests.parts import BigramLM
from tests.table_parts import by_turns, game, policy_gradient, rich

# ---- advantages by hand: two groups, the last of one episode; turns are paid as written ----

SMALL = ([(0, ".00.1"), (1, ".0"), (2, ".0"), (3, ".0")], [[1, 2], [0], [1], [4]], [0, 0, 0, 1])
ADVANTAGES = [
    (ARPO, {}, [[3, 3], [0], [1], [4]]),
    (RLOO, {}, [[2.5, 2.5], [-2], [-0.5], [0]]),  # 3 - 1/2, 0 - 2, 1 - 3/2
    (DrGRPO, {}, [[5 / 3, 5 / 3], [-4 / 3], [-1 / 3], [0]]),
    (GRPO, {}, [[1.0910888, 1.0910888], [-0.8728710], [-0.2182178], [0]]),  # sample std 1.5275252
    (DAPO, {}, [[1.0910888, 1.0910888], [-0.8728710], [-0.2182178], [0]]),
    (GSPO, {}, [[1.0910888, 1.0910888], [-0.8728710], [-0.2182178], [0]]),
    (GSPOToken, {}, [[1.0910888, 1.0910888], [-0.8728710], [-0.2182178], [0]]),
    (CISPO, {}, [[1.0910888, 1.0910888], [-0.8728710], [-0.2182178], [0]]),
]


@pytest.mark.parametrize(("kind", "settings", "wanted"), ADVANTAGES, ids=[kind.__name__ for kind, _, _ in ADVANTAGES])
def test_advantages_by_hand(kind, settings, wanted):
    for found, want in zip(by_turns(kind(policy(), **settings), game(*SMALL)), wanted, strict=True):
        assert found == pytest.approx(want, abs=1e-6, rel=0)


@pytest.mark.parametrize(
    ("gamma", "wanted"),
    [
        (1.0, [0.7071063, 0.7071063, 0, -1.4142126]),  # returns 3 3 2 | 0: mean 2, std 1.4142136
        (0.5, [-0.2611162, 0.7833486, 0.7833486, -1.3055811]),  # returns 1 2 2 | 0: mean 1.25, std .9574271
    ],
)
def test_reinforce_pp_by_hand(gamma, wanted):
    data = game([(0, ".00.1"), (1, ".0")], [[1, 2], [0]], [0, 0])
    ReinforcePP(policy(), gamma=gamma).prepare(data)
    assert written(data, "advantage")[data.sampled].tolist() == pytest.approx(wanted, abs=1e-6, rel=0)


def test_reinforce_pp_takes_the_kl_of_each_token_from_its_reward():
    """k1 of .2, .4 and 0 against a reward of 1 on the last token: returns .4, .6, 1; mean 2/3, std .3055050."""
    data = batch_of([(0, ".000")], [1], [0])
    agent = ReinforcePP(policy(), reference=policy(7), kl_coef=1.0)
    agent.prepare(data)
    data.ref = written(data, "old") - tensor([[0, 0.2, 0.4, 0]])
    assert agent.advantage(data)[data.sampled].tolist() == pytest.approx([-0.8728687, -0.2182172, 1.0910859], abs=1e-6, rel=0)
    assert "kl" not in agent(data)[1]


def test_the_group_baseline_of_reinforce_pp_by_hand():
    """Centred returns .5 .5 | -.5 | 0 on four tokens: mean .125, std .4787136. Whitening moves the lone episode off 0."""
    data = game([(0, ".00"), (1, ".0"), (2, ".0")], [[1], [0], [7]], [0, 0, 1])
    agent = ReinforcePPBaseline(policy(), reference=policy(7), kl_coef=1.0)
    agent.prepare(data)
    assert written(data, "advantage")[data.sampled].tolist() == pytest.approx(
        [0.7833478, 0.7833478, -1.3055797, -0.2611159], abs=1e-6, rel=0
    )
    data.ref = written(data, "old") - 0.4
    loss, metrics = agent(data)
    assert metrics["kl"].item() == pytest.approx(0.08, abs=1e-6)  # k2: .4^2 / 2
    assert (loss - metrics["pg_loss"]).item() == pytest.approx(0.08, abs=1e-6)


def test_reinforce_pp_does_not_divide_by_the_std_of_the_group():
    """Groups [1, 0] and [4, 0]: centred .5 -.5 2 -2, std 1.6832508. The wider group keeps its weight."""
    data = game([(i, ".0") for i in range(4)], [[1], [0], [4], [0]], [0, 0, 1, 1])
    found = [turns[0] for turns in by_turns(ReinforcePPBaseline(policy()), data)]
    assert found == pytest.approx([0.2970441, -0.2970441, 1.1881764, -1.1881764], abs=1e-6, rel=0)


@pytest.mark.parametrize("kind", [RLOO, ARPO])
def test_the_kl_of_an_episode_comes_off_its_score(kind):
    """k1 of .25 on each token, coefficient 2: R - .5 n. Lengths 2 and 1, returns 1 and 0: scores 0 and -.5."""
    data = game([(0, ".0.1"), (1, ".0")], [[0, 1], [0]], [0, 0])
    agent = kind(policy(), reference=policy(7), kl_coef=2.0, kl_in="reward")
    agent.prepare(data)
    data.ref = written(data, "old") - 0.25
    wanted = [0.5, 0.5, -0.5] if kind is RLOO else [0, 0, -0.5]
    assert agent.advantage(data)[data.sampled].tolist() == pytest.approx(wanted, abs=1e-6, rel=0)


# ---- RAGEN's normalisation: three levels, the last of another world ----

FAMILY = ([(i, ".0") for i in range(6)], [[1], [0], [1], [1], [4], [0]], [0, 0, 1, 1, 2, 2])
SCORES = [1, 0, 1, 1, 4, 0]
STANDINGS = {
    ("state", "mean"): [0.5, -0.5, 0, 0, 2, -2],
    ("batch", "mean"): [-1 / 6, -7 / 6, -1 / 6, -1 / 6, 17 / 6, -7 / 6],
    ("env", "mean"): [0.25, -0.75, 0.25, 0.25, 2, -2],
    ("state", "mean_std"): [0.7071058, -0.7071058, 0, 0, 0.7071065, -0.7071065],
    ("batch", "mean_std"): [-0.1132276, -0.7925934, -0.1132276, -0.1132276, 1.9248697, -0.7925934],
    ("env", "mean_std"): [0.499999, -1.499997, 0.499999, 0.499999, 0.7071065, -0.7071065],
    ("state", "asym_clip"): [0.7071058, -0.7071058, 0, 0, 0.7071065, -0.7071065],
    ("batch", "asym_clip"): [-0.1132276, -0.7925934, -0.1132276, -0.1132276, 1.9248697, -0.7925934],
    ("env", "asym_clip"): [0.499999, -1, 0.499999, 0.499999, 0.7071065, -0.7071065],
    **{(grouping, "identity"): SCORES for grouping in ("state", "batch", "env")},
}


@pytest.mark.parametrize(("grouping", "method"), STANDINGS)
def test_the_family_of_reward_normalisation(grouping, method):
    data = game(*FAMILY)
    data.world = tensor([0, 0, 0, 0, 1, 1])
    found = by_turns(Normalised(policy(), grouping=grouping, method=method), data)
    assert [turns[0] for turns in found] == pytest.approx(STANDINGS[grouping, method], abs=1e-6, rel=0)


def test_the_asymmetric_clip_of_a_rare_success():
    data = batch_of([(i, ".0") for i in range(16)], [0.0] * 15 + [1.0], [0] * 16)
    for grouping in ("state", "batch", "env"):
        found = by_turns(Normalised(policy(), grouping=grouping, method="asym_clip"), data)
        assert [turns[0] for turns in found] == pytest.approx([-0.249999] * 15 + [3], abs=1e-6, rel=0)


MEMBERS = [
    (ARPO, {}, "batch", "identity"),
    (BRPO, {}, "batch", "mean_std"),
    (BRPO, {"clamp_low": -1.0, "clamp_high": 3.0}, "batch", "asym_clip"),
    (GRPO, {"aggregation": "token-mean"}, "state", "mean_std"),
    (DrGRPO, {"aggregation": "token-mean"}, "state", "mean"),
]


@pytest.mark.parametrize(("kind", "settings", "grouping", "method"), MEMBERS, ids=[f"{m[0].__name__}-{m[3]}" for m in MEMBERS])
def test_members_of_the_family_have_names_of_their_own(kind, settings, grouping, method):
    pulls, standings = [], []
    for agent in (algo(kind, settings), algo(Normalised, {"grouping": grouping, "method": method})):
        data = rich()
        agent.prepare(data)
        standings.append(written(data, "advantage"))
        moved(agent)
        pulls.append(policy_gradient(agent, data))
    torch.testing.assert_close(standings[1], standings[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(pulls[1], pulls[0], atol=1e-6, rtol=0)


# ---- DAPO's length, CISPO's and GSPO's ratios ----


def test_soft_punishment_of_length():
    """Limit 10, cache 4: free to 6, a quarter a token from there, never more than 1."""
    assert overlong(tensor([0, 6, 7, 8, 10, 11, 99]), 10, 4).tolist() == [0, 0, -0.25, -0.5, -1, -1, -1]


def test_dapo_counts_the_tokens_of_each_reply():
    """Limit 4, cache 2. Replies of 2, 3 and 3 tokens in two rows: 1.5 - 0 - .5 - .5. One of 5: 1 - 1."""
    data = game([(0, "..00.222"), (0, "...111"), (1, ".00000")], [[1, 0, 0.5], [1]], [0, 0])
    strict = DAPO(policy(), overlong_length=4, overlong_cache=2)
    found = [turns[0] for turns in by_turns(strict, data)]
    assert found == pytest.approx([0.7071048, -0.7071048], abs=1e-6, rel=0)
    assert strict.scores(data).tolist() == [0.5, 0.0]
    assert DAPO(policy()).scores(data).tolist() == [1.5, 1.0]


def surrogate(kind: type[StarPO], advantage: list[float], change: list[float], **settings) -> tuple[float, list[float], list[float]]:
    """The loss of one episode, its gradient in each token's logprob, and those logprobs; new / old = exp(change)."""
    data = batch_of([(0, "." + "0" * len(change))], [1.0], [0])
    agent = kind(BigramLM.of(torch.eye(3)), **settings)
    data.ids.clamp_(max=2)
    agent.prepare(data)
    now = written(data, "old")[0, 1:].tolist()
    data.old = written(data, "old") - tensor([[0.0, *change]])
    data.advantage = tensor([[0.0, *advantage]])
    seen = agent.see(data)
    leaf = seen.logprob.detach().requires_grad_()
    agent.see = lambda _batch: seen._replace(logprob=leaf)  # pyright: ignore[reportAttributeAccessIssue]
    loss, _ = agent(data)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad[0, 1:].tolist(), now


@pytest.mark.parametrize(
    ("settings", "weights"),
    [({}, [5.0, 0.1, 1.5]), ({"clip_high": 0.28}, [1.28, 0.1, 1.28]), ({"clip_low": 0.2, "clip_high": 0.2}, [1.2, 0.8, 1.2])],
)
def test_cispo_caps_the_weight_and_keeps_the_gradient(settings, weights):
    """Ratios 6, .1 and 1.5, advantages 1, -2 and 1; a mean over three tokens."""
    advantage, ratios = [1.0, -2.0, 1.0], [6.0, 0.1, 1.5]
    loss, grad, logprob = surrogate(CISPO, advantage, [math.log(r) for r in ratios], **settings)
    wanted = [-w * a / 3 for w, a in zip(weights, advantage, strict=True)]
    assert grad == pytest.approx(wanted, abs=1e-6)
    assert loss == pytest.approx(sum(g * x for g, x in zip(wanted, logprob, strict=True)), abs=1e-6)
    clipped = surrogate(GRPO, advantage, [math.log(r) for r in ratios])[1]
    assert clipped[0] == clipped[2] == 0  # what CISPO is for: PPO's clip drops these tokens


@pytest.mark.parametrize("kind", [GSPO, GSPOToken])
@pytest.mark.parametrize(
    ("change", "advantage", "loss", "slope"),
    [
        ([0.2, -0.1998], 1.0, -1.0001, -1.0001),  # the mean log-ratio is .0001: inside, though each token is far outside
        ([0.2, -0.1], 1.0, -1.0004, 0.0),  # exp(.05) is above 1 + 4e-4
        ([0.2, -0.1], -1.0, 1.0512711, 1.0512711),  # a negative advantage is not clipped above
        ([-0.2, 0.1], -1.0, 0.9997, 0.0),  # exp(-.05) is below 1 - 3e-4
    ],
)
def test_gspo_clips_whole_episodes(kind, change, advantage, loss, slope):
    found, grad, _ = surrogate(kind, [advantage] * 2, change)
    assert found == pytest.approx(loss, abs=1e-6) and grad == pytest.approx([slope / 2] * 2, abs=1e-6)
