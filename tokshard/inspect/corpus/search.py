"""Documents whose text holds a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.decode import load_decoder
from tokshard.inspect.corpus.lengths import OnProgress
from tokshard.inspect.corpus.summary import source_name
from tokshard.inspect.terminal import one_line

CONTEXT_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The first place of a pattern in a document.

    Args:
        document: number in the corpus.
        source, record_number: where it comes from; records count from 1.
        count: places of the pattern in the document.
        offset: characters of the document's text before the first place.
        before, text, after: the place in its context.
    """

    document: int
    source: str
    record_number: int
    count: int
    offset: int
    before: str
    text: str
    after: str


def compile_pattern(pattern: str, *, is_regex: bool) -> re.Pattern[str]:
    """A pattern: plain text, or a regular expression of Python.

    Raises:
        UsageError: it is empty, or no regular expression.
    """
    if not pattern:
        raise UsageError("--grep is empty: every document holds it", hint="give a text")
    try:
        return re.compile(pattern if is_regex else re.escape(pattern))
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is no regular expression: {error}", hint="leave --regex out to look for the text as it is"
        ) from error


def search(
    corpus: Corpus, pattern: re.Pattern[str], *, on_progress: OnProgress = lambda _done, _total: None
) -> Iterator[Match]:
    """The documents whose text holds a pattern, in order. Their delimiters are not text: ``$`` matches where it ends.

    Decodes every document, one at a time: memory is that of one, and about 20M tokens per second are searched.

    Raises:
        CorpusError: a document cannot be read.
    """
    decode, sources = load_decoder(corpus), corpus.sources()
    first_token = int(corpus.bos_id is not None)
    done = 0
    for index in range(len(corpus.shards)):
        shard = corpus.shard(index)
        first = corpus.shards.first_document(index)
        for row in range(shard.info.num_documents):
            tokens = shard.document(row)
            text = decode(tokens[first_token:-1])
            found = pattern.search(text)
            if found is not None:
                place = corpus.provenance(first + row)
                yield Match(
                    document=first + row,
                    source=source_name(corpus.manifest, sources, place.source),
                    record_number=place.record,
                    count=sum(1 for _ in pattern.finditer(text)),
                    offset=found.start(),
                    before=text[max(0, found.start() - CONTEXT_CHARACTERS) : found.start()],
                    text=found.group()[: 4 * CONTEXT_CHARACTERS],
                    after=text[found.end() : found.end() + CONTEXT_CHARACTERS],
                )
            done += len(tokens)
            on_progress(done, corpus.num_tokens)
        corpus.close()


def match_text(match: Match) -> str:
    """Two lines: where it is, and the place in its context between angle quotes."""
    more = "" if match.count == 1 else f", {match.count:,} places"
    return (
        f"document {match.document:,}: record {match.record_number:,} of {one_line(match.source)}{more}\n"
        f"    {one_line(match.before)}\u00bb{one_line(match.text)}\u00ab{one_line(match.after)}"
    )


def match_json(match: Match, corpus: Corpus) -> dict[str, Any]:
    """A match as plain values."""
    fields = ("document", "source", "record_number", "count", "offset", "before", "text", "after")
    return {"corpus": str(corpus.directory), **{name: getattr(match, name) for name in fields}}
