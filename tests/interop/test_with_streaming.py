"""MosaicML streaming reads what tokshard exports for it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.interop.real_text import imported
from tokshard import export_corpus
from tokshard.errors import BadSourceError

if importlib.util.find_spec("streaming") is None:
    pytest.skip("mosaicml-streaming is not installed", allow_module_level=True)

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package. Its data sets of images import torchvision, which is built for CUDA: here it is two names."""
    importlib.import_module("transformers.feature_extraction_utils")  # asks for torchvision, too, but can do without
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
    import streaming

    return streaming


@pytest.mark.timeout(300)
def test_a_streaming_dataset_reads_every_document_of_an_export(corpus, tmp_path, streaming):
    export_corpus(corpus[0], format="mds", out=tmp_path / "out" / "train", file_bytes=50_000)
    assert len(list((tmp_path / "out/train").glob("*.mds"))) > 3
    data = streaming.StreamingDataset(local=str(tmp_path / "out"), split="train", batch_size=1, shuffle=False)
    assert data[3]["tokens"].dtype == np.uint16
    assert [data[index]["tokens"].tolist() for index in range(data.num_samples)] == corpus[1]
    assert [sample["tokens"].tolist() for sample in data] == corpus[1]


def test_a_shard_is_byte_for_byte_what_mosaic_writes_and_that_is_imported(corpus, tmp_path, streaming):
    export_corpus(corpus[0], format="mds", out=tmp_path / "ours")
    columns = {"tokens": "ndarray:uint16"}
    with streaming.MDSWriter(columns=columns, out=str(tmp_path / "theirs"), size_limit=64 << 20) as writer:
        for document in corpus[1]:
            writer.write({"tokens": np.array(document, np.uint16)})
    assert imported(tmp_path / "theirs", tmp_path / "again")[1] == corpus[1]
    for name in ("index.json", "shard.00000.mds"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_hashes_that_mosaic_writes_are_compared(corpus, tmp_path, streaming, compression):
    settings: dict[str, Any] = {"hashes": ["sha1", "xxh64"], "compression": compression, "size_limit": 50_000}
    with streaming.MDSWriter(columns={"tokens": "ndarray"}, out=str(tmp_path / "theirs"), **settings) as writer:
        for document in corpus[1]:
            writer.write({"tokens": np.array(document, np.int32)})
    assert imported(tmp_path / "theirs", tmp_path / "again")[1] == corpus[1]
    index = tmp_path / "theirs/index.json"
    listed = json.loads(index.read_text())
    assert len(listed["shards"]) > 3
    said = listed["shards"][2]["raw_data"]["hashes"]["sha1"]
    index.write_text(index.read_text().replace(said, "0" * 40))
    with pytest.raises(BadSourceError, match=rf"shard\.00002\.\S+ is damaged: its sha1 is {said}, its index says 0000"):
        imported(tmp_path / "theirs", tmp_path / "again", force=True)
