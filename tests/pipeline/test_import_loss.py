"""Masks and labels of other tools become loss spans, shifted where they are shifted there, and never get lost."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pipeline import foreign
from tests.pipeline.inputs import arrow_bytes, jsonl, parquet_bytes, special_token, write_byte_tokenizer
from tokshard import copy_corpus, export_corpus, import_corpus, open_corpus
from tokshard.errors import BadRecordError, BadSourceError, ConfigurationChangedError, DamagedCorpusError, UsageError
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.interop.tokens import ends, flat, located
from tokshard.interop.tokens.batches import TokenSpec
from tokshard.store import open_store

EOS = 0
DOCUMENTS = [[5, 6, 7, 8, EOS], [9, EOS], [10, 11, 12, EOS]]
MASKS = [[0, 1, 1, 0, 1], [0, 0], [0, 0, 1, 1]]
SPANS = [[[1, 3], [4, 5]], [], [[2, 4]]]
LABELS = [
    [token if is_trained else -100 for token, is_trained in zip(document, mask, strict=True)]
    for document, mask in zip(DOCUMENTS, MASKS, strict=True)
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the tokenizer of bytes, ``tok``: 257 ids, of which 0 is EOS."""
    write_byte_tokenizer(tmp_path / "tok")
    return tmp_path


def imported(place: Path, *sources: Path, **options: Any) -> Any:
    given_options: dict[str, Any] = {"tokenizer": place / "tok", "out": place / "out", "workers": 1, **options}
    return import_corpus(sources, **given_options)


def found_in(place: Path, out: str = "out") -> tuple[list[list[int]], list[list[list[int]]]]:
    """Documents and spans of a corpus, which is checked in every byte."""
    assert verify_corpus(place / out).problems == ()
    with open_corpus(place / out) as corpus:
        assert corpus.has_spans
        spans = [corpus.loss_spans(number).tolist() for number in range(corpus.num_documents)]
        return [document.tolist() for document in corpus.documents()], spans


def parquet(file: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), file, row_group_size=2)
    return file


def lines(file: Path, columns: dict[str, Any]) -> Path:
    """JSON lines beside `file`."""
    file = file.with_suffix(".jsonl")
    file.write_bytes(jsonl_bytes(pa.table(columns)))
    return file


TABLES = pytest.mark.parametrize("write", [parquet, lines])


def masked_ds(file: Path, documents: Any = DOCUMENTS, masks: Any = MASKS) -> Path:
    foreign.datatrove(file, documents)
    file.with_name(file.name + ".loss").write_bytes(bytes(value for mask in masks for value in mask))
    return file


def olmo(folder: Path, documents: Any = DOCUMENTS, masks: Any = MASKS, *, number: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"token_ids_part_{number:04d}.npy"
    file.write_bytes(foreign.flat(documents, "u2"))
    mask = np.array([value for mask in masks for value in mask], np.bool_)
    (folder / f"labels_mask_part_{number:04d}.npy").write_bytes(mask.tobytes())
    return file


def jsonl_bytes(found: pa.Table) -> bytes:
    return jsonl(found.to_pylist())


@pytest.mark.parametrize("write", [parquet_bytes, arrow_bytes, jsonl_bytes])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("labels", LABELS),
        ("loss_mask", MASKS),
        ("assistant_masks", [[bool(value) for value in mask] for mask in MASKS]),
        ("completion_mask", pa.array(MASKS, pa.list_(pa.int8()))),
    ],
)
def test_labels_and_masks_of_tables_become_spans(place, name, values, write):
    file = place / f"a.{write.__name__.partition('_')[0]}"
    file.write_bytes(write(pa.table({"input_ids": DOCUMENTS, name: values})))
    result = imported(place, file)
    assert found_in(place) == (DOCUMENTS, SPANS)
    assert (result.num_tokens, result.num_targets) == (11, 5)


@TABLES
def test_a_column_of_any_name_is_read_if_it_is_asked_for(place, write):
    file = write(place / "a.parquet", {"input_ids": DOCUMENTS, "trained": MASKS, "labels": LABELS})
    imported(place, file, loss_field="trained")
    assert found_in(place) == (DOCUMENTS, SPANS)
    with open_corpus(place / "out") as corpus:
        assert corpus.manifest.build.loss_field == "trained"


@TABLES
def test_the_first_token_is_never_a_target(place, write):
    imported(place, write(place / "a.parquet", {"input_ids": DOCUMENTS, "labels": DOCUMENTS}))
    assert found_in(place) == (DOCUMENTS, [[[1, 5]], [[1, 2]], [[1, 4]]])


@TABLES
def test_a_float_mask_holds_weights(place, write):
    masks = [[0.0, 0.5, 0.5, 0.0, 2.0], [0.0, 0.0], [0.0, 1.0, 2.0, 2.0]]
    imported(place, write(place / "a.parquet", {"input_ids": DOCUMENTS, "loss_mask": masks}))
    assert found_in(place) == (DOCUMENTS, [[[1, 3], [4, 5]], [], [[1, 2], [2, 4]]])
    with open_corpus(place / "out") as corpus:
        assert [corpus.target_weights(number).tolist() for number in range(3)] == masks


@TABLES
def test_delimiters_that_are_added_are_not_trained_and_shift_what_follows(place, write):
    content = json.loads((place / "tok" / "tokenizer.json").read_text())
    content["added_tokens"].append(special_token(257, "<s>"))
    (place / "tok" / "tokenizer.json").write_text(json.dumps(content))
    columns = {"input_ids": [[5, 6], [7, EOS, 257, 8, 9]], "loss_mask": [[0, 1], [1, 1, 1, 1, 1]]}
    imported(place, write(place / "a.parquet", columns), bos="<s>")
    documents = [[257, 5, 6, EOS], [257, 7, EOS], [257, 8, 9, EOS]]
    assert found_in(place) == (documents, [[[2, 3]], [[2, 3]], [[1, 3]]])


def test_packs_of_megatron_bridge_are_cut_and_shifted_back(place):
    shifted = [[*mask[1:], 0] for mask in MASKS]
    columns = {
        "input_ids": [DOCUMENTS[0] + DOCUMENTS[1], DOCUMENTS[2]],
        "loss_mask": pa.array([shifted[0] + shifted[1], shifted[2]], pa.list_(pa.int8())),
        "seq_start_id": [[0, 5], [0]],
    }
    imported(place, parquet(place / "a.idx.parquet", columns))
    assert found_in(place) == (DOCUMENTS, SPANS)


def test_only_the_mask_of_packs_is_known_to_be_shifted(place):
    columns = {"input_ids": [DOCUMENTS[0]], "labels": [LABELS[0]], "seq_start_id": [[0]]}
    with pytest.raises(UsageError, match="only loss_mask is known to be shifted, and not labels"):
        imported(place, parquet(place / "a.parquet", columns))


@pytest.mark.parametrize("starts", [[1, 5], [0, 5, 5], [0, 8], []])
def test_packs_whose_starts_do_not_ascend_are_damage(place, starts):
    columns = {"input_ids": [DOCUMENTS[0] + DOCUMENTS[1]], "loss_mask": [[0] * 7]}
    columns["seq_start_id"] = pa.array([starts], pa.list_(pa.int32()))
    with pytest.raises(BadSourceError, match="seq_start_id of row 0 does not ascend from 0 within the 7 ids"):
        imported(place, parquet(place / "a.parquet", columns))


def test_the_bytes_of_datatrove_are_read(place):
    imported(place, masked_ds(place / "a.ds"))
    assert found_in(place) == (DOCUMENTS, SPANS)


def test_the_parallel_files_of_olmo_are_read(place):
    olmo(place / "sft")
    olmo(place / "sft", [[20, 21, EOS]], [[0, 1, 1]], number=1)
    imported(place, place / "sft")
    assert found_in(place) == ([*DOCUMENTS, [20, 21, EOS]], [*SPANS, [[1, 3]]])


@pytest.mark.parametrize("options", [{"task_bytes": 1}, {"dedup": "exact"}, {"validation_fraction": 0.4}])
def test_spans_follow_their_documents_through_a_build(place, options):
    rng = np.random.default_rng(5)
    documents = [[*rng.integers(1, 200, rng.integers(1, 9)).tolist(), EOS] for _ in range(60)] * 2
    masks = [[0, *rng.integers(0, 2, len(document) - 1).tolist()] for document in documents[:60]] * 2
    imported(place, masked_ds(place / "a.ds", documents, masks), **options)
    outs = ["out/train", "out/validation"] if "validation_fraction" in options else ["out"]
    pairs = [pair for out in outs for pair in zip(*found_in(place, out), strict=True)]
    known = {tuple(document): mask for document, mask in zip(documents, masks, strict=True)}
    assert len(pairs) == (60 if "dedup" in options else 120)
    for document, spans in pairs:
        trained = {place for start, stop in spans for place in range(start, stop)}
        assert [int(place in trained) for place in range(len(document))] == known[tuple(document)]


def test_an_append_has_loss_spans_if_its_corpus_has(place):
    plain, masked = foreign.datatrove(place / "a.ds", DOCUMENTS), masked_ds(place / "b.ds", [[3, EOS]], [[0, 1]])
    for first, second in ((plain, masked), (masked, plain)):
        imported(place, first, force=True)
        with pytest.raises(ConfigurationChangedError, match="only one has loss spans"):
            imported(place, second, append=True)


def test_an_append_and_a_copy_keep_spans(place):
    imported(place, masked_ds(place / "a.ds"))
    imported(place, masked_ds(place / "b.ds", [[20, 21, EOS]], [[0, 1, 0]]), append=True)
    expected = ([*DOCUMENTS, [20, 21, EOS]], [*SPANS, [[1, 2]]])
    assert found_in(place) == expected
    copy_corpus(str(place / "out"), out=place / "copy", shuffle=1, workers=1)
    documents, spans = found_in(place, "copy")
    assert sorted(zip(documents, spans, strict=True)) == sorted(zip(*expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "more"), [("hf", {}), ("olmo", {}), ("datatrove", {}), ("bridge", {"pack_tokens": 100})]
)
@pytest.mark.parametrize("options", [{}, {"file_bytes": 1 << 10}])
def test_what_is_exported_is_imported_with_its_spans(place, form, more, options):
    rng = np.random.default_rng(7)
    documents = [[*rng.integers(1, 200, rng.integers(1, 40)).tolist(), EOS] for _ in range(200)]
    masks = [[0, *rng.integers(0, 2, len(document) - 1).tolist()] for document in documents]
    result = imported(place, masked_ds(place / "a.ds", documents, masks))
    done = export_corpus(result.directory, format=form, out=place / "exported", **more, **options)
    assert (done.num_files > 1) == bool(options)
    again = imported(place, place / "exported", out=place / "again")
    assert again.manifest.fingerprints.content == result.manifest.fingerprints.content
    assert found_in(place, "again") == found_in(place)


@TABLES
def test_weights_are_imported_as_they_were_exported(place, write):
    masks = [[0.0, 0.5, 0.5, 0.0, 2.0], [0.0, 0.0], [0.0, 1.0, 2.0, 2.0]]
    result = imported(place, write(place / "a.parquet", {"input_ids": DOCUMENTS, "loss_mask": masks}))
    export_corpus(result.directory, format="hf", out=place / "exported")
    again = imported(place, place / "exported", out=place / "again")
    assert again.manifest.fingerprints.content == result.manifest.fingerprints.content


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"labels": [[-100, 6, 7, -100, EOS], [-100, EOS], [-100, 10, 12, EOS]]},
            "labels is 10 at token 1, .* itself, 11",
        ),
        ({"loss_mask": [[0, 1, 1, 0, 1], [0, 0], [0, 0, 3, 1]]}, "loss_mask is 3 at token 2, expected 0 or 1"),
        ({"loss_mask": [[0, 1, 1, 0, 1], [0, 0], [0, 0, 1]]}, "loss_mask has 3 values for 4 ids"),
        ({"loss_mask": [[0, 1, 1, 0, 1], [0, 0], None]}, "loss_mask has 0 values for 4 ids"),
        ({"loss_mask": [[0, 1, 1, 0, 1.5], [0, 0], [0, 0, float("nan"), 1]]}, "expected a weight of 0 or more"),
        (
            {"loss_mask": [[1, 1, 0, 1, 0], [0, 0], [0, 1, 1, 1]], "seq_start_id": [[0], [0], [0]]},
            "loss_mask is 1 at token 3, expected 0 at the last token: it is shifted by one in packs",
        ),
    ],
)
def test_values_that_say_nothing_about_the_ids_are_an_error_of_the_record(place, columns, problem):
    file = parquet(place / "a.parquet", {"input_ids": DOCUMENTS, **columns})
    with pytest.raises(BadRecordError, match=problem) as caught:
        imported(place, file)
    assert "record 3" in str(caught.value)
    imported(place, file, on_bad_record="skip", force=True)
    assert found_in(place)[0] == DOCUMENTS[:2]


@pytest.mark.parametrize(
    ("third", "problem"),
    [
        ({"input_ids": [5, 6], "labels": [-100, 7]}, "labels is 7 at token 1, expected -100 or the id itself, 6"),
        ({"input_ids": [5, 6], "labels": [-100]}, "labels has 1 values for 2 ids"),
        ({"input_ids": [5, 6], "labels": [5, None]}, "labels is a list with null at index 1, expected a list of ids"),
        ({"input_ids": [5, 6], "labels": None}, "the record has no mask or labels to say what is trained, and others"),
        ({"input_ids": [5, 6]}, "the record has no mask or labels to say what is trained, and others do"),
        ({"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [1, 1]}, "several columns that may say what is trained"),
        ({"input_ids": [5, 6], "labels": [5, 6], "seq_start_id": [0]}, "is a pack .* packs are read from parquet"),
        ({"input_ids": "5 6", "labels": [5, 6]}, """input_ids is "5 6", expected a list of integers"""),
        ({"input_ids": [5, 6.5], "labels": [5, 6]}, r"input_ids is a list with 6\.5 at index 1, expected a list of"),
        ({"input_ids": [5, 1 << 63], "labels": [5, 6]}, "expected a list of integers below 2"),
        ({"input_ids": [[5], [6]], "labels": [5, 6]}, "expected a list of integers"),
        ({"input_ids": [5, -6], "labels": [5, -6]}, "id -6 at token 1; the vocabulary has ids up to 256"),
        ({"labels": [5, 6]}, "it has no ids, expected a list of integers"),
        ({"id": 3}, "no ids; it has: id"),
        ("no object", "Expected `object`, got `str`"),
    ],
)
def test_a_line_that_is_no_document_with_labels_is_an_error_of_the_record(place, third, problem):
    good = [{"input_ids": ids, "labels": labels} for ids, labels in zip(DOCUMENTS, LABELS, strict=True)]
    (place / "a.jsonl").write_bytes(jsonl([*good[:2], third, good[2]]))
    with pytest.raises(BadRecordError, match=problem) as caught:
        imported(place, place / "a.jsonl")
    assert "line 3" in str(caught.value)
    result = imported(place, place / "a.jsonl", on_bad_record="skip", force=True)
    assert found_in(place) == (DOCUMENTS, SPANS)
    assert sum(result.manifest.records.left_out.values()) == 1


def test_a_first_line_that_is_no_record_does_not_decide_whether_there_are_labels(place):
    records = [{"input_ids": ids, "labels": labels} for ids, labels in zip(DOCUMENTS, LABELS, strict=True)]
    (place / "a.jsonl").write_bytes(b"{no JSON\n" + jsonl(records))
    imported(place, place / "a.jsonl", on_bad_record="skip")
    assert found_in(place) == (DOCUMENTS, SPANS)


def test_a_line_with_labels_after_one_without_is_an_error_unless_labels_are_left_out(place):
    records = [{"input_ids": DOCUMENTS[0]}, {"input_ids": DOCUMENTS[1], "labels": LABELS[1]}]
    (place / "a.jsonl").write_bytes(jsonl(records))
    with pytest.raises(BadRecordError, match="the record has labels to say what is trained, and the first record has"):
        imported(place, place / "a.jsonl")
    result = imported(place, place / "a.jsonl", loss_field="none", force=True)
    with open_corpus(result.directory) as corpus:
        assert not corpus.has_spans
        assert [document.tolist() for document in corpus.documents()] == DOCUMENTS[:2]


def test_values_after_those_that_do_not_fit_stay_with_their_documents(place):
    masks = [[0, 1, 1, 0, 1], [0, 0, 1], [0, 0, 1, 1]]
    imported(place, parquet(place / "a.parquet", {"input_ids": DOCUMENTS, "loss_mask": masks}), on_bad_record="skip")
    assert found_in(place) == ([DOCUMENTS[0], DOCUMENTS[2]], [SPANS[0], SPANS[2]])


@TABLES
def test_two_columns_that_may_be_meant_are_refused(place, write):
    file = write(place / "a.parquet", {"input_ids": DOCUMENTS, "labels": LABELS, "loss_mask": MASKS})
    with pytest.raises(UsageError, match="several columns that may say what is trained: labels, loss_mask"):
        imported(place, file)
    imported(place, file, loss_field="loss_mask")
    assert found_in(place) == (DOCUMENTS, SPANS)


@TABLES
def test_labels_of_documents_are_no_loss_mask(place, write):
    result = imported(place, write(place / "a.parquet", {"input_ids": DOCUMENTS, "labels": [1, 0, 1]}))
    with open_corpus(result.directory) as corpus:
        assert not corpus.has_spans


@pytest.mark.parametrize("write", [masked_ds, lambda file: olmo(file.parent / "sft"), None])
def test_masks_are_left_out_on_request_only(place, write):
    columns = {"input_ids": DOCUMENTS, "loss_mask": MASKS}
    file = parquet(place / "a.parquet", columns) if write is None else write(place / "a.ds")
    result = imported(place, file, loss_field="none")
    with open_corpus(result.directory) as corpus:
        assert not corpus.has_spans
        assert [document.tolist() for document in corpus.documents()] == DOCUMENTS


def test_a_source_with_a_mask_beside_others_without_one_is_refused_either_way(place):
    plain, masked = foreign.datatrove(place / "a.ds", DOCUMENTS), masked_ds(place / "b.ds")
    for sources in ((plain, masked), (masked, plain)):
        with pytest.raises(UsageError, match=r"a\.ds has no mask or labels to say what is trained, and others do"):
            imported(place, *sources)
    one = parquet(place / "a.parquet", {"input_ids": DOCUMENTS})
    parquet(place / "b.parquet", {"input_ids": DOCUMENTS, "loss_mask": MASKS})
    with pytest.raises(UsageError, match="to say what is trained"):
        imported(place, one, place / "b.parquet", force=True)
    (place / "all").mkdir()
    for name in ("a.parquet", "b.parquet"):
        (place / name).rename(place / "all" / name)
    with pytest.raises(UsageError, match=r"b\.parquet has a mask or labels .* the first source has none"):
        imported(place, place / "all", force=True)


@pytest.mark.parametrize("change", [lambda mask: mask[:-1], lambda mask: mask[:3] + b"\2" + mask[4:]])
def test_a_mask_beside_a_file_that_does_not_fit_it_is_damage(place, change):
    file = masked_ds(place / "a.ds")
    mask = place / "a.ds.loss"
    mask.write_bytes(change(mask.read_bytes()))
    with pytest.raises(BadSourceError, match=r"10 bytes for 11 ids|byte 3 is 2, expected 0 or 1"):
        imported(place, file)


def test_a_mask_whose_ids_are_gone_is_refused(place):
    olmo(place / "sft")
    olmo(place / "sft", number=1).unlink()
    with pytest.raises(BadSourceError, match=r"labels_mask_part_0001\.npy has no token_ids_part_0001\.npy next to it"):
        imported(place, place / "sft")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 60), max_size=3),
    st.sampled_from(["ds", "flat"]),
)
def test_ranges_of_any_size_have_the_mask_of_their_ids(tmp_path, lengths, cuts, form):
    starts = list(accumulate(lengths, initial=1))
    documents = [[*range(start, start + length), EOS] for start, length in zip(starts, lengths, strict=False)]
    masks = [[token % 2 for token in document] for document in documents]
    file = masked_ds(tmp_path / "a.ds", documents, masks) if form == "ds" else olmo(tmp_path / "o", documents, masks)
    spec = TokenSpec(
        field=None, dtype=None, delimiters=(EOS,), narrowest="uint16", max_document_bytes=1 << 20, has_loss=True
    )
    read = ends.read_ds if form == "ds" else flat.read
    bounds = [0, *sorted(cuts), None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(located, "BATCH_BYTES", 8)
        patch.setattr(flat, "BATCH_BYTES", 8)
        for start, stop in pairwise(bounds):
            for batch in read(open_store(str(file.parent)), file.name, start, stop, spec):
                assert batch.loss.tolist() == [token % 2 for token in batch.tokens.tolist()]


def test_damaged_spans_stop_a_copy_with_the_name_of_the_shard(place):
    file = parquet(place / "a.parquet", {"input_ids": DOCUMENTS, "loss_mask": MASKS})
    imported(place, file)
    (shard,) = (place / "out").glob("shard-*")
    content = bytearray(shard.read_bytes())
    values = np.array([1, 3, 4, 5, 2, 4], "<u4").tobytes()
    assert content.count(values) == 1
    content[content.index(values) + 4] = 9
    shard.write_bytes(content)
    with pytest.raises(DamagedCorpusError, match=rf"{shard.name}, batch 0: its loss spans have CRC-32"):
        copy_corpus([place / "out"], out=place / "copy", workers=1)
