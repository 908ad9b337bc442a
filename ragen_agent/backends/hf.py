"""Replies by transformers: the training model itself samples, so there are no weights to hand over."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ragen_agent.backends.base import Completion, Sampling
from ragen_agent.model import positions


class HFBackend:
    """Samples from a Hugging Face causal model, all prompts of a batch at once, with the model's own key-value cache.

    Every row draws from a random stream of its own, so a reply does not depend on the batch it was sampled in.
    """

    def __init__(self, model: nn.Module, batch_rows: int = 256, context: int | None = None):
        """`batch_rows` prompts are decoded at once; `context` is the longest row (default: what the model was built for)."""
        self.model, self.batch_rows = model, batch_rows
        built = getattr(model.config, "max_position_embeddings", None)  # pyright: ignore  # not every family has a bound
        self.context = context or built or 1 << 20

    def load(self, policy: nn.Module) -> None:
        """Sample from `policy` from now on."""
        self.model = policy

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[Sequence[int]]) -> list[Completion]:
        """See `Backend`. Prompts of like length are decoded together, so that little is padded."""
        if len(prompts) != len(seeds):
            raise ValueError(f"one seed a prompt: {len(prompts)} prompts, {len(seeds)} seeds")
        for prompt in prompts:
            if not 0 < len(prompt) < self.context:
                raise ValueError(f"a prompt has 1 to {self.context - 1} tokens here, not {len(prompt)}")
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        done: list[Completion | None] = [None] * len(prompts)
        was_training = self.model.training
        self.model.eval()
        for start in range(0, len(order), self.batch_rows):
            rows = order[start : start + self.batch_rows]
            completions = self._decode([prompts[i] for i in rows], sampling, [seeds[i] for i in rows])
            for i, completion in zip(rows, completions, strict=True):
                done[i] = completion
        self.model.train(was_training)
        return [completion for completion in done if completion is not None]

    def _decode(self, prompts: list[list[int]], sampling: Sampling, seeds: list[Sequence[int]]) -> list[Completion]:
        device = next(self.model.parameters()).device
        width = max(map(len, prompts))
        limits = [min(sampling.max_tokens, self.context - len(prompt)) for prompt in prompts]
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        place = positions(real.bool())
        chance = np.stack([np.random.default_rng(list(seed)).random(sampling.max_tokens) for seed in seeds])
        said: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        finish = ["length"] * len(prompts)
        live, cache = list(range(len(prompts))), DynamicCache(config=self.model.config)  # pyright: ignore
        memory: dict[str, Any] = {cache_name(self.model): cache, "use_cache": True}
        for step in range(max(limits)):
            logits = self.model(input_ids=ids, attention_mask=real, position_ids=place, logits_to_keep=1, **memory).logits
            token, logprob = draw(logits[:, -1], sampling, torch.from_numpy(chance[live, step]).to(device))
            keep = []
            for row, (i, t, lp) in enumerate(zip(live, token.tolist(), logprob.tolist(), strict=True)):
                said[i].append(t)
                logprobs[i].append(lp)
                if t in sampling.stop_ids:
                    finish[i] = "stop"
                elif len(said[i]) < limits[i]:
                    keep.append(row)
            if not keep:
                break
            ids, place = token[:, None], place[:, -1:] + 1
            real = torch.cat([real, torch.ones_like(ids)], 1)
            if len(keep) < len(live):  # finished rows leave the batch
                index = torch.tensor(keep, device=device)
                ids, real, place = ids[index], real[index], place[index]
                cache.batch_select_indices(index)
                live = [live[row] for row in keep]
        return [Completion(*reply) for reply in zip(said, logprobs, finish, strict=True)]


def cache_name(model: nn.Module) -> str:
    """How a model's `forward` calls its key-value cache: transformers renamed `past_key_values` to `cache` in version 5."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def draw(logits: Tensor, sampling: Sampling, chance: Tensor) -> tuple[Tensor, Tensor]:
    """(N, V) logits and (N,) uniform numbers in [0, 1) -> (N,) tokens and their log-probabilities in fp32.

    The token is the inverse of the cumulative distribution at `chance`, after top_k and top_p; the log-probability is that
    of the whole distribution at the sampling temperature (at temperature 0: at temperature 1), as `score` computes it.
    """
    logits = logits.float() / (sampling.temperature or 1.0)
    logp = logits.log_softmax(-1)
    if sampling.temperature == 0:
        token = logits.argmax(-1)
    else:
        ranked, order = logp.exp().double().sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        kept = ranked.masked_fill(before >= sampling.top_p, 0.0)
        if sampling.top_k:
            kept[:, sampling.top_k :] = 0.0
        edges = kept.cumsum(-1)
        rank = torch.searchsorted(edges, (chance[:, None] * edges[:, -1:]), right=True)
        token = order.gather(-1, rank.clamp_max((kept > 0).sum(-1, keepdim=True) - 1)).squeeze(-1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)
