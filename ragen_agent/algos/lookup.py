"""find(): an optimizer by its name, one of ours or a class in a file of the user's."""

import importlib
import os
import sys
from typing import Any

from ragen_agent.algos.brpo import ARPO, BRPO, Normalised
from ragen_agent.algos.dapo import DAPO
from ragen_agent.algos.gigpo import MTGRPO, GiGPO
from ragen_agent.algos.grpo import GRPO, RLOO, DrGRPO
from ragen_agent.algos.gspo import CISPO, GSPO, GSPOToken
from ragen_agent.algos.ppo import PPO
from ragen_agent.algos.reinforce import ReBN, ReinforcePP, ReinforcePPBaseline
from ragen_agent.algos.starpo import StarPO

_RAGEN = (ARPO, BRPO, DrGRPO, GRPO, PPO)
_KIN = (CISPO, DAPO, GiGPO, GSPO, GSPOToken, MTGRPO, Normalised, ReBN, ReinforcePP, ReinforcePPBaseline, RLOO)
ALGOS: dict[str, type[StarPO]] = {algo.__name__: algo for algo in (*_RAGEN, *_KIN)}


def find(name: str) -> type[StarPO]:
    """The optimizer `name`: one of `ALGOS`, or "module:Class", importable from the current folder too.

    ValueError, listing the known ones, where there is none.
    """
    if ":" not in name:
        if name not in ALGOS:
            raise ValueError(f"unknown algo {name!r}; known: {', '.join(ALGOS)}, or 'my_file:MyAlgo'")
        return ALGOS[name]
    there = {n: x for n, x in of_file(name, f"algo; known: {', '.join(ALGOS)}").items() if isinstance(x, type) and issubclass(x, StarPO)}
    wanted = name.partition(":")[2]
    if wanted not in there:
        raise ValueError(f"no StarPO class {wanted!r} for algo {name!r}; its file has: {', '.join(there) or 'none'}")
    return there[wanted]


def of_file(name: str, what: str) -> dict[str, Any]:
    """What the module of "module:Name" holds; the current folder is looked in too. ValueError, saying `what`, where there is none."""
    module = name.partition(":")[0]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look where it is called
    try:
        return vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the file is there; something that it imports is not
        raise ValueError(f"no module {module!r} for {name!r} as {what}, or 'my_file:Mine'") from error
