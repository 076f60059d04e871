"""Megatron-core reads what tokshard exports for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.interop.real_text import ROOT, build
from tokshard import export_corpus, import_corpus, open_corpus

pytest.importorskip("megatron.core.datasets.indexed_dataset")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    return build(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("file_bytes", [None, 50_000])
def test_megatron_reads_every_document_of_an_export(corpus, tmp_path, is_mapped, file_bytes):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    export_corpus(corpus[0], format="megatron", out=tmp_path / "out", file_bytes=file_bytes)
    prefixes = sorted(str(path.with_suffix("")) for path in (tmp_path / "out").glob("*.idx"))
    assert (len(prefixes) > 1) == (file_bytes is not None)
    found: list[list[int]] = []
    for prefix in prefixes:
        data = IndexedDataset(prefix, mmap=is_mapped)
        assert data.document_indices.tolist() == list(range(len(data) + 1))
        found += [data[index].tolist() for index in range(len(data))]
        assert data.get(len(data) - 1, offset=1).tolist() == found[-1][1:]
    assert found == corpus[1]


def test_an_export_is_byte_for_byte_what_megatron_writes_and_that_is_imported(corpus, tmp_path):
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in corpus[1]:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    export_corpus(corpus[0], format="megatron", out=tmp_path / "ours")
    again = import_corpus(
        tmp_path / "theirs", tokenizer=str(ROOT / "recipes/tokenizer"), out=str(tmp_path / "again"), workers=1
    )
    with open_corpus(again.directory) as read:
        assert [document.tolist() for document in read] == corpus[1]
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours/documents.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()
