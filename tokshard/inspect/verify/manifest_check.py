"""Checks of a manifest against its tables: every number that is stored or implied twice has to agree."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tokshard.errors import CorpusError
from tokshard.format import names
from tokshard.format.content import join_hashes
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
from tokshard.inspect.corpus.documents import source_label
from tokshard.inspect.corpus.vocabulary import token_ids
from tokshard.inspect.verify.shard_check import Problem, ShardFindings
from tokshard.store import Store, locate


def check_tokenizer(store: Store, manifest: Manifest) -> Iterator[Problem]:
    """The copy of the tokenizer against the manifest."""
    tokenizer, file = manifest.tokenizer, manifest.files[names.TOKENIZER]
    if tokenizer.sha256 != file.sha256:
        stated = f"gives the tokenizer SHA-256 {tokenizer.sha256}"
        yield Problem(names.MANIFEST, f"{stated}, and {names.TOKENIZER} {file.sha256}")
    try:
        parsed = json.loads(store.get(names.TOKENIZER))
        found = hashlib.sha256(canonical_json(parsed)).hexdigest()
    except (OSError, ValueError, RecursionError) as error:
        yield Problem(names.TOKENIZER, f"is not JSON: {error}")
        return
    if found != tokenizer.canonical_sha256:
        yield Problem(names.TOKENIZER, f"has canonical SHA-256 {found}, expected {tokenizer.canonical_sha256}")
    try:
        ids = token_ids(parsed)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        yield Problem(names.TOKENIZER, f"has no vocabulary: {error!r}")
        return
    size = 1 + max(ids.values())
    if tokenizer.vocab_size != size:
        stated = f"gives the vocabulary {tokenizer.vocab_size} ids"
        yield Problem(names.MANIFEST, f"{stated}, {names.TOKENIZER} has {size}")
    for what, token, token_id in (
        ("EOS", tokenizer.eos, tokenizer.eos_id),
        ("BOS", tokenizer.bos, tokenizer.bos_id),
        *(("special token", token, token_id) for token, token_id in tokenizer.special_ids.items()),
    ):
        in_tokenizer = None if token is None else ids.get(token)
        if in_tokenizer != token_id:
            stated = f"gives {what} {token!r} the id {token_id}"
            yield Problem(names.MANIFEST, f"{stated}, in {names.TOKENIZER} it has {in_tokenizer}")
        elif token is not None and token not in tokenizer.special_ids:
            yield Problem(names.MANIFEST, f"has {what} {token!r} not among its special tokens")


class Tally:
    """Totals over the documents of all shards.

    Args:
        is_shuffled: the documents are in random order, so that records do not ascend.
    """

    def __init__(self, *, is_shuffled: bool = False) -> None:
        self._is_shuffled = is_shuffled
        self.is_complete = True
        self.shortest, self.longest = np.iinfo(np.int64).max, 0
        self.length_counts = np.zeros(64, np.int64)
        self.documents: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()
        self.next_record: dict[int, int] = {}
        """By source, as the two before it."""

    def add(self, findings: ShardFindings) -> Iterator[Problem]:
        """Add the next shard; yields a problem if its records do not continue those of the shards before."""
        self.is_complete = self.is_complete and not findings.problems
        if (lengths := findings.lengths) is not None:
            self.shortest = min(self.shortest, int(lengths.min()))
            self.longest = max(self.longest, int(lengths.max()))
            # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2
            self.length_counts += np.bincount(np.frexp(lengths)[1] - 1, minlength=64)
        for source, record, documents, tokens in () if findings.runs is None else findings.runs.tolist():
            expected = self.next_record.get(source, 0)
            if record < expected and not self._is_shuffled:
                self.is_complete = False
                back = f"record {record + 1} of source {source}, expected {expected + 1} or later"
                yield Problem(names.SHARD_TABLE, f"has runs that go back to {back}")
            self.next_record[source] = max(expected if self._is_shuffled else 0, record + documents)
            self.documents[source] += documents
            self.tokens[source] += tokens


def check_names(corpus: Corpus) -> Iterator[Problem]:
    """Names and content fingerprint of the shard table."""
    twice = [name for name, count in Counter(corpus.shards.names()).items() if count > 1]
    if twice:
        yield Problem(names.SHARD_TABLE, f"names {twice[0]} more than once")
    tokens = join_hashes(info.tokens_hash for info in corpus.shards)
    found = content_fingerprint(tokens, num_documents=corpus.num_documents, eos_id=corpus.eos_id, bos_id=corpus.bos_id)
    if found != corpus.fingerprint:
        message = f"has shards with the content fingerprint {found}, the manifest says {corpus.fingerprint}"
        yield Problem(names.SHARD_TABLE, message)


def check_lengths(manifest: Manifest, tally: Tally) -> Iterator[Problem]:
    """Document lengths in the manifest against the shards."""
    stored = manifest.document_lengths
    counts = np.trim_zeros(tally.length_counts, "b").tolist()
    found = (tally.shortest if counts else 0, tally.longest, counts)
    expected = (stored.shortest, stored.longest, stored.counts)
    if found != expected:
        stated = f"gives document lengths (shortest, longest, counts) {expected}"
        yield Problem(names.MANIFEST, f"{stated}, the shards hold {found}")


def check_sources(manifest: Manifest, sources: Sequence[SourceInfo], tally: Tally) -> Iterator[Problem]:
    """The source table against the shards, and the manifest against the source table."""
    for index, source in enumerate(sources):
        label = f"source {index} ({source_label(manifest, source)})"
        settled = source.documents + sum(source.left_out.values())
        if source.records_read != settled:
            read = f"{source.records_read} records read, but {settled} written and left out"
            yield Problem(names.SOURCE_TABLE, f"says of {label}: {read}")
        found = (tally.documents[index], tally.tokens[index])
        if tally.is_complete and found != (source.documents, source.tokens):
            written = f"{source.documents} documents and {source.tokens} tokens were written"
            told = f"says of {label} that {written}, the shard table {found[0]} and {found[1]}"
            yield Problem(names.SOURCE_TABLE, told)
        if tally.next_record.get(index, 0) > source.records_read:
            last = f"has record {tally.next_record[index]} of {label}"
            yield Problem(names.SHARD_TABLE, f"{last}, which has {source.records_read}")
    unknown = sorted(source for source in tally.next_record if not 0 <= source < len(sources))
    if unknown:
        yield Problem(names.SHARD_TABLE, f"names the source {unknown[0]}; there are {len(sources)}")
    records, left_out = manifest.records, Counter[str]()
    for source in sources:
        left_out.update(source.left_out)
    for what, stored, total in (
        ("read", records.read, sum(source.records_read for source in sources)),
        ("written", records.written, sum(source.documents for source in sources)),
        ("left out", records.left_out, dict(sorted(left_out.items()))),
        ("bytes of text", manifest.text_bytes, sum(source.text_bytes for source in sources)),
        ("documents", records.written, manifest.num_documents),
    ):
        if stored != total:
            yield Problem(names.MANIFEST, f"says {stored} {what}, its sources add up to {total}")
    files = ((source.argument, source.path, source.num_bytes) for source in sources)
    recipe = recipe_fingerprint(manifest.build, manifest.tokenizer, files)
    if recipe != manifest.fingerprints.recipe:
        stated = f"gives the recipe fingerprint {manifest.fingerprints.recipe}"
        yield Problem(names.MANIFEST, f"{stated}, its settings, tokenizer and sources have {recipe}")


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
        own = f"says {manifest.records.read} records read and {elsewhere} {IN_OTHER_SPLIT[split]}"
        message = f"{own}, {other_name} has {other.records.read} and {other.records.written}"
        yield Problem(names.MANIFEST, message)
