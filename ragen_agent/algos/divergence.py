"""How far a policy is from its reference: estimates of the KL by token, and the coefficient that follows it."""

import torch
from torch import Tensor

from ragen_agent.algos.functional import WALL

KLS = ("k1", "k2", "k3")


def kl(logp: Tensor, ref: Tensor, kind: str = "k3") -> Tensor:
    """An estimate per token of KL(policy || reference) from log-probabilities of tokens that the policy sampled.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = logp - ref (Schulman 2020, "Approximating KL divergence"); in k3 d is at least
    -WALL, below which it is a constant.
    """
    d = logp - ref
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        d = d.clamp(min=-WALL)  # both of its parts: the second alone would push the policy away
        return (torch.expm1(-d) + d).clamp(min=0)
    raise ValueError(f"unknown kl kind {kind!r}; known: {', '.join(KLS)}")


def adaptation(kl: float, target: float, count: float, horizon: float) -> float:
    """What a KL coefficient is multiplied by: 1 + clip(kl / target - 1, -.2, .2) * min(count / horizon, 1); 1 where the KL is NaN.

    Ziegler et al. 2019 (arXiv 1909.08593).
    """
    return 1.0 if kl != kl else 1 + min(max(kl / target - 1, -0.2), 0.2) * min(count / horizon, 1.0)
