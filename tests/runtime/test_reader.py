"""Corpora on disk are the same tokens as in memory, through a memory map and through pread."""

from __future__ import annotations

import os
import pickle
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, change_table, write_corpus
from tests.examples import crossed, examples, some
from tests.runtime import page_model
from tests.runtime.page_model import Used
from tests.runtime.sources import ListSource
from tests.runtime.test_page_model import assert_equal, documents_of_source
from tokshard.errors import CorpusError, DamagedCorpusError
from tokshard.format import names, stride_hashes
from tokshard.format import shard_table as format_table
from tokshard.format import writer as format_writer
from tokshard.format.schema import ORDINAL_STRIDE
from tokshard.runtime.bytes import ranged
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.loader import narrow_batches
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.expand import full_batch
from tokshard.runtime.rows.steps import RankRows

LARGE_VOCABULARY = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 99999')
ACCESS = ["mmap", "pread"]

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@contextmanager
def small_units(*, batch_tokens: int, stride: int) -> Iterator[None]:
    """Record batches and strides of few tokens, so that a small corpus has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_writer, "MAX_BATCH_TOKENS", batch_tokens)
        for module in (format_writer, format_table, ranged):
            patch.setattr(module, "ORDINAL_STRIDE", stride)
        for module in (stride_hashes, ranged):
            patch.setattr(module, "HASH_STRIDE", 2 * (stride // 4 + 1))
        yield


def write(directory: Path, memory: ListSource, *, shard_tokens: int = 1 << 28, wide: bool = False) -> Path:
    tokenizer = LARGE_VOCABULARY if wide else TINY_TOKENIZER
    return write_corpus(directory, memory.documents(), shard_tokens=shard_tokens, tokenizer=tokenizer)


def spans_of(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ranges of tokens, short and long."""
    span = st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(lambda pair: (pair[0], min(size, sum(pair))))
    return st.lists(span, min_size=1, max_size=20).map(lambda drawn: [*drawn, (0, size), (size - 1, size)])


def read(source: Any, starts: Any, lengths: Any) -> Any:
    """The tokens of pieces, put down in reverse order."""
    out = np.zeros(int(lengths.sum()), source.dtype)
    source.read(starts, lengths, out, len(out) - np.cumsum(lengths))
    return out


def ends_of(source: CorpusSource, start: int, stop: int) -> list[int]:
    offsets, ends = source.ends(np.array([start]), np.array([stop]))
    assert offsets.tolist() == [0, len(ends)]
    return ends.tolist()


def assert_same_stream(found: CorpusSource, memory: ListSource, spans: list[tuple[int, int]]) -> None:
    assert found.num_tokens == memory.num_tokens
    for start, stop in spans:
        assert ends_of(found, start, stop) == memory.ends_of(start, stop).tolist(), (start, stop)
    pieces = []
    for start, stop in spans:
        place, expected = found.document_at(start), memory.document_at(start)
        assert (place.document, place.start, place.stop) == (expected.document, expected.start, expected.stop)
        assert found.place_of(place.document) == place
        pieces.append((start, min(stop, expected.stop) - start))
    starts, counts = np.array(pieces, np.int64).T
    assert read(found, starts, counts).tolist() == read(memory, starts, counts).tolist()
    offsets, ends = found.ends(*np.array(spans, np.int64).T)
    expected_offsets, expected_ends = memory.ends(*np.array(spans, np.int64).T)
    assert (offsets.tolist(), ends.tolist()) == (expected_offsets.tolist(), expected_ends.tolist())


@settings(max_examples=examples(40))
@given(
    lengths=lengths,
    shard_tokens=st.integers(1, 300),
    batch_tokens=st.integers(1, 120),
    stride=st.integers(1, 50),
    wide=st.booleans(),
    inner=st.booleans(),
    data=st.data(),
)
def test_a_corpus_on_disk_is_the_same_stream_as_in_memory_whatever_its_shards_and_batches(
    lengths: list[int],
    shard_tokens: int,
    batch_tokens: int,
    stride: int,
    wide: bool,
    inner: bool,
    data: st.DataObject,
) -> None:
    memory = ListSource(lengths, first_token=90_000 if wide else 1, inner_delimiters=inner)
    spans = data.draw(spans_of(memory.num_tokens))
    with tempfile.TemporaryDirectory() as folder, small_units(batch_tokens=batch_tokens, stride=stride):
        corpus = write(Path(folder) / "corpus", memory, shard_tokens=shard_tokens, wide=wide)
        for access in ["mmap"] if inner else ACCESS:  # reading by range finds documents by their delimiters
            source = CorpusSource(corpus, access=access)
            assert source.dtype == (np.uint32 if wide else np.uint16)
            assert_same_stream(source, memory, spans)


@pytest.mark.slow
@pytest.mark.parametrize("access", ACCESS)
def test_documents_longer_than_strides_batches_and_blocks_are_found(
    tmp_path: Path, access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_writer, "MAX_BATCH_TOKENS", 100_000)
    rng = np.random.default_rng(7)
    long = [1, 3 * ORDINAL_STRIDE, 5, ORDINAL_STRIDE, ORDINAL_STRIDE - 6, 1, 2 * ORDINAL_STRIDE + 1]
    memory = ListSource([*rng.integers(1, 6000, 100).tolist(), *long])
    memory.tokens = memory.tokens % 3 + 1
    memory.tokens[memory.stops - 1] = 0
    corpus = write(tmp_path / "corpus", memory, shard_tokens=400_000)
    source = CorpusSource(corpus, access=access)
    assert len(source.corpus.shards) > 1
    assert max(len(source.corpus.shards.batch_places(index)) for index in range(len(source.corpus.shards))) > 1
    edges = [edge for stop in memory.stops.tolist() for edge in (stop - 1, stop, stop + 1)]
    edges += [edge for k in range(1, memory.num_tokens // ORDINAL_STRIDE) for edge in (k * ORDINAL_STRIDE - 1,)]
    starts = sorted({edge for edge in edges if 0 <= edge < memory.num_tokens})
    spans = [(start, min(memory.num_tokens, start + length)) for start in starts for length in (10, 70_000)]
    assert_same_stream(source, memory, spans)


@some("access", [["mmap", "pread"], ["pread", "mmap"], ["mmap"], ["pread"]])
@settings(max_examples=examples(15))
@example(parts=[[1, 1], [1, 1]], shape=(1, 1, 1))  # equal content
@given(parts=st.lists(lengths, min_size=1, max_size=2), shape=st.tuples(*[st.integers(1, n) for n in (20, 64, 5)]))
def test_samples_of_corpora_on_disk_are_those_of_the_page(
    access: list[str], parts: list[list[int]], shape: tuple[int, int, int]
) -> None:
    seq_len, block, window_blocks = shape
    memories = [ListSource(part, first_token=1 + 5000 * number) for number, part in enumerate(parts)]
    with tempfile.TemporaryDirectory() as folder, small_units(batch_tokens=90, stride=16):
        sources = {
            f"corpus {number}": CorpusSource(
                write(Path(folder) / str(number), memory, shard_tokens=200), access=access[number % len(access)]
            )
            for number, memory in enumerate(memories)
        }
        # equal content has to begin at other epochs
        first_epochs = {name: number for number, name in enumerate(sources)}
        plan = StreamPlan(
            sources,
            weights=dict.fromkeys(sources, 1.0),
            start_epoch=first_epochs,
            seq_len=seq_len,
            block_tokens=block,
            window_blocks=window_blocks,
            seed=6,
            allow_small_blocks=True,
        )
        model = page_model.Plan(
            [
                Used(documents_of_source(memory, source.fingerprint), start_epoch=first_epochs[name])
                for memory, (name, source) in zip(memories, sources.items(), strict=True)
            ],
            weights=[1.0] * len(sources),
            seq_len=seq_len,
            block_tokens=block,
            window_blocks=window_blocks,
            seed=6,
        )
        layout = plan.lay_out(plan.cursor(), np.arange(15))
        together = full_batch(layout.read(0, 15))
        for sample in range(15):
            assert_equal(plan, model, sample)
            found = plan.sample(sample)
            for key in ("input_ids", "labels", "position_ids"):
                assert found[key].tolist() == together[key][sample].tolist(), key
            opened = plan.sources[model.located(sample)[0]].corpus
            for piece in plan.trace(sample):
                first = int(opened.shards.first_documents[[shard.name for shard in opened.shards].index(piece.shard)])
                assert first <= piece.document


@pytest.mark.parametrize("access", ACCESS)
def test_a_trace_names_the_shard_that_holds_the_document(tmp_path: Path, access: str) -> None:
    corpus = write(tmp_path / "corpus", ListSource([10] * 12), shard_tokens=30)
    source = CorpusSource(corpus, access=access)
    assert len(source.corpus.shards) == 4
    plan = StreamPlan({"code": source}, seq_len=120, seed=1)
    pieces = plan.trace(0)
    assert sorted(piece.document for piece in pieces) == list(range(12))
    for piece in pieces:
        assert piece.shard == source.corpus.shards[piece.document // 3].name
        assert (piece.corpus, piece.start, piece.stop) == ("code", 0, 10)


@pytest.mark.parametrize("access", ACCESS)
def test_a_source_pickles_as_its_path_and_way_of_access(tmp_path: Path, access: str) -> None:
    memory = ListSource([5, 9, 30, 1])
    source = CorpusSource(write(tmp_path / "corpus", memory), access=access)
    assert_same_stream(source, memory, [(0, 45)])  # with open shards
    content = pickle.dumps(source)
    assert len(content) < 500
    again = pickle.loads(content)
    assert again.access == access
    assert_same_stream(again, memory, [(0, 45), (44, 45)])
    plan = StreamPlan({"a": source}, seq_len=8, seed=2)
    copied = pickle.loads(pickle.dumps(plan))
    assert copied.sources[0].access == access
    assert copied.sample(3)["input_ids"].tolist() == plan.sample(3)["input_ids"].tolist()


def test_a_plan_of_a_relative_path_pickles_into_a_process_that_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "corpus", ListSource([5, 9]))
    monkeypatch.chdir(tmp_path)
    plan = StreamPlan("corpus", seq_len=4)
    assert plan.names == ("corpus",)
    content = pickle.dumps(plan)
    monkeypatch.chdir("/")
    assert pickle.loads(content).sample(1)["input_ids"].tolist() == plan.sample(1)["input_ids"].tolist()


def test_an_unknown_way_of_access_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="access must be 'mmap' or 'pread', got 'read'"):
        CorpusSource(write(tmp_path / "corpus", ListSource([5])), access="read")


def test_pread_reads_a_step_when_it_is_made_and_not_all_steps_that_are_laid_out_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ListSource([10] * 400)
    plan = StreamPlan(
        CorpusSource(write(tmp_path / "corpus", memory, shard_tokens=100), access="pread"), seq_len=10, block_tokens=100
    )
    asked: list[int] = []
    read_pieces = CorpusSource.read

    def watched(source: CorpusSource, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        asked.append(int(lengths.sum()))
        read_pieces(source, starts, lengths, out, at)

    monkeypatch.setattr(CorpusSource, "read", watched)
    steps = narrow_batches(plan, RankRows(global_batch_size=2), plan.cursor())
    for _, narrow in zip(range(100), steps, strict=False):
        assert sum(asked) <= narrow.num_read_tokens
        del asked[:]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("access", ACCESS)
def test_reading_keeps_no_descriptor(tmp_path: Path, access: str) -> None:
    source = CorpusSource(write(tmp_path / "corpus", ListSource([10] * 40), shard_tokens=10), access=access)
    before = open_descriptors()
    read(source, np.arange(0, 400, 10), np.full(40, 10))
    assert open_descriptors() == before


def test_pread_says_that_the_process_has_no_descriptors(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus", ListSource([10] * 40), shard_tokens=10)
    source = CorpusSource(corpus, access="pread", cache=Cache(memory_bytes=0))
    read(source, np.array([0]), np.array([10]))  # threads, tables and hashes are there
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(CorpusError, match=r"Too many open files") as caught:
            read(source, np.array([0]), np.array([10]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in caught.value.hint


# damage


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the text of the damage that it reports."""
    try:
        return call()
    except DamagedCorpusError as error:
        return error.problem


@pytest.mark.slow
@crossed("wrong, entry", [0, 2, 4, 9, 2**32 - 1], [0, 1, 2])
def test_a_wrong_stride_in_the_shard_table_never_gives_wrong_ends_of_documents(
    tmp_path: Path, wrong: int, entry: int
) -> None:
    memory = ListSource([6, 2, 9, 4, 30, 1, 3, 5, 2, 8])
    with small_units(batch_tokens=30, stride=20):
        corpus = write(tmp_path / "corpus", memory)
        right = CorpusSource(corpus).corpus.shards.stride_documents(0).tolist()

        def change(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            rows["stride_documents"][0][entry] = wrong
            return rows

        change_table(corpus, names.SHARD_TABLE, change)
        source = CorpusSource(corpus, access="pread")
        reported = 0
        for start in range(memory.num_tokens):
            place, found = memory.document_at(start), outcome(lambda: source.document_at(start))  # noqa: B023
            if isinstance(found, str):
                reported += 1
            else:
                assert (found.document, found.start, found.stop) == (place.document, place.start, place.stop)
            for stop in range(start + 1, memory.num_tokens + 1, 7):
                ends = outcome(lambda: ends_of(source, start, stop))  # noqa: B023
                if isinstance(ends, str):
                    reported += 1
                    assert source.corpus.shards[0].name in ends
                else:
                    assert ends == memory.ends_of(start, stop).tolist()
        # an entry that is too low only makes a reader start its search earlier
        assert reported or wrong <= right[entry]


@pytest.mark.parametrize(
    "offsets", [[0, 5, 2, 9], [0, 2, 2, 9], [1, 2, 5, 9], [0, 2, 5, 8], [0, -1, 5, 9], [0, 2, 2**62, 9]]
)
@pytest.mark.parametrize("access", ACCESS)
def test_document_offsets_that_do_not_ascend_over_their_batch_are_reported_with_the_shard(
    tmp_path: Path, access: str, offsets: list[int]
) -> None:
    corpus = write(tmp_path / "corpus", ListSource([2, 3, 4]))
    opened = CorpusSource(corpus).corpus
    shard = corpus / opened.shards[0].name
    position = opened.shards.batch_places(0)[0].offsets_position
    content = bytearray(shard.read_bytes())
    assert np.frombuffer(content, np.int64, 4, position).tolist() == [0, 2, 5, 9]
    content[position : position + 32] = np.array(offsets, np.int64).tobytes()
    shard.write_bytes(content)
    source = CorpusSource(corpus, access=access)
    with pytest.raises(DamagedCorpusError, match=shard.name):
        _ = ends_of(source, 0, 9) if access == "mmap" else [source.document_at(position) for position in range(9)]


@pytest.mark.parametrize("access", ACCESS)
def test_a_document_is_found_by_its_number_and_one_that_does_not_exist_is_refused(tmp_path: Path, access: str) -> None:
    source = CorpusSource(write(tmp_path / "corpus", ListSource([2, 3, 4]), shard_tokens=5), access=access)
    assert [(place.start, place.stop) for place in map(source.place_of, range(3))] == [(0, 2), (2, 5), (5, 9)]
    for document in (-1, 3):
        with pytest.raises(IndexError, match=f"document {document}"):
            source.place_of(document)


def test_a_document_that_is_not_within_its_batch_is_reported_with_the_shard(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus", ListSource([2, 3, 4]))
    opened = CorpusSource(corpus).corpus
    shard = corpus / opened.shards[0].name
    content = bytearray(shard.read_bytes())
    position = opened.shards.batch_places(0)[0].offsets_position
    content[position + 16 : position + 24] = np.array([2**40], np.int64).tobytes()
    shard.write_bytes(content)
    for access in ACCESS:
        with pytest.raises(DamagedCorpusError, match=shard.name):
            CorpusSource(corpus, access=access).place_of(1)


@pytest.mark.slow
@pytest.mark.parametrize("access", ACCESS)
def test_offsets_that_change_under_a_running_plan_are_reported_with_the_shard(tmp_path: Path, access: str) -> None:
    memory = ListSource([3, 1, 7, 2, 9, 4, 1, 5, 30, 2])
    with small_units(batch_tokens=30, stride=8):
        corpus = write(tmp_path / "corpus", memory)
        opened = CorpusSource(corpus, access=access)
        plan = StreamPlan(opened, seq_len=8, block_tokens=16, window_blocks=2, seed=1, allow_small_blocks=True)
        places, shard = opened.corpus.shards.batch_places(0), corpus / opened.corpus.shards[0].name
        expected = [outcome(lambda: read_all(plan, sample, sample % 10)) for sample in range(10)]  # noqa: B023
        content, rng, reported = shard.read_bytes(), np.random.default_rng(5), 0
        values = [-(2**63), -1, 0, 1, 5, 29, 30, 31, 1000, 2**40, 2**63 - 1]
        for _ in range(15):
            place = places[rng.integers(len(places))]
            position = place.offsets_position + 8 * int(rng.integers(place.num_documents + 1))
            overwrite(shard, position, np.int64(rng.choice(values)).tobytes())
            for sample in range(10):
                found = outcome(lambda: read_all(plan.reader(), sample, sample % 10))  # noqa: B023
                if isinstance(found, str):
                    assert shard.name in found
                    reported += 1
            overwrite(shard, 0, content)
        assert reported > 15
        assert [read_all(plan.reader(), sample, sample % 10) for sample in range(10)] == expected


def read_all(plan: StreamPlan, sample: int, document: int) -> Any:
    """All that a plan says of a sample and a document."""
    return plan.sample(sample)["input_ids"].tolist(), plan.trace(sample), plan.find(plan.names[0], document)


def overwrite(path: Path, position: int, content: bytes) -> None:
    """Write into a file in place, so that maps of it show it."""
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, content, position)
    os.close(descriptor)
