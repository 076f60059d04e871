"""Rows as trainers save them, padded or packed, become their documents: padding is no text, and is counted.

Masks and labels become loss spans, shifted where they are shifted there, and never get lost.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract import small
from tests.pipeline import foreign
from tests.pipeline.foreign import EOS, TABLES, datatrove, documents_of, imported, olmo
from tests.pipeline.inputs import write_byte_tokenizer
from tests.pipeline.test_import import add_bos
from tokshard import copy_corpus, open_corpus
from tokshard.errors import UsageError
from tokshard.inspect.verify.verification import verify_corpus

PAD = 200
every_table = pytest.mark.parametrize("form", TABLES)


def import_table(place: Path, form: str, columns: dict[str, Any], **options: Any) -> Any:
    (place / form).write_bytes(TABLES[form](pa.table(columns)))
    return imported(place, place / form, **options)


def padding_of(result: Any) -> int:
    with open_corpus(result.directory) as corpus:
        return corpus.manifest.records.padding_ids


def row(ids: list[list[int]], mask: Any = None, positions: Any = None, lengths: Any = None) -> dict[str, Any]:
    said = {"attention_mask": mask, "position_ids": positions, "seq_lengths": lengths}
    return {"input_ids": ids} | {name: values for name, values in said.items() if values is not None}


ROWS: list[tuple[dict[str, Any], list[list[int]], int]] = [
    (row([[5, 6, EOS, PAD], [7, EOS, PAD, PAD]], [[1, 1, 1, 0], [1, 1, 0, 0]]), [[5, 6, EOS], [7, EOS]], 3),
    (row([[PAD, 5, 6, EOS], [PAD, PAD, 7, 8]], [[0, 1, 1, 1], [0, 0, 1, 1]]), [[5, 6, EOS], [7, 8, EOS]], 3),
    (row([[PAD, 5, PAD]], [[False, True, False]]), [[5, EOS]], 2),
    (row([[5, EOS, EOS, EOS]], [[1, 1, 0, 0]]), [[5, EOS]], 2),
    (row([[5, EOS, EOS, EOS]], [[1, 0, 0, 0]]), [[5, EOS]], 3),
    (row([[PAD, PAD], [5, 6]], [[0, 0], [1, 1]]), [[5, 6, EOS]], 2),
    (row([[5, EOS, PAD, 7, EOS, PAD]], [[1, 1, 0, 1, 1, 0]]), [[5, EOS], [7, EOS]], 2),
    (row([[5, 6], [7, PAD]], [None, [1, 0]]), [[5, 6, EOS], [7, EOS]], 1),
    (row([[5, 6, 7, 8, PAD]], [[1, 2, 2, 3, 0]]), [[5, EOS], [6, 7, EOS], [8, EOS]], 1),
    (row([[5, 6, 7, 8, 9]], None, [[0, 1, 0, 1, 2]]), [[5, 6, EOS], [7, 8, 9, EOS]], 0),
    (row([[7, 7, 8, 9]], None, [[0, 1, 0, 1]]), [[7, 7, EOS], [8, 9, EOS]], 0),
    (row([[5, EOS, 7, EOS]], None, [[0, 1, 0, 1]]), [[5, EOS], [7, EOS]], 0),
    (row([[5, EOS, 7, EOS]], None, [[0, 1, 2, 3]]), [[5, EOS], [7, EOS]], 0),
    (row([[5, 6, EOS, EOS]], None, [[0, 1, 0, 0]]), [[5, 6, EOS]], 0),
    (row([[5, 6, 7], [8, 9]], None, None, [[1, 2], None]), [[5, EOS], [6, 7, EOS], [8, 9, EOS]], 0),
    (row([[5, 6, 7, PAD]], [[1, 1, 1, 0]], None, [[1, 2]]), [[5, EOS], [6, 7, EOS]], 1),
    (row([[PAD, PAD, 5, 6]], [[0, 0, 1, 1]], [[1, 1, 0, 1]]), [[5, 6, EOS]], 2),
    (row([[5, 6, PAD, PAD]], [[1, 1, 0, 0]], [[0, 1, 0, 0]]), [[5, 6, EOS]], 2),
    (row([[5, 6, PAD, 7, 8, PAD]], [[1, 1, 0, 1, 1, 0]], [[0, 1, 2, 0, 1, 2]]), [[5, 6, EOS], [7, 8, EOS]], 2),
]


@every_table
@pytest.mark.parametrize(("columns", "documents", "num_padding"), ROWS)
def test_rows_become_their_documents_without_padding_which_is_counted(form, columns, documents, num_padding, place):
    result = import_table(place, form, columns)
    assert (documents_of(result), padding_of(result)) == (documents, num_padding)


@every_table
def test_spans_and_kept_values_follow_the_documents_of_a_row(form, place):
    columns = {
        "input_ids": [[PAD, 5, 6, 7, 8], [9, 10, PAD, PAD, PAD]],
        "attention_mask": [[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]],
        "labels": [[-100, 5, 6, -100, 8], [-100, 10, -100, -100, -100]],
        "from": ["x", "y"],
    }
    result = import_table(place, form, columns, keep_field=["from"])
    assert documents_of(result) == [[5, 6, EOS], [7, 8, EOS], [9, 10, EOS]]
    with open_corpus(result.directory) as corpus:
        assert [corpus.loss_spans(number).tolist() for number in range(3)] == [[[1, 2]]] * 3
        assert [corpus.metadata(number)["from"] for number in range(3)] == ["x", "x", "y"]


@every_table
def test_columns_that_are_not_read_are_named_once_and_those_that_are_read_are_not(form, place):
    others = {"special_tokens_mask": [[0, 0]], "token_type_ids": [[0, 0]], "length": [2], "input_length": [2]}
    columns = {"input_ids": [[5, 6]], "attention_mask": [[1, 1]], "position_ids": [[0, 1]], **others}
    notes = [note for note in import_table(place, form, columns).notes if "left out" in note]
    assert len(notes) == 1
    assert f"that are left out: {', '.join(others)};" in notes[0]


def test_rows_of_mds_become_their_documents_without_padding_too(place):
    columns = {
        "tokens": [[5, 6, 7, PAD], [8, PAD, PAD, PAD]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
        "position_ids": [[0, 1, 0, 0], [0, 0, 0, 0]],
        "labels": [[5, 6, 7, -100], [8, -100, -100, -100]],
    }
    ids = columns.pop("tokens")
    result = imported(place, foreign.mds(place / "in", [ids], "ndarray:int32", more=columns))
    assert (documents_of(result), padding_of(result)) == ([[5, 6, EOS], [7, EOS], [8, EOS]], 4)
    (note,) = [note for note in result.notes if "left out" in note]
    assert note.startswith("columns of shard.00000.mds that are left out: id, n, labels; ")
    index = place / "in" / "index.json"
    index.write_text(index.read_text().replace('"int", "ndarray:int32"', '"int", "pkl"'))
    with pytest.raises(UsageError, match="column 'attention_mask' is stored as pkl, expected ndarray"):
        imported(place, place / "in", force=True)


@given(
    rows=st.lists(st.lists(st.lists(st.integers(1, 199), min_size=1, max_size=4), max_size=4), min_size=1, max_size=5),
    by=st.sampled_from(["numbers", "positions", "lengths"]),
    side=st.sampled_from(["left", "right"]),
)
def test_any_packed_and_padded_rows_give_the_documents_that_were_packed(rows, by, side, tmp_path_factory):
    rows = [*rows, [[7]]]  # an import has to write a document
    width = max(sum(map(len, row)) for row in rows) + 1
    columns: dict[str, list[list[int]]] = {"ids": [], "attention_mask": [], "position_ids": [], "seq_lengths": []}
    for packed in rows:
        ids = list(chain.from_iterable(packed))
        places = list(chain.from_iterable(range(len(document)) for document in packed))
        mask = [number if by == "numbers" else 1 for number, document in enumerate(packed, 1) for _ in document]
        pads = width - len(ids)
        for name, values, pad in (("ids", ids, PAD), ("attention_mask", mask, 0), ("position_ids", places, 1)):
            padding = [pad] * pads
            columns[name].append(padding + values if side == "left" else values + padding)
        columns["seq_lengths"].append(list(map(len, packed)))
    unwanted = {"numbers": {"position_ids", "seq_lengths"}, "positions": {"seq_lengths"}, "lengths": {"position_ids"}}
    said = {name: values for name, values in columns.items() if name not in unwanted[by]}
    place = tmp_path_factory.mktemp("place")
    write_byte_tokenizer(place / "tok")
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, import_batch_bytes=8 * width * 2)
        result = import_table(place, "a.parquet", said, token_field="ids")
    documents = list(chain.from_iterable(rows))
    assert documents_of(result) == [[*document, EOS] for document in documents]
    assert padding_of(result) == width * len(rows) - sum(map(len, documents))


# masks and labels

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
def test_labels_and_masks_of_tables_become_spans(what, form, place):
    columns, options, spans = COLUMNS[what]
    result = imported(place, table(place, form, columns), **options)
    assert found_in(place / "out") == (DOCUMENTS, spans)
    assert result.num_targets == sum(stop - start for of_document in spans for start, stop in of_document)
    with open_corpus(place / "out") as corpus:
        assert corpus.manifest.build.loss_field == options.get("loss_field")
        if what == "weights":
            assert [corpus.target_weights(number).tolist() for number in range(3)] == WEIGHTS


@every_table
def test_delimiters_that_are_added_are_not_trained_and_shift_what_follows(form, place):
    add_bos(place)
    columns = {"loss_mask": [[0, 1], [1, 1, 1, 1, 1]]}
    imported(place, table(place, form, columns, [[5, 6], [7, EOS, 257, 8, 9]]), bos="<s>")
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
def test_values_after_those_that_do_not_fit_stay_with_their_documents(form, place):
    file = table(place, form, {"loss_mask": [MASKS[0], [0, 0, 1], MASKS[2]]})
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
