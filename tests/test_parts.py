"""The parts that other tests lean on are what they claim to be."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import parts

SAID = [
    {"role": "user", "content": "hé√ 中"},
    {"role": "assistant", "content": "<think>a</think>\nb"},
    {"role": "user", "content": "c"},
]


def test_a_byte_is_its_own_token(tokenizer):
    text = "hé√\n\x00中 <think>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(parts.START + parts.END + parts.TEXT_END) == [256, 257, 258]
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (259, 257, 258)


def test_templates(any_template):
    if any_template.chat_template is None:
        return
    first = any_template.apply_chat_template(SAID[:2], tokenize=False)
    whole = any_template.apply_chat_template(SAID, tokenize=False, add_generation_prompt=True)
    assert ("<think>" in first) and ("<think>" in whole) == whole.startswith(first)
    assert any_template.decode(any_template.encode(whole)) == whole


def test_the_forgetful_template_rewrites_the_past():
    forgetful = parts.byte_tokenizer("forgetful")
    first = forgetful.apply_chat_template(SAID[:2], tokenize=False)
    assert not str(forgetful.apply_chat_template(SAID, tokenize=False)).startswith(str(first))


def test_pad_is_end(pad_is_end):
    assert pad_is_end.pad_token_id == pad_is_end.eos_token_id == 257


def test_encoding_again_is_not_the_way_back(split_tokenizer):
    assert split_tokenizer.decode([256, 258]) == "hello"
    assert split_tokenizer.encode("hello") == [259] and len(split_tokenizer) == 263


@pytest.mark.parametrize("arch", parts.ARCHS)
def test_tiny_models_are_equal_and_read_their_past(arch):
    before = torch.get_rng_state()
    model, twin = parts.tiny(arch), parts.tiny(arch)
    assert torch.equal(before, torch.get_rng_state())
    ids = torch.arange(40).view(2, 20)
    other = ids.clone()
    other[:, 0] += 50
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, twin(ids).logits)
        assert (logits - model(other).logits)[:, -1].abs().max() > 0.1
    assert logits.shape == (2, 20, 259) and logits.dtype == torch.float32
    assert not model.training and model.config.model_type == arch


TABLE = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])


def test_the_bigram_model_says_its_table(tmp_path):
    parts.BigramLM.of(TABLE.log()).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(model, parts.BigramLM)
    with torch.no_grad():
        out = model(torch.tensor([[0, 1, 2], [2, 2, 0]]), use_cache=True)
        more = model(torch.tensor([[1], [1]]), use_cache=True, logits_to_keep=1, **{parts.CACHE: out[parts.CACHE]})
    torch.testing.assert_close(out.logits.exp(), TABLE[torch.tensor([[0, 1, 2], [2, 2, 0]])], atol=1e-6, rtol=0)
    torch.testing.assert_close(more.logits.exp(), TABLE[torch.tensor([[1], [1]])], atol=1e-6, rtol=0)
    assert more[parts.CACHE].get_seq_length() == 4
