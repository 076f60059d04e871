"""Rows as trainers save them, padded or packed, become their documents: padding is no text, and is counted."""

from __future__ import annotations

import json
import struct
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pipeline import foreign
from tests.pipeline.inputs import arrow_bytes, arrow_stream_bytes, jsonl, parquet_bytes, write_byte_tokenizer
from tokshard import copy_corpus, import_corpus, open_corpus
from tokshard.cli.main import run
from tokshard.errors import BadRecordError, BadSourceError, UsageError
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.interop.tokens import lists, located

EOS, PAD = 0, 200


def jsonl_bytes(table: pa.Table) -> bytes:
    return jsonl(table.to_pylist())


FORMS = {"parquet": parquet_bytes, "arrow": arrow_bytes, "arrows": arrow_stream_bytes, "jsonl": jsonl_bytes}
EACH_FORM = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the tokenizer of bytes, ``tok``: 257 ids, of which 0 is EOS."""
    write_byte_tokenizer(tmp_path / "tok")
    return tmp_path


def imported(place: Path, form: str, columns: dict[str, Any], **options: Any) -> Any:
    file = place / f"a.{form.removesuffix('s')}"
    file.write_bytes(FORMS[form](columns if isinstance(columns, pa.Table) else pa.table(columns)))
    return import_corpus([file], **{"tokenizer": place / "tok", "out": place / "out", "workers": 1, **options})


def documents_of(result: Any) -> list[list[int]]:
    """The documents of a corpus, which is checked in every byte."""
    assert verify_corpus(result.directory).problems == ()
    with open_corpus(result.directory) as corpus:
        return [document.tolist() for document in corpus.documents()]


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
def test_rows_become_their_documents_without_padding_which_is_counted(place, form, columns, documents, num_padding):
    result = imported(place, form, columns)
    assert (documents_of(result), padding_of(result)) == (documents, num_padding)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": [[1, 0, 1]]}, "attention_mask is 0 before token 2, inside a document"),
    ({"attention_mask": [[1, 1]]}, "attention_mask has 2 values for 3 ids"),
    ({"attention_mask": [[1, 3, 3]]}, "attention_mask is 3 at token 1, expected 0 for padding"),
    ({"attention_mask": [[2, 2, 1]]}, "attention_mask is 2 at token 0, expected 0 for padding"),
    ({"attention_mask": [[-1, 1, 1]]}, "attention_mask is -1 at token 0"),
    ({"attention_mask": [[1, 1, 0]], "labels": [[5, 6, 7]]}, "token 2 is trained, and attention_mask is 0 there"),
    ({"attention_mask": [[0, 1, 1]], "loss_mask": [[0.5, 1, 1]]}, "token 0 is trained, and attention_mask is 0 there"),
    ({"position_ids": [[0, 1, 3]]}, "position_ids is 3 at token 2, expected 0 where a document begins"),
    ({"position_ids": [[1, 2, 3]]}, "position_ids is 1 at token 0, expected 0 where a document begins"),
    ({"position_ids": [[0, 1, 1]]}, "position_ids is 1 at token 2, expected 0"),
    ({"position_ids": [[0, 1]]}, "position_ids has 2 values for 3 ids"),
    (
        {"input_ids": [[5, PAD, PAD]], "position_ids": [[0, 0, 0]]},
        "position_ids is 0 at token 2 .* padding that no att",
    ),
    ({"seq_lengths": [[1, 1]]}, r"seq_lengths of the row are \[1, 1\], expected numbers above 0 whose sum is 3"),
    ({"seq_lengths": [[0, 3]]}, r"seq_lengths of the row are \[0, 3\]"),
]


@EACH_FORM
@pytest.mark.parametrize(("columns", "problem"), REFUSED)
def test_a_row_that_contradicts_itself_is_refused_with_its_place_and_can_be_skipped(place, form, columns, problem):
    rows = {"input_ids": [[5, 6, 7]], **columns}
    good = {name: [value if name == "input_ids" else [1, 1]] for name, value in rows.items()} | {"input_ids": [[8, 9]]}
    good |= {"position_ids": [[0, 1]]} if "position_ids" in rows else {}
    good |= {"labels": [[8, 9]]} if "labels" in rows else {}
    two = pa.concat_tables([pa.table(good), pa.table(rows)], promote_options="permissive")
    with pytest.raises(BadRecordError, match=rf"a\.{form[:5]}.*, (line|record) [23]: .*{problem}"):
        imported(place, form, two)
    result = imported(place, form, two, on_bad_record="skip", force=True)
    with open_corpus(result.directory) as corpus:
        records = corpus.manifest.records
        assert (records.left_out, records.padding_ids) == ({"padding or documents of the row do not fit": 1}, 0)
        assert next(corpus.documents()).tolist()[:1] == [8]


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("values", [[[[1, 0], [1, 1]]], [[1.0, 0.0]], ["11"], [{"mask": 1}], [3]])
@EACH_FORM
def test_a_mask_or_positions_of_another_shape_are_refused_by_name(place, form, name, values):
    with pytest.raises((UsageError, BadRecordError), match=rf"{name}.* (has type|is) .*expected a list of integers"):
        imported(place, form, {"input_ids": [[5, 6]], name: values})


@EACH_FORM
def test_spans_and_kept_values_follow_the_documents_of_a_row(place, form):
    columns = {
        "input_ids": [[PAD, 5, 6, 7, 8], [9, 10, PAD, PAD, PAD]],
        "attention_mask": [[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]],
        "labels": [[-100, 5, 6, -100, 8], [-100, 10, -100, -100, -100]],
        "from": ["x", "y"],
    }
    result = imported(place, form, columns, keep_field=["from"])
    assert documents_of(result) == [[5, 6, EOS], [7, 8, EOS], [9, 10, EOS]]
    with open_corpus(result.directory) as corpus:
        assert [corpus.loss_spans(number).tolist() for number in range(3)] == [[[1, 2]]] * 3
        assert [corpus.metadata(number)["from"] for number in range(3)] == ["x", "x", "y"]


@EACH_FORM
def test_columns_that_are_not_read_are_named_once_and_those_that_are_read_are_not(place, form):
    others = {"special_tokens_mask": [[0, 0]], "token_type_ids": [[0, 0]], "length": [2], "input_length": [2]}
    columns = {"input_ids": [[5, 6]], "attention_mask": [[1, 1]], "position_ids": [[0, 1]], **others}
    notes = [note for note in imported(place, form, columns).notes if "left out" in note]
    assert len(notes) == 1
    assert f"that are left out: {', '.join(others)};" in notes[0]


def test_packs_of_megatron_bridge_are_cut_without_their_mask_too(place):
    columns = {"input_ids": [[5, 6, 7]], "loss_mask": [[0, 1, 0]], "seq_start_id": [[0, 2]]}
    assert documents_of(imported(place, "parquet", columns, loss_field="none")) == [[5, 6, EOS], [7, EOS]]
    with pytest.raises(BadRecordError, match="the record is a pack"):
        imported(place, "jsonl", columns, loss_field="none", force=True)


def test_a_null_in_a_mask_is_damage(place):
    with pytest.raises(BadSourceError, match="1 values of attention_mask are null"):
        imported(place, "parquet", {"input_ids": [[5, 6]], "attention_mask": [[1, None]]})


def test_padding_is_shown_counted_over_copies_and_additions_and_up_to_a_limit(place, capsys):
    columns = {"input_ids": [[5, PAD], [6, PAD], [7, PAD]], "attention_mask": [[1, 0]] * 3}
    result = imported(place, "parquet", columns, max_documents=2)
    assert (documents_of(result), padding_of(result)) == ([[5, EOS], [6, EOS]], 2)
    copy = copy_corpus([place / "out"], out=place / "copy", workers=1)
    assert padding_of(copy) == 2
    (place / "b.parquet").write_bytes(parquet_bytes(pa.table(columns)))
    options = {"tokenizer": place / "tok", "workers": 1, "max_documents": 2}
    import_corpus([place / "b.parquet"], out=place / "out", append=True, **options)
    assert run(["inspect", str(place / "out")]) == 0
    assert "4 ids of padding left out, as attention_mask says" in capsys.readouterr().out
    assert json.loads((place / "out" / "manifest.json").read_text())["records"]["padding_ids"] == 2


def mds(folder: Path, columns: dict[str, list[list[int]]], kind: str = "ndarray:int32") -> Path:
    """A shard of MDS with arrays of int32."""
    samples = []
    for row in zip(*columns.values(), strict=True):
        arrays = [struct.pack("<BB", 1 << 2, len(values)) + np.array(values, "<i4").tobytes() for values in row]
        samples.append(struct.pack(f"<{len(arrays)}I", *map(len, arrays)) + b"".join(arrays))
    data = foreign.container(samples, b"{}")
    shard = {
        "column_names": list(columns),
        "column_encodings": ["ndarray:int32", *[kind] * (len(columns) - 1)],
        "column_sizes": [None] * len(columns),
        "samples": len(samples),
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
    }
    folder.mkdir()
    (folder / "shard.00000.mds").write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def test_rows_of_mds_become_their_documents_without_padding_too(place):
    columns = {
        "tokens": [[5, 6, 7, PAD], [8, PAD, PAD, PAD]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
        "position_ids": [[0, 1, 0, 0], [0, 0, 0, 0]],
        "labels": [[5, 6, 7, -100], [8, -100, -100, -100]],
    }
    options = {"tokenizer": place / "tok", "out": place / "out", "workers": 1}
    result = import_corpus([mds(place / "in", columns)], **options)
    assert (documents_of(result), padding_of(result)) == ([[5, 6, EOS], [7, EOS], [8, EOS]], 4)
    (note,) = [note for note in result.notes if "left out" in note]
    assert note.startswith("columns of shard.00000.mds that are left out: labels; ")
    with pytest.raises(UsageError, match="column 'attention_mask' is stored as pkl, expected ndarray"):
        import_corpus([mds(place / "pkl", columns, "pkl")], **options, force=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.lists(st.integers(1, 199), min_size=1, max_size=4), max_size=4), min_size=1, max_size=5),
    st.sampled_from(["numbers", "positions", "lengths"]),
    st.sampled_from(["left", "right"]),
)
def test_any_packed_and_padded_rows_give_the_documents_that_were_packed(rows, by, side):
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
    arrays = {name: pa.array(values, pa.list_(pa.int64())) for name, values in columns.items()}
    said = {name: array for name, array in arrays.items() if name not in {"ids", *unwanted[by]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(located, "BATCH_BYTES", 8 * width * 2)
        batches = list(lists.list_batches(arrays["ids"], 100, None, said, (EOS,)))
    found = []
    for batch in batches:
        assert not batch.problems
        bounds = sorted({0, *batch.ends.tolist(), *batch.cuts.tolist()})
        found += [batch.tokens[low:high].tolist() for low, high in pairwise(bounds)]
    assert found == list(chain.from_iterable(rows))
    assert sum(int(batch.padding.sum()) for batch in batches) == width * len(rows) - sum(map(len, found))


IDS = [[5, True], [True, False], [5, 2.0], [5, None], ["5"], [[5]], [5, {"id": 6}], True, "5 6", 5, [1 << 63]]


@pytest.mark.parametrize("ids", IDS)
def test_json_that_is_no_list_of_integers_is_no_list_of_ids(place, ids):
    (place / "a.jsonl").write_bytes(jsonl([{"input_ids": ids}]))
    with pytest.raises(
        BadRecordError, match=r"line 1: missing token ids: input_ids is .*, expected a list of integers"
    ):
        import_corpus([place / "a.jsonl"], tokenizer=place / "tok", out=place / "out", workers=1)


@pytest.mark.parametrize(
    ("name", "values"),
    [("labels", [5, True]), ("labels", [5.0, 6.0]), ("position_ids", [0, True]), ("attention_mask", [1, "0"])],
)
def test_values_of_another_type_beside_ids_are_refused_with_the_first_of_them(place, name, values):
    (place / "a.jsonl").write_bytes(jsonl([{"input_ids": [5, 1], name: values}]))
    shown = next(value for value in values if type(value) is not int)
    with pytest.raises(BadRecordError, match=f"{name} is a list with {json.dumps(shown)} at index"):
        import_corpus([place / "a.jsonl"], tokenizer=place / "tok", out=place / "out", workers=1)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_column_of_booleans_or_floats_holds_neither_ids_nor_labels(place, form):
    with pytest.raises(UsageError, match=r"list<.*bool>, expected integers or lists of integers"):
        imported(place, form, {"input_ids": [[True, False]]})
    for values in ([True, False], [1.0, 0.0]):
        with pytest.raises(UsageError, match=r"column 'labels' has type list<.*>, expected lists of integers"):
            imported(place, form, {"input_ids": [[1, 0]], "labels": [values]})
