"""DAPO: GRPO for long runs, by clip-higher, token means, batches refilled until no group is flat, and a soft limit of length."""

import torch
from torch import Tensor

from ragen_agent.algos import credit
from ragen_agent.algos.grpo import GRPO
from ragen_agent.batch import Batch


class DAPO(GRPO):
    """GRPO with four changes (Yu et al. 2025, arXiv 2503.14476): A = (R' - mean_group) / (std_group + 1e-6).

    R' = R + the sum over replies of min(0, max(-1, (overlong_length - overlong_cache - length) / overlong_cache)), a reply being the
    tokens sampled in one turn. Clip 0.2 below and 0.28 above, a mean over tokens, no KL, flat groups played again (`refill`).
    """

    BOUNDS = {**GRPO.BOUNDS, "overlong_length": "above 0", "overlong_cache": "above 0"}
    refill = 10  # times that a round may be played again to replace flat groups: the paper's dynamic sampling

    aggregation: str = "token-mean"
    """How token losses become one; a long episode weighs as its tokens do."""
    clip_high: float = 0.28
    """A token with a positive advantage stops training when its ratio is over 1 + clip_high: clip-higher."""
    overlong_length: float | None = None
    """The longest reply in tokens: it costs 1, as do longer ones; None: length costs nothing. Needs overlong_cache."""
    overlong_cache: float | None = None
    """How many tokens before overlong_length a reply begins to cost."""

    def agree(self) -> None:
        """Also the two settings of the length: both or neither, and the cache no longer than the length."""
        super().agree()
        length, cache = self.overlong_length, self.overlong_cache
        if (length is None) != (cache is None):
            raise ValueError("DAPO needs overlong_length and overlong_cache together")
        if length is not None and cache is not None and cache > length:
            raise ValueError(f"overlong_cache {cache} is above overlong_length {length}")

    def scores(self, batch: Batch) -> Tensor:
        """The returns (E,) with the punishments of length."""
        score = super().scores(batch)
        if self.overlong_length is None or self.overlong_cache is None:
            return score
        one = torch.ones_like(batch.reward)
        length, there = credit.per_turn(one, batch.sampled, batch.episode, batch.turn, len(score))
        cost = torch.where(there, credit.overlong(length, self.overlong_length, self.overlong_cache), 0.0)
        return score + cost.sum(1)
