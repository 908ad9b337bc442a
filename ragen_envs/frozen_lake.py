"""FrozenLake in words: reach the goal over slippery ice (RAGEN, arXiv:2504.20073; Gymnasium's FrozenLake on random maps)."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ragen_envs.levels import LAKE, SPLITS, Level, load, read_one, split_of
from ragen_envs.solvers import LakeTable, lake_values
from ragen_envs.text_env import TextEnv, Tile, one_of

MOVES = ("Left", "Down", "Right", "Up")
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
ICE, GOAL, PLAYER, ON_GOAL, IN_HOLE, HOLE = range(6)
TRIES = 10_000


class FrozenLake(TextEnv):
    """Walk over a frozen lake to the goal without falling into a hole; the ice may carry you to a side.

    Moves, by number: 0 Left, 1 Down, 2 Right, 3 Up. A move goes as intended with probability `success_rate`, else to one of the
    two sides with equal chance, never back; at the edge you stay. `is_slippery=False` makes every move go as intended and
    ignores `success_rate`. Reward: 1 at the goal, else 0. Terminated at the goal or in a hole.

    The maps of a seed: each cell of `size` x `size` is frozen with probability `frozen`, start and goal are uniform cells, drawn
    again until they differ, a path joins them and the map belongs to `split` ("train", "val", "test": by the map's content up
    to symmetry; None: any). With `levels` (a pack's name, a file's path or a list of map texts) the map is number
    `seed % len(levels)`. Maps are rows of S start, G goal, H hole, F frozen. Other settings are `TextEnv`'s.
    """

    title = "FrozenLake"
    tiles: ClassVar[tuple[Tile, ...]] = (
        Tile("ice", "_", "ice"),
        Tile("goal", "G", "the goal", "Goal"),
        Tile("player on ice", "P", "you", "Player"),
        Tile("player on goal", "√", "you on the goal", "Player on goal"),
        Tile("player in hole", "X", "you in a hole", "Player in hole"),
        Tile("hole", "O", "a hole", "Holes"),
    )

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.9,
        success_rate: float = 0.8,
        is_slippery: bool = True,
        split: str | None = "train",
        levels: str | Path | Sequence[str] | None = None,
        **settings: Any,
    ):
        """See the class. Settings that allow no map, and `levels` together with a split, are a `ValueError`."""
        one_of("split", split, (*SPLITS, None))
        if levels is not None and split not in ("train", None):
            raise ValueError(f"levels {levels!r} are played as they are: give levels or split={split!r}, not both")
        if size < 2 or not 0 < frozen <= 1 or not 0 <= success_rate <= 1:
            raise ValueError(f"need size >= 2, 0 < frozen <= 1, 0 <= success_rate <= 1, not {size}, {frozen} and {success_rate}")
        self.size, self.frozen, self.split = size, frozen, split
        self.intended = success_rate if is_slippery else 1.0
        self.levels: list[Level] = [] if levels is None else load(levels, LAKE)
        shape = (size, size)
        if self.levels:
            shape = (max(len(level.rows) for level in self.levels), max(len(level.rows[0]) for level in self.levels))
        self.rows: tuple[str, ...] = ()
        self.player = self.goal = (0, 0)  # (row, column)
        self._ground = np.zeros(shape, int)  # the board without the player
        super().__init__(actions=MOVES, shape=shape, **settings)

    def _deal(self, seed: int, level: str | None) -> None:
        if level is not None:
            rows = read_one(level, LAKE, self.shape)
        elif self.levels:
            rows = self.levels[seed % len(self.levels)].rows
        else:
            rows = random_map(seed, self.size, self.frozen, self.split)
        self.rows = rows
        self.player, self.goal = _cell(rows, "S"), _cell(rows, "G")
        self._ground = np.array([[{"G": GOAL, "H": HOLE}.get(symbol, ICE) for symbol in row] for row in rows])

    def _move(self, move: int) -> tuple[float, bool]:
        if self.intended < 1:
            chance, side = self.luck.random(), (1 - self.intended) / 2
            move = (move - (chance < side) + (chance >= 1 - side)) % 4
        self.player = _step(self.rows, self.player, move)
        tile = self._ground[self.player]
        return float(tile == GOAL), bool(tile in (GOAL, HOLE))

    def _board(self) -> np.ndarray:
        board = self._ground.copy()
        board[self.player] = {ICE: PLAYER, GOAL: ON_GOAL, HOLE: IN_HOLE}[int(board[self.player])]
        return board

    def _solved(self) -> bool:
        return self.player == self.goal

    def _goal(self) -> str:
        goal = (
            "You walk on a frozen lake. Reach the goal without falling into a hole; either ends the game. Reaching the goal earns 1 point."
        )
        if self.intended == 1:
            return f"{goal} The ice is not slippery: every move goes as intended."
        slip = f"with probability {self.intended:.3g}, else to either side ({(1 - self.intended) / 2:.3g} each)"
        return f"{goal} The ice is slippery: a move goes as intended {slip}. At the edge of the lake you stay where you are."

    def transitions(self) -> np.ndarray:
        """(S, 4, S): the probability to come from cell s to each cell by each move; cells are numbered row by row.

        Goal and holes are absorbing. Needs a map: call `reset` first. Read-only.
        """
        return lake_transitions(self.rows, self.intended)

    def _plan(self, allowed: int, left: int, turns: int | None) -> list[str]:
        episode_turns = None if turns is None else min(self.turn + turns, self.moves_per_episode)
        table = lake_table(self.rows, self.intended, self.moves_per_episode, self.moves_per_turn, episode_turns)
        sequence = table.plan(left if turns is None else min(turns, left), left, self.player[0] * len(self.rows[0]) + self.player[1])
        return [self.actions[move] for move in sequence]


@lru_cache(maxsize=4096)
def random_map(seed: int, size: int, frozen: float, split: str | None = None) -> tuple[str, ...]:
    """The map of a seed, in the characters S, F, H and G; see `FrozenLake`. `split` None takes maps of every split.

    Raises `ValueError` when none of `TRIES` maps will do.
    """
    rng = np.random.default_rng(seed)
    for _ in range(TRIES):
        cells = np.where(rng.random(size * size) < frozen, "F", "H")
        start, goal = rng.integers(size * size, size=2)
        cells[start], cells[goal] = "S", "G"
        rows = tuple("".join(row) for row in cells.reshape(size, size))
        if start != goal and _path(rows) and (split is None or split_of(rows) == split):
            return rows
    raise ValueError(f"no map of size {size} with frozen={frozen} has a path and is in split {split!r} ({TRIES} tries, seed {seed})")


@lru_cache(maxsize=1024)
def lake_transitions(rows: tuple[str, ...], intended: float) -> np.ndarray:
    """(S, 4, S) transition probabilities of a map, read-only: see `FrozenLake.transitions`."""
    columns = len(rows[0])
    transitions = np.zeros((len(rows) * columns, 4, len(rows) * columns))
    for cell, symbol in enumerate("".join(rows)):
        if symbol in "GH":
            transitions[cell, :, cell] = 1
            continue
        after = [_step(rows, divmod(cell, columns), move) for move in range(4)]
        for move in range(4):
            for turned, chance in ((0, intended), (1, (1 - intended) / 2), (-1, (1 - intended) / 2)):
                row, column = after[(move + turned) % 4]
                transitions[cell, move, row * columns + column] += chance
    transitions.flags.writeable = False
    return transitions


@lru_cache(maxsize=256)
def lake_table(rows: tuple[str, ...], intended: float, moves: int, per_turn: int, turns: int | None) -> LakeTable:
    """The exact player of a map, kept, because the games of a group share it; see `lake_values`."""
    goal = "".join(rows).index("G")
    return lake_values(lake_transitions(rows, intended), goal, moves, per_turn, turns)


def _cell(rows: tuple[str, ...], symbol: str) -> tuple[int, int]:
    return next((row, line.index(symbol)) for row, line in enumerate(rows) if symbol in line)


def _step(rows: tuple[str, ...], cell: tuple[int, int], move: int) -> tuple[int, int]:
    """The cell beside `cell`, or `cell` itself at the edge."""
    row, column = cell[0] + STEPS[move][0], cell[1] + STEPS[move][1]
    return (row, column) if 0 <= row < len(rows) and 0 <= column < len(rows[0]) else cell


def _path(rows: tuple[str, ...]) -> bool:
    """Whether the goal can be reached over frozen cells."""
    queue = [_cell(rows, "S")]
    seen = set(queue)
    for cell in queue:
        beside = {_step(rows, cell, move) for move in range(4)} - seen
        seen |= beside
        queue += [next_cell for next_cell in beside if rows[next_cell[0]][next_cell[1]] == "F"]
    return _cell(rows, "G") in seen
