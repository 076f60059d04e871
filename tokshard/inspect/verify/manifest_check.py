"""Checks of a manifest against its tables: every number that is stored or implied twice has to agree."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import CorpusError
from tokshard.format import names
from tokshard.format.content import join_hashes
from tokshard.format.corpus import Corpus
from tokshard.format.manifest import (
    IN_OTHER_SPLIT,
    Manifest,
    TokenizerInfo,
    canonical_json,
    content_fingerprint,
    recipe_fingerprint,
)
from tokshard.format.opening import read_manifest
from tokshard.format.tables import SourceInfo
from tokshard.inspect.corpus.documents import source_label
from tokshard.inspect.corpus.vocabulary import token_ids
from tokshard.inspect.verify.shard_check import Problem, ShardFindings, SourceRuns
from tokshard.store import Store, locate


def check_tokenizer(store: Store, manifest: Manifest) -> Iterator[Problem]:
    """The copy of the tokenizer against the manifest."""
    tokenizer, file = manifest.tokenizer, manifest.files[names.TOKENIZER]
    if tokenizer.sha256 != file.sha256:
        yield Problem(
            file=names.MANIFEST,
            message=f"gives the tokenizer SHA-256 {tokenizer.sha256}, and {names.TOKENIZER} {file.sha256}",
        )
    try:
        parsed = json.loads(store.get(names.TOKENIZER))
        canonical = canonical_json(parsed)
    except (OSError, ValueError, RecursionError) as error:
        yield Problem(file=names.TOKENIZER, message=f"is not JSON: {error}")
        return
    found = hashlib.sha256(canonical).hexdigest()
    if found != tokenizer.canonical_sha256:
        yield Problem(
            file=names.TOKENIZER, message=f"has canonical SHA-256 {found}, expected {tokenizer.canonical_sha256}"
        )
    try:
        ids = token_ids(parsed)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        yield Problem(file=names.TOKENIZER, message=f"has no vocabulary: {error!r}")
        return
    for message in _vocabulary_faults(tokenizer, ids):
        yield Problem(file=names.MANIFEST, message=message)


def _vocabulary_faults(tokenizer: TokenizerInfo, ids: Mapping[str, int]) -> Iterator[str]:
    """Where a manifest contradicts the vocabulary of its tokenizer."""
    if tokenizer.vocab_size != 1 + max(ids.values()):
        yield f"gives the vocabulary {tokenizer.vocab_size} ids, {names.TOKENIZER} has {1 + max(ids.values())}"
    for what, token, token_id in (
        ("EOS", tokenizer.eos, tokenizer.eos_id),
        ("BOS", tokenizer.bos, tokenizer.bos_id),
        *(("special token", token, token_id) for token, token_id in tokenizer.special_ids.items()),
    ):
        found = None if token is None else ids.get(token)
        if found != token_id:
            yield f"gives {what} {token!r} the id {token_id}, in {names.TOKENIZER} it has {found}"
        elif token is not None and token not in tokenizer.special_ids:
            yield f"has {what} {token!r} not among its special tokens"


class Tally:
    """Totals over the documents of all shards.

    Args:
        is_shuffled: the documents are in random order, so that records do not ascend.
    """

    def __init__(self, *, is_shuffled: bool = False) -> None:
        self._is_shuffled = is_shuffled
        self.is_complete = True
        self.shortest = np.iinfo(np.int64).max
        self.longest = 0
        self.length_counts = np.zeros(64, np.int64)
        self.documents_of_source: Counter[int] = Counter()
        self.tokens_of_source: Counter[int] = Counter()
        self.next_record: dict[int, int] = {}

    def add(self, findings: ShardFindings) -> Iterator[Problem]:
        """Add the next shard; yields a problem if its records do not continue those of the shards before."""
        if findings.problems:
            self.is_complete = False
        if findings.lengths is not None:
            self._add_lengths(findings.lengths)
        if findings.runs is not None:
            yield from self._add_runs(findings.runs)

    def _add_lengths(self, lengths: NDArray[np.int64]) -> None:
        self.shortest = min(self.shortest, int(lengths.min()))
        self.longest = max(self.longest, int(lengths.max()))
        # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2
        self.length_counts += np.bincount(np.frexp(lengths)[1] - 1, minlength=64)

    def _add_runs(self, runs: SourceRuns) -> Iterator[Problem]:
        columns = (runs.source.tolist(), runs.record.tolist(), runs.documents.tolist(), runs.tokens.tolist())
        for source, record, documents, tokens in zip(*columns, strict=True):
            expected = self.next_record.get(source, 0)
            if record < expected and not self._is_shuffled:
                self.is_complete = False
                yield Problem(
                    file=names.SHARD_TABLE,
                    message=f"has runs that go back to record {record + 1} of source {source}, "
                    f"expected {expected + 1} or later",
                )
            self.next_record[source] = max(expected, record + documents) if self._is_shuffled else record + documents
            self.documents_of_source[source] += documents
            self.tokens_of_source[source] += tokens


def check_names(corpus: Corpus) -> Iterator[Problem]:
    """Names and content fingerprint of the shard table."""
    manifest = corpus.manifest
    twice = [name for name, count in Counter(corpus.shards.names()).items() if count > 1]
    if twice:
        yield Problem(file=names.SHARD_TABLE, message=f"names {twice[0]} more than once")
    found = content_fingerprint(
        join_hashes(info.tokens_hash for info in corpus.shards),
        num_documents=manifest.num_documents,
        eos_id=corpus.eos_id,
        bos_id=corpus.bos_id,
    )
    if found != corpus.fingerprint:
        yield Problem(
            file=names.SHARD_TABLE,
            message=f"has shards with the content fingerprint {found}, the manifest says {corpus.fingerprint}",
        )


def check_lengths(manifest: Manifest, tally: Tally) -> Iterator[Problem]:
    """Document lengths in the manifest against the shards."""
    counts = tally.length_counts.tolist()
    stored = manifest.document_lengths
    while counts and not counts[-1]:
        counts.pop()
    found = (tally.shortest if counts else 0, tally.longest, counts)
    expected = (stored.shortest, stored.longest, stored.counts)
    if found != expected:
        yield Problem(
            file=names.MANIFEST,
            message=f"gives document lengths (shortest, longest, counts) {expected}, the shards hold {found}",
        )


def check_sources(manifest: Manifest, sources: Sequence[SourceInfo], tally: Tally) -> Iterator[Problem]:
    """The source table against the shards, and the manifest against the source table."""
    for index, source in enumerate(sources):
        label = f"source {index} ({source_label(manifest, source)})"
        yield from _check_source(label, source, tally, index)
    unknown = sorted(source for source in tally.next_record if not 0 <= source < len(sources))
    if unknown:
        yield Problem(file=names.SHARD_TABLE, message=f"names the source {unknown[0]}; there are {len(sources)}")
    yield from _check_sums(manifest, sources)
    found = recipe_fingerprint(
        manifest.build, manifest.tokenizer, ((source.argument, source.path, source.num_bytes) for source in sources)
    )
    if found != manifest.fingerprints.recipe:
        yield Problem(
            file=names.MANIFEST,
            message=f"gives the recipe fingerprint {manifest.fingerprints.recipe}, "
            f"its settings, tokenizer and sources have {found}",
        )


def _check_source(label: str, source: SourceInfo, tally: Tally, index: int) -> Iterator[Problem]:
    settled = source.documents + sum(source.left_out.values())
    if source.records_read != settled:
        message = f"says of {label}: {source.records_read} records read, but {settled} written and left out"
        yield Problem(file=names.SOURCE_TABLE, message=message)
    found = (tally.documents_of_source[index], tally.tokens_of_source[index])
    if tally.is_complete and found != (source.documents, source.tokens):
        yield Problem(
            file=names.SOURCE_TABLE,
            message=f"says of {label} that {source.documents} documents and {source.tokens} tokens were written, "
            f"the shard table {found[0]} and {found[1]}",
        )
    if tally.next_record.get(index, 0) > source.records_read:
        yield Problem(
            file=names.SHARD_TABLE,
            message=f"has record {tally.next_record[index]} of {label}, which has {source.records_read}",
        )


def _check_sums(manifest: Manifest, sources: Sequence[SourceInfo]) -> Iterator[Problem]:
    left_out: Counter[str] = Counter()
    for source in sources:
        left_out.update(source.left_out)
    sums: dict[str, tuple[Any, Any]] = {
        "read": (manifest.records.read, sum(source.records_read for source in sources)),
        "written": (manifest.records.written, sum(source.documents for source in sources)),
        "left out": (manifest.records.left_out, dict(sorted(left_out.items()))),
        "bytes of text": (manifest.text_bytes, sum(source.text_bytes for source in sources)),
        "documents": (manifest.records.written, manifest.num_documents),
    }
    for what, (stored, found) in sums.items():
        if stored != found:
            yield Problem(file=names.MANIFEST, message=f"says {stored} {what}, its sources add up to {found}")


def check_split(store: Store, manifest: Manifest) -> Iterator[Problem]:
    """The two corpora of a validation split against each other, if both are in one folder."""
    split = manifest.build.split
    if split not in IN_OTHER_SPLIT:
        return
    other_name = names.VALIDATION if split == names.TRAIN else names.TRAIN
    above, folder = locate(store.location)[0], other_name
    if manifest.generation is not None:
        above = locate(above.location)[0]
        folder = names.in_folder(other_name, names.generation_folder(manifest.generation.number))
    try:
        other = read_manifest(above.below(folder))
    except CorpusError:
        return  # it is elsewhere, or damaged, which its own verification reports
    if msgspec.structs.replace(other.build, split=split) != manifest.build or other.arguments != manifest.arguments:
        return  # from another build
    elsewhere = manifest.records.left_out.get(IN_OTHER_SPLIT[split], 0)
    if (other.records.read, other.records.written) != (manifest.records.read, elsewhere):
        yield Problem(
            file=names.MANIFEST,
            message=f"says {manifest.records.read} records read and {elsewhere} {IN_OTHER_SPLIT[split]}, "
            f"{other_name} has {other.records.read} and {other.records.written}",
        )
