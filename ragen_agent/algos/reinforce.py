"""REINFORCE and its stabilisers: REINFORCE++ whitens over the batch's tokens, its group-baseline form too, ReBN over the batch's turns."""

from torch import Tensor

from ragen_agent.algos import credit
from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import StarPO, summed
from ragen_agent.batch import Batch


class ReinforcePP(StarPO):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): A_t = whiten(sum over sampled tokens s >= t of gamma^(s - t) r_s).

    The reward r_s holds what its turn paid, on its last token, less kl_coef * log(old / reference) of token s. Whitening
    is over the sampled tokens of the batch, of all processes. PPO's clip; the paper has it symmetric, 0.2.
    """

    BOUNDS = {**StarPO.BOUNDS, "gamma": "from 0 to 1"}

    clip_high: float = 0.2
    """A token with a positive advantage stops training when its ratio is over 1 + clip_high."""
    kl_in: str = "reward"
    """Where the KL is paid: in the reward of each token, as in the paper."""
    gamma: float = 1.0
    """Discount from one sampled token to the next."""

    def advantage(self, batch: Batch) -> Tensor:
        """The whitened return from each token on."""
        gain = credit.token_returns(self.rewards(batch), batch.sampled, batch.episode, batch.turn, self.gamma)
        return F.standardise(gain, batch.sampled, reduce=summed)


class ReinforcePPBaseline(StarPO):
    """REINFORCE++ with a group baseline (arXiv 2501.03262): A = whiten(R - mean_group), the std being the batch's, not the group's.

    Whitening is over the sampled tokens of the batch, of all processes; it moves flat groups off 0 where episodes differ in length. The
    KL is a loss of its own, by k2, whose gradient is that of the KL.
    """

    clip_high: float = 0.2
    """A token with a positive advantage stops training when its ratio is over 1 + clip_high."""
    kl_kind: str | None = "k2"
    """Estimator of the KL."""

    def advantage(self, batch: Batch) -> Tensor:
        """The whitened distance from the mean of the group."""
        centred = F.group_standardise(self.scores(batch), batch.group, std=False)
        return F.standardise(F.spread(centred, batch.episode, batch.sampled), batch.sampled, reduce=summed)


class ReBN(StarPO):
    """REINFORCE with return batch normalisation (GEM, Liu et al. 2025, arXiv 2510.01051): A_k = (G_k - mean) / (std + 1e-6).

    G_k = sum over turns j >= k of gamma^(j - k) r_j; mean and sample std are over all turns of the batch, of all processes, each
    turn counting once, however long its reply. No groups are needed.
    """

    BOUNDS = {**StarPO.BOUNDS, "gamma": "from 0 to 1"}

    gamma: float = 0.9
    """Discount from one turn to the next; below 1 an early success is worth more."""

    def advantage(self, batch: Batch) -> Tensor:
        """The standing of the turn's return among all turns, on the turn's tokens."""
        paid, there = credit.per_turn(self.rewards(batch), batch.sampled, batch.episode, batch.turn, len(batch.group))
        gain = F.standardise(credit.discounted(paid, self.gamma), there, reduce=summed)
        return credit.on_tokens(gain, batch.sampled, batch.episode, batch.turn)
