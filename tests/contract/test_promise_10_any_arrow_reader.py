"""Promise 10: any Arrow reader can read a shard. The readers of other projects are tried as well."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
from pyarrow import ipc

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tokshard import open_corpus

LARGE_VOCABULARY = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 65536')


@pytest.fixture(params=["uint16", "uint32"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shards of several batches, with a column of each type and nulls in it."""
    small.shrink(monkeypatch.setattr, batch_tokens=300)
    rng = random.Random(1)
    count = 200
    documents = documents_of([rng.randint(1, 50) for _ in range(count)])
    metadata = {
        "url": [rng.choice([None, "", f"http://ü/{row}"]) for row in range(count)],
        "year": [rng.choice([None, row - 100]) for row in range(count)],
        "score": [rng.choice([None, row / 7]) for row in range(count)],
        "is_good": [rng.choice([None, True, False]) for _ in range(count)],
    }
    if request.param == "uint32":
        documents = [[65_536 if token == 3 else token for token in document] for document in documents]
    directory = write_corpus(
        tmp_path / "corpus",
        sources=[Source(documents=documents, metadata=metadata)],
        columns={"url": "string", "year": "int64", "score": "float64", "is_good": "bool"},
        shard_tokens=1_000,
        tokenizer=TINY_TOKENIZER if request.param == "uint16" else LARGE_VOCABULARY,
    )
    opened = open_corpus(directory)
    assert opened.dtype == request.param
    assert len(opened.shards) > 3
    assert len(opened.shards.batch_places(0)) > 2
    return opened


def rows_of(corpus: Any) -> list[dict[str, Any]]:
    """What the shards hold, as tokshard reads it."""
    return [{"tokens": corpus.document(index).tolist(), **corpus.metadata(index)} for index in range(len(corpus))]


def paths_of(corpus: Any) -> list[str]:
    return [str(corpus.directory / name) for name in corpus.shards.names()]


def test_pyarrow_reads_shards_and_data_sets_of_them(corpus: Any) -> None:
    table = pa.concat_tables([ipc.open_file(pa.memory_map(path)).read_all() for path in paths_of(corpus)])
    table.validate(full=True)
    assert table.to_pylist() == rows_of(corpus)
    assert pa.dataset.dataset(paths_of(corpus), format="ipc").to_table() == table


@pytest.mark.interop
def test_polars_scans_shards(corpus: Any) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.scan_ipc(paths_of(corpus)).collect()
    assert frame.to_dicts() == rows_of(corpus)
    assert frame["tokens"].dtype == polars.List(getattr(polars, corpus.dtype.name.replace("ui", "UI")))


@pytest.mark.interop
def test_duckdb_queries_shards(corpus: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    shards = pa.dataset.dataset(paths_of(corpus), format="ipc")
    connection = duckdb.connect()
    connection.register("shards", shards)
    connection.execute("SET preserve_insertion_order = true")
    found = connection.execute("SELECT * FROM shards").fetchall()
    assert [dict(zip(shards.schema.names, row, strict=True)) for row in found] == rows_of(corpus)


@pytest.mark.interop
@pytest.mark.filterwarnings("default")  # of the other project
def test_hugging_face_datasets_loads_shards(corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    dataset = datasets.load_dataset(
        "arrow", data_files=paths_of(corpus), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert dataset.to_list() == rows_of(corpus)
    assert np.asarray(dataset.with_format("numpy")[3]["tokens"]).tolist() == corpus.document(3).tolist()
