"""What a copy has because it is a build: append, limit, duplicates, a split, jobs, a status and an estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, Source, append_generation, documents_of, write_corpus
from tests.examples import some
from tests.pipeline.arrays import commit_corpus, run_copy_job
from tests.pipeline.inputs import texts_of
from tests.pipeline.places import StoppedError, build, files, write
from tests.pipeline.test_copy import copy_corpus, corpus_of, rows
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import BuildError, ConfigurationChangedError, UsageError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline import build as building
from tokshard.pipeline.progress import Report, StageStarted
from tokshard.pipeline.status import read_status
from tokshard.pipeline.tasks import running, shuffle

SEEDS = pytest.mark.parametrize("seed", [None, 17])


@pytest.fixture(autouse=True)
def _many_small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"copy_bucket_bytes": 2_000, "copy_deal_bytes": 900, "copy_fan_out": 4, "copy_task_tokens": 1}
    small.shrink(monkeypatch.setattr, **sizes, **small.MERGES)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpus_of(tmp_path / "corpus")


def left_out(directory: Path) -> dict[str, int]:
    """What a corpus says it left out; each source read what it wrote or left out."""
    with open_corpus(directory) as opened:
        assert all(one.records_read == one.documents + sum(one.left_out.values()) for one in opened.sources())
        return dict(opened.manifest.records.left_out)


@pytest.mark.slow
@SEEDS
@some("limit", [50, 120, 1, 119, 500], default=2)
def test_a_limit_takes_the_first_documents(corpus, tmp_path, limit, seed):
    copy_corpus(corpus, out=tmp_path / "copy", max_documents=limit, shuffle=seed)
    taken = rows(corpus)[:limit]
    assert sorted(rows(tmp_path / "copy"), key=str) == sorted(taken, key=str)
    assert seed is not None or rows(tmp_path / "copy") == taken
    assert left_out(tmp_path / "copy").get("not copied", 0) == 120 - len(taken)


@SEEDS
def test_documents_of_equal_tokens_are_copied_once(tmp_path, seed):
    documents = documents_of([5, 6, 7, 5, 8])
    documents += documents[:2]
    write_corpus(tmp_path / "one", documents, tokenizer=TINY_TOKENIZER, shard_tokens=12)
    write_corpus(tmp_path / "two", [*documents_of([9]), documents[2]], tokenizer=TINY_TOKENIZER)
    copy_corpus([tmp_path / "one", tmp_path / "two"], out=tmp_path / "copy", dedup="exact", shuffle=seed)
    expected = {tuple(document): None for document in [*documents, *documents_of([9])]}
    found = [row[0] for row in rows(tmp_path / "copy")]
    assert sorted(found) == sorted(expected)
    assert seed is not None or found == list(expected)
    assert left_out(tmp_path / "copy") == {"duplicate": 9 - len(expected)}


@pytest.mark.slow
@SEEDS
def test_a_split_divides_a_copy_and_keeps_the_order_of_each_part(corpus, tmp_path, seed):
    copy_corpus(corpus, out=tmp_path / "copy", validation_fraction=0.3, shuffle=seed)
    copy_corpus(corpus, out=tmp_path / "all", shuffle=seed)
    train, validation = (rows(tmp_path / "copy" / split) for split in (names.TRAIN, names.VALIDATION))
    assert 10 < len(validation) < 60
    assert sorted([*train, *validation], key=str) == sorted(rows(corpus), key=str)
    held = {row[0] for row in validation}
    assert validation == [row for row in rows(tmp_path / "all") if row[0] in held]
    for split in (names.TRAIN, names.VALIDATION):
        assert verify_corpus(tmp_path / "copy" / split).problems == ()
        left_out(tmp_path / "copy" / split)


@pytest.mark.slow
def test_a_corpus_is_appended_to_a_copy(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", documents_of([5, 6]), tokenizer=TINY_TOKENIZER)
    append_generation(other, documents_of([9, 1]))
    copy_corpus([corpus, other], out=tmp_path / "both", columns=[])
    copy_corpus(corpus, out=tmp_path / "copy", columns=[])
    copy_corpus(other, out=tmp_path / "copy", columns=[], append=True)
    assert rows(tmp_path / "copy") == rows(tmp_path / "both")
    with open_corpus(tmp_path / "copy") as grown, open_corpus(tmp_path / "both") as whole:
        assert (grown.num_generations, grown.fingerprint) == (2, whole.fingerprint)
    assert not copy_corpus(other, out=tmp_path / "copy", columns=[], append=True).is_new
    third = write_corpus(tmp_path / "third", documents_of([4]), tokenizer=TINY_TOKENIZER)
    copy_corpus(third, out=tmp_path / "copy", columns=[], append=True)
    for given in (corpus, other):
        with pytest.raises(UsageError, match=rf"{given}, a corpus that is copied, is in .*copy already"):
            copy_corpus(given, out=tmp_path / "copy", columns=[], append=True)


def test_duplicates_are_found_across_the_generations_of_a_copy(tmp_path):
    first, second = documents_of([5, 6, 7]), documents_of([8, 9])
    write_corpus(tmp_path / "one", first, tokenizer=TINY_TOKENIZER)
    write_corpus(tmp_path / "two", [*second, *first[1:]], tokenizer=TINY_TOKENIZER)
    copy_corpus(tmp_path / "one", out=tmp_path / "copy", dedup="exact")
    copy_corpus(tmp_path / "two", out=tmp_path / "copy", dedup="exact", append=True)
    assert [list(row[0]) for row in rows(tmp_path / "copy")] == [*first, *second]


def test_a_joined_copy_says_that_it_has_no_duplicates_only_if_it_looked_for_them(tmp_path, capsys):
    documents = documents_of([5, 6, 7])
    for name, held in {"one": documents, "two": [*documents_of([9]), documents[0]]}.items():
        write_corpus(tmp_path / f"{name}-raw", held, tokenizer=TINY_TOKENIZER)
        copy_corpus(tmp_path / f"{name}-raw", out=tmp_path / name, dedup="exact")  # no document twice in either
    for dedup in ("none", "exact"):
        out = tmp_path / f"both-{dedup}"
        done = copy_corpus([tmp_path / "one", tmp_path / "two"], out=out, dedup=dedup)
        assert done.manifest.num_documents == (5 if dedup == "none" else 4)
        assert done.manifest.build.dedup == dedup
        assert run(["inspect", str(out)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("exact duplicates left out" in shown) == (dedup == "exact")


def test_texts_are_not_compared_with_tokens(place, tmp_path):
    build(place, dedup="exact")
    (place / "b.jsonl").write_bytes(b'{"text": "another"}\n')
    build(place, place / "b.jsonl", out=place / "other")
    with pytest.raises(UsageError, match="has hashes of texts, and this append would compare hashes of tokens"):
        copy_corpus(place / "other", out=place / "out", append=True, dedup="exact")
    copy_corpus(place / "other", out=place / "out", append=True)
    assert texts_of(open_corpus(place / "out"))[-1] == "another"


OPTIONS: list[dict[str, Any]] = [
    {"dedup": "exact", "shuffle": 3},
    {"validation_fraction": 0.3, "max_tokens": 60},
    {"max_documents": 70},
    {"where": ["lang=en"]},
    {"shuffle": 17},
    {},
]


@pytest.mark.slow
@some("options", OPTIONS, default=3, ids=str)
def test_jobs_of_an_array_copy_the_same_bytes(corpus, tmp_path, options):
    copy_corpus(corpus, out=tmp_path / "one", **options)
    for index in (2, 0, 1):
        run_copy_job([corpus], out=tmp_path / "jobs", job_index=index, num_jobs=3, workers=1, **options)
    commit_corpus(tmp_path / "jobs")
    assert files(tmp_path / "jobs") == files(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["the length of a part", "the tokens of a part", "a kept text"])
def test_a_damaged_file_of_dealt_documents_is_named_and_dealt_again(corpus, tmp_path, damaged):
    copy_corpus(corpus, out=tmp_path / "whole", shuffle=17)

    def stop(report: Report) -> None:
        if isinstance(report, StageStarted) and report.name == "write":
            raise StoppedError

    with pytest.raises(StoppedError):
        copy_corpus(corpus, out=tmp_path / "copy", shuffle=17, observer=stop)
    *_, newest = sorted((tmp_path / "copy" / names.WORK).glob("deal*"))
    content = {path: path.read_bytes() for path in (newest / "files").iterdir()}
    path = next(path for path in content if b"enfr" in content[path])
    # the last row of the table, before a checksum
    place = len(content[path]) - shuffle._CRC_BYTES - shuffle._PLACE.itemsize + (8 if "length" in damaged else 16)
    path.write_bytes(
        content[path].replace(b"enfr", b"\xff\xff\xff\xff")
        if damaged == "a kept text"
        else content[path][:place] + (1 << 62).to_bytes(8, "little") + content[path][place + 8 :]
    )
    with pytest.raises(BuildError, match=f"{path.name} is damaged") as caught:
        copy_corpus(corpus, out=tmp_path / "copy", shuffle=17)
    assert caught.value.hint.startswith("delete that file and run the same command again")
    path.unlink()
    copy_corpus(corpus, out=tmp_path / "copy", shuffle=17)
    assert files(tmp_path / "copy") == files(tmp_path / "whole")


def test_a_job_reads_what_it_deals_again_although_another_has_shuffled_all_meanwhile(corpus, tmp_path, monkeypatch):
    copy_corpus(corpus, out=tmp_path / "one", shuffle=17)
    redeal, overtaking = running.redeal, [0]

    def overtaken(*arguments: Any) -> Any:
        if overtaking:
            run_copy_job([corpus], out=tmp_path / "jobs", job_index=overtaking.pop(), num_jobs=2, workers=1, shuffle=17)
        return redeal(*arguments)

    monkeypatch.setattr("tokshard.pipeline.jobs.running_jobs", lambda _: [])  # it takes the first one for dead
    monkeypatch.setattr(running, "redeal", overtaken)
    run_copy_job([corpus], out=tmp_path / "jobs", job_index=1, num_jobs=2, workers=1, shuffle=17)
    assert not overtaking
    commit_corpus(tmp_path / "jobs")
    assert files(tmp_path / "jobs") == files(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_workers_copy_the_same_bytes(corpus, tmp_path, options, monkeypatch):
    monkeypatch.undo()  # workers have the real sizes
    copy_corpus(corpus, out=tmp_path / "one", **options)
    copy_corpus(corpus, out=tmp_path / "two", workers=2, **options)
    assert files(tmp_path / "two") == files(tmp_path / "one")


@SEEDS
def test_the_status_of_a_copy_that_was_stopped_names_the_command_that_continues_it(
    corpus, tmp_path, monkeypatch, capsys, seed
):
    def refuse(*_: object) -> None:
        raise StoppedError

    options: dict[str, Any] = {"where": ["lang=en"], "hash_range": (0.0, 0.9), "columns": ["lang"], "shuffle": seed}
    with monkeypatch.context() as patch:
        patch.setattr(building, "commit", refuse)
        with pytest.raises(StoppedError):
            copy_corpus(corpus, out=tmp_path / "copy", **options)
    copy_corpus(corpus, out=tmp_path / "expected", **options)
    expected = rows(tmp_path / "expected")
    status = read_status(tmp_path / "copy")
    assert (status.state, status.stage, status.documents) == ("unfinished", "writing", len(expected))
    assert seed is not None or 0.99 < status.bytes_done / status.total_bytes <= 1
    assert run(["status", str(tmp_path / "copy")]) == 0
    shown = capsys.readouterr().out
    assert "{'" not in shown
    assert run(list(status.command)[1:]) == 0
    assert rows(tmp_path / "copy") == expected


def test_an_estimate_of_a_copy_writes_nothing(corpus, tmp_path, capsys):
    command = ["copy", str(corpus), "--out", str(tmp_path / "copy"), "--workers", "1", "--dry-run", "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "copy").exists()
    with open_corpus(corpus) as opened:
        assert found["tokens"] == pytest.approx(opened.num_tokens, rel=0.2)
        assert found["documents"] == pytest.approx(opened.num_documents, rel=0.2)
    assert not found["is_limited"]
    assert run([*command, "--max-documents", "10"]) == 0
    limited = json.loads(capsys.readouterr().out)
    assert (limited["documents"], limited["is_limited"]) == (10, True)


def test_another_condition_is_another_copy(corpus, tmp_path):
    copy_corpus(corpus, out=tmp_path / "copy", where=["lang=en"])
    with pytest.raises(ConfigurationChangedError, match="--where was lang=en, now lang=fr") as caught:
        copy_corpus(corpus, out=tmp_path / "copy", where=["lang=fr"])
    assert "another --out" in caught.value.hint


def test_a_copy_of_a_corpus_whose_kept_values_changed_is_another_copy(tmp_path):
    documents = documents_of([5, 6])

    def corpus_with(value: str) -> Path:
        from tests.corpora import Source

        sources = [Source(documents=documents, path="a.jsonl", metadata={"lang": [value, value]})]
        return write_corpus(tmp_path / value, sources=sources, columns={"lang": "string"}, tokenizer=TINY_TOKENIZER)

    for value in ("en", "fr"):
        corpus_with(value)
    (tmp_path / "en").rename(tmp_path / "corpus")
    copy_corpus(tmp_path / "corpus", out=tmp_path / "copy")
    (tmp_path / "corpus").rename(tmp_path / "before")
    (tmp_path / "fr").rename(tmp_path / "corpus")
    with pytest.raises(ConfigurationChangedError):
        copy_corpus(tmp_path / "corpus", out=tmp_path / "copy")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shard_tokens": -5}, "shard_tokens is -5: expected int >= 1"),
        ({"min_tokens": "3"}, "min_tokens is '3': expected int"),
        ({"workers": 0}, "workers is 0: expected int >= 1"),
        ({"hash_range": (0.5, 0.5)}, "hash_range is 0.5:0.5, expected a part of 0:1"),
        ({"text_field": "body"}, "text_field is given, and the sources are read as documents"),
        ({"on_bad_record": "skip"}, "on_bad_record is given, and the sources are read as documents"),
        ({"max_bad_records": 3}, "max_bad_records is given, and the sources are read as documents"),
    ],
)
def test_what_means_nothing_for_a_copy_is_refused(corpus, tmp_path, options, problem):
    with pytest.raises(UsageError) as caught:
        copy_corpus(corpus, out=tmp_path / "copy", **options)
    assert caught.value.problem.startswith(problem)
    assert caught.value.hint
    assert not (tmp_path / "copy").exists()


def test_a_copy_may_leave_out_a_shard_that_is_damaged(corpus, tmp_path):
    with open_corpus(corpus) as opened:
        info = opened.shards[2]
        first, count = int(opened.shards.first_documents[2]), info.num_documents
    content = bytearray((corpus / info.name).read_bytes())
    expected = rows(corpus)
    content[len(content) // 2] ^= 1
    (corpus / info.name).write_bytes(content)
    copy_corpus(corpus, out=tmp_path / "copy", on_bad_source="skip")
    assert rows(tmp_path / "copy") == expected[:first] + expected[first + count :]
    assert left_out(tmp_path / "copy")["damaged input"] == count
    (reject,) = [json.loads(line) for line in (tmp_path / "copy" / names.REJECTS).read_text().splitlines()]
    assert (reject["source"], reject["reason"]) == (f"{corpus}/{info.name}", "damaged input")


def test_a_copy_of_nothing_is_refused(place, tmp_path):
    with pytest.raises(UsageError, match="no corpus is given"):
        copy_corpus([], out=tmp_path / "copy")
    write(place / "only.jsonl", ["text"])
    build(place, place / "only.jsonl")
    with pytest.raises(BuildError, match="no document was written"):
        copy_corpus(place / "out", out=tmp_path / "copy", min_tokens=1_000)


@pytest.mark.parametrize(
    ("where", "taken"),
    [
        (["size>3"], [4, 5, 6]),
        (["size<3", "size>0"], [1, 2]),
        (["size in 1, 5,9"], [1, 5]),
        (["size!=2"], [0, 1, 3, 4, 5, 6, 7]),
        (["size=2"], [2]),
        (["lang in en,fr", "size>2"], [3, 4]),
        (["lang != en"], [1, 2, 3, 4, 5, 6, 7]),
        (["lang=fr\t", "size > 1 "], [3, 4]),
        (["a=b in =, c"], [0, 2, 4, 6]),
        (["lang>en"], [2, 3, 4, 5, 6, 7]),
        (["a=b=c"], [0, 2, 4, 6]),
        (["flag!=true"], [1, 3, 5, 7]),
        ("score>0.25", [6]),
    ],
    ids=str,
)
def test_documents_are_taken_by_comparisons_of_kept_values_and_missing_ones_meet_only_inequality(
    tmp_path, where, taken
):
    lengths = list(range(2, 10))
    metadata = {
        "size": [*range(7), None],
        "lang": ["en", " en", "fr ", "fr", "fr", "ga", "ha", "zu"],
        "a=b": ["c", "d"] * 4,
        "flag": [True, False] * 4,
        "score": [0.25, -1.0, float("nan"), None, 0.0, 0.1, 0.3, 0.2],
    }
    columns = {"size": "int64", "lang": "string", "a=b": "string", "flag": "bool", "score": "float64"}
    sources = [Source(documents=documents_of(lengths), path="a.jsonl", metadata=metadata)]
    corpus = write_corpus(tmp_path / "corpus", sources=sources, columns=columns, tokenizer=TINY_TOKENIZER)
    copy_corpus(corpus, out=tmp_path / "copy", where=where)
    assert [len(row[0]) - 2 for row in rows(tmp_path / "copy")] == taken
    with pytest.raises(UsageError, match="flag is bool, which has no order"):
        copy_corpus(corpus, out=tmp_path / "other", where=["flag>false"])


@pytest.mark.parametrize(
    ("condition", "problem", "hint"),
    [
        ("lang==en", "has the sign ==", "give 'lang=en'"),
        ("lang !== en", "has the sign !==", "give 'lang!=en'"),
        ("lang===en", "has the sign ===", "give 'lang=en'"),
        ("lang=!en", "has the sign =!", "give 'lang!=en'"),
        ("lang<>en", "has the sign <>", "give 'lang!=en'"),
        ("lang≠en", "has the sign ≠", "give 'lang!=en'"),
        ("lang~en", "has the sign ~", "the signs are =, !=, < and >"),
        ("size<=3", "has the sign <=", "the signs are =, !=, < and >"),
        ("size=>3", "has the sign =>", "the signs are =, !=, < and >"),
        ("lang= =en", "has two signs", "'lang in VALUE' takes a value that begins with one"),
        ("score!=nan", "'nan' is not a value of column score, which is float64", "give another"),
        ("score in 1,NaN", "'NaN' is not a value of column score", "give another"),
        ("size!=9223372036854775808", "'9223372036854775808' is not a value of column size, which is int64", "give"),
        ("nolang==en", "the corpora have no kept column 'nolang'", "kept columns: size, lang, score"),
    ],
)
def test_a_condition_with_a_sign_or_value_that_says_something_else_is_refused(tmp_path, condition, problem, hint):
    metadata = {"size": [1, 2], "lang": ["en", "fr"], "score": [0.5, 1.0]}
    sources = [Source(documents=documents_of([5, 6]), path="a.jsonl", metadata=metadata)]
    columns = {"size": "int64", "lang": "string", "score": "float64"}
    corpus = write_corpus(tmp_path / "corpus", sources=sources, columns=columns, tokenizer=TINY_TOKENIZER)
    with pytest.raises(UsageError) as caught:
        copy_corpus(corpus, out=tmp_path / "copy", where=[condition])
    assert problem in caught.value.problem
    assert hint in caught.value.hint
