"""The whole of training by reward on one screen: play, keep what is uncertain, learn; evaluate, save, resume."""

import sys
import time
from typing import Any

from rich.console import Console

from ragen_agent import adapters, parallel
from ragen_agent.diagnose import Watch, action
from ragen_agent.display import Display
from ragen_agent.evaluate import baselines, evaluate, versions
from ragen_agent.learn import improve, refilled
from ragen_agent.metrics import summarise
from ragen_agent.records import append, read, read_json, to_row, write_json
from ragen_agent.rollout import rollout
from ragen_agent.session import Session, begin, checkpoint, export, leave, refresh, start
from ragen_agent.stopping import Stopped, on_request
from ragen_agent.training import Train, checked, eval_seeds, held_out_settings, plain, resumed
from ragen_agent.types import Trajectory

__all__ = ["Train", "run"]

MERGED = "merged"  # the folder of a finished run with adapters: the plain model that says the same
FIRST_LEVEL = 10_000  # as RAGEN's training seeds; the stream of levels never repeats within a run


def run(config: Train, display: Display | None = None) -> dict[str, Any]:
    """The command: train, show it, and return {"before", "after", "random", "exact"} with each one's numbers.

    SIGTERM saves and ends the process with status 143; what the run has done so far can be resumed.
    """
    parallel.start()
    config = checked(resumed(config))
    if not parallel.main():
        display = Display(Console(quiet=True))
    with on_request() as request:
        session = begin(config, display or Display(), request)
        first = start(session)
        with session.display.running(config.steps or 0, first, f"{config.algo} trains {config.model} on {config.env}"):
            results = before(session)
            results["after"] = evaluated(config) or results["before"]
            for step in range(first + 1, (config.steps or 0) + 1):
                if not one_round(session, step, results):
                    break
    whole = session.engine.whole.policy
    if parallel.main():
        if adapters.layers(whole):
            export(config.out / MERGED, session.pretrained._replace(model=adapters.merged(whole)))
        write_json(config.out / "result.json", {"rows": results, "config": plain(config), "versions": versions()})
        session.display.result(results, config.out)
    return results


def one_round(session: Session, step: int, results: dict[str, Any]) -> bool:
    """Play, learn, judge and record round `step`; False where the run is to end with it; a SystemExit where somebody asked it to."""
    config, last = session.config, step == session.config.steps
    began = time.monotonic()
    try:
        useful, own = play(session, step)
    except Stopped:
        leave(session, step - 1)
    middle = time.monotonic()
    played = parallel.union(own)
    row: dict[str, Any] = {"step": step, **summarise(played)}
    row |= improve(config, session.engine, useful, step, session.standing, session.display.say, session.player.conversation.context)
    refresh(session)
    row |= times(began, middle, played)
    if last or (config.eval_every and step % config.eval_every == 0):
        results["after"] = row["evaluation"] = judged(session)
    going = watched(session, row)
    if not going and "evaluation" not in row:  # the run ends here
        results["after"] = row["evaluation"] = judged(session)
    if parallel.main():
        append(config.out / "metrics.jsonl", row)
        for trajectory in played[:: max(1, len(played) // config.samples)][: config.samples] if config.samples else ():
            append(config.out / "transcripts.jsonl", {"step": step, **to_row(trajectory)})
    session.display.step(row)
    asked = any(parallel.union([session.request.asked]))
    if step % config.save_every == 0 or last or not going or asked:
        checkpoint(session, step)
    if asked and not last:
        leave(session, step)
    return going


def play(session: Session, step: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """This process's episodes of a round: those that may train, and all that were played."""
    config, size = session.config, session.config.groups
    refill = session.engine.algo.refill if config.refill is None else config.refill

    def part(k: int) -> list[Trajectory]:
        first = FIRST_LEVEL + ((step - 1) * (1 + refill) + k) * size
        return rollout(config.env, session.player, parallel.share(range(first, first + size)), config.group_size, **config.world())

    if parallel.size() > 1:  # the others would wait for a process that breaks off
        return refilled(part, size, refill) if refill else ((own := part(0)), own)
    with session.request.playing():
        return refilled(part, size, refill) if refill else ((own := part(0)), own)


def judged(session: Session) -> dict[str, float]:
    """The model's numbers on the held-out levels, shared out over the processes."""
    config = session.config
    own = evaluate(config.env, session.judge, parallel.share(eval_seeds(config)), **held_out_settings(config))
    return summarise(parallel.union(own))


def watched(session: Session, row: dict[str, Any]) -> bool:
    """Write the verdict into the round's row and say it when it changes; False where the run is to stop for it."""
    if session.config.watch == "off":
        return True
    former, session.verdict = session.verdict, session.watch.see(row)
    row["verdict"] = session.verdict.name
    if former is not None and former.name != session.verdict.name:
        session.display.say(session.verdict.text)
    return action(session.verdict, session.config.watch) == "go"


# -- before, between and after ---------------------------------------------------------------------------------------------


def evaluated(config: Train) -> dict[str, float] | None:
    """The last evaluation that the run's metrics hold."""
    path = config.out / "metrics.jsonl"
    rows = read(path) if path.exists() else []
    return next((row["evaluation"] for row in reversed(rows) if "evaluation" in row), None)


def before(session: Session) -> dict[str, dict[str, float]]:
    """The random and the exact player's numbers and the untrained model's, on the held-out levels; kept in the run's folder."""
    config, path = session.config, session.config.out / "before.json"
    if not parallel.of_main(path.is_file()):
        session.display.say(f"playing {config.eval_episodes} held-out levels: random player, exact player, the model as it comes")
        rows = {**baselines(config.env, eval_seeds(config), **held_out_settings(config)), "before": judged(session)}
        if parallel.main():
            write_json(path, rows)
    rows = parallel.of_main(read_json(path) if parallel.main() else {})
    if not session.watch.state["rows"]:
        session.watch = Watch(rows["exact"]["success"], rows["random"]["success"])
    session.display.before(rows)
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


if __name__ == "__main__":  # accelerate launch -m ragen_agent.train
    from ragen_agent.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
