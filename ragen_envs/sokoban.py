"""Sokoban: push every box onto a target. Boards made from a seed, from level packs, or from a text."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ragen_envs.levels import SPLITS, XSB, Level, load, read_one, split_of
from ragen_envs.solvers import sokoban_path
from ragen_envs.text_env import TextEnv, Tile, one_of

_CODES = {symbol: code for code, symbol in enumerate("# .*$@+")}  # XSB in the order of `Sokoban.tiles`
# The floor stamped around the walker, as (row, column) offsets: a bar each way, two corners and a block.
_STAMPS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
_STATES = 30_000  # that one backward search may visit
_FAILURES = 300  # in a row after which a configuration counts as impossible
_REJECTIONS = 1_000  # after which a split counts as empty


class Sokoban(TextEnv):
    """Push every box onto a target; boxes cannot be pulled, so a push can be a mistake for good.

    Moves: Up, Down, Left, Right; moving into a box pushes it when the cell behind it is free. A move against a wall or a stuck
    box does nothing and still counts.

    Rewards: -0.1 a move; +1 when a box enters a target, -1 when it leaves one; +10 when the last box gets home. One box
    solved in n moves returns 11 - 0.1 n. Terminated when solved and only then; truncated by the budgets.

    Boards are carved, filled and played backwards from the solved state as in gym-sokoban and RAGEN (Racaniere et al. 2017),
    so that every one is solvable. `split` keeps the boards of one split, judged by the board's content up to symmetry.
    """

    title: ClassVar[str] = "Sokoban"
    tiles: ClassVar[tuple[Tile, ...]] = (
        Tile("wall", "#", "wall"),
        Tile("floor", "_", "empty floor"),
        Tile("target", "O", "target", "Targets"),
        Tile("box on target", "√", "box on a target", "Boxes on target"),
        Tile("box", "X", "box", "Boxes"),
        Tile("player", "P", "player", "Player"),
        Tile("player on target", "S", "player on a target", "Player on target"),
    )
    listed: ClassVar[tuple[int, ...]] = (2, 4, 3, 5, 6)

    def __init__(
        self,
        *,
        size: tuple[int, int] = (6, 6),
        boxes: int = 1,
        search_depth: int = 300,
        split: str | None = "train",
        levels: str | Path | Sequence[str] | None = None,
        **settings: Any,
    ):
        """Boards of `size` (rows, columns) with `boxes` boxes, made by a backward search of `search_depth` moves.

        `split` is "train", "val", "test" or None (every board). `levels` plays given boards instead (a pack's name, a file's
        path or a list of level texts; seed modulo their number picks one). `settings` are those of `TextEnv`.
        """
        one_of("split", split, (*SPLITS, None))
        if levels is not None and split not in ("train", None):
            raise ValueError(f"levels are a set of their own: give either levels or split={split!r}")
        self.size, self.boxes, self.search_depth, self.split = (int(size[0]), int(size[1])), boxes, search_depth, split
        self.levels: list[Level] = [] if levels is None else load(levels, XSB)
        if self.levels:
            self.size = (max(len(level.rows) for level in self.levels), max(len(level.rows[0]) for level in self.levels))
        else:
            self._check()
        super().__init__(actions=["Up", "Down", "Left", "Right"], shape=self.size, **settings)

    def _check(self) -> None:
        """Refuse boards that cannot exist: a push needs three cells in line; boxes, targets and player need cells of their own."""
        (rows, columns), boxes = self.size, self.boxes
        if boxes < 1 or self.search_depth < 2:
            raise ValueError(f"need at least 1 box and a search_depth of 2, not {boxes} and {self.search_depth}")
        if min(rows, columns) < 3 or max(rows, columns) < 5 or (rows - 2) * (columns - 2) < 2 * boxes + 1:
            raise ValueError(f"a {rows}x{columns} board has no room for {boxes} box{'es' * (boxes > 1)}: at least 3x5, walls included")

    # -- the game ----------------------------------------------------------------------------------------------------------

    def _deal(self, seed: int, level: str | None) -> None:
        if level is not None:
            rows = read_one(level, XSB, self.shape)
        elif self.levels:
            rows = self.levels[seed % len(self.levels)].rows
        else:
            rows = generate(seed, self.size, self.boxes, self.search_depth, self.split)
        cells = [_CODES[symbol] for row in rows for symbol in row]
        self._columns = len(rows[0])
        self._steps = (-self._columns, self._columns, -1, 1)
        self._ground = [2 if cell in (2, 3, 6) else 1 if cell else 0 for cell in cells]
        self._boxes = {i for i, cell in enumerate(cells) if cell in (3, 4)}
        self._player = next(i for i, cell in enumerate(cells) if cell in (5, 6))
        self._path: list[int] | None = None
        if self._solved():
            raise ValueError("the level is solved already")

    def _move(self, move: int) -> tuple[float, bool]:
        self._path = (self._path[1:] or None) if self._path and self._path[0] == move else None
        step, ground = self._steps[move], self._ground
        ahead, far = self._player + step, self._player + 2 * step
        reward = -0.1
        pushes = ahead in self._boxes
        if not ground[ahead] or (pushes and (not ground[far] or far in self._boxes)):
            return reward, self._solved()
        if pushes:
            self._boxes = self._boxes - {ahead} | {far}
            reward += (ground[far] == 2) - (ground[ahead] == 2) + 10 * self._solved()
        self._player = ahead
        return reward, self._solved()

    def _solved(self) -> bool:
        return all(self._ground[box] == 2 for box in self._boxes)

    def _board(self) -> np.ndarray:
        cells = list(self._ground)
        for box in self._boxes:
            cells[box] = 3 if cells[box] == 2 else 4
        cells[self._player] = 6 if cells[self._player] == 2 else 5
        return np.array(cells).reshape(-1, self._columns)

    def _goal(self) -> str:
        walls = " Walls are not listed." if self.view == "coord" else ""
        return (
            "You are the player in Sokoban. Push every box onto a target. When you stand next to a box, move towards it to push it: "
            f"the cell behind it must be free. You cannot push a box through a wall or another box, and you cannot pull.{walls}"
        )

    def _plan(self, allowed: int, left: int, turns: int | None) -> list[str]:
        if self._path is None:
            self._path = sokoban_path(self._board(), left if turns is None else min(left, turns * self.moves_per_turn)) or [0]
        return [self.actions[move] for move in self._path]


# -- making boards ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def generate(seed: int, size: tuple[int, int], boxes: int, search_depth: int = 300, split: str | None = None) -> tuple[str, ...]:
    """The XSB rows of the board of `seed`; boards of other splits are skipped, candidate by candidate, in the seed's own stream.

    Raises `ValueError` when boards with this many boxes do not come about, or none of the split does.
    """
    rng = np.random.default_rng(seed)
    rejected = failed = visited = 0
    while failed < _FAILURES and visited < 20 * _STATES and rejected < _REJECTIONS:
        rows, states = _candidate(rng, size, boxes, search_depth)
        if rows is None:
            failed, visited = failed + 1, visited + states
        elif split is None or split_of(rows) == split:
            return rows
        else:
            rejected, failed, visited = rejected + 1, 0, 0
    what = f"{size[0]}x{size[1]} board with {boxes} box{'es' * (boxes > 1)}"
    if rejected:
        raise ValueError(f"found no {what} of split {split!r} among {rejected}: there are few such boards; split=None takes all")
    raise ValueError(f"found no solvable {what} in {failed} tries: take a larger board, fewer boxes or a larger search_depth")


def _candidate(rng: np.random.Generator, size: tuple[int, int], boxes: int, depth: int) -> tuple[tuple[str, ...] | None, int]:
    """One try: the rows of a board, or None when it comes to nothing; and the states its search visited."""
    free, columns = _carve(rng, *size), size[1]
    floor = np.flatnonzero(free).tolist()
    if len(floor) < 2 * boxes + 1:
        return None, 1
    player, *targets = (floor[i] for i in rng.permutation(len(floor))[: boxes + 1])
    found, states = _play_backwards(free, columns, player, tuple(targets), depth)
    if found is None:
        return None, states
    moved, player, placed = found
    player = _stroll(rng, free, columns, player, placed, moved)
    cells = [" " if is_free else "#" for is_free in free]
    for target, box in zip(targets, placed, strict=True):
        cells[target], cells[box] = ".", "$"
    cells[player] = "+" if player in targets else "@"
    return tuple("".join(cells[i : i + columns]) for i in range(0, len(cells), columns)), states


def _carve(rng: np.random.Generator, rows: int, columns: int) -> list[bool]:
    """True where there is floor: a random walk that turns with probability 0.35 and stamps floor around itself."""
    free = [False] * (rows * columns)
    length = int(1.7 * (rows + columns))
    chance = rng.random((length + 1, 3)).tolist()
    r, c, heading = 1 + int(chance[length][0] * (rows - 1)), 1 + int(chance[length][1] * (columns - 1)), int(chance[length][2] * 4)
    for turn, direction, stamp in chance[:length]:
        if turn < 0.35:
            heading = int(direction * 4)
        down, right = ((-1, 0), (1, 0), (0, -1), (0, 1))[heading]
        r, c = max(min(r + down, rows - 2), 1), max(min(c + right, columns - 2), 1)
        for dr, dc in _STAMPS[int(stamp * len(_STAMPS))]:
            if 0 < r + dr < rows - 1 and 0 < c + dc < columns - 1:
                free[(r + dr) * columns + c + dc] = True
    return free


def _play_backwards(
    free: list[bool], columns: int, player: int, targets: tuple[int, ...], depth: int
) -> tuple[tuple[int, int, tuple[int, ...]] | None, int]:
    """Depth-first search over backward moves from the solved state: stepping away from a box pulls it along.

    Keeps the first state of the highest score: how often another box was pulled than before, times the boxes' total (Manhattan)
    distance from their targets; zero unless all targets are free. Returns ((distance, player, boxes) or None, states visited).
    """
    steps = (-columns, columns, -1, 1)
    goal = sum(1 << target for target in targets)
    best, found, seen = 0, None, set()
    stack = [(player, goal, targets, 0, -1, depth)]
    while stack and len(seen) < _STATES:
        player, mask, boxes, swaps, last, ttl = stack.pop()
        ttl -= 1
        key = mask * len(free) + player
        if ttl <= 0 or key in seen:
            continue
        seen.add(key)
        if swaps and not mask & goal and not goal >> player & 1:
            moved = sum(abs(a // columns - b // columns) + abs(a % columns - b % columns) for a, b in zip(boxes, targets, strict=True))
            if swaps * moved > best:
                best, found = swaps * moved, (moved, player, boxes)
        for step in reversed(steps):
            ahead, behind = player + step, player - step
            if not free[ahead] or mask >> ahead & 1:
                continue
            if not mask >> behind & 1:
                stack.append((ahead, mask, boxes, swaps, last, ttl))
            else:
                pulled = boxes.index(behind)
                dragged = (*boxes[:pulled], player, *boxes[pulled + 1 :])
                stack.append((ahead, mask ^ (1 << behind) ^ (1 << player), dragged, swaps + (pulled != last), pulled, ttl))
    return found, len(seen)


def _stroll(rng: np.random.Generator, free: list[bool], columns: int, player: int, boxes: tuple[int, ...], moved: int) -> int:
    """Where the player stands after up to three random steps to new cells, each taken by 0.5 (the first by 0.8 if the boxes moved 1)."""
    been, go_on = {player}, 0.8 if moved == 1 else 0.5
    for _ in range(3):
        around = (player - columns, player + columns, player - 1, player + 1)
        ways = [cell for cell in around if free[cell] and cell not in boxes and cell not in been]
        chance, which = rng.random(2)
        if chance >= go_on or not ways:
            break
        player, go_on = ways[int(which * len(ways))], 0.5
        been.add(player)
    return player
