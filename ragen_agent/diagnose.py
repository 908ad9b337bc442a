"""What the numbers of a run mean: a watcher that says it in one verdict, and the command that reads a finished run."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from rich.console import Console

from ragen_agent.checkpoint import latest
from ragen_agent.evaluate import FIRST_SEED, evaluate, held_out
from ragen_agent.information import Information, Part, measure
from ragen_agent.records import dumps, read, read_json
from ragen_agent.settings import Play
from ragen_agent.signs import CLIMB, CLIMB_LEAVE, FIRST, GOOD, Row, State, climbing, fresh, level, now, signs, take, was

MODES = ("off", "tell", "stop")
PATIENCE = 3  # rows in a row that must ask for another verdict before it changes
MASTERED, MASTERED_LEAVE = 0.9, 0.8  # of the way from the random to the exact player
STOPS = ("echo trap", "unstable", "no signal")
ADVICE = {
    "echo trap": "try --keep 0.25, a higher clip_high, a lower --lr, from a checkpoint before it",
    "unstable": "try a lower --lr, a lower --grad-clip, fewer --epochs",
    "no signal": "try easier levels, a larger --group-size, a higher --temperature, a model that was taught the form",
    "stalled": "try more --groups or a larger --group-size, a higher --keep, a higher --lr",
}
RESTS_ON = {  # verdict -> the signs its text tells
    "echo trap": ("spread", "entropy", "repeats", "template", "fell", "spikes", "length", "form"),
    "unstable": ("broken", "fell", "gap", "spikes", "noise", "clip", "form", "length"),
    "no signal": ("flat", "ragen_empty", "ragen_variance", "ragen_failing"),
    "stalled": ("stuck", "ragen_failing"),
    "learning": ("rising",),
}


class Verdict(NamedTuple):
    """What a run is doing. `name` is one of: starting, learning, mastered, stalled, no signal, unstable, echo trap."""

    name: str
    since: int  # the first step it holds for
    text: str  # for a person
    signs: dict[str, str]  # every sign that stands, name -> reason, whether the verdict rests on it or not


class Watch:
    """Turns the rows of a run into verdicts, one after each. `state` is a plain dict: saved and given back, it goes on exactly."""

    def __init__(self, exact: float | None = None, random: float | None = None, state: State | None = None):
        """`exact`, `random`: those players' success; what is not known is taken as 1 and 0. With a `state` they are the state's own."""
        begun = {**fresh(exact, random), "verdict": ["starting", 1], "coming": ["starting", 0, 1]}
        self.state: State = begun if state is None else deepcopy(state)

    def see(self, row: Row) -> Verdict:
        """Take in a row of metrics.jsonl, in order; any of its keys may be missing. Returns what the run looks like now."""
        state = self.state
        take(state, row)
        name, since = state["verdict"]
        standing = signs(state, name)
        asked = candidate(state, standing, name)
        coming, count, first = state["coming"]
        state["coming"] = [asked, count + 1, first] if asked == coming else [asked, 1, state["step"]]
        if asked != name and state["coming"][1] >= PATIENCE:
            name, since = state["verdict"] = [asked, onset(state, standing, asked)]
        return Verdict(name, since, words(state, name, since, standing), standing)


def candidate(state: State, standing: dict[str, str], verdict: str) -> str:
    """The verdict that the signs ask for, without patience; `verdict` is the present one."""
    if state["rows"] < FIRST:
        return "starting"
    if "broken" in standing:
        return "unstable"
    if level(state) >= (MASTERED_LEAVE if verdict == "mastered" else MASTERED):
        return "mastered"
    narrow = "spread" in standing and ("entropy" in standing or "repeats" in standing)
    if narrow and level(state) < GOOD and not climbing(state, CLIMB_LEAVE if verdict == "echo trap" else CLIMB):
        return "echo trap"
    if "fell" in standing or "gap" in standing:
        return "unstable"
    if standing.keys() & {"flat", "ragen_empty", "ragen_variance"}:
        return "no signal"
    if standing.keys() & {"spikes", "noise", "clip"} or ("form" in standing and "rising" not in standing):
        return "unstable"
    return "stalled" if standing.keys() & {"stuck", "ragen_failing"} else "learning"


def onset(state: State, standing: dict[str, str], name: str) -> int:
    """The step a new verdict holds since: where it was first asked for, or where its signs began, as far as the rows themselves tell.

    Of the echo trap that is the later of its two signs; of a success that fell, where it did. What was so before the policy last played
    well was not yet the trouble.
    """
    first, low = state["coming"][2], state["low_since"]
    begun = [first]
    if name == "echo trap":
        voice = [low[signal] for signal in ("entropy", "new_repetition") if signal in low]
        begun += [max(low["group_std"], min(voice))] if "group_std" in low and voice else []
    if name in ("echo trap", "unstable") and "fell" in standing and "success" in low:
        begun.append(low["success"])
    return min(first, max(min(begun), state["good"] + 1))


def words(state: State, name: str, since: int, standing: dict[str, str]) -> str:
    """The verdict as a sentence."""
    success = now(state, "success")
    head = name if name == "starting" else f"{name} since step {since}"
    played = [] if success is None else [f"success {success:.2f} (was {was(state, 'success'):.2f})"]
    if name == "starting":
        return f"{head}: too early to say"
    if name == "mastered":
        exact = "" if state["exact"] is None else f"; the exact player's is {state['exact']:.2f}"
        return f"{head}: {', '.join(played)}{exact}; spread and entropy may fall"
    told = [standing[sign] for sign in RESTS_ON[name] if sign in standing]
    if name == "learning" and not told:
        told = ["no clear rise yet"]
    text = f"{head}: {', '.join([*told, *played])}"
    return f"{text}; {ADVICE[name]}" if name in ADVICE else text


def action(verdict: Verdict, mode: str) -> str:
    """ "stop" where the mode is to stop and the verdict says that going on is of no use, else "go". `ValueError` for an unknown mode."""
    if mode not in MODES:
        raise ValueError(f"unknown watch {mode!r}; known: {', '.join(MODES)}")
    return "stop" if mode == "stop" and verdict.name in STOPS else "go"


# -- the command -------------------------------------------------------------------------------------------------------------


@dataclass
class Diagnose:
    """Read a run's metrics and say in words what became of it."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, with its metrics.jsonl; before.json or result.json beside it tell the random and the exact player's success."""
    json: bool = False
    """Print one JSON object instead of lines."""
    information: bool = False
    """Measure I(X;Z) of the newest checkpoint too, on held-out levels: how much its first replies depend on what they answer."""
    prompts: int = 16
    """Levels whose prompts are compared."""
    replies: int = 32
    """Replies that are scored under each of the prompts."""
    part: Part = "reply"
    """What counts as a reply: all of it, or its thought, up to the end of the think block."""
    seed: int = 0
    """Decides the choice of prompts and replies, and the bootstrap."""


def run(config: Diagnose, console: Console | None = None) -> dict[str, Any]:
    """The command: print the changes of verdict, the signs that stand at the end, and I(X;Z) when asked for; returns all of it.

    Raises `ValueError` for a folder without a run.
    """
    console = console or Console()
    rows = rounds(config.run)
    told: dict[str, Any] = {"run": str(config.run), "rows": len(rows), **told_of(rows, *players(config.run))}
    found = informed(config) if config.information else None
    if found is not None:
        told["information"] = asdict(found)
    if config.json:
        console.out(dumps(told), highlight=False)
        return told
    lines = [f"step {change['step']}: {change['text']}" for change in told["history"]]
    lines += [f"now, at step {told['step']}: {told['verdict']['text']}"]
    lines += [f"  {name}: {reason}" for name, reason in told["verdict"]["signs"].items()]
    for line in [*lines, *([found.text()] if found else [])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return told


def told_of(rows: Sequence[Row], exact: float | None = None, random: float | None = None) -> dict[str, Any]:
    """All that a watch says of a run: "history", the verdicts that differ from the one before; "verdict", the last; "step", its step."""
    watch, history, last = Watch(exact, random), list[dict[str, Any]](), dict[str, Any]()
    for row in rows:
        last = watch.see(row)._asdict()
        if not history or last["name"] != history[-1]["name"]:
            history.append({"step": watch.state["step"], **last})
    return {"step": watch.state["step"], "verdict": last, "history": history}


def rounds(folder: Path) -> list[Row]:
    """The rows of a run's metrics; `ValueError` where there are none."""
    path = folder / "metrics.jsonl"
    rows = read(path) if path.is_file() else []
    if not rows:
        raise ValueError(f"no run in {folder}: it has no metrics.jsonl with a round in it")
    return rows


def players(folder: Path) -> tuple[float | None, float | None]:
    """The exact and the random player's success as the run's folder tells it; None: it does not."""
    rows: dict[str, Any] = {}
    if (folder / "before.json").is_file():
        rows = read_json(folder / "before.json")
    elif (folder / "result.json").is_file():
        rows = read_json(folder / "result.json")["rows"]
    exact, random = (rows[name]["success"] if name in rows else None for name in ("exact", "random"))
    return exact, random


def informed(config: Diagnose) -> Information:
    """I(X;Z) of the run's newest checkpoint: it plays held-out levels as it was trained, at the training's temperature."""
    path, newest = config.run / "config.json", latest(config.run)
    if not path.is_file() or newest is None:
        raise ValueError(f"I(X;Z) needs a model: {config.run} has no config.json with a whole checkpoint step-* beside it")
    saved = read_json(path)
    known = {field.name: saved[field.name] for field in fields(Play) if field.name in saved}
    play = Play(**{**known, "model": str(newest), "env_args": tuple(saved["env_args"])})
    settings = held_out(play, saved["eval_split"], saved["eval_levels"], asked=False)
    pretrained = play.start()
    policy = play.policy(pretrained, saved["temperature"])
    first = 0 if saved["eval_levels"] else FIRST_SEED
    seeds, each = range(first, first + config.prompts), max(1, config.replies // config.prompts)
    played = evaluate(play.env, policy, seeds, each, **settings)
    bounds = {"prompts": config.prompts, "replies": config.replies, "micro_tokens": play.micro_tokens}
    limits = {"temperature": saved["temperature"], "context": policy.backend.context}
    return measure(pretrained.model, played, config.part, policy.chat.text, seed=config.seed, **bounds, **limits)
