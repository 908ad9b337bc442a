"""Log-probability and entropy of tokens straight from hidden states: logits exist one tile at a time, forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ragen_agent import kernels

CPU_TILE = 1 << 20  # logits at once: 4 MiB in fp32, which a core's cache holds
CUDA_TILE = 1 << 26
ROWS = {"cpu": 512}  # rows of a tile, where there are as many; the rest of the tile's size goes to its width
MANY_ROWS = 8192  # the same on other devices
LOW = -1e4  # exp(LOW) is 0 in any float, and 0 * LOW is 0: stands for -inf where 0 * inf would be NaN
EMPTY = -1e30  # the largest logit of none


class Curve(NamedTuple):
    """From a raw logit u to what the softmax exponentiates: z = cap * tanh(scale * u / cap) / temperature, or scale * u / temperature."""

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0


PLAIN = Curve()


class Tally(NamedTuple):
    """What is known of the softmax of N rows after some of their logits z were read; each (N,), fp32 or wider, written in place."""

    top: Tensor  # the largest z
    mass: Tensor  # sum exp(z - top)
    spread: Tensor  # sum exp(z - top) * (top - z)
    chosen: Tensor  # z of the token

    @classmethod
    def blank(cls, count: int, like: Tensor) -> "Tally":
        """Nothing read yet, in fp32 or wider, on the device of `like`."""
        whole = like.new_zeros((4, count), dtype=torch.promote_types(like.dtype, torch.float32))
        whole[0] = EMPTY
        return cls(*whole)

    def rows(self, some: slice) -> "Tally":
        """A view of some of the rows."""
        return Tally(*(field[some] for field in self))


def token_logprob(
    hidden: Tensor, weight: Tensor, token: Tensor, curve: Curve = PLAIN, bias: Tensor | None = None, tile: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """(N, H) hidden states, (V, H) output weight, (N,) tokens -> their (N,) log-probabilities and the (N,) entropies in nats.

    Results are fp32, or float64 where the input is. No more than `tile` (rows, columns) logits exist at a time: the softmax is
    summed up over tiles of the vocabulary (online softmax, Milakov & Gimelshein 2018), and the backward pass makes each tile again and
    turns it into its own gradient (as Cut Cross-Entropy, Wijmans et al. 2024). The weight's gradient is skipped where it needs none. A
    logit of -inf has no probability, adds nothing to the entropy and has no gradient.
    """
    return _TokenLogprob.apply(hidden, weight, bias, token, curve, tile or tile_shape(len(token), len(weight), hidden.device.type))


def tile_shape(count: int, vocabulary: int, device: str) -> tuple[int, int]:
    """(rows, columns) of the logits made at once for `count` tokens: few columns of many rows, so that the weight is read once."""
    size = CPU_TILE if device == "cpu" else CUDA_TILE
    columns = max(1, min(vocabulary, size // max(1, min(count, ROWS.get(device, MANY_ROWS)))))
    return max(1, min(count, size // columns)), columns


def _tiles(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _raw(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """One tile of the output layer, in the dtype that autocast (or the weight) asks for."""
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class _TokenLogprob(Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, curve: Curve, tile: tuple[int, int]):  # pyright: ignore
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        tally = Tally.blank(len(token), hidden)
        for columns in _tiles(len(weight), tile[1]):
            for rows in _tiles(len(token), tile[0]):
                raw = _raw(hidden[rows], weight[columns], None if bias is None else bias[columns], ctx.dtype)
                _by(raw).fold(raw, token[rows] - columns.start, curve, tally.rows(rows))
        tail = tally.mass.log()
        entropy = (tail + tally.spread / tally.mass).clamp_min_(0.0)
        ctx.save_for_backward(hidden, weight, bias, token, tally.top + tail, entropy)
        ctx.curve, ctx.tile = curve, tile
        ctx.set_materialize_grads(False)
        return tally.chosen - tally.top - tail, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, *slopes: Tensor | None):  # pyright: ignore
        hidden, weight, bias, token, total, entropy = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        by_logprob, by_entropy = slopes
        if by_entropy is not None and not by_entropy.any():
            by_entropy = None
        if by_logprob is None and by_entropy is None:
            return (None,) * 6
        by_logprob = torch.zeros_like(total) if by_logprob is None else by_logprob
        wide = total.dtype
        state, table, offset = (
            torch.zeros(whole.shape, dtype=kind, device=hidden.device) if need else None
            for whole, kind, need in zip((hidden, weight, bias), (wide, weight.dtype, wide), wanted, strict=True)
        )
        for columns in _tiles(len(weight), ctx.tile[1]):
            part, shift = weight[columns].to(ctx.dtype), None if bias is None else bias[columns]
            rise = None if table is None else torch.zeros(part.shape, dtype=wide, device=part.device)
            for rows in _tiles(len(token), ctx.tile[0]):
                here = hidden[rows].to(ctx.dtype)
                raw = _raw(here, part, shift, ctx.dtype)
                tilt = None if by_entropy is None else by_entropy[rows]
                raw = _by(raw).slope(raw, token[rows] - columns.start, ctx.curve, total[rows], entropy[rows], by_logprob[rows], tilt)
                if offset is not None:
                    offset[columns] += raw.sum(0, dtype=wide)
                raw = raw.to(ctx.dtype)
                if state is not None:
                    _add_product(state[rows], raw, part)
                if rise is not None:
                    _add_product(rise, raw.T, here)
            if table is not None and rise is not None:
                table[columns] = rise
        return (
            None if state is None else state.to(hidden.dtype),
            table,
            None if offset is None or bias is None else offset.to(bias.dtype),
            None,
            None,
            None,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total` += `left` @ `right`; the sum over tiles is kept in the wider dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _by(raw: Tensor):
    """Who reads a tile: the fused kernels where they can, else torch."""
    return kernels if kernels.usable(raw) else Torch


class Torch:
    """The two readings of a tile in plain torch, with the names and arguments of `kernels`."""

    @staticmethod
    def fold(raw: Tensor, token: Tensor, curve: Curve, tally: Tally) -> None:
        """Read the (N, C) raw logits into the tally of their rows; `token` (N,) counts from the tile's first column. `raw` is used up."""
        z = _exponents(raw, curve)
        here, local = _inside(token, z.shape[1])
        tally.chosen.copy_(torch.where(here, z.gather(1, local[:, None]).squeeze(1), tally.chosen))
        top = torch.maximum(tally.top, z.amax(1))
        z.sub_(top[:, None]).clamp_(min=LOW)
        shrink = (tally.top - top).exp()
        mass = z.exp()
        tally.spread.add_((top - tally.top) * tally.mass).mul_(shrink)
        tally.mass.mul_(shrink).add_(mass.sum(1))
        tally.spread.sub_(mass.mul_(z).sum(1))
        tally.top.copy_(top)

    @staticmethod
    def slope(
        raw: Tensor, token: Tensor, curve: Curve, total: Tensor, entropy: Tensor, by_logprob: Tensor, by_entropy: Tensor | None
    ) -> Tensor:
        """The (N, C) gradient of the raw logits, in their own memory where the dtype allows.

        With p = exp(z - total), `total` (N,) the log of the sum, and the gradients of the two results, each (N,): dz =
        by_logprob * (onehot - p) - by_entropy * p * (log p + entropy).
        """
        z = _exponents(raw, curve)
        bend = None if curve.cap is None else z.mul(curve.temperature / curve.cap).square_().neg_().add_(1.0)
        by_logprob = by_logprob * (curve.scale / curve.temperature)
        here, local = _inside(token, z.shape[1])
        z.sub_(total[:, None])
        if by_entropy is None:
            z.exp_().mul_(-by_logprob[:, None])
        else:
            by_entropy = by_entropy * (curve.scale / curve.temperature)
            weight = z.clamp_(min=LOW).mul(-by_entropy[:, None]).sub_((by_logprob + by_entropy * entropy)[:, None])
            z.exp_().mul_(weight)
        z.scatter_add_(1, local[:, None], torch.where(here, by_logprob, 0.0)[:, None])
        return z if bend is None else z.mul_(bend)


def _exponents(raw: Tensor, curve: Curve) -> Tensor:
    z = raw.to(torch.promote_types(raw.dtype, torch.float32))
    factor = curve.scale / (curve.temperature if curve.cap is None else curve.cap)
    if factor != 1.0:
        z.mul_(factor)
    return z if curve.cap is None else z.tanh_().mul_(curve.cap / curve.temperature)


def _inside(token: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which tokens lie in a tile of `width` columns, and their columns (0 for the others)."""
    here = (token >= 0) & (token < width)
    return here, torch.where(here, token, 0)
