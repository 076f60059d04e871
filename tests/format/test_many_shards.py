"""A corpus of 200,000 shards opens at once."""

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from tests.corpora import TINY_TOKENIZER, documents_of, rewrite_manifest, write_corpus
from tokshard.format.names import SHARD_TABLE, STRIDE_HASHES, shard_name
from tokshard.format.schema import ORDINAL_STRIDE
from tokshard.format.tables import SHARDS_PER_BATCH, write_table

LINKS = 30_000
"""Names of one file, which take a tenth of the time of as many files."""

MEASURE = r"""
import json, re, sys, time
from pathlib import Path
import numpy, pyarrow, pyarrow.compute, pyarrow.ipc, msgspec
from tokshard.format.opening import open_corpus
# ru_maxrss would count what the parent had at the fork
def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
started = time.process_time()
with open_corpus(sys.argv[1]) as corpus:
    seconds = time.process_time() - started
    assert corpus.shards.first_tokens[-1] == corpus.num_tokens
print(json.dumps({"seconds": seconds, "megabytes": (peak() - before) / 1000}))
"""


@pytest.mark.parametrize(
    "num_shards", [pytest.param(40_000, marks=pytest.mark.slow), pytest.param(200_000, marks=pytest.mark.soak)]
)
def test_a_corpus_of_200_000_shards_opens_in_two_seconds_of_cpu_and_500_megabytes(num_shards, tmp_path):
    """One of a fifth of them in a fifth of that, and a little."""
    lengths = [839] * 4_999 + [64 * ORDINAL_STRIDE - 839 * 4_999]
    corpus = write_corpus(tmp_path / "corpus", documents_of(lengths), tokenizer=TINY_TOKENIZER)
    (shard,) = corpus.glob("shard-*")
    shard.unlink()
    (corpus / STRIDE_HASHES).unlink()  # which opening does not read
    row = ipc.open_file((corpus / SHARD_TABLE).read_bytes()).get_batch(0)

    def rows(start: int) -> pa.RecordBatch:
        stop = min(start + 10_000, num_shards)
        names = [shard_name(generation=0, first_input=index, segment=0, part=0) for index in range(start, stop)]
        return row.take(pa.array(np.zeros(stop - start, np.int64))).set_column(0, row.schema.field(0), pa.array(names))

    with (corpus / SHARD_TABLE).open("wb") as file:
        write_table(file, row.schema, map(rows, range(0, num_shards, 10_000)), rows_per_batch=SHARDS_PER_BATCH)

    def change(fields: dict[str, Any]) -> None:
        for name in ("num_documents", "num_tokens", "num_bytes"):
            fields[name] *= num_shards
        fields["num_shards"] = num_shards
        fields["files"][STRIDE_HASHES]["num_bytes"] *= num_shards
        content = (corpus / SHARD_TABLE).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        fields["files"][SHARD_TABLE] = {"num_bytes": len(content), "sha256": digest}

    rewrite_manifest(corpus, change)
    shards = [shard_name(generation=0, first_input=index, segment=0, part=0) for index in range(num_shards)]
    folder = os.open(corpus, os.O_RDONLY)
    for start in range(0, num_shards, LINKS):
        first, *others = shards[start : start + LINKS]
        (corpus / first).touch()
        for name in others:
            os.link(first, name, src_dir_fd=folder, dst_dir_fd=folder)
    os.close(folder)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(corpus)], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    assert measured["seconds"] < 1e-5 * num_shards + 0.2
    assert measured["megabytes"] < 0.0025 * num_shards + 40
