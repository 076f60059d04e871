"""The differences between two corpora, or between two plans."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.loss import kept_columns
from tokshard.format.shared import num_shared
from tokshard.format.view import View
from tokshard.inspect.corpus.documents import column_parts, origin_of
from tokshard.run_files.plan_file import Mix
from tokshard.run_files.recipe import plan_of

_MAX_NAMES = 10


class Difference(msgspec.Struct, frozen=True, kw_only=True):
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
    if _same_shards(first, second) == max(len(first.shards), len(second.shards)):
        return Difference(
            is_equal=True,
            is_hashed=is_hashed,
            verdict=("the same tokens, byte for byte" if is_hashed else "the same tokens by their manifests")
            + (", built in another way" if differing else ", built in the same way")
            + ("" if is_hashed else "; the bytes were not read, --hash reads them"),
            fields=differing,
            notes=[],
        )
    notes: list[str] = []
    if not (isinstance(first, View) or isinstance(second, View)):  # which have shards of another corpus
        note, shards = _shards(first, second)
        notes, differing = [note], {"shards": shards} | differing
    found = None if first.fingerprint == second.fingerprint else _first_differing(first, second)
    shared = min(first.num_documents, second.num_documents)
    notes += _shared_note(first, second)
    if found is not None:
        notes += _document_notes(first, second, *found)
        verdict = "the loss spans differ" if found[1] else "the documents differ"
    elif first.num_documents != second.num_documents:
        equal = "document is" if shared == 1 else f"{shared:,} documents are"
        notes.append(f"the first {equal} equal; one corpus continues")
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


def _shared_note(first: Corpus, second: Corpus) -> list[str]:
    """How many documents are in both, where that is known."""
    count = None if first.fingerprint == second.fingerprint else num_shared(first, second)
    return [] if count is None else [f"{count} {'is' if count.num_documents == 1 else 'are'} in both"]


def compare_mixes(first: Mix, second: Mix) -> Difference:
    """Compare two plans: first what determines their order, then the contents of their files.

    Raises:
        PlanError: one of them is not a valid plan.
        CorpusError: a corpus cannot be read.
    """
    plans = [plan_of(mix) for mix in (first, second)]
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
    of_plans = _differing(identities[0], identities[1])
    fields |= {f"plan.{name}": values for name, values in of_plans.items() if fields.get(name) != values}
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


def _same_shards(first: Corpus, second: Corpus) -> int:
    """How many shards at the start are equal, byte for byte. Of a view, all or none."""
    if isinstance(first, View) or isinstance(second, View):
        return len(first.shards) if first.fingerprint == second.fingerprint else 0
    pairs = zip(first.shards, second.shards, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].sha256 == pair[1].sha256, pairs))


def _check_sizes(corpus: Corpus) -> None:
    for name, expected in zip(corpus.shards.names(), corpus.shards.sizes.tolist(), strict=True):
        path = corpus.shard_store.where(name)
        try:
            found = corpus.shard_store.stat(name).size
        except OSError as error:
            raise _damaged(corpus, f"{path} cannot be read: {error.strerror or error}") from error
        if found != expected:
            raise _damaged(corpus, f"{path} has {found} bytes, expected {expected}")


def _damaged(corpus: Corpus, problem: str) -> DamagedCorpusError:
    return DamagedCorpusError(
        problem, hint=f"'tokshard verify {shlex.quote(corpus.location)}' lists everything that is damaged"
    )


def _shards(first: Corpus, second: Corpus) -> tuple[str, tuple[list[str], list[str]]]:
    """How many shards are equal, have other bytes, or are in one corpus only; and the first that are not equal."""
    hashes = [{shard.name: shard.sha256 for shard in corpus.shards} for corpus in (first, second)]
    others = [
        [name for name, sha256 in mine.items() if theirs.get(name) != sha256] for mine, theirs in (hashes, hashes[::-1])
    ]
    changed = [name for name in others[0] if name in hashes[1]]
    counts = {
        "equal": len(hashes[0]) - len(others[0]),
        "with another hash": len(changed),
        "only in the first": len(others[0]) - len(changed),
        "only in the second": len(others[1]) - len(changed),
    }
    note = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"shards: {note}", (others[0][:_MAX_NAMES], others[1][:_MAX_NAMES])


def _verdict_of_shards(first: Corpus, second: Corpus) -> str:
    """The verdict on two corpora of the same documents."""
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
    found = list(column_parts(corpus, column))
    if corpus.manifest.columns[column] == "float64":  # NaN equals nothing, but its bits do
        found = [part.view(pa.int64()) for part in found]
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
    how = f"{' and '.join(f'{len(part):,}' for part in tokens)} tokens"
    if is_loss:
        how = f"weight in the loss: {' and '.join(f'{part[place]:g}' for part in tokens)}"
    one, other = (f"record {origin['record_number']:,} of {origin['source']}" for origin in origins)
    where = f"{one} in both" if one == other else f"{one} in the first, {other} in the second"
    return [
        f"the first document that differs is {document:,}, from token {place:,} on ({how})",
        f"it is {where}",
    ]


def _first_differing(first: Corpus, second: Corpus) -> tuple[int, bool] | None:
    """The first document that differs, among those that both have; equal shards at the start are not read.

    Returns:
        Its number, and whether its tokens are equal and only its targets or their weights differ.
    """
    has_spans = first.has_spans or second.has_spans
    shared = min(first.num_documents, second.num_documents)
    document = int(first.shards.first_documents[_same_shards(first, second)])
    while document < shared:
        (starts, tokens), (others, other_tokens) = (_from(corpus, document) for corpus in (first, second))
        count = min(shared - document, len(starts) - 1, len(others) - 1)
        ends, other_ends = (of[1 : count + 1] - of[0] for of in (starts, others))
        num_equal = _first_of(ends != other_ends, count)
        stop = int(ends[num_equal - 1]) if num_equal else 0
        is_other = tokens[starts[0] : starts[0] + stop] != other_tokens[others[0] : others[0] + stop]
        num_equal = int(np.searchsorted(ends[:num_equal], _first_of(is_other, stop), "right"))
        for number in range(document, document + num_equal if has_spans else document):
            if not np.array_equal(first.target_weights(number), second.target_weights(number)):
                return number, True
        if num_equal < count:
            return document + num_equal, False
        document += count
    return None


def _first_of(found: NDArray[np.bool_], otherwise: int) -> int:
    """The place of the first True."""
    return int(found.argmax()) if found.any() else otherwise


def _from(corpus: Corpus, document: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Bounds of a document and those after it in its record batch, int64 [documents + 1]; and the batch's tokens."""
    index, row = corpus.shards.find(document)
    shard = corpus.shard(index)
    for batch in range(shard.num_batches):
        offsets, tokens = shard.batch(batch)
        if row < len(offsets) - 1:
            return offsets[row:], tokens
        row -= len(offsets) - 1
    raise AssertionError("every document is in a batch")
