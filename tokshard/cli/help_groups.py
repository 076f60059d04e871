"""Help in groups: the options of a command under headings, in the order in which a user needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

Groups = Mapping[str, Sequence[str]]
"""Heading to the names of parameters, in the order of the page."""

ADVANCED = "Advanced"
"""The last heading. Options that no group names come here."""

DISPLAY = ("quiet", "verbose", "as_json")

OF_BUILDS: Groups = {
    "Input": (
        *("format", "text_field", "token_field", "loss_field", "text_unit"),
        *("chat", "chat_date", "loss", "document_end"),
        *("token_dtype", "source_eos", "id_field", "keep_field"),
    ),
    "Text": ("tokenizer", "eos", "bos", "special_tokens"),
    "Output": (
        *("out", "append", "force", "dry_run", "validation_fraction"),
        *("shard_tokens", "shuffle", "columns", "no_columns"),
    ),
    "What is left out": (
        *(
            "where",
            "source",
            "drop_ids",
            "hash_range",
            "min_tokens",
            "max_tokens",
            "overlong",
            "template_drops",
            "dedup",
        ),
        *("max_documents", "on_bad_record", "max_bad_records", "max_document_bytes"),
    ),
    "Cluster": ("workers", "ray", "job_index", "num_jobs"),
    "Display": DISPLAY,
}
"""Of build, import and copy. An option that a command does not have is passed over."""


class GroupedCommand(click.Command):
    """A command whose help lists the options in groups.

    Args:
        groups: the headings; an option that none of them names is listed as advanced.
    """

    def __init__(self, *args: Any, groups: Groups, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section for each group that the command has options of."""
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None
        }
        named = {name for names in self.groups.values() for name in names}
        rest = [name for name in records if name not in named]
        for heading, names in {**self.groups, ADVANCED: rest}.items():
            rows = [records[name] for name in names if name in records]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
