"""Rows of a micro-batch laid one behind the other in fewer, fuller rows, so that hardly any padding is computed."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

WIDTHS = (1, 2, 3, 4)  # how wide a packed row may be, in longest rows: a wider one fills better, but its attention costs more
WORTH = 0.85  # packed rows must promise at most this share of the padded rows' work: layout and mask cost the rest (measured)
CLOSE, CLOSE_HALF = 1e-4, 0.03  # how far states may differ, in shares of the largest one; the same for 16-bit models
_PACKS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class Layout(NamedTuple):
    """Where the tokens of (B, T) rows lie in P packed rows of width W."""

    slot: Tensor  # (B, T) int64, index into the P * W places; 0 where a token is not real
    position: Tensor  # (P, W) int64, counted from 0 in every sequence; 0 on what is left over

    def pack(self, ids: Tensor, real: Tensor) -> Tensor:
        """(B, T) ids -> (P, W), 0 on what is left over."""
        return ids.new_zeros(self.position.numel()).index_put_((self.slot[real],), ids[real]).view_as(self.position)


def bins(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Rows of these `lengths`, none longer than `width`, in as few bins as best-fit decreasing finds. Empty rows are in none."""
    filled: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (places left, bin), sorted
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        tightest = bisect_left(room, (lengths[row], -1))
        if tightest == len(room):
            filled.append([])
            left, at = width, len(filled) - 1
        else:
            left, at = room.pop(tightest)
        filled[at].append(row)
        insort(room, (left - lengths[row], at))
    return filled


def layout(real: Tensor, filled: Sequence[Sequence[int]], width: int) -> Layout:
    """The layout that puts the real tokens of each row (B, T) into its bin, one row behind the other."""
    lengths = real.sum(1).tolist()
    start = [0] * len(lengths)
    for at, rows in enumerate(filled):
        place = at * width
        for row in rows:
            start[row] = place
            place += lengths[row]
    order = (real.long().cumsum(1) - 1).clamp_min(0)
    slot = torch.where(real, torch.tensor(start, device=real.device)[:, None] + order, 0)
    position = order.new_zeros(len(filled) * width).index_put_((slot[real],), order[real])
    return Layout(slot, position.view(len(filled), width))


def work(rows: int, width: int, channels: int) -> int:
    """What a body of `channels` does for `rows` rows of `width` tokens, per layer, up to a factor: its matrices and its attention.

    A transformer layer has about 12 channels^2 weights, so 24 channels^2 operations a token, and 4 width * channels in attention.
    """
    return rows * width * (6 * channels + width)


def plan(body: nn.Module, real: Tensor, pack: bool | None = None) -> Layout | None:
    """The layout for rows whose real tokens are marked in `real` (B, T), or None where padding is as good or `body` cannot pack.

    `pack` None packs where it promises less work, True wherever the model can, False never.
    """
    if pack is False or body.training or not packs(body) or not real.any():  # (asked first: ranks that share a model ask together)
        return None
    lengths = real.sum(1).tolist()
    channels = int(body.config.hidden_size)  # pyright: ignore
    longest, padded = max(lengths), work(real.shape[0], real.shape[1], channels)
    if _flat(body):  # one row of everything: variable-length kernels know where its sequences end, and need no padding
        chosen = (sum(lengths) * padded // real.numel(), sum(lengths), [[row for row, length in enumerate(lengths) if length]])
    else:
        tried = [(width, bins(lengths, width)) for width in (longest * times for times in WIDTHS)]
        chosen = min(((work(len(filled), width, channels), width, filled) for width, filled in tried), key=lambda one: one[:2])
    return layout(real, chosen[2], chosen[1]) if pack or chosen[0] < WORTH * padded else None


def _flat(body: nn.Module) -> bool:
    return str(body.config._attn_implementation).startswith("flash")  # pyright: ignore


def packs(body: nn.Module) -> bool:
    """Whether `body` keeps the sequences of one row apart by their position ids alone. Asked of it once, in numbers, and remembered.

    Transformers builds a block-diagonal causal mask where positions begin anew and no mask is given, for families that hand it
    their positions; recurrent ones and some older ones do not, and read on from one sequence into the next.
    """
    if body not in _PACKS:
        _PACKS[body] = _keeps_apart(body)
    return _PACKS[body]


@torch.no_grad()
def _keeps_apart(body: nn.Module) -> bool:
    """Packed states equal padded ones, and a sequence's neighbour changes nothing in it."""
    weight = next(body.parameters())
    lengths = [6, 4, 3]
    ids = (torch.arange(1, 19, device=weight.device).view(3, 6) * 7) % int(body.config.vocab_size)  # pyright: ignore
    real = torch.arange(6, device=weight.device)[None] < torch.tensor(lengths, device=weight.device)[:, None]
    width = sum(lengths) + (0 if _flat(body) else 1)
    laid = layout(real, [[0, 1, 2]], width)
    order = (real.long().cumsum(1) - 1).clamp_min(0)
    padded = body(input_ids=ids, attention_mask=real.long(), position_ids=order, use_cache=False).last_hidden_state[real]
    other = torch.cat([(ids[:1] + 1) % int(body.config.vocab_size), ids[1:]])  # pyright: ignore
    first, second = (states(body, some, real, laid)[laid.slot[real]] for some in (ids, other))
    close = (CLOSE if weight.dtype in (torch.float32, torch.float64) else CLOSE_HALF) * float(padded.abs().max())
    apart = (first - second)[lengths[0] :].abs().max() <= close / 100
    return bool(apart) and bool((first - padded).abs().max() <= close)


def states(body: nn.Module, ids: Tensor, real: Tensor, laid: Layout) -> Tensor:
    """The last hidden states (P * W, H) of the packed rows; `laid.slot` says whose is where."""
    out = body(input_ids=laid.pack(ids, real), attention_mask=None, position_ids=laid.position, use_cache=False)
    return out.last_hidden_state.flatten(0, 1)
