"""Processes that share a cache on disk and die by SIGKILL in a write: what is read is right, and the limit holds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import write_corpus
from tests.runtime.sources import ListSource
from tests.runtime.test_reader import LARGE_VOCABULARY
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource

ROOT = Path(__file__).parents[2]
SIZES = {"seq_len": 1_024, "block_tokens": 16_384, "window_blocks": 2, "seed": 3}
LIMIT = 1 << 20
STEPS = 60
"""Half of an epoch."""
READER = "from tests.runtime.test_shared_disk_cache import read; read(*__import__('sys').argv[1:])"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 MB of tokens in 25 shards: twice what the cache may keep."""
    documents = ListSource([500] * 1_000).documents()
    directory = tmp_path_factory.mktemp("shared") / "corpus"
    return write_corpus(directory, documents, tokenizer=LARGE_VOCABULARY, shard_tokens=20_000)


def read(corpus: str, cache_dir: str, kill_at_write: str) -> None:
    """Read batches through the cache, one for each line of stdin, and say how many of their tokens are wrong."""
    writes, pwrite = int(kill_at_write), os.pwrite

    def torn(descriptor: int, content: bytes, offset: int) -> int:
        nonlocal writes
        writes -= 1
        if writes:
            return pwrite(descriptor, content, offset)
        pwrite(descriptor, content[: len(content) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    os.pwrite = torn  # type: ignore[assignment]
    cache = Cache(memory_bytes=0, cache_dir=cache_dir, cache_bytes=LIMIT)
    mapped = StreamPlan({"corpus": corpus}, **SIZES)
    plan = StreamPlan({"corpus": CorpusSource(corpus, access="pread", cache=cache)}, **SIZES)
    with NumpyLoader(plan, global_batch_size=4) as loader, NumpyLoader(mapped, global_batch_size=4) as expected:
        for _, batch, right in zip(sys.stdin, loader, expected, strict=False):
            wrong = sum(int((batch[key] != right[key]).sum()) for key in ("input_ids", "labels"))
            sys.stdout.write(f"{wrong} {cache.counts.disk_bytes}\n")
            sys.stdout.flush()


class Reader:
    """A process that reads."""

    def __init__(self, corpus: Path, cache_dir: Path, kill_at_write: int = 0) -> None:
        command = [sys.executable, "-W", "ignore", "-c", READER, str(corpus), str(cache_dir), str(kill_at_write)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def step(self) -> tuple[int, int] | None:
        """Wrong tokens of the next batch, and the bytes read from the disk so far; None: the process is dead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write("\n")
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return tuple(map(int, line.split())) if line else None  # type: ignore[return-value]

    def end(self) -> int:
        """Its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


def allocated(directory: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in directory.rglob("*-*") if path.is_file())


@pytest.mark.slow
def test_a_process_that_shares_a_disk_cache_reads_on_after_a_kill_of_the_other_and_so_does_the_next(
    corpus: Path, tmp_path: Path
) -> None:
    cache_dir, most = tmp_path / "cache", 0
    survivor = Reader(corpus, cache_dir)
    read_of_survivor = []
    for kill_at_write in (1, 5, 0):  # the last one is not killed
        other = Reader(corpus, cache_dir, kill_at_write)
        read_of_other = []
        while (kill_at_write or len(read_of_other) < STEPS) and (found := other.step()) is not None:
            read_of_other.append(found)
            read_of_survivor.append(survivor.step())
            most = max(most, allocated(cache_dir))
        assert all(wrong == 0 for wrong, _ in read_of_other)
        if kill_at_write:
            assert other.end() == -signal.SIGKILL, "in the middle of a write"
        else:
            assert len(read_of_other) == STEPS
            assert read_of_other[-1][1] > 100_000, "much was on the disk"
            assert other.end() == 0
    assert survivor.end() == 0
    assert len(read_of_survivor) >= STEPS
    assert {None if found is None else found[0] for found in read_of_survivor} == {0}
    assert CorpusSource(corpus).num_tokens * 4 > 1.8 * LIMIT, "the cache is full"
    file_bytes = 3 * (4 * 8_192 + 8)
    assert LIMIT // 2 < most <= 1.02 * LIMIT + 2 * file_bytes, "and each process that writes is at most 1 % over"
