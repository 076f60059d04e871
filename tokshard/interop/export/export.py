"""A corpus in the format of another loader: the one function behind ``tokshard export``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.loss import has_weights, kept_columns
from tokshard.format.opening import open_corpus
from tokshard.format.whole_corpus import check_not_empty
from tokshard.interop.export.destination import new_place
from tokshard.interop.export.documents import read_documents, without_delimiters, without_empty
from tokshard.interop.export.files import LABELS, MASK, CorpusFacts, FileSequence, Format, WrittenFile
from tokshard.interop.export.fms import FmsFormat
from tokshard.interop.export.hugging_face import HuggingFaceFormat
from tokshard.interop.export.mds import MdsFormat
from tokshard.interop.export.megatron import MegatronFormat
from tokshard.interop.export.olmo import OlmoFormat
from tokshard.store import absolute_location
from tokshard.wording import counted

FormatName = Literal["megatron", "mds", "fms", "hf", "olmo"]
FORMATS: Mapping[FormatName, type[Format]] = {
    "megatron": MegatronFormat,
    "mds": MdsFormat,
    "fms": FmsFormat,
    "hf": HuggingFaceFormat,
    "olmo": OlmoFormat,
}

OnProgress = Callable[[int, int], None]
"""Called with the tokens exported so far, and with all that there are."""

_MIN_FILE_BYTES = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The result of an export.

    Args:
        location: the directory or URI of the files.
        dtype: of the token ids in the files.
        num_documents, num_tokens: in the files.
        num_targets: tokens in the files that are trained; None if the files say nothing about that.
        num_dropped_targets: targets of the corpus that the files do not name.
        num_left_out: documents that hold only delimiters, if delimiters are dropped.
        num_files: without an index of all files.
        eos, bos: whether documents have them in the files; `bos` is None if the corpus has none.
        reading: how to give the files to the other loader.
    """

    location: str
    format: str
    dtype: str
    num_documents: int
    num_tokens: int
    num_targets: int | None
    num_dropped_targets: int
    num_left_out: int
    num_files: int
    num_bytes: int
    eos: bool
    bos: bool | None
    reading: str


def export_corpus(
    corpus: str | os.PathLike[str],
    *,
    format: FormatName,  # noqa: A002 - as the option is called
    out: str | os.PathLike[str],
    drop_eos: bool | None = None,
    drop_bos: bool = False,
    drop_loss: bool = False,
    file_bytes: int | None = None,
    with_columns: bool = True,
    on_progress: OnProgress | None = None,
) -> Export:
    """Write the documents of a corpus, in order, in the format of another loader.

    All data are checked against the hashes of the corpus. An MDS file is held in memory; other formats take about 100
    MB. An error leaves nothing at `out`.

    Args:
        corpus: its directory or URI.
        out: a directory that does not exist or is empty; for ``mds`` also a URI.
        drop_eos: leave out the token that ends each document; default: for ``fms``, because that loader adds it.
        drop_bos: leave out the token that begins each document, if the corpus has one.
        drop_loss: leave out loss spans; readers of the files then train on all tokens.
        file_bytes: close a file before the document that would exceed this; default: the format's.
        with_columns: for ``hf``: write the kept columns, too.

    Raises:
        UsageError: an option is wrong, something is at `out`, or the format cannot hold a document.
        CorpusError: the corpus cannot be read, is damaged, or holds no document.
        ExportError: the files cannot be written.
    """
    _check_options(format, file_bytes)
    place = os.fspath(out)
    if format != "hf" and not with_columns:
        raise UsageError(f"{format} holds no columns but the ids", hint="leave out --no-columns, which is for hf")
    if format == "olmo" and drop_eos:
        raise UsageError("olmo: only EOS says where a document ends in the files", hint="leave out --drop-eos")
    drop_eos = format == "fms" if drop_eos is None else drop_eos
    with open_corpus(corpus) as opened:
        check_not_empty(opened)
        drop_bos = drop_bos and opened.bos_id is not None
        loss = None if drop_loss else _loss_form(opened, format)
        columns = kept_columns(opened.manifest.columns) if with_columns and format == "hf" else {}
        target = FORMATS[format].of(_facts(opened, columns, loss, file_bytes))
        _check_file_bytes(target, file_bytes)
        with new_place(place, is_marked=target.is_marked) as store:
            sequence = FileSequence(target, store, file_bytes=file_bytes or target.file_bytes)
            try:
                files, left_out, targets = _write(
                    opened,
                    sequence,
                    drop_eos=drop_eos,
                    drop_bos=drop_bos,
                    columns=columns,
                    with_loss=loss is not None,
                    on_progress=on_progress,
                )
            except BaseException:
                sequence.discard()
                raise
        return Export(
            location=place,
            format=format,
            dtype=target.dtype,
            num_documents=sum(file.num_documents for file in files),
            num_tokens=sum(file.num_tokens for file in files),
            num_targets=None if loss is None else targets,
            num_dropped_targets=(opened.manifest.num_targets or 0) - targets,
            num_left_out=left_out,
            num_files=len(files),
            num_bytes=sum(file.num_bytes for file in files),
            eos=not drop_eos,
            bos=None if opened.bos_id is None else not drop_bos,
            reading=target.reading(place),
        )


def _write(
    corpus: Corpus,
    sequence: FileSequence,
    *,
    drop_eos: bool,
    drop_bos: bool,
    columns: Collection[str],
    with_loss: bool,
    on_progress: OnProgress | None,
) -> tuple[list[WrittenFile], int, int]:
    """Write all documents. Returns the files, how many documents had nothing to write, and the targets written."""
    done, left_out, targets = 0, 0, 0
    for documents in read_documents(corpus, columns=columns, with_loss=with_loss):
        kept = documents
        if drop_eos or drop_bos:
            kept = without_empty(without_delimiters(documents, eos=drop_eos, bos=drop_bos))
        sequence.write(kept)
        targets += 0 if kept.loss is None else int(np.count_nonzero(kept.loss))
        left_out += len(documents) - len(kept)
        done += len(documents.tokens)
        if on_progress is not None:
            on_progress(done, corpus.num_tokens)
    if left_out == corpus.num_documents:
        raise UsageError("every document holds nothing but its delimiters", hint="write them: --keep-eos")
    return sequence.finish(), left_out, targets


def _loss_form(corpus: Corpus, form: FormatName) -> str | None:
    """How a format says which tokens of a corpus are trained; None for a corpus without loss spans.

    Raises:
        UsageError: it cannot.
    """
    manifest, is_weighted = corpus.manifest, has_weights(corpus.manifest.columns)
    if not corpus.has_spans:
        return None
    forms = [name for name, each in FORMATS.items() if each.holds_weights or (each.holds_masks and not is_weighted)]
    if form in forms:
        return MASK if is_weighted else LABELS
    what = "its loss spans have weights" if FORMATS[form].holds_masks else "it has loss spans"
    raise UsageError(
        f"{corpus.location} trains {manifest.num_targets:,} of its {manifest.num_tokens:,} tokens: {what}, and {form} "
        "cannot hold them",
        hint=f"use --format {' or '.join(forms)}; --drop-loss writes the tokens alone, and readers then train on all",
    )


def _facts(corpus: Corpus, names: Collection[str], loss: str | None, file_bytes: int | None) -> CorpusFacts:
    tokenizer = corpus.manifest.tokenizer
    return CorpusFacts(
        name=absolute_location(corpus.location).rpartition("/")[2],
        dtype=corpus.dtype,
        vocab_size=corpus.vocab_size,
        columns=tuple(corpus.shard_schema.field(name) for name in names),
        loss=loss,
        file_bytes=file_bytes,
        metadata={
            "tokshard.fingerprint": corpus.fingerprint,
            "tokshard.tokenizer": tokenizer.name,
            "tokshard.tokenizer_sha256": tokenizer.canonical_sha256,
            "tokshard.eos_id": str(tokenizer.eos_id),
            "tokshard.bos_id": "" if tokenizer.bos_id is None else str(tokenizer.bos_id),
        },
    )


def _check_options(name: str, file_bytes: int | None) -> None:
    if name not in FORMATS:
        raise UsageError(f"no format {name!r}", hint=f"formats are {', '.join(FORMATS)}")
    if file_bytes is not None and file_bytes < _MIN_FILE_BYTES:
        raise UsageError(
            f"files of {counted(file_bytes, 'byte')} are too small", hint="give at least 1KiB; most loaders like 64MiB"
        )


def _check_file_bytes(target: Format, file_bytes: int | None) -> None:
    if file_bytes is not None and target.max_file_bytes is not None and file_bytes > target.max_file_bytes:
        raise UsageError(
            f"files of {file_bytes:,} bytes are too large: places in a file of this format are 32 bits long",
            hint="give 4095MiB or less",
        )
