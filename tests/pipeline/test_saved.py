"""Directories that ``save_to_disk`` wrote: their data files, and nothing else of them."""

from __future__ import annotations

import pytest

from tests.contract import small
from tests.pipeline.inputs import build, jsonl, texts_of
from tests.pipeline.saved import save
from tokshard.errors import SourceError, UsageError
from tokshard.store import Entry, PosixStore


def test_a_saved_data_set_gives_its_rows_in_order_also_among_other_files(tmp_path):
    directory = save(tmp_path / "in" / "saved", [["a", "b"], ["c"]])
    (directory / "cache-1234.arrow").write_bytes(b"left by a map()")
    corpus = build(directory, tmp_path / "out")
    assert texts_of(corpus) == ["a", "b", "c"]
    assert [source.path for source in corpus.sources()] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    (tmp_path / "in" / "z.jsonl").write_bytes(jsonl([{"text": "z"}]))
    assert texts_of(build(tmp_path / "in", tmp_path / "all")) == ["a", "b", "c", "z"]


def test_a_single_split_is_taken(tmp_path):
    save(tmp_path / "saved" / "train", [["a"]])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert texts_of(build(tmp_path / "saved", tmp_path / "out")) == ["a"]


def test_a_description_that_may_not_be_looked_at_is_not_taken_for_none(tmp_path, monkeypatch):
    stat = PosixStore.stat

    def refused(store: PosixStore, name: str) -> Entry:
        if name.endswith("state.json"):
            raise PermissionError(13, "Permission denied")
        return stat(store, name)

    small.on_disk(monkeypatch.setattr, stat=refused)
    with pytest.raises(SourceError, match="saved cannot be listed: Permission denied"):
        build(save(tmp_path / "saved", [["a"]]), tmp_path / "out")


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
        build(tmp_path / "splits", tmp_path / "out-splits")
    assert texts_of(build(tmp_path / "splits" / "test", tmp_path / "out-test")) == texts
