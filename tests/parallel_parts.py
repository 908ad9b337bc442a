"""What the tests of many processes share: episodes by pattern, cases to learn from them, and two processes that do so over gloo."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

from ragen_agent import learn, parallel
from ragen_agent.algos import ALGOS
from ragen_agent.batch import Batch, collate
from ragen_agent.engines import Engine, Sharded
from ragen_agent.learn import Learn, improve
from ragen_agent.steps import Standing
from ragen_agent.types import Reply, Trajectory, Turn
from tests.algo_parts import VOCAB, algo

WORLD = 2
FLAGS = {"keep": 0.5, "filter": "top_k", "epochs": 2, "minibatch": 4, "micro_tokens": 40, "grad_clip": 0.05, "lr": 0.01}
TABLE = {  # name -> (optimizer, its settings, flags of learning, whether all that differs is in the first process's groups)
    "GRPO": ("GRPO", {}, {}, False),
    "GRPO-kl": ("GRPO", {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": "truncate"}, {"loss_scaling": "sqrt"}, False),
    "BRPO": ("BRPO", {}, {"filter": "variance", "keep": 0.8}, False),
    "PPO": ("PPO", {"bootstrap": True, "lam": 0.9}, {}, False),
    "PPO-critic": ("PPO", {"critic_model": True, "credit": "turn"}, {"minibatch": 0}, False),
    "GSPO": ("GSPO", {"clip_low": 0.1, "clip_high": 0.1}, {}, False),
    "GiGPO": ("GiGPO", {}, {"keep": 1.0}, False),
    "Normalised-env": ("Normalised", {"grouping": "env", "method": "mean"}, {"keep": 1.0}, False),
    "ReBN": ("ReBN", {"reweight": True}, {}, False),
    "BRPO-lopsided": ("BRPO", {}, {}, True),
    "PPO-lopsided": ("PPO", {"bootstrap": True}, {}, True),
    "GSPO-lopsided": ("GSPO", {}, {}, True),
}


def episodes(lopsided: bool = False, groups: int = 6, members: int = 3) -> list[Trajectory]:
    """Six groups of three episodes of one to three turns; every third is cut by a limit. Groups 1 and 4 have equal returns, and with
    `lopsided` all groups of the second half do. Groups 2 and 3 are of another world.
    """
    chance = random.Random(5)
    made = []
    for seed in range(groups):
        flat = seed in (1, 4) or (lopsided and seed >= groups // 2)
        for luck in range(members):
            episode = Trajectory("one" if seed in (2, 3) else "two", seed, luck, "", {"state": [seed, 0]})
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(2, 4))]
            turns = chance.randint(1, 3)
            for k in range(turns):
                said = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 5))]
                logprobs = [-2 * chance.random() for _ in said]
                reward = 1.0 / turns if flat else chance.random() * (1 + seed)
                episode.turns.append(Turn(Reply("", "", prompt, said, logprobs), "", reward, {"state": [seed, k % 2]}))
                prompt = prompt + said + [chance.randrange(VOCAB)]
            episode.truncated = (seed + luck) % 3 == 0
            episode.terminated = not episode.truncated
            made.append(episode)
    return made


def ahead(episode: Trajectory) -> list[int]:
    """The context of the reply that a cut episode did not come to."""
    last = episode.turns[-1].reply
    return [*last.prompt_ids, *last.ids, 3]


def double(trajectories, ahead=None) -> Batch:
    """`collate` in float64, so that what differs is not rounding."""
    made = collate(trajectories, ahead)
    for name, value in vars(made).items():
        if value is not None and value.is_floating_point():
            setattr(made, name, value.double())
    return made


def learned(name: str, kind: type[Engine], rounds: range = range(1, 2), state: dict | None = None, adam: bool = False) -> dict:
    """What a case comes to after some rounds from `state`: {"rows": a round's metrics each, "state": weights and optimizer}."""
    algo_name, settings, flags, lopsided = TABLE[name]
    config = Learn(**{**FLAGS, **flags})
    build = (lambda made: learn.optimizer(config, made)) if adam else (lambda made: torch.optim.SGD(made.parameters(), lr=1.0))
    engine = kind(algo(ALGOS[algo_name], settings), build)
    standing = Standing()
    if state is not None:
        engine.load(state)
    played = episodes(lopsided)
    with mock.patch.object(learn, "collate", double):  # within this process too, and put back: other tests follow in it
        rows = [improve(config, engine, parallel.share(played), step, standing, contexts=ahead) for step in rounds]
    return {"rows": rows, "state": engine.state()}


def run(folder: Path, cases: list[tuple], timeout: float = 300.0) -> dict[tuple, dict]:
    """What two processes make of `cases`, the arguments of `learned` each: the main process's word."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torch.save(cases, folder / "cases.pt")
    shared = {**os.environ, "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.parallel_parts", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": Path(__file__).parents[1]}
    both = [subprocess.Popen(command, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, **pipes) for r in range(WORLD)]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert all(process.returncode == 0 for process in both), str([p.returncode for p in both]) + "\n".join(said)
    return torch.load(folder / "made.pt", weights_only=False)


def main(folder: Path) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    parallel.start()
    kinds = {"whole": Engine, "sharded": Sharded}
    made = []
    for name, kind, *rest in torch.load(folder / "cases.pt", weights_only=False):
        made.append(learned(name, kinds[kind], *rest))
    if parallel.main():
        torch.save(made, folder / "made.pt")
    parallel.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
