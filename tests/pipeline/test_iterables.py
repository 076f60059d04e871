"""Sources that a Python program gives: one path, a list of paths, an iterable of records."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pipeline.inputs import jsonl, patch_chunk_bytes, texts_of, write_byte_tokenizer
from tokshard import build_corpus, open_corpus
from tokshard.cli.build_text import status_lines
from tokshard.errors import BadRecordError, ConfigurationChangedError, SourceError, UsageError
from tokshard.pipeline.commit import BuildResult
from tokshard.pipeline.progress import Note
from tokshard.pipeline.status import read_status
from tokshard.pipeline.tasks import planning as tasks

TEXTS = [f"text {number}" for number in range(40)]
RECORDS = [{"text": text, "meta": {"n": number}} for number, text in enumerate(TEXTS)]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds in an empty directory, in this process."""
    write_byte_tokenizer(tmp_path / ".tokenizer")
    monkeypatch.chdir(tmp_path)

    def build(sources: Any, **options: Any) -> BuildResult:
        return build_corpus(sources, **{"tokenizer": ".tokenizer", "out": "out", "workers": 1, **options})

    return build


def built_texts(out: str | Path = "out") -> list[str]:
    with open_corpus(out) as corpus:
        return texts_of(corpus)


class Dataset:
    """What `datasets.Dataset` has in common with any other: it has a length, and iterating gives dicts."""

    def __len__(self) -> int:
        return len(RECORDS)

    def __iter__(self) -> Any:
        return iter(RECORDS)


@pytest.mark.parametrize("kind", [str, Path])
def test_one_path_is_a_source(kind, build):
    Path("notes.jsonl").write_bytes(jsonl(RECORDS))
    build(kind("notes.jsonl"))
    assert built_texts() == TEXTS


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        (lambda: (record for record in RECORDS), "<generator>"),
        (lambda: iter(TEXTS), "<list_iterator>"),
        (lambda: RECORDS, "<list>"),
        (Dataset, "<Dataset>"),
    ],
)
def test_an_iterable_of_records_is_a_source(sources, name, build):
    reports: list[Any] = []
    result = build(sources(), observer=reports.append)
    note = f"{name} can be read once only: a build that stops has to start over"
    assert reports[0] == Note(note)  # before the work begins
    assert note in result.notes
    with open_corpus("out") as corpus:
        assert texts_of(corpus) == TEXTS
        assert corpus.manifest.arguments == [name]
        assert corpus.provenance(39).record == 40


def test_workers_share_an_iterable_and_write_what_one_process_writes(build):
    records = [{"text": f"{number} " * 400} for number in range(1_500)]
    build(iter(records), workers=2, task_bytes=1 << 20, out="two")
    build(iter(records), workers=1, task_bytes=1 << 20, out="one")
    with open_corpus("one") as one, open_corpus("two") as two:
        assert len({shard.name[:24] for shard in one.shards}) == 3
        assert [shard.sha256 for shard in one.shards] == [shard.sha256 for shard in two.shards]


def test_paths_and_iterables_stand_side_by_side_in_order(build):
    Path("a.jsonl").write_bytes(jsonl([{"text": "a"}]))
    build(["a.jsonl", iter(["b"])])
    assert built_texts() == ["a", "b"]


def test_fields_of_records_are_found_and_kept_as_in_files(build):
    records = [{"a": {"b": "one"}, "n": np.int64(1)}, {"a.b": "two", "a": {"b": "not this"}, "n": None, "id": 7}]
    build(records, text_field="a.b", keep_field="n:int64", id_field="id")
    with open_corpus("out") as corpus:
        assert texts_of(corpus) == ["one", "two"]
        assert [corpus.metadata(number) for number in (0, 1)] == [
            {"id": None, "n": 1},
            {"id": "7", "n": None},
        ]


BAD_RECORDS = [
    ({"content": "x", "url": "y"}, "missing text: no text in field 'text'; it has content, url"),
    ({"text": None}, "missing text: no text in field 'text'; it has text"),
    ({"text": 7}, "text is not a string: field 'text' is 7"),
    (("x",), "malformed: the record has type tuple, expected a mapping or a string"),
    ({"text": "\ud800"}, "invalid UTF-8"),
    (b"x", "malformed: the record has type bytes, expected a mapping or a string"),
]


@pytest.mark.parametrize(("record", "problem"), BAD_RECORDS)
def test_a_bad_record_of_an_iterable_is_reported_with_its_number(record, problem, build):
    with pytest.raises(BadRecordError) as error:
        build(iter([{"text": "good"}, record]))
    assert str(error.value).startswith(f"<list_iterator>, record 2: {problem}")


def test_bad_records_of_an_iterable_can_be_left_out(build):
    build(iter(["good", *(record for record, _ in BAD_RECORDS), "", "also good"]), on_bad_record="skip")
    with open_corpus("out") as corpus:
        assert texts_of(corpus) == ["good", "also good"]
        assert sum(corpus.sources()[0].left_out.values()) == len(BAD_RECORDS) + 1
    assert '"source": "<list_iterator>", "record": 2, "reason": "missing text"' in Path("out/rejects.jsonl").read_text()


def test_a_limit_reads_no_further_than_it_must(build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    read = []
    build((read.append(text) or text for text in TEXTS), max_documents=3, task_bytes=64)
    assert built_texts() == TEXTS[:3]
    assert len(read) < len(TEXTS)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_of_an_iterable_is_the_cause_of_the_error(workers, build):
    def failing():
        yield "one"
        raise KeyError("no such row")

    with pytest.raises(SourceError, match="<generator> failed after 1 record: KeyError: 'no such row'") as error:
        build(failing(), workers=workers)
    assert isinstance(error.value.__cause__, KeyError)
    assert "force=True" in error.value.hint


def test_what_needs_to_read_an_iterable_twice_is_refused(build):
    with pytest.raises(UsageError, match="reads its sources twice, and <generator> can be read once only"):
        build((text for text in TEXTS), dedup="exact")
    texts = iter(TEXTS)
    with pytest.raises(UsageError, match="<list_iterator> is given twice"):
        build([texts, texts])
    assert not Path("out").exists()


def test_a_build_of_an_iterable_that_stopped_or_is_done_has_to_start_over(build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    with pytest.raises(BadRecordError):
        build(iter([*TEXTS, 7]), task_bytes=64)
    assert "not possible: <list_iterator> can be read once only; start over with --force" in str(
        status_lines(read_status("out"))
    )
    for _ in range(2):  # stopped, and then complete
        with pytest.raises(ConfigurationChangedError, match="<list_iterator> cannot be read again"):
            build(iter(TEXTS), task_bytes=64)
        build(iter(TEXTS), task_bytes=64, force=True)
    assert built_texts() == TEXTS


class Frame:
    """What a data frame of pandas does: it iterates over the names of its columns."""

    def __iter__(self) -> Any:
        return iter(["text", "url"])

    def iterrows(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("sources", "problem", "hint"),
    [
        (7, "sources has type int, expected a path or an iterable of records", "give a path"),
        (None, "sources has type NoneType", "give a path"),
        (b"text", "sources has type bytes", "give a path"),
        ({"train": [], "test": []}, "sources has type dict", "sources['train']"),
        ({"a", "b"}, "sources has type set", "the documents follow its order"),
        (io.StringIO("text"), "sources has type StringIO", "give the path of the file"),
        (Frame(), "sources has type Frame", 'sources.to_dict("records")'),
        ([["a.jsonl"]], "sources[0] has type list", "iter(texts)"),
        (["a.jsonl", 7], "sources[1] has type int", "give a path"),
        ((path for path in [Path("a.jsonl")]), "<generator> gives paths", "list(paths)"),
        ([], "no source is given", "give files"),
    ],
)
def test_what_is_no_source_is_refused_with_a_way_out(sources, problem, hint, build):
    with pytest.raises(UsageError) as error:
        build(sources)
    assert problem in error.value.problem
    assert hint in error.value.hint


def test_a_segment_of_a_stream_has_at_most_what_a_worker_should_hold(build, monkeypatch):
    monkeypatch.setattr(tasks, "_MAX_SEGMENT_BYTES", 2 << 20)
    build(({"text": "x" * 60_000} for _ in range(100)), task_bytes=1 << 30)
    with open_corpus("out") as corpus:
        assert len(corpus.shards) == 3


# arguments of other types


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shard_tokens": "1B"}, "shard_tokens is '1B': expected int | null, got str"),
        ({"max_documents": 1.5}, "max_documents is 1.5: expected int | null, got float"),
        ({"workers": True}, "workers is True: expected int | null, got bool"),
        ({"workers": np.True_}, "workers is True: expected int | null, got bool"),
        ({"validation_fraction": "1%"}, "validation_fraction is '1%': expected float | null, got str"),
        ({"text_field": 7}, "text_field is 7: expected str, got int"),
        ({"keep_field": [7]}, "keep_field is [7]: expected str, got int"),
        ({"out": None}, "out is None, expected a path"),
        ({"tokenizer": 7}, "tokenizer is 7, expected a path"),
        ({"dedup": True}, "dedup is True"),
    ],
)
def test_an_argument_of_another_type_is_refused_with_a_hint(options, problem, build):
    with pytest.raises(UsageError) as error:
        build([{"text": "a"}], **options)
    assert error.value.problem.startswith(problem)
    assert error.value.hint
    assert not Path("out").exists()


def test_numbers_of_numpy_are_numbers(build):
    build(RECORDS, shard_tokens=np.int64(50), max_documents=np.uint8(5), validation_fraction=np.float32(0.5))
    with open_corpus("out/train") as corpus:
        assert (corpus.manifest.build.shard_tokens, corpus.manifest.build.max_documents) == (50, 5)


def test_a_printed_result_is_a_line_for_each_corpus(build):
    result = build(iter(["a", "bb", "ccc"]))
    assert repr(result) == "<BuildResult out: 3 documents, 9 tokens in 1 shard>"
    result = build(RECORDS, out="split", validation_fraction=0.5)
    assert repr(result).splitlines()[0].startswith("<BuildResult split/train: ")
    assert "split/validation: " in repr(result)
    assert len(repr(result)) < 200
