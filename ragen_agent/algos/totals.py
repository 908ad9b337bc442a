"""Totals: the denominators of an optimizer step, counted once for all its micro-batches and processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ragen_agent.algos import functional as F
from ragen_agent.batch import Batch


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def summed(x: Tensor) -> Tensor:
    """`x` added over all processes; in a single process, `x`."""
    if dist.is_available() and dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
    return x


def largest(x: Tensor) -> Tensor:
    """The elementwise maximum of `x` over all processes; in a single process, `x`."""
    if dist.is_available() and dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def lengths(batch: Batch) -> Tensor:
    """(E,) how many sampled tokens each episode has in these rows."""
    return F.episode_sum(batch.sampled.long(), batch.sampled, batch.episode, len(batch.group))


def written(batch: Batch, name: str) -> Tensor:
    """A field that `prepare` writes; ValueError where it has not."""
    value: Tensor | None = vars(batch)[name]
    if value is None:
        raise ValueError(f"batch.{name} is not there: call prepare(batch) first")
    return value


@dataclass
class Totals:
    """The denominators of one optimizer step: the losses of its micro-batches, each under the same Totals, add up to the step's loss.

    With several processes they are the mean over processes, because DDP and FSDP average gradients.
    """

    tokens: Tensor  # () sampled tokens, at least 1
    episodes: Tensor  # () episodes with a sampled token, at least 1
    turns: Tensor  # () turns with a sampled token, at least 1
    length: Tensor  # (E,) sampled tokens of each episode
    log_ratio: Tensor | None = None  # (E,) the sum of log(new / old) over each episode's sampled tokens; where the ratio is a sequence's

    @classmethod
    def of(cls, batch: Batch) -> "Totals":
        """Those of all rows of `batch`; every process must call it."""
        length = lengths(batch)
        turns, world = F.firsts(batch.sampled, batch.turn).sum(), world_size()
        counts = summed(torch.stack([length.sum(), (length > 0).sum(), turns])) / world
        tokens, episodes, turns = counts.clamp(min=1 / world)
        return cls(tokens, episodes, turns, length)


def combine(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """The metrics of a step from those of its micro-batches: the sum, or the largest where the name ends in `_max`."""
    names = list(parts[0]) if parts else []
    stacked = {name: torch.stack([part[name].float() for part in parts]) for name in names}
    return {name: float(x.max() if name.endswith("_max") else x.sum()) for name, x in stacked.items()}


def cuts(batch: Batch, micro_rows: int | None) -> tuple[Tensor, ...]:
    """The row numbers of `batch`, `micro_rows` at a time (None: all at once); none where it has no rows."""
    return torch.arange(len(batch), device=batch.ids.device).split(micro_rows or len(batch)) if len(batch) else ()


def fill(batch: Batch, name: str, index: Tensor, part: Tensor) -> None:
    """Put `part`, of the rows `index` and perhaps fewer columns, in the field `name`."""
    if vars(batch)[name] is None:
        setattr(batch, name, part.new_zeros(batch.ids.shape))
    vars(batch)[name][index, : part.shape[1]] = part
