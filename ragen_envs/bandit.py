"""The bandit with two named arms: one pull, and only the names hint at the payoffs (RAGEN's BiArm, arXiv:2504.20073)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ragen_envs.levels import SPLITS
from ragen_envs.solvers import better_arm
from ragen_envs.text_env import SEPARATOR, TextEnv, Tile, one_of

PAIRS: dict[str, tuple[tuple[str, str], ...]] = {  # (low arm, high arm); no name is in two splits
    "train": (
        ("Teacher", "Trader"),
        ("Nurse", "StartupFounder"),
        ("Librarian", "Investor"),
        ("Accountant", "StockBroker"),
        ("Engineer", "RealEstateAgent"),
        ("Pharmacist", "Musician"),
        ("Clerk", "Freelancer"),
        ("Technician", "Youtuber"),
        ("Planner", "Artist"),
        ("Postman", "Pilot"),
        ("Banker", "VentureCapitalist"),
        ("Gardener", "Cryptominer"),
    ),
    "val": (("Tailor", "Inventor"), ("Plumber", "Actor"), ("Dentist", "Novelist"), ("Locksmith", "Prospector")),
    "test": (
        ("Receptionist", "Explorer"),
        ("Archivist", "Filmmaker"),
        ("Bookkeeper", "Consultant"),
        ("SocialWorker", "Photographer"),
        ("Mechanic", "GameDesigner"),
        ("Secretary", "Entrepreneur"),
        ("Cashier", "DataScientist"),
        ("CivilServant", "StartupAccelerator"),
    ),
}
LOW = ((1.0, 0.1),)  # (probability, points)
HIGH = ((0.25, 1.0), (0.75, 0.0))


class Bandit(TextEnv):
    """Choose one of two arms by what their names suggest, once.

    Moves: the two names, in the order shown. The low arm always pays 0.1; the high arm pays 1.0 with probability 0.25, else 0.
    The reward is the payoff. Terminated by the pull. Success is to have chosen the high arm, whatever it paid.

    The seed draws a pair of `split` ("train": RAGEN's 12 pairs, "test": its 8, "val": 4 of our own) and the order in which the
    names are shown; `names=(low, high)` fixes the pair instead. Luck draws the payoff. `reverse=True` makes the arm with the safe
    name the high one, so that the names mislead. Other settings are `TextEnv`'s, with one move and one turn an episode.
    """

    title = "Bandit"
    tiles: ClassVar[tuple[Tile, ...]] = (Tile("arm", "-", ""), Tile("pulled arm", "*", ""))  # for pictures only: no text shows them

    def __init__(self, split: str = "train", reverse: bool = False, names: Sequence[str] | None = None, **settings: Any):
        """See the class. Names that are not two different ones, and `names` together with a split, are a `ValueError`."""
        one_of("split", split, SPLITS)
        if names is not None and split != "train":
            raise ValueError(f"give names or split={split!r}, not both")
        self.split, self.reverse = split, reverse
        self.pairs = PAIRS[split] if names is None else (_checked(names),)
        words = [name for pair in self.pairs for name in pair]
        longest = len(_choice(*sorted(words, key=len)[-2:]))
        self.high = self.paid = ""  # names of arms
        self.points = 0.0
        settings = {"moves_per_turn": 1, "moves_per_episode": 1, "turns_per_episode": 1, "text_length": longest, **settings}
        super().__init__(actions=self.pairs[0], shape=(1, 2), words=words, **settings)

    def _deal(self, seed: int, level: str | None) -> None:
        if level is not None:
            raise ValueError(f"a bandit's level is a pair of names, not the text {level!r}: make the env with names=(low, high)")
        rng = np.random.default_rng(seed)
        low, high = self.pairs[int(rng.integers(len(self.pairs)))]
        self.actions = [low, high] if rng.random() < 0.5 else [high, low]
        self.payoffs = {low: HIGH, high: LOW} if self.reverse else {low: LOW, high: HIGH}
        self.high, self.paid, self.points = low if self.reverse else high, "", 0.0

    def _move(self, move: int) -> tuple[float, bool]:
        self.paid = self.actions[move]
        chances, points = zip(*self.payoffs[self.paid], strict=True)
        self.points = float(points[int(np.searchsorted(np.cumsum(chances), self.luck.random(), side="right"))])
        return self.points, True

    def _board(self) -> np.ndarray:
        return np.array([[int(name == self.paid) for name in self.actions]])

    def _solved(self) -> bool:
        return self.paid == self.high

    def _goal(self) -> str:
        return (
            "You play a bandit with two arms, each with a name. How much an arm pays, and how surely, is related to what its name "
            "stands for: reason about what each name suggests, then choose the arm with the greater mean payoff. Your action is the "
            "name of an arm; pulling it ends the game. The aim is to earn as many points as you can."
        )

    def _plan(self, allowed: int, left: int, turns: int | None) -> list[str]:
        return [self.actions[better_arm([self.payoffs[name] for name in self.actions])]]

    def board_text(self) -> str:
        """The two names on offer; after the pull, the arm and what it paid."""
        return f"{self.paid}: {self.points} points" if self.paid else _choice(*self.actions)


def _choice(one: str, other: str) -> str:
    return f"Choose between two arms: {one} and {other}."


def _checked(names: Sequence[str]) -> tuple[str, str]:
    """The pair, or a `ValueError`: names must be two, differ whatever their case, and survive in an answer."""
    bad = isinstance(names, str) or len(names) != 2 or len({name.lower() for name in names}) != 2
    if bad or any(not name or name != name.strip() or SEPARATOR in name or not name.isprintable() or not name.isascii() for name in names):
        raise ValueError(f"names are (low, high), two different names of visible ASCII characters without {SEPARATOR}, not {names!r}")
    return names[0], names[1]
