"""The exact player of FrozenLake: known values, enumeration, play, and RAGEN's figures on its packs (field case E05)."""

from functools import lru_cache
from itertools import product
from time import perf_counter

import numpy as np
import pytest

from ragen_envs.frozen_lake import FrozenLake, lake_transitions
from ragen_envs.levels import load
from ragen_envs.solvers import lake_values, value_iteration

GYM = "SFFF\nFHFH\nFFFH\nHFFG"  # Gymnasium's standard 4x4 map


def on(level: str, **settings) -> FrozenLake:
    """A lake reset to a given map."""
    env = FrozenLake(**settings)
    env.reset(seed=0, options={"level": level})
    return env


@pytest.mark.parametrize(
    ("success_rate", "gamma", "horizon", "expected"),
    [(1 / 3, 1.0, None, 0.823529), (1 / 3, 1.0, 100, 0.744190), (1 / 3, 0.99, None, 0.542026), (0.8, 1.0, None, 0.996928)],
)
def test_optimal_values_of_the_standard_map(success_rate, gamma, horizon, expected):
    table = on(GYM, success_rate=success_rate).transitions()
    rewards = table[:, :, 15].copy()
    rewards[15] = 0
    assert abs(value_iteration(table, rewards, gamma, horizon)[0] - expected) < 1e-6
    if gamma == 1 and horizon:
        assert abs(lake_values(table, 15, horizon).values[horizon, horizon, 0] - expected) < 1e-6


def test_open_loop_turns_against_enumeration():
    rows, moves, per_turn, turns = ("SFH", "FFF", "HFG"), 4, 3, 2
    chances = lake_transitions(rows, 0.7)

    @lru_cache(None)
    def best(cell: int, left: int, turn: int) -> float:
        if cell == 8 or not left or not turn:
            return float(cell == 8)
        worth = []
        for length in range(1, min(per_turn, left) + 1):
            for sequence in product(range(4), repeat=length):
                at = {cell: 1.0}
                for move in sequence:
                    after: dict[int, float] = {}
                    for here, chance in at.items():
                        for there in map(int, np.flatnonzero(chances[here, move])):
                            after[there] = after.get(there, 0) + chance * chances[here, move, there]
                    at = after
                worth.append(sum(chance * best(int(there), left - length, turn - 1) for there, chance in at.items()))
        return max(worth)

    table = lake_values(chances, 8, moves, per_turn, turns)
    expected = [[[best(cell, left, turn) for cell in range(9)] for left in range(moves + 1)] for turn in range(turns + 1)]
    np.testing.assert_allclose(table.values, expected, rtol=0, atol=1e-6)
    assert table.values[1, 4, 0] < table.values[2, 4, 0] < lake_values(chances, 8, moves).values[4, 4, 0]  # looking helps


@pytest.mark.parametrize(
    ("turns", "plan"),
    [(1, ["Down", "Down", "Right", "Right"]), (2, ["Down"]), (None, ["Down"])],  # one turn: all at once, no move wasted at the edge
)
def test_the_plan_is_the_fastest_and_of_these_the_shortest(turns, plan):
    assert on("SFH\nFHH\nFFG", is_slippery=False, turns_per_episode=turns).plan() == plan


def test_the_plan_of_a_large_lake_is_quick_and_what_would_never_end_is_an_error():
    env, started = FrozenLake(size=8, frozen=0.8, moves_per_episode=20), perf_counter()
    env.reset(seed=1)
    assert env.plan() and perf_counter() - started < 2
    env = FrozenLake(size=8, frozen=0.8, moves_per_turn=12, moves_per_episode=30)
    env.reset(seed=1)
    with pytest.raises(ValueError, match="too many"):
        env.plan()


@lru_cache
def figures(pack: str, intended: float) -> tuple[np.ndarray, np.ndarray]:
    """Success within ten moves on every map of a pack, exactly: the random player's and the exact player's."""
    random, best = [], []
    for level in load(pack):
        chances, cells = lake_transitions(level.rows, intended), "".join(level.rows)
        start, goal = cells.index("S"), cells.index("G")
        random.append(np.linalg.matrix_power(chances.mean(axis=1), 10)[start, goal])
        best.append(lake_values(chances, goal, 10).values[10, 10, start])
    return np.array(random), np.array(best)


@pytest.mark.parametrize(
    ("pack", "intended", "random", "best", "best_of_256"),
    [
        ("ragen/lake-p80", 1 / 3, 21.2, 48.4, 48.3),
        ("ragen/lake-p90", 1 / 3, 24.6, 55.5, 55.1),
        ("ragen/lake-p90", 0.8, 24.6, 94.9, 94.4),
        ("ragen/lake-p90", 1.0, 24.6, 100.0, 100.0),
    ],
)
def test_ragens_packs_give_ragens_figures(pack, intended, random, best, best_of_256):
    """The random player moves in every direction alike, so its figure is one for all slips; RAGEN's optima are of its first 256 maps."""
    randoms, bests = figures(pack, intended)
    assert abs(100 * randoms.mean() - random) < 0.06
    assert abs(100 * bests.mean() - best) < 0.06
    assert abs(100 * bests[:256].mean() - best_of_256) < 0.06


def play(env: FrozenLake, player: str, games: int) -> float:
    """The share of `games` won, one a map, by the plan or by samples of the action space."""
    env.action_space.seed(0)
    won = 0
    for seed in range(games):
        _, info = env.reset(seed=seed, options={"luck": 1 + seed // 512})
        done = False
        while not done:
            answer = " || ".join(env.plan()) if player == "exact" else env.action_space.sample()
            _, _, terminated, truncated, info = env.step(answer)
            done = terminated or truncated
        won += info["success"]
    return won / games


@pytest.mark.parametrize(("player", "number"), [("random", 0), ("exact", 1)])
def test_playing_agrees_with_the_tables(player, number):
    env = FrozenLake(levels="ragen/lake-p80", success_rate=1 / 3, moves_per_turn=1, turns_per_episode=None)
    expected = figures("ragen/lake-p80", 1 / 3)[number].mean()
    assert abs(play(env, player, 1024) - expected) < 4 * np.sqrt(expected * (1 - expected) / 1024)


def test_playing_in_turns_agrees_with_its_table():
    env, worth = FrozenLake(levels="ragen/lake-p80", success_rate=1 / 3, turns_per_episode=2), []
    for level in load("ragen/lake-p80")[:128]:
        cells = "".join(level.rows)
        table = lake_values(lake_transitions(level.rows, 1 / 3), cells.index("G"), 10, 5, 2)
        worth.append(table.values[2, 10, cells.index("S")])
    expected = np.mean(worth)
    env.levels = env.levels[:128]
    assert abs(play(env, "exact", 1024) - expected) < 4 * np.sqrt(expected * (1 - expected) / 1024)
