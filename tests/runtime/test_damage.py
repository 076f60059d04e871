"""Damage of shards as plans and loaders meet it. That nothing else is ever read: tests/contract, tests/inspect."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import Source, change_table, write_corpus
from tests.damage import Change, Damage, check, cut, damaged, emptied, grown, replaced
from tests.examples import crossed
from tests.runtime.disk import ACCESS, small_units, write
from tests.runtime.sources import ListSource
from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.format.loss import LOSS
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.mapped import MappedCorpus

SIZES: dict[str, Any] = {"seq_len": 8, "block_tokens": 32, "window_blocks": 3, "seed": 4}
OFFSETS = np.array([0, 20, 40, 60, 80, 100])


def shards(folder: Path, index: int = 2) -> Path:
    """One of six shards of five documents."""
    corpus = write(folder / "corpus", ListSource([20] * 30), shard_tokens=100)
    return sorted(corpus.glob("shard-*.arrow"))[index]


def conversations(folder: Path) -> Path:
    """A shard with loss spans."""
    source = Source(documents=ListSource([20] * 6).documents(), metadata={LOSS: [[1, 7, 9, 19]] * 6})
    write_corpus(folder / "corpus", sources=[source], columns={LOSS: "spans"})
    (shard,) = (folder / "corpus").glob("shard-*.arrow")
    return shard


def reader(access: str) -> Callable[[Path], Any]:
    """Reads an epoch, and looks up every document."""

    def read(folder: Path) -> None:
        source = CorpusSource(folder / "corpus", access=access)
        with NumpyLoader(StreamPlan({"corpus": source}, pack="cut", epochs=1, **SIZES), global_batch_size=4) as loader:
            for _ in loader:
                pass
        for document in range(6):
            source.place_of(document)
            source.document_at(20 * document)

    return read


def int64(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


WRONG_OFFSETS: list[tuple[int, ...]] = [
    (0, 20, 60, 40, 80, 100),
    (0, 20, 20, 60, 80, 100),
    (1, 20, 40, 60, 80, 100),
    (0, 20, 40, 60, 80, 99),
    (0, -1, 40, 60, 80, 100),
    (0, 20, 2**62, 60, 80, 100),
]

DAMAGE = [
    *(
        Damage(
            f"{access}: documents of a shard at {offsets}",
            partial(shards, index=0),
            replaced(int64(*OFFSETS), int64(*offsets)),
            reader(access),
            DamagedCorpusError,
            "FILE, batch 0: offsets *must ascend *",
        )
        for access in ACCESS
        for offsets in WRONG_OFFSETS
    ),
    Damage(
        "pread: a token of a shard",
        shards,
        replaced(np.arange(201, 220, dtype=np.uint16).tobytes(), bytes(38)),
        reader("pread"),
        DamagedCorpusError,
        "FILE: tokens 0 to 100, from byte * on, have the hash *, expected *",
    ),
    *(
        Damage(
            f"{access}: a loss span of a shard",
            conversations,
            replaced(np.array([1, 7, 9, 19], np.uint32).tobytes(), np.array([1, 7, 8, 19], np.uint32).tobytes()),
            reader(access),
            DamagedCorpusError,
            "FILE, batch 0: its loss spans have CRC-32 *, expected *",
        )
        for access in ACCESS
    ),
]


@damaged(DAMAGE)
def test_damage(damage: Damage, tmp_path: Path) -> None:
    check(damage, tmp_path)


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize(
    ("change", "problem"),
    [(grown, "has .* bytes"), (cut, "has .* bytes"), (emptied, "has 0 bytes|ends at byte 0"), (None, "")],
)
def test_a_shard_that_changed_before_it_was_first_touched_is_reported_by_name(
    tmp_path: Path, access: str, change: Change | None, problem: str
) -> None:
    shard = shards(tmp_path)
    plan = StreamPlan(CorpusSource(tmp_path / "corpus", access=access), epochs=1, **SIZES)
    content = shard.read_bytes()
    shard.unlink()
    if change is not None:
        shard.write_bytes(change(content))
    with (
        NumpyLoader(plan, global_batch_size=2) as loader,
        pytest.raises(DamagedCorpusError, match=shard.name) as caught,
    ):
        for _ in loader:
            pass
    assert re.search(problem, caught.value.problem)


def test_another_corpus_in_the_place_of_one_is_refused_where_no_hash_covers_what_is_read(tmp_path: Path) -> None:
    corpus = shards(tmp_path).parent
    source = CorpusSource(corpus, access="pread")
    source.place_of(0)
    shutil.rmtree(corpus)
    write(corpus, ListSource([19, 21, 20, 20, 20] * 6), shard_tokens=100)  # its files have the same names and sizes
    for document in (1, 10):  # of a shard that was read before, and of another
        with pytest.raises(DamagedCorpusError, match="the corpus was replaced during the run"):
            source.place_of(document)


@pytest.mark.slow
@crossed(
    "column, wrong, access",
    ["batch_tokens", "batch_documents", "batch_values_position", "batch_offsets_position"],
    [-16, -2, 2, 16, 1 << 40],
    ACCESS,
)
def test_a_shard_table_that_lies_about_record_batches_is_refused(
    tmp_path: Path, column: str, wrong: int, access: str
) -> None:
    def change(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows[column][0][0] += wrong
        if column in ("batch_tokens", "batch_documents"):  # the sum stays what it was
            rows[column][0][1] -= wrong
        return rows

    with small_units(batch_tokens=100, stride=20):
        change_table(write(tmp_path / "corpus", ListSource([20] * 30), shard_tokens=300), names.SHARD_TABLE, change)
        with pytest.raises(DamagedCorpusError):
            reader(access)(tmp_path)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the text of the damage that it reports."""
    try:
        return call()
    except DamagedCorpusError as error:
        return error.problem


@pytest.mark.slow
@crossed("wrong, entry, access", [9, 4, 2, 2**32 - 1, 0], [0, 1, 2], ACCESS)
def test_a_wrong_stride_in_the_shard_table_never_gives_wrong_ends_of_documents(
    tmp_path: Path, wrong: int, entry: int, access: str
) -> None:
    memory = ListSource([6, 2, 9, 4, 30, 1, 3, 5, 2, 8])

    def change(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows["stride_documents"][0][entry] = wrong
        return rows

    with small_units(batch_tokens=30, stride=20):
        corpus = write(tmp_path / "corpus", memory)
        right = CorpusSource(corpus).corpus.shards.stride_documents(0).tolist()
        change_table(corpus, names.SHARD_TABLE, change)
        source, reported = CorpusSource(corpus, access=access), 0
        for start in range(memory.num_tokens):
            found = outcome(lambda: source.document_at(start).document)  # noqa: B023
            reported += isinstance(found, str)
            assert isinstance(found, str) or found == memory.document_at(start).document
            for stop in range(start + 1, memory.num_tokens + 1, 7):
                ends = outcome(lambda: list(source.ends(np.array([start]), np.array([stop]))[1]))  # noqa: B023
                reported += isinstance(ends, str)
                assert source.corpus.shards[0].name in ends if isinstance(ends, str) else True
                assert isinstance(ends, str) or ends == memory.ends_of(start, stop).tolist()
        # an entry that is too low only makes a reader start its search earlier
        assert reported or wrong <= right[entry]


def overwrite(path: Path, position: int, content: bytes) -> None:
    """Write into a file in place, so that maps of it show it."""
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, content, position)
    os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("access", ACCESS)
def test_offsets_that_change_under_a_running_plan_are_reported_with_the_shard(tmp_path: Path, access: str) -> None:
    with small_units(batch_tokens=30, stride=8):
        corpus = write(tmp_path / "corpus", ListSource([3, 1, 7, 2, 9, 4, 1, 5, 30, 2]))
        opened = CorpusSource(corpus, access=access)
        plan = StreamPlan(opened, seed=1, allow_small_blocks=True, seq_len=8, block_tokens=16, window_blocks=2)
        places, shard = opened.corpus.shards.batch_places(0), corpus / opened.corpus.shards[0].name

        def read_all(sample: int) -> Any:
            """All that a plan says of a sample and a document."""
            again = plan.copy()
            return again.sample(sample)["input_ids"].tolist(), again.trace(sample), again.find("corpus", sample)

        expected = list(map(read_all, range(10)))
        content, rng, reported = shard.read_bytes(), np.random.default_rng(5), 0
        for _ in range(15):
            place = places[rng.integers(len(places))]
            position = place.offsets_position + 8 * int(rng.integers(place.num_documents + 1))
            wrong = rng.choice([-(2**63), -1, 0, 1, 5, 29, 30, 31, 1000, 2**40, 2**63 - 1])
            overwrite(shard, position, int64(wrong))
            for sample in range(10):
                found = outcome(lambda: read_all(sample))  # noqa: B023
                reported += isinstance(found, str)
                assert not isinstance(found, str) or shard.name in found
            overwrite(shard, 0, content)
        assert reported > 15
        assert list(map(read_all, range(10))) == expected


def test_a_piece_beyond_its_record_batch_is_refused(tmp_path: Path) -> None:
    with small_units(batch_tokens=100, stride=20):
        source = CorpusSource(write(tmp_path / "corpus", ListSource([20] * 30), shard_tokens=300))
    out, at = np.zeros(21, source.dtype), np.array([0])
    source.read(np.array([80]), np.array([20]), out, at)
    assert out[:19].all()
    assert out[19] == 0
    for start, length in ((80, 21), (-1, 3), (600, 1)):
        with pytest.raises(DamagedCorpusError, match="a document extends beyond its record batch"):
            source.read(np.array([start]), np.array([length]), out, at)


def test_a_shard_that_does_not_align_its_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path)
    opened = MappedCorpus._values

    def misaligned(corpus: MappedCorpus, batch: int) -> Any:
        values = opened(corpus, batch)
        return np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1)

    monkeypatch.setattr(MappedCorpus, "_values", misaligned)
    with pytest.raises(DamagedCorpusError, match=r"shard-.*\.arrow, batch 0: its tokens are not aligned"):
        reader("mmap")(tmp_path)


@pytest.mark.filterwarnings("ignore:the current windows and the windows fetched")
def test_a_shard_truncated_under_a_running_job_is_an_error_with_pread(tmp_path: Path) -> None:
    shard = shards(tmp_path)
    source = CorpusSource(tmp_path / "corpus", access="pread", cache=Cache(memory_bytes=0))
    with NumpyLoader(StreamPlan(source, **SIZES), global_batch_size=2) as loader:
        for _ in islice(loader, 60):  # more than an epoch: every shard is open
            pass
        os.truncate(shard, 600)
        with pytest.raises(DamagedCorpusError, match=f"{shard.name}: the file ends at byte .* it was cut during"):
            for _ in loader:
                pass
