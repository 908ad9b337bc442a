"""Optimizer steps that survive: what is not finite is skipped and counted, and where memory runs out less is computed at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor

from ragen_agent import parallel
from ragen_agent.algos import combine
from ragen_agent.batch import Batch
from ragen_agent.engines import Engine
from ragen_agent.updates import micro_batches

Made = TypeVar("Made")
Say = Callable[[str], None]
WORDS = ("not enough memory", "can't allocate memory")  # of torch's CPU allocators; a GPU has an error of its own


@dataclass
class Standing:
    """What learning carries from round to round; `vars` of it goes into the checkpoint."""

    skipped: int = 0  # optimizer steps skipped in a row
    empty: int = 0  # rounds in a row that left nothing to train on
    micro_tokens: int = 0  # tokens computed at once; halved where memory ran out; 0: not set yet


def silent(text: str) -> None:
    """Say nothing."""


def look(engine: Engine, batch: Batch, scale: float, standing: Standing, say: Say) -> dict[str, float]:
    """Let the optimizer look back at the round's whole batch; returns its metrics over all processes."""

    def attempt(tokens: int) -> dict[str, float]:
        return engine.prepare(batch, rows_of(batch, tokens), scale)

    return parallel.pooled(shrinking(engine, batch, standing, say, attempt), batch.tokens)


def update(engine: Engine, part: Batch, limit: float, standing: Standing, say: Say) -> dict[str, float] | None:
    """One optimizer step on a minibatch, each part's gradient cut to the norm `limit`; returns this process's share of its metrics.

    None where loss or gradient were not finite in any process: the step is skipped in all of them, and no weight has moved.
    """
    totals = shrinking(engine, part, standing, say, lambda tokens: engine.totals(part, rows_of(part, tokens)), shared=True)

    def attempt(tokens: int) -> list[dict[str, Tensor]]:
        engine.zero()
        return engine.gradients(part, [index.to(part.ids.device) for index in micro_batches(part, tokens)], totals)

    row = combine(shrinking(engine, part, standing, say, attempt))
    norms = engine.cut(limit)
    sound = all(isfinite(x) for x in (*norms.values(), row.get("loss", 0.0)))
    if not all(parallel.union([sound])):
        standing.skipped += 1
        engine.zero()
        return None
    standing.skipped = 0
    engine.step()
    engine.zero()
    return {**row, **{"grad_norm" if name == "policy" else f"{name}_grad_norm": norm for name, norm in norms.items()}}


def shrinking(engine: Engine, batch: Batch, standing: Standing, say: Say, attempt: Callable[[int], Made], shared: bool = False) -> Made:
    """`attempt(tokens)`, again with half as many tokens at once for as long as memory runs out.

    `ValueError` when it ran out for a single row, and where others wait for this process in the middle of the attempt (`shared`, or an
    engine in lockstep).
    """
    while True:
        tokens = standing.micro_tokens
        try:
            return attempt(tokens)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        lengths = batch.real.sum(1)  # out of the except clause, whose error holds on to the tensors of the attempt
        if tokens < 2 * int(lengths.min()) or len(lengths) == 1:
            raise ValueError(f"out of memory with a single row of {int(lengths.max())} tokens: {reason}")
        if parallel.size() > 1 and (shared or engine.lockstep):
            raise ValueError(f"out of memory with {tokens} tokens at once while other processes wait: give a smaller --micro-tokens")
        standing.micro_tokens = min(tokens, batch.ids.numel()) // 2
        engine.zero()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say(f"out of memory with {tokens} tokens at once: going on with {standing.micro_tokens}")


def out_of_memory(error: RuntimeError) -> bool:
    """Whether this is what torch says when memory runs out, on a GPU or a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in WORDS)


def rows_of(batch: Batch, tokens: int) -> int:
    """How many rows of `batch` are at most `tokens` tokens, padding included; at least 1."""
    return max(1, tokens // batch.ids.shape[1])


def minibatches(batch: Batch, episodes: int, shuffle: torch.Generator, counts: Sequence[int]) -> list[Batch]:
    """`batch` cut into shuffled parts of `episodes` whole episodes each, as equal as can be; 0: one part.

    `counts` are the episodes of each process: the parts are of the union, and of each this process gets the rows that it has, if any.
    """
    first, count, total = sum(counts[: parallel.rank()]), counts[parallel.rank()], sum(counts)
    order = torch.randperm(total, generator=shuffle)
    parts = order.tensor_split(max(1, round(total / episodes))) if episodes else (order,)
    own = [part[(part >= first) & (part < first + count)] - first for part in parts if len(part)]
    return [batch.rows(torch.isin(batch.episode, part.to(batch.episode.device)).nonzero().flatten()) for part in own]
