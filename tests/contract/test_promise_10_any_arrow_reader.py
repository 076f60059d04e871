"""Promise 10: any Arrow reader reads a shard. Readers of other projects are in the interop tests."""

from __future__ import annotations

import random
from pathlib import Path

from pyarrow import ipc

from tests.contract import builds
from tokshard import build_corpus, open_corpus


def test_plain_pyarrow_reads_the_documents_of_every_shard(tmp_path: Path) -> None:
    sources = builds.write_sources(tmp_path / "sources", documents=300)
    build_corpus(
        sources,
        tokenizer=builds.TOKENIZER,
        out=tmp_path / "out",
        shard_tokens=5_000,
        keep_field=["n:int64"],
        workers=1,
    )
    with open_corpus(tmp_path / "out") as corpus:
        assert len(corpus.shards) > 3
        first = 0
        for shard in corpus.shards:
            with ipc.open_file(str(tmp_path / "out" / shard.name)) as reader:
                table = reader.read_all()
            assert table.num_rows == shard.num_documents
            for row in random.Random(1).choices(range(table.num_rows), k=5):
                assert table.column("tokens")[row].as_py() == corpus.document(first + row).tolist()
                assert table.column("n")[row].as_py() == corpus.metadata(first + row)["n"]
            first += shard.num_documents
