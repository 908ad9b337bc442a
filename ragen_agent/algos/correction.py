"""Importance correction: weights for tokens that one program sampled (vLLM, bf16) and another trains on."""

import torch
from torch import Tensor

from ragen_agent.algos import functional as F

KINDS = ("truncate", "mask")
LEVELS = ("token", "sequence")


def importance(
    old: Tensor, logprob: Tensor, mask: Tensor, episode: Tensor, count: int, kind: str, level: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """The weight of each sampled token (B, T), 0 elsewhere, and where it was corrected (bool): cut to `high`, or dropped.

    The weight is exp(old - logprob), trainer over sampler; at level "sequence" the product over the sampled tokens of the episode
    (`episode` (B,) of `count`), so all its rows must be there. "truncate" cuts it to `high` (Espeholt et al. 2018, arXiv 1802.01561);
    "mask" makes it 0 outside [low, high] (the rule of IcePop).
    """
    known = {"correction": (kind, KINDS), "correction_level": (level, LEVELS)}
    for name, (value, choices) in known.items():
        if value not in choices:
            raise ValueError(f"unknown {name} {value!r}; known: {', '.join(choices)}")
    change = F.log_ratio(old, logprob, mask)
    if level == "sequence":
        change = F.spread(F.episode_sum(change, mask, episode, count).clamp(-F.WALL, F.WALL), episode, mask)
    weight = torch.where(mask, change.exp(), 0.0)
    if kind == "truncate":
        return weight.clamp(max=high), mask & (weight > high)
    outside = mask & ((weight < low) | (weight > high))
    return torch.where(outside, 0.0, weight), outside
