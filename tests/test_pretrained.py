"""Models by name: what loads, what is refused, and what the embedded model is."""

import gymnasium as gym
import pytest

import ragen_envs
from ragen_agent.chat import Chat
from ragen_agent.pretrained import Pretrained, embedded, load, plain, save
from ragen_agent.prompts import Prompt
from tests import parts


def test_the_embedded_model_is_small_and_brings_its_prompt():
    assert sum(path.stat().st_size for path in embedded().rglob("*")) < 4 * 2**20
    model, tokenizer, prompt = load("embedded")
    assert sum(p.numel() for p in model.parameters()) < 500_000
    assert (prompt.style, prompt.window, prompt.think) == ("brief", 1, True)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == Chat(tokenizer).end


@pytest.mark.parametrize("env_id", [e for e in ragen_envs.IDS if "Sokoban" in e or "Lake" in e])
def test_its_tokenizer_spends_one_token_on_a_cell_a_move_and_a_tag(env_id):
    tokenizer = load("embedded").tokenizer
    observation, info = gym.make(env_id, view="grid").reset(seed=3)
    cells = [symbol for symbol in observation.replace("\n", " ").split()]
    ids = tokenizer.encode(observation, add_special_tokens=False)
    assert len(ids) == len(cells) + observation.count("\n")
    for word in [*info["actions"], "<think>", "</think>", "<answer>", "</answer>", "||"]:
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1
    text = Prompt().system(info["rules"]) + observation
    assert tokenizer.unk_token_id not in tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["nothing", "./nowhere", "/no/such/folder", "a/b/c", "org/model"])
def test_what_cannot_be_loaded_names_what_can(name):
    with pytest.raises(ValueError, match="embedded, smollm2"):
        load(name)


def test_a_prompt_is_stored_beside_its_model(tmp_path):
    prompt = Prompt(style="brief", think=False, prefix="<answer>", window=2)
    save(tmp_path, Pretrained(parts.tiny(), parts.byte_tokenizer(), prompt))
    assert load(str(tmp_path)).prompt == prompt
    (tmp_path / "ragen.json").write_text('{"tone": "kind"}')
    with pytest.raises(ValueError, match="tone.*style"):
        load(str(tmp_path))


def test_a_model_out_of_a_gguf_file_can_be_saved(tmp_path):
    class Quantizer:
        def is_serializable(self, *_, **__):
            return False

    model = parts.tiny()
    model.hf_quantizer, model.is_quantized, model.config.quantization_config = Quantizer(), True, {"quant_method": "gguf"}
    plain(model)
    save(tmp_path, Pretrained(model, parts.byte_tokenizer(), Prompt()))
    assert load(str(tmp_path)).model is not None
