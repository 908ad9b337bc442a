"""The optimizers: cutting, order and masked values never matter, the first ratio is 1, the reference is no parameter, each one learns."""

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn, tensor

from ragen_agent.algos import ALGOS, ARPO, BRPO, GRPO, PPO, DrGRPO, StarPO, Totals, combine, find
from ragen_agent.algos.starpo import written
from ragen_agent.batch import Batch
from ragen_agent.model import score
from tests.parts import BigramLM, tiny

VOCAB = 11
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
CASES = [  # every optimizer, and every setting that has a denominator or a model of its own
    (ARPO, {}),
    (BRPO, {"clamp_low": -1.0, "clamp_high": 3.0}),
    (GRPO, {"dual_clip": 3.0}),
    (GRPO, {"aggregation": "token-mean", "kl_coef": 0.1, "entropy_coef": 0.01, "sampler_cap": 2.0}),
    (DrGRPO, {}),
    (DrGRPO, {"aggregation": "seq-mean-token-sum-norm", "horizon": 9.0}),
    (PPO, {}),
    (PPO, {"gamma": 0.9, "lam": 0.8, "value_clip": 0.1, "kl_reward": 0.1, "temperature": 0.7, "aggregation": "seq-mean-token-mean"}),
    (PPO, {"bi_level": True, "detach": True, "whiten": False, "entropy_coef": 0.01}),
]
EVERY = pytest.mark.parametrize(("kind", "settings"), CASES, ids=[f"{kind.__name__}-{i}" for i, (kind, _) in enumerate(CASES)])


def policy(seed: int = 0, vocab: int = VOCAB, **settings) -> nn.Module:
    return tiny("llama", vocab_size=vocab, seed=seed, **{**SMALL, **settings}).double()


def algo(kind: type[StarPO], settings: dict, seed: int = 0) -> StarPO:
    made = kind(policy(seed), reference=policy(7), **settings)
    if isinstance(made, PPO):  # a critic that says something
        nn.init.constant_(made.critic.weight, 0.1)
        nn.init.constant_(made.critic.bias, 0.3)
    return made


def batch_of(rows: list[tuple[int, str]], scores: list[float], groups: list[int], seed: int = 0) -> Batch:
    """Rows as (episode, pattern): in a pattern a digit is a token sampled in that turn, a dot is one that was read."""
    chance = torch.Generator().manual_seed(seed)
    width = max(len(pattern) for _, pattern in rows)
    real = tensor([[c < len(p) for c in range(width)] for _, p in rows])
    sampled = tensor([[p[c : c + 1].isdigit() for c in range(width)] for _, p in rows])
    turn = tensor([[int(p[c]) if p[c : c + 1].isdigit() else 0 if c < len(p) else -1 for c in range(width)] for _, p in rows])
    reward = torch.zeros(len(rows), width)
    for i, (episode, pattern) in enumerate(rows):
        last = {p: c for c, p in enumerate(pattern) if p != "."}
        turns = len({p for e, pat in rows if e == episode for p in pat if p != "."})
        for c in last.values():
            reward[i, c] = scores[episode] / turns
    return Batch(
        ids=torch.randint(VOCAB, (len(rows), width), generator=chance) * real,
        real=real,
        sampled=sampled,
        turn=turn,
        reward=reward,
        logprob=-3 * torch.rand(len(rows), width, generator=chance) * sampled,
        episode=tensor([e for e, _ in rows]),
        group=tensor(groups),
        score=tensor(scores),
        truncated=torch.zeros(len(scores), dtype=torch.bool),
    )


ROWS = [(0, "..00.11"), (1, "..0"), (2, "..0000000"), (3, "..0.1"), (3, "..2.33"), (4, "..00..11..2"), (5, "...0"), (5, "..1.222")]
SCORES, GROUPS = [1.0, -0.1, 0.4, 2.0, -1.0, 0.3], [0, 0, 0, 1, 1, 1]


def batch() -> Batch:
    return batch_of(ROWS, SCORES, GROUPS)


def moved(agent: StarPO) -> StarPO:
    """As after some steps: the policy is no longer the one that `prepare` saw, so that clips and ratios take part."""
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in agent.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=chance, dtype=weight.dtype)
    return agent


def gradient(agent: StarPO, data: Batch, parts: list[list[int]]) -> tuple[Tensor, dict[str, float]]:
    agent.zero_grad()
    totals, metrics = Totals.of(data), []
    for part in parts:
        loss, seen = agent(data.rows(tensor(part)), totals)
        loss.backward()
        metrics.append(seen)
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in agent.parameters()]
    return torch.cat([g.flatten() for g in grads]).clone(), combine(metrics)


WHOLE = [list(range(8))]


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
    assert agent.prepare(dirty) == agent.prepare(data)
    moved(agent)
    clean = gradient(agent, data, WHOLE)
    for name in ("old", "ref", "value", "advantage", "target"):
        if (field := getattr(dirty, name)) is not None:
            field[~dirty.sampled] = junk
    found = gradient(agent, dirty, WHOLE)
    assert torch.equal(found[0], clean[0]) and found[1] == clean[1]


@EVERY
def test_every_sampled_token_trains_and_no_other_does(kind, settings):
    """The loss reaches the hidden state before a token if and only if the policy chose that token."""
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
    agent.train()
    assert agent.training and not shaky.training
    data = batch()
    agent.prepare(data, micro_rows=3)
    _, metrics = gradient(agent, data, [[0, 1], [2, 3, 4, 5], [6, 7]])
    assert abs(metrics["ratio_max"] - 1) < 1e-5 and metrics["clip_fraction"] == 0 and metrics["approx_kl"] < 1e-9


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
    one = batch_of([(0, "..00.11.2"), (1, "..0"), (2, ".00"), (3, ".0")], [1, 0, 3, 0], [0, 0, 0, 0])
    cut = batch_of([(0, "..00"), (0, "..11"), (0, "..2"), (1, "..0"), (2, ".00"), (3, ".0")], [1, 0, 3, 0], [0, 0, 0, 0])
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


@EVERY
def test_flat_and_token_less_batches_are_harmless(kind, settings):
    flat = batch_of([(0, ".00"), (1, ".0"), (2, ".0")], [1, 1, 1], [0, 0, 0])
    none = batch_of([(0, "..."), (1, "..")], [1, 0], [0, 0])
    for data in (flat, none):
        agent = algo(kind, settings)
        assert all(map(math.isfinite, agent.prepare(data).values()))
        assert kind is ARPO or kind is PPO or not written(data, "advantage").any()
        grads, metrics = gradient(agent, data, [list(range(len(data)))])
        assert grads.isfinite().all() and all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_an_error(bad):
    data = batch()
    data.score[3] = bad
    with pytest.raises(ValueError, match=r"\[3\]"):
        GRPO(policy()).prepare(data)


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


@pytest.mark.parametrize("kind", ALGOS.values())
@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"clip_hi": 0.1}, "clip_low, clip_high"),
        ({"aggregation": "mean"}, "token-mean"),
        ({"kl_kind": "k4"}, "k1"),
        ({"kl_coef": 0.1}, "reference"),
        ({"clip_high": "wide"}, "float"),
        ({"clip_high": True}, "float"),
        ({"clip_high": None}, "float"),
        ({"dual_clip": "3"}, "float or None"),
        ({"train": False}, "known"),
    ],
)
def test_bad_settings_are_errors_that_list_the_known(kind, bad, told):
    with pytest.raises(ValueError, match=told):
        kind(policy(), **bad)


@pytest.mark.parametrize("settings", [{"kl_coef": 0.1}, {"kl_reward": 0.1}])
def test_who_wants_a_reference(settings):
    assert not PPO.wants_reference(clip_high=0.3) and not PPO(policy()).uses_reference
    assert PPO.wants_reference(**settings) and PPO(policy(), reference=policy(), **settings).uses_reference
    with pytest.raises(ValueError, match="needs a reference"):
        PPO(policy(), **settings)


def test_settings_are_those_of_the_class_and_its_parents():
    assert list(GRPO.settings()) == list(StarPO.settings()) + ["std"]
    assert GRPO.settings()["aggregation"] == "seq-mean-token-mean" and not DrGRPO.settings()["std"]
    assert GRPO(policy(), std=False).std is False and GRPO.std is True
    assert GRPO(policy(), dual_clip=None, clip_low=1).clip_low == 1


def test_forward_before_prepare_says_so():
    with pytest.raises(ValueError, match="prepare"):
        GRPO(policy())(batch())


@pytest.mark.parametrize("name", ALGOS)
def test_find_ours(name):
    assert find(name).__name__ == name


def test_find_yours(tmp_path, monkeypatch):
    (tmp_path / "my_algo_file.py").write_text(
        '''"""Mine."""
import torch
from ragen_agent.algos import StarPO


class Sign(StarPO):
    """The sign of the return."""

    scale: float = 1.0
    """Its size."""

    def advantage(self, batch):
        """Plus or minus scale."""
        return self.scale * batch.score.sign()[batch.episode][:, None].expand(batch.ids.shape)
'''
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    agent, data = find("my_algo_file:Sign")(policy(), scale=2.0), batch()
    agent.prepare(data)
    assert written(data, "advantage")[0].tolist() == [0, 0, 2, 2, 0, 2, 2, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="Sign"):
        find("my_algo_file:Sing")


@pytest.mark.parametrize("name", ["grpo", "", "no_such_file:GRPO", "StarPO"])
def test_find_lists_the_known(name):
    with pytest.raises(ValueError, match="ARPO, BRPO, DrGRPO, GRPO, PPO"):
        find(name)


# ---- the document ----

DOCUMENT = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text()


def test_the_optimizer_in_the_document_works():
    names = {}
    exec(re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)[1], names)
    data = batch()
    agent = names["RLOO"](policy(), strength=2.0)
    agent.prepare(data)
    firsts = [written(data, "advantage")[i, data.sampled[i]][0].item() for i in (0, 1, 2)]
    assert firsts == pytest.approx([2 * (1 - 0.15), 2 * (-0.1 - 0.7), 2 * (0.4 - 0.45)], abs=1e-6)
    assert gradient(agent, data, WHOLE)[0].abs().max() > 1e-3


@pytest.mark.parametrize("kind", ALGOS.values())
def test_every_setting_and_metric_is_in_the_document(kind):
    data, agent = batch(), kind(policy(), reference=policy(7), kl_coef=0.1)
    notes, (_, metrics) = agent.prepare(data), agent(data)
    missing = [name for name in [*kind.settings(), *notes, *metrics, kind.__name__] if f"`{name}`" not in DOCUMENT]
    assert not missing


def test_every_recipe_in_the_document_is_accepted():
    rows = re.findall(r"`--algo (\w+)(?: --algo-args ([^`]*?))?(?: --keep [\d.]+)?`", DOCUMENT)
    assert len(rows) >= 8
    for name, args in rows:
        if name in ALGOS:
            pairs = [pair.split("=") for pair in args.split()]
            for key, value in pairs:
                find(name).checked(key, value if key in StarPO.CHOICES else json.loads(value))


# ---- several processes ----


def one_of_two(rank: int, folder: str) -> None:
    """A process with half of the batch: write its gradients, as DDP would average them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = []
    for kind, settings in CASES:
        agent, data = algo(kind, settings), batch().rows(tensor([[0, 1, 2, 3, 4], [5, 6, 7]][rank]))
        mine = torch.arange(6) < 4 if rank == 0 else torch.arange(6) >= 4  # its own episodes, as a process has them: counted from 0
        data.episode -= [0, 4][rank]
        data.group, data.score, data.truncated = data.group[mine], data.score[mine], data.truncated[mine]
        agent.prepare(data)
        moved(agent)
        found.append(gradient(agent, data, [[0, 1], list(range(2, len(data)))])[0])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gradient_is_the_same_for_two_processes(tmp_path):
    mp.start_processes(one_of_two, args=(str(tmp_path),), nprocs=2, start_method="spawn")  # pyright: ignore[reportPrivateImportUsage]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (kind, settings), one, two in zip(CASES, *ranks, strict=True):
        agent, data = algo(kind, settings), batch()
        data.group = tensor([0, 0, 0, 1, 2, 2])  # a group belongs to the process that played it
        agent.prepare(data)
        moved(agent)
        torch.testing.assert_close((one + two) / 2, gradient(agent, data, WHOLE)[0], atol=1e-6, rtol=0)


# ---- learning ----


@EVERY
def test_learns(kind, settings):
    """Groups of eight answers of two tokens to one of two prompts; the prompt's own token is worth 1. Thirty updates of two epochs."""
    agent = kind(tiny("llama", vocab_size=4, **SMALL), reference=tiny("llama", vocab_size=4, **SMALL), **settings)
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3)
    chance = torch.Generator().manual_seed(1)
    temperature = agent.temperature
    before = after = None
    for _ in range(30):
        prompt = tensor([2, 3]).repeat_interleave(8)
        ids = prompt[:, None]
        with torch.no_grad():
            for _ in range(2):
                chances = (agent.policy(ids).logits[:, -1] / temperature).softmax(-1)
                ids = torch.cat([ids, torch.multinomial(chances, 1, generator=chance)], 1)
        paid = (ids[:, 1:] == prompt[:, None]).float()
        data = batch_of([(i, ".00") for i in range(16)], paid.sum(1).tolist(), (prompt - 2).tolist())
        data.ids, data.reward = ids, torch.cat([torch.zeros(16, 1), torch.zeros(16, 1), paid.sum(1, keepdim=True)], 1)
        data.logprob = score(agent.policy, ids, data.real, temperature).logprob.detach()
        after = data.score.mean().item() / 2
        before = after if before is None else before
        agent.prepare(data)
        for _ in range(2):
            for part in torch.randperm(16, generator=chance).split(8):
                mini = data.rows(part)
                totals = Totals.of(mini)
                optimizer.zero_grad()
                for rows in torch.arange(8).split(4):
                    agent(mini.rows(rows), totals)[0].backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
                optimizer.step()
    assert before is not None and after is not None and before < 0.5 and after > 0.8
