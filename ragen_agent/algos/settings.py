"""What can be set on an optimizer: the settings that all share, their choices and bounds, and the errors that name them."""

from collections.abc import Callable
from inspect import get_annotations
from typing import Any

from ragen_agent.algos import functional as F
from ragen_agent.algos.correction import KINDS, LEVELS
from ragen_agent.algos.divergence import KLS
from ragen_agent.algos.ratio import RATIOS

RANGES: dict[str, Callable[[float], bool]] = {  # NaN is in none of them
    "above 0": lambda x: x > 0,
    "above 1": lambda x: x > 1,
    "at least 0": lambda x: x >= 0,
    "from 0 to 1": lambda x: 0 <= x <= 1,
}


class Settings:
    """The settings of `StarPO`: annotated class attributes, each with the line that says what it is."""

    # without annotation: no settings
    CHOICES = {
        "aggregation": F.AGGREGATIONS,
        "kl_kind": KLS,
        "kl_in": ("loss", "reward"),
        "ratio": RATIOS,
        "correction": KINDS,
        "correction_level": LEVELS,
    }
    BOUNDS = {"dual_clip": "above 1", "horizon": "above 0", "kl_target": "above 0", "kl_horizon": "above 0", "correction_high": "above 0"}
    BOUNDS |= dict.fromkeys(("temperature", "clip_low", "clip_high", "kl_coef", "correction_low"), "at least 0")
    refill = 0  # how many times more a round may be played to replace groups that teach nothing

    temperature: float = 1.0
    """Sampling temperature of the rollouts; policy, old and reference are all read at it. 0: greedy, untempered."""
    clip_low: float = 0.2
    """A token with a negative advantage stops training when its ratio is under 1 - clip_low."""
    clip_high: float = 0.28
    """A token with a positive advantage stops training when its ratio is over 1 + clip_high (clip-higher when above clip_low)."""
    dual_clip: float | None = None
    """Bound of the loss of a negative advantage A: -A * dual_clip, above 1."""
    ratio: str = "token"
    """What is clipped: token: each token's new / old; sequence: its geometric mean over the episode; sequence-token: the same, by token."""
    kl_coef: float = 0.0
    """Weight of KL(policy || reference); needs a reference."""
    kl_kind: str | None = None
    """Estimator of that KL: k1, k2 or k3; None: k3 in the loss, k1 in the reward."""
    kl_in: str = "loss"
    """Where the KL is paid: in the loss, or in the reward, per sampled token, before advantages and without gradient."""
    kl_target: float | None = None
    """Adapt kl_coef each round so that the KL per token comes to this; None: it is constant."""
    kl_horizon: float = 10000.0
    """Episodes in which an adaptive kl_coef moves by a fifth of itself, while the KL is a fifth or more off its target."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: str = "token-mean"
    """How token losses become one: token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm; a seq is an episode."""
    horizon: float = 1.0
    """The constant length that seq-mean-token-sum-norm divides by."""
    reweight: bool = False
    """Multiply advantages by the standard deviation of the group's scores over the largest of all groups (RAGEN's soft filter)."""
    correction: str | None = None
    """Weigh token losses by exp(old - logprob), for a sampler unlike the trainer: truncate or mask; None: no correction."""
    correction_level: str = "token"
    """Whose importance that is: each token's, or the product over the sequence (the episode)."""
    correction_low: float = 0.0
    """mask drops what has a smaller weight."""
    correction_high: float = 2.0
    """truncate cuts the weight to this; mask drops what has a larger one."""

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting of this class and its default."""
        names = [n for base in reversed(cls.__mro__) if issubclass(base, Settings) for n in get_annotations(base)]
        return {name: getattr(cls, name) for name in dict.fromkeys(names)}

    @classmethod
    def checked(cls, name: str, value: Any) -> Any:
        """`value` where it can be the setting `name`; else ValueError, naming what can."""
        known = cls.settings()
        if name not in known:
            raise ValueError(f"unknown setting {name!r} of {cls.__name__}; known: {', '.join(known)}")
        default = known[name]
        if default is None is value:
            return value
        if name in cls.CHOICES:
            if value not in cls.CHOICES[name]:
                raise ValueError(f"unknown {name} {value!r}; known: {', '.join(cls.CHOICES[name])}{' or None' if default is None else ''}")
            return value
        kind = type(default) if isinstance(default, bool | str) else float
        sound = (
            isinstance(value, int | float) and not isinstance(value, bool) and value == value if kind is float else isinstance(value, kind)
        )
        if not sound:
            raise ValueError(f"{name} of {cls.__name__} must be a {kind.__name__}{' or None' if default is None else ''}, not {value!r}")
        if name in cls.BOUNDS and not RANGES[cls.BOUNDS[name]](value):
            raise ValueError(f"{name} of {cls.__name__} must be {cls.BOUNDS[name]}, not {value!r}")
        return value

    @classmethod
    def wants_reference(cls, **settings: Any) -> bool:
        """Whether an optimizer with these settings reads a reference model."""
        return bool({**cls.settings(), **settings}["kl_coef"])

    @classmethod
    def wants_critic(cls, **settings: Any) -> bool:
        """Whether an optimizer with these settings reads a critic model of its own, the keyword `critic`."""
        return False

    @property
    def bootstraps(self) -> bool:
        """Whether the value after an episode that a limit cut counts, so that `collate` must be told what lay `ahead`."""
        return False

    def agree(self) -> None:
        """Raise `ValueError` for settings that contradict each other."""
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target adapts kl_coef, which must begin above 0")
        if self.correction_low > self.correction_high:
            raise ValueError(f"correction_low {self.correction_low} is above correction_high {self.correction_high}")
