"""``tokshard import``: parse, call `import_corpus`, print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from tokshard.cli.build import with_options_of_build
from tokshard.cli.build_run import run_all
from tokshard.cli.help_groups import OF_BUILDS, GroupedCommand
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.recipe import one_corpus
from tokshard.cli.sizes import BYTES
from tokshard.format.opening import open_corpus
from tokshard.interop.tokens.batches import DTYPES
from tokshard.pipeline.commit import BuildResult
from tokshard.pipeline.sources.formats import FORMATS_OF_OPTION, TOKEN_FORMATS
from tokshard.pipeline.sources.inputs import TOKENS

_SAMPLE_TOKENS = 32

_AS_IN_BUILD = (
    *("tokenizer", "out", "eos", "bos", "shard_tokens", "task_bytes", "on_bad_record", "on_bad_source"),
    *("max_bad_records", "min_tokens", "max_tokens", "validation_fraction", "max_documents", "workers", "ray"),
    *("append", "force", "dry_run", "job_index", "num_jobs", "quiet", "verbose", "dedup"),
    *("id_field", "keep_field"),
)
"""Options that mean the same for texts and for tokens."""


def _listed(formats: Iterable[str], word: str) -> str:
    *others, last = formats
    return f"{', '.join(others)} {word} {last}"


def _formats(option: str) -> str:
    """The formats that use an option."""
    return _listed(FORMATS_OF_OPTION[option], "and")


@with_options_of_build(_AS_IN_BUILD)
@click.command("import", cls=GroupedCommand, groups=OF_BUILDS)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--format",
    metavar="FORMAT",
    help=f"Read every input as {_listed(TOKEN_FORMATS, 'or')}.  [default: by name]",
)
@click.option(
    "--token-field",
    metavar="COLUMN",
    help=f"For {_formats('token_field')}: column of the ids.  [default: tokens, input_ids or token_ids]",
)
@click.option(
    "--loss-field",
    metavar="COLUMN",
    help=f"For {_formats('loss_field')}: column of labels or loss masks, or none.  [default: by usual names]",
)
@click.option(
    "--dtype",
    "token_dtype",
    type=click.Choice(DTYPES),
    metavar="DTYPE",
    help=f"For {_formats('token_dtype')}: how ids are stored, such as uint16, where the files do not say it.",
)
@click.option(
    "--source-eos",
    type=click.IntRange(min=0),
    metavar="ID",
    help="Id that ends documents in the SOURCEs, if it is not EOS.",
)
@click.option(
    "--max-document-bytes",
    type=BYTES,
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Reject documents with more bytes of ids; see --on-bad-record.",
)
@json_option
@debug_option
@click.pass_context
def import_(context: click.Context, /, sources: tuple[str, ...], **options: Any) -> None:
    """Make a corpus from documents that another tool has tokenized.

    A SOURCE is a file, a directory or a quoted glob, on this machine or a URI: the .bin of Megatron-LM with its .idx,
    or their prefix; .ds of datatrove; directories of MosaicML MDS, litdata or fms-fsdp; .npy with offsets, or cut at a
    delimiter; parquet, Arrow, Feather or JSON lines with a column of token ids; data sets saved by datasets, or
    hf://OWNER/NAME.

    Boundaries, order and ids are kept. Every document ends in EOS, once. The tokenizer has to be the one that made
    the ids: they are checked against its vocabulary, and the first document is shown as text. Labels and loss masks
    become loss spans; other columns are left out, unless --keep-field or --id-field names them.

    The same command continues an import that was interrupted. 'tokshard commit DIR' ends one that several jobs share.
    """
    run_all(context, [one_corpus(sources, options)], reads=TOKENS, more=_sample)


def _sample(result: BuildResult) -> dict[str, str]:
    """The start of the first document as text, in which a wrong tokenizer shows."""
    # what is appended may all go into one part of a split
    directory = next(corpus.directory for corpus in result.corpora if corpus.manifest.num_documents)
    with open_corpus(directory) as corpus:
        return {"begins": corpus.decode(corpus.document(0)[:_SAMPLE_TOKENS])}
