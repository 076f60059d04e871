"""A corpus of 200,000 shards opens at once."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from tests.corpora import TINY_TOKENIZER, documents_of, rewrite_manifest, sign_files, write_corpus
from tokshard.format.names import SHARD_TABLE, STRIDE_HASHES, shard_name
from tokshard.format.schema import HASH_STRIDE, ORDINAL_STRIDE
from tokshard.format.tables import SHARD_TABLE_SCHEMA, SHARDS_PER_BATCH, write_table

STRIDES = 64
DOCUMENTS_PER_SHARD = 5_000
LINKS = 30_000
"""Names of one file, which take a tenth of the time of as many files."""
TOKENS_PER_SHARD = STRIDES * ORDINAL_STRIDE

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
    started = time.process_time()
    corpus.provenance(corpus.num_documents // 2), corpus.shards.batch_places(30_000)
    corpus.shards.stride_documents(39_999)
    lookup = time.process_time() - started
print(json.dumps({"seconds": seconds, "megabytes": (peak() - before) / 1000, "lookup_seconds": lookup}))
"""


def shard_rows(start, stop):
    count = stop - start
    columns = {
        "name": [shard_name(generation=0, first_input=index, segment=0, part=0) for index in range(start, stop)],
        "num_documents": np.full(count, DOCUMENTS_PER_SHARD),
        "num_tokens": np.full(count, TOKENS_PER_SHARD),
        "num_bytes": np.full(count, 2 * TOKENS_PER_SHARD),
        "sha256": [index.to_bytes(32, "big") for index in range(start, stop)],
        "tokens_hash": [index.to_bytes(24, "little") for index in range(start, stop)],
        "num_targets": np.full(count, TOKENS_PER_SHARD - DOCUMENTS_PER_SHARD),
        "loss_hash": [bytes(24)] * count,
        **{f"batch_loss_{what}": [[]] * count for what in ("position", "bytes", "hash")},
        "batch_documents": lists(np.full(count, DOCUMENTS_PER_SHARD)),
        "batch_tokens": lists(np.full(count, TOKENS_PER_SHARD)),
        "batch_offsets_position": lists(np.full(count, 512)),
        "batch_values_position": lists(np.full(count, 50_000)),
        "stride_documents": lists(np.tile(np.arange(STRIDES, dtype=np.uint32), count), STRIDES),
        "group_hashes": lists(np.zeros(count, np.uint32)),
        "run_document": lists(np.zeros(count, np.int64)),
        "run_source": lists(np.zeros(count, np.int64)),
        "run_record": lists(np.arange(start, stop) * DOCUMENTS_PER_SHARD),
    }
    arrays = [
        column.cast(field.type) if isinstance(column := columns[field.name], pa.Array) else pa.array(column, field.type)
        for field in SHARD_TABLE_SCHEMA
    ]
    return pa.record_batch(arrays, schema=SHARD_TABLE_SCHEMA)


def lists(values, length=1):
    kind = pa.large_list(pa.field("item", pa.from_numpy_dtype(values.dtype), nullable=False))
    return pa.LargeListArray.from_arrays(np.arange(0, len(values) + 1, length, np.int64), pa.array(values), type=kind)


@pytest.mark.parametrize(
    "num_shards", [pytest.param(40_000, marks=pytest.mark.slow), pytest.param(200_000, marks=pytest.mark.soak)]
)
def test_a_corpus_of_200_000_shards_opens_in_two_seconds_of_cpu_and_500_megabytes(num_shards, tmp_path, capsys):
    """One of a fifth of them in a fifth of that, and a little."""
    corpus = write_corpus(tmp_path / "corpus", documents_of([3]), tokenizer=TINY_TOKENIZER)
    for path in corpus.glob("shard-*"):
        path.unlink()
    rows = (shard_rows(start, min(start + 10_000, num_shards)) for start in range(0, num_shards, 10_000))
    with (corpus / SHARD_TABLE).open("wb") as file:
        write_table(file, SHARD_TABLE_SCHEMA, rows, rows_per_batch=SHARDS_PER_BATCH)
    sign_files(corpus)
    hash_bytes = 4 * num_shards * (TOKENS_PER_SHARD // HASH_STRIDE)
    totals = {
        "num_documents": num_shards * DOCUMENTS_PER_SHARD,
        "num_tokens": num_shards * TOKENS_PER_SHARD,
        "num_shards": num_shards,
        "num_bytes": num_shards * 2 * TOKENS_PER_SHARD,
    }
    rewrite_manifest(corpus, lambda fields: fields.update(totals))
    # opening does not read the hashes, so none are there
    rewrite_manifest(corpus, lambda fields: fields["files"][STRIDE_HASHES].update(num_bytes=hash_bytes))
    (corpus / STRIDE_HASHES).unlink()
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
    with capsys.disabled():
        sys.stdout.write(
            f"\n{num_shards:,} shards, table of {(corpus / SHARD_TABLE).stat().st_size / 1e6:.0f} MB: {measured}\n"
        )
    assert measured["seconds"] < 1e-5 * num_shards + 0.2
    assert measured["megabytes"] < 0.0025 * num_shards + 40
