"""One round's learning: which episodes train, cut into minibatches and micro-batches, and the optimizer's steps."""

from dataclasses import dataclass

import torch
from torch import nn

from ragen_agent.algos import find
from ragen_agent.algos.starpo import StarPO, Totals, combine
from ragen_agent.batch import Batch, collate
from ragen_agent.filters import STRATEGIES, uncertain
from ragen_agent.pretrained import Pretrained, load
from ragen_agent.settings import Play, at_least_one, pairs
from ragen_agent.types import Trajectory
from ragen_agent.updates import micro_batches


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
    """How `keep` chooses: top_k (a share of the groups), top_p (a share of the spread), softmax, or min_p."""
    epochs: int = 1
    """How often a round's episodes are gone through."""
    minibatch: int = 32
    """Episodes per optimizer step; 0: all at once."""
    lr: float = 3e-4
    """Learning rate of AdamW. A large pretrained model wants 1e-6 to 1e-5."""
    weight_decay: float = 0.0
    """AdamW's."""
    grad_clip: float = 1.0
    """The gradient's norm is cut to this."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts, and of the trainer's log-probabilities."""

    def check_learning(self) -> None:
        """Raise `ValueError` for settings that cannot be."""
        at_least_one(self, "epochs")

        if not 0 < self.keep <= 1:
            raise ValueError(f"--keep is above 0 and at most 1, not {self.keep}")
        if self.filter not in STRATEGIES:
            raise ValueError(f"unknown filter {self.filter!r}; known: {', '.join(STRATEGIES)}")
        if "temperature" in pairs(self.algo_args):
            raise ValueError("give --temperature: sampler and trainer must have the same")


def algorithm(config: Learn, pretrained: Pretrained) -> StarPO:
    """The optimizer around the policy, with a frozen copy of the model where its KL term needs one."""
    chosen = find(config.algo)
    settings = {"temperature": config.temperature, **pairs(config.algo_args)}
    device = str(next(pretrained.model.parameters()).device)
    reference = load(config.model, device, config.dtype).model if chosen.wants_reference(**settings) else None
    return chosen(pretrained.model, reference=reference, **settings)


def learn(config: Learn, algo: StarPO, optimizer: torch.optim.Optimizer, played: list[Trajectory], step: int) -> dict[str, float]:
    """One round's updates; returns their metrics, averaged over the optimizer steps (maxima: the largest)."""
    chosen, told = keep_uncertain(config, played)
    if not chosen:
        return told
    batch = collate(chosen).to(next(algo.parameters()).device)
    looked = algo.prepare(batch, max(1, config.micro_tokens // batch.ids.shape[1]))
    shuffle = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    rows: list[dict[str, float]] = []
    for _ in range(config.epochs):
        for part in minibatches(batch, config.minibatch, shuffle):
            totals = Totals.of(part)
            metrics = []
            for index in micro_batches(part, config.micro_tokens):
                loss, parts = algo(part.rows(index.to(part.ids.device)), totals)
                loss.backward()
                metrics.append(parts)
            norm = nn.utils.clip_grad_norm_(algo.parameters(), config.grad_clip)
            if not norm.isfinite():
                raise ValueError(f"round {step}: the gradient is not finite; a smaller --lr or --grad-clip may help")
            optimizer.step()
            optimizer.zero_grad()
            rows.append({**combine(metrics), "grad_norm": float(norm)})
    means = {k: (max if k.endswith("_max") else lambda v: sum(v) / len(v))([row[k] for row in rows]) for k in rows[0]}
    return {**told, **looked, **means, "updates": len(rows)}


def keep_uncertain(config: Learn, played: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
    """The episodes that train: those of the groups whose raw returns differ most, as StarPO-S filters; never one without a token."""
    spoken = [t for t in played if any(turn.reply.ids for turn in t.turns)]
    if config.keep >= 1 or not spoken:
        return spoken, {"kept": len(spoken) / len(played)}
    kept = uncertain([t.reward for t in spoken], [t.level for t in spoken], config.keep, config.filter)
    told = {"kept": sum(kept.mask) / len(played), "kept_groups": kept.groups, "broken_groups": kept.broken}
    return [t for t, keep in zip(spoken, kept.mask, strict=True) if keep], told


def minibatches(batch: Batch, episodes: int, shuffle: torch.Generator) -> list[Batch]:
    """`batch` cut into shuffled parts of `episodes` whole episodes each, as equal as can be; 0: one part."""
    count = int(batch.episode.max()) + 1
    order = torch.randperm(count, generator=shuffle).to(batch.episode.device)
    parts = order.tensor_split(max(1, round(count / episodes))) if episodes else (order,)
    return [batch.rows(torch.isin(batch.episode, part).nonzero().flatten()) for part in parts if len(part)]
