"""A game played in words: turns of several moves, budgets, penalties, frames and views, written once for every world."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np

from ragen_envs.spaces import SEPARATOR, Answers, Words

VIEWS = ("grid", "compact", "coord", "grid_coord")
RENDER_MODES = ("ansi", "rgb_array")


def one_of(what: str, value: object, known: Iterable[object]) -> None:
    """Raise a `ValueError` that lists the known choices unless `value` is one of them."""
    known = list(known)
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; known: {', '.join(map(str, known))}")


class Tile(NamedTuple):
    """One kind of cell: its name for the renderer, its symbol in text, its meaning in the legend, its heading in coordinate views."""

    name: str
    symbol: str
    meaning: str  # "" leaves the tile out of the legend
    heading: str = ""  # "" leaves the tile out of the coordinate views


class TextEnv(gym.Env[str, str]):
    """A world that says text and hears text.

    An action is the answer's text, moves separated by `||`; a step is a turn. Move names match whatever their case. Unknown
    moves are dropped, moves beyond the allowance (the smaller of `moves_per_turn` and the moves left in the episode) are not
    played; either of them, or no legal move at all, makes the turn `valid: False` and costs `format_penalty` once. The
    episode is truncated when `moves_per_episode` moves or `turns_per_episode` turns (None: no limit) are played. The env counts the
    turns itself, for the prompt must tell the limit and the exact player must plan for it; `TimeLimit` hides it from both.

    The level comes from `seed`; luck (slips, payoffs) from `(seed, options["luck"])`.

    A game writes `_deal`, `_move`, `_board`, `_solved`, `_goal` and `_plan`, and the class attributes `tiles` and `title`.

    `info` (JSON-able): `rules` (what the player must know, made from this instance), `actions` (legal move names), `frames`
    (the boards since the last turn, as lists of tile numbers), `moves` (played this turn), `valid`, `effective` (the board
    changed), `success`, `state` (a key, as a list of integers: equal for equal states of a level), `left` (moves left), `allowed`
    (moves allowed in the next turn), `seed`, `luck`; with `hints=True` also `plan`, the exact player's moves from here.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": list(RENDER_MODES), "render_fps": 4}  # pyright: ignore[reportIncompatibleVariableOverride]
    tiles: ClassVar[tuple[Tile, ...]] = ()
    title: ClassVar[str] = ""
    listed: ClassVar[tuple[int, ...]] = ()  # the order of the tiles in coordinate views; () is the order of `tiles`

    def __init__(
        self,
        *,
        actions: Sequence[str],
        shape: tuple[int, int],
        moves_per_turn: int = 5,
        moves_per_episode: int = 10,
        turns_per_episode: int | None = 5,
        format_penalty: float = -0.1,
        view: str = "grid",
        vocab: str | None = None,
        hints: bool = False,
        render_mode: str | None = None,
        text_length: int | None = None,
        words: Sequence[str] = (),
    ):
        """See the class; `shape` is (rows, columns) of the largest board, `vocab` one symbol a tile in the order of `tiles`.

        `text_length` bounds an observation that is not a board; `words` are all move names when they differ by level.
        """
        one_of("view", view, VIEWS)
        if render_mode is not None:
            one_of("render_mode", render_mode, RENDER_MODES)
        budgets = {"moves_per_turn": moves_per_turn, "moves_per_episode": moves_per_episode, "turns_per_episode": turns_per_episode}
        for name, budget in budgets.items():
            if budget is not None and budget < 1:
                raise ValueError(f"{name} is at least 1, not {budget}")
        symbols = vocab if vocab is not None else "".join(tile.symbol for tile in self.tiles)
        if len(symbols) != len(self.tiles) or len(set(symbols)) != len(symbols) or any(s.isspace() for s in symbols):
            names = ", ".join(tile.name for tile in self.tiles)
            raise ValueError(f"vocab {vocab!r} needs {len(self.tiles)} different visible symbols, for: {names}")
        self.symbols, self.view, self.hints, self.render_mode = symbols, view, hints, render_mode
        self.moves_per_turn, self.moves_per_episode, self.turns_per_episode = moves_per_turn, moves_per_episode, turns_per_episode
        self.format_penalty = format_penalty
        self.actions, self.shape = list(actions), shape
        rows, columns = shape
        length = 4 * rows * columns + (200 + 12 * rows * columns if "coord" in view else 0)
        self.observation_space = Words(text_length or length, symbols)
        self.action_space = Answers(words or self.actions, moves_per_turn)

    # -- what a game writes ------------------------------------------------------------------------------------------------

    def _deal(self, seed: int, level: str | None) -> None:
        """Set up the level of `seed` (or the one written in `level`), drawing from `np.random.default_rng` of that seed only."""
        raise NotImplementedError

    def _move(self, move: int) -> tuple[float, bool]:
        """Play move number `move` of `self.actions`; return (reward, terminated). Chance comes from `self.luck` only."""
        raise NotImplementedError

    def _board(self) -> np.ndarray:
        """The state's one face: (rows, columns) integer array of tile numbers."""
        raise NotImplementedError

    def _state(self) -> list[int]:
        """What tells one state of a level from another, for its dynamics; the board, where a game does not know better."""
        return self._board().ravel().tolist()

    def _solved(self) -> bool:
        """Whether the goal is reached."""
        raise NotImplementedError

    def _goal(self) -> str:
        """The rules of this instance in a few sentences, without legend, moves and budgets (`rules` adds them)."""
        raise NotImplementedError

    def _plan(self, allowed: int, left: int, turns: int | None) -> list[str]:
        """The exact player's moves from here: `allowed` this turn, `left` in all, `turns` turns left (None: no limit)."""
        raise NotImplementedError

    def _say(self) -> str:
        """The observation; the board in the chosen view unless a game has more to say."""
        return self.board_text()

    # -- Gymnasium ---------------------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Deal a level. Options: `luck` (int >= 0, default 0) and `level` (one level's text). Unknown options are errors."""
        super().reset(seed=seed)
        options = dict(options or {})
        for name in options:
            one_of("reset option", name, ("luck", "level"))
        luck = options.get("luck", 0)
        if isinstance(luck, bool) or not isinstance(luck, int | np.integer) or luck < 0:
            raise ValueError(f"luck is an integer >= 0, not {luck!r}")
        level = options.get("level")
        if level is not None and not isinstance(level, str):
            raise ValueError(f"level is one level's text, not {level!r}")
        self._seed = int(seed) if seed is not None else int(self.np_random.integers(2**31))
        self._luck_seed = int(luck)
        self.luck = np.random.default_rng([self._seed, self._luck_seed, 0x1C4])
        self.left, self.turn = self.moves_per_episode, 0
        self._deal(self._seed, level)
        return self._say(), self._info(moves=[], frames=[self.frame()], valid=True, effective=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn; see the class. Raises `TypeError` when `action` is not a string."""
        if not isinstance(action, str):
            raise TypeError(f"an action is the answer's text, such as {self.actions[0]!r}, not {type(action).__name__}")
        wanted, unknown = self.read(action)
        allowed = self.allowed
        valid = bool(wanted) and not unknown and len(wanted) <= allowed
        total, terminated, moves = (0.0 if valid else self.format_penalty), False, []
        before, frames = self.frame(), []
        for move in wanted[:allowed]:
            reward, terminated = self._move(move)
            total += reward
            self.left -= 1
            moves.append(self.actions[move])
            frames.append(self.frame())
            if terminated:
                break
        self.turn += 1
        out_of_turns = self.turns_per_episode is not None and self.turn >= self.turns_per_episode
        truncated = not terminated and (self.left <= 0 or out_of_turns)
        effective = any(frame != before for frame in frames)
        info = self._info(terminated or truncated, moves=moves, frames=frames, valid=valid, effective=effective)
        return self._say(), float(total), terminated, truncated, info

    def render(self) -> Any:
        """The board as text (`ansi`) or as a (H, W, 3) uint8 picture (`rgb_array`)."""
        if self.render_mode == "rgb_array":
            from ragen_renderers.draw import draw

            return draw(self._board(), [tile.name for tile in self.tiles])
        return self.board_text() if self.render_mode == "ansi" else None

    # -- the parts of a turn -----------------------------------------------------------------------------------------------

    @property
    def allowed(self) -> int:
        """How many moves the next turn may play: the smaller of the turn's budget and what the episode has left."""
        return min(self.moves_per_turn, self.left)

    def read(self, action: str) -> tuple[list[int], int]:
        """Answer text -> (numbers of the moves it names, in order; how many parts name no move). Empty parts do not count."""
        lookup = {name.lower(): number for number, name in enumerate(self.actions)}
        parts = [part.strip().lower() for part in action.split(SEPARATOR)]
        moves = [lookup[part] for part in parts if part in lookup]
        return moves, sum(1 for part in parts if part and part not in lookup)

    def plan(self) -> list[str]:
        """The exact player's moves from here, at least one; a stochastic world's plan is this turn's moves only."""
        return self._plan(self.allowed, self.left, None if self.turns_per_episode is None else self.turns_per_episode - self.turn)

    def frame(self) -> list[list[int]]:
        """The board as JSON-able rows of tile numbers."""
        return self._board().tolist()

    def _info(self, over: bool = False, **turn: Any) -> dict[str, Any]:
        info = {
            "rules": self.rules(),
            "actions": list(self.actions),
            "success": bool(self._solved()),
            "state": self._state(),
            "left": self.left,
            "allowed": self.allowed,
            "seed": self._seed,
            "luck": self._luck_seed,
            **turn,
        }
        if self.hints:
            info["plan"] = [] if over else self.plan()
        return info

    # -- words -------------------------------------------------------------------------------------------------------------

    def rules(self) -> str:
        """What a player must know, generated from this instance: goal, legend, bounds, moves and every budget."""
        parts = [self._goal()]
        legend = [f"{symbol} {tile.meaning}" for symbol, tile in zip(self.symbols, self.tiles, strict=True) if tile.meaning]
        if legend and self.view != "coord":
            parts.append("The meaning of each symbol in the state is: " + ", ".join(legend) + ".")
        if "coord" in self.view and any(tile.heading for tile in self.tiles):
            rows, columns = self._board().shape
            parts.append(f"Coordinates are (row, column), from (0, 0) at the top left to ({rows - 1}, {columns - 1}) at the bottom right.")
        parts.append(f"Your available actions are: {', '.join(self.actions)}.")
        budget = f"You can make up to {self.moves_per_turn} action{'s' * (self.moves_per_turn > 1)} in a turn"
        budget += f", separated by {SEPARATOR}," if self.moves_per_turn > 1 else ""
        budget += f" and up to {self.moves_per_episode} in all"
        if self.turns_per_episode is not None:
            budget += f", within {self.turns_per_episode} turn{'s' * (self.turns_per_episode > 1)}"
        return "\n".join([*parts, budget + "."])

    def board_text(self) -> str:
        """The board in the env's view: cells separated by a space, `compact`, coordinates, or grid and coordinates."""
        board = self._board()
        glue = "" if self.view == "compact" else " "
        grid = "\n".join(glue.join(self.symbols[cell] for cell in row) for row in board)
        if self.view == "coord":
            return self._coordinates(board)
        return f"Coordinates:\n{self._coordinates(board)}\nGrid Map:\n{grid}" if self.view == "grid_coord" else grid

    def _coordinates(self, board: np.ndarray) -> str:
        lines = [f"Board size: {board.shape[0]} rows x {board.shape[1]} columns (zero-indexed)."]
        for number in self.listed or range(len(self.tiles)):
            tile, cells = self.tiles[number], np.argwhere(board == number)
            if tile.heading and len(cells):
                lines.append(f"{tile.heading}: " + ", ".join(f"({row}, {column})" for row, column in cells))
        return "\n".join(lines)
