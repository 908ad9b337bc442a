"""find(): an optimizer by its name, one of ours or a class in a file of the user's."""

import importlib
import os
import sys

from ragen_agent.algos.brpo import ARPO, BRPO
from ragen_agent.algos.grpo import GRPO, DrGRPO
from ragen_agent.algos.ppo import PPO
from ragen_agent.algos.starpo import StarPO

ALGOS: dict[str, type[StarPO]] = {algo.__name__: algo for algo in (ARPO, BRPO, DrGRPO, GRPO, PPO)}


def find(name: str) -> type[StarPO]:
    """The optimizer `name`: one of ARPO, BRPO, DrGRPO, GRPO, PPO, or "module:Class", importable from the current folder too.

    ValueError, listing the known ones, where there is none.
    """
    if ":" not in name:
        if name not in ALGOS:
            raise ValueError(f"unknown algo {name!r}; known: {', '.join(ALGOS)}, or 'my_file:MyAlgo'")
        return ALGOS[name]
    file, _, wanted = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look where it is called
    try:
        module = importlib.import_module(file)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{file}.".startswith(f"{error.name}."):
            raise  # the file is there; something that it imports is not
        raise ValueError(f"no module {file!r} for algo {name!r}; known: {', '.join(ALGOS)}, or 'my_file:MyAlgo'") from error
    there = {n: x for n, x in vars(module).items() if isinstance(x, type) and issubclass(x, StarPO)}
    if wanted not in there:
        raise ValueError(f"no StarPO class {wanted!r} in {file!r}; it has: {', '.join(there) or 'none'}")
    return there[wanted]
