"""Promise 1 where the order matters in which a build reads, fails and goes on.

Any order of receipts, failures and kills is tried against a model in tests/pipeline/test_judge.py, and whole commands
in test_promise_01_product.py.
"""

from __future__ import annotations

import bz2
import os
import random
from collections.abc import Sequence

import pytest

from tests.contract.commands import SKIP, Bench, messages, shards
from tests.contract.faults import Fault
from tests.contract.table import LOCAL, TOGETHER, Table
from tests.pipeline.inputs import jsonl, texts_of
from tokshard.format.opening import open_corpus

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
@pytest.mark.parametrize("executor", LOCAL[1:])
@pytest.mark.parametrize("skipped", ["--on-bad-source", "--on-bad-record"])
def test_a_build_that_fails_says_what_one_process_says(table: Table, skipped: str, executor: str) -> None:
    """A bad record comes before a damaged source, in another task."""
    command = table.command("build", TOGETHER)
    strict = [word for word in command.words if word not in {*SKIP}]
    found = []
    for each in ("local 1", executor):
        table.begin(command)
        ended = table.run_by(each, [*strict, skipped, "skip"])
        assert ended.exit_code == 1
        found.append(messages(ended, table.out))
    assert found[0] == found[1]
    assert ("bad.jsonl, line 1" if skipped == "--on-bad-source" else "broken.jsonl.bz2 is damaged") in found[0][0]


def lines(texts: Sequence[str]) -> list[bytes]:
    """Records of 200 bytes, also in a stream: three are a task."""
    return [jsonl([{"text": text, "pad": random.Random(text).randbytes(85).hex()}]) for text in texts]


def test_what_a_stream_left_no_room_for_is_in_the_corpus_when_the_stream_is_left_out(bench: Bench) -> None:
    """The last source was cut at the limit while the stream counted. Then a part of the stream has to be read again."""
    texts = [f"text {number}" for number in range(6)]
    stream, last = bench.place / "0.jsonl.bz2", bench.place / "1.jsonl"
    parts = [bz2.compress(line) for line in lines([f"stream {number}" for number in range(4)])]
    stream.write_bytes(b"".join(parts))
    last.write_bytes(b"".join(lines(texts)))
    options = ("--task-bytes", "512", "--max-documents", "6", "--on-bad-source", "skip", "--workers", "1")
    words = bench.build_words([stream, last], *options)
    assert bench.run(words, Fault(on=r"open .*manifest\.json")).exit_code == -9
    assert sum("shard-00-0000001-" in path.name for path in shards(bench.out)) == 1
    (lost,) = (path for path in shards(bench.out) if "shard-00-0000000-000001-" in path.name)
    lost.unlink()
    before = os.stat(stream)
    stream.write_bytes(b"".join(parts)[:-3] + b"xxx")
    os.utime(stream, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that forgets changes no time
    done = bench.run(words)
    assert done.exit_code == 0, done.errors
    with open_corpus(bench.out) as corpus:
        assert texts_of(corpus) == texts
