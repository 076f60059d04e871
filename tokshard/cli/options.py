"""Options that every command has."""

from __future__ import annotations

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print results and errors as JSON.")

# `main.run` takes it from the raw arguments, so that it also works if they cannot be parsed
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
