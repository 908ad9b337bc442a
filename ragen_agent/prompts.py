"""What the model is told, and the answer in what it says."""

from dataclasses import dataclass
from typing import Any

STYLES = ("full", "brief")
THINK, UNTHINK, ANSWER, UNANSWER = "<think>", "</think>", "<answer>", "</answer>"
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>", "<eos>")


def answer_in(text: str, think: bool = True, ends: tuple[str, ...] = ENDS) -> str:
    """The answer in a reply, or "" when its form is broken. Linear in the reply's length; never raises.

    The form is `<think>...</think><answer>...</answer>` (without thinking: the answer block alone), each tag exactly once,
    white space around the blocks, and nothing after them but one end token.
    """
    text = text.strip()
    for end in ends:
        if end and text.endswith(end):
            text = text[: -len(end)].rstrip()
            break
    tags = (THINK, UNTHINK, ANSWER, UNANSWER)
    counts = tuple(text.count(tag) for tag in tags)
    if counts != ((1, 1, 1, 1) if think else (0, 0, 1, 1)):
        return ""
    at = [text.find(tag) for tag in tags if tag in text]
    if at != sorted(at) or at[0] != 0 or not text.endswith(UNANSWER):
        return ""
    if think and text[at[1] + len(UNTHINK) : at[2]].strip():
        return ""
    return text[at[-2] + len(ANSWER) : at[-1]].strip()


@dataclass(frozen=True)
class Prompt:
    """How a world's words become chat messages; stored beside a model, so that it is always asked the way it was taught."""

    style: str = "full"
    """"full": rules in a system message, then each turn with its reward, its budget and the format; "brief": the state and
    the number of moves left, for a small model that was taught the rest."""
    think: bool = True
    """Whether a reply must hold a think block before its answer."""
    prefix: str = ""
    """Text put at the start of every reply for the model, never trained, e.g. "<think>" as RAGEN does."""
    words: int = 100
    """The length of a reply that the full style asks for."""
    window: int = 0
    """How many turns the model sees, the current one among them; 1: the current state alone; 0: all, in one growing context."""

    def __post_init__(self):
        """Refuse an unknown style and a negative window."""
        if self.window < 0:
            raise ValueError(f"a window is a number of turns, or 0 for all, not {self.window}")
        if self.style not in STYLES:
            raise ValueError(f"unknown prompt style {self.style!r}; known: {', '.join(STYLES)}")

    def system(self, rules: str) -> str:
        """The system message; "" for none."""
        return f"You are playing a game in text.\n{rules}" if self.style == "full" else ""

    def user(self, number: int, observation: str, info: dict[str, Any], reward: float | None = None) -> str:
        """The user message of turn `number` (from 1); `info` is the latest, `reward` that of the turn before (None: none)."""
        if self.style == "brief":
            return f"{observation}\n{info['left']} left"
        parts = [f"Reward of your last turn: {reward:g}"] if reward is not None else []
        if reward is not None and not info["valid"]:
            parts.append("Your last answer was not valid: only known actions, within the limits, in the exact format are played in full.")
        left, allowed = info["left"], info["allowed"]
        parts.append(f"Turn {number}, state:\n{observation}")
        parts.append(f"You have {left} action{'s' * (left != 1)} left, of which you can use {allowed} in this turn. {self.form()}")
        return "\n".join(parts)

    def form(self) -> str:
        """How a reply must look."""
        thoughts = f"{THINK} your thoughts {UNTHINK} " if self.think else ""
        return f"Reply with nothing but {thoughts}{ANSWER} your answer {UNANSWER}, in at most {self.words} words."

    def reply(self, thought: str, answer: str) -> str:
        """A well-formed reply, as an exact player gives it."""
        return f"{THINK} {thought} {UNTHINK} {ANSWER} {answer} {UNANSWER}" if self.think else f"{ANSWER} {answer} {UNANSWER}"
