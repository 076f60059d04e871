"""`datasets` reads what tokshard exports for it."""

from __future__ import annotations

import pytest

from tests.interop.real_text import build, imported
from tokshard import export_corpus, open_corpus

pytest.importorskip("datasets")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


def test_load_dataset_reads_every_document_and_split_of_an_export(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    splits = {"train": build(tmp_path / "first"), "validation": build(tmp_path / "second", max_tokens=1_000)}
    for split, (corpus, _) in splits.items():
        export_corpus(corpus, format="hf", out=tmp_path / "out" / split, file_bytes=100_000)
    found = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert set(found) == set(splits)
    for split, (_, documents) in splits.items():
        assert found[split]["input_ids"][:] == documents
    assert str(found["train"].features["input_ids"].feature.dtype) == "int32"
    pages = found["train"]["page"][:]
    assert pages == sorted(pages)
    one = tmp_path / "one"
    export_corpus(splits["train"][0], format="hf", out=one, drop_eos=True)
    bare = datasets.load_dataset(str(one), split="train", cache_dir=str(tmp_path / "cache"))
    bare.to_parquet(str(tmp_path / "theirs.parquet"))
    again, _ = imported(tmp_path / "theirs.parquet", tmp_path / "again")
    with open_corpus(splits["train"][0]) as first:
        assert again.manifest.fingerprints.content == first.fingerprint
    assert bare["input_ids"][:] == [document[:-1] for document in splits["train"][1]]
