"""What a backend is: prompts of token ids in, sampled ids with their log-probabilities out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import nn


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Every field is explicit: a model's own generation_config never has a say."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this share of the probability."""
    top_k: int = 0
    """Draw from this many most probable tokens; 0: from all."""
    max_tokens: int = 64
    """The longest reply, in tokens."""
    stop_ids: tuple[int, ...] = ()
    """A reply ends with the first of these; it is part of the reply."""

    def __post_init__(self):
        """Refuse values that mean nothing."""
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_tokens < 1:
            raise ValueError(f"needs temperature >= 0, 0 < top_p <= 1, top_k >= 0 and max_tokens >= 1: {self}")


class Completion(NamedTuple):
    """A sampled reply; `logprobs` are at the sampling temperature over the whole vocabulary (before top_p and top_k)."""

    ids: list[int]
    logprobs: list[float]
    finish: str  # "stop" or "length"


class Backend(Protocol):
    """One file a backend: see `hf.py` for the one that runs everywhere."""

    context: int
    """The longest row, prompt and reply together, in tokens."""

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[Sequence[int]]) -> list[Completion]:
        """One completion a prompt; equal `seeds` (a few integers >= 0 a prompt) draw equally whatever else is in the batch."""
        ...

    def load(self, policy: nn.Module) -> None:
        """Take over the weights of `policy` after an update."""
        ...
