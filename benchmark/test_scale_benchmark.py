"""The arithmetic of the plan on paper, by hand; and that the script runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.scale import Job, Way, bottlenecks, load_of, tables_of
from benchmark.scale_inputs import Measured

ROOT = Path(__file__).parents[1]

JOB = Job(
    tokens=1 << 40,
    token_bytes=2,
    gpus=64,
    gpus_per_node=8,
    gpu_tokens_per_second=1 << 14,
    document_tokens=1 << 10,
    shard_tokens=1 << 28,
    block_tokens=1 << 16,
    window_blocks=1 << 10,
    latency_seconds=0.02,
    connections=32,
    node_bytes_per_second=1e9,
    prefix_requests_per_second=1_000.0,
    node_memory_bytes=64e9,
    dollars_per_thousand_requests=0.0004,
)
"""2^40 tokens on 8 nodes that train on 2^20 tokens per second: 16 blocks."""

MEASURED = Measured(
    piece_seconds=1e-6,
    scan_bytes_per_second=2e9,
    crc_bytes_per_second=1e9,
    shard_row_bytes=20_000.0,
    opened_row_bytes=1_000.0,
    open_row_seconds=1e-6,
    cursor_bytes=4_000,
    stream_cursor_bytes=500.0,
)


def test_tables_grow_with_shards_documents_and_strides():
    tables = tables_of(JOB, MEASURED)

    assert tables.num_shards == 4_096
    assert tables.token_bytes == 1 << 41
    assert tables.offset_bytes == 1 << 33
    assert tables.hash_bytes == 1 << 29  # 4 bytes for each of 2^27 strides
    assert tables.shard_table_bytes == 81_920_000
    assert (tables.opened_bytes, tables.open_seconds) == (4_096_000, pytest.approx(0.004096))


def test_without_streams_every_rank_reads_everything():
    load = load_of(JOB, MEASURED, Way(name="none"))

    assert load.amplification == 64
    assert load.window_tokens == 1 << 26
    assert load.windows_per_second == 1 / 64
    assert load.node_requests_per_second == 8 * 16 * 2
    assert load.job_requests_per_second == 8 * load.node_requests_per_second
    # a block is fetched with 8,192 tokens more and 256 bytes of hashes
    assert load.node_bytes_per_second == 8 * 16 * (2 * (65_536 + 8_192) + 256)
    # 65,536 documents, each cut at most once: a piece more for each of 1,024 blocks
    assert load.table_seconds == pytest.approx(66_560e-6 + 1_024 * 147_456 * 1.5e-9)
    assert load.rank_memory_bytes == 2.5 * (1 << 27) + 2 * 8 * 66_560 + 4_096_000
    assert load.node_disk_bytes == 1 << 41
    assert load.pass_days == pytest.approx((1 << 20) / 86_400)
    assert load.pass_dollars == pytest.approx(64 * 2 * (1 << 24) / 1_000 * 0.0004)


def test_streams_divide_what_is_read_and_a_disk_cache_divides_it_by_the_ranks_of_a_node():
    alone, by_node, on_disk, by_gpu = (
        load_of(JOB, MEASURED, way)
        for way in (
            Way(name="none"),
            Way(name="nodes", num_streams=8),
            Way(name="disk", num_streams=8, shares_disk=True),
            Way(name="gpus", num_streams=64),
        )
    )

    assert (by_node.amplification, on_disk.amplification, by_gpu.amplification) == (8, 1, 1)
    assert (by_node.window_tokens, by_gpu.window_tokens) == (128 << 16, 64 << 16)
    assert by_node.job_requests_per_second == alone.job_requests_per_second / 8
    assert by_node.pass_dollars == pytest.approx(alone.pass_dollars / 8)
    assert on_disk.node_disk_bytes == by_gpu.node_disk_bytes == 1 << 38
    assert (alone.cursor_bytes, by_node.cursor_bytes) == (4_000, 7_500)
    assert on_disk.rank_tokens_per_second == by_node.rank_tokens_per_second == 8 * by_gpu.rank_tokens_per_second


def test_the_tightest_limit_comes_first():
    load = load_of(JOB, MEASURED, Way(name="none"))

    assert bottlenecks(JOB, load)[0] == ("requests of a prefix", pytest.approx(2.048))
    assert bottlenecks(replace(JOB, node_bytes_per_second=1e6), load)[0][0] == "bytes of a node"
