"""Checkpointed and compiled layers: the same gradient, fewer saved bytes, eval mode, copies, generation."""

import copy
import shutil

import pytest
import torch

from ragen_agent import model as m
from ragen_agent.model import score
from tests import parts


def everything(ids):
    return torch.ones(ids.shape, dtype=torch.bool)


def gradient(model, ids, real):
    """The gradient of a loss of `score`, and how many bytes were kept for the backward pass besides the weights."""
    kept = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        got = score(model, ids, real, pack=False)
        loss = (got.logprob + 0.1 * got.entropy).sum()
        size = sum(bytes_ for place, bytes_ in kept.items() if place not in weights)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, size


@pytest.mark.parametrize("arch", parts.ARCHS)
def test_checkpointing_in_eval_mode_keeps_less_and_changes_no_gradient(arch):
    model = parts.tiny(arch, num_hidden_layers=4).double()
    ids = torch.randint(0, 259, (3, 40))
    names = list(model.state_dict())
    plainly, size = gradient(model, ids, everything(ids))
    m.checkpointing(model)
    again, small = gradient(model, ids, everything(ids))
    m.checkpointing(model, False)
    back, full = gradient(model, ids, everything(ids))
    assert small < 0.5 * size and full == size and list(model.state_dict()) == names
    assert plainly.keys() == again.keys() == back.keys()
    for name, slope in plainly.items():
        torch.testing.assert_close(again[name], slope, atol=1e-12 * max(1.0, float(slope.abs().max())), rtol=0, msg=name)


def test_checkpointing_turns_no_dropout_on_and_survives_eval():
    model = parts.tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    ids = torch.randint(0, 259, (2, 9))
    want = score(model, ids, everything(ids)).logprob
    m.checkpointing(model)
    model.eval()
    assert torch.equal(score(model, ids, everything(ids)).logprob, want) and not any(part.training for part in model.modules())


def test_a_copy_of_a_checkpointed_model_runs_its_own_layers():
    model, ids = parts.tiny(), torch.randint(0, 259, (2, 9))
    m.checkpointing(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        before = score(model, ids, everything(ids)).logprob
        for parameter in other.parameters():
            parameter.mul_(0.5)
        assert torch.equal(score(model, ids, everything(ids)).logprob, before)
        assert (score(other, ids, everything(ids)).logprob - before).abs().max() > 1e-3


def test_a_checkpointed_model_still_generates_with_its_cache():
    model, ids = parts.tiny(), torch.randint(0, 259, (1, 5))
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    m.checkpointing(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), want)


@pytest.mark.parametrize("change", [m.checkpointing, m.compiled])
def test_a_model_without_layers_of_the_known_kind_is_refused(change):
    with pytest.raises(ValueError, match="GradientCheckpointingLayer"):
        change(parts.BigramLM.of(torch.zeros(3, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_give_the_same_gradient_under_the_same_names(backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    model, ids = parts.tiny(), torch.randint(0, 259, (3, 12))
    names = list(model.state_dict())
    want, _ = gradient(model, ids, everything(ids))
    m.compiled(model, backend)
    for checkpointed in (False, True):
        m.checkpointing(model, checkpointed)
        got, _ = gradient(model, ids, everything(ids))
        for name, slope in want.items():
            torch.testing.assert_close(got[name], slope, atol=1e-4, rtol=1e-4, msg=name)
    assert list(model.state_dict()) == names
    m.checkpointing(model, False)
    m.compiled(model, None)
    assert not any("forward" in vars(part) for part in model.modules())
