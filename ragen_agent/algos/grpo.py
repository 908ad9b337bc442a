"""GRPO: an episode against the others of its group; Dr. GRPO, without the two divisions that bias it; RLOO, against the others alone."""

import torch
from torch import Tensor

from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import StarPO
from ragen_agent.batch import Batch


class GRPO(StarPO):
    """Group-relative advantages (Shao et al. 2024, arXiv 2402.03300): A = (R - mean_group) / (std_group + 1e-6), sample std.

    A group of one, or of equal scores, teaches nothing: its advantage is 0.
    """

    aggregation: str = "seq-mean-token-mean"
    """How token losses become one; GRPO averages the means of the episodes."""
    std: bool = True
    """Divide by the group's standard deviation."""

    def advantage(self, batch: Batch) -> Tensor:
        """The episode's standing in its group, on each of its tokens."""
        return F.spread(F.group_standardise(self.scores(batch), batch.group, self.std), batch.episode, batch.sampled)


class DrGRPO(GRPO):
    """GRPO "done right" (Liu et al. 2025, arXiv 2503.20783): A = R - mean_group, and an episode's loss is a sum over its tokens.

    The paper divides by a constant length: `aggregation="seq-mean-token-sum-norm"` with `horizon` set to it.
    """

    aggregation: str = "seq-mean-token-sum"
    """How token losses become one; a sum within the episode, so that length does not discount it."""
    std: bool = False
    """Divide by the group's standard deviation."""


class RLOO(StarPO):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): A = R - mean of the others of the group.

    That is n / (n - 1) times Dr. GRPO's. The whole episode is one action, so its log-probability is a sum over its tokens; the paper
    takes the KL from the reward. A group of one has no others: 0.
    """

    aggregation: str = "seq-mean-token-sum"
    """How token losses become one; the log-probability of an episode is the sum of its tokens'."""
    kl_in: str = "reward"
    """Where the KL is paid; with kl_coef the score is R - kl_coef * log(old / reference) of the whole episode, as in the paper."""

    def advantage(self, batch: Batch) -> Tensor:
        """The episode against the mean of the others, on each of its tokens."""
        score = self.scores(batch)
        gain = torch.where(F.group_std(score, batch.group) > 0, F.rloo(score, batch.group), 0.0)  # rounding noise is no preference
        return F.spread(gain, batch.episode, batch.sampled)
