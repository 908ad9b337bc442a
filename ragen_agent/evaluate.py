"""How well a policy plays: the same levels for it, the random and the exact player, with intervals; a function and a command."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ragen_agent.metrics import summarise
from ragen_agent.policies import Policy, RandomPolicy, SolverPolicy
from ragen_agent.records import append, replace, to_row, write_json
from ragen_agent.rollout import rollout
from ragen_agent.settings import Play, at_least, env_settings, playable
from ragen_agent.types import Trajectory

FIRST_SEED = 123  # as RAGEN's validation


@dataclass
class Evaluate(Play):
    """Play a world with a model and print its score between the random and the exact player's."""

    split: str | None = None
    """Boards of this split: train, val or test; default: val, or all of --levels."""
    levels: str | None = None
    """A level pack (such as ragen/simple) or a file instead of generated levels."""
    episodes: int = 256
    """How many levels are played."""
    group_size: int = 1
    """Episodes per level, each with its own luck; above 1 pass@k is told too."""
    temperature: float = 0.5
    """Sampling temperature; 0 is greedy. RAGEN evaluates at 0.5."""
    out: Path | None = None
    """Write the result here as JSON."""
    transcripts: Path | None = None
    """Write every episode here as JSON lines."""
    chunk: int = 1024
    """How many episodes are in play at once."""


def evaluate(
    env_id: str, policy: Policy, seeds: Sequence[int], group_size: int = 1, chunk: int = 1024, luck: int = 0, **settings: Any
) -> list[Trajectory]:
    """Play every seed; the global random state of torch is left as it was. See `rollout`."""
    state = torch.get_rng_state()
    step = max(1, chunk // group_size)
    parts = [rollout(env_id, policy, seeds[i : i + step], group_size, luck, **settings) for i in range(0, len(seeds), step)]
    torch.set_rng_state(state)
    return [trajectory for part in parts for trajectory in part]


def baselines(env_id: str, seeds: Sequence[int], group_size: int = 1, **settings: Any) -> dict[str, dict[str, float]]:
    """The random and the exact player's numbers on the same levels and luck."""
    players: dict[str, Policy] = {"random": RandomPolicy(), "exact": SolverPolicy()}
    return {name: summarise(evaluate(env_id, player, seeds, group_size, **settings)) for name, player in players.items()}


def normalised(score: float, rows: dict[str, dict[str, float]]) -> float | None:
    """A success rate on the scale where random is 0 and the exact player 100; None where the two do not differ."""
    low, high = rows["random"]["success"], rows["exact"]["success"]
    return 100 * (score - low) / (high - low) if high > low else None


def table(rows: dict[str, dict[str, float]], title: str) -> Table:
    """The players' numbers as a table; the interval is Wilson's at 95 %, the score 0 for random and 100 for exact play."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("player", "success", "95 %", "score", "reward", "valid", "moves", "tokens"):
        made.add_column(name, justify="left" if name == "player" else "right", no_wrap=True)
    for name, row in rows.items():
        score = normalised(row["success"], rows)
        made.add_row(
            name,
            f"{row['success']:.1%}",
            f"{100 * row['success_low']:.1f}-{100 * row['success_high']:.1f}",
            "" if score is None else f"{score:.0f}",
            f"{row['return']:.2f}" if "return" in row else "",
            f"{row['valid']:.0%}",
            *(f"{row[key]:.1f}" for key in ("moves", "tokens")),
        )
    return made


def held_out(config: Play, split: str | None, levels: str | None, asked: bool) -> dict[str, Any]:
    """The world's settings with boards of a split, or with given levels. `ValueError` for what the world does not know or both."""
    known = env_settings(config.env)
    for name, wanted in (("split", asked), ("levels", levels is not None)):
        if wanted and name not in known:
            raise ValueError(f"{config.env} has no {name}")
    if asked and levels is not None:
        raise ValueError("levels are a set of their own: give either levels or a split")
    settings = config.world(levels=levels, split=split if "split" in known and levels is None else None)
    playable(config.env, settings)
    return settings


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    return {name: version(name) for name in ("ragen-gym", "torch", "transformers", "gymnasium", "numpy")}


def run(config: Evaluate, console: Console | None = None) -> dict[str, Any]:
    """The command: play, print, write; returns the result."""
    console = console or Console()
    at_least(config, 1, "episodes", "group_size", "chunk")
    at_least(config, 0, "temperature")
    settings = held_out(config, config.split if config.split or config.levels else "val", config.levels, bool(config.split))
    split = settings.get("split")
    if config.transcripts:
        replace(config.transcripts, b"")
    pretrained = config.start()
    seeds = range(config.episodes) if config.levels else range(FIRST_SEED, FIRST_SEED + config.episodes)
    rows = baselines(config.env, seeds, config.group_size, **settings)
    played = evaluate(config.env, config.policy(pretrained, config.temperature), seeds, config.group_size, config.chunk, **settings)
    rows["model"] = summarise(played)
    for trajectory in played if config.transcripts else ():
        append(config.transcripts, to_row(trajectory))  # pyright: ignore
    result = {
        "env": config.env,
        "settings": settings,
        "model": config.model,
        "temperature": config.temperature,
        "seed": config.seed,
        "levels": [seeds[0], seeds[-1]],
        "group_size": config.group_size,
        "rows": rows,
        "score": normalised(rows["model"]["success"], rows),
        "versions": versions(),
    }
    where = config.levels or split
    console.print(table({k: rows[k] for k in ("random", "model", "exact")}, f"{config.env}, {where}, temperature {config.temperature}"))
    if config.out:
        write_json(config.out, result)
    return result
