"""Rows as trainers save them, padded or packed, become their documents: padding is no text, and is counted."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract import small
from tests.pipeline import foreign
from tests.pipeline.foreign import EOS, TABLES, documents_of, imported
from tests.pipeline.inputs import write_byte_tokenizer
from tokshard import open_corpus
from tokshard.errors import UsageError

PAD = 200
EACH_FORM = pytest.mark.parametrize("form", TABLES)


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


@EACH_FORM
@pytest.mark.parametrize(("columns", "documents", "num_padding"), ROWS)
def test_rows_become_their_documents_without_padding_which_is_counted(form, columns, documents, num_padding, place):
    result = import_table(place, form, columns)
    assert (documents_of(result), padding_of(result)) == (documents, num_padding)


@EACH_FORM
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


@EACH_FORM
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
