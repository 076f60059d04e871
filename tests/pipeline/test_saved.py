"""Directories that ``save_to_disk`` wrote: their data files, and nothing else of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pipeline.inputs import arrow_stream_bytes, build, jsonl, table, texts_of
from tokshard.errors import SourceError, UsageError
from tokshard.pipeline.sources.discover import discover


def save(directory: Path, parts: Sequence[Sequence[str]], *, indexed: bool = False) -> Path:
    """What `datasets` writes; the test with the real one is marked interop."""
    directory.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, texts in zip(names, parts, strict=True):
        (directory / name).write_bytes(arrow_stream_bytes(table([{"text": text} for text in texts])))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": "train"}
    if indexed:
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def test_a_saved_data_set_gives_its_rows_in_order(tmp_path):
    directory = save(tmp_path / "saved", [["a", "b"], ["c"]])
    (directory / "cache-1234.arrow").write_bytes(b"left by a map()")
    corpus = build(directory, tmp_path / "out")
    assert texts_of(corpus) == ["a", "b", "c"]
    assert [source.path for source in corpus.sources()] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]


def test_a_saved_data_set_may_lie_among_other_files(tmp_path):
    save(tmp_path / "in" / "saved", [["a"], ["b"]])
    (tmp_path / "in" / "z.jsonl").write_bytes(jsonl([{"text": "z"}]))
    assert texts_of(build(tmp_path / "in", tmp_path / "out")) == ["a", "b", "z"]


def test_of_several_splits_one_has_to_be_chosen(tmp_path):
    for split in ("test", "train"):
        save(tmp_path / "saved" / split, [[split]])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"(?m)saved holds 2 splits: train, test$") as caught:
        build(tmp_path / "saved", tmp_path / "out")
    assert caught.value.hint == f"give the ones that you want, such as {tmp_path}/saved/train"
    assert texts_of(build(tmp_path / "saved" / "train", tmp_path / "out")) == ["train"]


def test_a_single_split_is_taken(tmp_path):
    save(tmp_path / "saved" / "train", [["a"]])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert texts_of(build(tmp_path / "saved", tmp_path / "out")) == ["a"]


def test_rows_that_are_chosen_by_an_index_are_refused(tmp_path):
    with pytest.raises(UsageError, match="saved with an index") as caught:
        build(save(tmp_path / "saved", [["a"]], indexed=True), tmp_path / "out")
    assert "flatten_indices" in caught.value.hint


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("data-00001-of-00002.arrow", None, "was saved by datasets with data-00001-of-00002.arrow, which is gone"),
        ("state.json", b'{"_data', r"state\.json is damaged: Unterminated string"),
        ("state.json", b"[]", r"state\.json is damaged: it holds a list, expected an object"),
    ],
)
def test_a_saved_data_set_that_is_damaged_is_named(file, content, problem, tmp_path):
    directory = save(tmp_path / "saved", [["a"], ["b"]])
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content)
    with pytest.raises(SourceError, match=problem):
        build(directory, tmp_path / "out")


@pytest.mark.interop
def test_what_datasets_saves_is_read(tmp_path):
    import datasets

    texts = [f"document {number}" for number in range(500)]
    found = datasets.Dataset.from_dict({"text": texts, "n": list(range(500))})
    found.save_to_disk(tmp_path / "saved", num_shards=3)
    corpus = build(tmp_path / "saved", tmp_path / "out", keep_field=["n:int64"])
    assert texts_of(corpus) == texts
    assert corpus.metadata(499) == {"n": 499}
    found.select(range(10, 20)).save_to_disk(tmp_path / "chosen")
    assert texts_of(build(tmp_path / "chosen", tmp_path / "out-chosen")) == texts[10:20]
    datasets.DatasetDict({"train": found, "test": found}).save_to_disk(tmp_path / "splits")
    with pytest.raises(UsageError, match="holds 2 splits: train, test"):
        discover([str(tmp_path / "splits")], input_format=None)
    assert texts_of(build(tmp_path / "splits" / "test", tmp_path / "out-test")) == texts
