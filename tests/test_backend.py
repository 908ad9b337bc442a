"""The transformers backend: what is drawn, from what, and how reproducibly (field cases T14, V05, T12)."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ragen_agent.backends import HFBackend, Sampling
from ragen_agent.backends.hf import draw
from tests import parts

TABLE = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]).log()


def bigram(**generation):
    model = parts.BigramLM.of(TABLE)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return model


def first_tokens(model, n, **sampling):
    done = HFBackend(model, batch_rows=5000).generate([[0]] * n, Sampling(max_tokens=1, **sampling), [(7, i) for i in range(n)])
    return np.bincount([c.ids[0] for c in done], minlength=4)


def test_a_models_generation_config_has_no_say():  # T14
    model = bigram(repetition_penalty=1.3, top_k=1, temperature=0.2, do_sample=False, eos_token_id=1)
    counts = first_tokens(model, 20_000)
    assert chisquare(counts, TABLE[0].double().softmax(0).numpy() * 20_000).pvalue > 1e-3


def test_temperature_top_k_and_top_p_shape_the_draws():
    warm = (TABLE[0].double() / 2).softmax(0)
    counts = first_tokens(bigram(), 20_000, temperature=2.0)
    assert chisquare(counts, warm.numpy() * 20_000).pvalue > 1e-3
    kept = first_tokens(bigram(), 8_000, top_k=2)
    assert kept[2:].sum() == 0 and chisquare(kept[:2], [8_000 * 5 / 8, 8_000 * 3 / 8]).pvalue > 1e-3
    nucleus = first_tokens(bigram(), 8_000, top_p=0.7)  # .5 is not enough, .5 + .3 is
    assert nucleus[2:].sum() == 0 and chisquare(nucleus[:2], [8_000 * 5 / 8, 8_000 * 3 / 8]).pvalue > 1e-3
    assert first_tokens(bigram(), 50, temperature=0.0).tolist() == [50, 0, 0, 0]


@pytest.mark.parametrize("chance", [0.0, 1 - 2**-53])
def test_the_ends_of_chance_draw_possible_tokens(chance):
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    for sampling in (Sampling(), Sampling(top_p=0.3), Sampling(top_k=1)):
        token, logprob = draw(logits, sampling, torch.tensor([chance], dtype=torch.float64))
        assert token.item() < 2 and logprob.item() == pytest.approx(np.log(0.5), abs=1e-6)


def test_a_reply_ends_with_the_first_stop_id_and_holds_it():
    model = parts.BigramLM.of(torch.eye(4).roll(1, 1) * 100)  # 0 -> 1 -> 2 -> 3 -> 0
    done = HFBackend(model).generate([[0], [2]], Sampling(max_tokens=3, stop_ids=(2,)), [(0,), (1,)])
    assert [(c.ids, c.finish) for c in done] == [([1, 2], "stop"), ([3, 0, 1], "length")]


def test_the_context_bounds_a_reply():
    model = parts.BigramLM.of(torch.eye(4).roll(1, 1) * 100)
    done = HFBackend(model, context=5).generate([[0], [0, 1, 2]], Sampling(max_tokens=10), [(0,), (1,)])
    assert [(len(c.ids), c.finish) for c in done] == [(4, "length"), (2, "length")]
    with pytest.raises(ValueError, match="1 to 4 tokens"):
        HFBackend(model, context=5).generate([[0] * 5], Sampling(), [(0,)])


PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8], [3, 1, 4, 1, 5, 9, 2, 6], [200, 100, 50], [7, 7, 7, 7], [0, 0], [255, 254, 253, 3, 5]]
SEEDS = [(3, i) for i in range(8)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reply_does_not_depend_on_its_batch(any_model, temperature):  # V05
    sampling = Sampling(temperature=temperature, max_tokens=12, stop_ids=(11,))
    by_rows = [HFBackend(any_model, rows).generate(PROMPTS, sampling, SEEDS) for rows in (1, 4, 8)]
    for done in by_rows[1:]:
        assert [c.ids for c in done] == [c.ids for c in by_rows[0]]
        for a, b in zip(done, by_rows[0], strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4, rtol=0)


def test_greedy_replies_are_those_of_generate(any_model):
    ours = HFBackend(any_model).generate(PROMPTS, Sampling(temperature=0.0, max_tokens=10), SEEDS)
    for prompt, completion in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = any_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert completion.ids == theirs[0, len(prompt) :].tolist()


def test_bad_sampling_is_refused():
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match="needs temperature"):
            Sampling(**bad)


def test_sampling_leaves_the_models_mode_and_the_global_generator_alone():
    model = parts.tiny().train()
    state = torch.get_rng_state()
    HFBackend(model).generate([[1]], Sampling(max_tokens=2), [(0,)])
    assert model.training and torch.equal(state, torch.get_rng_state())
