"""``tokshard export``: write a corpus in the format of another loader."""

from __future__ import annotations

import shutil
import time
from typing import Any

import click

from tokshard.cli.options import debug_option, json_option, print_json
from tokshard.cli.progress import byte_progress
from tokshard.cli.sizes import BYTES
from tokshard.interop.export.export import FORMATS, Export, export_corpus
from tokshard.wording import aligned, as_typed_bytes, bytes_text, counted


def _size(file_bytes: object) -> str:
    return as_typed_bytes(file_bytes) if isinstance(file_bytes, int) else "one file"


@click.command()
@click.argument("corpus", metavar="CORPUS")
@click.option(
    "--format",
    type=click.Choice([*FORMATS]),
    required=True,
    help="; ".join(f"{name}: {each.summary}" for name, each in FORMATS.items()) + ".",
)
@click.option("--out", required=True, metavar="DIR", help="A new directory; for mds also a URI such as s3://.")
@click.option(
    "--drop-eos/--keep-eos",
    default=None,
    help="Leave out the token that ends a document, or write it.  [default: write it; fms: leave it out]",
)
@click.option("--drop-bos", is_flag=True, help="Leave out the token that begins a document.")
@click.option("--drop-loss", is_flag=True, help="Leave out loss spans, so that all tokens are trained.")
@click.option(
    "--file-bytes",
    type=BYTES,
    metavar="SIZE",
    help="Close a file before the document that would exceed SIZE.  "
    f"[default: {', '.join(f'{name} {_size(each.file_bytes)}' for name, each in FORMATS.items())}]",
)
@click.option("--no-columns", is_flag=True, help="With hf: leave out the kept columns.")
@json_option
@debug_option
def export(*, corpus: str, no_columns: bool, as_json: bool, **options: Any) -> None:
    """Write the documents of CORPUS, in order, in the format of another loader.

    DIR appears when it is complete. All data are checked against the hashes of the corpus. CORPUS may be a URI.

    \b
    tokshard export shards/code --format megatron --out megatron/code
    tokshard export shards/code --format mds --out s3://bucket/code/train
    tokshard export shards/code --format hf --out hf/code
    """  # noqa: D301 - click's mark for lines that are kept
    started = time.monotonic()
    with byte_progress(f"export {corpus}", unit="tokens") as on_progress:
        done = export_corpus(corpus, with_columns=not no_columns, on_progress=on_progress, **options)
    seconds = time.monotonic() - started
    if as_json:
        print_json(done, seconds=seconds)
    else:
        click.echo(_text(done, seconds))


def _text(done: Export, seconds: float) -> str:
    speed = f"{bytes_text(done.num_bytes / max(seconds, 1e-9))}/s"
    lines = [
        ("exported", f"{counted(done.num_documents, 'document')}, {counted(done.num_tokens, 'token')} as {done.dtype}"),
        ("written", f"{done.location}: {counted(done.num_files, 'file')}, {bytes_text(done.num_bytes)} at {speed}"),
        ("delimiters", _delimiters(done)),
    ]
    if done.num_targets is not None:
        lines.append(("targets", f"{done.num_targets:,} of the tokens"))
    if done.num_dropped_targets:
        what = "with the delimiters" if done.num_targets is not None else "readers train all tokens instead"
        lines.append(("left out", f"{counted(done.num_dropped_targets, 'target')}: {what}"))
    if done.num_left_out:
        lines.append(("left out", f"{counted(done.num_left_out, 'document')} without a token but the delimiters"))
    lines.append(("read it as", done.reading))
    return aligned(lines, width=shutil.get_terminal_size().columns)


def _delimiters(done: Export) -> str:
    words = ["EOS kept" if done.eos else "EOS left out"]
    if done.bos is not None:
        words.append("BOS kept" if done.bos else "BOS left out")
    return ", ".join(words)
