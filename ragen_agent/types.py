"""The data of play: a reply, a turn, a trajectory. Text and numbers only; JSON-able by `dataclasses.asdict`."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What a policy said in one turn; `ids` and `logprobs` are those of the sampler, never re-encoded."""

    text: str
    action: str  # the answer in the text, "" where its form is broken: the env's action
    prompt_ids: list[int] = []
    ids: list[int] = []  # every sampled token, the end token included when it was sampled
    logprobs: list[float] = []  # of each of `ids`, at the sampling temperature, over the whole vocabulary
    finish: str = "stop"  # "stop": ended by itself; "length": cut by max_tokens; "context": no room was left to say anything


@dataclass
class Turn:
    """One env step: what was said, and what the world made of it."""

    reply: Reply
    observation: str  # after the reply
    reward: float
    info: dict[str, Any]


@dataclass
class Trajectory:
    """One episode. A group is `level`: episodes with equal env, settings and seed share the level and never the luck."""

    env_id: str
    seed: int
    luck: int
    observation: str  # the first one
    info: dict[str, Any]  # of reset
    turns: list[Turn] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    no_room: bool = False  # ended because its context left no room for another reply

    @property
    def rules(self) -> str:
        """What the world tells its player before the first turn."""
        return self.info["rules"]

    @property
    def level(self) -> tuple[str, int]:
        """(env_id, seed): the identity of the episode's group."""
        return self.env_id, self.seed

    @property
    def done(self) -> bool:
        """Whether the episode has ended, by its own rules or by a limit."""
        return self.terminated or self.truncated

    @property
    def reward(self) -> float:
        """The undiscounted sum of the turns' rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def success(self) -> bool:
        """The world's own word after the last turn."""
        return bool(self.turns and self.turns[-1].info["success"])

    @property
    def now(self) -> dict[str, Any]:
        """The latest info: of the last turn, or of reset before the first."""
        return self.turns[-1].info if self.turns else self.info
