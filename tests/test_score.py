"""score(): hand-known log-probabilities, the plain form's numbers and gradients, chunks, padding, temperature (L20, L22, L25, T12)."""

import math

import pytest
import torch
from torch import nn

from ragen_agent import logprob
from ragen_agent import model as m
from ragen_agent.model import choice, positions, score, split
from tests import parts


def everything(ids):
    return torch.ones(ids.shape, dtype=torch.bool)


def test_a_bigrams_log_probabilities_are_those_of_its_table():  # L25
    table = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]).log()
    ids = torch.tensor([[0, 1, 2, 2]])
    got = score(parts.BigramLM.of(table), ids, everything(ids)).logprob
    torch.testing.assert_close(got, torch.tensor([[0.0, math.log(0.2), math.log(0.3), math.log(0.5)]]), atol=1e-6, rtol=0)


def test_the_hidden_state_for_a_token_is_the_one_before_it():  # L25, the critic's shift
    table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    ids = torch.tensor([[0, 1, 2, 2]])
    hidden = score(parts.BigramLM.of(table), ids, everything(ids), hidden=True).hidden
    assert hidden is not None
    assert torch.equal(hidden[0], torch.stack([torch.zeros(3), table[0], table[1], table[2]]))


def test_temperature_divides_the_logits_before_the_softmax():  # L22
    logits, token = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    assert choice(logits, token, 0.5)[0].item() == pytest.approx(-0.142932, abs=1e-6, rel=0)
    assert choice(logits, token, 1.0)[0].item() == pytest.approx(-0.407606, abs=1e-6, rel=0)
    assert choice(logits, token, 0.0)[0].item() == pytest.approx(-0.407606, abs=1e-6, rel=0)  # greedy: untempered, no division


def test_entropy_ignores_impossible_tokens_in_value_and_gradient():  # L20
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logprob, entropy = choice(logits, torch.tensor([0]))
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6, rel=0)
    (entropy + logprob).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_entropy_is_never_negative():
    logits = torch.tensor([[1000.0, 0.0, 0.0], [0.0, 1e-8, 0.0]])
    assert (choice(logits, torch.tensor([0, 0]))[1] >= 0).all()


def plain(model, ids, real, temperature):
    """The textbook form: all logits of all positions at once."""
    logits = model(input_ids=ids, attention_mask=real.long(), position_ids=positions(real)).logits.float() / temperature
    logp = logits[:, :-1].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    first = torch.zeros(len(ids), 1)
    return torch.cat([first, logp.gather(-1, ids[:, 1:, None]).squeeze(-1)], 1), torch.cat([first, entropy], 1)


@pytest.mark.parametrize("temperature, matrix", [(1.0, True), (0.7, True), (0.7, False)])
def test_score_is_the_plain_form_in_value_and_gradient(any_model, temperature, matrix, monkeypatch):
    monkeypatch.setattr(logprob, "CPU_TILE", 64)  # several tiles and chunks (of five positions), each made again in the backward pass
    monkeypatch.setattr(m, "CHUNK", 259 * 5)
    if not matrix:  # as with an adapter on the output layer
        body, head = split(any_model)
        monkeypatch.setitem(m._HEADS, any_model, (body, lambda hidden: head(hidden)))
    torch.manual_seed(0)
    ids = torch.randint(0, 259, (3, 17))
    real = torch.ones(3, 17, dtype=torch.bool)
    real[1, 11:] = real[2, 6:] = False
    sampled = real & (torch.rand(3, 17) < 0.6)
    sampled[:, 0] = False
    weight = torch.randn(3, 17)
    wanted = plain(any_model, ids, real, temperature)
    any_model.zero_grad()
    (torch.where(sampled, wanted[0] * weight + 0.3 * wanted[1], 0.0)).sum().backward()
    gradient = {n: p.grad.clone() for n, p in any_model.named_parameters() if p.grad is not None}
    any_model.zero_grad()
    got = score(any_model, ids, real, temperature, sampled=sampled)
    for mine, theirs in zip(got[:2], wanted, strict=True):
        torch.testing.assert_close(mine, torch.where(sampled, theirs, 0.0), atol=1e-5, rtol=0)
    (got.logprob * weight + 0.3 * got.entropy).sum().backward()
    assert gradient
    for name, parameter in any_model.named_parameters():
        if name in gradient:
            torch.testing.assert_close(parameter.grad, gradient[name], atol=2e-4, rtol=1e-4, msg=name)
    any_model.zero_grad()


def test_no_tensor_of_batch_times_length_times_vocabulary_is_made(monkeypatch):
    monkeypatch.setattr(m, "CHUNK", 50_000 * 4)
    model = parts.tiny("llama", vocab_size=50_000)
    ids = torch.randint(0, 50_000, (2, 20))
    _, head = split(model)
    seen = []
    monkeypatch.setitem(m._HEADS, model, (model.base_model, lambda hidden: seen.append(len(hidden)) or head(hidden)))
    score(model, ids, everything(ids)).logprob.sum().backward()
    assert max(seen) <= 4 and sum(seen) == 2 * 2 * 19  # each position once forward, once in the backward pass


def test_padding_on_either_side_changes_nothing(any_model):  # T12
    torch.manual_seed(1)
    ids = torch.randint(0, 259, (1, 9))
    alone = score(any_model, ids, everything(ids)).logprob
    for left in (True, False):
        blank = torch.zeros(1, 4, dtype=torch.long)
        padded = torch.cat([blank, ids] if left else [ids, blank], 1)
        real = torch.cat([blank.bool(), everything(ids)] if left else [everything(ids), blank.bool()], 1)
        other = torch.randint(0, 259, (1, 13))
        both = score(any_model, torch.cat([padded, other]), torch.cat([real, everything(other)])).logprob[:1]
        torch.testing.assert_close(both[real], alone[0], atol=1e-4, rtol=0)
        assert both[real][0] == 0


def test_positions_count_real_tokens_only():
    assert positions(torch.tensor([[False, False, True, True, True]])).tolist() == [[0, 0, 0, 1, 2]]


def test_no_sampled_token_is_no_error():
    model = parts.tiny()
    ids = torch.randint(0, 259, (2, 5))
    got = score(model, ids, everything(ids), sampled=torch.zeros(2, 5, dtype=torch.bool))
    assert not got.logprob.any() and not got.entropy.any()


@pytest.mark.parametrize(
    "setting",
    [
        {"arch": "gemma2", "final_logit_softcapping": 3.0},
        {"arch": "cohere", "logit_scale": 0.25},
        {"arch": "granite", "logits_scaling": 7.0},
    ],
)
def test_families_that_reshape_their_logits_are_followed(setting, monkeypatch):
    monkeypatch.setitem(parts.ARCHS, "cohere", parts.GROUPED)
    monkeypatch.setitem(parts.ARCHS, "granite", parts.GROUPED)
    model = parts.tiny(**setting)
    ids = torch.randint(0, 259, (2, 7))
    torch.testing.assert_close(score(model, ids, everything(ids)).logprob, plain(model, ids, everything(ids), 1.0)[0], atol=1e-5, rtol=0)


def test_a_family_that_reshapes_them_otherwise_is_refused():
    model = parts.tiny("llama", seed=9)
    forward = model.forward
    model.forward = lambda *args, **kwargs: (out := forward(*args, **kwargs), setattr(out, "logits", out.logits * 2))[0]
    ids = torch.randint(0, 259, (1, 4))
    with pytest.raises(ValueError, match="Output"):
        score(model, ids, everything(ids))


def test_an_adapter_on_the_output_layer_takes_the_general_way():
    model, ids = parts.tiny(), torch.randint(0, 259, (2, 7))
    before = score(model, ids, everything(ids)).logprob
    assert split(model)[1].is_matrix
    model.lm_head = nn.Sequential(model.lm_head, nn.Identity())  # another layer of equal say
    assert not split(model)[1].is_matrix  # the split was made anew
    torch.testing.assert_close(score(model, ids, everything(ids)).logprob, before, atol=1e-6, rtol=0)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_the_output_layer_run(hook):
    model, ids, seen = parts.tiny(), torch.randint(0, 259, (2, 7)), []
    getattr(model.lm_head, hook)(lambda *_: seen.append(1))
    score(model, ids, everything(ids))
    assert len(seen) == 3  # twice when the split was checked
