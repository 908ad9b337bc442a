"""The contenders of `speed.py update`: one batch, one model and, in a process of its own, one of several ways to make an update."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ragen_agent.algos import GRPO, Totals
from ragen_agent.batch import Batch, collate
from ragen_agent.model import checkpointing
from ragen_agent.types import Reply, Trajectory, Turn
from ragen_agent.updates import micro_batches

CLIP_LOW, CLIP_HIGH, GROUP, GRAD_CLIP = 0.2, 0.28, 4, 1.0
SHIFT = 0.2  # standard deviation of `old` around the policy's own log-probabilities: some tokens clip, and no loss is zero by symmetry
Step = Callable[[], Tensor]  # leaves the gradient of one update's loss in the parameters; returns that loss, ()


@dataclass
class Sizes:
    """What is updated: the model, the batch, and how much of it is computed at once."""

    vocab: int
    hidden: int = 256
    layers: int = 8
    episodes: int = 16
    shortest: int = 150  # tokens of an episode, prompt included
    longest: int = 500
    rows: int = 4  # rows at once of the contenders that go by rows
    micro_tokens: int = 2048  # tokens at once of the contenders that go by tokens
    threads: int = 1
    lr: float = 1e-5
    seed: int = 0


class Way(NamedTuple):
    """How a contender makes the update."""

    kind: str  # whose loss: a key of KINDS
    rows: str  # a micro-batch: "budget" (micro_tokens tokens, like lengths together), "rows" (Sizes.rows rows), "one" (one row)
    again: bool  # True: the layers are computed again in the backward pass (gradient checkpointing)
    what: str


WAYS = {
    "ours": Way("ours", "budget", False, "StarPO's loss with score(), micro-batches by token budget: as `ragen train` does"),
    "ours-rows": Way("ours", "rows", False, "the same, micro-batches by rows"),
    "ours-lean": Way("ours", "one", True, "the same at its leanest: one row at a time, gradient checkpointing"),
    "plain": Way("plain", "budget", False, "all logits of the micro-batch, log_softmax, gather; the same token budget"),
    "plain-rows": Way("plain", "rows", False, "the same, micro-batches by rows"),
    "plain-lean": Way("plain", "one", True, "the same at its leanest: one row at a time, gradient checkpointing"),
    "trl": Way("trl", "rows", True, "GRPOTrainer.training_step with its default memory options (fused head, gradient checkpointing)"),
    "trl-fast": Way("trl", "rows", False, "the same at its fastest: no gradient checkpointing"),
    "trl-lean": Way("trl", "one", True, "the same at its leanest: one row at a time, gradient checkpointing"),
    "trl-cut": Way(
        "trl-cut", "rows", False, "trl-fast made faster than it is: padding cut, prompts not scored (which TRL does on CUDA only)"
    ),
}


# ---- what is the same for all ----


def model_of(sizes: Sizes) -> LlamaForCausalLM:
    """A random Llama in fp32 with tied embeddings, as small models have; equal sizes give equal weights, and no global RNG moves."""
    heads = max(1, sizes.hidden // 64)
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=2 * sizes.longest,
        tie_word_embeddings=True,
        initializer_range=0.1,  # large enough that a token's probability depends on what stands before it
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        return LlamaForCausalLM(config).eval()


def batch_of(sizes: Sizes) -> Batch:
    """Episodes of many turns in groups of four: a prompt, then replies of 8 to 40 sampled tokens and observations of 15 to 60.

    Lengths are spread evenly between `shortest` and `longest`, in shuffled order; about three tokens in ten are sampled.
    """
    chance = random.Random(sizes.seed)
    step = (sizes.longest - sizes.shortest) / max(1, sizes.episodes - 1)
    lengths = [round(sizes.shortest + i * step) for i in range(sizes.episodes)]
    chance.shuffle(lengths)

    def words(least: int, most: int) -> list[int]:
        return [chance.randrange(2, sizes.vocab) for _ in range(chance.randint(least, most))]

    episodes = []
    for i, length in enumerate(lengths):
        context, turns, room = words(length // 5, length // 3), [], length
        while room:
            said = words(8, 40)
            room = length - len(context) - len(said)
            if room < 23:  # no place for an observation of 15 and a reply of 8: the last reply fills it
                said, room = (said + words(room, room) if room > 0 else said[: len(said) + room]), 0
            turns.append(Turn(Reply("", "", list(context), said, [0.0] * len(said)), "", chance.uniform(-1, 1), {}))
            context += said + words(15, 60)[: room - 8]
        episodes.append(Trajectory("speed", i // GROUP, i % GROUP, "", {"rules": ""}, turns, terminated=True))
    return collate(episodes)


@torch.no_grad()
def look(sizes: Sizes) -> Tensor:
    """(B, T) log-probabilities that the update takes for those before it: the model's own, shifted by noise, 0 where not sampled."""
    model, batch = model_of(sizes), batch_of(sizes)
    old = torch.zeros(batch.ids.shape)
    for i in range(len(batch)):
        part = batch.rows(torch.tensor([i]))
        width = part.ids.shape[1]
        old[i, 1:width] = model(part.ids).logits[0, :-1].log_softmax(-1).gather(-1, part.ids[0, 1:, None])[:, 0]
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(sizes.seed))
    return torch.where(batch.sampled, old + SHIFT * noise, 0.0)


def parts_of(way: Way, sizes: Sizes, batch: Batch) -> Sequence[Tensor]:
    """The row indices of each micro-batch."""
    if way.rows == "budget":
        return micro_batches(batch, sizes.micro_tokens)
    return torch.arange(len(batch)).split(1 if way.rows == "one" else sizes.rows)


# ---- the ways ----


def ours(way: Way, sizes: Sizes, model: PreTrainedModel, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """The loop of ragen_agent/learn.py over the micro-batches of one optimizer step."""
    if way.again:
        checkpointing(model)
    algo = GRPO(model, clip_low=CLIP_LOW, clip_high=CLIP_HIGH)

    def step() -> Tensor:
        totals, losses = Totals.of(batch), []
        for index in parts_of(way, sizes, batch):
            loss, _ = algo(batch.rows(index), totals)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return step


def plain(way: Way, sizes: Sizes, model: PreTrainedModel, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """What one writes first: the logits of every position of a micro-batch, their log_softmax, a gather, the clipped loss."""
    if way.again:
        model.train().gradient_checkpointing_enable()  # this Llama has no dropout

    def step() -> Tensor:
        losses = []
        for index in parts_of(way, sizes, batch):
            part = batch.rows(index)
            assert part.old is not None and part.advantage is not None
            logits = model(input_ids=part.ids, attention_mask=part.real.long(), use_cache=False).logits
            logp = logits[:, :-1].log_softmax(-1).gather(-1, part.ids[:, 1:, None]).squeeze(-1)
            mask, advantage = part.sampled[:, 1:].float(), part.advantage[:, 1:]
            ratio = ((logp - part.old[:, 1:]) * mask).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
            loss = -((gain * mask).sum(1) / mask.sum(1)).sum() / len(batch)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return step


def trl(way: Way, sizes: Sizes, model: PreTrainedModel, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """TRL's own training_step, see trl_step.py."""
    from benchmarks.trl_step import trl_step  # it imports this file

    return trl_step(way, sizes, model, batch, optimizer)


KINDS = {"ours": ours, "plain": plain, "trl": trl, "trl-cut": trl}
