"""PPO: a critic on the policy's own hidden states, and advantages per token by GAE, over turns and windows of an episode."""

from typing import Any

import torch
from torch import Tensor, nn

from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import StarPO, summed, written
from ragen_agent.batch import Batch
from ragen_agent.model import Scores, score


class PPO(StarPO):
    """Clipped policy optimisation with a learned baseline (arXiv 1707.06347, 1506.02438); RAGEN's default optimizer.

    The critic is one linear layer on the last hidden state before the token, 0 at the start. An episode of several rows is one
    sequence. Episodes cut by a limit are not bootstrapped: the return is what was paid, as in RAGEN, whose limits belong to the task.
    """

    KL_SETTINGS = ("kl_coef", "kl_reward")

    gamma: float = 1.0
    """Discount from one sampled token to the next."""
    lam: float = 1.0
    """GAE's lambda; 1: the return minus the value."""
    bi_level: bool = False
    """RAGEN's two-level GAE: `turn_gamma` between turns, `gamma` within one."""
    turn_gamma: float = 0.95
    """Discount from one turn to the next; bi_level only."""
    whiten: bool = True
    """Standardise the advantages over the sampled tokens of the update batch, of all processes."""
    value_coef: float = 0.5
    """Weight of the value loss, the mean of (V - target)^2."""
    value_clip: float | None = None
    """Let the value move at most this far from the old one before its loss stops teaching it; None: no limit."""
    detach: bool = False
    """Keep the value loss out of the policy's weights: only the critic's layer learns from it."""
    kl_reward: float = 0.0
    """Take kl_reward * k1(old, reference) from each token's reward; needs a reference."""

    def __init__(self, policy: nn.Module, *, reference: nn.Module | None = None, **settings: Any) -> None:
        """As StarPO; the critic's layer takes the width, device and (at least fp32) precision of the policy's output layer."""
        super().__init__(policy, reference=reference, **settings)
        output: Tensor = policy.get_output_embeddings().weight  # pyright: ignore  (Hugging Face's own accessor)
        wide = torch.promote_types(output.dtype, torch.float32)
        self.critic = nn.Linear(output.shape[1], 1, device=output.device, dtype=wide)
        nn.init.zeros_(self.critic.weight)
        nn.init.zeros_(self.critic.bias)

    def see(self, batch: Batch) -> Scores:
        """The policy's view of the tokens, with its hidden states."""
        return score(self.policy, batch.ids, batch.real, self.temperature, sampled=batch.sampled, hidden=True)

    def value(self, scores: Scores) -> Tensor:
        """The critic's value (B, T) of the state before each token."""
        if scores.hidden is None:
            raise ValueError("PPO needs scores with hidden states: score(..., hidden=True)")
        state = scores.hidden.detach() if self.detach else scores.hidden
        return self.critic(state.to(self.critic.weight.dtype)).squeeze(-1)

    def advantage(self, batch: Batch) -> Tensor:
        """GAE over each episode's sampled tokens, whitened; writes `batch.target`, the value plus the advantage before whitening."""
        row, column, line, place = F.pack(batch.sampled, batch.episode, batch.turn)
        shape = (len(batch.group), int(place.max()) + 1 if len(place) else 1)

        def packed(x: Tensor) -> Tensor:
            return x.new_zeros(shape).index_put((line, place), x[row, column])

        value, mask, reward = written(batch, "value"), packed(batch.sampled), batch.reward
        if self.kl_reward:
            reward = reward - self.kl_reward * F.kl(written(batch, "old"), written(batch, "ref"), "k1")
        paid, worth = packed(reward).to(value.dtype), packed(value)
        if self.bi_level:
            line_gain = F.bi_level_gae(paid, worth, mask, packed(batch.turn), self.gamma, self.lam, self.turn_gamma)
        else:
            line_gain = F.gae(paid, worth, mask, self.gamma, self.lam)
        gain = torch.zeros_like(value).index_put((row, column), line_gain[line, place])
        batch.target = torch.where(batch.sampled, gain + value, 0.0)
        return F.standardise(gain, batch.sampled, reduce=summed) if self.whiten else gain

    def extra(self, new: Scores, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        """The value loss beside the entropy and the KL."""
        mask = batch.sampled
        value, target = torch.where(mask, self.value(new), 0.0), torch.where(mask, written(batch, "target"), 0.0)
        loss = (value - target).square()
        if self.value_clip is not None:
            old = torch.where(mask, written(batch, "value"), 0.0)
            near = old + (value - old).clamp(-self.value_clip, self.value_clip)
            loss = torch.maximum(loss, (near - target).square())
        return {**super().extra(new, batch), "value_loss": (self.value_coef, loss)}

    def look_back(self, batch: Batch) -> dict[str, float]:
        """Also the share of the targets' variance that the critic explained before this update."""
        value, target = written(batch, "value")[batch.sampled], written(batch, "target")[batch.sampled]
        spread = target.var(correction=0) if len(target) else target.sum()
        explained = 1 - float((target - value).var(correction=0) / spread) if spread > F.FLAT**2 else 0.0
        return {**super().look_back(batch), "explained_variance": explained}
