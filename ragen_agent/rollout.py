"""The one loop: training, evaluation, baselines and demonstrations all play here."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from ragen_agent.policies import Policy
from ragen_agent.types import Trajectory, Turn


def rollout(env_id: str, policy: Policy, seeds: Sequence[int], group_size: int = 1, luck: int = 0, **settings: Any) -> list[Trajectory]:
    """Play `group_size` episodes of each seed to their ends; a group shares its level, and its members' luck differs.

    Episode (seed, member) gets luck `luck + member`. `settings` go to `gymnasium.make`. Returns the trajectories group by
    group, in the order of `seeds`. A reply cut by its length is played as far as it parses and truncates the episode, its
    reward kept; an episode without room for another reply is truncated as it stands.
    """
    envs: list[gym.Env[str, str]] = []
    episodes: list[Trajectory] = []
    for seed in seeds:
        for member in range(group_size):
            env = gym.make(env_id, disable_env_checker=True, **{**settings, **policy.asks})
            observation, info = env.reset(seed=int(seed), options={"luck": luck + member})
            envs.append(env)
            episodes.append(Trajectory(env_id, int(seed), luck + member, observation, info))
    while live := [i for i, episode in enumerate(episodes) if not episode.done]:
        for i, reply in zip(live, policy.act([episodes[i] for i in live]), strict=True):
            episode = episodes[i]
            if reply.finish == "context":
                episode.truncated = episode.no_room = True
                continue
            observation, reward, terminated, truncated, info = envs[i].step(reply.action)
            episode.turns.append(Turn(reply, observation, float(reward), info))
            episode.terminated = terminated
            episode.truncated = (truncated or reply.finish == "length") and not terminated
    for env in envs:
        env.close()
    return episodes
