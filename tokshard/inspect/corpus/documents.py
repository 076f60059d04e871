"""Single documents of a corpus: decoded, token by token, and found by their text."""

from __future__ import annotations

import functools
import itertools
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.arrays import numbers_of, value_array
from tokshard.format.conditions import Condition, are_met
from tokshard.format.corpus import Corpus
from tokshard.format.decode import Decode
from tokshard.format.loss import kept_columns
from tokshard.format.manifest import Manifest
from tokshard.format.tables import SourceInfo
from tokshard.inspect import OnProgress, no_progress
from tokshard.inspect.corpus.workers import in_order
from tokshard.numbers import ceil_div
from tokshard.store import is_uri

CONTEXT_CHARACTERS = 60
_EXCERPT_TOKENS = 512
_EXCERPT_LINE = 40
"""An excerpt has at most a line for this many characters."""

EXCERPT_CHARACTERS = 300
"""Length of an excerpt on a terminal."""

COLUMN_CHARACTERS = 300
"""The most characters of a kept column that are shown next to an excerpt."""

ID = "id"
"""The column of the ids that ``--id-field`` stores."""

_MAX_DOCUMENTS = 16
"""Documents that share an id and are all meant."""

_REPLACEMENT = "\ufffd"
_MAX_JOINED = 8


class TokenPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """The text of one token, or of a few that spell one character together.

    Args:
        ids: token ids.
        text: that they add to the text before them.
        is_target: whether one of them is a target; None in a corpus without loss spans.
    """

    ids: tuple[int, ...]
    text: str
    is_target: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentView:
    """One decoded document.

    Args:
        document: number in the corpus, from 0.
        source, record_number: the input, see `source_label`, and the number of the record in it, from 1.
        metadata: kept columns.
        text: the decoded tokens, delimiters included.
        is_excerpt: whether `text` is only the start of the document and its last token.
        pieces: the text token by token; empty if that was not requested.
        loss_spans: start and stop of each, from the first token on; None in a corpus without them.
    """

    document: int
    num_tokens: int
    source: str
    record_number: int
    metadata: dict[str, Any]
    text: str
    is_excerpt: bool
    pieces: tuple[TokenPiece, ...] = ()
    loss_spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The first occurrence of a pattern in a document.

    Args:
        document: number in the corpus, from 0.
        id: its id; None if the corpus keeps no ids.
        source, record_number: the input, see `source_label`, and the number of the record in it, from 1.
        count: occurrences in the document.
        offset: characters of the document's text before the first occurrence.
        before, text, after: the first occurrence and its context.
    """

    document: int
    id: Any
    source: str
    record_number: int
    count: int
    offset: int
    before: str
    text: str
    after: str


def source_label(manifest: Manifest, source: SourceInfo) -> str:
    """Label of a source: the argument of the build, followed by the path below it."""
    argument = manifest.arguments[source.argument]
    return f"{argument}/{source.path}" if source.path else argument


def origin_of(corpus: Corpus, sources: Sequence[SourceInfo], document: int) -> dict[str, Any]:
    """The `source` of a document and its `record_number` there, from 1; a damaged table makes the source unknown."""
    place = corpus.provenance(document)
    is_known = 0 <= place.source < len(sources)
    label = source_label(corpus.manifest, sources[place.source]) if is_known else "unknown"
    return {"source": label, "record_number": place.record}


def metadata_of(corpus: Corpus, document: int) -> dict[str, Any]:
    """The kept columns of a document. Numbers that are not finite, which JSON lacks, are texts."""
    found = corpus.metadata(document)
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in found.items()
    }


def document_numbers(corpus: Corpus, key: str, *, corpus_name: str, prefix: str) -> list[int]:
    """The documents that a user names: by number or, in a corpus that keeps ids, by id, which several may share.

    Finding an id reads the ids of the whole corpus. A key that is no id may still be a number, as it is printed.

    Args:
        key: a number such as 1821 or 1,821, or an id if the corpus has ids; ``#N`` is always the number.
        corpus_name: the corpus, for messages.
        prefix: the user's text before a key.

    Raises:
        UsageError: there is no such document, or there are too many.
        CorpusError: the corpus cannot be read.
    """
    number = _number(key.removeprefix("#"))
    by_number = [number] if number is not None and number < corpus.num_documents else []
    has_ids = ID in kept_columns(corpus.manifest.columns)
    if key.startswith("#") or not has_ids:
        if not by_number:
            first, last = (_as_words(prefix, f"{'#' * has_ids}{one}") for one in (0, corpus.num_documents - 1))
            with_ids = "" if has_ids else "; it was built without --id-field, so it keeps no ids"
            raise UsageError(
                f"{corpus_name} has no document {key!r:.60}: it has {corpus.num_documents:,}, counted from 0",
                hint=f"give {first} to {last}{with_ids}"
                if corpus.num_documents
                else "give a corpus that has documents",
            )
        return by_number
    import pyarrow.compute as pc  # takes 60 ms, and few commands come here

    wanted = value_array([key], pa.string())[0]
    found, first_of_batch = list[int](), 0
    for ids in column_parts(corpus, ID):
        rows = numbers_of(pc.indices_nonzero(pc.equal(pc.cast(ids, pa.string()), wanted))).astype(np.int64)
        found += (rows + first_of_batch).tolist()
        first_of_batch += len(ids)
    if not found and not by_number:
        raise UsageError(
            f"{corpus_name} has no document with id {key!r:.60}",
            hint=f"{_as_words(prefix, '#0')} is its first document, by number",
        )
    if len(found) > _MAX_DOCUMENTS:
        raise UsageError(
            f"{len(found):,} documents of {corpus_name} have id {key!r}",
            hint=f"give one by its number, such as {_as_words(prefix, f'#{found[0]}')}",
        )
    return found or by_number


def column_parts(corpus: Corpus, name: str) -> Iterator[pa.Array]:
    """A kept column of all documents, a record batch at a time, as views of the shards."""
    for shard in map(corpus.shard, range(len(corpus.shards))):
        yield from (shard.columns(batch)[name] for batch in range(shard.num_batches))


def _number(text: str) -> int | None:
    """The number of a document as a user copies it, such as 1821 or 1,821."""
    is_number = len(text) < 100 and re.fullmatch(r"[0-9]+|[0-9]{1,3}(,[0-9]{3})+", text)
    return int(text.replace(",", "")) if is_number else None


def _as_words(prefix: str, key: str) -> str:
    """What to type into a shell, where ``#`` begins a comment."""
    option, space, start = prefix.rpartition(" ")
    return f"{option}{space}{shlex.quote(start + key)}"


def spread(count: int, length: int) -> list[int]:
    """`count` evenly spaced indices of ``range(length)``; all of them if there are not more."""
    if count >= length:
        return list(range(length))
    return [(2 * index + 1) * length // (2 * count) for index in range(count)]


def view_document(
    corpus: Corpus,
    sources: Sequence[SourceInfo],
    decode: Decode,
    index: int,
    *,
    excerpt: int | None = None,
    with_boundaries: bool = False,
) -> DocumentView:
    """Read and decode a document.

    Args:
        excerpt: only decode the start, about this many characters in a few lines, and the last token; None: all.
        with_boundaries: also split the text into tokens.

    Raises:
        IndexError: the document does not exist.
        CorpusError: the document cannot be read.
    """
    tokens = corpus.document(index)
    text, is_excerpt = (decode(tokens), False) if excerpt is None else _excerpt(tokens, decode, excerpt)
    pieces: list[TokenPiece] = []
    spans = [(int(start), int(stop)) for start, stop in corpus.loss_spans(index)] if corpus.has_spans else None
    if with_boundaries:
        is_target = corpus.target_weights(index) > 0 if corpus.has_spans else None
        pieces = token_pieces(tokens if excerpt is None else tokens[: _start_tokens(excerpt)], decode, is_target)
    if excerpt is not None:
        ends = itertools.accumulate(len(piece.text) for piece in pieces)
        pieces = [piece for piece, end in zip(pieces, ends, strict=True) if end <= excerpt]
    return DocumentView(
        document=index,
        num_tokens=len(tokens),
        **origin_of(corpus, sources, index),
        metadata=metadata_of(corpus, index),
        text=text,
        is_excerpt=is_excerpt,
        pieces=tuple(pieces),
        loss_spans=None if spans is None else tuple(spans),
    )


def _start_tokens(characters: int) -> int:
    return max(_EXCERPT_TOKENS, characters)  # a token rarely has less than one character


def _excerpt(tokens: NDArray[Any], decode: Decode, characters: int) -> tuple[str, bool]:
    """The start of a document and its last token, and whether anything was left out."""
    text = decode(tokens[: _start_tokens(characters)])
    start = "".join(text[:characters].splitlines(keepends=True)[: ceil_div(characters, _EXCERPT_LINE)])
    if len(tokens) <= _start_tokens(characters) and len(start) == len(text):
        return text, False
    return f"{start.rstrip()} ... {decode(tokens[-1:])}", True


def token_pieces(tokens: NDArray[Any], decode: Decode, is_target: NDArray[np.bool_] | None = None) -> list[TokenPiece]:
    """The pieces of a document in order; joined, their texts are the decoded document.

    A piece is what decoding it together with the piece before adds, because decoders treat the start of a text
    differently. Costs two decodings of a few tokens per token.

    Args:
        is_target: bool, at least one for each token; None if that does not matter.
    """
    ids = tokens.tolist()
    pieces: list[TokenPiece] = []
    before = start = 0  # first tokens of the previous piece and of the one being collected
    for stop in range(1, len(ids) + 1):
        context = decode(tokens[before:start])
        text = decode(tokens[before:stop])
        is_last = stop == len(ids) or stop - start == _MAX_JOINED
        if not is_last and (text.endswith(_REPLACEMENT) or not text.startswith(context)):
            continue
        if not text.startswith(context):
            text, context = decode(tokens[start:stop]), ""
        has_target = None if is_target is None else bool(is_target[start:stop].any())
        pieces.append(TokenPiece(tuple(ids[start:stop]), text[len(context) :], has_target))
        before, start = start, stop
    return pieces


def search(
    corpus: Corpus,
    pattern: re.Pattern[str],
    *,
    conditions: Sequence[Condition] = (),
    limit: int | None = None,
    workers: int = 1,
    on_progress: OnProgress = no_progress,
) -> Iterator[Match]:
    """The documents whose text contains a pattern, in order. Delimiters are not text: ``$`` matches before them.

    Decodes every document that meets the conditions, one at a time, at about 20M tokens per CPU-second. Holds one
    document in memory; each of several workers holds its matches in two record batches (of a bucket: in two shards).

    Args:
        conditions: on kept columns, which a document has to meet.
        limit: the most documents; None: all.
        workers: processes.
        on_progress: receives tokens.

    Raises:
        CorpusError: a document cannot be read.
    """
    parts = [
        (shard, batches)
        for shard in range(len(corpus.shards))
        for batches in _batches(len(corpus.shards.batch_places(shard)), is_whole=is_uri(corpus.location))
    ]
    work = functools.partial(_search, pattern=pattern, conditions=conditions, limit=limit)
    left, done = limit, 0.0
    with in_order(corpus, parts, work, workers=workers) as results:
        for (shard, batches), found in zip(parts, results, strict=True):
            for match in itertools.islice(found, left):
                yield match
                left = None if left is None else left - 1
            if left == 0:
                return
            # the places of a view list all documents of its base
            done += corpus.shards[shard].num_tokens * len(batches) / len(corpus.shards.batch_places(shard))
            on_progress(round(done), corpus.num_tokens)


def _batches(count: int, *, is_whole: bool) -> list[range]:
    """The record batches of a shard, one by one, or together where a worker has to fetch the whole shard."""
    return [range(count)] if is_whole else [range(batch, batch + 1) for batch in range(count)]


def _search(
    corpus: Corpus,
    part: tuple[int, range],
    *,
    pattern: re.Pattern[str],
    conditions: Sequence[Condition],
    limit: int | None,
) -> Iterator[Match]:
    """The matches in some record batches of a shard, at most `limit`."""
    index, batches = part
    decode, sources = corpus.decode, corpus.sources()
    first_token, shard = int(corpus.bos_id is not None), corpus.shard(index)
    first = int(corpus.shards.first_documents[index])
    first += sum(len(shard.bounds(batch)[0]) for batch in range(batches.start))
    for batch in batches:
        offsets, values = shard.batch(batch)
        met = are_met(conditions, shard.columns(batch) if conditions else {}, len(offsets) - 1)
        for row in np.flatnonzero(met).tolist():
            text = decode(values[offsets[row] + first_token : offsets[row + 1] - 1])
            found = pattern.search(text)
            if found is None:
                continue
            yield Match(
                document=first + row,
                id=metadata_of(corpus, first + row).get(ID),
                **origin_of(corpus, sources, first + row),
                count=sum(1 for _ in pattern.finditer(text)),
                offset=found.start(),
                before=text[max(0, found.start() - CONTEXT_CHARACTERS) : found.start()],
                text=found.group()[: 4 * CONTEXT_CHARACTERS],
                after=text[found.end() : found.end() + CONTEXT_CHARACTERS],
            )
            limit = None if limit is None else limit - 1
            if limit == 0:
                return
        first += len(offsets) - 1
    corpus.close()
