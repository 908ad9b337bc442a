"""The flags of `ragen train`, and what a resumed run takes over from the run it goes on with."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ragen_agent import adapters, parallel
from ragen_agent.evaluate import FIRST_SEED, held_out
from ragen_agent.learn import Learn
from ragen_agent.model import checkpointing, compiled
from ragen_agent.pretrained import Pretrained
from ragen_agent.records import read_json
from ragen_agent.settings import above_zero, at_least, playable, split_of_env

KEPT = "a resumed run keeps its settings; not to be given with --resume: "


@dataclass
class Train(Learn):
    """Train a language model by multi-turn reinforcement learning and show that it learns."""

    steps: int | None = None
    """Rounds of play and update; default: 30, or as many as the resumed run was to have."""
    groups: int = 32
    """Levels per round."""
    group_size: int = 8
    """Episodes per level: same board, luck of their own."""
    refill: int | None = None
    """Play so many further sets of levels at most where groups come out flat (DAPO's dynamic sampling); default: as the optimizer says."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank instead of the weights (needs peft), merged into a plain model at the end; 0: the weights."""
    lora_alpha: float | None = None
    """The adapters' scale times their rank; default: twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Endings of the names of the layers that get adapters, e.g. q_proj v_proj; default: every linear layer but the output."""
    checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it made: less memory, a third more time."""
    compile: bool = False
    """Let torch.compile make the model's training passes faster; costs a minute or so at the start."""
    watch: Literal["off", "tell", "stop"] = "tell"
    """Say in words what the run is doing (docs/diagnostics.md); "stop" ends a run that has collapsed or has nothing to learn from."""
    eval_every: int = 0
    """Evaluate every so many rounds, besides before and after; 0: no more."""
    eval_episodes: int = 256
    """Held-out levels of an evaluation."""
    eval_temperature: float = 1.0
    """Sampling temperature of the evaluation; 1 plays as the policy was trained, RAGEN evaluates at 0.5."""
    eval_split: str = "val"
    """The split of the held-out levels: val or test."""
    eval_levels: str | None = None
    """A level pack to evaluate on instead of a split."""
    save_every: int = 10
    """Rounds between checkpoints."""
    keep_checkpoints: int = 2
    """How many of them stay."""
    samples: int = 2
    """Episodes of each round that are written to transcripts.jsonl."""
    out: Path = Path("runs/train")
    """The run's folder."""
    resume: Path | None = None
    """Go on with the run in this folder, with its own settings; only --steps may be given too."""

    def start(self) -> Pretrained:
        """As in Play, with adapters and the ways to save memory or time that the flags ask for."""
        pretrained = super().start()
        model: Any = pretrained.model
        if self.lora_rank:
            if adapters.layers(model):
                raise ValueError(f"{self.model} has adapters already: train these, without --lora-rank")
            adapters.add(model, self.lora_rank, self.lora_alpha, self.lora_targets or None, self.seed)
        if self.checkpointing:
            checkpointing(model, True)
        if self.compile:
            compiled(model)
        return pretrained

    def frozen(self, pretrained: Pretrained) -> nn.Module:
        """As in Learn; of a model with new adapters it is the model without them, at no memory. Shards are no model to read: a copy."""
        return adapters.Bare(pretrained.model) if self.lora_rank and parallel.size() == 1 else super().frozen(pretrained)


def eval_seeds(config: Train) -> range:
    """The held-out levels' seeds."""
    return range(config.eval_episodes) if config.eval_levels else range(FIRST_SEED, FIRST_SEED + config.eval_episodes)


def held_out_settings(config: Train) -> dict[str, Any]:
    """The world's settings for evaluation: held-out boards, all else as in training."""
    return held_out(config, config.eval_split, config.eval_levels, asked=False)


def checked(config: Train) -> Train:
    """`config` with its number of rounds; raises `ValueError` for what cannot run, before anything is written."""
    at_least(config, 1, "groups", "group_size", "eval_episodes", "save_every", "keep_checkpoints", "batch_rows", "micro_tokens")
    at_least(config, 0, "steps", "lora_rank", "refill", "samples", "eval_every", "eval_temperature")
    above_zero(config, "lora_alpha")
    config.check_learning()
    if not config.lora_rank and (config.lora_alpha is not None or config.lora_targets):
        raise ValueError("--lora-alpha and --lora-targets are of adapters: give --lora-rank too")
    split = split_of_env(config.env, config.world())
    if split is not None and not config.eval_levels and split in (config.eval_split, "every"):
        raise ValueError(f"training on the {split} boards would train on the held-out ones; give another --eval-split")
    playable(config.env, config.world())
    held_out_settings(config)
    return dataclasses.replace(config, steps=30 if config.steps is None else config.steps)


def resumed(config: Train) -> Train:
    """The settings to run with: those of the run that `resume` names. Raises `ValueError` when others are given beside it."""
    if config.resume is None:
        return config
    path = config.resume / "config.json"
    if not path.is_file():
        raise ValueError(f"no run to resume in {config.resume}: it has no config.json")
    defaults = Train()
    given = [f.name for f in dataclasses.fields(Train) if getattr(config, f.name) != getattr(defaults, f.name)]
    if extra := sorted(set(given) - {"resume", "steps"}):
        raise ValueError(KEPT + ", ".join(extra))
    saved = read_json(path)
    kept = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return Train(**{**kept, "out": config.resume, "resume": config.resume, **({} if config.steps is None else {"steps": config.steps})})


def alone(arguments: Sequence[str]) -> None:
    """Raise `ValueError` where a command line gives settings beside --resume, were they the default ones."""
    flags = [text.partition("=")[0].lstrip("-").removeprefix("no-").replace("-", "_") for text in arguments if text.startswith("--")]
    known = {field.name for field in dataclasses.fields(Train)} - {"resume", "steps"}
    if "resume" in flags and (extra := sorted(known & set(flags))):
        raise ValueError(KEPT + ", ".join(extra))


def plain(config: Train) -> dict[str, Any]:
    """The settings as JSON."""
    return {name: os.fspath(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
