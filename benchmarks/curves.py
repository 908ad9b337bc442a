"""Training curves: eleven ways to train on the same budget, several seeds; a table of runs as data, and the command that plays it.

`python -m benchmarks.curves run` trains what is missing, `table` prints the comparison, `plot` writes it into docs/curves.md with its
figure. A run is a folder <out>/<world>/<cell>/<seed> of `ragen train`; stopped runs are taken up, finished ones left alone.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

from benchmarks import curves_page as page
from benchmarks.needs import EXTRA, needs
from ragen_agent.records import write_json
from ragen_agent.settings import pairs

DOCS = Path(__file__).parents[1] / "docs"
WORLDS = {"sokoban": "ragen/Sokoban-v0", "lake": "ragen/FrozenLake-v0"}
CRITIC = ("critic_model=true",)  # a model of its own, as RAGEN's; one on the policy's body drags the policy along with returns of -1 to 11
STARPO = (*CRITIC, "clip_high=0.2", "kl_coef=0.001", "kl_kind=k1", "kl_in=loss", "entropy_coef=0.001")
STARPO_S = (*CRITIC, "clip_high=0.28", "entropy_coef=0.001")
COMMAND = (sys.executable, "-m", "ragen_agent.cli", "train")
IDLE = ("threads", "samples", "save_every", "keep_checkpoints")  # settings that change no number of a run
Settings = dict[str, Any]  # of ragen_agent.train.Train


class Table(NamedTuple):
    """Runs that are compared with each other."""

    title: str
    reference: str  # the cell that the others are compared with
    shared: Settings  # of every cell, unless the cell says otherwise
    cells: dict[str, Settings]


BUDGET: Settings = {
    "steps": 16,
    "groups": 16,
    "group_size": 8,
    "minibatch": 32,
    "lr": 3e-4,
    "critic_lr": 1e-3,
    "keep": 1.0,
    "eval_episodes": 256,
}
BUDGET |= {"save_every": 5, "keep_checkpoints": 1, "samples": 1}
TABLES = {
    "main": Table(
        "Same budget",
        "GRPO",
        BUDGET,
        {
            **{name: {"algo": name} for name in ("ARPO", "BRPO", "GRPO", "DrGRPO", "RLOO")},
            "PPO": {"algo": "PPO", "algo_args": CRITIC},
            "PPO bi-level": {"algo": "PPO", "algo_args": (*CRITIC, "credit=bi-level")},
            **{name: {"algo": name} for name in ("GiGPO", "GSPO")},
            "StarPO": {"algo": "PPO", "algo_args": STARPO},
            "StarPO-S": {"algo": "PPO", "algo_args": STARPO_S, "keep": 0.25},
            "StarPO-S, minibatch 8": {"algo": "PPO", "algo_args": STARPO_S, "keep": 0.25, "minibatch": 8},  # as many updates as the others
        },
    ),
    "trap": Table(  # each step from StarPO to StarPO-S on its own, where training is driven too hard
        "Provoking the echo trap",
        "StarPO",
        {**BUDGET, "steps": 100, "lr": 1e-3, "epochs": 2},
        {
            "StarPO": {"algo": "PPO", "algo_args": STARPO},
            "StarPO, no KL": {"algo": "PPO", "algo_args": (*CRITIC, "clip_high=0.2", "entropy_coef=0.001")},
            "StarPO, no KL, clip-higher": {"algo": "PPO", "algo_args": STARPO_S},
            "StarPO-S": {"algo": "PPO", "algo_args": STARPO_S, "keep": 0.25},
            "GRPO": {"algo": "GRPO"},
            "GRPO, filtered": {"algo": "GRPO", "keep": 0.25},
        },
    ),
}


@dataclass
class Curves:
    """Train every cell with every seed (run), compare them (table), or write docs/curves.md and its figure (plot)."""

    verb: tyro.conf.Positional[Literal["run", "table", "plot"]]
    """What to do."""
    tables: tuple[Literal["main", "trap"], ...] = ("main",)
    """Which comparisons: main, trap."""
    worlds: tuple[Literal["sokoban", "lake"], ...] = ("sokoban", "lake")
    """Which worlds."""
    cells: tuple[str, ...] = ()
    """Only these cells; default: all of the table."""
    seeds: int = 3
    """Seeds 0, 1, ... of every cell."""
    jobs: int = 1
    """Runs at a time."""
    threads: int = 1
    """Threads of each run."""
    flags: tuple[str, ...] = ()
    """Settings of `ragen train` for every cell as name=value, instead of the table's, e.g. steps=10 lr=1e-4; not those a cell sets."""
    lake_model: str = "embedded"
    """The model that learns the lake: a folder, for instance one made by `ragen teach --env ragen/FrozenLake-v0`."""
    out: Path = Path("runs/curves")
    """Where the runs lie."""
    docs: Path = DOCS
    """Where plot writes curves.md and figures/curves.png."""


class Run(NamedTuple):
    """One run to be made."""

    folder: Path
    settings: Settings  # of Train, but for its folder


def main(config: Curves) -> int:
    """The command; returns 1 where a run failed."""
    if config.verb == "run":
        return run(config)
    needs(*(EXTRA if config.verb == "plot" else EXTRA[:1]))
    scenes = page.scenes(places(config))
    if config.verb == "table":
        print(page.tables(scenes))
    else:
        page.write(scenes, config.docs)
        print(f"wrote {config.docs / 'curves.md'} and {config.docs / 'figures' / 'curves.png'}")
    return 0


def places(config: Curves) -> list[page.Place]:
    """Each comparison in each world: its title, its reference, and the folders of its cells."""
    found = []
    for name in config.tables:
        table = TABLES[name]
        for world in config.worlds:
            folder = root(config, name, world)
            folders = {cell: folder / cell for cell in chosen(config, table)}
            found.append(page.Place(f"{table.title}: {WORLDS[world]}", table.reference, folders))
    return found


def root(config: Curves, table: str, world: str) -> Path:
    """The folder of a table's runs in a world."""
    return config.out / (world if table == "main" else f"{world}-{table}")


def chosen(config: Curves, table: Table) -> dict[str, Settings]:
    """The cells of a table that are asked for. An unknown name: `ValueError`, unless another table asked for has it."""
    known = {cell for name in config.tables for cell in TABLES[name].cells}
    if unknown := set(config.cells) - known:
        raise ValueError(f"no cell {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    return {cell: settings for cell, settings in table.cells.items() if not config.cells or cell in config.cells}


def runs(config: Curves) -> Iterator[Run]:
    """Every run, all cells of seed 0 first: what is there of an unfinished table can be compared."""
    given = {name.replace("-", "_"): value for name, value in pairs(config.flags).items()}
    for seed in range(config.seeds):
        for name in config.tables:
            for world in config.worlds:
                model = config.lake_model if world == "lake" else "embedded"
                place = {"env": WORLDS[world], "model": model, "seed": seed, "threads": config.threads}
                for cell, settings in chosen(config, TABLES[name]).items():
                    yield Run(root(config, name, world) / cell / str(seed), {**TABLES[name].shared, **given, **settings, **place})


def run(config: Curves) -> int:
    """Make what is missing, `jobs` at a time, and say how each run ended; returns 1 where one failed."""
    wanted, failed = list(runs(config)), 0
    pool = ThreadPoolExecutor(config.jobs)
    try:
        for number, (one, told) in enumerate(zip(wanted, pool.map(attempt, wanted), strict=True), start=1):
            failed += told.startswith("failed")
            print(f"{number}/{len(wanted)} {one.folder}: {told}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # a person who stops the command does not want the rest
    print(f"{failed} of {len(wanted)} runs failed")
    return int(failed > 0)


def attempt(one: Run) -> str:
    """Make a run in a process of its own, or finish it; returns how it ended. A failure leaves its last words in error.json."""
    folder, error = one.folder, one.folder / "error.json"
    if odd := differences(one):
        return f"failed: the folder holds a run with other settings ({odd}); give another --out"
    if (folder / "result.json").exists():
        return "there already"
    begun = (folder / "config.json").exists()
    command = [*COMMAND, *([f"--resume={folder}"] if begun else arguments(one))]
    folder.mkdir(parents=True, exist_ok=True)
    threads = str(one.settings["threads"])
    with (folder / "log.txt").open("a") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        env = {**os.environ, "OMP_NUM_THREADS": threads, "NO_COLOR": "1"}
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env).returncode
    if code == 0 and (folder / "result.json").exists():
        error.unlink(missing_ok=True)
        return "done"
    words = (folder / "log.txt").read_text(errors="replace").strip().splitlines()[-30:]
    write_json(error, {"status": code, "command": command, "words": words})
    return f"failed with status {code}: {next((line for line in reversed(words) if any(map(str.isalnum, line))), 'no word')}"


def arguments(one: Run) -> list[str]:
    """The flags of `ragen train` that make the run."""
    made = [f"--out={one.folder}"]
    for name, value in one.settings.items():
        flag = f"--{name.replace('_', '-')}"
        made += [flag, *value] if isinstance(value, tuple | list) else [f"{flag}={value}"]
    return made


def differences(one: Run) -> str:
    """Where the settings that the folder's run was made with are not those wanted, in words; "": nowhere, or no run is there."""
    path = one.folder / "config.json"
    if not path.exists():
        return ""
    there, wanted = json.loads(path.read_text()), json.loads(json.dumps(one.settings))
    odd = [name for name in wanted if name not in IDLE and there.get(name) != wanted[name]]
    return ", ".join(f"{name} {there.get(name)}, not {wanted[name]}" for name in odd)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Curves)))
    except ValueError as wrong:
        sys.exit(f"curves: {wrong}")
