"""Credit by turn without a critic: GiGPO compares turns that began in one state, MT-GRPO turns of one number."""

from torch import Tensor

from ragen_agent.algos import credit
from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import StarPO
from ragen_agent.batch import Batch


class GiGPO(StarPO):
    """Group-in-group policy optimisation (Feng et al. 2025, arXiv 2505.10978): A = A_episode + omega * A_step.

    A_episode = (R - mean) / F over the group's episodes; A_step = (G_k - mean) / F over all turns of the group that began in the same
    state, G_k = sum over j >= k of gamma^(j - k) r_j. F is the sample std + 1e-6, or 1. Alone or equal gives 0. A world tells
    its state in `info["state"]`; text is never compared.
    """

    BOUNDS = {**StarPO.BOUNDS, "omega": "at least 0", "gamma": "from 0 to 1"}

    clip_high: float = 0.2
    """A token with a positive advantage stops training when its ratio is over 1 + clip_high."""
    std: bool = True
    """Divide by the standard deviations: the paper's F_norm; False: F = 1."""
    omega: float = 1.0
    """Weight of the step advantage; 0: that of GRPO."""
    gamma: float = 0.95
    """Discount from one turn to the next."""

    def advantage(self, batch: Batch) -> Tensor:
        """The episode's standing in its group, and the turn's among those of its state; ValueError where a state is not told."""
        untold = batch.sampled & (batch.state < 0)
        if untold.any():
            names = batch.episode[untold.any(1)].unique().tolist()
            raise ValueError(f'GiGPO needs a world that tells its state in info["state"]; it is not told in turns of episodes {names}')
        where = (batch.sampled, batch.episode, batch.turn)
        paid, there = credit.per_turn(self.rewards(batch), *where, len(batch.group))
        state = credit.of_turn(batch.state, *where, (paid.shape[0], paid.shape[1]))
        step = credit.by_state(paid, there, state, self.gamma, self.std)
        whole = F.group_standardise(self.scores(batch), batch.group, self.std)
        return credit.on_tokens(whole[:, None] + self.omega * step, *where)


class MTGRPO(StarPO):
    """Multi-turn GRPO (Zeng et al. 2025, arXiv 2505.11821; there two turns, here K): credit for what a turn was paid, and for the end.

    The outcome of an episode is the reward of its last turn, O its standing (x - mean) / (std + 1e-6) in the group. Before the last
    turn A_k = S_k + lam * O, where S_k is the standing of r_k among the group's episodes that have a turn k; in the last turn A = O.
    Nothing is counted twice: the turns' rewards add up to the return. Alone or equal gives 0.
    """

    BOUNDS = {**StarPO.BOUNDS, "lam": "at least 0"}

    aggregation: str = "seq-mean-token-mean"
    """How token losses become one, as in GRPO."""
    std: bool = True
    """Divide by the standard deviations."""
    lam: float = 1.0
    """Weight of the outcome in the turns before the last."""

    def advantage(self, batch: Batch) -> Tensor:
        """The standing of turn and outcome, on the turn's tokens."""
        where = (batch.sampled, batch.episode, batch.turn)
        paid, there = credit.per_turn(self.rewards(batch), *where, len(batch.group))
        return credit.on_tokens(credit.by_turn(paid, there, batch.group, self.lam, self.std), *where)
