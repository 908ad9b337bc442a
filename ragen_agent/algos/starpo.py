"""StarPO: what every optimizer of the project shares. `prepare` looks back once without gradients, `forward` gives the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ragen_agent.algos import functional as F
from ragen_agent.batch import Batch
from ragen_agent.model import Scores, score


def summed(x: Tensor) -> Tensor:
    """`x` added over all processes; in a single process, `x`."""
    if dist.is_available() and dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
    return x


@dataclass
class Totals:
    """The denominators of one optimizer step: the losses of its micro-batches, each under the same Totals, add up to the step's loss.

    With several processes they are the mean over processes, because DDP and FSDP average gradients.
    """

    tokens: Tensor  # () sampled tokens, at least 1
    episodes: Tensor  # () episodes with a sampled token, at least 1
    length: Tensor  # (E,) sampled tokens of each episode

    @classmethod
    def of(cls, batch: Batch) -> "Totals":
        """Those of all rows of `batch`; every process must call it."""
        length = torch.zeros_like(batch.group).index_add(0, batch.episode, batch.sampled.sum(1))
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        tokens, episodes = summed(torch.stack([length.sum(), (length > 0).sum()])) / world
        return cls(tokens.clamp(min=1 / world), episodes.clamp(min=1 / world), length)


def combine(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """The metrics of a step from those of its micro-batches: the sum, or the largest where the name ends in `_max`."""
    names = list(parts[0]) if parts else []
    stacked = {name: torch.stack([part[name].float() for part in parts]) for name in names}
    return {name: float(x.max() if name.endswith("_max") else x.sum()) for name, x in stacked.items()}


class StarPO(nn.Module):
    """Trajectory-level policy optimisation over multi-turn episodes (RAGEN, arXiv 2504.20073). A subclass writes `advantage`.

    The class attributes below are the settings: pass any as a keyword, override a default in a subclass, add one by annotating it.
    The parameters are the policy's (and a subclass's own); the state dict is the checkpoint. The frozen reference is in neither.
    The policy stays in eval mode: with dropout the ratio of an unchanged policy would not be 1 (gradients flow all the same).
    """

    CHOICES = {"aggregation": F.AGGREGATIONS, "kl_kind": F.KLS}  # without annotation: no setting
    KL_SETTINGS = ("kl_coef",)  # those that need a reference

    temperature: float = 1.0
    """Sampling temperature of the rollouts; policy, old and reference are all read at it. 0: greedy, untempered."""
    clip_low: float = 0.2
    """A token with a negative advantage stops training when its ratio is under 1 - clip_low."""
    clip_high: float = 0.28
    """A token with a positive advantage stops training when its ratio is over 1 + clip_high (clip-higher when above clip_low)."""
    dual_clip: float | None = None
    """Bound of the loss of a negative advantage A: -A * dual_clip."""
    kl_coef: float = 0.0
    """Weight of KL(policy || reference) in the loss; needs a reference."""
    kl_kind: str = "k3"
    """Estimator of that KL: k1, k2 or k3."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: str = "token-mean"
    """How token losses become one: token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm; a seq is an episode."""
    horizon: float = 1.0
    """The constant length that seq-mean-token-sum-norm divides by."""
    sampler_cap: float | None = None
    """Cap of the importance weight exp(old - logprob) that corrects for a sampler unlike the trainer; None: no correction."""

    def __init__(self, policy: nn.Module, *, reference: nn.Module | None = None, **settings: Any) -> None:
        """Hold `policy` (any model that `score` reads). An unknown setting or choice is a ValueError that lists the known ones."""
        super().__init__()
        for name, value in settings.items():
            setattr(self, name, self.checked(name, value))
        if self.uses_reference and reference is None:
            raise ValueError(f"{type(self).__name__} with {' or '.join(self.KL_SETTINGS)} needs a reference")
        self.policy = policy.eval()
        self._reference: list[nn.Module] = []  # in a list, so that it is no submodule
        if reference is not None:
            self._reference.append(reference.eval().requires_grad_(False))

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting of this class and its default."""
        names = [n for base in reversed(cls.__mro__) if issubclass(base, StarPO) for n in get_annotations(base)]
        return {name: getattr(cls, name) for name in dict.fromkeys(names)}

    @classmethod
    def checked(cls, name: str, value: Any) -> Any:
        """`value` where it can be the setting `name`; else ValueError, naming what can."""
        known = cls.settings()
        if name not in known:
            raise ValueError(f"unknown setting {name!r} of {cls.__name__}; known: {', '.join(known)}")
        if name in cls.CHOICES and value not in cls.CHOICES[name]:
            raise ValueError(f"unknown {name} {value!r}; known: {', '.join(cls.CHOICES[name])}")
        default = known[name]
        kind = type(default) if isinstance(default, bool | str) else float
        sound = isinstance(value, int | float) and not isinstance(value, bool) if kind is float else isinstance(value, kind)
        if not (sound or default is None is value):
            raise ValueError(f"{name} of {cls.__name__} must be a {kind.__name__}{' or None' if default is None else ''}, not {value!r}")
        return value

    @classmethod
    def wants_reference(cls, **settings: Any) -> bool:
        """Whether an optimizer with these settings reads a reference model."""
        return any({**cls.settings(), **settings}[name] for name in cls.KL_SETTINGS)

    @property
    def uses_reference(self) -> bool:
        """Whether `prepare` reads the reference model."""
        return any(vars(self).get(name, self.settings()[name]) for name in self.KL_SETTINGS)

    def train(self, mode: bool = True) -> "StarPO":
        """As in torch, but the policy stays in eval mode."""
        super().train(mode)
        self.policy.eval()
        return self

    # ---- what a subclass may write ----

    def advantage(self, batch: Batch) -> Tensor:
        """How much better than expected each sampled token was: (B, T), of the whole update batch, without gradients."""
        raise NotImplementedError(f"{type(self).__name__} must write advantage(batch) -> (B, T)")

    def see(self, batch: Batch) -> Scores:
        """The policy's view of the tokens; override to ask for hidden states too."""
        return score(self.policy, batch.ids, batch.real, self.temperature, sampled=batch.sampled)

    def value(self, scores: Scores) -> Tensor | None:
        """The critic's value of the state before each token (B, T); None without a critic."""
        return None

    def surrogate(self, new: Scores, batch: Batch) -> Tensor:
        """The policy-gradient loss per token (B, T)."""
        old, advantage, mask = written(batch, "old"), written(batch, "advantage"), batch.sampled
        ratio = F.log_ratio(new.logprob, old, mask).exp()
        loss = F.clipped(ratio, torch.where(mask, advantage, 0.0), self.clip_low, self.clip_high, self.dual_clip)
        if self.sampler_cap is None:
            return loss
        return loss * F.log_ratio(old, batch.logprob, mask).exp().clamp(max=self.sampler_cap)

    def extra(self, new: Scores, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        """Further terms: name -> (weight in the loss, value per token (B, T)). Each is logged as a token mean, without its weight."""
        terms = {"entropy": (-self.entropy_coef, new.entropy)}
        if self.kl_coef:
            ref = torch.where(batch.sampled, written(batch, "ref"), 0.0)
            terms["kl"] = (self.kl_coef, F.kl(new.logprob, ref, self.kl_kind))
        return terms

    # ---- what train calls ----

    @torch.no_grad()
    def prepare(self, batch: Batch, micro_rows: int | None = None) -> dict[str, float]:
        """Write old, ref, value, advantage and target of the whole update batch, `micro_rows` rows at a time; return its metrics.

        ValueError where an episode's score is not finite.
        """
        if not batch.score.isfinite().all():
            raise ValueError(f"episodes {(~batch.score.isfinite()).nonzero().flatten().tolist()} have a score that is not finite")
        batch.old = batch.ref = batch.value = batch.advantage = batch.target = None
        for index in torch.arange(len(batch), device=batch.ids.device).split(micro_rows or max(1, len(batch))):
            part = batch.rows(index)
            scores = self.see(part)
            _write(batch, "old", index, scores.logprob)
            if (value := self.value(scores)) is not None:
                _write(batch, "value", index, torch.where(part.sampled, value, 0.0))
            if self.uses_reference:
                ref = score(self._reference[0], part.ids, part.real, self.temperature, sampled=part.sampled)
                _write(batch, "ref", index, ref.logprob)
        batch.advantage = torch.where(batch.sampled, self.advantage(batch), 0.0)
        return self.look_back(batch)

    def look_back(self, batch: Batch) -> dict[str, float]:
        """Metrics of a prepared batch (docs/algorithms.md)."""
        mask, old, advantage = batch.sampled, written(batch, "old"), written(batch, "advantage")
        if not mask.any():
            return {"advantage_mean": 0.0, "advantage_std": 0.0, "sampler_gap_max": 0.0}
        taken = advantage[mask]
        gap = (old - batch.logprob)[mask].abs().max()
        return {
            "advantage_mean": float(taken.mean()),
            "advantage_std": float(taken.std(correction=0)),
            "sampler_gap_max": float(gap),
        }

    def forward(self, batch: Batch, totals: Totals | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of some rows of a prepared batch, and its metrics, as their share of a step with these `totals` (default: their own).

        Over the micro-batches of a step losses and gradients add up; so do metrics, except those named `*_max` (see `combine`).
        """
        totals = Totals.of(batch) if totals is None else totals
        new, mask = self.see(batch), batch.sampled
        loss = policy_loss = self.total(self.surrogate(new, batch), batch, totals)
        metrics = {}
        for name, (weight, term) in self.extra(new, batch).items():
            metrics[name] = F.masked_mean(term.detach(), mask, totals.tokens)
            if weight:  # a term without weight must not meet the loss: 0 * inf is NaN
                loss = loss + weight * self.total(term, batch, totals)
        change = F.log_ratio(new.logprob.detach(), written(batch, "old"), mask)
        ratio = change.exp()
        bound = F.clips(ratio, written(batch, "advantage"), self.clip_low, self.clip_high)
        metrics["loss"], metrics["pg_loss"] = loss.detach(), policy_loss.detach()
        metrics["clip_fraction"] = F.masked_mean(bound.to(ratio.dtype), mask, totals.tokens)
        metrics["approx_kl"] = F.masked_mean(F.kl(torch.zeros_like(change), change), mask, totals.tokens)
        metrics["ratio_max"] = torch.where(mask, ratio, 0.0).max()
        return loss, metrics

    def total(self, term: Tensor, batch: Batch, totals: Totals) -> Tensor:
        """A term per token (B, T) as one number, by the `aggregation`."""
        length = totals.length[batch.episode]
        kind = {"tokens": totals.tokens, "sequences": totals.episodes, "length": length, "horizon": self.horizon}
        return F.aggregate(term, batch.sampled, self.aggregation, **kind)


def written(batch: Batch, name: str) -> Tensor:
    """A field that `prepare` writes; ValueError where it has not."""
    value: Tensor | None = vars(batch)[name]
    if value is None:
        raise ValueError(f"batch.{name} is not there: call prepare(batch) first")
    return value


def _write(batch: Batch, name: str, index: Tensor, part: Tensor) -> None:
    """Put `part`, of the rows `index` and perhaps fewer columns, in the field `name`."""
    if vars(batch)[name] is None:
        setattr(batch, name, part.new_zeros(batch.ids.shape))
    vars(batch)[name][index, : part.shape[1]] = part
