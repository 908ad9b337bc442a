"""The `ragen` command: a table of verbs, nothing else."""

import sys
from collections.abc import Callable
from typing import Any

import tyro
from transformers.utils import logging

from ragen_agent import diagnose, evaluate, teach, train
from ragen_agent.training import alone

VERBS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "train": (train.Train, train.run),
    "teach": (teach.Teach, teach.run),
    "evaluate": (evaluate.Evaluate, evaluate.run),
    "diagnose": (diagnose.Diagnose, diagnose.run),
}


def main(arguments: list[str] | None = None) -> int:
    """Run `ragen VERB ...`; what the user got wrong ends with a line on stderr and exit status 2."""
    logging.disable_progress_bar()
    arguments = sys.argv[1:] if arguments is None else arguments
    config = tyro.extras.subcommand_cli_from_dict({name: settings for name, (settings, _) in VERBS.items()}, args=arguments)
    run = next(run for settings, run in VERBS.values() if isinstance(config, settings))
    try:
        if isinstance(config, train.Train):
            alone(arguments)
        run(config)
    except KeyboardInterrupt:
        sys.stderr.write("ragen: stopped\n")
        return 130
    except (ValueError, OSError) as error:
        sys.stderr.write(f"ragen: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
