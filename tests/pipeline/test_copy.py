"""A copy holds the chosen documents, with their sources and records, and is a corpus like any other."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, Source, append_generation, documents_of, write_corpus
from tests.examples import examples
from tests.pipeline.places import StoppedError
from tokshard import copy_corpus as copy_by_processes
from tokshard import open_corpus, select_corpus
from tokshard.cli.main import run
from tokshard.errors import UnfinishedCorpusError, UsageError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline.status import read_status
from tokshard.pipeline.tasks import planning, shuffle

LENGTHS = [1 + 7 * index % 90 for index in range(120)]
LANGUAGES = ["en", "fr", None, "de"]


def corpus_of(directory: Path, lengths: Sequence[int] = LENGTHS, languages: Sequence[str | None] = LANGUAGES) -> Path:
    """Two sources, the second of which left records out, with a column that repeats; shards of several batches."""
    half = len(lengths) // 2
    documents = documents_of(lengths)
    kept = [languages[number % len(languages)] for number in range(len(lengths))]
    sources = [
        Source(documents=documents[:half], path="a.jsonl", metadata={"lang": kept[:half]}),
        Source(
            documents=documents[half:],
            path="b.jsonl",
            records=[2 * number for number in range(len(lengths) - half)],
            metadata={"lang": kept[half:]},
            left_out={"empty": len(lengths) - half},
        ),
    ]
    settings: dict[str, Any] = {"columns": {"lang": "string"}, "tokenizer": TINY_TOKENIZER, "shard_tokens": 400}
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, batch_tokens=150)
        return write_corpus(directory, sources=sources, **settings)


def copy_corpus(given: Any, *, out: Path | str, **options: Any) -> Any:
    """Copy in this process, unless workers are asked for: starting them takes longer than these copies."""
    return copy_by_processes(given, out=out, **{"workers": 1, **options})


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpus_of(tmp_path / "corpus")


Row = tuple[tuple[int, ...], dict[str, Any], tuple[str, str], int]


def rows(directory: Path | str) -> list[Row]:
    """Tokens, kept columns and origin of every document of an intact corpus."""
    report = verify_corpus(str(directory))
    assert report.is_ok, report.problems
    with open_corpus(directory) as opened:
        sources = [(opened.manifest.arguments[one.argument], one.path) for one in opened.sources()]
        assert all(one.records_read == one.documents + sum(one.left_out.values()) for one in opened.sources())
        return [
            (tuple(opened[index].tolist()), opened.metadata(index), sources[place.source], place.record)
            for index in range(len(opened))
            for place in [opened.provenance(index)]
        ]


def left_out(directory: Path) -> dict[str, int]:
    with open_corpus(directory) as opened:
        return dict(opened.manifest.records.left_out)


# any options


OPTIONS: dict[str, Any] = {
    "max_documents": st.integers(1, 30),
    "dedup": st.just("exact"),
    "shuffle": st.integers(0, 2**64 - 1),
}


@pytest.mark.parametrize("is_of_two", [False, True], ids=["of one corpus", "of two corpora"])
@settings(max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=60),
    repeats=st.lists(st.integers(0, 59), max_size=10),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    sizes=st.fixed_dictionaries(
        {
            "copy_bucket_bytes": st.integers(1_000, 20_000),
            "copy_deal_bytes": st.integers(1, 400),
            "copy_fan_out": st.integers(2, 5),
            "copy_task_tokens": st.sampled_from([1, 50, 1_000]),
            "copy_slice_tokens": st.integers(1, 200),
            "short_tokens": st.sampled_from([0, 20, 100]),
        }
    ),
)
@example(lengths=[*range(1, 13)], repeats=[], options={"shuffle": 7}, sizes={"copy_fan_out": 3})
def test_a_copy_with_any_options_holds_the_documents_once(
    lengths, repeats, options, is_of_two, sizes, tmp_path_factory
):
    """A shuffled one in the order of the keys, which the seed and the number of a document in all corpora decide."""
    place = tmp_path_factory.mktemp("copied")
    documents = documents_of(lengths)
    documents += [documents[number % len(documents)] for number in repeats]
    languages = [LANGUAGES[number % 3] for number in range(len(documents))]
    half = len(lengths) // 2
    assume(not is_of_two or documents[:half] != documents[half:])
    sources = [
        Source(documents=documents[start:stop], path=name, metadata={"lang": languages[start:stop]})
        for name, start, stop in (("a.jsonl", 0, half), ("b.jsonl", half, len(documents)))
    ]
    settings = {"columns": {"lang": "string"}, "tokenizer": TINY_TOKENIZER, "shard_tokens": 90}
    parts = [[source] for source in sources] if is_of_two else [sources]
    given = [write_corpus(place / str(number), sources=part, **settings) for number, part in enumerate(parts)]
    before = [row for corpus in given for row in rows(corpus)]
    taken = list(range(len(before)))
    if "dedup" in options:
        taken = [*{before[number][0]: number for number in reversed(taken)}.values()][::-1]
    taken = sorted(taken)[: options.get("max_documents")]
    if "shuffle" in options:
        keys = shuffle.random_keys(options["shuffle"], np.arange(len(before)))
        taken.sort(key=keys.__getitem__)
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, **{**small.MERGES, **sizes})
        copy_corpus(given, out=place / "copy", shard_tokens=60, **options)
    assert rows(place / "copy") == [before[number] for number in taken]


def test_the_keys_of_a_shuffle_are_those_of_splitmix64():
    """The first numbers from seed 0, as its authors print them. Other keys are another order of every shuffled copy."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert shuffle.random_keys(0, np.arange(4)).tolist() == published
    assert np.argsort(shuffle.random_keys(17, np.arange(8))).tolist() == [3, 6, 0, 2, 5, 7, 4, 1]


@pytest.mark.parametrize("seed", [None, 17])
def test_a_split_divides_a_copy_and_keeps_the_order_of_each_part(corpus, tmp_path, seed):
    copy_corpus(corpus, out=tmp_path / "copy", validation_fraction=0.3, shuffle=seed)
    copy_corpus(corpus, out=tmp_path / "all", shuffle=seed)
    train, validation = (rows(tmp_path / "copy" / split) for split in (names.TRAIN, names.VALIDATION))
    assert 10 < len(validation) < 60
    held = {row[0] for row in validation}
    assert validation == [row for row in rows(tmp_path / "all") if row[0] in held]
    assert train == [row for row in rows(tmp_path / "all") if row[0] not in held]
    again = copy_corpus(tmp_path / "copy" / names.TRAIN, out=tmp_path / "again", validation_fraction=0.5, shuffle=seed)
    elsewhere = {
        "in an earlier split": len(validation),
        "in the validation split": again.corpora[1].manifest.num_documents,
    }
    assert left_out(tmp_path / "again" / names.TRAIN) == left_out(tmp_path / "all") | elsewhere
    assert all(verify_corpus(one.directory).is_ok for one in again.corpora)


def test_a_task_of_a_copy_reads_as_much_as_one_of_its_shards_holds_if_that_is_more_than_a_task(tmp_path, monkeypatch):
    write_corpus(tmp_path / "corpus", documents_of([20] * 12), tokenizer=TINY_TOKENIZER, shard_tokens=40)
    small.shrink(monkeypatch.setattr, copy_task_tokens=1)
    copy_corpus(tmp_path / "corpus", out=tmp_path / "copy", shard_tokens=60)
    with open_corpus(tmp_path / "copy") as copy:
        assert [shard.num_tokens for shard in copy.shards] == [40] * 6


@given(tokens=st.lists(st.integers(0, 50), max_size=40), most=st.integers(1, 60))
def test_groups_hold_every_item_once_and_no_more_tokens_than_they_may(tokens, most):
    found = list(planning.groups(tokens, most))
    assert [index for start, stop in found for index in range(start, stop)] == list(range(len(tokens)))
    assert all(start < stop for start, stop in found)
    assert all(sum(tokens[start:stop]) <= most or np.count_nonzero(tokens[start:stop]) == 1 for start, stop in found)


@pytest.mark.soak
def test_the_memory_of_a_shuffle_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    """The largest corpus that one level deals, and one four times as large."""
    sizes = dict.fromkeys(("copy_bucket_bytes", "copy_deal_bytes", "copy_task_tokens"), 65_536)
    small.shrink(monkeypatch.setattr, **sizes, copy_fan_out=4, batch_tokens=4_096)
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


# what it is of


@pytest.fixture(scope="module")
def relatives(tmp_path_factory) -> dict[str, Path]:
    """A corpus of two generations, the corpus before it grew, another one, copies of them, and copies of copies."""
    directory = tmp_path_factory.mktemp("relatives")
    found = {name: directory / name for name in ("grown", "before", "other")}
    for name in ("grown", "before"):
        write_corpus(found[name], documents_of([5, 6, 7, 8, 9, 10, 11, 12]), tokenizer=TINY_TOKENIZER)
    append_generation(found["grown"], documents_of([13, 14]))
    write_corpus(found["other"], documents_of([15, 16]), tokenizer=TINY_TOKENIZER)
    found["newest"] = found["grown"] / "generation-01"
    copies: dict[str, tuple[str, dict[str, Any]]] = {
        "flat": ("grown", {}),
        "joined": ("grown other", {}),
        "low": ("grown", {"hash_range": (0, 0.5)}),
        "high": ("grown", {"hash_range": (0.5, 1)}),
        "again": ("joined", {"shuffle": 3}),
        "third": ("again", {"shuffle": 4}),
        "shuffled": ("grown", {"shuffle": 5}),
        "lower": ("low", {"shuffle": 6}),
        "short": ("grown", {"max_tokens": 8}),
        "long": ("grown", {"min_tokens": 9}),
    }
    for name, (sources, options) in copies.items():
        found[name] = directory / name
        if sources != "grown" or "shuffle" in options or not options:
            copy_corpus([found[each] for each in sources.split()], out=found[name], **options)
        else:
            select_corpus(found[sources], out=found[name], workers=1, **options)
    return found


SHARING = {
    "grown": "before newest flat joined low",
    "joined": "flat other low lower",
    "flat": "high",
    "again": "grown newest other low flat lower",
    "third": "before other joined again shuffled lower",
    "lower": "grown newest",
    "short": "shuffled",
}


@pytest.mark.parametrize("name", SHARING)
def test_a_corpus_does_not_become_one_with_its_generations_and_copies(relatives, tmp_path, name):
    for other in SHARING[name].split():
        for pair in ([relatives[name], relatives[other]], [relatives[other], relatives[name]]):
            with pytest.raises(UsageError, match=r"holds the same documents as .*, or some of them"):
                copy_corpus(pair, out=tmp_path / "both")
            if "generation" not in str(pair) and pair[0] != relatives["short"]:  # which has conditions of its own
                with pytest.raises(UsageError, match=rf"is in {pair[0]} already, or documents of it are"):
                    copy_corpus(pair[1], out=pair[0], append=True)
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize(
    "pair", ["low high", "grown other", "before newest", "lower other", "short long", "lower high"]
)
def test_parts_of_a_corpus_that_share_no_document_become_one(relatives, tmp_path, pair):
    first, second = (relatives[name] for name in pair.split())
    done = copy_corpus([first, second], out=tmp_path / "both")
    assert rows(tmp_path / "both") == rows(first) + rows(second)
    copy_corpus(first, out=tmp_path / "grows")
    copy_corpus(second, out=tmp_path / "grows", append=True)
    assert not copy_corpus(second, out=tmp_path / "grows", append=True).is_new
    with open_corpus(tmp_path / "grows") as grown:
        assert (grown.num_generations, grown.fingerprint) == (2, done.manifest.fingerprints.content)


def test_a_copy_may_leave_out_a_shard_that_is_damaged(corpus, tmp_path):
    with open_corpus(corpus) as opened:
        info = opened.shards[2]
        first, count = int(opened.shards.first_documents[2]), info.num_documents
        first_token = opened.shards.batch_places(2)[0].values_position
    expected, shard = rows(corpus), corpus / info.name
    content = bytearray(shard.read_bytes())
    content[first_token] ^= 1
    shard.write_bytes(content)
    copy_corpus(corpus, out=tmp_path / "copy", on_bad_source="skip")
    assert rows(tmp_path / "copy") == expected[:first] + expected[first + count :]
    assert left_out(tmp_path / "copy")["damaged input"] == count
    (reject,) = [json.loads(line) for line in (tmp_path / "copy" / names.REJECTS).read_text().splitlines()]
    assert (reject["source"], reject["reason"]) == (f"{corpus}/{info.name}", "damaged input")
    # a limit in that shard does not hide the damage before it
    copy_corpus(corpus, out=tmp_path / "limited", on_bad_source="skip", max_documents=first + count - 1)
    assert rows(tmp_path / "limited") == rows(tmp_path / "copy")[: first + count - 1]


@pytest.mark.slow
def test_a_copy_into_a_bucket_and_back_is_the_corpus(corpus, tmp_path, monkeypatch, bucket):
    small.shrink(monkeypatch.setattr, copy_bucket_bytes=2_000, copy_fan_out=4, copy_task_tokens=1)
    copy_corpus(corpus, out=f"{bucket}/copy")
    assert not copy_corpus(corpus, out=f"{bucket}/copy").is_new
    copy_corpus(f"{bucket}/copy", out=tmp_path / "back")
    assert rows(tmp_path / "back") == rows(f"{bucket}/copy") == rows(corpus)
    copy_corpus(f"{bucket}/copy", out=f"{bucket}/shuffled", shuffle=1)
    copy_corpus(corpus, out=tmp_path / "shuffled", shuffle=1)
    assert rows(f"{bucket}/shuffled") == rows(tmp_path / "shuffled")


# as a command


@pytest.mark.parametrize("seed", [None, 17])
def test_the_status_of_a_copy_that_was_stopped_names_the_command_that_continues_it(corpus, tmp_path, capsys, seed):
    options: dict[str, Any] = {"validation_fraction": None, "columns": ["lang"], "max_documents": 900, "shuffle": seed}
    with small.stopped_before_the_corpus(StoppedError()), pytest.raises(StoppedError):
        copy_corpus(corpus, out=tmp_path / "copy", **options)
    with pytest.raises(UnfinishedCorpusError):
        open_corpus(tmp_path / "copy")
    copy_corpus(corpus, out=tmp_path / "expected", **options)
    expected = rows(tmp_path / "expected")
    status = read_status(tmp_path / "copy")
    assert (status.state, status.stage, status.documents) == ("unfinished", "writing", len(expected))
    assert 0.99 * (seed is None) < status.bytes_done / status.total_bytes <= 1
    assert run(["status", str(tmp_path / "copy")]) == 0
    assert "{'" not in capsys.readouterr().out
    assert run(list(status.command)[1:]) == 0
    assert rows(tmp_path / "copy") == expected
