"""The whole of training by reward on one screen: play, keep what is uncertain, learn; evaluate, save, resume."""

import dataclasses
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ragen_agent.algos.starpo import StarPO
from ragen_agent.checkpoint import latest, number
from ragen_agent.checkpoint import save as save_checkpoint
from ragen_agent.display import Display
from ragen_agent.evaluate import FIRST_SEED, baselines, evaluate, held_out, versions
from ragen_agent.learn import Learn, algorithm, learn
from ragen_agent.metrics import summarise
from ragen_agent.policies import LLMPolicy
from ragen_agent.pretrained import Pretrained, save
from ragen_agent.records import append, read, to_row, truncate, write_json
from ragen_agent.rollout import rollout
from ragen_agent.settings import at_least_one, split_of_env
from ragen_agent.types import Trajectory
from ragen_agent.updates import optimizer_of

FIRST_LEVEL = 10_000  # as RAGEN's training seeds; the stream of levels never repeats within a run


@dataclass
class Train(Learn):
    """Train a language model by multi-turn reinforcement learning and show that it learns."""

    steps: int | None = None
    """Rounds of play and update; default: 30, or as many as the resumed run was to have."""
    groups: int = 32
    """Levels per round."""
    group_size: int = 8
    """Episodes per level: same board, luck of their own."""
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


def run(config: Train, display: Display | None = None) -> dict[str, Any]:
    """The command: train, show it, and return {"before", "after", "random", "exact"} with each one's numbers."""
    config = checked(resumed(config))
    steps = config.steps or 0
    pretrained = config.start()
    algo = algorithm(config, pretrained)
    optimizer = optimizer_of(algo.parameters(), config.lr, config.weight_decay)
    display = display or Display()
    first = start(config, pretrained, algo, optimizer)
    world, held_out_world = config.world(), held_out_settings(config)
    player, judge = config.policy(pretrained, config.temperature), config.policy(pretrained, config.eval_temperature)
    with display.running(steps, first, f"{config.algo} trains {config.model} on {config.env}"):
        results = before(config, judge, held_out_world, display)
        results["after"] = evaluated(config) or results["before"]
        for step in range(first + 1, steps + 1):
            began = time.monotonic()
            seeds = range(FIRST_LEVEL + (step - 1) * config.groups, FIRST_LEVEL + step * config.groups)
            played = rollout(config.env, player, seeds, config.group_size, **world)
            middle = time.monotonic()
            row: dict[str, Any] = {"step": step, **summarise(played), **learn(config, algo, optimizer, played, step)}
            for policy in (player, judge):
                policy.backend.load(algo.policy)
            row |= times(began, middle, played)
            if step == steps or (config.eval_every and step % config.eval_every == 0):
                results["after"] = row["evaluation"] = summarise(evaluate(config.env, judge, eval_seeds(config), **held_out_world))
            append(config.out / "metrics.jsonl", row)
            for trajectory in played[:: max(1, len(played) // config.samples)][: config.samples] if config.samples else ():
                append(config.out / "transcripts.jsonl", {"step": step, **to_row(trajectory)})
            display.step(row)
            if step % config.save_every == 0 or step == steps:
                checkpoint(config, step, pretrained, algo, optimizer)
    write_json(config.out / "result.json", {"rows": results, "config": plain(config), "versions": versions()})
    display.result(results, config.out)
    return results


# -- before, between and after ---------------------------------------------------------------------------------------------


def eval_seeds(config: Train) -> range:
    """The held-out levels' seeds."""
    return range(config.eval_episodes) if config.eval_levels else range(FIRST_SEED, FIRST_SEED + config.eval_episodes)


def held_out_settings(config: Train) -> dict[str, Any]:
    """The world's settings for evaluation: held-out boards, all else as in training."""
    return held_out(config, config.eval_split, config.eval_levels, asked=False)


def checked(config: Train) -> Train:
    """`config` with its number of rounds; raises `ValueError` for what cannot run, before anything is written."""
    names = ("groups", "group_size", "eval_episodes", "save_every", "keep_checkpoints", "batch_rows", "micro_tokens")
    at_least_one(config, *names)
    config.check_learning()
    split = split_of_env(config.env, config.world())
    if split is not None and not config.eval_levels and split in (config.eval_split, "every"):
        raise ValueError(f"training on the {split} boards would train on the held-out ones; give another --eval-split")
    held_out_settings(config)
    return dataclasses.replace(config, steps=30 if config.steps is None else config.steps)


def evaluated(config: Train) -> dict[str, float] | None:
    """The last evaluation that the run's metrics hold."""
    path = config.out / "metrics.jsonl"
    rows = read(path) if path.exists() else []
    return next((row["evaluation"] for row in reversed(rows) if "evaluation" in row), None)


def before(config: Train, judge: LLMPolicy, held_out: dict[str, Any], display: Display) -> dict[str, dict[str, float]]:
    """The random and the exact player's numbers and the untrained model's, on the held-out levels; kept in the run's folder."""
    path = config.out / "before.json"
    if not path.is_file():
        display.say(f"playing {config.eval_episodes} held-out levels: random player, exact player, the model as it comes")
        seeds = eval_seeds(config)
        rows = {**baselines(config.env, seeds, **held_out), "before": summarise(evaluate(config.env, judge, seeds, **held_out))}
        write_json(path, rows)
    rows = json.loads(path.read_text())
    display.before(rows)
    return rows


def times(began: float, middle: float, played: list[Trajectory]) -> dict[str, float]:
    """How long a round took, and the sampled tokens it made a second."""
    now = time.monotonic()
    tokens = sum(len(turn.reply.ids) for trajectory in played for turn in trajectory.turns)
    return {
        "seconds": now - began,
        "seconds_play": middle - began,
        "seconds_learn": now - middle,
        "tokens_per_second": tokens / (now - began),
    }


def start(config: Train, pretrained: Pretrained, algo: StarPO, optimizer: torch.optim.Optimizer) -> int:
    """Begin a run's folder, or take up its last checkpoint; returns the round that is done (0: none).

    Raises `ValueError` for a folder that holds another run.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    if config.resume is None:
        if (config.out / "config.json").exists():
            raise ValueError(f"{config.out} holds a run already: give another --out, or go on with it by --resume {config.out}")
        write_json(config.out / "config.json", plain(config))
        return 0
    folder = latest(config.out)
    step = number(folder) if folder else 0
    for name in ("metrics.jsonl", "transcripts.jsonl"):
        if (config.out / name).exists():
            truncate(config.out / name, lambda row: row["step"] <= step)
    if folder:
        state = torch.load(folder / "training.pt", map_location=next(algo.parameters()).device, weights_only=True)
        algo.load_state_dict(state["algo"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
    return step


def checkpoint(config: Train, step: int, pretrained: Pretrained, algo: StarPO, optimizer: torch.optim.Optimizer) -> None:
    """Save the round: the model in Hugging Face format, and what resuming needs beside it."""

    def write(folder: Path) -> None:
        save(folder, pretrained)
        state = {"algo": algo.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(state, folder / "training.pt")

    save_checkpoint(config.out, step, write, config.keep_checkpoints)


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
        raise ValueError(f"a resumed run keeps its settings; not to be given with --resume: {', '.join(extra)}")
    saved = json.loads(path.read_text())
    kept = {**saved, "env_args": tuple(saved["env_args"]), "algo_args": tuple(saved["algo_args"])}
    return Train(**{**kept, "out": config.resume, "resume": config.resume, **({} if config.steps is None else {"steps": config.steps})})


def plain(config: Train) -> dict[str, Any]:
    """The settings as JSON."""
    return {name: os.fspath(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
