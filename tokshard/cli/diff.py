"""``tokshard diff``: the differences between two corpora, or two mixes."""

from __future__ import annotations

import shlex
import shutil

import click

from tokshard.cli.document_text import difference_text
from tokshard.cli.inspect import is_mix
from tokshard.cli.options import debug_option, json_line, json_option, print_json
from tokshard.cli.output_file import is_stdout, output_file
from tokshard.cli.progress import byte_progress
from tokshard.errors import UsageError
from tokshard.format.opening import open_corpus
from tokshard.format.shared import numbers_left_out
from tokshard.inspect.corpus.difference import Difference, compare_corpora, compare_mixes
from tokshard.inspect.corpus.places import corpora_at, short_names, with_cells
from tokshard.inspect.verify.verification import check_hashes
from tokshard.run_files.plan_file import load_mix
from tokshard.store import open_store
from tokshard.wording import counted, one_line


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--hash", "is_hashed", is_flag=True, help="Hash every shard, and compare it with the manifest.")
@click.option(
    "--numbers",
    metavar="FILE",
    help="Compare nothing: write the number of each document of A that the view B leaves out, as loader.mask takes it.",
)
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Show hashes and long values, too.")
@json_option
@debug_option
@click.pass_context
def diff(
    context: click.Context,
    *,
    first: str,
    second: str,
    is_hashed: bool,
    numbers: str | None,
    is_verbose: bool,
    as_json: bool,
) -> None:
    """List the differences between two corpora, or say that they hold the same tokens; or between two mixes.

    A and B are two corpora; or two folders with corpora of the same names, such as train and validation; or two mixes,
    each a mix.toml or a recipe of the trainer. Corpora are equal if their documents and kept columns are, in whatever
    shards. Without --hash the manifests and the sizes of the shards are compared, and documents only where shards
    differ.

    Exits with 0 if all is equal, with 1 if something differs. --json prints one line for each pair.

    \b
    tokshard diff shards/code other/code
    tokshard diff mix.toml other/mix.toml
    tokshard diff shards/web views/web-without --numbers left-out.txt
    """  # noqa: D301 - click's mark for lines that are kept
    if numbers is not None:
        if is_hashed:
            raise UsageError("--hash does nothing with --numbers", hint="leave it out; tokshard verify hashes a corpus")
        _write_numbers(first, second, numbers, as_json=as_json)
        return
    if is_mix(first) != is_mix(second):
        mix, corpus = (first, second) if is_mix(first) else (second, first)
        raise UsageError(
            f"{mix} is read as a mix, because it is a file, but {corpus} is not a mix",
            hint="compare two corpora, or two mixes",
        )
    if is_mix(first):
        if is_hashed:
            raise UsageError("--hash is for corpora", hint="compare the corpora of the mixes")
        pairs = [(first, second)]
        found = [compare_mixes(load_mix(first), load_mix(second))]
    else:
        pairs = _pairs(first, second)
        found = [_compare(*pair, is_hashed=is_hashed) for pair in pairs]
    for number, (pair, difference) in enumerate(zip(pairs, found, strict=True)):
        if as_json:
            print_json({"first": pair[0], "second": pair[1]}, difference)
        else:
            heading = f"{'' if number == 0 else chr(10)}{short_names(pair)[0]}\n" if len(pairs) > 1 else ""
            width = shutil.get_terminal_size().columns
            click.echo(heading + difference_text(difference, short_names(pair), is_verbose=is_verbose, width=width))
    context.exit(0 if all(difference.is_equal for difference in found) else 1)


def _write_numbers(corpus: str, view: str, path: str, *, as_json: bool) -> None:
    """Write the numbers of the documents that a view leaves out, and say how many."""
    count = 0
    with (
        open_corpus(corpus) as one,
        open_corpus(view) as other,
        output_file(path, option="--numbers", inputs=[corpus, view]) as write,
    ):
        for numbers in numbers_left_out(one, other):
            count += len(numbers)
            write(b"".join(b"%d\n" % number for number in numbers.tolist()))
    said = f"{one_line(view)} leaves out {counted(count, 'document')} of {one_line(corpus)}"
    click.echo(json_line({"left_out": count}) if as_json else said, err=is_stdout(path))


def _compare(first: str, second: str, *, is_hashed: bool) -> Difference:
    with open_corpus(first) as one, open_corpus(second) as other:
        if is_hashed:
            with byte_progress("hash both") as on_progress:
                check_hashes([one, other], on_progress)
        return compare_corpora(one, other, is_hashed=is_hashed)


def _pairs(first: str, second: str) -> list[tuple[str, str]]:
    """The corpora of two locations that belong together, by their paths below these.

    Raises:
        UsageError: one location holds a corpus that the other does not.
    """
    places = (first, second)
    below = [{_below(corpus, place): corpus for corpus in corpora_at([place])} for place in places]
    if below[0].keys() != below[1].keys():  # only one of them may be a view above its cells, and the other their copy
        cells = [{_below(cell, place): cell for cell in with_cells(corpora_at([place]))} for place in places]
        if cells[0].keys() ^ cells[1].keys() == {""}:
            return [(cell, cells[1][name]) for name, cell in cells[0].items() if name in cells[1]]
        names = [", ".join(name or "one corpus" for name in found) for found in below]
        one, other = (next(iter(found.values())) for found in below)
        raise UsageError(
            f"{first} holds {names[0]}, and {second} holds {names[1]}",
            hint=f"compare one with one, such as tokshard diff {shlex.join([one, other])}",
        )
    return [(corpus, below[1][name]) for name, corpus in below[0].items()]


def _below(corpus: str, location: str) -> str:
    """The path of a corpus below a location, however that is spelled; empty if it is the location itself."""
    path, folder = (open_store(place).location for place in (corpus, location))
    return "" if path == folder else path.removeprefix(f"{folder}/")
