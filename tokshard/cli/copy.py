"""``tokshard copy``: make a corpus of others, without tokenizing again."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from typing import Any

import click
import msgspec

from tokshard.cli.options import debug_option, json_option
from tokshard.cli.progress import byte_progress
from tokshard.cli.sizes import COUNT, POSITIVE_COUNT
from tokshard.errors import UsageError
from tokshard.pipeline.copying.copy import Copy, copy_corpus
from tokshard.pipeline.copying.selection import Selection
from tokshard.wording import aligned, bytes_text, counted


class Condition(click.ParamType):  # type: ignore[type-arg] # not yet generic in click 8.1
    """``COLUMN=VALUE``."""

    name = "condition"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """The column and the value; anything else is a usage error."""
        column, equals, text = value.partition("=")
        if not column or not equals:
            self.fail(f"{value!r} is not a condition such as lang=en", param, ctx)
        return column, text


class Share(click.ParamType):  # type: ignore[type-arg] # as above
    """A half-open part of [0, 1): ``0:0.9``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """The bounds; anything else is a usage error."""
        if isinstance(value, tuple):
            return value
        low, _, high = value.partition(":")
        try:
            bounds = float(low), float(high)
        except ValueError:
            self.fail(f"{value!r} is not a part of 0:1 such as 0:0.9", param, ctx)
        if not 0 <= bounds[0] < bounds[1] <= 1:
            self.fail(f"{value!r} is not a part of 0:1 such as 0:0.9", param, ctx)
        return bounds


@click.command()
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option("--out", required=True, metavar="DIR", help="A new directory, or a URI such as s3://bucket/folder.")
@click.option(
    "--shard-tokens",
    type=POSITIVE_COUNT,
    metavar="N",
    help="Close a shard before the document that would exceed N tokens.  [default: as in the first CORPUS]",
)
@click.option("--hash", "hashes", type=Share(), metavar="A:B", help="Take documents whose hash is in [A, B), of 0:1.")
@click.option("--min-tokens", type=COUNT, metavar="N", help="Take documents of at least N tokens.")
@click.option("--max-tokens", type=POSITIVE_COUNT, metavar="N", help="Take documents of at most N tokens.")
@click.option(
    "--where", type=Condition(), multiple=True, metavar="COLUMN=VALUE", help="Take documents with this kept value."
)
@click.option("--source", metavar="PATTERN", help="Take documents of sources whose name fits, such as '*/wiki-*'.")
@click.option("--no-columns", is_flag=True, help="Leave out the kept columns.")
@click.option("--shuffle", type=COUNT, metavar="SEED", help="Write the documents in random order.")
@click.option(
    "--workers", type=click.IntRange(min=1), help="Number of processes; changes no byte.  [default: by the CPUs]"
)
@click.option("--force", is_flag=True, help="Start over: remove the corpus or unfinished copy in DIR.")
@json_option
@debug_option
def copy(
    *,
    corpora: tuple[str, ...],
    out: str,
    shard_tokens: int | None,
    hashes: tuple[float, float] | None,
    min_tokens: int | None,
    max_tokens: int | None,
    where: tuple[tuple[str, str], ...],
    source: str | None,
    no_columns: bool,
    shuffle: int | None,
    workers: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Make one corpus of the documents of each CORPUS, one corpus after another, without tokenizing again.

    DIR is a corpus when all is written. The same command continues a copy that was stopped. What is read is checked
    against the hashes of the corpora. Each CORPUS and DIR may be a URI. A document is taken if all conditions hold.

    \b
    tokshard copy shards/many-small --out shards/few-large --shard-tokens 1B
    tokshard copy shards/a shards/b --out s3://bucket/both
    tokshard copy shards/code --out shards/python --where lang=python --max-tokens 8192
    tokshard copy shards/by-topic --out shards/mixed --shuffle 17
    """  # noqa: D301 - click's mark for lines that are kept
    started = time.monotonic()
    for column, times in Counter(column for column, _ in where).items():
        if times > 1:
            raise UsageError(
                f"--where names the column {column} {times} times, and a document has one value there",
                hint="give one value; to take several, make a copy for each and copy those into one",
            )
    selection = Selection(hashes=hashes, where=dict(where), source=source, min_tokens=min_tokens, max_tokens=max_tokens)
    with byte_progress(f"copy to {out}", unit="tokens") as on_progress:
        done = copy_corpus(
            corpora,
            out=out,
            shard_tokens=shard_tokens,
            selection=selection,
            with_columns=not no_columns,
            shuffle=shuffle,
            workers=workers,
            force=force,
            on_progress=on_progress,
        )
    seconds = time.monotonic() - started
    if as_json:
        manifest = msgspec.to_builtins(done.manifest)
        shown = {
            name: manifest[name] for name in ("num_documents", "num_tokens", "num_shards", "num_bytes", "fingerprints")
        }
        click.echo(json.dumps({"location": done.location, "is_new": done.is_new, **shown, "seconds": seconds}))
    else:
        click.echo(_text(done, seconds))


def _text(done: Copy, seconds: float) -> str:
    manifest = done.manifest
    taken = "" if manifest.num_documents == done.num_documents_before else f" of {done.num_documents_before:,}"
    size = f"{done.location}: {counted(manifest.num_shards, 'shard')}, {bytes_text(manifest.num_bytes)}"
    speed = f" at {bytes_text(manifest.num_bytes / max(seconds, 1e-9))}/s" if done.is_new else ""
    lines = [
        ("documents", f"{manifest.num_documents:,}{taken}"),
        ("tokens", f"{manifest.num_tokens:,} as {manifest.dtype}"),
        ("written" if done.is_new else "complete", size + speed),
        ("fingerprint", manifest.fingerprints.content[:16]),
    ]
    text = aligned(lines, width=shutil.get_terminal_size().columns)
    return text if done.is_new else f"nothing to do: {done.location} is complete; --force copies again\n{text}"
