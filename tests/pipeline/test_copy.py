"""A copy holds the chosen documents, with their sources and records, and is a corpus like any other."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, Source, append_generation, change_table, documents_of, write_corpus
from tests.examples import crossed, examples, some
from tests.store.memory import SCHEME, MemoryStore
from tokshard import copy_corpus as copy_by_processes
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import BuildError, ConfigurationChangedError, DamagedCorpusError, UnfinishedCorpusError, UsageError
from tokshard.format import names, writer
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline.sources import corpora
from tokshard.pipeline.status import read_status
from tokshard.pipeline.tasks import planning, shuffle
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.store import STORES_BY_SCHEME, open_store, written

LENGTHS = [1 + 7 * index % 90 for index in range(120)]


def corpus_of(directory: Path, lengths: list[int] = LENGTHS, **options: Any) -> Path:
    """Two sources, the second of which left records out, with a column that repeats."""
    half = len(lengths) // 2
    documents = documents_of(lengths)
    sources = [
        Source(documents=documents[:half], path="a.jsonl", metadata={"lang": ["en", "fr", None] * (half // 3)}),
        Source(
            documents=documents[half:],
            path="b.jsonl",
            records=[2 * number for number in range(half)],
            metadata={"lang": ["de", "en", "fr"] * (half // 3)},
            left_out={"empty": half},
        ),
    ]
    return write_corpus(
        directory, sources=sources, columns={"lang": "string"}, tokenizer=TINY_TOKENIZER, shard_tokens=400, **options
    )


def copy_corpus(given: Any, *, out: Path | str, **options: Any) -> Any:
    """Copy in this process, unless workers are asked for: starting them takes longer than these copies."""
    return copy_by_processes(given, out=out, **{"workers": 1, **options})


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpus_of(tmp_path / "corpus")


def rows(directory: Path | str) -> list[tuple[Any, ...]]:
    """Tokens, kept columns and origin of every document of an intact corpus."""
    report = verify_corpus(str(directory))
    assert report.is_ok, report.problems
    with open_corpus(directory) as opened:
        sources = [(opened.manifest.arguments[one.argument], one.path) for one in opened.sources()]
        return [
            (tuple(opened[index].tolist()), opened.metadata(index), sources[place.source], place.record)
            for index in range(len(opened))
            for place in [opened.provenance(index)]
        ]


def files(directory: Path) -> dict[str, bytes]:
    """Every file of a corpus but its report, which is not pure."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != names.REPORT}


def test_a_copy_in_other_shards_has_the_documents_origins_and_order_of_the_corpus(corpus, tmp_path):
    done = copy_corpus(corpus, out=tmp_path / "copy", shard_tokens=100_000)
    assert rows(tmp_path / "copy") == rows(corpus)
    assert done.manifest.num_shards == 1
    with open_corpus(corpus) as first, open_corpus(tmp_path / "copy") as second:
        assert len(first.shards) > 5
        assert second.fingerprint == first.fingerprint
        assert second.sources() == first.sources()
    sizes = {"seq_len": 32, "seed": 17, "block_tokens": 256, "window_blocks": 4, "allow_small_blocks": True}
    plans = [StreamPlan({"c": str(directory)}, **sizes) for directory in (corpus, tmp_path / "copy")]
    assert plans[0].fingerprint == plans[1].fingerprint
    for sample in range(40):
        assert np.array_equal(*(plan.sample(sample)["input_ids"] for plan in plans))


@pytest.mark.parametrize("tokens", [1, 100, 300])
def test_record_batches_are_copied_in_slices(corpus, tmp_path, monkeypatch, tokens):
    """One document each, some, and parts of the record batches of 400 tokens."""
    expected = rows(corpus)
    monkeypatch.setattr(corpora, "SLICE_TOKENS", tokens)
    for name, options in {"all": {}, "some": {"where": "lang=fr"}, "long": {"min_tokens": 40}}.items():
        copy_corpus(corpus, out=tmp_path / name, **options)
    assert rows(tmp_path / "all") == expected
    assert rows(tmp_path / "some") == [row for row in expected if row[1]["lang"] == "fr"]
    assert rows(tmp_path / "long") == [row for row in expected if len(row[0]) >= 40]


def test_documents_are_not_copied_twice_by_mistake(corpus, tmp_path):
    copy_corpus(corpus, out=tmp_path / "copy", shard_tokens=100_000)
    with pytest.raises(UsageError, match=r"/copy holds the same documents as "):
        copy_corpus([corpus, tmp_path / "copy"], out=tmp_path / "both")
    assert not (tmp_path / "both").exists()


@pytest.fixture(scope="module")
def relatives(tmp_path_factory) -> dict[str, Path]:
    """A corpus of two generations, the corpus before it grew, and copies of it. No test changes them."""
    directory = tmp_path_factory.mktemp("relatives")
    found = {name: directory / name for name in ("grown", "before", "flat", "joined", "low", "high", "other")}
    for name in ("grown", "before"):
        write_corpus(found[name], documents_of([5, 6, 7, 8, 9, 10, 11, 12]), tokenizer=TINY_TOKENIZER)
    append_generation(found["grown"], documents_of([13, 14]))
    write_corpus(found["other"], documents_of([15, 16]), tokenizer=TINY_TOKENIZER)
    copy_corpus(found["grown"], out=found["flat"])
    copy_corpus([found["grown"], found["other"]], out=found["joined"])
    copy_corpus(found["grown"], out=found["low"], hash_range=(0, 0.5))
    copy_corpus(found["grown"], out=found["high"], hash_range=(0.5, 1))
    return found | {"newest": found["grown"] / "generation-01"}


SHARING = [("grown", name) for name in ("before", "newest", "flat", "joined", "low")]
SHARING += [("joined", "flat"), ("joined", "other"), ("joined", "low"), ("flat", "high")]


@crossed("names, swapped", SHARING, [False, True])
def test_a_corpus_does_not_become_one_with_its_generations_and_copies(relatives, tmp_path, names, swapped):
    first, second = (relatives[name] for name in names[:: -1 if swapped else 1])
    with pytest.raises(UsageError, match=r"holds the same documents as .*, or some of them"):
        copy_corpus([first, second], out=tmp_path / "both")
    if relatives["newest"] not in (first, second):
        with pytest.raises(UsageError, match=f"a corpus that is copied, is in {first} already, or documents of it are"):
            copy_corpus(second, out=first, append=True)


@pytest.mark.parametrize("names", [("low", "high"), ("grown", "other"), ("before", "newest")])
def test_parts_of_a_corpus_that_share_no_document_become_one(relatives, tmp_path, names):
    first, second = (relatives[name] for name in names)
    done = copy_corpus([first, second], out=tmp_path / "both")
    copy_corpus(first, out=tmp_path / "grows")
    copy_corpus(second, out=tmp_path / "grows", append=True)
    with open_corpus(tmp_path / "grows") as grown:
        assert grown.fingerprint == done.manifest.fingerprints.content


@pytest.fixture(scope="module")
def descendants(relatives, tmp_path_factory) -> dict[str, Path]:
    """Copies of copies. No test changes them."""
    directory = tmp_path_factory.mktemp("descendants")
    found = {name: directory / name for name in ("again", "third", "shuffled", "lower", "short", "long")}
    copy_corpus(relatives["joined"], out=found["again"], shuffle=3)
    copy_corpus(found["again"], out=found["third"], shuffle=4)
    copy_corpus(relatives["grown"], out=found["shuffled"], shuffle=5)
    copy_corpus(found["shuffled"], out=found["lower"], hash_range=(0, 0.5))
    copy_corpus(relatives["grown"], out=found["short"], max_tokens=8)
    copy_corpus(relatives["grown"], out=found["long"], min_tokens=9)
    return relatives | found


TRACED = [("again", name) for name in ("grown", "newest", "other", "low", "flat", "lower")]
TRACED += [("third", name) for name in ("before", "other", "joined", "again", "shuffled", "lower")]
TRACED += [("lower", "grown"), ("lower", "newest"), ("short", "shuffled"), ("joined", "lower")]


def test_a_corpus_does_not_become_one_with_a_copy_of_its_copy(descendants, tmp_path):
    for pair in TRACED:
        for one, other in (pair, pair[::-1]):
            with pytest.raises(UsageError, match=r"holds the same documents as .*, or some of them"):
                copy_corpus([descendants[one], descendants[other]], out=tmp_path / "both")
    for name in ("grown", "other", "low"):
        with pytest.raises(UsageError, match=r"a corpus that is copied, is in .*third already, or documents of it are"):
            copy_corpus(descendants[name], out=descendants["third"], append=True)


@some("names", [("lower", "other"), ("short", "long"), ("lower", "high"), ("short", "other")], default=2)
def test_parts_and_others_become_one_with_copies_of_copies(descendants, tmp_path, names):
    both = [descendants[name] for name in names]
    done = copy_corpus(both, out=tmp_path / "both")
    assert done.manifest.num_documents == sum(len(rows(one)) for one in both)


def test_a_manifest_lists_what_is_in_the_copied_corpora_and_nothing_if_they_are_what_a_build_wrote(
    descendants, tmp_path
):
    def of(name):
        return json.loads((descendants[name] / names.MANIFEST).read_bytes())

    grown, newest, before, low = (of(name)["fingerprints"]["content"] for name in ("flat", "newest", "before", "low"))
    assert of("flat")["build"]["copied"]["corpora"] == [grown]
    assert of("flat")["build"]["copied"]["holds"] == sorted([newest, before])
    assert of("joined")["build"]["copied"]["holds"] == sorted([newest, before])
    copied = copy_corpus(descendants["low"], out=tmp_path / "part").manifest.build.copied
    assert (copied.corpora, copied.holds, copied.holds_some) == ([low], [], sorted([grown, newest, before]))
    done = copy_corpus(descendants["before"], out=tmp_path / "one-step")
    assert "holds" not in json.dumps(json.loads((Path(done.directory) / names.MANIFEST).read_bytes()))


def test_documents_given_twice_are_left_out_with_dedup(relatives, tmp_path):
    copy_corpus([relatives["joined"], relatives["grown"]], out=tmp_path / "both", dedup="exact")
    assert [row[0] for row in rows(tmp_path / "both")] == [row[0] for row in rows(relatives["joined"])]


def test_corpora_and_generations_become_one_corpus_with_all_kept_columns(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", documents_of([5, 6]), tokenizer=TINY_TOKENIZER)
    append_generation(other, documents_of([9, 1]))
    done = copy_corpus([corpus, other], out=tmp_path / "both")
    found = [(tokens, {"lang": None}, place, record) for tokens, _, place, record in rows(other)]
    assert rows(tmp_path / "both") == [*rows(corpus), *found]
    copied = done.manifest.build.copied
    with open_corpus(corpus) as first, open_corpus(other) as second:
        assert copied.corpora == [first.fingerprint, second.fingerprint]
    copy_corpus([corpus, other], out=tmp_path / "without", columns=[])
    assert rows(tmp_path / "without") == [(tokens, {}, *place) for tokens, _, *place in rows(tmp_path / "both")]


def test_columns_of_one_name_and_several_types_are_refused_unless_they_are_left_out(corpus, tmp_path):
    sources = [Source(documents=documents_of([3]), path="n.jsonl", metadata={"lang": [7], "size": [8]})]
    columns = {"lang": "int64", "size": "int64"}
    other = write_corpus(tmp_path / "other", sources=sources, columns=columns, tokenizer=TINY_TOKENIZER)
    with pytest.raises(UsageError, match="the kept column lang is string in one corpus and int64 in ") as caught:
        copy_corpus([corpus, other], out=tmp_path / "both")
    assert "--keep-columns" in caught.value.hint
    copy_corpus([corpus, other], out=tmp_path / "both", columns=["size"])
    assert [row[1] for row in rows(tmp_path / "both")] == [{"size": None}] * len(LENGTHS) + [{"size": 8}]
    with pytest.raises(UsageError, match="no corpus has a kept column 'url'"):
        copy_corpus([corpus, other], out=tmp_path / "third", columns=["url"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditions", "is_wanted", "reasons"),
    [
        (
            {"min_tokens": 10, "max_tokens": 40},
            lambda row: 10 <= len(row[0]) <= 40,
            {"over max-tokens", "under min-tokens"},
        ),
        ({"where": ["lang=fr"]}, lambda row: row[1]["lang"] == "fr", {"not copied"}),
        (
            {"source": "*b.jsonl", "where": ["lang=en"]},
            lambda row: row[2][1] == "b.jsonl" and row[1]["lang"] == "en",
            {"not copied"},
        ),
    ],
)
def test_a_copy_takes_the_documents_that_meet_all_conditions(
    corpus, tmp_path, monkeypatch, conditions, is_wanted, reasons
):
    small.shrink(monkeypatch.setattr, copy_task_tokens=1)
    wanted = [row for row in rows(corpus) if is_wanted(row)]
    assert 0 < len(wanted) < len(LENGTHS)
    done = copy_corpus(corpus, out=tmp_path / "copy", **conditions)
    assert rows(tmp_path / "copy") == wanted
    left_out = done.manifest.records.left_out
    assert left_out.keys() == {"empty", *reasons}
    assert sum(left_out[reason] for reason in reasons) == len(LENGTHS) - len(wanted)
    assert left_out["empty"] == len(LENGTHS) // 2
    # a shard per task is left, until what is left is copied again
    again = copy_corpus(tmp_path / "copy", out=tmp_path / "again", shard_tokens=100_000)
    assert again.manifest.num_shards < done.manifest.num_shards
    assert rows(tmp_path / "again") == wanted


def test_a_condition_may_be_about_a_column_that_is_not_copied(corpus, tmp_path):
    copy_corpus(corpus, out=tmp_path / "copy", where=["lang=en"], columns=[])
    wanted = [(tokens, {}, *place) for tokens, kept, *place in rows(corpus) if kept["lang"] == "en"]
    assert rows(tmp_path / "copy") == wanted


def test_ranges_of_hashes_divide_a_corpus_and_keep_equal_documents_together(corpus, tmp_path):
    parts = []
    for number, hashes in enumerate([(0.0, 0.3), (0.3, 0.9), (0.9, 1.0)]):
        copy_corpus(corpus, out=tmp_path / str(number), hash_range=hashes)
        parts.append({row[0] for row in rows(tmp_path / str(number))})
    everything = {row[0] for row in rows(corpus)}
    assert sum(map(len, parts)) == len(everything)
    assert parts[0] | parts[1] | parts[2] == everything
    assert len(parts[0]) < len(parts[1])


# a random order


@pytest.mark.slow
def test_a_shuffled_copy_is_a_permutation_that_the_seed_alone_decides(corpus, tmp_path, monkeypatch):
    result = copy_corpus(corpus, out=tmp_path / "one", shuffle=17)
    assert result.tokens_written == result.manifest.num_tokens
    copy_corpus(corpus, out=tmp_path / "large", shard_tokens=100_000)
    small.shrink(
        monkeypatch.setattr, copy_bucket_bytes=500, copy_deal_bytes=900, copy_fan_out=3, copy_task_tokens=1_000
    )
    assert shuffle.deal_levels(20_000).depth > 2
    copy_corpus(corpus, out=tmp_path / "many", shuffle=17)
    copy_corpus(tmp_path / "large", out=tmp_path / "other shards", shuffle=17)
    copy_corpus(corpus, out=tmp_path / "other", shuffle=18)
    found = {name: rows(tmp_path / name) for name in ("one", "many", "other shards", "other")}
    assert found["many"] == found["one"] == found["other shards"] != found["other"]
    copy_corpus(corpus, out=tmp_path / "part", shuffle=17, max_tokens=40)
    assert rows(tmp_path / "part") == [row for row in found["one"] if len(row[0]) <= 40]
    before = rows(corpus)
    key = str
    assert sorted(found["one"], key=key) == sorted(found["other"], key=key) == sorted(before, key=key)
    assert found["one"] != before


def test_the_keys_of_a_shuffle_are_those_of_splitmix64():
    """The first numbers from seed 0, as its authors print them. Other keys are another order of every shuffled copy."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert shuffle.random_keys(0, np.arange(4)).tolist() == published
    assert np.argsort(shuffle.random_keys(17, np.arange(8))).tolist() == [3, 6, 0, 2, 5, 7, 4, 1]


def test_a_shuffle_moves_documents_of_both_halves_to_all_places():
    keys = shuffle.random_keys(17, np.arange(10_000))
    order = np.argsort(keys)
    shares = [(part < 5_000).mean() for part in np.array_split(order, 10)]
    assert 0.44 < min(shares) <= max(shares) < 0.56


@settings(max_examples=examples(20))
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    seed=st.integers(0, 2**64 - 1),
    bucket_bytes=st.integers(1_000, 20_000),
    deal_bytes=st.integers(1, 400),
    fan_out=st.integers(2, 5),
    slice_tokens=st.integers(20, 200),
    short_tokens=st.sampled_from([0, 20, 100]),
)
def test_a_shuffled_copy_has_every_document_once_in_the_order_of_its_keys(
    lengths, seed, bucket_bytes, deal_bytes, fan_out, slice_tokens, short_tokens, tmp_path_factory
):
    place = tmp_path_factory.mktemp("shuffled")
    with pytest.MonkeyPatch.context() as patch:
        sizes = {
            "copy_bucket_bytes": bucket_bytes,
            "copy_deal_bytes": deal_bytes,
            "copy_fan_out": fan_out,
            "copy_task_tokens": 50,
            "copy_slice_tokens": slice_tokens,
        }
        small.shrink(patch.setattr, **sizes, short_tokens=short_tokens)
        sources = [
            Source(
                documents=documents_of(lengths),
                path="a.jsonl",
                metadata={"lang": [f"of {number}" for number in range(len(lengths))]},
            )
        ]
        columns = {"lang": "string"}
        write_corpus(place / "corpus", sources=sources, columns=columns, tokenizer=TINY_TOKENIZER, shard_tokens=90)
        copy_corpus(place / "corpus", out=place / "copy", shuffle=seed, shard_tokens=60)
    before = rows(place / "corpus")
    order = np.argsort(shuffle.random_keys(seed, np.arange(len(lengths))))
    assert rows(place / "copy") == [before[number] for number in order.tolist()]


def test_documents_are_dealt_when_there_are_enough_of_them_and_no_sooner(monkeypatch):
    documents = pa.array([list(range(100))], pa.large_list(pa.uint16()))
    rows = pa.record_batch({shuffle.TOKENS: documents, shuffle._KEY: pa.array([7], pa.uint64())})
    monkeypatch.setattr(shuffle, "DEAL_BYTES", 4 * rows.nbytes)
    dealt = shuffle.DealtWriter(io.BytesIO(), "dealt", shuffle.Levels(fan_out=2, depth=1), 0, first=0)
    for _ in range(13):
        dealt.add(rows)
    assert dealt.finish()[1] == 4, "rounds"


@given(data=st.data(), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_any_changed_byte_of_dealt_documents_is_reported_with_the_file(data, lengths, tmp_path_factory):
    store, levels = open_store(tmp_path_factory.mktemp("dealt")), shuffle.Levels(fan_out=3, depth=1)
    documents = pa.array([[7] * length for length in lengths], pa.large_list(pa.uint16()))
    keys = shuffle.random_keys(1, np.arange(len(lengths)))
    rows = pa.record_batch({shuffle.TOKENS: documents, shuffle._KEY: pa.array(keys, pa.uint64())})
    with written(store, "dealt") as file:
        dealt = shuffle.DealtWriter(file, "dealt", levels, 0, first=0)
        for start in range(0, len(lengths), 8):
            dealt.add(rows[start : start + 8])
            dealt._deal()
        num_bytes, rounds = dealt.finish()

    def read():
        file = shuffle.Dealt(name="dealt", num_bytes=num_bytes, rounds=rounds)
        shuffle.bucket_tokens(store, file, 3)
        return [part for bucket in range(3) for part in shuffle.read_bucket(store, [file], bucket, 3, rows.schema)]

    assert sum(map(len, read())) == len(lengths)
    content = bytearray(store.get("dealt"))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    store.put("dealt", bytes(content))
    with pytest.raises(BuildError, match=r"dealt is damaged"):
        read()


@given(tokens=st.lists(st.integers(0, 50), max_size=40), most=st.integers(1, 60))
def test_groups_hold_every_item_once_and_no_more_tokens_than_they_may(tokens, most):
    found = list(planning.groups(tokens, most))
    ends = [stop for _, stop in found]
    assert [start for start, _ in found] == [0, *ends[:-1]] if found else not any(tokens)
    assert all(sum(tokens[start:stop]) <= most or np.count_nonzero(tokens[start:stop]) == 1 for start, stop in found)
    assert not found or not any(tokens[ends[-1] :])


@pytest.mark.soak
def test_the_memory_of_a_shuffle_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    """The largest corpus that one level deals, and one four times as large."""
    small.shrink(
        monkeypatch.setattr, copy_bucket_bytes=65_536, copy_deal_bytes=65_536, copy_fan_out=4, copy_task_tokens=65_536
    )
    assert [shuffle.deal_levels(size).depth for size in (4 * 65_536, 16 * 65_536)] == [1, 2]
    monkeypatch.setattr(writer, "MAX_BATCH_TOKENS", 4_096)
    peaks = []
    for times in (1, 4):
        place = tmp_path / str(times)
        write_corpus(place, [[1] * 1_007 + [0]] * (128 * times), tokenizer=TINY_TOKENIZER, shard_tokens=65_536)
        before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
        pa.set_memory_pool(pool)
        tracemalloc.start()
        try:
            copy_corpus(place, out=tmp_path / f"{times}-shuffled", shuffle=1)
            peaks.append(tracemalloc.get_traced_memory()[1] + pool.max_memory())
        finally:
            tracemalloc.stop()
            pa.set_memory_pool(before)
    assert peaks[1] < 1.4 * peaks[0]


@pytest.mark.soak
def test_a_shuffled_copy_of_a_corpus_that_is_sorted_by_topic_has_even_batches(tmp_path):
    """The variance of topics between batches; that of the sorted corpus depends on its windows, which are an eighth."""
    rng = np.random.default_rng(0)
    lengths, topics = rng.integers(64, 448, 8_000), np.sort(rng.integers(1, 4, 8_000))
    documents = [[topic] * (length - 1) + [0] for length, topic in zip(lengths.tolist(), topics.tolist(), strict=True)]
    write_corpus(tmp_path / "sorted", documents, tokenizer=TINY_TOKENIZER)
    copy_corpus(tmp_path / "sorted", out=tmp_path / "shuffled", shuffle=17)
    found = {}
    for name in ("sorted", "shuffled"):
        sizes = {"seq_len": 256, "seed": 3, "block_tokens": 8_192, "window_blocks": 32, "allow_small_blocks": True}
        with NumpyLoader(StreamPlan({"c": str(tmp_path / name)}, epochs=1, **sizes), global_batch_size=32) as loader:
            counts = np.array([np.bincount(batch["input_ids"].ravel(), minlength=4)[1:4] for batch in loader])
        found[name] = np.var(counts / counts.sum(axis=1, keepdims=True), axis=0).sum()
    assert found["sorted"] > 1.3 * found["shuffled"]


# all or nothing


@pytest.mark.parametrize("seed", [None, 1])
def test_a_flipped_token_stops_the_copy_which_goes_on_when_the_shard_is_whole_again(
    corpus, tmp_path, monkeypatch, seed
):
    small.shrink(monkeypatch.setattr, copy_task_tokens=1)
    copy_corpus(corpus, out=tmp_path / "expected", shuffle=seed)
    with open_corpus(corpus) as opened:
        info, place = opened.shards[2], opened.shards.batch_places(2)[0]
    content = bytearray((corpus / info.name).read_bytes())
    content[place.values_position] ^= 1
    (corpus / info.name).write_bytes(content)
    with pytest.raises(DamagedCorpusError, match=info.name):
        copy_corpus(corpus, out=tmp_path / "copy", shuffle=seed)
    with pytest.raises(UnfinishedCorpusError):
        open_corpus(tmp_path / "copy")
    status = read_status(tmp_path / "copy")
    assert (status.state, status.stage, status.tasks_done) == ("unfinished", "dealing" if seed else "writing", 2)
    assert ("--shuffle" in status.command) == (seed is not None)
    content[place.values_position] ^= 1
    (corpus / info.name).write_bytes(content)
    copy_corpus(corpus, out=tmp_path / "copy", shuffle=seed)
    assert files(tmp_path / "copy") == files(tmp_path / "expected")


@pytest.mark.parametrize(
    "name", ["shard-00-0000000-000000-0000.arrow", "shards.arrow", "sources.arrow", "tokenizer.json"]
)
def test_a_flipped_byte_that_still_reads_well_is_not_copied(corpus, tmp_path, name):
    content = (corpus / name).read_bytes()
    old, new = (content[-1:], b" ")
    if name.startswith("shard-"):
        old, new = b"enfr", b"frfr"
    elif name == "sources.arrow":
        old, new = b"b.jsonl", b"c.jsonl"
    elif name == "shards.arrow":
        with open_corpus(corpus) as opened:
            records = opened.shards.runs(len(opened.shards) - 1).record.astype("<i8").tobytes()
        old, new = records, bytes([records[0] ^ 1]) + records[1:]
    assert old in content
    (corpus / name).write_bytes(new.join(content.rsplit(old, 1)))
    with pytest.raises(DamagedCorpusError, match=f"{name} has SHA-256"):
        copy_corpus(corpus, out=tmp_path / "copy")


S3 = [pytest.param(name, marks=pytest.mark.remote) for name in ("moto", "seaweedfs")]


@pytest.fixture(params=["memory", *S3])
def bucket(request, tmp_path, monkeypatch) -> str:
    """A new location in an object store."""
    if request.param != "memory":
        return request.getfixturevalue(request.param)
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    return f"{SCHEME}://{tmp_path.name}"


@pytest.mark.slow
def test_a_copy_into_a_bucket_and_back_is_the_corpus(corpus, tmp_path, monkeypatch, bucket):
    small.shrink(monkeypatch.setattr, copy_bucket_bytes=2_000, copy_fan_out=4, copy_task_tokens=1)
    copy_corpus(corpus, out=f"{bucket}/copy")
    copy_corpus(f"{bucket}/copy", out=tmp_path / "back")
    assert rows(tmp_path / "back") == rows(f"{bucket}/copy") == rows(corpus)
    assert not copy_corpus(corpus, out=f"{bucket}/copy").is_new
    copy_corpus(f"{bucket}/copy", out=f"{bucket}/shuffled", shuffle=1)
    copy_corpus(corpus, out=tmp_path / "shuffled", shuffle=1)
    assert rows(f"{bucket}/shuffled") == rows(tmp_path / "shuffled")
    copy_corpus(f"{bucket}/copy", out=f"{bucket}/part", max_tokens=20)
    assert rows(f"{bucket}/part") == [row for row in rows(corpus) if len(row[0]) <= 20]


def test_a_corpus_whose_tokenizer_is_a_folder_is_damaged(corpus, tmp_path):
    (corpus / names.TOKENIZER).unlink()
    (corpus / names.TOKENIZER).mkdir()
    with pytest.raises(DamagedCorpusError, match=r"tokenizer\.json cannot be read: Is a directory"):
        copy_corpus(corpus, out=tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_documents_of_a_source_that_does_not_exist_are_damage(corpus, tmp_path):
    change_table(corpus, names.SHARD_TABLE, lambda rows: {**rows, "run_source": [[255] for _ in rows["run_source"]]})
    change_table(
        corpus,
        names.SHARD_TABLE,
        lambda rows: {**rows, **{name: [each[:1] for each in rows[name]] for name in ("run_document", "run_record")}},
    )
    with pytest.raises(
        DamagedCorpusError, match=r"shards\.arrow: documents of shard-.* come from the sources 255 to 255"
    ):
        copy_corpus([corpus], out=tmp_path / "copy")


def test_a_complete_copy_says_that_nothing_was_written(corpus, tmp_path, capsys):
    command = ["copy", str(corpus), "--out", str(tmp_path / "copy")]
    assert run(command) == 0
    assert "\ntime  " in capsys.readouterr().out
    assert run(command) == 0
    again = capsys.readouterr().out
    assert again.startswith(f"nothing to do: {tmp_path / 'copy'} is complete\n")
    assert "\ntime  " not in again
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_new"] is False


def test_a_copy_replaces_nothing_without_force_and_never_what_it_reads(corpus, tmp_path):
    out = tmp_path / "copy"
    copy_corpus(corpus, out=out)
    with pytest.raises(ConfigurationChangedError, match="--max-tokens was not given, now 50; --shuffle was not"):
        copy_corpus(corpus, out=out, shuffle=3, max_tokens=50)
    assert copy_corpus(corpus, out=out, shuffle=3, force=True).is_new
    for place in (corpus, corpus / "deep" / "inside", corpus.parent):
        with pytest.raises(UsageError, match=r"which the copy reads|lies inside the corpus"):
            copy_corpus(corpus, out=place, force=True)
    with pytest.raises(UsageError, match="lies inside the corpus"):
        copy_corpus(corpus, out=out / "generation-01")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        copy_corpus(corpus, out=tmp_path / "full", force=True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--where", "lang"], "not a condition"),
        (["--where", "lang<=en"], "has the sign <="),
        (["--where", "=en"], "not a condition"),
        (["--where", "country=en"], "no kept column 'country'"),
        (["--hash-range", "0.9:0.1"], "not a part of 0:1"),
        (["--source", "nothing"], "no source is called nothing"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(corpus, tmp_path, capsys, options, problem):
    assert run(["copy", str(corpus), "--out", str(tmp_path / "copy"), *options]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "copy").exists() or not any((tmp_path / "copy").iterdir())


def test_conditions_that_no_document_meets_are_named_and_leave_no_corpus(corpus, tmp_path, capsys):
    command = ["copy", str(corpus), "--out", str(tmp_path / "copy")]
    assert run([*command, "--min-tokens", "1M"]) == 1
    problem = "error: no document was written: 180 records read, 60 empty, 120 under min-tokens"
    hint = "hint: give other conditions, or leave them out, and start over with --force"
    assert capsys.readouterr().err.splitlines()[-2:] == [problem, hint]
    assert run([*command, "--min-tokens", "1", "--force"]) == 0
    assert rows(tmp_path / "copy") == rows(corpus)


def test_the_command_says_what_it_took(corpus, tmp_path, capsys):
    conditions = ["--where", "lang=de", "--source", "*b.jsonl", "--hash-range", "0:0.9", "--shuffle", "17"]
    assert run(["copy", str(corpus), "--out", str(tmp_path / "copy"), *conditions, "-v"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = rows(tmp_path / "copy")
    assert f"{len(found)} written + {180 - len(found)} left out ({120 - len(found)} not copied, 60 empty)" in shown
    taken = "those with lang=de, those of sources *b.jsonl, those with hashes in 0:0.9, shuffled with seed 17"
    assert f"settings documents of 1 corpus, {taken}, shards of at most 400 tokens records" in shown
    assert run(["copy", str(corpus), "--out", str(tmp_path / "all"), "--json"]) == 0
    with open_corpus(corpus) as opened:
        (found,) = json.loads(capsys.readouterr().out)["corpora"]
        assert found["manifest"]["fingerprints"]["content"] == opened.fingerprint
