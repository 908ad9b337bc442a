"""Adapters: at first they change nothing, only they train, off is off, and they are saved, merged and read again as the same model."""

import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ragen_agent import adapters, pretrained
from ragen_agent.algos import GRPO, PPO
from ragen_agent.backends import HFBackend, Sampling
from ragen_agent.model import score
from ragen_agent.pretrained import Pretrained
from ragen_agent.prompts import Prompt
from ragen_agent.updates import load_trained_state, optimizer_of, trained_state
from tests import parts
from tests.algo_parts import batch_of

peft = pytest.importorskip("peft")

IDS = torch.arange(24).reshape(2, 12) * 7 % 259
REAL = torch.ones_like(IDS, dtype=torch.bool)
EVERY = pytest.mark.parametrize("arch", parts.ARCHS)
SOME = pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2"])  # plain; tied, capped; tied, with layers stored the other way round


def says(model):
    return score(model, IDS, REAL).logprob.detach()


def gap(one, other):
    return (one - other).abs().max().item()


def moved(model, seed=0):
    """The adapters with random numbers in them, so that they change what the model says."""
    chance = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1, generator=chance)
    return model


def adapted(arch="llama", **settings):
    return moved(adapters.add(parts.tiny(arch), rank=4, **settings))


@EVERY
def test_new_adapters_change_nothing_and_only_they_train(arch):
    plain, model = parts.tiny(arch), parts.tiny(arch)
    assert adapters.add(model, rank=4) is model
    assert gap(says(model), says(plain)) == 0
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    linear = [m for m in plain.base_model.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    assert len(adapters.layers(model)) == len(linear) == len(names) / 2
    assert isinstance(model.get_output_embeddings(), nn.Linear), "the head has an adapter"


@EVERY
def test_off_is_the_model_before(arch):
    want, model = says(parts.tiny(arch)), adapted(arch)
    full = says(model)
    assert gap(full, want) > 0.1
    with adapters.off(model), adapters.off(model):
        assert gap(says(model), want) == 0
    assert gap(says(model), full) == 0
    assert gap(says(adapters.Bare(model)), want) == 0


@EVERY
def test_merged_is_a_plain_model_that_says_the_same(arch, tmp_path):
    model = adapted(arch)
    want = says(model)
    plain = adapters.merged(model)
    assert not adapters.layers(plain) and gap(says(model), want) == 0
    assert all(p.requires_grad for p in plain.parameters())
    plain.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(parts.tiny(arch))
    assert gap(again(IDS).logits, model(IDS).logits) < 1e-5
    handed = dict(adapters.weights(model))
    assert handed.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(handed[name], p) for name, p in plain.named_parameters())


@EVERY
def test_saved_in_pefts_own_format(arch, tmp_path):
    model = adapted(arch, alpha=5.0)
    adapters.save(tmp_path, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    theirs = peft.PeftModel.from_pretrained(parts.tiny(arch), str(tmp_path))
    assert gap(theirs(IDS).logits, model(IDS).logits) == 0
    ours = adapters.attach(parts.tiny(arch), tmp_path)
    assert gap(says(ours), says(model)) == 0
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in model.parameters()]


def test_pefts_folder_is_read(tmp_path):
    """An adapter that peft itself made and saved, of another alpha and on two layers."""
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"])
    theirs = moved(peft.get_peft_model(parts.tiny(), config))
    theirs.save_pretrained(str(tmp_path))
    ours = adapters.attach(parts.tiny(), tmp_path)
    assert gap(theirs.eval()(IDS).logits, ours(IDS).logits) == 0
    assert len(adapters.layers(ours)) == 4


@SOME
def test_the_sampler_and_the_trainer_agree(arch):
    model = adapted(arch)
    prompts = [[1, 2, 3], [7] * 9, [40, 41, 42, 43]]
    replies = HFBackend(model).generate(prompts, Sampling(max_tokens=12), [[0, i] for i in range(3)])
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([prompt + reply.ids])
        ours = score(model, ids, torch.ones_like(ids, dtype=torch.bool)).logprob[0, len(prompt) :]
        assert gap(ours, torch.tensor(reply.logprobs)) < 1e-5


@pytest.mark.parametrize(("kind", "settings"), [(GRPO, {"kl_coef": 0.1}), (PPO, {"kl_coef": 0.1, "kl_in": "reward"})], ids=["GRPO", "PPO"])
def test_an_optimizer_trains_them_against_the_model_without_them(kind, settings):
    """Loss and gradient are those with a copy of the model as the reference; a step moves the adapters, and nothing of the model."""
    batch = batch_of([(0, "..000.11"), (1, "...00.1"), (2, "..0.1"), (3, "..00")], [1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1])
    model = moved(adapters.add(parts.tiny(vocab_size=11), rank=4))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    seen = []
    for reference in (adapters.Bare(model), parts.tiny(vocab_size=11)):
        algo = kind(model, reference=reference, **settings)
        algo.prepare(batch)
        algo.zero_grad()
        loss, _ = algo(batch)
        loss.backward()
        seen.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    assert gap(seen[0][0], seen[1][0]) < 1e-6 and gap(seen[0][1], seen[1][1]) < 1e-6 and seen[0][1].norm() > 1e-3
    before = trained_state(algo)
    assert len([name for name in before if "lora" in name]) == 28
    assert {name for name in before if "lora" not in name} <= {"critic.weight", "critic.bias"}
    before = {name: value.clone() for name, value in before.items()}
    optimizer_of(algo.parameters(), 0.01, 0.0).step()
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    stepped = {name: value.clone() for name, value in trained_state(algo).items()}
    assert all(not torch.equal(stepped[name], value) for name, value in before.items() if "lora" in name)
    load_trained_state(algo, before)
    assert all(torch.equal(value, before[name]) for name, value in trained_state(algo).items())


def test_switching_off_between_forward_and_backward_changes_no_gradient():
    gradients = []
    for meddle in (False, True):
        model = adapted()
        loss = score(model, IDS, REAL).logprob.sum()
        if meddle:
            says(adapters.Bare(model))
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for again in (False, True):
        model = adapted()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        score(model, IDS, REAL).logprob.sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(gap(a, b) < 1e-5 for a, b in zip(*gradients, strict=True))


def test_off_leaves_no_trace_after_an_error_and_keeps_what_is_frozen():
    model = adapted().requires_grad_(False)
    with pytest.raises(RuntimeError, match="midway"), adapters.off(model):
        raise RuntimeError("midway")
    assert gap(says(model), says(adapted())) == 0
    assert not any(p.requires_grad for p in model.parameters())
    bare = adapters.Bare(adapted())
    bare.eval().requires_grad_(False)
    assert any(p.requires_grad for p in bare.parameters()) and not bare.state_dict()


def test_the_seed_decides_and_no_global_stream_moves():
    torch.manual_seed(3)
    want = torch.get_rng_state()
    first, same, other = (trained_state(adapters.add(parts.tiny(), 4, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), want)
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], same[name]) and not torch.equal(first[name], other[name])


def test_a_layer_by_hand():
    """W becomes W + alpha / rank * B A."""
    model = adapters.add(parts.tiny(), rank=1, alpha=3.0, targets=["layers.0.self_attn.o_proj"])
    (layer,) = adapters.layers(model)
    nn.init.ones_(layer.lora_A["default"].weight)
    nn.init.constant_(layer.lora_B["default"].weight, 0.5)
    want = parts.tiny().model.layers[0].self_attn.o_proj.weight + 3.0 * 0.5
    assert torch.allclose(dict(adapters.weights(model))["model.layers.0.self_attn.o_proj.weight"], want, atol=1e-6, rtol=0)


def test_a_bf16_model_has_fp32_adapters(tmp_path):
    model = moved(adapters.add(parts.tiny().bfloat16(), rank=4))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    pretrained.save(tmp_path, Pretrained(model, parts.byte_tokenizer(), Prompt()))
    again = adapters.attach(parts.tiny().bfloat16(), tmp_path)
    assert gap(says(again), says(model)) == 0
    assert {p.dtype for p in adapters.merged(model).parameters()} == {torch.bfloat16}


# -- folders ---------------------------------------------------------------------------------------------------------------------


def test_a_folder_of_adapters_is_loaded_into_its_model(tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapters"
    pretrained.save(base, Pretrained(parts.tiny(), parts.byte_tokenizer(), Prompt(style="brief")))
    loaded = pretrained.load(str(base))
    model = moved(adapters.add(loaded.model, rank=4))
    pretrained.save(folder, loaded._replace(prompt=Prompt(window=3)))
    assert not (folder / "model.safetensors").exists()
    again = pretrained.load(str(folder))
    assert gap(says(again.model), says(model)) == 0
    assert again.prompt.window == 3 and again.tokenizer.encode("hello") == loaded.tokenizer.encode("hello")
    assert {name for name, p in again.model.named_parameters() if p.requires_grad} == set(trained_state(model))
    for path in folder.iterdir():
        if not path.name.startswith("adapter"):
            path.unlink()
    assert pretrained.load(str(folder)).prompt.style == "brief", "tokenizer and prompt of the model below"


def test_adapters_of_the_embedded_model_name_it(tmp_path):
    """The name and not the path, so that the folder loads on another machine."""
    loaded = pretrained.load("embedded")
    model = moved(adapters.add(loaded.model, rank=2))
    pretrained.save(tmp_path, loaded)
    assert adapters.base_of(tmp_path) == "embedded"
    again = pretrained.load(str(tmp_path))
    assert gap(says(again.model), says(model)) == 0 and again.prompt == loaded.prompt


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    model = adapted()
    adapters.save(tmp_path, model)
    with pytest.raises(ValueError, match="do not fit this LlamaForCausalLM"):
        adapters.attach(parts.tiny(hidden_size=64), tmp_path)
    with pytest.raises(ValueError, match="do not fit this LlamaForCausalLM"):
        adapters.attach(parts.tiny(num_hidden_layers=1), tmp_path)
    with pytest.raises(ValueError, match="do not fit this LlamaForCausalLM"):
        adapters.attach(parts.tiny(num_hidden_layers=3), tmp_path)
    with pytest.raises(ValueError, match="does not say for which model"):
        pretrained.load(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="cannot read the adapters"):
        adapters.attach(parts.tiny(), tmp_path)
    model.name_or_path = "./gone"
    adapters.save(tmp_path, model)
    with pytest.raises(ValueError, match=r"were made for './gone': no model './gone'"):
        pretrained.load(str(tmp_path))


def test_what_cannot_be_asked_for():
    model = parts.tiny()
    with pytest.raises(ValueError, match="called c_attn, head; known: down_proj, gate_proj, k_proj"):
        adapters.add(model, 4, targets=["q_proj", "c_attn", "head"])
    with pytest.raises(ValueError, match="at least 1, not 0"):
        adapters.add(model, 0)
    for call in (adapters.merged, adapters.Bare, lambda m: adapters.off(m).__enter__()):
        with pytest.raises(ValueError, match="has no adapters"):
            call(model)
    with pytest.raises(ValueError, match="has adapters already"):
        adapters.add(adapters.add(model, 4), 4)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert adapters.layers(parts.tiny()) == []
    with pytest.raises(ValueError, match=r"pip install \"ragen-gym\[lora\]\""):
        adapters.add(parts.tiny(), 4)
