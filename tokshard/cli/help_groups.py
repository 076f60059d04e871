"""Help in groups: the options of a command under headings, in the order in which a user needs them."""

from __future__ import annotations

from typing import Any

import click

ADVANCED = "Advanced"
"""The last heading: of options without a group."""

DISPLAY = "Display"
"""The heading before it, with ``--json`` at its end."""


class GroupedOption(click.Option):
    """An option with a heading.

    Args:
        group: the heading; "": `ADVANCED`.
    """

    def __init__(self, *args: Any, group: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists the options under headings.

    Args:
        groups: the headings, in order.
    """

    def __init__(self, *args: Any, groups: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section for each heading that the command has options for."""
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*self.groups, DISPLAY, ADVANCED)}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                heading = DISPLAY if param.name == "as_json" else getattr(param, "group", "") or ADVANCED
                rows[heading].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
