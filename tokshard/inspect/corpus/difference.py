"""The differences between two corpora, or between two plans."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tokshard.errors import DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.loss import kept_columns
from tokshard.inspect.corpus.documents import origin_of
from tokshard.run_files.plan_file import Mix
from tokshard.runtime.plan import StreamPlan

_MAX_NAMES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The differences between two corpora or two plans.

    Args:
        is_equal: whether both hold the same tokens and kept columns, or read the same tokens in the same order.
        is_hashed: whether the shards were hashed; otherwise the verdict relies on the manifests.
        verdict: the result in one sentence.
        fields: dotted name to both values; None if one side lacks the field.
        notes: other differences, one sentence each.
    """

    is_equal: bool
    is_hashed: bool
    verdict: str
    fields: dict[str, tuple[Any, Any]]
    notes: list[str]


def compare_corpora(first: Corpus, second: Corpus, *, is_hashed: bool = False) -> Difference:
    """Compare manifests, shard tables and shard sizes; if shards differ, documents up to the first that differs.

    Args:
        is_hashed: whether the shards were hashed and match the manifests, see `verify.verification.check_hashes`.

    Raises:
        CorpusError: a corpus cannot be read, or a shard has another size than its manifest says.
    """
    for corpus in (first, second):
        _check_sizes(corpus)
    manifests = [msgspec.to_builtins(corpus.manifest) for corpus in (first, second)]
    for fields in manifests:
        del fields["files"]  # their hashes follow from the other fields
    differing = _differing(manifests[0], manifests[1])
    if [shard.sha256 for shard in first.shards] == [shard.sha256 for shard in second.shards]:
        return Difference(
            is_equal=True,
            is_hashed=is_hashed,
            verdict=("the same tokens, byte for byte" if is_hashed else "the same tokens by their manifests")
            + (", built in another way" if differing else ", built in the same way")
            + ("" if is_hashed else "; the bytes were not read, --hash reads them"),
            fields=differing,
            notes=[],
        )
    notes = [_shards_note(first, second)]
    found = None if first.fingerprint == second.fingerprint else _first_differing(first, second)
    shared = min(first.num_documents, second.num_documents)
    if found is not None:
        notes += _document_notes(first, second, *found)
        verdict = "the loss spans differ" if found[1] else "the documents differ"
    elif first.num_documents != second.num_documents:
        notes.append(f"the first {shared:,} documents are equal; one corpus continues")
        verdict = "one corpus starts with the other"
    else:
        verdict = _verdict_of_shards(first, second)
    columns = _columns_note(first, second) if found is None and first.num_documents == second.num_documents else ""
    if columns:
        verdict, notes = "the same tokens, and other kept columns", [*notes, columns]
    if first.has_spans != second.has_spans and found is None:
        notes.append("only one of them has loss spans; they have the same targets, and other fingerprints")
    is_same = found is None and first.num_documents == second.num_documents and not columns
    if first.manifest.tokenizer.canonical_sha256 != second.manifest.tokenizer.canonical_sha256:
        is_same, verdict = False, f"{verdict}, and the tokenizers differ: equal ids may mean other text"
    return Difference(is_equal=is_same, is_hashed=is_hashed, verdict=verdict, fields=differing, notes=notes)


def compare_mixes(first: Mix, second: Mix) -> Difference:
    """Compare two plans: first what determines their order, then the contents of their files.

    Raises:
        PlanError: one of them is not a valid plan.
        CorpusError: a corpus cannot be read.
    """
    plans = [StreamPlan(**mix.arguments()) for mix in (first, second)]
    same_order = plans[0].fingerprint == plans[1].fingerprint
    same_weights = plans[0].cursor() == plans[1].cursor()
    # a recipe of the trainer says more, of how it loads a mix
    given = [{item.name: getattr(mix, item.name) for item in dataclasses.fields(Mix)} for mix in (first, second)]
    fields = _differing(given[0], given[1])
    identities: list[dict[str, Any]] = []
    for plan in plans:
        corpora = {
            name: msgspec.structs.asdict(corpus) for name, corpus in zip(plan.names, plan.identity.corpora, strict=True)
        }
        weights = {
            f"from sample {segment.start}": dict(zip(plan.names, segment.weights, strict=True))
            for segment in plan.cursor().segments
        }
        identities.append({**plan.identity.fields, "corpus": corpora, "weight": weights})
    fields |= {f"plan.{name}": values for name, values in _differing(identities[0], identities[1]).items()}
    if same_order and same_weights:
        verdict = "the same samples in the same order"
    elif same_order:
        verdict = (
            "the same order within each corpus, other weights: a checkpoint of one can be continued with the other"
        )
    else:
        verdict = "other orders: a checkpoint of one is refused by the other"
    return Difference(is_equal=same_order and same_weights, is_hashed=False, verdict=verdict, fields=fields, notes=[])


def _differing(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The leaves in which two nested mappings differ, by dotted name."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*first, *second]):
        one, other = first.get(key), second.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found |= _differing(one, other, f"{prefix}{key}.")
        elif one != other:
            found[f"{prefix}{key}"] = (one, other)
    return found


def _check_sizes(corpus: Corpus) -> None:
    for name, expected in zip(corpus.shards.names(), corpus.shards.sizes.tolist(), strict=True):
        path = corpus.store.where(name)
        try:
            found = corpus.store.stat(name).size
        except OSError as error:
            raise _damaged(corpus, f"{path} cannot be read: {error.strerror or error}") from error
        if found != expected:
            raise _damaged(corpus, f"{path} has {found} bytes, expected {expected}")


def _damaged(corpus: Corpus, problem: str) -> DamagedCorpusError:
    return DamagedCorpusError(
        problem, hint=f"'tokshard verify {shlex.quote(corpus.location)}' lists everything that is damaged"
    )


def _shards_note(first: Corpus, second: Corpus) -> str:
    """How many shards are equal, have the same name but other bytes, or are only in one corpus."""
    hashes = [{shard.name: shard.sha256 for shard in corpus.shards} for corpus in (first, second)]
    shared = [name for name in hashes[0] if name in hashes[1]]
    differing = [name for name in shared if hashes[0][name] != hashes[1][name]]
    parts = [f"shards: {len(shared) - len(differing):,} with the same name and hash"]
    for names, what in (
        (differing, "with another hash"),
        ([name for name in hashes[0] if name not in hashes[1]], "only in the first"),
        ([name for name in hashes[1] if name not in hashes[0]], "only in the second"),
    ):
        if names:
            shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
            parts.append(f"{len(names):,} {what} ({shown})")
    return ", ".join(parts)


def _verdict_of_shards(first: Corpus, second: Corpus) -> str:
    """What differs between two corpora of the same documents."""
    bounds = [[shard.num_documents for shard in corpus.shards] for corpus in (first, second)]
    if bounds[0] != bounds[1]:
        return "the same documents in other shards"
    return "the same documents in shards of the same boundaries, whose other bytes differ"


def _columns_note(first: Corpus, second: Corpus) -> str:
    """Which kept columns differ between two corpora of the same documents; empty: none."""
    names = [kept_columns(corpus.manifest.columns) for corpus in (first, second)]
    notes = [f"{name} is only in the first" for name in names[0] if name not in names[1]]
    notes += [f"{name} is only in the second" for name in names[1] if name not in names[0]]
    for name in names[0]:
        if name in names[1] and not _values(first, name).equals(_values(second, name)):
            notes.append(f"{name} has other values")
    return f"columns: {', '.join(notes)}" if notes else ""


def _values(corpus: Corpus, column: str) -> pa.ChunkedArray:
    """A kept column of all documents, as views of the shards."""
    shards = map(corpus.shard, range(len(corpus.shards)))
    found = [shard.columns(batch)[column] for shard in shards for batch in range(len(shard.places))]
    return pa.chunked_array(found) if found else pa.chunked_array([], pa.null())


def _document_notes(first: Corpus, second: Corpus, document: int, is_loss: bool) -> list[str]:
    """The first document that differs: from which token on, and which record each of the two was made of.

    Args:
        is_loss: its tokens are equal, and its loss spans or their weights differ.
    """
    tokens = [corpus.target_weights(document) if is_loss else corpus.document(document) for corpus in (first, second)]
    shared = min(map(len, tokens))
    differs = np.flatnonzero(tokens[0][:shared] != tokens[1][:shared])
    place = int(differs[0]) if len(differs) else shared
    origins = [origin_of(corpus, corpus.sources(), document) for corpus in (first, second)]
    how = f"tokens: {' and '.join(f'{len(part):,}' for part in tokens)}"
    if is_loss:
        how = f"weight in the loss: {' and '.join(f'{part[place]:g}' for part in tokens)}"
    records = ", ".join(
        f"record {origin.record_number:,} of {origin.source} in the {which}"
        for which, origin in zip(("first", "second"), origins, strict=True)
    )
    return [
        f"the first document that differs is {document:,}, from token {place:,} on ({how})",
        f"it is {records}",
    ]


def _first_differing(first: Corpus, second: Corpus) -> tuple[int, bool] | None:
    """The first document that differs, among those that both have; equal shards at the start are not read.

    Returns:
        Its number, and whether it differs only in what is trained of it.
    """
    has_spans = first.has_spans or second.has_spans
    document, shared = 0, min(first.num_documents, second.num_documents)
    for one, other in zip(first.shards, second.shards, strict=False):
        if one.sha256 != other.sha256:
            break
        document += one.num_documents
    while document < shared:
        if not np.array_equal(first.document(document), second.document(document)):
            return document, False
        if has_spans and not np.array_equal(first.target_weights(document), second.target_weights(document)):
            return document, True
        document += 1
    return None
