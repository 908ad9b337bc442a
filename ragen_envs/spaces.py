"""The text spaces of the worlds: what an env says, and what it hears."""

import sys
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import read_from_shared_memory

SEPARATOR = "||"
_PRINTABLE = frozenset(map(chr, range(32, 127))) | {"\n"}


class Words(spaces.Text):
    """What an env says: up to `length` characters of printable ASCII, newlines and the `extra` ones."""

    def __init__(self, length: int, extra: Iterable[str] = (), seed: int | np.random.Generator | None = None):
        """See the class."""
        super().__init__(length, min_length=0, charset=_PRINTABLE | frozenset(extra), seed=seed)


class Answers(spaces.Text):
    """What an env hears: every string (the env judges it); samples are legal answers of one to `most` moves."""

    def __init__(self, moves: Sequence[str], most: int, seed: int | np.random.Generator | None = None):
        """Answers sampled from `moves`, one to `most` of them."""
        self.moves, self.most = tuple(moves), most
        super().__init__(max_length=sys.maxsize, min_length=0, charset=_PRINTABLE, seed=seed)

    def contains(self, x: Any) -> bool:
        """True for any string at all: an LLM's answer is never outside the space, only good or bad."""
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A uniformly drawn number of uniformly drawn moves, e.g. "Up || Left"."""
        count = int(self.np_random.integers(1, self.most + 1))
        return f" {SEPARATOR} ".join(self.moves[int(self.np_random.integers(len(self.moves)))] for _ in range(count))

    def __eq__(self, other: object) -> bool:
        """Equal when the moves and the number of them are."""
        return isinstance(other, Answers) and (self.moves, self.most) == (other.moves, other.most)

    def __repr__(self) -> str:
        """Answers with their moves, not with a charset of a hundred characters."""
        return f"Answers({self.moves}, most={self.most})"


class SharedWords(Sequence):
    """What `count` envs say now, read from shared memory at each access; a copy is the tuple of strings it stands for.

    Gymnasium's `AsyncVectorEnv` reads its buffer once and hands out copies of what it read. That suits arrays, which are views of
    the buffer, but would return every text of the start (nothing) for ever.
    """

    def __init__(self, space: Words, memory: Any, count: int):
        """`memory` is what Gymnasium's `create_shared_memory` made for `count` envs of `space`."""
        self.space, self.memory, self.envs = space, memory, count

    def now(self) -> Any:
        """The strings of all envs, as a tuple."""
        return read_from_shared_memory.dispatch(spaces.Text)(self.space, self.memory, self.envs)

    def __len__(self) -> int:
        """The number of envs."""
        return self.envs

    def __getitem__(self, index: Any) -> Any:
        """What env `index` says now."""
        return self.now()[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        """The strings as they are now; the next step does not change them."""
        return deepcopy(self.now(), memo)


@read_from_shared_memory.register(Words)
def _read_words(space: Words, shared_memory: Any, n: int = 1) -> Any:
    return SharedWords(space, shared_memory, n)
