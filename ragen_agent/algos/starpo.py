"""StarPO: what every optimizer of the project shares. `prepare` looks back once without gradients, `forward` gives the loss."""

from typing import Any

import torch
from torch import Tensor, nn

from ragen_agent.algos import functional as F
from ragen_agent.algos.correction import importance
from ragen_agent.algos.divergence import adaptation, kl
from ragen_agent.algos.ratio import acting, log_ratio
from ragen_agent.algos.settings import Settings
from ragen_agent.algos.totals import Totals, combine, cuts, fill, largest, lengths, summed, written
from ragen_agent.batch import Batch
from ragen_agent.model import Scores, score

__all__ = ["StarPO", "Totals", "combine", "largest", "summed", "written"]


class StarPO(Settings, nn.Module):
    """Trajectory-level policy optimisation over multi-turn episodes (RAGEN, arXiv 2504.20073). A subclass writes `advantage`.

    The annotated class attributes are the settings (see `Settings`): pass any as a keyword, override or add them in a subclass.
    The parameters are the policy's (and a subclass's own); the state dict is the checkpoint. The frozen reference is in neither.
    The policy stays in eval mode: with dropout the ratio of an unchanged policy would not be 1 (gradients flow all the same).
    """

    def __init__(self, policy: nn.Module, *, reference: nn.Module | None = None, **settings: Any) -> None:
        """Hold `policy` (any model that `score` reads). An unknown setting or choice is a ValueError that lists the known ones."""
        super().__init__()
        for name, value in settings.items():
            setattr(self, name, self.checked(name, value))
        self.agree()
        if self.uses_reference and reference is None:
            raise ValueError(f"{type(self).__name__} with kl_coef needs a reference")
        self.policy = policy.eval()
        self._reference: list[nn.Module] = []  # in a list, so that it is no submodule
        if reference is not None:
            self._reference.append(reference.eval().requires_grad_(False))
        self.kl_weight: Tensor | None  # () the coefficient of the KL, where it adapts
        self.register_buffer("kl_weight", None if self.kl_target is None else torch.tensor(float(self.kl_coef)))

    @property
    def uses_reference(self) -> bool:
        """Whether `prepare` reads the reference model."""
        return bool(self.kl_coef)

    @property
    def per_turn(self) -> tuple[str, ...]:
        """The terms of `extra` that stand on a turn's first token alone and are means over turns, whatever the `aggregation`."""
        return ()

    def parameter_groups(self, lr: float, critic_lr: float | None = None) -> list[dict[str, Any]]:
        """What trains, as a torch optimizer takes it: the policy at `lr`, a critic at `critic_lr` (None: at `lr`)."""
        rates = {"policy": lr, "critic": lr if critic_lr is None else critic_lr}
        return [{"params": weights, "lr": rates.get(part, lr)} for part, weights in self.trained().items()]

    def trained(self) -> dict[str, list[nn.Parameter]]:
        """What trains, by part: "policy", and a subclass's own, such as "critic". The gradient of each is cut to the norm on its own."""
        return {"policy": [p for p in self.policy.parameters() if p.requires_grad]}

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
        return self.read(self.policy, batch)

    def value(self, scores: Scores) -> Tensor | None:
        """The critic's value of the state before each token (B, T); None without a critic."""
        return None

    def surrogate(self, new: Scores, batch: Batch) -> Tensor:
        """The policy-gradient loss per token (B, T)."""
        old, advantage, mask = written(batch, "old"), written(batch, "advantage"), batch.sampled
        ratio = F.log_ratio(new.logprob, old, mask).exp()
        return F.clipped(ratio, torch.where(mask, advantage, 0.0), self.clip_low, self.clip_high, self.dual_clip)

    def extra(self, new: Scores, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        """Further terms: name -> (weight in the loss, value per token (B, T)). Each is logged as a token mean, without its weight."""
        terms = {"entropy": (-self.entropy_coef, new.entropy)}
        if self.kl_coef and self.kl_in == "loss":
            ref = torch.where(batch.sampled, written(batch, "ref"), 0.0)
            terms["kl"] = (self.kl_now, kl(new.logprob, ref, self.kl_estimator))
        return terms

    # ---- what a subclass may read ----

    def read(self, model: nn.Module, batch: Batch, hidden: bool = False) -> Scores:
        """A model's view of the tokens at the temperature of play."""
        return score(model, batch.ids, batch.real, self.temperature, sampled=batch.sampled, hidden=hidden)

    def rewards(self, batch: Batch) -> Tensor:
        """(B, T) what was paid on each token, less the KL to the reference where that is paid in the reward."""
        if not (self.kl_coef and self.kl_in == "reward"):
            return batch.reward
        return batch.reward - self.kl_now * self.distance(batch)

    def scores(self, batch: Batch) -> Tensor:
        """(E,) what each episode was paid, less the same KL on all its sampled tokens."""
        if not (self.kl_coef and self.kl_in == "reward"):
            return batch.score
        paid = F.episode_sum(self.distance(batch), batch.sampled, batch.episode, len(batch.group))
        return batch.score - self.kl_now * paid

    def distance(self, batch: Batch) -> Tensor:
        """(B, T) an estimate of KL(old || reference) on each sampled token, 0 elsewhere."""
        old, ref = (torch.where(batch.sampled, written(batch, name), 0.0) for name in ("old", "ref"))
        return kl(old, ref, self.kl_estimator)  # 0 where both are

    @property
    def kl_now(self) -> float:
        """The coefficient of the KL as it is now."""
        return self.kl_coef if self.kl_weight is None else float(self.kl_weight)

    @property
    def kl_estimator(self) -> str:
        """The estimator in use. In a reward only k1 has the gradient of the KL; in a loss k1's averages to nothing."""
        return self.kl_kind or ("k3" if self.kl_in == "loss" else "k1")

    # ---- what train calls ----

    @torch.no_grad()
    def prepare(self, batch: Batch, micro_rows: int | None = None, scale: float = 1.0) -> dict[str, float]:
        """Write old, ref, value, advantage, target and weight of the whole update batch, `micro_rows` rows at a time; return its metrics.

        Advantages are multiplied by `scale` after all else. ValueError where an episode's score is not finite.
        """
        if not batch.score.isfinite().all():
            raise ValueError(f"episodes {(~batch.score.isfinite()).nonzero().flatten().tolist()} have a score that is not finite")
        batch.old = batch.ref = batch.value = batch.advantage = batch.target = batch.weight = None
        if not len(batch):  # a process whose groups were all dropped: no model reads nothing, but all count together
            batch.old, batch.ref, batch.value = (torch.zeros_like(batch.reward) for _ in range(3))
        for index in cuts(batch, micro_rows):
            part = batch.rows(index)
            scores = self.see(part)
            fill(batch, "old", index, scores.logprob)
            if (value := self.value(scores)) is not None:
                fill(batch, "value", index, torch.where(part.sampled | part.ahead, value, 0.0))
            if self.uses_reference:
                fill(batch, "ref", index, self.read(self._reference[0], part).logprob)
        advantage = torch.where(batch.sampled, self.advantage(batch), 0.0)
        if self.reweight:
            std = F.group_std(self.scores(batch), batch.group)
            most = largest(std.max() if len(std) else std.sum())
            advantage = advantage * F.spread(std / (most + 1e-6), batch.episode, batch.sampled)
        if self.ratio == "sequence":  # one ratio, one advantage
            total = F.episode_sum(advantage, batch.sampled, batch.episode, len(batch.group))
            advantage = F.spread(total / lengths(batch).clamp(min=1), batch.episode, batch.sampled)
        batch.advantage = advantage * scale
        told = self.correct(batch)
        return {**self.look_back(batch), **told, **self.adapt(batch)}

    def correct(self, batch: Batch) -> dict[str, float]:
        """Write the importance weights of trainer over sampler, where they are asked for; return their metrics."""
        if self.correction is None:
            return {}
        where = (batch.sampled, batch.episode, len(batch.group))
        how = (self.correction, self.correction_level, self.correction_low, self.correction_high)
        batch.weight, cut = importance(written(batch, "old"), batch.logprob, *where, *how)
        mean, share = (float(F.masked_mean(x.float(), batch.sampled)) for x in (batch.weight, cut))
        return {"correction_mean": mean, "correction_share": share}

    def adapt(self, batch: Batch) -> dict[str, float]:
        """Measure the KL to the reference over all processes; move an adaptive coefficient, for the next loss or reward."""
        if not self.uses_reference:
            return {}
        length = lengths(batch)
        total, tokens, episodes = summed(torch.stack([self.distance(batch).sum(), length.sum(), (length > 0).sum()])).tolist()
        told = {"kl_old": total / max(1.0, tokens)}
        if self.kl_target is not None and self.kl_weight is not None:
            told |= {"kl_weight": self.kl_now}
            self.kl_weight.mul_(adaptation(told["kl_old"], self.kl_target, episodes, self.kl_horizon))
        return told

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

    @torch.no_grad()
    def totals(self, batch: Batch, micro_rows: int | None = None) -> Totals:
        """The Totals of an optimizer step on all rows of a prepared `batch`; every process must call it.

        Where the ratio is a sequence's, the policy is read once more, `micro_rows` rows at a time: rows of an episode may be in different
        micro-batches, and its ratio is of them all.
        """
        totals = Totals.of(batch)
        if self.ratio != "token":
            totals.log_ratio = torch.zeros_like(totals.length, dtype=written(batch, "old").dtype)
            for index in cuts(batch, micro_rows):
                totals.log_ratio += log_ratio(self.read(self.policy, part := batch.rows(index)).logprob, part)
        return totals

    def forward(self, batch: Batch, totals: Totals | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of some rows of a prepared batch, and its metrics, as their share of a step with these `totals` (default: their own).

        Over the micro-batches of a step losses and gradients add up; so do metrics, except those named `*_max` (see `combine`).
        """
        totals = Totals.of(batch) if totals is None else totals
        new, mask = self.see(batch), batch.sampled
        actor = acting(new, batch, totals, self.ratio)
        term = self.surrogate(actor, batch)
        if batch.weight is not None:
            term = term * torch.where(mask, batch.weight, 0.0)
        loss = policy_loss = self.total(term, batch, totals)
        metrics = {}
        for name, (weight, term) in self.extra(new, batch).items():
            turnwise = name in self.per_turn
            metrics[name] = F.masked_mean(term.detach(), mask, totals.turns if turnwise else totals.tokens)
            if weight:  # a term without weight must not meet the loss: 0 * inf is NaN
                loss = loss + weight * (F.masked_mean(term, mask, totals.turns) if turnwise else self.total(term, batch, totals))
        change = F.log_ratio(new.logprob.detach(), written(batch, "old"), mask)
        ratio = F.log_ratio(actor.logprob.detach(), written(batch, "old"), mask).exp()
        bound = F.clips(ratio, written(batch, "advantage"), self.clip_low, self.clip_high, self.dual_clip)
        metrics["loss"], metrics["pg_loss"] = loss.detach(), policy_loss.detach()
        metrics["clip_fraction"] = F.masked_mean(bound.to(ratio.dtype), mask, totals.tokens)
        metrics["approx_kl"] = F.masked_mean(kl(torch.zeros_like(change), change), mask, totals.tokens)
        metrics["ratio_max"] = torch.where(mask, ratio, 0.0).max()
        return loss, metrics

    def total(self, term: Tensor, batch: Batch, totals: Totals) -> Tensor:
        """A term per token (B, T) as one number, by the `aggregation`."""
        length = totals.length[batch.episode]
        kind = {"tokens": totals.tokens, "sequences": totals.episodes, "length": length, "horizon": self.horizon}
        return F.aggregate(term, batch.sampled, self.aggregation, **kind)
