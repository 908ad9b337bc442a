"""How fast and how large: `python -m benchmarks.speed update` sets one update of ours beside the plain form and TRL's GRPOTrainer."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tyro

from benchmarks.compare import MIB, agreement, markdown, ratios, summary
from benchmarks.contenders import GROUP, WAYS, Sizes
from benchmarks.measure import OLD, SIZES
from ragen_agent.records import write_json

ROOT = Path(__file__).parents[1]


@dataclass
class Update:
    """One update (forward, backward, clip, AdamW step) on one fixed batch: peak memory and tokens/s of every contender."""

    vocab: tuple[int, ...] = (49152, 151936)
    """Vocabularies: SmolLM2's and Qwen2.5's."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Contenders; TRL's are left out where trl is not installed."""
    repeats: int = 3
    """Timed updates of each, in rounds, after one that warms up."""
    threads: int = 1
    """CPU threads."""
    hidden: int = Sizes.hidden
    """Channels of the model."""
    layers: int = Sizes.layers
    """Layers of the model."""
    episodes: int = Sizes.episodes
    """Episodes of the batch, one row each; a multiple of 4 (a group) and of --rows."""
    shortest: int = Sizes.shortest
    """Tokens of the shortest episode."""
    longest: int = Sizes.longest
    """Tokens of the longest episode."""
    rows: int = Sizes.rows
    """Rows at once, of the contenders that go by rows."""
    micro_tokens: int = Sizes.micro_tokens
    """Tokens at once, of the contenders that go by tokens; the default of `ragen train`."""
    out: Path | None = None
    """JSON file; the other sections in it stay."""

    def check(self) -> None:
        """Raise `ValueError` for settings that cannot be."""
        for name in ("repeats", "threads", "layers", "rows", "micro_tokens"):
            if vars(self)[name] < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {vars(self)[name]}")
        if not self.vocab or min(self.vocab) < 16:
            raise ValueError(f"--vocab must be at least 16, not {self.vocab}")
        if self.hidden < 64 or self.hidden % 64:
            raise ValueError(f"--hidden must be a multiple of 64, the size of a head, not {self.hidden}")
        if self.episodes < GROUP or self.episodes % GROUP or self.episodes % self.rows:
            raise ValueError(f"--episodes must be a multiple of {GROUP} and of --rows {self.rows}, not {self.episodes}")
        if not 20 <= self.shortest <= self.longest:
            raise ValueError(f"--shortest {self.shortest} and --longest {self.longest}: at least 20, and in this order")
        if not self.ways or (unknown := [name for name in self.ways if name not in WAYS]):
            raise ValueError(f"unknown contender {unknown[0] if self.ways else 'none'!r}; known: {', '.join(WAYS)}")

    def sizes(self, vocab: int) -> Sizes:
        """Those of one vocabulary."""
        own = {name: value for name, value in vars(self).items() if name in Sizes.__dataclass_fields__}
        return Sizes(**{**own, "vocab": vocab})


def update(config: Update) -> tuple[dict[str, Any], str, bool]:
    """The section: (its JSON, its Markdown, whether every contender computed the same)."""
    config.check()
    there = find_spec("trl") is not None
    ways = [name for name in config.ways if there or not WAYS[name].kind.startswith("trl")]
    if not ways:
        raise ValueError("trl is not installed (pip install trl), and no other contender was asked for")
    if len(ways) < len(config.ways):
        sys.stderr.write("speed: trl is not installed; its rows are left out\n")
    cases = [case(config.sizes(vocab), ways, config.repeats) for vocab in config.vocab]
    settings = {name: value for name, value in asdict(config).items() if name != "out"}
    told = {"settings": settings, "ways": {name: WAYS[name].what for name in ways}, "machine": machine(there), "cases": cases}
    return told, "\n\n".join(markdown(c) for c in cases), all(c["agreement"]["agree"] for c in cases)


def case(sizes: Sizes, ways: Sequence[str], repeats: int) -> dict[str, Any]:
    """One vocabulary: every contender in its own process, warmed up, then timed in rounds so that the machine's moods meet all."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / SIZES).write_text(json.dumps(asdict(sizes)))
        shapes = answer(begin("look", folder, stack))
        assert (folder / OLD).exists()
        rows: dict[str, dict[str, Any]] = {}
        running = {}
        for way in ways:  # one after another: no two compute at once
            running[way] = begin(way, folder, stack)
            rows[way] = {**answer(running[way]), "updates": [ask(running[way])]}
            sys.stderr.write(f"speed: {sizes.vocab} {way}: {rows[way]['updates'][0]['seconds']:.1f} s to warm up\n")
        for _ in range(repeats):
            for way in ways:
                rows[way]["updates"].append(ask(running[way]))
    contenders = {way: summary(row, shapes["tokens"]) for way, row in rows.items()}
    agreed = agreement({way: row["updates"] for way, row in rows.items()})
    gradients = 4 * shapes["parameters"] / MIB  # fp32
    told = {"gradients_mib": gradients, "contenders": contenders, "agreement": agreed, "ratios": ratios(contenders, gradients)}
    return {"sizes": asdict(sizes), **shapes, **told}


def begin(way: str, folder: Path, stack: ExitStack) -> subprocess.Popen[str]:
    """A contender's process; it ends with the stack."""
    log = stack.enter_context((folder / f"{way}.log").open("w"))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder), "TOKENIZERS_PARALLELISM": "false"}
    env["OMP_NUM_THREADS"] = str(json.loads((folder / SIZES).read_text())["threads"])
    command = [sys.executable, "-m", "benchmarks.measure", way, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    """One update by a contender."""
    assert process.stdin is not None
    process.stdin.write("update\n")
    process.stdin.flush()
    return answer(process)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """A contender's next line; RuntimeError with its last words where it died."""
    assert process.stdout is not None and isinstance(process.args, list)
    if line := process.stdout.readline():
        return json.loads(line)
    _, _, _, way, folder = map(str, process.args)
    words = (Path(folder) / f"{way}.log").read_text().strip().splitlines()[-5:]
    raise RuntimeError(f"contender {way} ended with status {process.wait()}: {' | '.join(words) or 'killed without a word; memory?'}")


def machine(trl: bool) -> dict[str, Any]:
    """What the numbers depend on besides the settings."""
    names = [line.split(":", 1)[1].strip() for line in cpu_lines() if line.startswith("model name")]
    packages = ("torch", "transformers", "accelerate", "numpy", *(("trl",) if trl else ()))
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def cpu_lines() -> list[str]:
    """/proc/cpuinfo, where there is one."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


SECTIONS: dict[str, tuple[type, Callable[[Any], tuple[dict[str, Any], str, bool]]]] = {"update": (Update, update)}


def main(arguments: list[str] | None = None) -> int:
    """Run one section, print its table, write its JSON. Status 1: the contenders do not agree; 2: it could not be run."""
    config = tyro.extras.subcommand_cli_from_dict({name: settings for name, (settings, _) in SECTIONS.items()}, args=arguments)
    name, run = next((name, run) for name, (settings, run) in SECTIONS.items() if isinstance(config, settings))
    try:
        stored = json.loads(config.out.read_text()) if config.out and config.out.exists() else {}
        if not isinstance(stored, dict):
            raise ValueError(f"{config.out} is not a file of results")
        told, table, agree = run(config)
        print(table)
        if config.out:
            write_json(config.out, {**stored, name: told})
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"speed: {error}\n")
        return 2
    if not agree:
        sys.stderr.write("speed: the contenders did NOT compute the same; their times and sizes say nothing\n")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
