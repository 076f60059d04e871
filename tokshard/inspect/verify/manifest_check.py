"""Checks of a manifest against its tables: every number that is stored or implied twice has to agree."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from tokshard.errors import CorpusError
from tokshard.format import names
from tokshard.format.content import join_contents
from tokshard.format.corpus import Corpus
from tokshard.format.manifest import (
    IN_OTHER_SPLIT,
    Manifest,
    canonical_json,
    content_fingerprint,
    recipe_fingerprint,
)
from tokshard.format.opening import read_manifest
from tokshard.format.tables import SourceInfo
from tokshard.format.view import View
from tokshard.inspect.corpus.documents import source_label
from tokshard.inspect.corpus.vocabulary import token_ids
from tokshard.inspect.verify.shard_check import Problem, ShardFindings
from tokshard.inspect.verify.view_check import view_fingerprint
from tokshard.store import Store, locate


def false_claims(file: str, claims: Iterable[tuple[str, object, object]]) -> Iterator[Problem]:
    """A problem for each false claim of a file (its subject, the value there, the value elsewhere)."""
    for what, stated, found in claims:
        if stated != found:
            yield Problem(file, f"says that {what} is {stated}, expected {found}")


def check_tokenizer(store: Store, manifest: Manifest) -> Iterator[Problem]:
    """The manifest against the copy of the tokenizer."""
    stated = manifest.tokenizer
    try:
        canonical, ids = _hash_and_ids(store.get(names.TOKENIZER))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
        yield Problem(names.TOKENIZER, f"is not a tokenizer: {error!r}")
        return
    special = dict.fromkeys([*stated.special_ids, *filter(None, (stated.eos, stated.bos))])
    claims = [
        ("tokenizer.sha256", stated.sha256, manifest.files[names.TOKENIZER].sha256),
        ("tokenizer.canonical_sha256", stated.canonical_sha256, canonical),
        ("tokenizer.vocab_size", stated.vocab_size, 1 + max(ids.values())),
        ("tokenizer.eos_id", stated.eos_id, ids.get(stated.eos)),
        ("tokenizer.bos_id", stated.bos_id, None if stated.bos is None else ids.get(stated.bos)),
        *((f"the special id of {token!r}", stated.special_ids.get(token), ids.get(token)) for token in special),
    ]
    yield from false_claims(names.MANIFEST, claims)


@lru_cache(maxsize=1)  # many corpora have one tokenizer, and a large one takes a second
def _hash_and_ids(content: bytes) -> tuple[str, dict[str, int]]:
    parsed = json.loads(content)
    return hashlib.sha256(canonical_json(parsed)).hexdigest(), token_ids(parsed)


class Tally:
    """Totals over the documents of all shards.

    Args:
        is_shuffled: the documents are in random order, so that records do not ascend.

    Attributes:
        is_complete: whether no shard has a problem.
        of_source: number of a source to its documents, their tokens, and the record after the last one.
    """

    def __init__(self, *, is_shuffled: bool) -> None:
        self._is_shuffled = is_shuffled
        self.is_complete = True
        self.shortest, self.longest, self.lengths = np.iinfo(np.int64).max, 0, np.zeros(64, np.int64)
        self.of_source: defaultdict[int, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))

    def add(self, findings: ShardFindings) -> Iterator[Problem]:
        """Add the next shard; yields a problem if its records do not continue those of the shards before."""
        self.is_complete &= not findings.problems
        if (lengths := findings.lengths) is not None:
            self.shortest = min(self.shortest, int(lengths.min()))
            self.longest = max(self.longest, int(lengths.max()))
            # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2
            self.lengths += np.bincount(np.frexp(lengths)[1] - 1, minlength=64)
        for source, record, documents, tokens in () if findings.runs is None else findings.runs.tolist():
            before, tokens_before, expected = self.of_source[source]
            if record < expected and not self._is_shuffled:
                self.is_complete, back = False, f"record {record + 1} of source {source}"
                yield Problem(names.SHARD_TABLE, f"has runs that go back to {back}, expected {expected + 1} or later")
            following = max(expected if self._is_shuffled else 0, record + documents)
            self.of_source[source] = before + documents, tokens_before + tokens, following


def check_totals(corpus: Corpus, tally: Tally) -> Iterator[Problem]:
    """The shard table on its own, and the manifest against all shards, or against the table of a view."""
    if twice := [name for name, count in Counter(corpus.shards.names()).items() if count > 1]:
        yield Problem(names.SHARD_TABLE, f"names {twice[0]} more than once")
    manifest = corpus.manifest
    if isinstance(corpus, View):
        found = view_fingerprint(corpus)
    else:
        found = content_fingerprint(join_contents(corpus.shards.contents()), manifest.tokenizer, manifest.columns)
    special, lengths = manifest.records.with_special_text or 0, manifest.document_lengths
    claims: list[tuple[str, object, object]] = [
        ("fingerprints.content", corpus.fingerprint, found),
        ("records.with_special_text", special, min(special, manifest.records.written)),
    ]
    if tally.is_complete:
        counts = np.trim_zeros(tally.lengths, "b").tolist()
        stated = lengths.shortest, lengths.longest, lengths.counts
        claims.append(("document_lengths", stated, (tally.shortest if counts else 0, tally.longest, counts)))
    yield from false_claims(names.MANIFEST, claims)


def check_sources(manifest: Manifest, sources: Sequence[SourceInfo], tally: Tally) -> Iterator[Problem]:
    """The source table against the shards, and the manifest against the source table."""
    if unknown := sorted(source for source in tally.of_source if not 0 <= source < len(sources)):
        yield Problem(names.SHARD_TABLE, f"names the source {unknown[0]}; there are {len(sources)}")
    left_out = Counter[str]()
    for index, source in enumerate(sources):
        documents, tokens, following = tally.of_source[index]
        label = f"source {index} ({source_label(manifest, source)})"
        left_out.update(source.left_out)
        settled = source.documents + sum(source.left_out.values())
        claims = [(f"the number of records of {label}", source.records_read, settled)]
        if tally.is_complete:
            claims.append((f"the number of documents of {label}", source.documents, documents))
            claims.append((f"the number of tokens of {label}", source.tokens, tokens))
        yield from false_claims(names.SOURCE_TABLE, claims)
        if following > source.records_read:
            yield Problem(names.SHARD_TABLE, f"has record {following} of {label}, which has {source.records_read}")
    records = manifest.records
    files = ((source.argument, source.path, source.num_bytes) for source in sources)
    recipe = recipe_fingerprint(manifest.build, manifest.tokenizer, files)
    totals = [
        ("records.read", records.read, sum(source.records_read for source in sources)),
        ("records.written", records.written, sum(source.documents for source in sources)),
        ("records.left_out", records.left_out, dict(sorted(left_out.items()))),
        ("text_bytes", manifest.text_bytes, sum(source.text_bytes for source in sources)),
        ("num_documents", manifest.num_documents, records.written),
        ("fingerprints.recipe", manifest.fingerprints.recipe, recipe),
    ]
    yield from false_claims(names.MANIFEST, totals)


def check_split(store: Store, manifest: Manifest) -> Iterator[Problem]:
    """The two corpora of a validation split against each other, if both are in one folder."""
    split, records = manifest.build.split, manifest.records
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
    elsewhere = IN_OTHER_SPLIT[split]
    claims = [
        (f"the number of records read (compare {other_name})", records.read, other.records.read),
        (f"the number of records {elsewhere}", records.left_out.get(elsewhere, 0), other.records.written),
    ]
    yield from false_claims(names.MANIFEST, claims)
