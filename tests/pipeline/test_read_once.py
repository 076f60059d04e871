"""Standard input and the iterables of a program, which the build spools: a file of its workspace from then on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract import small
from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.inputs import jsonl, patch_chunk_bytes, texts_of, write_byte_tokenizer
from tokshard import Corpus, build_corpus, open_corpus
from tokshard.cli.main import run
from tokshard.errors import BadRecordError, ConfigurationChangedError, SourceError, UsageError
from tokshard.format import names
from tokshard.pipeline import spool
from tokshard.pipeline.progress import Note, StageStarted

RECORDS = [{"text": f"document {number}", "pad": "x" * 1_500} for number in range(3_000)]
TEXTS = [record["text"] for record in RECORDS]
BOTH = pytest.mark.parametrize("kind", ["jsonl", "iterable"])
SPOOL = Path("out", names.WORK, "spool")


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_byte_tokenizer(tmp_path / ".tokenizer")
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def standard_input(pieces: Iterable[bytes]) -> Iterator[None]:
    """A pipe that brings this, and waits for its reader."""
    reading, writing = os.pipe()
    before = os.dup(0)
    os.dup2(reading, 0)
    os.close(reading)
    writer = threading.Thread(target=_write, args=(writing, pieces))
    writer.start()
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)
        writer.join()


def _write(descriptor: int, pieces: Iterable[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        for piece in pieces:
            pipe.write(piece)


def build(sources: Any, **options: Any) -> Any:
    return build_corpus(sources, **{"tokenizer": ".tokenizer", "out": "out", "workers": 1, **options})


def build_once(kind: str, records: Iterable[Any], *, build: Callable[..., Any] = build, **options: Any) -> Any:
    """Build records: of an iterable, or of standard input in a format."""
    if kind == "iterable":
        return build([iter(records)], **options)
    with standard_input(jsonl([record]) for record in records):
        return build("-", format=kind, **options)


def built(*arguments: Any, **options: Any) -> Corpus:
    build_once(*arguments, **options)
    assert not Path("out", names.WORK).exists()
    return open_corpus("out")


@BOTH
def test_what_is_read_once_gives_the_same_corpus_for_any_number_of_workers(kind, monkeypatch):
    small.shrink(monkeypatch.setattr, segment_tasks=1)
    reports: list[Any] = []
    hashes = []
    for workers in (3, 1):
        corpus = built(kind, RECORDS, task_bytes=1 << 20, workers=workers, force=True, observer=reports.append)
        hashes.append([shard.sha256 for shard in corpus.shards])
    assert hashes[0] == hashes[1]
    assert texts_of(corpus) == TEXTS
    name = "<list_iterator>" if kind == "iterable" else "stdin"
    assert (corpus.manifest.arguments, corpus.sources()[0].path) == ([name], "")
    assert corpus.provenance(2_999).record == 3_000
    said = name.replace("stdin", "standard input")
    assert reports[0] == Note(
        f"{said} is first copied into --out, compressed to about a fifth to a third; "
        "the copy goes when the build is done"
    )
    (total,) = {report.total_bytes for report in reports if isinstance(report, StageStarted) and report.tasks}
    assert total == corpus.sources()[0].num_bytes
    if kind == "jsonl":  # others are cut by their text, of which there is little
        assert total == len(jsonl(RECORDS))
        assert len({shard.name[:24] for shard in corpus.shards}) >= 4


@BOTH
@pytest.mark.parametrize("dedup", ["none", "exact"])
def test_an_append_says_that_it_cannot_know_what_it_has_appended_before(kind, dedup):
    reports: list[Any] = []
    built(kind, RECORDS[:2], dedup=dedup)
    built(kind, RECORDS[2:4], dedup=dedup, append=True, observer=reports.append)
    notes = [report.text for report in reports if isinstance(report, Note)]
    assert any("was appended before" in note for note in notes) == (dedup == "none")


# limits


def small_chunks(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """Of what is spooled, too."""
    patch_chunk_bytes(monkeypatch, chunk_bytes)
    monkeypatch.setattr(spool, "CHUNK_BYTES", chunk_bytes)


def endless(taken: list[int]) -> Iterator[dict[str, Any]]:
    """Of a hundred records, one is good and unlike the ones before."""
    for number in itertools.count():
        taken.append(number)
        yield {"text": f"{number}" if number % 100 == 0 else 7 if number % 2 else "0"}


@BOTH
@pytest.mark.parametrize(("limit", "most"), [(5, 2_058), (40, 4_256)])
def test_of_an_endless_source_little_more_is_read_than_a_limit_takes(kind, limit, most, monkeypatch):
    small_chunks(monkeypatch, 1_024)
    taken: list[int] = []
    options: dict[str, Any] = {"dedup": "exact", "on_bad_record": "skip", "max_documents": limit, "task_bytes": 1_024}
    corpus = built(kind, endless(taken), **options)
    assert texts_of(corpus) == [str(100 * number) for number in range(limit)]
    assert len(taken) <= most + (0 if kind == "iterable" else 8_000)  # that fit into the pipe and its buffers
    assert list(corpus.manifest.records.left_out) == ["duplicate", "text is not a string"]


@BOTH
def test_a_source_that_was_cut_is_read_on_when_the_limit_goes(kind, monkeypatch):
    small_chunks(monkeypatch, 64)
    with pytest.raises(BadRecordError):
        build_once(kind, [{"text": 7}, *RECORDS], max_documents=1)
    assert SPOOL.is_dir()
    corpus = built(kind, [{"text": 7}, *RECORDS], on_bad_record="skip", observer=(reports := []).append)
    assert texts_of(corpus) == TEXTS
    assert any("continues with" in report.text for report in reports if isinstance(report, Note))


# builds that stop and go on


def stop_while_it_encodes(kind: str, records: Sequence[Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Stop a build behind some receipts, at its last record, which is bad."""
    patch_chunk_bytes(monkeypatch, 64)
    place = {"jsonl": "-, line 41: text is not", "iterable": "<list_iterator>, record 41: text is not"}[kind]
    with pytest.raises(BadRecordError, match=place):
        build_once(kind, [*records, {"text": 7}], task_bytes=64, **options)


@BOTH
@pytest.mark.parametrize("limit", [None, 2_000])
@pytest.mark.parametrize("records", [[], [*RECORDS[:40], {"text": 7}]], ids=["nothing", "the same"])
def test_a_build_that_stopped_goes_on_with_what_it_has_read(kind, limit, records, monkeypatch, capsys):
    stop_while_it_encodes(kind, RECORDS[:40], monkeypatch, max_documents=limit)
    assert run(["status", "out"]) == 0
    status = " ".join(capsys.readouterr().out.split())
    assert ("&& tokshard build - " if kind == "jsonl" else "run the Python program again") in status
    reports: list[Any] = []
    corpus = built(kind, records, on_bad_record="skip", max_documents=limit, task_bytes=64, observer=reports.append)
    assert texts_of(corpus) == TEXTS[:40]
    notes = [report.text for report in reports if isinstance(report, Note)]
    assert any(note.startswith("the build continues with the ") for note in notes)
    assert SPOOL.name not in [report.name for report in reports if isinstance(report, StageStarted)]


OTHERS = {
    "another": [{"text": "another"}, *RECORDS[1:40], {"text": 7}],
    "shorter": RECORDS[:20],
    "longer": [*RECORDS[:40], {"text": 7}, {"text": "more"}],
}


@BOTH
@pytest.mark.parametrize("records", OTHERS.values(), ids=OTHERS)
def test_another_stream_is_refused_by_an_unfinished_build_and_any_by_a_complete_one(kind, records, monkeypatch):
    stop_while_it_encodes(kind, RECORDS[:40], monkeypatch)
    options: dict[str, Any] = {"task_bytes": 64, "on_bad_record": "skip"}
    name = {"jsonl": "standard input", "iterable": "<list_iterator>"}[kind]
    for problem, way_out in (("is not the data that it has read", ""), ("cannot be read again", "give another --out")):
        with pytest.raises(ConfigurationChangedError) as caught:
            build_once(kind, records, **options)
        assert caught.value.problem == f"out belongs to another build: {name} {problem}"
        assert "--force to" in caught.value.hint or "with --force" in caught.value.hint
        assert caught.value.hint.startswith(way_out)
        assert texts_of(built(kind, records, **{**options, "force": True})) == [
            record["text"] for record in records if record["text"] != 7
        ]


@BOTH
@pytest.mark.parametrize("moment", ["reading", "saving", "reading again", "saving again"])
def test_a_build_that_stopped_while_it_read_reads_again(kind, moment, monkeypatch):
    small_chunks(monkeypatch, 256)
    records = [*[{"text": 7}] * 4_000, {"text": "late"}]
    options = {"on_bad_record": "skip", "max_documents": 1, "task_bytes": 256}
    is_again = "again" in moment
    method = "take" if "reading" in moment else "save_spooled"
    late = 2_200 if kind == "iterable" else 140
    stop_at = {"reading": 5, "saving": 1, "reading again": late, "saving again": 2}[moment]
    calls = itertools.count(1)

    def stops(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if next(calls) == stop_at:
                raise KeyboardInterrupt
            return original(*arguments)

        return call

    with monkeypatch.context() as patch:
        place: Any = spool._Reading if method == "take" else spool
        patch.setattr(place, method, stops(getattr(place, method)))
        with pytest.raises(KeyboardInterrupt) as caught:
            build_once(kind, records, **options)
    assert caught.value.__notes__ == ["run the same command to continue"]
    assert bool(list(SPOOL.glob("*.receipt"))) == is_again
    if is_again:  # the beginning is there, and the rest is needed
        with pytest.raises(ConfigurationChangedError, match="is not the data that it has read"):
            build_once(kind, [], **options)
    assert texts_of(built(kind, records, **options)) == ["late"]


def test_an_exception_of_an_iterable_is_the_cause_of_the_error_and_it_is_read_again():
    def failing():
        yield "one"
        raise KeyError("no such row")

    with pytest.raises(SourceError, match="<generator> failed after 1 record: KeyError: 'no such row'") as error:
        build(failing())
    assert isinstance(error.value.__cause__, KeyError)
    assert "give it to the same build again" in error.value.hint
    assert texts_of(built("iterable", ["one", "two"])) == ["one", "two"]


def test_an_exception_of_a_record_is_one_of_its_iterable():
    class Lazy(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise OSError(f"{name} cannot be decoded")

    with pytest.raises(SourceError, match="<list> failed after 1 record: OSError: text cannot be decoded"):
        build([{"text": "one"}, Lazy(text="")])


def test_a_wrong_option_or_directory_is_refused_before_anything_is_read():
    def never():
        raise AssertionError
        yield

    build(iter("a"))
    Path("full").mkdir()
    Path("full/file").touch()
    for error, options in (
        (ConfigurationChangedError, {"shard_tokens": 7}),
        (UsageError, {"out": "full"}),
        (UsageError, {"out": "new", "keep_field": "n:int7"}),
    ):
        with pytest.raises(error):
            build(never(), **options)


# jobs


@BOTH
def test_the_first_job_spools_for_all(kind, monkeypatch):
    patch_chunk_bytes(monkeypatch, 1_024)

    def job(sources: Any, **options: Any) -> None:
        options = {"tokenizer": ".tokenizer", "out": "out", "workers": 1, "num_jobs": 2, **options}
        run_job(sources, task_bytes=1_024, max_documents=90, **options)

    with pytest.raises(UsageError, match="is empty, and no other job has read it yet"):
        build_once(kind, [], build=job, job_index=0)
    build_once(kind, RECORDS[:100], build=job, job_index=1)
    with pytest.raises(ConfigurationChangedError, match="is not the data that it has read"):
        build_once(kind, RECORDS[100:200], build=job, job_index=0)
    build_once(kind, [], build=job, job_index=0)
    commit_corpus("out")
    assert texts_of(open_corpus("out")) == TEXTS[:90]


# iterables


class Text(str):
    """What other libraries make of strings."""

    __slots__ = ()


NANOSECOND = "1970-01-01 00:00:00.000000001"
NAN, INF, LEAST = float("nan"), float("inf"), -(2**63)
TYPED = {"i": "int64", "f": "float64", "b": "bool", "s": "string"}
KEPT: list[tuple[list[Any], list[Any]]] = [
    (["a", 1, 2, True, "s"], ["a", 1, 2.0, True, "s"]),
    ([b"\xc3\xa9", " 7", "nan", "false", b"\xc3\xa9"], ["é", 7, NAN, False, "é"]),
    ([Text("t"), np.int8(-3), np.float32(0.9), np.bool_(1), Text("u")], ["t", -3, 0.9, True, "u"]),
    ([np.str_("n"), LEAST, INF, None, {"a": [1, None]}], ["n", LEAST, INF, None, '{"a": [1, null]}']),
    (["d", Decimal(7), Decimal("1.50"), None, Decimal("1.50")], ["d", 7, 1.5, None, "1.50"]),
    (["m", None, NAN, None, NAN], ["m", None, NAN, None, None]),  # as pandas has missing values
    (["p", None, None, None, np.datetime64(1, "ns")], ["p", *[None] * 3, NANOSECOND]),
    (["q", None, None, None, [np.timedelta64(5, "ns")]], ["q", None, None, None, '["5 nanoseconds"]']),
    (["r", None, None, None, {"a": np.array([1], "M8[ns]")}], ["r", *[None] * 3, f'{{"a": ["{NANOSECOND}"]}}']),
    (["\0\n", None, None, None, 2**70], ["\0\n", None, None, None, str(2**70)]),
]
"""The text and the values of records of an iterable, and those that a corpus gets."""

NO_UTF_8 = "'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed"
BAD: list[tuple[Any, str]] = [
    (7, "malformed: the record has type int, expected a mapping or a string"),
    (b"x", "malformed: the record has type bytes, expected a mapping or a string"),
    ({}, "missing text: no text in field 'text'; it has no fields"),
    ({"text": None, "url": "y"}, "missing text: no text in field 'text'; it has text, url"),
    ({"\udc80": 1, "b": True}, "missing text: no text in field 'text'; it has \udc80, b"),
    ({"text": [1]}, "text is not a string: field 'text' is [1]"),
    ({"text": b"\xff"}, "invalid UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ("\ud800", f"invalid UTF-8: {NO_UTF_8}"),
    ({"text": "a", "i": 2**63}, f"kept field of another type: field 'i' is {2**63}, not int64"),
    ({"text": "a", "i": True}, "kept field of another type: field 'i' is True, not int64"),
    ({"text": "a", "i": 1.5}, "kept field of another type: field 'i' is 1.5, not int64"),
    ({"text": "a", "f": True}, "kept field of another type: field 'f' is True, not float64"),
    ({"text": "", "b": 1}, "kept field of another type: field 'b' is 1, not bool"),
    ({"text": "a", "s": "\ud800"}, f"invalid UTF-8: field 's': {NO_UTF_8}"),
    ("a" * 101, "over max-document-bytes: text has 101 bytes, at most 100 are allowed"),
]
"""Records that cannot become documents, and why."""


def test_records_of_a_program_are_kept_or_bad_as_those_of_a_file():
    records = [*(record for record, _ in BAD), *(dict(zip(["text", *TYPED], one, strict=True)) for one, _ in KEPT)]
    keep = [f"{name}:{kind}" for name, kind in TYPED.items()]
    build(iter(records), keep_field=keep, on_bad_record="skip", max_document_bytes=100)
    with open_corpus("out") as corpus:
        values = [[corpus.metadata(number)[name] for name in TYPED] for number in range(len(KEPT))]
        found = [[text, *of_text] for text, of_text in zip(texts_of(corpus), values, strict=True)]
    assert repr(found) == repr([kept for _, kept in KEPT])  # in which two NaN are the same
    rejects = [json.loads(line) for line in Path("out", names.REJECTS).read_text().splitlines()]
    assert [f"{reject['reason']}: {reject['detail']}" for reject in rejects] == [problem for _, problem in BAD]
    assert [reject["record"] for reject in rejects] == list(range(1, len(BAD) + 1))


def test_fields_of_records_are_found_as_in_files():
    records = [{"a": {"b": "one"}, "n": np.int64(1)}, {"a.b": "two", "a": {"b": "not this"}, "n": None, "id": 7}]
    build(records, text_field="a.b", keep_field="n:int64", id_field="id")
    with open_corpus("out") as corpus:
        assert texts_of(corpus) == ["one", "two"]
        assert [corpus.metadata(number) for number in (0, 1)] == [{"id": None, "n": 1}, {"id": "7", "n": None}]


def test_numbers_and_arrays_of_numpy_are_numbers_and_lists():
    of_records: dict[str, Any] = {"max_documents": np.uint8(5), "keep_field": np.array(["text"])}
    build(RECORDS, shard_tokens=np.int64(50), validation_fraction=np.float32(0.5), **of_records)
    with open_corpus("out/train") as corpus:
        assert (corpus.manifest.build.shard_tokens, corpus.manifest.build.max_documents) == (50, 5)
        assert corpus.manifest.build.keep_field == {"text": "string"}


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
DEEP: Any = 0
for _ in range(9_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("float64", 10**400),
        *(("string", value) for value in (object(), {"a": {"a set"}}, {(1, 2): "a tuple as key"}, CIRCLE, DEEP)),
    ],
)
def test_a_value_of_python_that_no_build_could_repeat_is_a_bad_record(kind, value):
    """The text of an object may hold its address, and a set has no order."""
    with pytest.raises(BadRecordError, match=r"record 1: kept field of another type: field 'v' is"):
        build(iter([{"text": "a", "v": value}]), keep_field=[f"v:{kind}"])


def test_a_printed_result_is_a_line_for_each_corpus():
    assert repr(build(iter(["a", "bb", "ccc"]))) == "<BuildResult out: 3 documents, 9 tokens in 1 shard>"
    result = repr(build(RECORDS, out="split", validation_fraction=0.5))
    assert result.startswith("<BuildResult split/train: ")
    assert "split/validation: " in result
    assert len(result) < 200
