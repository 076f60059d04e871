"""``tokshard convert-tokenizer``: make a tokenizer.json from another library's tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import click

from tokshard.cli.options import debug_option, json_option
from tokshard.interop.tokenizers import convert_tokenizer as convert
from tokshard.wording import one_line


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--out", required=True, metavar="DIR", help="Where tokenizer.json and tokenizer_config.json go.")
@click.option("--eos", metavar="TOKEN", help="Token that ends every document.  [default: what FILE names]")
@json_option
@debug_option
def convert_tokenizer(file: str, out: str, eos: str | None, as_json: bool) -> None:
    """Make a tokenizer.json from a SentencePiece BPE model (.model) or from tiktoken ranks (.tiktoken).

    The result is compared with the original library on about 2,000 texts. If one differs, nothing is written.
    """
    found = convert(Path(file), Path(out), eos=eos)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(found), "directory": str(found.directory)}))
        return
    click.echo(one_line(found.note))
    if found.eos is None:
        click.echo("note: it names no EOS token: give one with --eos, here or to the build", err=True)
    click.echo(f"written to {one_line(str(found.directory))}: tokshard build ... --tokenizer {shlex.quote(out)}")
