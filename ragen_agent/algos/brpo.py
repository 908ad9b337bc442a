"""RAGEN's reward normalisation as optimizers: ARPO, the absolute reward; BRPO, against the batch; Normalised, the whole family."""

import torch
from torch import Tensor

from ragen_agent.algos import credit
from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import StarPO, summed
from ragen_agent.batch import Batch

ASYMMETRIC = (-1.0, 3.0)  # RAGEN's asym_clip: a rare success may count three times what a failure does
GROUPINGS = ("state", "batch", "env")
METHODS = ("identity", "mean", "mean_std", "asym_clip")


class ARPO(StarPO):
    """Absolute reward: A = R, the episode's undiscounted return (RAGEN's identity normalisation; REINFORCE without a baseline)."""

    def advantage(self, batch: Batch) -> Tensor:
        """The episode's return, on each of its tokens."""
        return F.spread(self.scores(batch), batch.episode, batch.sampled)


class BRPO(StarPO):
    """Batch-relative: A = (R - mean) / (std + 1e-6) over the episodes of the update batch, of all processes; a flat batch gives 0."""

    clamp_low: float | None = None
    """Lower bound of the advantage (RAGEN's asym_clip: -1)."""
    clamp_high: float | None = None
    """Upper bound of the advantage (RAGEN's asym_clip: 3)."""

    def advantage(self, batch: Batch) -> Tensor:
        """The episode's standing in the batch, on each of its tokens."""
        standing = F.standardise(self.scores(batch), reduce=summed)
        low, high = self.clamp_low, self.clamp_high
        standing = standing.clamp(-torch.inf if low is None else low, torch.inf if high is None else high)
        return F.spread(standing, batch.episode, batch.sampled)


class Normalised(StarPO):
    """RAGEN's reward normalisation, each of its twelve forms (arXiv 2504.20073; `grouping` x `method`), over a token-mean loss.

    With the mean and the sample std of the episodes that `grouping` puts together: identity R; mean R - mean; mean_std
    (R - mean) / (std + 1e-6); asym_clip the same, clamped to [-1, 3]. Those without spread give 0, but for identity.
    Identity is ARPO, (batch, mean_std) is BRPO, (state, mean_std) has GRPO's advantage, (state, mean) Dr. GRPO's.
    """

    CHOICES = {**StarPO.CHOICES, "grouping": GROUPINGS, "method": METHODS}

    grouping: str = "state"
    """Who is compared: state (the episodes of one level), batch (all) or env (those of one world id); the last two over all processes."""
    method: str = "asym_clip"
    """How: identity, mean, mean_std or asym_clip."""

    def advantage(self, batch: Batch) -> Tensor:
        """The episode's normalised return, on each of its tokens."""
        score = self.scores(batch)
        if self.method != "identity":
            key = {"state": batch.group, "batch": torch.zeros_like(batch.group), "env": batch.world}[self.grouping]
            reduce = F.alone if self.grouping == "state" else summed  # a group is played by one process
            score = credit.standing(score, key, std=self.method != "mean", reduce=reduce)
        if self.method == "asym_clip":
            score = score.clamp(*ASYMMETRIC)
        return F.spread(score, batch.episode, batch.sampled)
