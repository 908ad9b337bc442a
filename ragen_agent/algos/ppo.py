"""PPO: a critic on hidden states, the policy's or its own model's, and advantages by GAE per token, turn or both."""

from typing import Any

import torch
from torch import Tensor, nn

from ragen_agent.algos import functional as F
from ragen_agent.algos.starpo import StarPO, summed, written
from ragen_agent.batch import Batch
from ragen_agent.model import Scores, score, split


class PPO(StarPO):
    """Clipped policy optimisation with a learned baseline (arXiv 1707.06347, 1506.02438); RAGEN's default optimizer.

    The critic is one linear layer, 0 at the start, on the last hidden state before the token: the policy's, or with `critic_model` that
    of a model of its own. An episode of several rows is one sequence. Unless `bootstrap`, an episode cut by a limit was paid all it gets,
    as in RAGEN, whose limits belong to the task.
    """

    CHOICES = {**StarPO.CHOICES, "credit": ("token", "bi-level", "turn")}
    BOUNDS = {
        **StarPO.BOUNDS,
        **dict.fromkeys(("gamma", "lam", "turn_gamma"), "from 0 to 1"),
        **dict.fromkeys(("value_coef", "value_clip"), "at least 0"),
    }

    gamma: float = 1.0
    """Discount from one sampled token to the next."""
    lam: float = 1.0
    """GAE's lambda; 1: the return minus the value."""
    credit: str = "token"
    """Steps of GAE: token; bi-level: RAGEN's, turns by their last tokens, then the tokens of each; turn: one value and advantage a turn."""
    turn_gamma: float = 0.95
    """Discount from one turn to the next; credit bi-level and turn."""
    bootstrap: bool = False
    """Start GAE from the value of the last observation where an episode was cut by a limit, instead of from 0."""
    whiten: bool = True
    """Standardise the advantages over the sampled tokens of the update batch, of all processes."""
    value_coef: float = 0.5
    """Weight of the value loss, the mean of (V - target)^2."""
    value_clip: float | None = None
    """Let the value move at most this far from the old one before its loss stops teaching it; None: no limit."""
    detach: bool = False
    """Keep the value loss out of the policy's weights: only the critic's layer learns from it."""
    critic_model: bool = False
    """Read values from a model of their own, the keyword `critic`, instead of from the policy."""

    def __init__(self, policy: nn.Module, *, reference: nn.Module | None = None, critic: nn.Module | None = None, **settings: Any) -> None:
        """As StarPO; `critic` is a causal model whose body is read and trained, never its output layer.

        The critic's layer takes the width, device and (at least fp32) precision of the output layer of the model it reads.
        """
        super().__init__(policy, reference=reference, **settings)
        if self.critic_model != (critic is not None):
            raise ValueError("PPO with critic_model needs critic=a causal model" if critic is None else "a critic needs critic_model=True")
        output: Tensor = (policy if critic is None else critic).get_output_embeddings().weight  # pyright: ignore  (Hugging Face's own accessor)
        wide = torch.promote_types(output.dtype, torch.float32)
        self.critic = nn.Linear(output.shape[1], 1, device=output.device, dtype=wide)
        nn.init.zeros_(self.critic.weight)
        nn.init.zeros_(self.critic.bias)
        self._judge: list[nn.Module] = []  # in a list, so that its output layer, which nothing trains, is no parameter
        if critic is not None:
            self._judge.append(critic.eval())
            self.critic_body: nn.Module = split(critic)[0]

    @classmethod
    def wants_critic(cls, **settings: Any) -> bool:
        """Whether an optimizer with these settings reads a critic model of its own."""
        return bool({**cls.settings(), **settings}["critic_model"])

    def agree(self) -> None:
        """Also: `detach` is for a critic that shares the policy's body."""
        super().agree()
        if self.detach and self.critic_model:
            raise ValueError("detach is for a critic on the policy's states; with critic_model no value loss meets the policy")

    @property
    def bootstraps(self) -> bool:
        """Whether `collate` must be told what lay ahead of the episodes that a limit cut."""
        return self.bootstrap

    @property
    def per_turn(self) -> tuple[str, ...]:
        """With credit by turn a value is learned once a turn."""
        return ("value_loss",) if self.credit == "turn" else ()

    def trained(self) -> dict[str, list[nn.Parameter]]:
        """The policy, and the critic's layer and model."""
        own = [p for name, p in self.named_parameters() if name.startswith("critic") and p.requires_grad]
        return {**super().trained(), "critic": own}

    def train(self, mode: bool = True) -> "PPO":
        """As in torch, but policy and critic model stay in eval mode."""
        super().train(mode)
        for model in self._judge:
            model.eval()
        return self

    def see(self, batch: Batch) -> Scores:
        """The policy's view of the tokens, with the hidden states that the critic reads."""
        if not self._judge:
            return self.read(self.policy, batch, hidden=True)
        states = score(self._judge[0], batch.ids, batch.real, sampled=torch.zeros_like(batch.sampled), hidden=True).hidden
        return self.read(self.policy, batch)._replace(hidden=states)

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

        value, mask, turn = written(batch, "value"), packed(batch.sampled), packed(batch.turn)
        paid, worth, ahead = packed(self.rewards(batch)).to(value.dtype), packed(value), self.ahead(batch, value)
        if self.credit == "bi-level":
            line_gain = F.bi_level_gae(paid, worth, mask, turn, self.gamma, self.lam, self.turn_gamma, ahead)
        elif self.credit == "turn":
            line_gain = F.turn_gae(paid, worth, mask, turn, self.lam, self.turn_gamma, ahead)
        else:
            line_gain = F.gae(paid, worth, mask, self.gamma, self.lam, ahead)
        gain = torch.zeros_like(value).index_put((row, column), line_gain[line, place])
        batch.target = torch.where(self.judged(batch), gain + value, 0.0)
        return F.standardise(gain, batch.sampled, reduce=summed) if self.whiten else gain

    def ahead(self, batch: Batch, value: Tensor) -> Tensor | None:
        """(E,) the value of the last observation of each episode that a limit cut, 0 for others; None unless `bootstrap`."""
        if not self.bootstrap:
            return None
        return F.episode_sum(value, batch.ahead, batch.episode, len(batch.group))

    def judged(self, batch: Batch) -> Tensor:
        """(B, T) True: a token before which the critic's value counts."""
        return F.firsts(batch.sampled, batch.turn) if self.credit == "turn" else batch.sampled

    def extra(self, new: Scores, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        """The value loss beside the entropy and the KL."""
        mask = self.judged(batch)
        value, target = torch.where(mask, self.value(new), 0.0), torch.where(mask, written(batch, "target"), 0.0)
        loss = (value - target).square()
        if self.value_clip is not None:
            old = torch.where(mask, written(batch, "value"), 0.0)
            near = old + (value - old).clamp(-self.value_clip, self.value_clip)
            loss = torch.maximum(loss, (near - target).square())
        return {**super().extra(new, batch), "value_loss": (self.value_coef, loss)}

    def look_back(self, batch: Batch) -> dict[str, float]:
        """Also the share of the targets' variance that the critic explained before this update."""
        value, target = (written(batch, name)[self.judged(batch)] for name in ("value", "target"))
        spread = target.var(correction=0) if len(target) else target.sum()
        explained = 1 - float((target - value).var(correction=0) / spread) if spread > F.FLAT**2 else 0.0
        return {**super().look_back(batch), "explained_variance": explained}
