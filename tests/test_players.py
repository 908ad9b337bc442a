"""The random and the exact player, through the one loop, on the packs: the figures that are known of them, within sampling error."""

import math

import pytest

from ragen_agent.metrics import summarise
from ragen_agent.policies import RandomPolicy, SolverPolicy
from ragen_agent.rollout import rollout

BLIND = {"turns_per_episode": 5, "moves_per_turn": 5}  # the paper's protocol
SIGHTED = {"turns_per_episode": 10, "moves_per_turn": 1}  # every move is seen before the next


def within(successes, n, known, sigmas=4):
    """Whether a sampled rate is one that the known rate may give."""
    return abs(successes / n - known) <= sigmas * math.sqrt(known * (1 - known) / n) + 0.0005  # figures are told to three digits


@pytest.mark.parametrize(
    ("env_id", "levels", "settings", "known"),
    [
        ("ragen/Sokoban-v0", "ragen/simple", BLIND, 0.184),
        ("ragen/Sokoban-v0", "ragen/simple", {"moves_per_episode": 5}, 0.116),
        ("ragen/LargerSokoban-v0", "ragen/large", BLIND, 0.026),
        ("ragen/FrozenLakeThird-v0", "ragen/lake-p80", BLIND, 0.212),
        ("ragen/FrozenLakeThird-v0", "ragen/lake-p90", BLIND, 0.246),
        ("ragen/FrozenLake-v0", "ragen/lake-p90", BLIND, 0.246),
        ("ragen/FrozenLakeNoSlip-v0", "ragen/lake-p90", BLIND, 0.246),
    ],
)
def test_the_random_player_reaches_its_known_rate(env_id, levels, settings, known):
    played = rollout(env_id, RandomPolicy(1), range(512), 2, levels=levels, **settings)
    assert within(sum(t.success for t in played), len(played), known)


@pytest.mark.parametrize(
    ("env_id", "levels", "settings", "known"),
    [
        ("ragen/Sokoban-v0", "ragen/simple", BLIND, 1.0),
        ("ragen/FrozenLakeThird-v0", "ragen/lake-p80", SIGHTED, 0.4844),
        ("ragen/FrozenLakeThird-v0", "ragen/lake-p80", BLIND, 0.4784),
        ("ragen/FrozenLakeThird-v0", "ragen/lake-p90", SIGHTED, 0.5554),
        ("ragen/FrozenLake-v0", "ragen/lake-p90", SIGHTED, 0.9495),
        ("ragen/FrozenLakeNoSlip-v0", "ragen/lake-p90", BLIND, 1.0),
    ],
)
def test_the_exact_player_reaches_its_known_rate(env_id, levels, settings, known):
    played = rollout(env_id, SolverPolicy(), range(512), levels=levels, **settings)
    assert within(sum(t.success for t in played), len(played), known)


def test_the_bandits_players_choose_at_chance_and_always_well():
    chance = rollout("ragen/Bandit-v0", RandomPolicy(0), range(400), 2)
    assert within(sum(t.success for t in chance), 800, 0.5)
    exact = summarise(rollout("ragen/Bandit-v0", SolverPolicy(), range(400), 2))
    assert exact["success"] == 1.0
    assert abs(exact["return"] - 0.25) < 4 * 0.433 / math.sqrt(800)
