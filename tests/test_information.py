"""I(X;Z) by cross-scoring: matrices worked by hand, oracles whose answer is known, and a model against direct scoring."""

from math import e, inf, log

import numpy as np
import pytest
import torch

from ragen_agent.backends import HFBackend, Sampling
from ragen_agent.chat import Chat
from ragen_agent.information import Pairs, choose, cross, information, measure, spoken
from ragen_agent.policies import LLMPolicy
from ragen_agent.prompts import Prompt
from ragen_agent.rollout import rollout
from ragen_agent.types import Reply, Trajectory, Turn
from tests import parts


def rng(seed=0):
    return np.random.default_rng(seed)


def pairs_of(columns, own, length=1):
    return Pairs([[j] for j in range(columns)], [[0] * length for _ in own], list(own))


def episode(seed, prompt, ids):
    info = {"success": False, "valid": True, "moves": []}
    return Trajectory("e", seed, 0, "", {"rules": ""}, [Turn(Reply("", "", list(prompt), list(ids), []), "", 0.0, info)], True)


def close(value):
    return pytest.approx(value, abs=1e-6, rel=0)


# -- what a matrix says ------------------------------------------------------------------------------------------------------


def test_a_matrix_by_hand():
    """Two prompts, p(z0|x) = .8, .2 and p(z1|x) = .1, .3, of 2 and 4 tokens. Marginals .5 and .2; gains log 1.6 and log 1.5."""
    pairs = Pairs([[0], [1]], [[0] * 2, [0] * 4], [0, 1])
    found = information(np.log([[0.8, 0.2], [0.1, 0.3]]), pairs, rng())
    gains = log(1.6) + log(1.5)
    assert (found.mi, found.bound, found.mi_token) == close((gains / 2, log(2), gains / 6))
    assert (found.h, found.h_given) == close((-log(0.5 * 0.2) / 2, -log(0.8 * 0.3) / 2))
    assert (found.h_token, found.h_given_token) == close((-log(0.5 * 0.2) / 6, -log(0.8 * 0.3) / 6))
    assert found.z == close(gains / 2 / ((log(0.5) - log(0.2)) / 2**0.5 + 1e-3))
    assert found.retrieval == {1: 1.0, 2: 1.0} and found.chance == {1: 0.5, 2: 1.0}
    assert (found.low, found.high) == close((log(1.5), log(1.6)))
    assert (found.prompts, found.replies, found.sequences) == (2, 2, 4)


def test_the_mixture_is_of_sequences_and_not_of_tokens():
    """Ten tokens, each e times likelier under its own prompt: the sequence is known for sure, I = log 2 - log(1 + e^-10)."""
    found = information(np.array([[-10.0, -20.0], [-20.0, -10.0]]), pairs_of(2, [0, 1], 10), rng())
    assert found.mi == close(log(2) - log(1 + e**-10)) and found.mi_token == close(found.mi / 10)


@pytest.mark.parametrize("other", [-inf, -1e4])
def test_replies_of_one_prompt_only_give_log_n(other):
    logp = np.where(np.eye(8, dtype=bool), -5.0, other)
    found = information(logp, pairs_of(8, range(8)), rng())
    assert (found.mi, found.bound, found.low, found.high) == close((2.079442, 2.079442, 2.079442, 2.079442))
    assert found.h - found.h_given == close(2.079442) and found.retrieval == {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}


def test_a_template_gives_nothing():
    found = information(np.repeat(-rng().random((8, 1)) * 30, 8, 1), pairs_of(8, range(8)), rng())
    assert (found.mi, found.low, found.high) == close((0, 0, 0))
    assert found.retrieval == found.chance == {1: 1 / 8, 2: 2 / 8, 4: 4 / 8, 8: 1.0}


def test_the_entropies_differ_by_the_information_and_the_bound_holds():
    chance = rng(3)
    found = information(-30 * chance.random((20, 5)), pairs_of(5, [i % 5 for i in range(20)]), rng())
    assert found.h - found.h_given == close(found.mi) and found.h_token - found.h_given_token == close(found.mi_token)
    assert found.mi <= found.bound and found.low < found.mi < found.high


@pytest.mark.parametrize(
    ("row", "own", "at"),
    [
        ([0.0, -1.0, -2.0, -3.0], 0, {1: 1, 2: 1, 4: 1}),
        ([0.0, -1.0, -2.0, -3.0], 1, {1: 0, 2: 1, 4: 1}),
        ([0.0, -1.0, -2.0, -3.0], 3, {1: 0, 2: 0, 4: 1}),
        ([0.0, 0.0, -2.0, -3.0], 1, {1: 1 / 2, 2: 1, 4: 1}),
        ([0.0, -1.0, -1.0, -1.0], 2, {1: 0, 2: 1 / 3, 4: 1}),
        ([-1.0, -1.0, -1.0, -1.0], 2, {1: 1 / 4, 2: 1 / 2, 4: 1}),
        ([0.0, 5e-5, -2.0, -3.0], 0, {1: 1 / 2, 2: 1, 4: 1}),  # equal but for rounding
    ],
)
def test_retrieval_shares_ties(row, own, at):
    found = information(np.array([row, row]), pairs_of(4, [own, own]), rng())
    assert found.retrieval == close(at)


def test_the_bootstrap_draws_prompts_with_all_their_replies():
    """Two prompts whose replies gain 0 and log 2 for sure: means 0, log 2 / 2, log 2, however many replies each has."""
    logp = np.array([[0.0, 0.0]] * 6 + [[-inf, 0.0]] * 6)
    found = information(logp, pairs_of(2, [0] * 6 + [1] * 6), rng())
    assert (found.low, found.mi, found.high) == close((0, log(2) / 2, log(2)))


@pytest.mark.parametrize("logp", [[[-inf, 0.0], [0.0, 0.0]], [[np.nan, 0.0], [0.0, 0.0]]])
def test_what_cannot_be_is_refused(logp):
    with pytest.raises(ValueError, match="no probability"):
        information(np.array(logp), pairs_of(2, [0, 1]), rng())


# -- what is measured --------------------------------------------------------------------------------------------------------


def test_equal_prompts_are_one():
    played = [episode(seed, prompt, [seed]) for seed, prompt in [(0, [1, 2]), (1, [1, 2]), (2, [3]), (3, [3]), (4, [1, 2])]]
    pairs = choose(played, rng(), prompts=8, replies=8)
    assert pairs.prompts == [[1, 2], [3]] and pairs.own == [0, 0, 1, 1]
    assert all(pairs.prompts[j] == played[z[0]].turns[0].reply.prompt_ids for z, j in zip(pairs.replies, pairs.own, strict=True))


@pytest.mark.parametrize(
    ("prompts", "replies", "sizes"),
    [(16, 32, (8, 32)), (4, 32, (4, 16)), (8, 8, (8, 8)), (16, 3, (3, 3)), (3, 10, (3, 9)), (2, 100, (2, 8))],
)
def test_the_cost_is_bounded_and_every_prompt_weighs_the_same(prompts, replies, sizes):
    pairs = choose([episode(i % 8, [i % 8, 9], [i]) for i in range(32)], rng(), prompts=prompts, replies=replies)
    assert (len(pairs.prompts), len(pairs.replies)) == sizes and pairs.sequences == sizes[0] * sizes[1] <= prompts * replies
    assert len(set(map(pairs.own.count, range(sizes[0])))) == 1 and len({tuple(z) for z in pairs.replies}) == sizes[1]


def test_the_choice_is_its_seeds():
    played = [episode(i % 8, [i % 8, 9], [i]) for i in range(64)]
    chosen = [choose(played, rng(seed), prompts=4, replies=8) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_replies_that_do_not_fit_under_every_prompt_are_left_out():
    played = [episode(0, [1] * 5, [2]), episode(1, [1], [3]), episode(1, [1], [4] * 5), episode(2, [7], [])]
    pairs = choose(played, rng(), context=8)
    assert pairs.replies == [[2], [3]] and pairs.left_out == 2


@pytest.mark.parametrize(
    "played", [[], [episode(0, [1], [1])], [episode(0, [1], [1]), episode(1, [1], [2])], [episode(0, [1], []), episode(1, [2], [])]]
)
def test_one_prompt_says_nothing(played):
    with pytest.raises(ValueError, match="two different prompts"):
        choose(played, rng())


def test_bad_numbers_and_names_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        choose([], rng(), prompts=1)
    with pytest.raises(ValueError, match="known: reply, thought"):
        spoken([1], "answer")  # pyright: ignore
    with pytest.raises(ValueError, match="give decode"):
        spoken([1], "thought")


def test_the_thought_ends_with_the_token_that_closes_it(tokenizer):
    ids = tokenizer.encode("<think> up </think> <answer> Up </answer>")
    assert tokenizer.decode(spoken(ids, "thought", tokenizer.decode)) == "<think> up </think>"
    assert spoken(tokenizer.encode("<think> up"), "thought", tokenizer.decode) == []
    assert spoken(ids, "reply") == ids


# -- with a model ------------------------------------------------------------------------------------------------------------


def bigram(logits):
    return parts.BigramLM.of(torch.tensor(logits))


@pytest.mark.parametrize(("specific", "mi", "found"), [(True, 2.079442, 1.0), (False, 0.0, 1 / 8)])
def test_a_model_that_echoes_its_prompt_and_one_that_has_a_template(specific, mi, found):
    """Of 8 prompts; the first says the prompt's token, the second always the same distribution."""
    model = bigram([[0.0 if i == j else -1e9 for i in range(8)] for j in range(8)] if specific else [[0.5 * i for i in range(8)]] * 8)
    told = measure(model, [episode(j, [3, j], [j, j]) for j in range(8) for _ in range(4)])
    assert told.mi == close(mi) and told.retrieval[1] == close(found) and told.sequences == 8 * 32


def test_sums_agree_with_scoring_one_by_one():
    """Against transformers' own logits, one sequence at a time, for prompts and replies of many lengths and any micro-batch."""
    model, chance = parts.tiny(vocab_size=50), rng(5)
    pairs = Pairs(
        [chance.integers(1, 50, n).tolist() for n in (3, 9, 1)], [chance.integers(1, 50, n).tolist() for n in (4, 1, 7, 2)], [0, 1, 2, 0]
    )
    direct = np.zeros((4, 3))
    for i, z in enumerate(pairs.replies):
        for j, x in enumerate(pairs.prompts):
            with torch.no_grad():
                logp = (model(torch.tensor([x + z])).logits[0] / 0.7).log_softmax(-1)
            direct[i, j] = sum(logp[len(x) + t - 1, token].item() for t, token in enumerate(z))
    for micro_tokens in (1, 20, 10_000):
        assert np.abs(cross(model, pairs, 0.7, micro_tokens) - direct).max() < 1e-4
    assert np.ptp(direct, 1).min() > 0.1  # the prompt matters


@pytest.fixture(scope="module")
def player():
    chat = Chat(parts.byte_tokenizer())
    return LLMPolicy(HFBackend(parts.tiny()), chat, Prompt(style="brief", window=1), Sampling(max_tokens=6))


@pytest.fixture(scope="module")
def played(player):
    import ragen_envs  # noqa: F401  registers the games

    return rollout("ragen/FrozenLake-v0", player, range(6), 3)


def test_a_real_model_that_sees_one_turn(player, played):
    """Sampled replies are likelier under their own prompt; the matched sums are the sampler's own log-probabilities."""
    told = measure(player.backend.model, played, prompts=4, replies=12)
    assert told.prompts == 4 and told.replies == 12 and told.sequences == 48
    assert 0 < told.mi <= told.bound and told.h_given == close(told.h - told.mi)
    pairs = choose(played, rng(), prompts=6, replies=18)
    assert len(pairs.replies) == 18
    logp = cross(player.backend.model, pairs)
    sampled = {(tuple(t.turns[0].reply.prompt_ids), tuple(t.turns[0].reply.ids)): sum(t.turns[0].reply.logprobs) for t in played}
    for i, (z, j) in enumerate(zip(pairs.replies, pairs.own, strict=True)):
        assert logp[i, j] == pytest.approx(sampled[tuple(pairs.prompts[j]), tuple(z)], abs=1e-4, rel=0)


def test_measuring_touches_no_global_chance_and_no_weight(player, played):
    model = player.backend.model
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    model.train()
    one, two, other = (measure(model, played, prompts=3, replies=6, seed=seed) for seed in (4, 4, 5))
    assert model.training and one == two != other
    model.eval()
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
