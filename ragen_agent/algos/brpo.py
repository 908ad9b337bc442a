"""ARPO and BRPO: the two plain baselines of RAGEN, the absolute reward and the reward against the whole update batch."""

import torch
from torch import Tensor

from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import StarPO, summed
from ragen_agent.batch import Batch


class ARPO(StarPO):
    """Absolute reward: A = R, the episode's undiscounted return (RAGEN's identity normalisation; REINFORCE without a baseline)."""

    def advantage(self, batch: Batch) -> Tensor:
        """The episode's return, on each of its tokens."""
        return F.spread(batch.score, batch.episode, batch.sampled)


class BRPO(StarPO):
    """Batch-relative: A = (R - mean) / (std + 1e-6) over the episodes of the update batch, of all processes; a flat batch gives 0."""

    clamp_low: float | None = None
    """Lower bound of the advantage (RAGEN's asym_clip: -1)."""
    clamp_high: float | None = None
    """Upper bound of the advantage (RAGEN's asym_clip: 3)."""

    def advantage(self, batch: Batch) -> Tensor:
        """The episode's standing in the batch, on each of its tokens."""
        standing = F.standardise(batch.score, reduce=summed)
        low, high = self.clamp_low, self.clamp_high
        standing = standing.clamp(-torch.inf if low is None else low, torch.inf if high is None else high)
        return F.spread(standing, batch.episode, batch.sampled)
