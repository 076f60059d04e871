"""litdata reads what tokshard exports for it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.interop.real_text import ROOT, build
from tokshard import export_corpus, import_corpus, open_corpus

pytest.importorskip("litdata")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

BLOCK = 128


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    return build(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.mark.parametrize("file_bytes", [None, 100_000])
def test_the_tokens_loader_reads_every_block_of_an_export(corpus, tmp_path, file_bytes):
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    export_corpus(corpus[0], format="litdata", out=tmp_path / "out", file_bytes=file_bytes)
    chunks = json.loads((tmp_path / "out/index.json").read_bytes())["chunks"]
    assert (len(chunks) > 1) == (file_bytes is not None)
    tokens = iter(itertools.chain.from_iterable(corpus[1]))
    blocks: list[list[int]] = []
    for chunk in chunks:  # the loader passes over the end of a chunk that fills no block
        content = list(itertools.islice(tokens, chunk["dim"]))
        blocks += [content[start : start + BLOCK] for start in range(0, len(content) - BLOCK + 1, BLOCK)]
    assert next(tokens, None) is None
    data = StreamingDataset(str(tmp_path / "out"), item_loader=TokensLoader(block_size=BLOCK), shuffle=False)
    assert [data[index].tolist() for index in range(len(data))] == blocks
    batches = StreamingDataLoader(data, batch_size=4, num_workers=0)
    assert [row for batch in batches for row in batch.long().tolist()] == blocks


def test_a_chunk_is_byte_for_byte_what_litdata_writes_and_that_is_imported(corpus, tmp_path):
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    export_corpus(corpus[0], format="litdata", out=tmp_path / "ours")
    writer = BinaryWriter(str(tmp_path / "theirs"), chunk_bytes=64 << 20, item_loader=TokensLoader())
    for index, document in enumerate(corpus[1]):
        writer[index] = torch.tensor(document, dtype=torch.uint16)
    writer.done()
    writer.merge(1)
    again = import_corpus(
        tmp_path / "theirs", tokenizer=str(ROOT / "recipes/tokenizer"), out=str(tmp_path / "again"), workers=1
    )
    with open_corpus(again.directory) as read:
        assert [document.tolist() for document in read] == corpus[1]
    chunk = "chunk-0-0.bin"
    assert (tmp_path / "ours" / chunk).read_bytes() == (tmp_path / "theirs" / chunk).read_bytes()
    ours, theirs = (json.loads((tmp_path / name / "index.json").read_bytes()) for name in ("ours", "theirs"))
    assert ours["chunks"] == theirs["chunks"]
    assert ours["config"].items() <= theirs["config"].items()
