"""The plan on paper for the scale of the internet: what a job on thousands of nodes asks of tables, stores and memory.

    python -m benchmark.scale [--tokens 100T --gpus 10000 ...]

Arithmetic: nothing of this size is run. Its inputs are measured on this machine first (`scale_inputs.py`), in about ten
seconds. Prints tables and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmark.processes import ROOT
from benchmark.report import commit, machine, markdown, versions
from benchmark.scale_inputs import Measured, measure
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.stride_hashes import HASH_BYTES
from tokshard.numbers import read_count
from tokshard.runtime.order.pieces import AHEAD

PACKAGES = ("tokshard", "numpy", "pyarrow")
_LEAST_WINDOW_BLOCKS = 64
"""Of a stream, as ORDER.md says."""

_OPENING_TRIPS = 8
"""Requests one after another, before the first window: manifest, generations, the shard table in three steps."""

_HASH_REQUEST_BYTES = 256
"""The hashes of a block come with some of their neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job.

    Args:
        gpu_tokens_per_second: that one GPU trains on; the smaller the model, the more.
        document_tokens: mean.
        latency_seconds: of a request to the store.
        connections: requests of a rank at once.
        node_bytes_per_second: that a node may read from the store.
        prefix_requests_per_second: that the store answers; S3 documents 5,500 for each prefix of keys.
        node_memory_bytes: that the loaders of a node may take.
        dollars_per_thousand_requests: for reading; S3 asks 0.0004.
    """

    tokens: int = 100 * 10**12
    token_bytes: int = 4
    gpus: int = 10_000
    gpus_per_node: int = 8
    gpu_tokens_per_second: int = 8_000
    document_tokens: int = 750
    shard_tokens: int = 1 << 28
    block_tokens: int = 65_536
    window_blocks: int = 1_024
    latency_seconds: float = 0.03
    connections: int = 64
    node_bytes_per_second: float = 5e9
    prefix_requests_per_second: float = 5_500.0
    node_memory_bytes: float = 256e9
    dollars_per_thousand_requests: float = 0.0004

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def tokens_per_second(self) -> int:
        """Of the whole job."""
        return self.gpus * self.gpu_tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What lies next to the tokens, in bytes, for one copy of the corpus.

    Args:
        opened_bytes: of the shard table, read by each process that opens the corpus.
        open_seconds: of one core, to check what was read.
    """

    num_shards: int
    token_bytes: int
    offset_bytes: int
    shard_table_bytes: float
    opened_bytes: float
    hash_bytes: int
    open_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the ranks share the reading.

    Args:
        shares_disk: the ranks of a node read through one cache on its disk.
    """

    name: str
    num_streams: int = 1
    shares_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What reading costs in the long run.

    Args:
        amplification: tokens fetched from the store over tokens trained on.
        rank_tokens_per_second: of windows that a rank has to have, its own and its neighbours'.
        window_tokens: of a stream.
        windows_per_second: of a rank.
        table_seconds: of one core, for the table of a window, delimiters found and hashes checked.
        busy: cores of a rank that this keeps busy.
        node_requests_per_second, node_bytes_per_second: of one node to the store.
        job_requests_per_second: of all nodes.
        rank_memory_bytes: tokens of the windows that are read and fetched at a time, and tables of two.
        node_disk_bytes: of the part of the corpus that a node reads, if all of it is to be kept.
        first_batch_seconds: opening, and the first window.
        cursor_bytes: in every checkpoint, if the weights of 20 corpora were changed often.
        pass_days: to train on every token once.
        pass_dollars: for the requests of that.
    """

    amplification: float
    rank_tokens_per_second: float
    window_tokens: int
    windows_per_second: float
    table_seconds: float
    busy: float
    node_requests_per_second: float
    node_bytes_per_second: float
    job_requests_per_second: float
    rank_memory_bytes: float
    node_disk_bytes: float
    first_batch_seconds: float
    cursor_bytes: float
    pass_days: float
    pass_dollars: float


def tables_of(job: Job, measured: Measured) -> Tables:
    """The sizes of what lies next to the tokens."""
    num_shards = -(-job.tokens // job.shard_tokens)
    return Tables(
        num_shards=num_shards,
        token_bytes=job.tokens * job.token_bytes,
        offset_bytes=8 * (job.tokens // job.document_tokens),
        shard_table_bytes=num_shards * measured.shard_row_bytes,
        opened_bytes=num_shards * measured.opened_row_bytes,
        hash_bytes=HASH_BYTES * -(-job.tokens // HASH_STRIDE),
        open_seconds=num_shards * measured.open_row_seconds,
    )


def load_of(job: Job, measured: Measured, way: Way) -> Load:
    """What one way of reading costs.

    The table of a window follows from its tokens, so a rank reads each window of its stream whole; a rank is of one
    stream, or of several if there are more streams than ranks.
    """
    streams_of_a_rank = max(1, way.num_streams // job.gpus)
    rank_tokens = job.tokens_per_second / way.num_streams * streams_of_a_rank
    streams_of_a_node = max(1, way.num_streams // job.nodes)
    node_tokens = job.tokens_per_second / way.num_streams * streams_of_a_node
    fetched = node_tokens if way.shares_disk else rank_tokens * job.gpus_per_node
    window_blocks = max(min(_LEAST_WINDOW_BLOCKS, job.window_blocks), job.window_blocks // way.num_streams)
    window_tokens = window_blocks * job.block_tokens
    block_bytes = (job.block_tokens + HASH_STRIDE) * job.token_bytes  # blocks do not lie on strides
    requests_per_block, bytes_per_block = 2, block_bytes + _HASH_REQUEST_BYTES
    pieces = window_tokens / job.document_tokens + window_blocks
    checked_seconds = block_bytes / measured.crc_bytes_per_second + block_bytes / measured.scan_bytes_per_second
    table_seconds = pieces * measured.piece_seconds + window_blocks * checked_seconds
    windows = rank_tokens / window_tokens
    blocks_per_second = fetched / job.block_tokens
    seconds = job.tokens / job.tokens_per_second
    job_requests = job.nodes * blocks_per_second * requests_per_block
    window_bytes = window_blocks * bytes_per_block
    fetch_seconds = max(
        streams_of_a_rank * window_bytes * job.gpus_per_node / job.node_bytes_per_second,
        math.ceil(streams_of_a_rank * window_blocks * requests_per_block / job.connections) * job.latency_seconds,
    )
    tables = tables_of(job, measured)
    opened_seconds = _OPENING_TRIPS * job.latency_seconds + tables.open_seconds
    opened_seconds += tables.opened_bytes * job.gpus_per_node / job.node_bytes_per_second
    return Load(
        amplification=job.nodes * fetched / job.tokens_per_second,
        rank_tokens_per_second=rank_tokens,
        window_tokens=window_tokens,
        windows_per_second=windows,
        table_seconds=table_seconds,
        busy=windows * table_seconds,
        node_requests_per_second=blocks_per_second * requests_per_block,
        node_bytes_per_second=blocks_per_second * bytes_per_block,
        job_requests_per_second=job_requests,
        rank_memory_bytes=streams_of_a_rank * ((1 + AHEAD) * window_tokens * job.token_bytes + 2 * 8 * pieces)
        + tables.opened_bytes,
        node_disk_bytes=tables.token_bytes * min(1.0, streams_of_a_node / way.num_streams),
        first_batch_seconds=opened_seconds + fetch_seconds + streams_of_a_rank * table_seconds,
        cursor_bytes=measured.cursor_bytes + (way.num_streams - 1) * measured.stream_cursor_bytes,
        pass_days=seconds / 86_400,
        pass_dollars=job_requests * seconds / 1_000 * job.dollars_per_thousand_requests,
    )


def bottlenecks(job: Job, load: Load) -> list[tuple[str, float]]:
    """What is needed over what there is, the tightest first."""
    found = {
        "bytes of a node": load.node_bytes_per_second / job.node_bytes_per_second,
        "requests of a prefix": load.job_requests_per_second / job.prefix_requests_per_second,
        "a core of a rank": load.busy,
        "memory of a node": job.gpus_per_node * load.rank_memory_bytes / job.node_memory_bytes,
    }
    return sorted(found.items(), key=lambda item: -item[1])


def ways_of(job: Job) -> Sequence[Way]:
    """The ways that are compared."""
    return (
        Way(name="no streams"),
        Way(name="a stream per node", num_streams=job.nodes),
        Way(name="and a disk cache", num_streams=job.nodes, shares_disk=True),
        Way(name="a stream per GPU", num_streams=job.gpus),
    )


def size_rows(job: Job, measured: Measured) -> Iterator[list[str]]:
    """The table of sizes."""
    tables = tables_of(job, measured)
    yield ["next to the tokens", "size", "of the tokens"]
    for name, size in (
        (f"tokens of {job.token_bytes} bytes", tables.token_bytes),
        ("document offsets, in the shards", tables.offset_bytes),
        ("`stride-hashes.bin`, read by range", tables.hash_bytes),
        (f"`shards.arrow`, {tables.num_shards:,} shards", tables.shard_table_bytes),
        ("the part of it that is read to open the corpus", tables.opened_bytes),
    ):
        yield [name, show_bytes(size), f"{size / tables.token_bytes:.1e}"]


def load_rows(job: Job, measured: Measured) -> Iterator[list[str]]:
    """The table of the ways."""
    ways = ways_of(job)
    loads = [load_of(job, measured, way) for way in ways]
    tight = [bottlenecks(job, load)[0] for load in loads]
    yield ["", *(way.name for way in ways)]
    yield ["streams", *(f"{way.num_streams:,}" for way in ways)]
    yield ["tokens fetched for one that is trained on", *(f"{load.amplification:,.0f}" for load in loads)]
    yield ["window, M tokens", *(f"{load.window_tokens / 1e6:.1f}" for load in loads)]
    yield ["windows of a rank per hour", *(f"{3_600 * load.windows_per_second:,.2f}" for load in loads)]
    yield ["a window's table and checks", *(f"{load.table_seconds:.3f} s" for load in loads)]
    yield ["cores of a rank kept busy", *(f"{load.busy:.1e}" for load in loads)]
    yield ["requests of a node per second", *(f"{load.node_requests_per_second:,.1f}" for load in loads)]
    yield ["requests of the job per second", *(f"{load.job_requests_per_second:,.0f}" for load in loads)]
    yield ["bytes of a node per second", *(show_bytes(load.node_bytes_per_second) for load in loads)]
    yield ["memory of a rank, windows and tables", *(show_bytes(load.rank_memory_bytes) for load in loads)]
    yield ["disk to keep all that a node reads", *(show_bytes(load.node_disk_bytes) for load in loads)]
    yield ["cursor, after many changes of weights", *(show_bytes(load.cursor_bytes) for load in loads)]
    yield ["time to first batch", *(f"{load.first_batch_seconds:.1f} s" for load in loads)]
    yield ["requests of a pass", *(f"${load.pass_dollars:,.0f}" for load in loads)]
    yield ["tightest", *(name for name, _ in tight)]
    yield ["of what there is", *(f"{share:,.2g} times" if share >= 1 else f"{share:.1%}" for _, share in tight)]


def show_bytes(size: float) -> str:
    """A size in a unit that leaves one to three digits before the point."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1_000:
            return f"{size:.3g} {unit}"
        size /= 1_000
    return f"{size:.3g} PB"


def main() -> None:
    job = _arguments()
    here = machine()
    measured = measure(shard_tokens=job.shard_tokens, document_tokens=job.document_tokens)
    line = {
        "benchmark": "scale",
        "commit": commit(ROOT),
        "versions": versions(PACKAGES),
        "machine": here,
        "job": asdict(job),
        "measured": asdict(measured),
        "tables": asdict(tables_of(job, measured)),
        "ways": [{**asdict(way), **asdict(load_of(job, measured, way))} for way in ways_of(job)],
    }
    days = load_of(job, measured, Way(name="")).pass_days
    _say(
        f"Arithmetic for {job.tokens:,} tokens on {job.gpus:,} GPUs in {job.nodes:,} nodes, "
        f"{job.gpu_tokens_per_second:,} tokens/s each: a pass takes {days:.1f} days. Its inputs are measured here:",
        "",
        markdown(list(measured_rows(measured)), num_left=1),
        "",
        markdown(list(size_rows(job, measured)), num_left=1),
        "",
        markdown(list(load_rows(job, measured)), num_left=1),
        "",
        json.dumps(line),
    )


def measured_rows(measured: Measured) -> Iterator[list[str]]:
    """The table of inputs."""
    yield ["measured", ""]
    yield ["a piece of a window's table", f"{measured.piece_seconds * 1e9:.0f} ns"]
    yield ["delimiters found", f"{show_bytes(measured.scan_bytes_per_second)}/s"]
    yield ["CRC-32", f"{show_bytes(measured.crc_bytes_per_second)}/s"]
    yield ["a row of the shard table", show_bytes(measured.shard_row_bytes)]
    yield ["the part of it that opens the corpus", show_bytes(measured.opened_row_bytes)]
    yield ["opening, a shard", f"{measured.open_row_seconds * 1e6:.1f} us"]
    yield ["a cursor after 20 changes of 20 weights", show_bytes(measured.cursor_bytes)]
    yield ["the same, more for each stream", show_bytes(measured.stream_cursor_bytes)]


def _arguments() -> Job:
    parser = argparse.ArgumentParser(prog="python -m benchmark.scale", description=__doc__.splitlines()[0])
    defaults = Job()
    for field in fields(Job):
        default: Any = getattr(defaults, field.name)
        kind = read_count if isinstance(default, int) else float
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=default, help="default: %(default)s")
    job = Job(**vars(parser.parse_args()))
    if min(asdict(job).values()) <= 0:
        parser.error("every number is above 0")
    return job


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
