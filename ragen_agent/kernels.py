"""A tile of logits read in one pass by Triton on CUDA: the two readings of `logprob`, same names, arguments and numbers."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

BLOCK = 4096  # columns of a row read at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels read; they reckon in fp32


def usable(raw: Tensor) -> bool:
    """Whether the kernels can read this tile: on CUDA, not in float64, and Triton is there."""
    return raw.is_cuda and raw.dtype in DTYPES and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def fold(raw: Tensor, token: Tensor, curve: Any, tally: Any) -> None:
    """Read the (N, C) raw logits into the tally of their rows; `token` (N,) counts from the tile's first column.

    `curve` is a `logprob.Curve` and `tally` a `logprob.Tally` in fp32, written in place.
    """
    rows, columns = raw.shape
    with torch.cuda.device_of(raw):
        _reading()[(rows,)](raw, raw.stride(0), columns, token.contiguous(), *tally, *_settings(curve), **_shape(curve, columns))


def slope(raw: Tensor, token: Tensor, curve: Any, total: Tensor, entropy: Tensor, by_logprob: Tensor, by_entropy: Tensor | None) -> Tensor:
    """The (N, C) gradient of the raw logits, in their own memory and dtype.

    `total` (N,) is the log of the softmax's sum, `entropy` (N,) known from the forward pass, and the rest the gradients of the two
    results, each (N,) in fp32; the last may be None.
    """
    rows, columns = raw.shape
    tilt = by_logprob if by_entropy is None else by_entropy
    whole = [field.contiguous() for field in (token, total, entropy, by_logprob, tilt)]
    with torch.cuda.device_of(raw):
        _sloping()[(rows,)](raw, raw.stride(0), columns, *whole, *_settings(curve), TILTED=by_entropy is not None, **_shape(curve, columns))
    return raw


def _settings(curve: Any) -> tuple[float, float]:
    """(factor, bound): z = factor * u, or bound * tanh(factor * u) where there is a cap."""
    if curve.cap is None:
        return curve.scale / curve.temperature, 1.0
    return curve.scale / curve.cap, curve.cap / curve.temperature


def _shape(curve: Any, columns: int) -> dict[str, Any]:
    block = min(BLOCK, 1 << max(4, (columns - 1).bit_length()))
    return {"CAPPED": curve.cap is not None, "BLOCK": block, "num_warps": 8 if block > 1024 else 4}


@cache
def _reading() -> Any:
    """The kernel of `fold`, made on first use, so that importing this file needs no Triton. A program reads one row."""
    import triton
    import triton.language as tl

    @triton.jit
    def reading(raw, stride, columns, token, tops, masses, spreads, chosens, factor, bound, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        top, mass, spread = tl.load(tops + row), tl.load(masses + row), tl.load(spreads + row)
        chosen, at = tl.load(chosens + row), tl.load(token + row)
        at = tl.where(at < columns, at, -1)
        for start in range(0, columns, BLOCK):
            place = start + tl.arange(0, BLOCK)
            here = raw + row * stride + place
            z = tl.load(here, mask=place < columns, other=0.0).to(tl.float32) * factor
            if CAPPED:
                fade = tl.exp(-2.0 * tl.abs(z))  # tanh |z| = (1 - fade) / (1 + fade), which cannot overflow
                z = tl.where(z < 0, -bound, bound) * ((1.0 - fade) / (1.0 + fade))
            z = tl.where(place < columns, z, -float("inf"))
            peak = tl.maximum(top, tl.max(z, 0))
            drop = tl.maximum(z - peak, -1e4, propagate_nan=tl.PropagateNan.ALL)  # no 0 * inf below; NaN stays visible
            share = tl.exp(drop)
            shrink = tl.exp(top - peak)
            spread = shrink * (spread + (peak - top) * mass) - tl.sum(share * drop, 0)
            mass = shrink * mass + tl.sum(share, 0)
            top = peak
            chosen = tl.where((at >= start) & (at < start + BLOCK), tl.sum(tl.where(place == at, z, 0.0), 0), chosen)
        tl.store(tops + row, top)
        tl.store(masses + row, mass)
        tl.store(spreads + row, spread)
        tl.store(chosens + row, chosen)

    return reading


@cache
def _sloping() -> Any:
    """The kernel of `slope`. What it shares with the other is written twice: Triton's interpreter knows no function from outside."""
    import triton
    import triton.language as tl

    @triton.jit
    def sloping(
        raw, stride, columns, token, totals, entropies, by_logprob, by_entropy, factor, bound,
        TILTED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        total, entropy, at = tl.load(totals + row), tl.load(entropies + row), tl.load(token + row)
        pull = tl.load(by_logprob + row) * factor * bound
        tilt = tl.load(by_entropy + row) * factor * bound
        for start in range(0, columns, BLOCK):
            place = start + tl.arange(0, BLOCK)
            here = raw + row * stride + place
            z = tl.load(here, mask=place < columns, other=0.0).to(tl.float32) * factor
            if CAPPED:
                fade = tl.exp(-2.0 * tl.abs(z))  # tanh |z| = (1 - fade) / (1 + fade), which cannot overflow
                z = tl.where(z < 0, -bound, bound) * ((1.0 - fade) / (1.0 + fade))
            drop = tl.maximum(z - total, -1e4, propagate_nan=tl.PropagateNan.ALL)
            weight = pull + tilt * (drop + entropy) if TILTED else pull
            slope = tl.where(place == at, pull, 0.0) - tl.exp(drop) * weight
            if CAPPED:
                slope = slope * (1.0 - (z / bound) * (z / bound))
            tl.store(here, slope.to(raw.dtype.element_ty), mask=place < columns)

    return sloping
