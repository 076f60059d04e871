"""Record batches are read without copies: a small file cannot make a reader allocate much memory."""

import struct
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from tests.corpora import TINY_TOKENIZER, sign_files, write_corpus
from tests.format.edits import sizes_are_true
from tests.format.test_damage import read_everything
from tokshard.errors import DamagedCorpusError
from tokshard.format.arrow_file import ArrowFile

ZEROS = 4_000_000


@contextmanager
def allocations():
    """Most bytes that Arrow allocates at a time meanwhile: a list of one number."""
    pool, most = pa.proxy_memory_pool(pa.default_memory_pool()), []
    default = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        yield most
    finally:
        most.append(pool.max_memory() or 0)
        pa.set_memory_pool(default)


def compress(path, change=lambda columns: columns):
    """Write an Arrow file again, compressed."""
    table = ipc.open_file(path.read_bytes()).read_all()
    columns = change({field.name: table.column(field.name).combine_chunks() for field in table.schema})
    with ipc.new_file(str(path), table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.record_batch(list(columns.values()), schema=table.schema))


def grown(columns):
    """The first row of a table, with far too much in one of its columns."""
    if "path" in columns:
        columns["path"] = pa.array(["a" * 8 * ZEROS])
    if "run_document" in columns:
        zeros, kind = pa.array(np.zeros(ZEROS, np.int64)), columns["run_document"].type
        columns["run_document"] = pa.LargeListArray.from_arrays([0, ZEROS], zeros, type=kind)
    return columns


@pytest.mark.parametrize("name", ["shards.arrow", "sources.arrow", "shard-00-0000000-000000-0000.arrow"])
def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path, name):
    length = ZEROS if name.startswith("shard-") else 4
    corpus = write_corpus(tmp_path / "corpus", [[1] * (length - 1) + [0]], tokenizer=TINY_TOKENIZER)
    compress(corpus / name, grown)
    sizes_are_true(corpus) if name.startswith("shard-") else sign_files(corpus)
    assert (corpus / name).stat().st_size < 100_000
    with allocations() as most, pytest.raises(DamagedCorpusError, match=rf"{name}, batch 0: it is compressed"):
        read_everything(tmp_path)
    assert most[0] < ZEROS


def arrow_bytes(*batches):
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_every_batch_of_a_file_is_read_without_a_copy():
    batches = [
        pa.record_batch({"a": pa.array(range(n), pa.int64()), "b": pa.array(["x" * n] * n, pa.string())})
        for n in (0, 1, 5, 1_000)
    ]
    content = pa.py_buffer(arrow_bytes(*batches))
    with allocations() as most:
        file = ArrowFile(content)
        assert [file.batch(index) for index in range(file.num_batches)] == batches
    assert most[0] < 1_000


def test_what_is_too_short_and_dictionaries_are_refused():
    batch = pa.record_batch({"a": pa.array(["x", "y"]).dictionary_encode()})
    for content, problem in ((b"short", "ends with a footer of 0 bytes and b''"), (arrow_bytes(batch), "dictionaries")):
        with pytest.raises(ValueError, match=problem):
            ArrowFile(pa.py_buffer(content)).batch(0)


@pytest.mark.parametrize("value", [1 << 40, (1 << 63) - 1, -8])
def test_a_buffer_that_reaches_beyond_the_file_is_refused(value):
    numbers = pa.array(range(1_000))  # its values are the second of two buffers, 8,000 bytes from 0 on
    content = arrow_bytes(pa.record_batch({"a": numbers}))
    entry = struct.pack("<qq", 0, 8_000)
    assert content.count(entry) == 1
    for changed in (struct.pack("<qq", value, 8_000), struct.pack("<qq", 0, value)):
        with pytest.raises(ValueError, match=r"a buffer has -?\d+ bytes at"):
            ArrowFile(pa.py_buffer(content.replace(entry, changed))).batch(0)
