"""Other ratios, other clips: GSPO weighs and clips whole episodes, CISPO caps the weight and lets every token's gradient through."""

import torch
from torch import Tensor

from ragen_agent.algos import functional as F
from ragen_agent.algos.grpo import GRPO
from ragen_agent.algos.starpo import written
from ragen_agent.batch import Batch
from ragen_agent.model import Scores


class GSPO(GRPO):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071): GRPO with the ratio of the whole episode.

    s = exp(mean over the episode's sampled tokens of log(new / old)), clipped to [1 - 3e-4, 1 + 4e-4]; loss -min(s A, clip(s) A).
    """

    ratio: str = "sequence"
    """What is clipped: the geometric mean of the token ratios of an episode."""
    clip_low: float = 3e-4
    """An episode with a negative advantage stops training when its ratio is under 1 - clip_low."""
    clip_high: float = 4e-4
    """An episode with a positive advantage stops training when its ratio is over 1 + clip_high."""


class GSPOToken(GSPO):
    """GSPO-token (arXiv 2507.18071): s_t = sg(s) new_t / sg(new_t), so that advantages may differ from token to token.

    With GRPO's advantages, equal within an episode, loss and gradient are those of GSPO: a base for credit of your own.
    """

    ratio: str = "sequence-token"
    """What is clipped: the episode's ratio, its gradient flowing token by token."""


class CISPO(GRPO):
    """Clipped importance-sampling weights (MiniMax-M1 2025, arXiv 2506.13585): loss -sg(clip(r, 1 - low, 1 + high)) A log(new).

    No token is ever cut off: a large ratio is capped as a weight and its gradient flows on. The paper tunes only the upper bound and
    does not tell it; a cap of 5 is what ScaleRL (arXiv 2510.13786) settles on. With the default bounds
    `clip_fraction` is the share of tokens with a positive advantage whose weight is capped.
    """

    aggregation: str = "token-mean"
    """How token losses become one."""
    clip_low: float = 1.0
    """A weight is at least 1 - clip_low; 1: no lower bound."""
    clip_high: float = 4.0
    """A weight is at most 1 + clip_high."""

    def surrogate(self, new: Scores, batch: Batch) -> Tensor:
        """-w A log(new) per token (B, T), the weight w without gradient."""
        old, advantage, mask = written(batch, "old"), written(batch, "advantage"), batch.sampled
        weight = F.log_ratio(new.logprob.detach(), old, mask).exp().clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * torch.where(mask, advantage, 0.0) * torch.where(mask, new.logprob, 0.0)
