"""What the arithmetic of `scale.py` rests on, measured on this machine in small."""

from __future__ import annotations

import io
import json
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmark.shards import corpus, repeated
from tests.runtime.sources import PeriodicSource
from tokshard.format import names
from tokshard.format.arrays import table_batch
from tokshard.format.corpus import Corpus
from tokshard.format.opening import read_generations
from tokshard.format.schema import HASH_GROUP, HASH_STRIDE, MAX_BATCH_TOKENS, ORDINAL_STRIDE
from tokshard.format.tables import SHARD_TABLE_SCHEMA, SHARDS_PER_BATCH, write_table
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.order.pieces import PieceReader, PieceTable
from tokshard.runtime.order.windows import CorpusOrder, Shape
from tokshard.store import open_store

_REPEATS = 5
_SCANNED_TOKENS = 1 << 24
_TABLE_BLOCKS = 1_024
_OPENED_SHARDS = 8 * SHARDS_PER_BATCH
_CORPORA, _CHANGES = 20, 20  # more changes than a cursor lists
_STREAMS = 17
_BY_SHARD = ("stride_documents", "run_document", "run_source", "run_record")
"""Lists of the shard table that are not needed to open a corpus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Inputs; times are CPU seconds of one core.

    Args:
        piece_seconds: to make the table of a window, for each of its pieces, when the ends of documents are known.
        scan_bytes_per_second: to look for delimiters in tokens.
        shard_row_bytes: of the shard table, for a shard of the given size whose documents follow each other in one
            source.
        opened_row_bytes: of them, without what is needed of single shards only.
        open_row_seconds: to check a shard table when a corpus is opened, for each of its shards.
        cursor_bytes: of a job with 20 corpora after 20 changes of their weights.
        stream_cursor_bytes: more for each stream after the first, if there were such changes.
    """

    piece_seconds: float
    scan_bytes_per_second: float
    crc_bytes_per_second: float
    shard_row_bytes: float
    opened_row_bytes: float
    open_row_seconds: float
    cursor_bytes: int
    stream_cursor_bytes: float


def measure(*, shard_tokens: int, document_tokens: int) -> Measured:
    """Measure all of it.

    Args:
        shard_tokens: of a shard whose row is measured.
        document_tokens: mean.
    """
    row_bytes, opened_bytes = row_sizes(shard_tokens)
    tokens = np.random.default_rng(1).integers(1, 60_000, _SCANNED_TOKENS, np.uint32)
    tokens[document_tokens - 1 :: document_tokens] = 0
    return Measured(
        piece_seconds=_piece_seconds(document_tokens),
        scan_bytes_per_second=tokens.nbytes / _cpu_seconds(lambda: np.flatnonzero(tokens == 0)),
        crc_bytes_per_second=tokens.nbytes / _cpu_seconds(lambda: zlib.crc32(tokens)),
        shard_row_bytes=row_bytes,
        opened_row_bytes=opened_bytes,
        open_row_seconds=_open_seconds() / _OPENED_SHARDS,
        cursor_bytes=_cursor_bytes(1),
        stream_cursor_bytes=(_cursor_bytes(_STREAMS) - _cursor_bytes(1)) / (_STREAMS - 1),
    )


def row_sizes(shard_tokens: int) -> tuple[float, float]:
    """Bytes of the shard table for one shard, and those of them that are needed to open a corpus."""
    num_batches, num_strides = -(-shard_tokens // MAX_BATCH_TOKENS), -(-shard_tokens // ORDINAL_STRIDE)
    num_groups = -(-shard_tokens // (HASH_STRIDE * HASH_GROUP))
    lists = {"batch": num_batches, "stride": num_strides, "group": num_groups, "run": 1}
    values: dict[str, Any] = {
        "name": names.shard_name(generation=0, first_input=0, segment=0, part=0),
        "sha256": bytes(32),
        "tokens_hash": bytes(24),
        "loss_hash": bytes(24),
    }
    for field in SHARD_TABLE_SCHEMA:
        if pa.types.is_large_list(field.type):
            count = 0 if field.name.startswith("batch_loss") else lists[field.name.partition("_")[0]]
            values[field.name] = np.ones(count, np.int64)
        elif pa.types.is_int64(field.type):
            values[field.name] = 1
    opened = {name: [] if name in _BY_SHARD else value for name, value in values.items()}
    return _row_bytes(values), _row_bytes(opened)


def _row_bytes(values: dict[str, Any]) -> float:
    rows = table_batch({name: [value] * SHARDS_PER_BATCH for name, value in values.items()}, SHARD_TABLE_SCHEMA)
    file = io.BytesIO()
    write_table(file, SHARD_TABLE_SCHEMA, [rows], rows_per_batch=SHARDS_PER_BATCH)
    return len(file.getvalue()) / SHARDS_PER_BATCH


def _piece_seconds(document_tokens: int) -> float:
    source = PeriodicSource(4 * _TABLE_BLOCKS * 65_536, document_tokens)
    shape = Shape(seq_len=4_096, block_tokens=65_536, window_blocks=_TABLE_BLOCKS)
    order = CorpusOrder(source=source, shape=shape, seed=17)
    tables: list[PieceTable] = []

    def make() -> None:
        tables.append(PieceReader(order).table(order.window(0, 0, 0)))

    return _cpu_seconds(make) / tables[0].num_pieces


def _open_seconds() -> float:
    with tempfile.TemporaryDirectory(prefix="tokshard-scale-") as folder:
        one = corpus(Path(folder), num_tokens=50_000, document_tokens=40)
        store = open_store(repeated(Path(folder), one, num_shards=_OPENED_SHARDS))
        return _cpu_seconds(lambda: Corpus(store, read_generations(store)))


def _cursor_bytes(num_streams: int) -> int:
    corpora = {f"corpus-{number}": PeriodicSource(10**12 + number) for number in range(_CORPORA)}
    plan = StreamPlan(corpora, seq_len=4_096, seed=17, num_streams=num_streams)
    with NumpyLoader(plan, global_batch_size=num_streams) as loader:
        for change in range(_CHANGES):
            loader.set_weights({name: 1 + (change + i) % 7 for i, name in enumerate(corpora)})
            loader.skip(num_streams)
        return len(json.dumps(loader.state_dict()))


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Of this thread, the least of some runs: other load on the machine makes the others longer."""
    times = []
    for _ in range(_REPEATS):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times)
