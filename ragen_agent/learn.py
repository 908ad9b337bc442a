"""One round's learning: which episodes train, cut into minibatches and micro-batches, and the optimizer's steps."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from torch import nn

from ragen_agent import parallel
from ragen_agent.algos import StarPO, find
from ragen_agent.batch import EPISODE_FIELDS, Batch, collate
from ragen_agent.engines import Engine
from ragen_agent.filters import measures, uncertain
from ragen_agent.pretrained import Pretrained, load
from ragen_agent.settings import Play, above_zero, at_least, pairs
from ragen_agent.steps import Say, Standing, look, minibatches, silent, update
from ragen_agent.types import Reply, Trajectory, Turn
from ragen_agent.updates import optimizer_of

Contexts = Callable[[Trajectory], list[int]]
ILL = (
    "optimizer steps in a row had a loss or gradient that is not finite; the weights are those of the last good step, and so is the last "
    "checkpoint. A smaller --lr or --grad-clip may help"
)


@dataclass
class Learn(Play):
    """How a policy learns from a round's episodes; the flags of `ragen train` that say so."""

    algo: str = "DrGRPO"
    """An optimizer of ragen_agent.algos (see docs/algorithms.md), or my_file:MyPO for one of yours."""
    algo_args: tuple[str, ...] = ()
    """Settings of the optimizer as name=value, e.g. clip_high=0.2 kl_coef=0.001 gamma=0.99."""
    keep: float = 0.5
    """Train only on this share of the groups, those whose returns differ most (StarPO-S: 0.25); 1: on all."""
    filter: str = "top_k"
    """How `keep` chooses: top_k (a share of the groups), top_k_abs (a number), variance, top_p, softmax (a share of the spread), min_p."""
    filter_by: str = "std"
    """What it looks at in a group: std, mean or sum of the returns, entropy, entropy_variance, or length."""
    filter_smallest: bool = False
    """Keep the smallest instead of the largest."""
    filter_zero: bool = False
    """Keep groups where that is 0 too; with keep 1 they always are."""
    loss_scaling: str = "none"
    """Multiply the advantages by the kept share of the episodes (linear), its square root (sqrt), or nothing (none)."""
    epochs: int = 1
    """How often a round's episodes are gone through, their first log-probabilities kept: the paper's Online-k for k > 1."""
    minibatch: int = 32
    """Episodes per optimizer step, those of all processes together; 0: all at once."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW with its two moments in fp32, or in 8 bits (adamw8bit, needs bitsandbytes)."""
    lr: float = 3e-4
    """Learning rate of AdamW. A large pretrained model wants 1e-6 to 1e-5."""
    critic_lr: float | None = None
    """Learning rate of the critic, for an optimizer that has one; default: `lr`."""
    weight_decay: float = 0.0
    """AdamW's."""
    grad_clip: float = 1.0
    """The gradient's norm, over all processes, is cut to this."""
    max_skipped: int = 5
    """Stop after this many optimizer steps in a row whose loss or gradient is not finite; such a step is skipped."""
    max_empty: int = 5
    """Stop after this many rounds in a row that leave nothing to train on."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts, and of the trainer's log-probabilities."""

    def frozen(self, pretrained: Pretrained) -> nn.Module:
        """What a KL term is measured from: a copy of the model as it starts."""
        return load(self.model, str(next(pretrained.model.parameters()).device), self.dtype).model

    def check_learning(self) -> None:
        """Raise `ValueError` for settings that cannot be."""
        at_least(self, 1, "epochs", "max_skipped", "max_empty")
        at_least(self, 0, "minibatch", "lr", "critic_lr", "weight_decay", "temperature")
        above_zero(self, "grad_clip")
        if self.filter != "top_k_abs" and not 0 < self.keep <= 1:
            raise ValueError(f"--keep is above 0 and at most 1, not {self.keep}")
        chosen(self, [])  # an unknown filter, statistic or scaling
        if "temperature" in pairs(self.algo_args):
            raise ValueError("give --temperature: sampler and trainer must have the same")


def algorithm(config: Learn, pretrained: Pretrained) -> StarPO:
    """The optimizer around the policy, with a frozen copy of the model where its KL needs one, and one to judge where its critic does."""
    kind = find(config.algo)
    settings = {"temperature": config.temperature, **pairs(config.algo_args)}
    more: dict[str, Any] = {}
    if kind.wants_reference(**settings):
        more["reference"] = config.frozen(pretrained)
    if kind.wants_critic(**settings):
        more["critic"] = load(config.model, str(next(pretrained.model.parameters()).device), config.dtype).model
    return kind(pretrained.model, **more, **settings)


def optimizer(config: Learn, algo: StarPO) -> torch.optim.Optimizer:
    """Torch's optimizer of the algo's weights: the policy's at `lr`, the critic's at `critic_lr`."""
    return optimizer_of(algo.parameter_groups(config.lr, config.critic_lr), config.lr, config.weight_decay, config.optimizer)


def learn(
    config: Learn,
    algo: StarPO,
    optimizer: torch.optim.Optimizer,
    played: list[Trajectory],
    step: int,
    standing: Standing | None = None,
) -> dict[str, float]:
    """`improve`, for a caller in one process without an engine."""
    return improve(config, Engine(algo, lambda _: optimizer), played, step, standing or Standing())


def improve(
    config: Learn,
    engine: Engine,
    played: Sequence[Trajectory],
    step: int,
    standing: Standing,
    say: Say = silent,
    contexts: Contexts | None = None,
) -> dict[str, float]:
    """One round's updates from what this process `played`; every process must call it.

    Returns the metrics of all processes: means over the optimizer steps that were made, or the largest of `*_max`. `contexts` gives the
    prompt that an episode's next reply would have had, for optimizers that look ahead. `ValueError` where the run should stop:
    `max_skipped` steps or `max_empty` rounds in a row without use, or no memory for a single row. No weight moved in a skipped step.
    """
    standing.micro_tokens = standing.micro_tokens or config.micro_tokens
    kept, told, scale = chosen(config, played)
    counts = parallel.union([len(kept)])
    standing.empty = 0 if sum(counts) else standing.empty + 1
    told["empty"] = standing.empty
    if standing.empty >= config.max_empty:
        raise ValueError(f"round {step}: nothing to train on in {standing.empty} rounds in a row: in no group do the returns differ")
    if standing.empty:
        return told
    batch = batch_of(kept, engine.algo.bootstraps, contexts)
    worlds = sorted(set(parallel.union(sorted({t.env_id for t in kept}))))  # numbered alike in all processes
    batch.world = torch.tensor([worlds.index(t.env_id) for t in kept], dtype=torch.int64)
    batch = batch.to(engine.device)
    looked = look(engine, batch, scale, standing, say)
    rows: list[dict[str, float] | None] = []
    shuffle = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    for _ in range(config.epochs):
        for part in minibatches(batch, config.minibatch, shuffle, counts):
            rows.append(update(engine, part, config.grad_clip, standing, say))
            if standing.skipped >= config.max_skipped:
                raise ValueError(f"round {step}: {standing.skipped} {ILL}")
    made = parallel.merged([row for row in rows if row is not None])
    means = {k: (max if k.endswith("_max") else fmean)([row[k] for row in made]) for k in (made[0] if made else ())}
    skipped, tokens = len(rows) - len(made), min(parallel.union([standing.micro_tokens]))
    return {**told, **looked, **means, "updates": len(made), "skipped": skipped, "micro_tokens": tokens}


def chosen(config: Learn, played: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, float], float]:
    """This process's episodes that train, what the filter saw of all processes' groups, and what it scales the advantages with.

    They are those of the groups that `keep` and `filter` name; never an episode without a token, or whose return is not finite.
    `ValueError` for an unknown filter.
    """
    spoken = [t for t in played if any(turn.reply.ids for turn in t.turns)]
    seen = measures(spoken)
    kept = uncertain(
        seen.reward,
        [t.level for t in spoken],
        config.keep,
        config.filter,
        drop_flat=not config.filter_zero and not (config.keep == 1 and config.filter != "top_k_abs"),
        statistic=config.filter_by,
        direction="smallest" if config.filter_smallest else "largest",
        entropy=seen.entropy,
        length=seen.length,
        scaling=config.loss_scaling,
        gather=parallel.union,
    )
    own = [t for t, keep in zip(spoken, kept.mask, strict=True) if keep]
    share = sum(parallel.union([len(own)])) / max(1, sum(parallel.union([len(played)])))
    return own, {"kept": share, "kept_groups": kept.groups, "broken": kept.broken}, kept.scale


def batch_of(kept: Sequence[Trajectory], bootstraps: bool, contexts: Contexts | None) -> Batch:
    """The episodes that train as a Batch, with what lay ahead of those that a limit cut, if that counts; it may have no rows."""
    if not kept:
        return no_rows()
    if not bootstraps:
        return collate(kept)
    if contexts is None:
        raise ValueError("this optimizer looks ahead of episodes that a limit cut: it needs their next contexts")
    return collate(kept, [contexts(t) if t.truncated and not t.no_room else None for t in kept])


def no_rows() -> Batch:
    """The batch of a process that kept no episode while others did: it takes part in what all of them count."""
    turn = Turn(Reply("", "", [0], [0], [0.0]), "", 0.0, {})
    none = collate([Trajectory("", 0, 0, "", {}, [turn])]).rows(torch.arange(0))
    for name in EPISODE_FIELDS:
        setattr(none, name, vars(none)[name][:0])
    return none


def refilled(play: Callable[[int], list[Trajectory]], groups: int, refill: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """Play until `groups` groups have episodes that differ in their returns, `refill` times more at most (DAPO's dynamic sampling).

    `play(k)` gives this process's part of the k-th set of levels of the round, 0 being its own. Returns the episodes that may train, of
    the first `groups` such groups over all processes (or all there are), and everything that was played.
    """
    every, lively = [], []
    told: list[Hashable] = []
    for k in range(1 + refill):
        played = play(k)
        every += played
        seen = measures(played)
        mask = uncertain(seen.reward, [t.level for t in played], 1.0).mask
        live = [t for t, keep in zip(played, mask, strict=True) if keep]
        lively += live
        told += dict.fromkeys(parallel.union([t.level for t in live]))
        if len(told) >= groups:
            break
    first = set(told[:groups])
    return [t for t in lively if t.level in first], every
