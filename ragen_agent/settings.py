"""Settings that the commands share: which model plays which world, and how both are set up."""

import ctypes
import inspect
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

import gymnasium as gym
import torch
from gymnasium.envs.registration import load_env_creator
from gymnasium.error import Error as GymError

from ragen_agent.algos.lookup import of_file
from ragen_agent.backends import Backend, HFBackend, Sampling
from ragen_agent.chat import Chat
from ragen_agent.policies import LLMPolicy
from ragen_agent.pretrained import Pretrained, load

LAST_SEED = 2**32 - 1  # a generator's seeds are 64 bits, and several are made of one
BACKENDS: dict[str, Callable[..., Backend]] = {"hf": HFBackend}


@dataclass
class Play:
    """Who plays what; every command that plays has these flags."""

    model: str = "embedded"
    """"embedded", "smollm2", a folder in Hugging Face format, or a hub name."""
    env: str = "ragen/Sokoban-v0"
    """A Gymnasium id of a text world, or module:id for a world of yours."""
    env_args: tuple[str, ...] = ()
    """Settings of the world as name=value, the value in JSON or plain text, e.g. moves_per_turn=2 view=coord."""
    prompt: Literal["full", "brief"] | None = None
    """How the model is asked: "full" tells rules and form, "brief" only the state; default: as the model was taught, else full."""
    think: bool | None = None
    """Whether a reply must hold a think block; default: as the model was taught, else yes."""
    prefix: str | None = None
    """Text at the start of every reply, not sampled and not trained, e.g. "<think>" as RAGEN does."""
    window: int | None = None
    """How many turns the model sees, the current one among them; 0: all, in one growing context; default: as it was taught, else 0."""
    max_tokens: int = 48
    """The longest reply in tokens; a longer one is cut and ends its episode."""
    context: int | None = None
    """The longest context in tokens; default: what the model was built for."""
    batch_rows: int = 256
    """How many episodes are decoded at once."""
    micro_tokens: int = 2048
    """Tokens, padding included, that an update computes at once: results do not depend on it. A GPU wants more, e.g. 32768."""
    backend: str = "hf"
    """What samples: "hf" (transformers), or my_file:MyBackend, a class made as MyBackend(model, batch_rows=..., context=...)."""
    device: str = "auto"
    """"auto" (cuda when there is one), "cpu", "cuda", "cuda:1", "mps"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    threads: int | None = None
    """Threads of torch on a CPU; default: one a core, shared by the processes of this machine."""
    seed: int = 0
    """Decides every draw of the policy and every shuffle; the levels come from seeds of their own."""

    def start(self) -> Pretrained:
        """Set up torch and load the model, with the prompt that the flags ask for. Raises `ValueError` for what is unknown."""
        at_least(self, 0, "seed", "window")
        if self.seed > LAST_SEED:
            raise ValueError(f"--seed is at most {LAST_SEED}, not {self.seed}")
        at_least(self, 1, "threads", "max_tokens", "context", "batch_rows", "micro_tokens")
        self.world()
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by a launcher of several processes
        torch.set_num_threads(self.threads or max(1, cores))
        keep_memory()
        device = device_of(self.device)
        model, tokenizer, prompt = load(self.model, device, self.dtype)
        asked = {"style": self.prompt, "think": self.think, "prefix": self.prefix, "window": self.window}
        return Pretrained(model, tokenizer, replace(prompt, **{name: value for name, value in asked.items() if value is not None}))

    def policy(self, pretrained: Pretrained, temperature: float) -> LLMPolicy:
        """The model as a player."""
        model, tokenizer, prompt = pretrained
        backend = backend_of(self.backend)(model, batch_rows=self.batch_rows, context=self.context)
        sampling = Sampling(temperature=temperature, max_tokens=self.max_tokens)
        return LLMPolicy(backend, Chat(tokenizer, prompt.prefix), prompt, sampling, self.seed)

    def world(self, **more: Any) -> dict[str, Any]:
        """The world's settings out of `env_args`, and `more` of them. Raises `ValueError` for one that it does not have."""
        given, known = pairs(self.env_args), env_settings(self.env)
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{self.env} has no setting {unknown[0]!r}; known: {', '.join(known)}")
        return {**given, **{name: value for name, value in more.items() if value is not None}}


def device_of(name: str) -> str:
    """A device by its name. Raises `ValueError` for one that is unknown or not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {name!r} here; known: auto, cpu, cuda, cuda:<n>, mps") from error
    return name


def at_least(config: object, least: float, *names: str) -> None:
    """Raise `ValueError` unless each of these settings is None or a finite number that is `least` or more."""
    for name in names:
        if (value := vars(config)[name]) is not None and not least <= value < inf:
            raise ValueError(f"--{name.replace('_', '-')} is at least {least}, not {value}")


def above_zero(config: object, *names: str) -> None:
    """Raise `ValueError` unless each of these settings is None or a finite number above 0."""
    for name in names:
        if (value := vars(config)[name]) is not None and not 0 < value < inf:
            raise ValueError(f"--{name.replace('_', '-')} is a finite number above 0, not {value}")


def playable(env_id: str, settings: dict[str, Any]) -> None:
    """Raise `ValueError` unless the world can be made with these settings, deals a level and speaks text."""
    try:
        env = gym.make(env_id, **settings)
    except TypeError as error:
        raise ValueError(str(error)) from error
    try:
        if not isinstance(env.action_space, gym.spaces.Text):
            raise ValueError(f"{env_id} is no text world, its actions are {env.action_space}: a world of yours is a ragen_envs.TextEnv")
        env.reset(seed=0)
    finally:
        env.close()


def split_of_env(env_id: str, settings: dict[str, Any]) -> str | None:
    """The split that a world with these settings deals from: theirs, the id's own, or train; None: a world without splits."""
    if "split" not in env_settings(env_id):
        return None
    return settings.get("split", gym.spec(env_id.rpartition(":")[2]).kwargs.get("split", "train")) or "every"


def keep_memory() -> None:
    """Let glibc keep freed buffers instead of giving them back to the system.

    A small model on a CPU otherwise spends most of an update on page faults: 5.3 s against 1.8 s for 16,000 tokens of the
    embedded model on one core, with micro-batches of 2,048 tokens.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def backend_of(name: str) -> Callable[..., Backend]:
    """A backend's class by its name. Raises `ValueError` naming the known ones."""
    if ":" not in name:
        if name not in BACKENDS:
            raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}, or my_file:MyBackend")
        return BACKENDS[name]
    wanted, there = name.partition(":")[2], of_file(name, f"backend; known: {', '.join(BACKENDS)}")
    if wanted not in there:
        raise ValueError(f"no {wanted!r} in the file of backend {name!r}")
    return there[wanted]


def pairs(texts: tuple[str, ...]) -> dict[str, Any]:
    """("a=1", "b=x") -> {"a": 1, "b": "x"}; raises `ValueError` where there is no "="."""
    made = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"expected name=value, not {text!r}")
        try:
            made[name] = json.loads(value)
        except json.JSONDecodeError:
            made[name] = value
    return made


def env_settings(env_id: str) -> list[str]:
    """The names of a world's settings, its base classes' included. Raises `ValueError` naming the known worlds for an unknown id."""
    import ragen_envs  # registers the games

    try:
        if ":" in env_id:
            of_file(env_id, "the module of a world")  # importing it registers the id
        entry = gym.spec(env_id.rpartition(":")[2]).entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
    except (GymError, ImportError) as error:
        known = ", ".join(ragen_envs.IDS)
        raise ValueError(f"no world {env_id!r} ({error}); known: {known}, or module:id for one of yours") from error
    classes: list[Any] = [c for c in creator.__mro__ if c is not object] if isinstance(creator, type) else [creator]
    named = [p for c in classes for p in inspect.signature(c).parameters.values()]
    return list(dict.fromkeys(p.name for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)))
