"""The credit lab: how near each estimator's advantages come to the exact ones, in worlds where those can be computed.

`python -m benchmarks.credit` plays the same batches for every estimator, measures bias, variance, correlation and the policy
gradient against dynamic programming, and writes docs/credit.md's table, docs/figures/credit.png and results/credit.json.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from torch import nn

from benchmarks import tabular as tab
from benchmarks.needs import EXTRA, needs
from ragen_agent.algos import ALGOS, StarPO
from ragen_agent.evaluate import versions
from ragen_agent.records import write_json

MEMORY = 4  # the fitted critic learns from the last batches, and forgets older ones
BLOCKS = 20  # independent parts of the batches, for the intervals
SQUARED = ("bias", "std", "scaled_bias", "scaled_std")


class Estimator(NamedTuple):
    """An optimizer of ragen_agent.algos, and the critic that it is given."""

    algo: str
    settings: dict[str, Any] = {}
    critic: str = ""  # "": none; "fitted": mean returns-to-go of the last batches; "exact": the policy's true values


ESTIMATORS = {
    "ARPO": Estimator("ARPO"),
    "BRPO": Estimator("BRPO"),
    "GRPO": Estimator("GRPO"),
    "DrGRPO": Estimator("DrGRPO"),
    "RLOO": Estimator("RLOO"),
    "REINFORCE++": Estimator("ReinforcePP"),
    "REINFORCE++ baseline": Estimator("ReinforcePPBaseline"),
    "ReBN": Estimator("ReBN"),
    "GiGPO": Estimator("GiGPO"),
    "MT-GRPO": Estimator("MTGRPO"),
    "PPO, fitted critic, lambda 1": Estimator("PPO", {"whiten": False}, "fitted"),
    "PPO, fitted critic, lambda .95": Estimator("PPO", {"whiten": False, "lam": 0.95}, "fitted"),
    "PPO bi-level, fitted critic": Estimator("PPO", {"whiten": False, "credit": "bi-level"}, "fitted"),
    "PPO, exact critic, lambda 1": Estimator("PPO", {"whiten": False}, "exact"),
    "PPO, exact critic, lambda .95": Estimator("PPO", {"whiten": False, "lam": 0.95}, "exact"),
    "PPO, exact critic, lambda 0": Estimator("PPO", {"whiten": False, "lam": 0.0}, "exact"),
}


@dataclass
class Credit:
    """Measure every estimator's advantages against the exact ones."""

    levels: int = 8
    """Groups in a batch: the levels stay the same, luck and moves are drawn anew."""
    size: int = 16
    """Episodes per group (RAGEN: 8 groups of 16)."""
    batches: int = 2000
    """Batches per policy."""
    seed: int = 0
    """Decides every draw."""
    out: Path = Path("benchmarks/results/credit.json")
    """Where the numbers go."""
    docs: Path = Path("docs")
    """Where the table (credit.md, between its markers) and the figure go."""


class Tally(NamedTuple):
    """What one estimator said over B batches, about X = L*(H+1)*S*A kinds of token (level, moves left, state, move)."""

    count: np.ndarray  # (B, X) how often a kind occurred
    total: np.ndarray  # (B, X) sum of the advantages given to it
    squares: np.ndarray  # (B, X)
    gradient: np.ndarray  # (B, L*S*A) the policy gradient that follows, for a mean over episodes


class Stub(nn.Module):
    """The least that an optimizer asks of its policy; it is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2, dtype=torch.float64)

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.head


def advantages(algo: StarPO, episodes: tab.Episodes, states: int, value: np.ndarray | None) -> np.ndarray:
    """(E, H): what the optimizer's own `advantage` says of a batch."""
    batch = tab.batch_of(episodes, states, value)
    return torch.where(batch.sampled, algo.advantage(batch), 0.0).numpy()


def kinds(episodes: tab.Episodes, world: tab.World) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    """(E, H): the number of each token's kind, and the shape (L, H+1, S, A) that the numbers index."""
    _, states, moves, _ = world.transitions.shape
    shape = (len(world.start), world.horizon + 1, states, moves)
    left = np.broadcast_to(world.horizon - np.arange(world.horizon), episodes.state.shape)
    level = np.broadcast_to(episodes.level[:, None], left.shape)
    return np.ravel_multi_index((level, left, episodes.state, episodes.move), shape), shape


def fitted(past: list[tab.Episodes], world: tab.World) -> np.ndarray:
    """(L, S): the mean return-to-go seen from a state, shrunk by one pseudo-episode to its level's mean; blind to the clock."""
    shape = world.ends.shape
    total, count = np.zeros(shape), np.zeros(shape)
    for episodes in past:
        togo = episodes.reward[:, ::-1].cumsum(1)[:, ::-1]
        level = np.broadcast_to(episodes.level[:, None], togo.shape)[episodes.played]
        np.add.at(total, (level, episodes.state[episodes.played]), togo[episodes.played])
        np.add.at(count, (level, episodes.state[episodes.played]), 1.0)
    mean = total.sum(1, keepdims=True) / count.sum(1, keepdims=True).clip(1)
    return (total + mean) / (count + 1)


def measure(world: tab.World, policy: np.ndarray, config: Credit, made: dict[str, Estimator]) -> dict[str, Tally]:
    """Play `batches` batches and let every estimator judge each of them."""
    exact = tab.solve(world, policy)
    rng = np.random.default_rng(config.seed)
    algos = {name: ALGOS[e.algo](Stub(), **e.settings) for name, e in made.items()}
    said: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in made}
    past = [tab.play(world, policy, config.size, rng) for _ in range(MEMORY)]
    for _ in range(config.batches):
        episodes = tab.play(world, policy, config.size, rng)
        kind, shape = kinds(episodes, world)
        critics = {
            "": None,
            "fitted": fitted(past, world)[episodes.level[:, None], episodes.state],
            "exact": exact.value[episodes.level[:, None], world.horizon - np.arange(world.horizon), episodes.state],
        }
        for name, estimator in made.items():
            with torch.no_grad():
                given = advantages(algos[name], episodes, shape[2], critics[estimator.critic])
            said[name].append((*_sums(given, kind, episodes.played, shape), _gradient(given, episodes, policy)))
        past = [*past[1:], episodes]
    return {name: Tally(*(np.stack(column) for column in zip(*rows, strict=True))) for name, rows in said.items()}


def _sums(given: np.ndarray, kind: np.ndarray, played: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    kinds, values = kind[played], given[played]
    for weight in (np.ones_like(values), values, values**2):
        yield np.bincount(kinds, weight, minlength=int(np.prod(shape)))


def _gradient(given: np.ndarray, episodes: tab.Episodes, policy: np.ndarray) -> np.ndarray:
    """The sum over tokens of advantage times the gradient of log pi(move), over the number of episodes: flat (L*S*A,)."""
    out = np.zeros(policy.shape)
    level = np.broadcast_to(episodes.level[:, None], given.shape)
    weight = np.where(episodes.played, given, 0.0)
    np.add.at(out, (level, episodes.state, episodes.move), weight)
    visited = np.zeros(policy.shape[:2])
    np.add.at(visited, (level, episodes.state), weight)
    return ((out - visited[..., None] * policy) / len(given)).ravel()


def figures(tally: Tally, exact: tab.Exact) -> dict[str, float]:
    """The measures of some batches; see docs/credit.md. Names in SQUARED are squares, unbiased and so at times below 0."""
    truth = exact.advantage.reshape(-1)
    count, total, squares = (x.sum(0) for x in (tally.count, tally.total, tally.squares))
    seen = count > 1
    n, truth = count[seen], truth[seen]
    mean = total[seen] / n
    variance = (squares[seen] - n * mean**2).clip(0) / (n - 1)
    share = n / n.sum()
    power = share @ truth**2
    noise = share @ (variance / n)  # what a mean over few visits adds to its square
    scale = share @ (mean * truth) / power
    average, middle = share @ mean, share @ truth
    spread = share @ (variance + mean**2) - average**2
    gradient, unit = tally.gradient.mean(0), exact.gradient.ravel() / np.linalg.norm(exact.gradient)
    length = (gradient**2).sum() - tally.gradient.var(0, ddof=1).sum() / len(tally.gradient)
    return {
        "bias": share @ (mean - truth) ** 2 - noise,
        "std": share @ variance,
        "correlation": (share @ (mean * truth) - average * middle) / np.sqrt(spread * (power - middle**2)),
        "scaled_bias": (share @ (mean / scale - truth) ** 2 - noise / scale**2) / power,
        "scaled_std": share @ variance / scale**2 / power,
        "gradient_cosine": gradient @ unit / np.sqrt(max(length, 1e-12)),
        "batch_cosine": (tally.gradient @ unit / np.linalg.norm(tally.gradient, axis=1).clip(1e-300)).mean(),
    }


def intervals(tally: Tally, exact: tab.Exact) -> dict[str, list[float]]:
    """name -> [value, low, high]: of all batches, with the 95 % t interval of a jackknife over BLOCKS blocks of them; roots taken last."""
    from scipy.stats import t

    blocks = np.array_split(np.arange(len(tally.count)), BLOCKS)
    whole = figures(tally, exact)
    without = [figures(Tally(*(np.delete(x, block, axis=0) for x in tally)), exact) for block in blocks]
    out = {}
    for name, value in whole.items():
        spread = np.std([row[name] for row in without])
        ends = value + t.ppf(0.975, BLOCKS - 1) * np.sqrt(BLOCKS - 1) * spread * np.array([0, -1, 1])
        out[name] = (np.sqrt(ends.clip(0)) if name in SQUARED else ends).tolist()
    return out


def scenes(config: Credit) -> dict[str, tuple[tab.World, np.ndarray]]:
    """The worlds and the policies that are judged: softmax over the best play's values at some sharpness; 0 is uniform."""
    lake, bandit = tab.lake(config.levels), tab.bandit(config.levels)
    make: Callable[[tab.World, float], np.ndarray] = lambda world, sharp: tab.softmax(sharp * tab.optimal(world))  # noqa: E731
    return {
        "FrozenLake, uniform policy": (lake, make(lake, 0.0)),
        "FrozenLake, half-trained policy": (lake, make(lake, 10.0)),
        "FrozenLake, good policy": (lake, make(lake, 60.0)),
        "Bandit, uniform policy": (bandit, make(bandit, 0.0)),
        "Bandit, half-trained policy": (bandit, make(bandit, 10.0)),
    }


def run(config: Credit) -> dict[str, Any]:
    """Measure every scene, write the numbers, and the table and the figure from them."""
    from benchmarks.credit_page import write

    needs(*EXTRA)
    rows: dict[str, Any] = {}
    for scene, (world, policy) in scenes(config).items():
        exact = tab.solve(world, policy)
        rows[scene] = {
            "value": float(exact.value[np.arange(len(world.start)), world.horizon, world.start].mean()),
            "estimators": {name: intervals(tally, exact) for name, tally in measure(world, policy, config, ESTIMATORS).items()},
        }
        print(f"{scene}: mean return {rows[scene]['value']:.3f}", flush=True)
    told = {k: str(v) if isinstance(v, Path) else v for k, v in vars(config).items()}
    write_json(config.out, {"config": told, "versions": versions(), "scenes": rows})
    write(rows, config.docs)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        run(tyro.cli(Credit))
    except ValueError as wrong:
        sys.exit(f"credit: {wrong}")
