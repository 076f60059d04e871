"""What copies or converts all of a corpus reads it once, and holds little of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tokshard.errors import StoreError
from tokshard.format import writer
from tokshard.format.opening import open_corpus
from tokshard.format.whole_corpus import checked_batches


def resident_bytes(path: Path) -> int:
    """Of the maps of a file in this process."""
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    found = [re.search(r"(?m)^Rss: +([0-9]+) kB", one) for one in maps if str(path) in one]
    return sum(1024 * int(rss[1]) for rss in found if rss)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what of a map is resident")
def test_of_a_shard_that_is_read_little_is_resident(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_BATCH_TOKENS", 65_536)
    source = Source(documents=[[1] * 1_023 + [0]] * 1_024, metadata={"n": range(1_024)})  # all its bytes are hashed
    write_corpus(tmp_path / "corpus", sources=[source], columns={"n": "int64"}, tokenizer=TINY_TOKENIZER)
    with open_corpus(tmp_path / "corpus") as corpus:
        path = tmp_path / "corpus" / corpus.shards[0].name
        sizes = []
        for shard, batch in checked_batches(corpus, 0):
            assert shard.batch(batch)[1].sum()
            sizes.append(resident_bytes(path))
        assert len(sizes) == 16
        assert max(sizes) < path.stat().st_size / 4


def test_a_shard_that_cannot_be_read_is_named(tmp_path):
    path = write_corpus(tmp_path / "corpus", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    with open_corpus(path) as corpus:
        shard = path / corpus.shards[0].name
        shard.unlink()
        shard.mkdir()
        with pytest.raises(StoreError, match=rf"{shard.name} cannot be read: Is a directory"):
            list(checked_batches(corpus, 0))
