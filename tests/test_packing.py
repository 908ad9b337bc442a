"""Packed rows: bins, layouts, who can pack, and the padded form's numbers and gradients."""

import copy

import pytest
import torch

from ragen_agent import packing
from ragen_agent.model import score
from tests import parts

PACKING = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "mistral", "phi", "gpt2", "gpt_neox", "olmo", "olmo2")
PADDED = {  # who reads on from one sequence into the next, or counts positions by itself -> what makes it tiny
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "opt": {**parts.SIZE, "ffn_dim": 64, "word_embed_proj_dim": 32},
}


def rows(lengths, width=None, vocabulary=259):
    """Random ids (B, T) and which are real, right-padded."""
    make = torch.Generator().manual_seed(len(lengths))
    real = torch.arange(width or max(lengths))[None] < torch.tensor(lengths)[:, None]
    return torch.randint(0, vocabulary, real.shape, generator=make) * real, real


def test_bins_by_hand():
    assert packing.bins([3, 9, 0, 5, 6, 4, 1], 10) == [[1, 6], [4, 5], [3, 0]]
    assert packing.bins([10, 10], 10) == [[0], [1]]
    assert packing.bins([0, 0], 10) == []


@pytest.mark.parametrize("seed", range(5))
def test_bins_hold_every_row_once_and_none_overflows(seed):
    lengths = torch.randint(0, 40, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    filled = packing.bins(lengths, 40)
    assert sorted(row for one in filled for row in one) == [row for row, length in enumerate(lengths) if length]
    assert all(sum(lengths[row] for row in one) <= 40 for one in filled)
    assert len(filled) * 40 <= 1.1 * sum(lengths) + 40  # nearly no padding


def test_a_layout_by_hand_with_padding_on_either_side():
    real = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]).bool()
    laid = packing.layout(real, [[1, 2], [0]], 5)
    assert laid.slot.tolist() == [[5, 6, 0, 0], [0, 0, 1, 2], [3, 0, 0, 0]]
    assert laid.position.tolist() == [[0, 1, 2, 0, 0], [0, 1, 0, 0, 0]]
    assert laid.pack(torch.arange(12).view(3, 4), real).tolist() == [[5, 6, 7, 8, 0], [0, 1, 0, 0, 0]]


@pytest.mark.parametrize("arch", parts.ARCHS)
def test_every_family_of_the_tests_packs(arch):
    assert arch in PACKING and packing.packs(parts.tiny(arch).base_model)


@pytest.mark.parametrize("arch", PADDED)
def test_a_family_that_cannot_pack_is_padded(arch, monkeypatch):
    monkeypatch.setitem(parts.ARCHS, arch, PADDED[arch])
    model = parts.tiny(arch)
    ids, real = rows([12, 3, 4, 5])
    assert not packing.packs(model.base_model) and packing.plan(model.base_model, real, True) is None
    padded, asked = (score(model, ids, real, pack=pack).logprob for pack in (False, True))
    assert torch.equal(padded, asked)


def both(model, ids, real, sampled, hidden):
    """(results, gradients) of the padded and of the packed form."""
    found = []
    for pack in (False, True):
        model.zero_grad()
        got = score(model, ids, real, 0.8, sampled, hidden, pack)
        loss = (got.logprob * torch.linspace(-1, 1, ids.shape[1])).sum() + 0.3 * got.entropy.cos().sum()
        if hidden:
            loss = loss + torch.where(real[..., None], got.hidden, 0.0).sin().sum()
        loss.backward()
        found.append((got, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    return found


@pytest.mark.parametrize("arch", parts.ARCHS)
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_packed_rows_give_the_padded_forms_numbers(arch, dtype, atol):
    model = parts.tiny(arch).to(dtype)
    atol = max(atol, 1e-6 if arch in ("gemma", "gemma2") else 0.0)  # their norms (and softmax) are in fp32 in any model
    ids, real = rows([23, 5, 9, 1, 14, 8, 3])
    plan = packing.plan(model.base_model, real, True)
    assert plan is not None and plan.position.numel() < 0.6 * real.numel()
    sampled = real & (torch.rand(real.shape, generator=torch.Generator().manual_seed(0)) < 0.7)
    (padded, slopes), (packed, mine) = both(model, ids, real, sampled, hidden=True)
    for a, b in zip(packed[:2], padded[:2], strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)
    torch.testing.assert_close(packed.hidden[real], padded.hidden[real], atol=10 * atol, rtol=0)
    assert slopes.keys() == mine.keys()
    for name, slope in slopes.items():
        scale = max(1.0, float(slope.abs().max()))
        torch.testing.assert_close(mine[name] / scale, slope / scale, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("arch", ["gemma2", "mistral"])
def test_a_sliding_window_slides_in_packed_rows_too(arch):
    model = parts.tiny(arch, sliding_window=8)
    ids, real = rows([40, 19, 20, 12, 27])
    (padded, _), (packed, _) = both(model, ids, real, real, hidden=False)
    torch.testing.assert_close(packed.logprob, padded.logprob, atol=1e-5, rtol=0)
    full = score(parts.tiny(arch, sliding_window=64), ids, real, 0.8).logprob
    assert (full - padded.logprob).abs().max() > 1e-3  # the window matters here


def test_padding_on_the_left_and_between_is_left_out_too():
    model = parts.tiny().double()
    ids, real = rows([9, 4, 3])
    ids[1], real[1] = ids[1].roll(5), real[1].roll(5)
    sampled = real.clone()
    sampled[1, 5] = False  # the first token of a row has no context
    padded, packed = (score(model, ids, real, sampled=sampled, pack=pack).logprob for pack in (False, True))
    torch.testing.assert_close(packed, padded, atol=1e-10, rtol=0)


def test_rows_are_packed_by_themselves_only_where_it_saves_work():
    body = parts.tiny(hidden_size=96).base_model
    spread, even = rows([60] + [10] * 30)[1], rows([60] * 20 + [55] * 10)[1]
    assert packing.plan(body, spread) is not None and packing.plan(body, spread, False) is None
    assert packing.plan(body, even) is None and packing.plan(body, even, True) is not None
    assert packing.plan(body, torch.zeros(2, 5, dtype=torch.bool), True) is None


def test_dropout_is_never_mistaken_for_a_leak():
    model = parts.tiny("gpt2", resid_pdrop=0.5).train()
    real = rows([9, 2, 3])[1]
    assert packing.plan(model.base_model, real, True) is None and model.base_model not in packing._PACKS
    assert packing.plan(model.eval().base_model, real, True) is not None


def test_a_leak_is_seen():
    """A body that looks at the whole row, whatever the positions say, is found out."""
    body = copy.deepcopy(parts.tiny().base_model)
    forward = body.forward

    def leaky(position_ids=None, attention_mask=None, **kwargs):
        width = position_ids.shape[1]
        return forward(position_ids=torch.arange(width)[None], attention_mask=attention_mask, **kwargs)

    body.forward = leaky
    assert not packing.packs(body)
