"""A copy leaves out the documents that a list names, whoever wrote the list, and says what the list names in vain."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, Source, append_generation, documents_of, write_corpus
from tests.examples import some
from tests.pipeline.arrays import commit_corpus, run_copy_job
from tests.pipeline.test_copy import copy_corpus, files
from tests.store.memory import SCHEME, MemoryStore
from tokshard import copy_corpus as copy_by_processes
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import BuildError, ConfigurationChangedError, UsageError
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline.progress import Report, StageStarted
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

NUM_DOCUMENTS = 60
DROPPED = [3, 17, 18, 59]


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shard is a task, and a shuffle has several buckets."""
    sizes = {"copy_bucket_bytes": 2_000, "copy_deal_bytes": 900, "copy_fan_out": 4, "copy_task_tokens": 1}
    small.shrink(monkeypatch.setattr, **sizes, **small.MERGES)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpus_with_ids(tmp_path / "corpus")


def corpus_with_ids(directory: Path, prefix: str = "doc", count: int = NUM_DOCUMENTS) -> Path:
    sources = [
        Source(
            documents=documents_of([2 + 3 * index % 40 for index in range(count)]),
            path="a.jsonl",
            metadata={"id": [f"{prefix}-{index}" for index in range(count)]},
        )
    ]
    return write_corpus(
        directory, sources=sources, columns={"id": "string"}, tokenizer=TINY_TOKENIZER, shard_tokens=150
    )


def ids(directory: Path) -> list[str]:
    with open_corpus(directory) as opened:
        assert all(one.records_read == one.documents + sum(one.left_out.values()) for one in opened.sources())
        return [opened.metadata(index)["id"] for index in range(len(opened))]


def left_out(directory: Path) -> dict[str, int]:
    with open_corpus(directory) as opened:
        return dict(opened.manifest.records.left_out)


def names(numbers: list[int]) -> list[str]:
    return [f"doc-{number}" for number in numbers]


def remaining(dropped: list[int]) -> list[str]:
    return [name for number, name in enumerate(names(list(range(NUM_DOCUMENTS)))) if number not in dropped]


def write_lines(path: Path) -> None:
    path.write_text("\r\n".join(["\ufeffdoc-3", *names(DROPPED[1:]), "", ""]))


def write_json_lines(path: Path) -> None:
    path.write_bytes(
        gzip.compress("".join(json.dumps({"id": name, "why": []}) + "\n" for name in names(DROPPED)).encode())
    )


def write_numbers(path: Path) -> None:
    path.write_text("".join(json.dumps({"document": number}) + "\n" for number in DROPPED))


def write_table(path: Path) -> None:
    parquet.write_table(pa.table({"url": ["x"] * 4, "id": names(DROPPED)}), path)


def write_csv(path: Path) -> None:
    path.write_text("why,id\n" + "".join(f'"a,\nb",{name}\n' for name in names(DROPPED)))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("ids.txt", write_lines),
        ("ids", write_lines),
        ("ids.jsonl.gz", write_json_lines),
        ("numbers.jsonl", write_numbers),
        ("ids.parquet", write_table),
        ("ids.csv", write_csv),
    ],
)
def test_a_copy_leaves_out_the_documents_of_a_list_in_any_form(
    corpus: Path, tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    done = copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / name)
    assert ids(tmp_path / "copy") == remaining(DROPPED)
    assert left_out(tmp_path / "copy") == {"in drop-ids": len(DROPPED)}
    assert not done.notes


@pytest.mark.slow
@some(
    "options",
    [
        {"shuffle": 3, "dedup": "exact"},
        {"validation_fraction": 0.4},
        {"max_documents": 30},
        {"max_tokens": 20, "hash_range": (0.0, 0.8)},
        {"columns": []},
        {},
    ],
    default=3,
    ids=str,
)
def test_workers_and_jobs_of_an_array_leave_out_the_same(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    (tmp_path / "ids.txt").write_text("\n".join(names(DROPPED)))
    monkeypatch.chdir(tmp_path)
    listed: dict[str, Any] = {"drop_ids": "ids.txt", **options}
    copy_corpus(corpus, out=tmp_path / "one", **listed)
    for index in (1, 0):
        run_copy_job([corpus], out=tmp_path / "jobs", job_index=index, num_jobs=2, workers=1, **listed)
    commit_corpus(tmp_path / "jobs")
    monkeypatch.undo()  # workers have the real sizes
    monkeypatch.chdir(tmp_path)
    copy_corpus(corpus, out=tmp_path / "local", **listed)
    copy_by_processes(corpus, out=tmp_path / "workers", workers=2, **listed)
    parts = ["train", "validation"] if "validation_fraction" in options else [""]
    for part in parts:
        assert files(tmp_path / "jobs" / part) == files(tmp_path / "one" / part)
        assert files(tmp_path / "workers" / part) == files(tmp_path / "local" / part)
        num_listed = 2 if "max_documents" in options else len(DROPPED)
        assert left_out(tmp_path / "one" / part)["in drop-ids"] >= num_listed


def test_an_append_leaves_out_what_a_list_names(corpus: Path, tmp_path: Path) -> None:
    other = corpus_with_ids(tmp_path / "other", "else", 20)
    (tmp_path / "ids.txt").write_text("doc-1\nelse-3\nelse-19\ndoc-99")
    copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / "ids.txt")
    done = copy_corpus(other, out=tmp_path / "copy", drop_ids=tmp_path / "ids.txt", append=True)
    assert ids(tmp_path / "copy") == remaining([1]) + [f"else-{index}" for index in range(19) if index != 3]
    assert done.manifest.records.left_out == {"in drop-ids": 2}
    assert done.notes == (f"2 rows of {tmp_path}/ids.txt name no document: doc-1, doc-99",)
    assert not copy_corpus(other, out=tmp_path / "copy", drop_ids=tmp_path / "ids.txt", append=True).is_new
    assert verify_corpus(str(tmp_path / "copy")).is_ok


def test_an_estimate_counts_what_a_list_names_and_writes_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids.txt").write_text("\n".join(names(list(range(0, NUM_DOCUMENTS, 2)))))
    command = ["copy", str(corpus), "--out", str(tmp_path / "copy"), "--drop-ids", str(tmp_path / "ids.txt")]
    assert run([*command, "--dry-run", "--json", "--workers", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "copy").exists()
    assert run([*command, "--json", "--quiet", "--workers", "1"]) == 0
    manifest = json.loads(capsys.readouterr().out)["corpora"][0]["manifest"]
    assert (found["documents"], found["tokens"]) == (manifest["num_documents"], manifest["num_tokens"]) != (0, 0)


def test_a_copy_of_a_bucket_into_a_bucket_by_a_list_in_a_bucket_is_the_copy_on_this_machine(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    remote, local = f"{SCHEME}:/{tmp_path}", open_store(corpus)
    for name in files_below(local, ""):
        open_store(f"{remote}/corpus").put(name, local.get(name))
    (tmp_path / "ids.txt").write_text("\n".join(names(DROPPED)))
    open_store(remote).put("ids.txt", (tmp_path / "ids.txt").read_bytes())
    copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / "ids.txt")
    copy_corpus(f"{remote}/corpus", out=f"{remote}/copy", drop_ids=f"{remote}/ids.txt")
    expected, found = open_store(tmp_path / "copy"), open_store(f"{remote}/copy")
    of_run = {"build-report.json"}
    assert {*files_below(found, "")} == {*files_below(expected, "")} >= of_run
    assert all(found.get(name) == expected.get(name) for name in {*files_below(found, "")} - of_run)


def test_a_copy_that_ends_at_a_limit_says_nothing_of_rows_that_it_did_not_come_to(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("doc-1\ndoc-59")
    done = copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / "ids.txt", max_documents=5)
    assert ids(tmp_path / "copy") == remaining([1])[:5]
    assert done.notes == ()


def test_rows_that_name_no_document_are_counted_and_shown(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["gone-1", "doc-3", "gone-2", "doc-3", "gone-1", *(f"more-{index}" for index in range(9))]
    (tmp_path / "ids.txt").write_text("\n".join(rows))
    for workers in ("1", "2"):
        command = ["copy", str(corpus), "--out", str(tmp_path / workers), "--drop-ids", str(tmp_path / "ids.txt")]
        assert run([*command, "--workers", workers]) == 0
        shown = capsys.readouterr()
        assert "11 rows of" in shown.out + shown.err
        assert "name no document: gone-1, gone-2, more-0, more-1, more-2, ..." in shown.out + shown.err
        assert "1 in drop-ids" in " ".join((shown.out + shown.err).split())


def test_a_listed_document_counts_as_listed_whatever_other_conditions_say(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("\n".join(names(DROPPED)))
    done = copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / "ids.txt", where=["id=doc-5"])
    assert left_out(tmp_path / "copy") == {"in drop-ids": 4, "not copied": 55}
    assert not done.notes


def test_numbers_count_in_the_corpus_of_their_fingerprint_and_ids_in_all(corpus: Path, tmp_path: Path) -> None:
    other = corpus_with_ids(tmp_path / "other", "else", 20)
    append_generation(
        other, sources=[Source(documents=documents_of([9]), metadata={"id": ["doc-3"]})], columns={"id": "string"}
    )
    with open_corpus(corpus) as first, open_corpus(other) as second:
        prints = first.fingerprint, second.fingerprint, second.content_fingerprints[0]
    rows = [
        {"document": 5, "fingerprint": prints[0], "id": "else-9"},  # the number counts
        {"document": 5, "fingerprint": prints[1]},
        {"document": 6, "fingerprint": prints[2]},  # of the corpus before it grew
        {"document": 7, "fingerprint": "0" * 64, "id": "doc-8"},  # the id counts
        {"document": 7, "fingerprint": "0" * 64},
        {"document": 21, "fingerprint": prints[1]},
        {"id": "doc-3"},  # in both
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = copy_corpus([corpus, other], out=tmp_path / "copy", drop_ids=tmp_path / "rows.jsonl")
    gone = (set(ids(corpus)) | set(ids(other))) - set(ids(tmp_path / "copy"))
    assert gone == {"doc-5", "else-5", "else-6", "doc-8", "doc-3"}
    assert left_out(tmp_path / "copy")["in drop-ids"] == 6
    assert done.notes == (f"2 rows of {tmp_path}/rows.jsonl name no document: document 7, document 21",)
    (tmp_path / "rows.jsonl").write_text('{"document": 5}')
    with pytest.raises(UsageError, match="has the number of a document, and there are 2 corpora"):
        copy_corpus([corpus, other], out=tmp_path / "third", drop_ids=tmp_path / "rows.jsonl")


def test_another_list_is_another_copy_and_the_same_list_elsewhere_is_not(corpus: Path, tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2), ("c", 1)):
        (tmp_path / name).write_text(f"doc-{number}")
    copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / "a")
    with pytest.raises(ConfigurationChangedError, match="--drop-ids lists other documents"):
        copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / "b")
    assert not copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / "c").is_new


def test_a_list_that_changes_before_it_is_read_leaves_out_nothing_else(corpus: Path, tmp_path: Path) -> None:
    ids_file, out = tmp_path / "ids.txt", tmp_path / "copy"
    ids_file.write_text("doc-3\n")

    def change(report: Report) -> None:
        if isinstance(report, StageStarted):
            ids_file.write_text("doc-5\n")

    with pytest.raises(BuildError, match=r"ids\.txt was changed while its documents were left out"):
        copy_corpus(corpus, out=out, drop_ids=ids_file, observer=change)
    ids_file.write_text("doc-3\n")
    copy_corpus(corpus, out=out, drop_ids=ids_file)
    assert ids(out) == remaining([3])


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("ids.txt", "\n\n", "lists no document"),
        ("ids.jsonl", '{"id": "doc-1"}\n{"name": 3}\n', "row 2 of "),
        ("ids.jsonl", '{"id": 1.5}', "the id 1.5 is neither a text nor an integer"),
        ("ids.jsonl", '{"id": true}', "the id True is neither a text nor an integer"),
        ("ids.jsonl", '{"document": -1}', "the document -1 is not a number from 0 on"),
        ("ids.csv", "document\nfirst\n", "the document 'first' is not a number from 0 on"),
        ("ids.jsonl", '{"document": 1, "fingerprint": ["f"]}', "the fingerprint ['f'] is not a text"),
        ("ids.jsonl", '{"id": ' + "[" * 100_000, "cannot be read: maximum recursion depth"),
        ("ids.jsonl", '"doc-1"', "Expected `object`"),
        ("ids.csv", "url\nx\n", "neither 'id' nor 'document'"),
        ("ids.parquet", "PAR1", "cannot be read"),
    ],
)
def test_what_is_no_list_is_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path, name: str, content: str, problem: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as caught:
        copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / name)
    assert problem in caught.value.problem
    assert not (tmp_path / "copy").exists()


def test_a_list_that_is_missing_or_of_ids_for_a_corpus_without_them_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.txt cannot be read: No such file"):
        copy_corpus(corpus, out=tmp_path / "copy", drop_ids=tmp_path / "missing.txt")
    plain = write_corpus(tmp_path / "plain", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    (tmp_path / "ids.txt").write_text("doc-1")
    with pytest.raises(UsageError, match="no corpus has a column 'id'") as caught:
        copy_corpus(plain, out=tmp_path / "copy", drop_ids=tmp_path / "ids.txt")
    assert "--id-field" in caught.value.hint
