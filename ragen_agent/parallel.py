"""Many processes: the one file that knows there is more than one. Started by `accelerate launch` or `torchrun`, or not at all."""

import os
from collections.abc import Sequence
from math import sqrt
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Item = TypeVar("Item")
BUCKET = 1 << 25  # numbers reduced at once: 128 MiB in fp32


def start() -> None:
    """Join the other processes, if a launcher started several: by NCCL with a GPU each, else by gloo."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def rank() -> int:
    """Which process this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def main() -> bool:
    """Whether this is the process that writes and speaks."""
    return rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    if dist.is_initialized():
        dist.barrier()


def share(items: Sequence[Item]) -> Sequence[Item]:
    """This process's part of `items`: a contiguous block, so that the `union` of all parts is `items` again."""
    return items[rank() * len(items) // size() : (rank() + 1) * len(items) // size()]


def union(items: list[Item]) -> list[Item]:
    """The lists of all processes, one after the other by rank; every process must call."""
    if size() == 1:
        return items
    lists: list[Any] = [None] * size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def of_main(item: Item) -> Item:
    """The main process's `item`, in every process."""
    box = [item]
    if size() > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def merged(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The metrics of each optimizer step over all processes, out of this one's share of each: the mean, or the largest of `*_max`.

    Losses and metrics divide by the mean of the processes' totals (see Totals), so their mean is what one process would have told. A
    process without rows in a step gives an empty dict: nothing to add, and no largest.
    """
    if size() == 1:
        return rows
    out = []
    for step in zip(*union([rows]), strict=True):
        found: dict[str, list[float]] = {}
        for row in step:
            for name, value in row.items():
                found.setdefault(name, []).append(value)
        out.append({name: max(x) if name.endswith("_max") else sum(x) / size() for name, x in found.items()})
    return out


def pooled(row: dict[str, float], weight: float) -> dict[str, float]:
    """Metrics that each process knows of its own tokens, of all of them: means by `weight`, their number, or the largest of `*_max`.

    A `*_std` beside a `*_mean` is the standard deviation about the mean of all.
    """
    if size() == 1:
        return row
    rows = [part for part in union([(weight, row)]) if part[0]] or [(1.0, row)]
    total = sum(n for n, _ in rows)

    def mean(values: list[float]) -> float:
        return sum(n * x for (n, _), x in zip(rows, values, strict=True)) / total

    out = {}
    for name in row:
        values = [part[name] for _, part in rows]
        out[name] = max(values) if name.endswith("_max") else mean(values)
        if name.endswith("_std") and (middle := f"{name.removesuffix('_std')}_mean") in row:
            means = [part[middle] for _, part in rows]
            squares = [s * s + (m - mean(means)) ** 2 for s, m in zip(values, means, strict=True)]
            out[name] = sqrt(mean(squares))
    return out


def agree(module: nn.Module) -> None:
    """Give every process the weights of the main one."""
    if size() > 1:
        for weight in (*module.parameters(), *module.buffers()):
            dist.broadcast(weight.data, 0)


def average(weights: list[nn.Parameter]) -> None:
    """Replace the gradients of `weights` by their mean over the processes; none counts as 0, and none anywhere stays none."""
    used = torch.tensor([p.grad is not None for p in weights], dtype=torch.int32, device=weights[0].device)
    dist.all_reduce(used)
    grads = []
    for p, count in zip(weights, used.tolist(), strict=True):
        if count:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads.append(p.grad)
    for part in buckets(grads):
        flat = torch.cat([grad.flatten() for grad in part])
        dist.all_reduce(flat)
        for grad, mean in zip(part, (flat / size()).split([g.numel() for g in part]), strict=True):
            grad.copy_(mean.view_as(grad))


def buckets(tensors: Sequence[Tensor], most: int = BUCKET) -> list[list[Tensor]]:
    """Runs of tensors of one type, of at most `most` numbers each (or one tensor)."""
    parts: list[list[Tensor]] = []
    for x in tensors:
        if not parts or parts[-1][0].dtype != x.dtype or sum(y.numel() for y in parts[-1]) + x.numel() > most:
            parts.append([])
        parts[-1].append(x)
    return parts


def gathered(x: Any) -> Any:
    """A sharded tensor as a whole one; anything else as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that all have whole, laid out as `like`; a tensor of another shape stays whole."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None)
