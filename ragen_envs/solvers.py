"""The exact player of each game: search for Sokoban, dynamic programming for FrozenLake, the better arm for the bandit."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

# -- Sokoban ---------------------------------------------------------------------------------------------------------------

_NEVER = 1 << 20
_State = tuple[int, tuple[int, ...]]  # the player's cell after a push, and the boxes' cells in order


def sokoban_path(board: np.ndarray | Sequence[Sequence[int]], limit: int | None = None) -> list[int] | None:
    """A shortest solution of a Sokoban board: move numbers (0 Up, 1 Down, 2 Left, 3 Right); [] when it is solved already.

    `board` is (rows, columns) tile numbers in the order of `Sokoban.tiles`. None when there is no solution of at most `limit`
    moves (None: of any length). A* over pushes: a state is (player, boxes) after a push, an edge is a walk and a push, and the
    bound is the cheapest assignment of boxes to targets in pushes, which never overestimates, so the moves are fewest.
    """
    room = _Room(board)
    start = (room.player, room.boxes)
    most = _NEVER - 1 if limit is None else limit
    came: dict[_State, tuple[int, _State, int, int]] = {start: (0, start, 0, 0)}  # state -> moves so far, from, walk's end, push
    heap = [(room.bound(room.boxes), 0, start)] if room.bound(room.boxes) <= most else []
    while heap:
        _, minus, here = heappop(heap)
        cost = came[here][0]
        if -minus > cost:
            continue  # reached more cheaply since
        if room.bound(here[1]) == 0:
            return room.moves(came, here)
        for total, after, walked, move in room.pushed(here, cost):
            estimate = total + room.bound(after[1])
            if estimate <= most and (after not in came or total < came[after][0]):
                came[after] = (total, here, walked, move)
                heappush(heap, (estimate, -total, after))
    return None


class _Room:
    """A Sokoban board as a flat list of cells; a wall column between rows and wall rows around keep every step inside."""

    def __init__(self, board: np.ndarray | Sequence[Sequence[int]]):
        rows = np.asarray(board).tolist()
        width = len(rows[0]) + 1
        cells = [0] * width + [cell for row in rows for cell in (*row, 0)] + [0] * width
        self.steps = (-width, width, -1, 1)
        self.free = [cell != 0 for cell in cells]
        self.boxes = tuple(i for i, cell in enumerate(cells) if cell in (3, 4))
        self.player = next(i for i, cell in enumerate(cells) if cell in (5, 6))
        self.distances = [self._distances(i) for i, cell in enumerate(cells) if cell in (2, 3, 6)]
        self.bounds: dict[tuple[int, ...], int] = {}

    def _distances(self, target: int) -> list[int]:
        """Per cell the fewest pushes that bring a lone box from it to `target`; `_NEVER` from where it cannot get there."""
        far = [_NEVER] * len(self.free)
        far[target] = 0
        queue = [target]
        for cell in queue:
            for step in self.steps:  # backwards: a pull from `cell` to `cell - step` with the player beyond it
                if self.free[cell - step] and self.free[cell - 2 * step] and far[cell - step] == _NEVER:
                    far[cell - step] = far[cell] + 1
                    queue.append(cell - step)
        return far

    def bound(self, boxes: tuple[int, ...]) -> int:
        """The fewest pushes that give every box a target of its own if boxes did not block each other; 0 when solved."""
        if boxes not in self.bounds:
            best = {0: 0}  # targets taken (bits) -> pushes
            for box in boxes:
                following: dict[int, int] = {}
                for taken, pushes in best.items():
                    for target, distance in enumerate(self.distances):
                        if not taken >> target & 1 and distance[box] < _NEVER:
                            after, total = taken | 1 << target, pushes + distance[box]
                            following[after] = min(total, following.get(after, _NEVER))
                best = following
            self.bounds[boxes] = min(best.values(), default=_NEVER)
        return self.bounds[boxes]

    def walk(self, player: int, boxes: tuple[int, ...]) -> dict[int, tuple[int, int]]:
        """Every cell the player can walk to -> (moves, the move that enters it); the player's own cell has move -1."""
        seen = {player: (0, -1)}
        for cell in (queue := [player]):
            moves = seen[cell][0] + 1
            for move, step in enumerate(self.steps):
                ahead = cell + step
                if self.free[ahead] and ahead not in seen and ahead not in boxes:
                    seen[ahead] = (moves, move)
                    queue.append(ahead)
        return seen

    def pushed(self, state: _State, cost: int) -> Iterator[tuple[int, _State, int, int]]:
        """Every push after a walk from `state`: (moves in all, the state after it, where the walk ends, the push's move)."""
        player, boxes = state
        walk = self.walk(player, boxes)
        for number, box in enumerate(boxes):
            for move, step in enumerate(self.steps):
                far = box + step
                if box - step in walk and self.free[far] and far not in boxes:
                    after = tuple(sorted((*boxes[:number], far, *boxes[number + 1 :])))
                    yield cost + walk[box - step][0] + 1, (box, after), box - step, move

    def moves(self, came: dict[_State, tuple[int, _State, int, int]], state: _State) -> list[int]:
        """The moves that lead to `state`, read backwards through `came`."""
        path = []
        while came[state][0]:
            _, before, cell, push = came[state]
            path.append(push)
            walk = self.walk(*before)
            while walk[cell][1] >= 0:
                path.append(walk[cell][1])
                cell -= self.steps[walk[cell][1]]
            state = before
        return path[::-1]


# -- FrozenLake ------------------------------------------------------------------------------------------------------------


def value_iteration(transitions: np.ndarray, rewards: np.ndarray, gamma: float = 1.0, horizon: int | None = None) -> np.ndarray:
    """Optimal value (S,) of every state of a Markov decision process, for a player who sees each state.

    `transitions` is (S, A, S), `rewards` (S, A) the expected reward of a move. `horizon` is the number of moves; None means until
    nothing changes by more than 1e-12, which at `gamma` 1 needs a process that ends by itself.
    """
    values, moves = np.zeros(len(transitions)), 0
    while horizon is None or moves < horizon:
        better = (rewards + gamma * transitions @ values).max(axis=1)
        moves, change, values = moves + 1, np.abs(better - values).max(), better
        if horizon is None and change < 1e-12:
            break
    return values


class LakeTable(NamedTuple):
    """The exact player of a lake: indexed by [turns left, moves left, cell]."""

    values: np.ndarray  # probability of success, within 1e-9 a move
    lengths: np.ndarray  # moves in the best sequence for this turn
    codes: np.ndarray  # the sequence as a number in base 4, the first move its last digit

    def plan(self, turns: int, left: int, cell: int) -> list[int]:
        """The best sequence of this turn as move numbers; of equally good ones the shortest."""
        code = int(self.codes[turns, left, cell])
        return [code // 4**i % 4 for i in range(int(self.lengths[turns, left, cell]))]


_HASTE = 1e-9  # what a move left at the goal is worth: enough to break ties for the faster way, too little to change a value


def lake_values(transitions: np.ndarray, goal: int, moves: int, per_turn: int = 1, turns: int | None = None) -> LakeTable:
    """Best play of a lake with `moves` moves in `turns` turns (None: no limit) of 1 to `per_turn` moves each, by dynamic programming.

    The player sees the board between turns and moves blindly within one, so V(turns, left, cell) is the greatest over sequences
    of E[V(turns - 1, left - length, cell after)]. `transitions` is (S, 4, S) with absorbing goal and holes. The work of a turn
    grows as 4 ** per_turn; with `per_turn` 1, or turns enough for all moves, this is plain value iteration.
    """
    if turns is None:
        per_turn, turns = 1, moves
    per_turn, turns, states = min(per_turn, moves), min(turns, moves), len(transitions)
    if states * 4**per_turn * (moves + 1 - per_turn) > 1 << 25:
        raise ValueError(f"4 ** {per_turn} sequences of moves a turn are too many to compare on {states} cells with {moves} moves")
    back = transitions.transpose(2, 1, 0).reshape(states, 4 * states)
    values = np.full((turns + 1, moves + 1, states), -1.0)
    values[0] = values[:, 0] = 0.0
    values[:, :, goal] = 1.0 + _HASTE * np.arange(moves + 1)
    lengths, codes = np.zeros(values.shape, int), np.zeros(values.shape, int)
    for turn in range(1, turns + 1):
        worth, fewest = values[turn - 1, :moves, None], 0  # (moves left after the turn, from `fewest` up; sequences; S)
        for length in range(1, per_turn + 1):  # so that of equal sequences the shortest is kept
            if fewest + length > moves:
                break
            worth = (worth[: moves + 1 - length - fewest] @ back).reshape(moves + 1 - length - fewest, -1, states)  # each move put first
            rounded = np.round(worth, 12)  # equal sequences must look equal on every machine
            best, top = rounded.argmax(axis=1), rounded.max(axis=1)
            left = slice(fewest + length, moves + 1)
            wins = top > values[turn, left] + 1e-11
            for table, entry in ((values, top), (lengths, length), (codes, best)):
                table[turn, left] = np.where(wins, entry, table[turn, left])
            if length == 1:  # with turns to spare afterwards, a shorter sequence and one look more is at least as good
                worth, fewest = worth[turn - 1 :], turn - 1
    return LakeTable(values, lengths, codes)


# -- Bandit ----------------------------------------------------------------------------------------------------------------


def better_arm(payoffs: Sequence[Sequence[tuple[float, float]]]) -> int:
    """The number of the arm with the greatest mean payoff; an arm is a list of (probability, reward)."""
    means = [sum(probability * reward for probability, reward in arm) for arm in payoffs]
    return means.index(max(means))
