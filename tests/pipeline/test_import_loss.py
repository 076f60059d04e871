"""Masks and labels of other tools become loss spans, shifted where they are shifted there, and never get lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.pipeline.foreign import EOS, TABLES, datatrove, documents_of, imported, olmo
from tests.pipeline.test_import import add_bos
from tokshard import copy_corpus, open_corpus
from tokshard.inspect.verify.verification import verify_corpus

DOCUMENTS = [[5, 6, 7, 8, EOS], [9, EOS], [10, 11, 12, EOS]]
MASKS = [[0, 1, 1, 0, 1], [0, 0], [0, 0, 1, 1]]
SPANS = [[[1, 3], [4, 5]], [], [[2, 4]]]
LABELS = [
    [token if is_target else -100 for token, is_target in zip(document, mask, strict=True)]
    for document, mask in zip(DOCUMENTS, MASKS, strict=True)
]
WEIGHTS = [[0.0, 0.5, 0.5, 0.0, 2.0], [0.0, 0.0], [0.0, 1.0, 2.0, 2.0]]


def found_in(out: Path) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Documents and spans of a corpus, which is checked in every byte."""
    assert verify_corpus(out).problems == ()
    with open_corpus(out) as corpus:
        assert corpus.has_spans
        spans = [corpus.loss_spans(number).tolist() for number in range(corpus.num_documents)]
        return [document.tolist() for document in corpus.documents()], spans


every_table = pytest.mark.parametrize("name", TABLES)


def table(place: Path, name: str, columns: dict[str, Any], documents: Any = DOCUMENTS) -> Path:
    (place / name).write_bytes(TABLES[name](pa.table({"input_ids": documents, **columns}), 2))
    return place / name


COLUMNS: dict[str, tuple[dict[str, Any], dict[str, Any], list[list[list[int]]]]] = {
    "labels": ({"labels": LABELS}, {}, SPANS),
    "a mask": ({"loss_mask": MASKS}, {}, SPANS),
    "a mask of booleans": ({"assistant_masks": [[bool(value) for value in mask] for mask in MASKS]}, {}, SPANS),
    "a mask of small integers": ({"completion_mask": pa.array(MASKS, pa.list_(pa.int8()))}, {}, SPANS),
    "the one that is asked for": ({"trained": MASKS, "labels": DOCUMENTS}, {"loss_field": "trained"}, SPANS),
    "unsigned labels": ({"labels": pa.array(DOCUMENTS, pa.list_(pa.uint32()))}, {}, [[[1, 5]], [[1, 2]], [[1, 4]]]),
    "labels of the first token": ({"labels": DOCUMENTS}, {}, [[[1, 5]], [[1, 2]], [[1, 4]]]),
    "weights": ({"loss_mask": WEIGHTS}, {}, [[[1, 3], [4, 5]], [], [[1, 2], [2, 4]]]),
}


@every_table
@pytest.mark.parametrize("what", COLUMNS)
def test_labels_and_masks_of_tables_become_spans(what, name, place):
    columns, options, spans = COLUMNS[what]
    result = imported(place, table(place, name, columns), **options)
    assert found_in(place / "out") == (DOCUMENTS, spans)
    assert result.num_targets == sum(stop - start for of_document in spans for start, stop in of_document)
    with open_corpus(place / "out") as corpus:
        assert corpus.manifest.build.loss_field == options.get("loss_field")
        if what == "weights":
            assert [corpus.target_weights(number).tolist() for number in range(3)] == WEIGHTS


@every_table
def test_delimiters_that_are_added_are_not_trained_and_shift_what_follows(name, place):
    add_bos(place)
    columns = {"loss_mask": [[0, 1], [1, 1, 1, 1, 1]]}
    imported(place, table(place, name, columns, [[5, 6], [7, EOS, 257, 8, 9]]), bos="<s>")
    documents = [[257, 5, 6, EOS], [257, 7, EOS], [257, 8, 9, EOS]]
    assert found_in(place / "out") == (documents, [[[2, 3]], [[2, 3]], [[1, 3]]])


def test_a_document_that_starts_at_the_end_of_its_pack_is_empty(place):
    result = imported(place, table(place, "a.parquet", {"seq_start_id": [[0, 3], [0]]}, [[1, 2, EOS], [3, EOS]]))
    assert documents_of(result) == [[1, 2, EOS], [3, EOS]]
    assert result.manifest.records.left_out == {"empty": 1}


def test_packs_of_megatron_bridge_are_cut_and_shifted_back_with_their_mask_or_without(place):
    shifted = [[*mask[1:], 0] for mask in MASKS]
    columns = {
        "loss_mask": pa.array([shifted[0] + shifted[1], shifted[2], []], pa.list_(pa.int8())),
        "seq_start_id": [[0, 5], [0], []],
    }
    file = table(place, "a.parquet", columns, [DOCUMENTS[0] + DOCUMENTS[1], DOCUMENTS[2], []])
    imported(place, file)
    assert found_in(place / "out") == (DOCUMENTS, SPANS)
    assert documents_of(imported(place, file, loss_field="none", force=True)) == DOCUMENTS


def test_the_parallel_files_of_olmo_are_read(place):
    olmo(place / "sft", DOCUMENTS, MASKS)
    olmo(place / "sft", [[20, 21, EOS]], [[0, 1, 1]], number=1)
    imported(place, place / "sft")
    assert found_in(place / "out") == ([*DOCUMENTS, [20, 21, EOS]], [*SPANS, [[1, 3]]])


def test_an_append_and_a_copy_keep_spans(place):
    imported(place, datatrove(place / "a.ds", DOCUMENTS, masks=MASKS))
    imported(place, datatrove(place / "b.ds", [[20, 21, EOS]], masks=[[0, 1, 0]]), append=True)
    expected = ([*DOCUMENTS, [20, 21, EOS]], [*SPANS, [[1, 2]]])
    assert found_in(place / "out") == expected
    copy_corpus(str(place / "out"), out=place / "copy", shuffle=1, workers=1)
    documents, spans = found_in(place / "copy")
    assert sorted(zip(documents, spans, strict=True)) == sorted(zip(*expected, strict=True))


def test_documents_of_corpora_without_spans_or_weights_learn_all_tokens_equally_in_a_copy_with_others(place):
    made = {"weights": {"loss_mask": WEIGHTS}, "spans": {"loss_mask": MASKS}, "plain": {}}
    for name, columns in made.items():
        imported(place, table(place, "a.parquet", columns), out=place / name)
    copy_corpus([place / name for name in made], out=place / "copy", workers=1)
    everything = [[0, *[1] * (len(document) - 1)] for document in DOCUMENTS]
    with open_corpus(place / "copy") as corpus:
        assert [corpus.target_weights(number).tolist() for number in range(9)] == [*WEIGHTS, *MASKS, *everything]


@every_table
def test_values_after_those_that_do_not_fit_stay_with_their_documents(name, place):
    file = table(place, name, {"loss_mask": [MASKS[0], [0, 0, 1], MASKS[2]]})
    imported(place, file, on_bad_record="skip")
    assert found_in(place / "out") == ([DOCUMENTS[0], DOCUMENTS[2]], [SPANS[0], SPANS[2]])


UNTRAINED: dict[str, Callable[[Path], Path]] = {
    **{name: lambda place, name=name: table(place, name, {"labels": LABELS}) for name in TABLES},
    "datatrove": lambda place: datatrove(place / "a.ds", DOCUMENTS, masks=MASKS),
    "olmo": lambda place: olmo(place / "sft", DOCUMENTS, MASKS),
}


@pytest.mark.parametrize("what", UNTRAINED)
def test_a_corpus_has_no_spans_without_masks_or_where_they_are_left_out(what, place):
    sources = [(UNTRAINED[what](place), {"loss_field": "none"})]
    if what in TABLES:
        (place / "more").mkdir()
        sources.append((table(place / "more", what, {"labels": [1, 0, 1]}), {}))  # of documents
    for source, options in sources:
        result = imported(place, source, force=True, **options)
        assert documents_of(result) == DOCUMENTS
        with open_corpus(result.directory) as corpus:
            assert not corpus.has_spans
