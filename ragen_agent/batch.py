"""Trajectories become tensors: rows of tokens, the mask born with the sampled token, rewards on the last token of a turn."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_agent.types import Trajectory


@dataclass
class Batch:
    """B rows of T tokens from E episodes in G groups; entry t of every (B, T) field speaks of token t; rows are right-padded."""

    ids: Tensor  # (B, T) int64, 0 on padding
    real: Tensor  # (B, T) bool, True: not padding (by position, never by id)
    sampled: Tensor  # (B, T) bool, True: chosen by the policy; these train and no others
    turn: Tensor  # (B, T) int64, which turn of its episode a token belongs to, -1 on padding
    reward: Tensor  # (B, T) float, a turn's reward on the last token sampled in it, 0 elsewhere
    logprob: Tensor  # (B, T) float, the sampler's logprob, 0 where not sampled
    episode: Tensor  # (B,) int64, row -> episode
    group: Tensor  # (E,) int64, episode -> group
    score: Tensor  # (E,) float, an episode's total reward
    truncated: Tensor  # (E,) bool, True: cut by a limit, not ended by the world
    old: Tensor | None = None  # (B, T) logprobs before the update; these five are written by StarPO.prepare
    ref: Tensor | None = None  # (B, T) logprobs of the reference model
    value: Tensor | None = None  # (B, T) the critic's value of the state before token t
    advantage: Tensor | None = None  # (B, T)
    target: Tensor | None = None  # (B, T) what the critic learns

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """How many sampled tokens there are: the denominator of a token mean."""
        return int(self.sampled.sum())

    def rows(self, index: Tensor) -> "Batch":
        """The rows `index` (int64 or bool); per-episode fields stay whole; columns that are padding in all of them are cut."""
        real = self.real[index]
        width = int(real.any(0).nonzero().max()) + 1 if real.any() else 1
        part = copy(self)
        for name, value in vars(self).items():
            if value is not None and name not in ("group", "score", "truncated"):
                setattr(part, name, value[index, :width] if value.dim() == 2 else value[index])
        return part

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        moved = copy(self)
        for name, value in vars(self).items():
            setattr(moved, name, None if value is None else value.to(device))
        return moved


def collate(trajectories: Sequence[Trajectory]) -> Batch:
    """Trajectories -> Batch. A turn whose context extends the row so far (its ids, token for token) goes on in that row;
    one that does not (a window moved) begins a new row of the same episode. A turn without sampled tokens has no place here; its
    reward goes to the last token before it (or the first reply's last), so that row rewards always sum to the episode's return.

    Raises `ValueError` when nothing was sampled at all.
    """
    rows: list[dict[str, list]] = []
    owner: list[int] = []
    for number, trajectory in enumerate(trajectories):
        row: dict[str, list] | None = None
        owed = 0.0
        for k, turn in enumerate(trajectory.turns):
            said = turn.reply.ids
            if not said:
                if row is None:
                    owed += turn.reward
                else:
                    row["reward"][-1] += turn.reward
                continue
            prompt = turn.reply.prompt_ids
            if row is None or prompt[: len(row["ids"])] != row["ids"]:
                row = {"ids": [], "sampled": [], "turn": [], "reward": [], "logprob": []}
                rows.append(row)
                owner.append(number)
            fresh = prompt[len(row["ids"]) :]
            row["ids"] += fresh + said
            row["sampled"] += [False] * len(fresh) + [True] * len(said)
            row["turn"] += [k] * (len(fresh) + len(said))
            row["reward"] += [0.0] * (len(fresh) + len(said) - 1) + [turn.reward + owed]
            owed = 0.0
            row["logprob"] += [0.0] * len(fresh) + list(turn.reply.logprobs)
    if not rows:
        raise ValueError("no token was sampled in these trajectories: there is nothing to train on")
    width = max(len(row["ids"]) for row in rows)
    groups: dict[tuple[str, int], int] = {}
    group = [groups.setdefault(trajectory.level, len(groups)) for trajectory in trajectories]

    def pad(name: str, blank: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row[name] + [blank] * (width - len(row[name])) for row in rows], dtype=dtype)

    return Batch(
        ids=pad("ids", 0, torch.int64),
        real=torch.tensor([[True] * len(row["ids"]) + [False] * (width - len(row["ids"])) for row in rows]),
        sampled=pad("sampled", False, torch.bool),
        turn=pad("turn", -1, torch.int64),
        reward=pad("reward", 0.0, torch.float32),
        logprob=pad("logprob", 0.0, torch.float32),
        episode=torch.tensor(owner),
        group=torch.tensor(group),
        score=torch.tensor([trajectory.reward for trajectory in trajectories]),
        truncated=torch.tensor([trajectory.truncated for trajectory in trajectories]),
    )
