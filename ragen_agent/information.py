"""I(X;Z): how much a model's first reply tells of the words it answers, by scoring every reply under every prompt (RAGEN-2, 2604.06268)."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ragen_agent.model import score
from ragen_agent.prompts import UNTHINK
from ragen_agent.types import Trajectory

Part = Literal["reply", "thought"]
Decode = Callable[[list[int]], str]
TIE = 1e-4  # nats; log-probabilities of long replies in fp32 that differ by less are equal
TOPS = (1, 2, 4, 8)
RESAMPLES = 1000


@dataclass(frozen=True)
class Pairs:
    """What is measured: N prompts, no two of the same tokens, and n replies to them."""

    prompts: list[list[int]]
    replies: list[list[int]]
    own: list[int]  # reply -> the prompt that it answered
    left_out: int = 0  # replies that could not be chosen: empty, without a thought, or too long for the context under another prompt

    @property
    def sequences(self) -> int:
        """The cost: how many sequences are scored."""
        return len(self.prompts) * len(self.replies)


@dataclass(frozen=True)
class Information:
    """In nats, of whole sequences; `_token`: the same sums over all replies divided by the number of their tokens."""

    mi: float  # I(X;Z) = h - h_given
    low: float  # its bootstrap interval, 95 %
    high: float
    bound: float  # log N: no estimate is above it
    h: float  # H(Z)
    h_given: float  # H(Z|X)
    mi_token: float
    h_token: float
    h_given_token: float
    z: float  # RAGEN-2's mi_zscore: mi / (the standard deviation of the log-marginals + 1e-3)
    retrieval: dict[int, float]  # k -> the share of replies whose own prompt is among the k likeliest; ties share
    chance: dict[int, float]  # the same of guesses: k / N
    prompts: int  # N
    replies: int
    sequences: int  # scored
    left_out: int

    def text(self) -> str:
        """One line for a person."""
        return (
            f"I(X;Z) {self.mi:.3f} nats ({self.low:.3f} to {self.high:.3f}) of at most {self.bound:.3f}; H(Z) {self.h:.2f}, "
            f"H(Z|X) {self.h_given:.2f}; own prompt found {self.retrieval[1]:.0%} (chance {self.chance[1]:.0%}); "
            f"{self.replies} replies under {self.prompts} prompts, {self.sequences} sequences scored"
        )


def measure(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    part: Part = "reply",
    decode: Decode | None = None,
    prompts: int = 16,
    replies: int = 32,
    seed: int = 0,
    temperature: float = 1.0,
    micro_tokens: int = 4096,
    context: int | None = None,
) -> Information:
    """The mutual information of first prompt and first reply; at most `prompts * replies` sequences are scored.

    X is uniform over the chosen prompts. Z is the whole reply, or with `part="thought"` its beginning up to the end of the think block
    (then `decode` turns ids into text). `temperature` should be that of the sampler. `seed` decides the choice and the bootstrap; no global
    random state is read or written. Raises `ValueError` where there are fewer than two different prompts.
    """
    rng = np.random.default_rng(seed)
    pairs = choose(trajectories, rng, part, decode, prompts, replies, context)
    return information(cross(model, pairs, temperature, micro_tokens), pairs, rng)


def choose(
    trajectories: Sequence[Trajectory],
    rng: np.random.Generator,
    part: Part = "reply",
    decode: Decode | None = None,
    prompts: int = 16,
    replies: int = 32,
    context: int | None = None,
) -> Pairs:
    """At most `prompts` different prompts, chosen evenly, and as many replies to each as `replies` allows (at least one), the same number.

    Groups whose prompts have the same tokens are one prompt. The number is that of the prompt with the fewest, so that all weigh the same.
    """
    if prompts < 2 or replies < 2:
        raise ValueError(f"needs at least 2 prompts and 2 replies, not {prompts} and {replies}")
    said: dict[tuple[int, ...], list[list[int]]] = {}
    first = [t.turns[0].reply for t in trajectories if t.turns]
    widest = max((len(reply.prompt_ids) for reply in first), default=0)
    seen = 0
    for reply in first:
        z = spoken(reply.ids, part, decode)
        if z and reply.prompt_ids and (context is None or widest + len(z) <= context):
            said.setdefault(tuple(reply.prompt_ids), []).append(z)
            seen += 1
    if len(said) < 2:
        raise ValueError(f"I(X;Z) needs {part} tokens after two different prompts or more; of {len(trajectories)} episodes, {seen} fit")
    names = list(said)
    chosen = [names[i] for i in sorted(rng.choice(len(names), min(prompts, replies, len(names)), replace=False))]
    each = max(1, min(replies // len(chosen), *(len(said[name]) for name in chosen)))
    picked = [(j, said[name][i]) for j, name in enumerate(chosen) for i in sorted(rng.choice(len(said[name]), each, replace=False))]
    return Pairs([list(name) for name in chosen], [z for _, z in picked], [j for j, _ in picked], len(first) - seen)


def spoken(ids: Sequence[int], part: Part, decode: Decode | None = None) -> list[int]:
    """The tokens of a reply that count as Z: all of them, or those up to the one that completes `</think>`; [] where there is none."""
    if part not in get_args(Part):
        raise ValueError(f"unknown part {part!r}; known: {', '.join(get_args(Part))}")
    if part == "reply":
        return list(ids)
    if decode is None:
        raise ValueError("the thought's tokens are found in the text: give decode, ids -> text")
    end = bisect_left(range(len(ids) + 1), True, key=lambda n: UNTHINK in decode(list(ids[:n])))
    return list(ids[:end]) if end <= len(ids) else []


@torch.no_grad()
def cross(model: nn.Module, pairs: Pairs, temperature: float = 1.0, micro_tokens: int = 4096) -> NDArray[np.float64]:
    """(n, N): the log-probability of reply i after prompt j, summed over its tokens, by teacher forcing.

    `micro_tokens` bounds a forward pass, padding included (but for one row that is longer); the numbers do not depend on it.
    """
    device = next(model.parameters()).device
    cells = [(i, j) for i in range(len(pairs.replies)) for j in range(len(pairs.prompts))]
    cells.sort(key=lambda cell: len(pairs.replies[cell[0]]) + len(pairs.prompts[cell[1]]))
    found = np.zeros((len(pairs.replies), len(pairs.prompts)))
    training = model.training
    model.eval()  # dropout would make it another model
    while cells:
        width = len(pairs.replies[cells[-1][0]]) + len(pairs.prompts[cells[-1][1]])
        count = max(1, micro_tokens // width)
        cells, part = cells[:-count], cells[-count:]
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        real, asked = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for row, (i, j) in enumerate(part):
            both = [*pairs.prompts[j], *pairs.replies[i]]
            ids[row, : len(both)] = torch.tensor(both)
            real[row, : len(both)] = True
            asked[row, len(pairs.prompts[j]) : len(both)] = True
        scores = score(model, ids.to(device), real.to(device), temperature=temperature, sampled=asked.to(device))
        for (i, j), value in zip(part, scores.logprob.double().sum(1).tolist(), strict=True):
            found[i, j] = value
    model.train(training)
    return found


def information(logp: NDArray[np.float64], pairs: Pairs, rng: np.random.Generator, resamples: int = RESAMPLES) -> Information:
    """What the (n, N) log-probabilities say.

    The marginal is the mixture of whole sequences, log p(z) = logsumexp_j log p(z|x_j) - log N; I = mean(matched - marginal). The interval
    is the bootstrap's percentiles over prompts, each with all its replies (those of one prompt are not independent), the mixture as it is.
    """
    n, columns = logp.shape
    own = np.asarray(pairs.own)
    matched = logp[np.arange(n), own]
    if np.isnan(logp).any() or not np.isfinite(matched).all():
        raise ValueError("a reply has no probability under its own prompt, or one that is not a number")
    marginal = np.logaddexp.reduce(logp, 1) - log(columns)
    gain = matched - marginal
    tokens = np.array([len(z) for z in pairs.replies])
    low, high = np.quantile(_resampled(gain, own, rng, resamples), [0.025, 0.975])
    retrieval = {k: float(_among(logp, matched, k).mean()) for k in TOPS if k <= columns}
    return Information(
        mi=float(gain.mean()),
        low=float(low),
        high=float(high),
        bound=log(columns),
        h=-float(marginal.mean()),
        h_given=-float(matched.mean()),
        mi_token=float(gain.sum() / tokens.sum()),
        h_token=-float(marginal.sum() / tokens.sum()),
        h_given_token=-float(matched.sum() / tokens.sum()),
        z=float(gain.mean() / (marginal.std(ddof=1) + 1e-3)) if n > 1 else 0.0,
        retrieval=retrieval,
        chance={k: k / columns for k in retrieval},
        prompts=columns,
        replies=n,
        sequences=pairs.sequences,
        left_out=pairs.left_out,
    )


def _resampled(gain: NDArray, own: NDArray, rng: np.random.Generator, resamples: int) -> NDArray:
    """(resamples,) means over prompts drawn with replacement, with all the replies of each."""
    names, place = np.unique(own, return_inverse=True)
    total, count = np.bincount(place, gain), np.bincount(place)
    drawn = rng.integers(len(names), size=(resamples, len(names)))
    return total[drawn].sum(1) / count[drawn].sum(1)


def _among(logp: NDArray, matched: NDArray, k: int) -> NDArray:
    """(n,): the chance that a reply's own prompt is among the `k` likeliest when equals are put in a random order."""
    better = (logp > matched[:, None] + TIE).sum(1)
    equal = (logp >= matched[:, None] - TIE).sum(1) - better
    return np.clip((k - better) / equal, 0, 1)
