"""Trajectories become tensors: rows of tokens, the mask born with the sampled token, rewards on the last token of a turn."""

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragen_agent.types import Trajectory

EPISODE_FIELDS = ("group", "score", "truncated", "world")  # (E,), the same in every part of a batch


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
    world: Tensor  # (E,) int64, episode -> env id
    state: Tensor  # (B, T) int64, the state of the level that a token's turn began in; equal numbers: same group, same state; -1: not told
    ahead: Tensor  # (B, T) bool, True: where the next reply of an episode cut by a limit would begin; no token, only its value is of use
    old: Tensor | None = None  # (B, T) logprobs before the update; these five are written by StarPO.prepare
    ref: Tensor | None = None  # (B, T) logprobs of the reference model
    value: Tensor | None = None  # (B, T) the critic's value of the state before token t
    advantage: Tensor | None = None  # (B, T)
    target: Tensor | None = None  # (B, T) what the critic learns
    weight: Tensor | None = None  # (B, T) importance of trainer over sampler, where it is corrected; written by StarPO.prepare

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
            if value is not None and name not in EPISODE_FIELDS:
                setattr(part, name, value[index, :width] if value.dim() == 2 else value[index])
        return part

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        moved = copy(self)
        for name, value in vars(self).items():
            setattr(moved, name, None if value is None else value.to(device))
        return moved


def collate(trajectories: Sequence[Trajectory], ahead: Sequence[Sequence[int] | None] | None = None) -> Batch:
    """Trajectories -> Batch. A turn whose context extends the row so far (its ids, token for token) goes on in that row;
    one that does not (a window moved) begins a new row of the same episode. A turn without sampled tokens has no place here; its
    reward goes to the last token before it (or the first reply's last), so that row rewards always sum to the episode's return.

    `ahead` holds, for each episode that is to be bootstrapped, the context that its next reply would have had; it is read, and a blank
    token after it is marked in `Batch.ahead`. Raises `ValueError` when nothing was sampled at all.
    """
    rows: list[_Row] = []
    states: dict[Hashable, int] = {}
    for number, trajectory in enumerate(trajectories):
        own: list[_Row] = []
        owed = 0.0
        for k, turn in enumerate(trajectory.turns):
            said = turn.reply.ids
            if not said:
                if own:
                    own[-1].reward[-1] += turn.reward
                else:
                    owed += turn.reward
                continue
            key = (trajectory.turns[k - 1].info if k else trajectory.info).get("state")
            state = -1 if key is None else states.setdefault((trajectory.level, tuple(key)), len(states))
            row = _row_of(own, turn.reply.prompt_ids, number, k, state)
            row.add(said, k, state, sampled=True, logprob=turn.reply.logprobs)
            row.reward[-1] = turn.reward + owed
            owed = 0.0
        if ahead is not None and (context := ahead[number]) is not None and own:
            row = _row_of(own, list(context), number, len(trajectory.turns), -1)
            row.add([0], len(trajectory.turns), -1, ahead=True)
        rows += own
    if not rows:
        raise ValueError("no token was sampled in these trajectories: there is nothing to train on")
    width = max(len(row.ids) for row in rows)

    def pad(name: str, blank: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([vars(row)[name] + [blank] * (width - len(row.ids)) for row in rows], dtype=dtype)

    return Batch(
        ids=pad("ids", 0, torch.int64),
        real=torch.tensor([[True] * len(row.ids) + [False] * (width - len(row.ids)) for row in rows]),
        sampled=pad("sampled", False, torch.bool),
        turn=pad("turn", -1, torch.int64),
        reward=pad("reward", 0.0, torch.float32),
        logprob=pad("logprob", 0.0, torch.float32),
        episode=torch.tensor([row.episode for row in rows]),
        group=_numbers([trajectory.level for trajectory in trajectories]),
        score=torch.tensor([trajectory.reward for trajectory in trajectories]),
        truncated=torch.tensor([trajectory.truncated for trajectory in trajectories]),
        world=_numbers([trajectory.env_id for trajectory in trajectories]),
        state=pad("state", -1, torch.int64),
        ahead=pad("ahead", False, torch.bool),
    )


@dataclass
class _Row:
    """One growing context: entry t of every list speaks of token t."""

    episode: int
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    ahead: list[bool] = field(default_factory=list)

    def add(
        self, ids: list[int], turn: int, state: int, sampled: bool = False, logprob: Sequence[float] | None = None, ahead: bool = False
    ) -> None:
        """Append tokens of one turn, all of one kind."""
        n = len(ids)
        self.ids += ids
        self.sampled += [sampled] * n
        self.turn += [turn] * n
        self.reward += [0.0] * n
        self.logprob += [0.0] * n if logprob is None else list(logprob)
        self.state += [state] * n
        self.ahead += [ahead] * n


def _row_of(rows: list[_Row], context: list[int], episode: int, turn: int, state: int) -> _Row:
    """The episode's last row, if `context` extends it, else a new one; what is new in `context` is added to it."""
    if not rows or context[: len(rows[-1].ids)] != rows[-1].ids:
        rows.append(_Row(episode))
    rows[-1].add(context[len(rows[-1].ids) :], turn, state)
    return rows[-1]


def _numbers(names: Sequence[Hashable]) -> Tensor:
    """(E,) int64: equal numbers for equal names, counted from 0 in order of appearance."""
    known: dict[Hashable, int] = {}
    return torch.tensor([known.setdefault(name, len(known)) for name in names])
