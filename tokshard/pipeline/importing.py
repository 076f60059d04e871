"""A corpus of documents that another tool has tokenized: a build whose tasks pass tokens on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Unpack

from tokshard.pipeline.build import build_corpus
from tokshard.pipeline.options import OptionalBuildOptions, takes_build_options
from tokshard.pipeline.progress import Observer, ignore
from tokshard.pipeline.result import BuildResult
from tokshard.pipeline.sources.inputs import TOKENS

DEFAULT_MAX_DOCUMENT_BYTES = 1 << 30
"""Of ids. A file without delimiters would otherwise be one document, which a task has to hold."""


@takes_build_options
def import_corpus(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    observer: Observer = ignore,
    **keywords: Unpack[OptionalBuildOptions],
) -> BuildResult:
    """Make a corpus of documents that another tool has tokenized, or continue where an earlier run stopped.

    Boundaries, order and ids are kept. Every document ends in EOS once: where it is missing, it is added, and a
    delimiter that follows another one is left out and counted. A delimiter inside of a document ends a document there.

    Args:
        sources: a file, directory or glob, on this machine or as a URI, or a list of these, in order. Files of
            Megatron-LM may be given by their prefix.
        tokenizer: the one that made the ids. An id outside of its vocabulary is an error.
        {options}

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds an id outside the vocabulary.
        BuildError: the build cannot continue.
        KeyboardInterrupt: the next run of the same import continues.
    """
    keywords = {"max_document_bytes": DEFAULT_MAX_DOCUMENT_BYTES, **keywords, "reads": TOKENS}
    return build_corpus(sources, tokenizer=tokenizer, out=out, observer=observer, **keywords)
