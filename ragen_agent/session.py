"""A run under way: what it is made of, how its folder is begun or taken up, saved, and left."""

import json
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from ragen_agent import parallel
from ragen_agent.checkpoint import latest, number
from ragen_agent.checkpoint import save as save_checkpoint
from ragen_agent.diagnose import Verdict, Watch, action
from ragen_agent.display import Display
from ragen_agent.engines import Engine, engine_of
from ragen_agent.learn import algorithm, optimizer
from ragen_agent.policies import LLMPolicy
from ragen_agent.pretrained import Pretrained, save
from ragen_agent.records import truncate, write_json
from ragen_agent.steps import Standing
from ragen_agent.stopping import STATUS, Request
from ragen_agent.training import Train, plain


@dataclass
class Session:
    """A run under way: what is saved with a checkpoint, and who plays."""

    config: Train
    engine: Engine
    pretrained: Pretrained  # the whole model, as it plays and is saved
    display: Display
    request: Request
    player: LLMPolicy
    judge: LLMPolicy
    standing: Standing = field(default_factory=Standing)
    watch: Watch = field(default_factory=Watch)
    verdict: Verdict | None = None


def begin(config: Train, display: Display, request: Request) -> Session:
    """Load the model, and put optimizer, engine and players around it."""
    pretrained = config.start()
    engine = engine_of(algorithm(config, pretrained), partial(optimizer, config))
    whole = pretrained._replace(model=engine.whole.policy)
    player, judge = config.policy(whole, config.temperature), config.policy(whole, config.eval_temperature)
    return Session(config, engine, whole, display, request, player, judge)


def start(session: Session) -> int:
    """Begin a run's folder, or take up its last checkpoint; returns the round that is done (0: none).

    Raises `ValueError` for a folder that holds another run.
    """
    config = session.config
    torch.manual_seed(config.seed)
    if config.resume is None:
        if parallel.of_main((config.out / "config.json").exists()):
            raise ValueError(f"{config.out} holds a run already: give another --out, or go on with it by --resume {config.out}")
        if parallel.main():
            write_json(config.out / "config.json", plain(config))
        return 0
    folder = parallel.of_main(latest(config.out))
    step = number(folder) if folder else 0
    if step > (config.steps or 0):
        raise ValueError(f"{config.out} has {step} rounds already: give --steps {step} or more")
    if parallel.main():
        write_json(config.out / "config.json", plain(replace(config, resume=None)))  # with the rounds that were asked for last
    for name in ("metrics.jsonl", "transcripts.jsonl") if parallel.main() else ():
        if (config.out / name).exists():
            truncate(config.out / name, lambda row: row["step"] <= step)
    if folder:
        state = torch.load(folder / "training.pt", map_location=session.engine.device, weights_only=True)
        session.engine.load(state)
        torch.set_rng_state(state["rng"].cpu())
        session.standing = Standing(**state["standing"])
        session.watch = Watch(state=json.loads(state["watch"]))
        refresh(session)
    return step


def checkpoint(session: Session, step: int) -> None:
    """Save the round: the model in Hugging Face format, and what resuming needs beside it. Where the watch cries collapse, the newest
    checkpoint from before it stays too."""
    config = session.config
    state = {**session.engine.state(), "rng": torch.get_rng_state(), "standing": vars(session.standing)}
    state["watch"] = json.dumps(session.watch.state)

    def write(folder: Path) -> None:
        save(folder, session.pretrained._replace(model=session.engine.whole.policy))
        torch.save(state, folder / "training.pt")

    if parallel.main():
        bad = session.verdict is not None and action(session.verdict, "stop") == "stop"
        save_checkpoint(config.out, step, write, config.keep_checkpoints, session.verdict.since if bad and session.verdict else None)
    parallel.barrier()


def export(folder: Path, pretrained: Pretrained) -> None:
    """Write a model in place of what the folder holds, by rename."""
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    save(draft, pretrained)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def leave(session: Session, step: int) -> None:
    """Save what is done, say how to go on, and end the process."""
    config = session.config
    if step:
        checkpoint(session, step)
    session.display.say(f"stopped by SIGTERM after round {step}; go on with: ragen train --resume {config.out}")
    raise SystemExit(STATUS)


def refresh(session: Session) -> None:
    """Let the players have the weights as they are now."""
    policy = session.engine.whole.policy
    for who in (session.player, session.judge):
        who.backend.load(policy)
