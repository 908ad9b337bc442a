"""Worlds small enough to know: exact values, advantages and policy gradients of a tabular policy, and episodes drawn from it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ragen_agent.batch import Batch


@dataclass(frozen=True)
class World:
    """L levels of S states and A moves over H moves; one move is one turn of one sampled token."""

    name: str
    transitions: np.ndarray  # (L, S, A, S) probabilities
    rewards: np.ndarray  # (L, S, A, S) paid on the way from s by a to s'
    ends: np.ndarray  # (L, S) bool, True: the episode is over there
    start: np.ndarray  # (L,) the first state
    horizon: int  # H
    noise: tuple[np.ndarray, np.ndarray] | None = None  # (L, S, A, K) chances and rewards, when a move's reward is itself a draw


class Exact(NamedTuple):
    """What a policy is worth, with h moves left: index h runs from 0 to H."""

    value: np.ndarray  # (L, H+1, S)
    advantage: np.ndarray  # (L, H+1, S, A); [:, 0] is zero
    occupancy: np.ndarray  # (L, H+1, S) the chance to stand in s with h moves left, the episode not over
    gradient: np.ndarray  # (L, S, A) of the mean return over levels, with respect to the policy's logits


class Episodes(NamedTuple):
    """N episodes of each level as (E, H) arrays, E = L * N, group by group; entries after an episode's end are False in `played`."""

    level: np.ndarray  # (E,)
    state: np.ndarray  # (E, H) before the move
    move: np.ndarray  # (E, H)
    reward: np.ndarray  # (E, H)
    played: np.ndarray  # (E, H) bool
    over: np.ndarray  # (E,) bool, True: ended by the world, not by the horizon


def lake(levels: int, horizon: int = 10, size: int = 4, frozen: float = 0.9, intended: float = 0.8) -> World:
    """RAGEN's random lakes: the train maps of seeds 0, 1, ...; 1 point at the goal, nothing else."""
    from ragen_envs.frozen_lake import lake_transitions, random_map

    maps = [random_map(seed, size, frozen, "train") for seed in range(levels)]
    cells = np.array([list("".join(rows)) for rows in maps])
    transitions = np.stack([lake_transitions(rows, intended) for rows in maps])
    arrives = np.broadcast_to((cells == "G")[:, None, None, :], transitions.shape)
    return World("FrozenLake", transitions, arrives.astype(float), np.isin(cells, list("GH")), (cells == "S").argmax(1), horizon)


def bandit(levels: int) -> World:
    """RAGEN's two arms in either order: one pull, whose reward is a draw."""
    from ragen_envs.bandit import HIGH, LOW

    order = [(LOW, HIGH) if level % 2 else (HIGH, LOW) for level in range(levels)]
    width = max(len(LOW), len(HIGH))
    padded = [[[*arm, *[(0.0, 0.0)] * (width - len(arm))] for arm in arms] for arms in order]
    table = np.array(padded)[:, None]  # (L, 1, A, K, 2)
    chances, points = table[..., 0], table[..., 1]
    transitions = np.zeros((levels, 2, 2, 2))
    transitions[..., 1] = 1.0
    rewards = np.zeros_like(transitions)
    rewards[:, 0, :, 1] = (chances * points).sum(-1)[:, 0]
    ends = np.tile([False, True], (levels, 1))
    sure = np.zeros_like(chances)  # the end, where nothing is paid
    sure[..., 0] = 1.0
    noise = np.concatenate([chances, sure], 1), np.concatenate([points, np.zeros_like(points)], 1)
    return World("Bandit", transitions, rewards, ends, np.zeros(levels, int), 1, noise)


def softmax(logits: np.ndarray) -> np.ndarray:
    """(..., A) logits -> (..., A) probabilities."""
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


def solve(world: World, policy: np.ndarray) -> Exact:
    """Policy evaluation by dynamic programming; `policy` (L, S, A) are the chances of the moves. Undiscounted."""
    levels, states, moves = policy.shape
    value = np.zeros((levels, world.horizon + 1, states))
    advantage = np.zeros((levels, world.horizon + 1, states, moves))
    live = ~world.ends
    for h in range(1, world.horizon + 1):
        q = np.einsum("lsat,lsat->lsa", world.transitions, world.rewards + value[:, h - 1][:, None, None, :])
        q = np.where(live[..., None], q, 0.0)
        value[:, h] = (policy * q).sum(-1)
        advantage[:, h] = q - value[:, h][..., None]
    occupancy = np.zeros_like(value)
    occupancy[np.arange(levels), world.horizon, world.start] = 1.0
    for h in range(world.horizon, 0, -1):
        here = occupancy[:, h] * live
        occupancy[:, h] = here
        occupancy[:, h - 1] = np.einsum("ls,lsa,lsat->lt", here, policy, world.transitions) * live
    gradient = np.einsum("lhs,lsa,lhsa->lsa", occupancy[:, 1:], policy, advantage[:, 1:]) / levels
    return Exact(value, advantage, occupancy, gradient)


def optimal(world: World) -> np.ndarray:
    """(L, S, A): the moves' values under best play over the whole horizon (undiscounted value iteration)."""
    best = np.zeros(world.ends.shape)
    q = np.zeros(world.transitions.shape[:3])
    for _ in range(world.horizon):
        q = np.einsum("lsat,lsat->lsa", world.transitions, world.rewards + best[:, None, None, :])
        best = np.where(world.ends, 0.0, q.max(-1))
    return q


def play(world: World, policy: np.ndarray, size: int, rng: np.random.Generator) -> Episodes:
    """`size` episodes of each level, every one with luck of its own."""
    levels = len(world.start)
    level = np.repeat(np.arange(levels), size)
    shape = (len(level), world.horizon)
    state, move, reward = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape)
    played = np.zeros(shape, bool)
    here = world.start[level]
    for t in range(world.horizon):
        played[:, t] = ~world.ends[level, here]
        state[:, t] = here
        move[:, t] = _draw(policy[level, here], rng)
        there = _draw(world.transitions[level, here, move[:, t]], rng)
        paid = world.rewards[level, here, move[:, t], there]
        if world.noise is not None:
            chances, points = (x[level, here, move[:, t]] for x in world.noise)
            paid = points[np.arange(len(level)), _draw(chances, rng)]
        reward[:, t] = np.where(played[:, t], paid, 0.0)
        here = np.where(played[:, t], there, here)
    return Episodes(level, state, move, reward, played, world.ends[level, here])


def _draw(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(E, K) rows of chances -> (E,) one draw from each."""
    steps = chances.cumsum(-1)
    return (rng.random((len(chances), 1)) * steps[:, -1:] >= steps).sum(-1)


def batch_of(episodes: Episodes, states: int, value: np.ndarray | None = None) -> Batch:
    """Episodes as the optimizers see them: E rows of H tokens, each of which is a turn; `value` (E, H) is a critic's."""
    import torch

    count, horizon = episodes.state.shape
    played = torch.from_numpy(episodes.played)
    blank = torch.zeros(count, horizon, dtype=torch.float64)
    reward = torch.from_numpy(episodes.reward)
    turn = torch.arange(horizon).expand(count, horizon)
    state = torch.from_numpy(episodes.level[:, None] * states + episodes.state)
    return Batch(
        ids=torch.where(played, torch.from_numpy(episodes.move), 0),
        real=played,
        sampled=played,
        turn=torch.where(played, turn, -1),
        reward=reward,
        logprob=blank,
        episode=torch.arange(count),
        group=torch.from_numpy(episodes.level),
        score=reward.sum(1),
        truncated=torch.from_numpy(~episodes.over),
        world=torch.zeros(count, dtype=torch.int64),
        state=torch.where(played, state, -1),
        ahead=torch.zeros(count, horizon, dtype=torch.bool),
        old=blank,
        ref=blank,
        value=None if value is None else torch.where(played, torch.from_numpy(value), 0.0),
    )
