"""``torchrun -m tokshard.trainer RECIPE.toml key=value ...``; without torchrun it runs on one rank."""

from __future__ import annotations

import os
import sys

from tokshard.errors import TokshardError
from tokshard.run_files.keys import help_text
from tokshard.run_files.recipe import load_config
from tokshard.trainer.launcher import exit_code_of, show, show_error

USAGE = """\
usage: torchrun --nproc-per-node N -m tokshard.trainer RECIPE.toml [section.key=value ...]
       python -m tokshard.trainer --help lists all keys
"""


def main(arguments: list[str]) -> int:
    """Run a recipe. Exit codes: 0, all steps done; 2, a wrong recipe; 128 + n, saved and stopped by signal n.

    A Ctrl-C while modules are loaded, or while ranks wait for each other at the start, ends it at once, with 130.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        if arguments:
            return exit_code_of(lambda: show([USAGE, help_text()]))
        sys.stderr.write(USAGE)
        return 2
    try:
        config = load_config(arguments[0], arguments[1:])
    except TokshardError as error:
        if os.environ.get("RANK", "0") == "0":  # it is the same on every rank
            show_error(error)
        return error.exit_code

    def run() -> int:
        from tokshard.trainer.loop import train

        signal_number = train(config)
        return 128 + signal_number if signal_number else 0

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
