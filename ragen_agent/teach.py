"""Supervised fine-tuning on the exact player's trajectories, through the same prompts, ids and masks as training by reward."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ragen_agent.batch import Batch, collate
from ragen_agent.chat import Chat
from ragen_agent.evaluate import FIRST_SEED, evaluate, held_out
from ragen_agent.metrics import summarise
from ragen_agent.model import score
from ragen_agent.policies import TeacherPolicy
from ragen_agent.pretrained import save
from ragen_agent.records import append
from ragen_agent.rollout import rollout
from ragen_agent.settings import Play, above_zero, at_least, playable, split_of_env
from ragen_agent.updates import micro_batches, optimizer_of, schedule

LESSONS = 1_000_000  # the teacher's levels of seed s start at (s + 1) times this; training by reward starts at 10,000


@dataclass
class Teach(Play):
    """Teach a model the exact player's replies, on the train split only."""

    out: Path = Path("runs/taught")
    """Folder of the taught model (Hugging Face format) and of metrics.jsonl."""
    lessons: int = 8192
    """Episodes of the exact player that are played and kept."""
    epochs: int = 3
    """How often the lessons are gone through."""
    batch: int = 128
    """Rows per update: episodes, or single turns where the window is 1."""
    lr: float = 3e-3
    """Learning rate of AdamW at its highest: it warms up over the first 5 % of the updates and falls linearly to a tenth."""
    weight_decay: float = 0.01
    """AdamW's."""
    grad_clip: float = 1.0
    """The gradient's norm is cut to this."""
    noise: float = 0.0
    """In this share of the turns one move of the plan is replaced by a random one: what follows teaches to recover."""
    slip: float = 0.0
    """Each move of the plan is a random one with this probability: such a model plays worse than it knows, which reward can mend."""
    keep_failures: bool = False
    """Learn from episodes that an erring player did not solve, too."""
    spread: float = 0.25
    """In this share of the turns answer only a random number of the plan's moves, so that boards half-way to the goal are seen."""
    eval_episodes: int = 256
    """Levels of the val split played at the end."""
    eval_temperature: float = 0.5
    """Sampling temperature of that evaluation."""


def lessons(config: Teach, chat: Chat, prompt: Any, **settings: Any) -> Batch:
    """The exact player's episodes as a batch; those that were not solved are no lesson, unless asked for."""
    teacher = TeacherPolicy(chat, prompt, config.seed, config.spread, config.noise, config.slip)
    first, kept = LESSONS * (config.seed + 1), []
    for start in range(first, first + config.lessons, 512):
        played = rollout(config.env, teacher, range(start, min(start + 512, first + config.lessons)), **settings)
        kept += [trajectory for trajectory in played if trajectory.success or config.keep_failures]
    if not kept:
        raise ValueError(f"the exact player solved none of {config.lessons} levels of {config.env}: nothing to teach")
    return collate(kept)


def run(config: Teach, console: Console | None = None) -> dict[str, float]:
    """The command: play the lessons, fine-tune, evaluate on held-out levels, save; returns the evaluation's numbers."""
    console = console or Console()
    settings = config.world()
    at_least(config, 1, "lessons", "epochs", "batch", "eval_episodes", "micro_tokens")
    at_least(config, 0, "lr", "weight_decay", "eval_temperature")
    above_zero(config, "grad_clip")
    playable(config.env, settings)
    if split_of_env(config.env, settings) not in ("train", None) or "levels" in settings:
        raise ValueError("the exact player teaches on the train split only: held-out boards would not be held out any more")
    pretrained = config.start()
    model, tokenizer, prompt = pretrained
    torch.manual_seed(config.seed)
    began = time.monotonic()
    batch = lessons(config, Chat(tokenizer, prompt.prefix), prompt, **settings)
    console.print(f"{len(batch)} lessons of {config.env}, {batch.tokens} tokens to learn, in {time.monotonic() - began:.0f} s")
    config.out.mkdir(parents=True, exist_ok=True)
    updates = max(1, len(batch) // config.batch) * config.epochs
    optimizer = optimizer_of(model.parameters(), config.lr, config.weight_decay)
    rate = schedule(optimizer, updates)
    device, step = next(model.parameters()).device, 0
    for epoch in range(config.epochs):
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(config.seed * 1000 + epoch))
        for index in order[: max(1, len(batch) // config.batch) * config.batch].split(config.batch):
            part = batch.rows(index)
            loss = 0.0
            for rows in micro_batches(part, config.micro_tokens):
                micro = part.rows(rows).to(device)
                logprob = score(model, micro.ids, micro.real, sampled=micro.sampled).logprob
                share = -logprob.sum() / part.tokens
                share.backward()
                loss += float(share.detach())
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip))
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            step += 1
            row = {"step": step, "of": updates, "loss": loss, "grad_norm": norm, "seconds": round(time.monotonic() - began, 2)}
            append(config.out / "metrics.jsonl", row)
            if step % max(1, updates // 20) == 0:
                console.print(f"update {step}/{updates}  loss {loss:.4f}  gradient {norm:.2f}  {row['seconds']:.0f} s")
    save(config.out, pretrained)
    val = held_out(config, "val", None, asked=False)
    seeds = range(FIRST_SEED, FIRST_SEED + config.eval_episodes)
    result = summarise(evaluate(config.env, config.policy(pretrained, config.eval_temperature), seeds, **val))
    low, high = result["success_low"], result["success_high"]
    console.print(
        f"held-out success {result['success']:.1%} ({low:.1%} to {high:.1%}), well-formed {result['valid']:.1%}; saved to {config.out}"
    )
    append(config.out / "metrics.jsonl", {"step": step, "evaluation": result})
    return result
