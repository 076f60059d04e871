"""What the options of a build leave out, put elsewhere and count."""

from __future__ import annotations

import contextlib
import gzip
import inspect
import json
import os
import re
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.inputs import (
    EOS,
    jsonl,
    patch_chunk_bytes,
    patch_merges,
    special_token,
    texts_of,
    write_byte_tokenizer,
)
from tokshard import build_corpus, open_corpus
from tokshard.errors import BadRecordError, BuildError, ConfigurationChangedError, UsageError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline.encode.documents import validation_mask
from tokshard.pipeline.encode.maker import SpecialText
from tokshard.pipeline.judge import BadRecordLimit, parse_bad_record_limit
from tokshard.pipeline.options import BuildOptions, OptionalBuildOptions


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path / ".tokenizer")
    return tmp_path


def write(directory: Path, name: str, texts: Sequence[str]) -> Path:
    path = directory / name
    path.write_bytes(jsonl([{"text": text} for text in texts]))
    return path


def build(directory: Path, sources: Sequence[Path], **options: Any) -> Path:
    settings = {"tokenizer": directory / ".tokenizer", "out": directory / "out", "workers": 1}
    return Path(build_corpus(sources, **{**settings, **options}).directory)


def facts(out: Path) -> tuple[list[str], list[dict[str, int]]]:
    """Texts of a whole corpus, and per source what was left out of it."""
    assert verify_corpus(out).problems == ()
    with open_corpus(out) as corpus:
        sources = corpus.sources()
        assert all(source.records_read == source.documents + sum(source.left_out.values()) for source in sources)
        return texts_of(corpus), [source.left_out for source in sources]


# token limits


def test_documents_with_too_few_or_too_many_tokens_are_left_out_and_delimiters_count(directory):
    source = write(directory, "a.jsonl", ["a", "bb", "ccc", "dddd", "eeeee"])
    out = build(directory, [source], min_tokens=3, max_tokens=5)  # one per byte, and EOS
    assert facts(out) == (["bb", "ccc", "dddd"], [{"over max-tokens": 1, "under min-tokens": 1}])


def test_a_limit_counts_what_is_written(directory):
    source = write(directory, "a.jsonl", ["a", "bb", "", "c", "dd", "bb", "ee", "f"])
    out = build(directory, [source], min_tokens=3, dedup="exact", max_documents=3)
    assert facts(out) == (["bb", "dd", "ee"], [{"duplicate": 1, "empty": 1, "under min-tokens": 2}])


# duplicates


def test_of_equal_texts_the_first_in_input_order_stays(directory):
    first = write(directory, "1.jsonl", ["a", "b", "a", "c"])
    second = write(directory, "2.jsonl", ["c", "d", "a", "d", "A", "a "])
    out = build(directory, [first, second], dedup="exact")
    assert facts(out) == (["a", "b", "c", "d", "A", "a "], [{"duplicate": 1}, {"duplicate": 3}])
    assert not (out / names.WORK).exists()


def test_equal_texts_are_found_however_they_are_written(directory):
    (directory / "1.jsonl").write_bytes(b'{"text": "\\u00e9\\ud83d\\ude42"}\n')
    (directory / "2.csv").write_text("text\n\u00e9\U0001f642\n", encoding="utf-8")
    (directory / "3.txt").write_text("\u00e9\U0001f642", encoding="utf-8")
    out = build(directory, [directory / name for name in ("1.jsonl", "2.csv", "3.txt")], dedup="exact")
    assert facts(out) == (["\u00e9\U0001f642"], [{}, {"duplicate": 1}, {"duplicate": 1}])


def test_another_normal_form_is_another_text(directory):
    source = write(directory, "a.jsonl", ["\u00e9", "e\u0301"])
    assert len(facts(build(directory, [source], dedup="exact"))[0]) == 2


@given(files=st.lists(st.lists(st.sampled_from([*"abcdef", ""]), max_size=12), min_size=1, max_size=4))
def test_any_texts_in_any_tasks_runs_and_partitions_are_deduplicated_as_by_a_set(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("texts")
    write_byte_tokenizer(directory / ".tokenizer")
    sources = [write(directory, f"{number}.jsonl", texts) for number, texts in enumerate([["z"], *files])]
    with pytest.MonkeyPatch.context() as patch:
        patch_chunk_bytes(patch, 64)
        patch_merges(patch)
        out = build(directory, sources, dedup="exact", task_bytes=64)
    assert facts(out)[0] == list(dict.fromkeys(["z", *(text for texts in files for text in texts if text)]))


def test_a_bad_record_is_bad_whether_or_not_it_is_a_duplicate(directory):
    (directory / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "a"\n{"text": "a"}\n')
    with pytest.raises(BadRecordError, match=r"a\.jsonl, line 2: malformed"):
        build(directory, [directory / "a.jsonl"], dedup="exact")
    out = build(directory, [directory / "a.jsonl"], dedup="exact", on_bad_record="skip")
    assert facts(out) == (["a"], [{"duplicate": 1, "malformed": 1}])


# the validation split


def divisibility_of(out: Path) -> tuple[list[str], list[str]]:
    train, left_out = facts(out / names.TRAIN)
    validation, also_left_out = facts(out / names.VALIDATION)
    for ours, theirs, documents in (
        (left_out, also_left_out, validation),
        (also_left_out, left_out, train),
    ):
        elsewhere = [key for source in ours for key in source if "split" in key]
        assert sum(source.get(elsewhere[0], 0) for source in ours) == len(documents)
        shared = [{key: value for key, value in source.items() if "split" not in key} for source in ours]
        assert shared == [{key: value for key, value in source.items() if "split" not in key} for source in theirs]
    return train, validation


TEXTS = [f"text {number}" for number in range(400)]


def test_a_validation_split_has_every_document_once_and_about_its_share(directory):
    out = build(directory, [write(directory, "a.jsonl", [*TEXTS, "", "text 7"])], validation_fraction=0.25)
    train, validation = divisibility_of(out)
    assert sorted([*train, *validation]) == sorted([*TEXTS, "text 7"])
    assert 70 < len(validation) < 130
    assert validation == [text for text in [*TEXTS, "text 7"] if text in set(validation)]  # in input order
    assert not (out / names.WORK).exists()


def test_adding_inputs_or_raising_the_fraction_moves_no_document_out_of_validation(directory):
    first = write(directory, "a.jsonl", TEXTS)
    more = write(directory, "more.jsonl", [f"more {number}" for number in range(100)])
    small = set(divisibility_of(build(directory, [first], validation_fraction=0.1))[1])
    added = set(divisibility_of(build(directory, [more, first], validation_fraction=0.1, force=True))[1])
    raised = set(divisibility_of(build(directory, [first], validation_fraction=0.3, force=True))[1])
    assert small == {text for text in added if text.startswith("text")}
    assert small < raised


def test_the_hash_that_splits_is_fixed():
    # golden: a change moves documents between the corpora of saved builds; see _SPLIT_PERSON
    assert validation_mask([f"text {number}".encode() for number in range(20)], 0.25).nonzero()[0].tolist() == [
        4,
        5,
        12,
        17,
    ]


def test_a_split_without_documents_is_an_error(directory):
    source = write(directory, "a.jsonl", ["only one"])
    with pytest.raises(BuildError, match="the validation split got no document: 1 record read, 1 in the train split"):
        build(directory, [source], validation_fraction=0.001)


def test_a_limit_counts_the_documents_of_both_corpora(directory):
    source = write(directory, "a.jsonl", TEXTS)
    train, validation = divisibility_of(build(directory, [source], validation_fraction=0.25, max_documents=100))
    assert sorted([*train, *validation]) == sorted(TEXTS[:100])


def test_a_finished_split_is_left_alone_and_other_settings_are_refused(directory):
    source = write(directory, "a.jsonl", TEXTS)
    out = build(directory, [source], validation_fraction=0.25)
    settings: dict[str, Any] = {"tokenizer": directory / ".tokenizer", "out": out, "workers": 1}
    assert not build_corpus([source], **settings, validation_fraction=0.25).is_new
    with pytest.raises(ConfigurationChangedError, match=r"--validation-fraction was 0\.25, now 0\.5"):
        build_corpus([source], **settings, validation_fraction=0.5)
    with pytest.raises(ConfigurationChangedError, match="train is a corpus of a validation split"):
        build_corpus([source], **settings)
    (out / names.TRAIN / names.MANIFEST).unlink()
    with pytest.raises(ConfigurationChangedError, match="validation, but not"):
        build_corpus([source], **settings, validation_fraction=0.25)
    result = build_corpus([source], **settings, force=True)
    assert result.is_new
    assert not (out / names.VALIDATION).exists()
    assert (out / names.TRAIN / names.SHARD_TABLE).exists(), "without its manifest nothing says that it is a build's"
    with pytest.raises(ConfigurationChangedError, match="without a validation split"):
        build_corpus([source], **settings, validation_fraction=0.25)


def test_verify_compares_the_two_corpora_of_a_split(directory):
    source = write(directory, "a.jsonl", TEXTS)
    out = build(directory, [source], validation_fraction=0.25)
    other = write(directory, "b.jsonl", TEXTS[:300])
    other.rename(source)
    elsewhere = build(directory, [source], validation_fraction=0.25, out=directory / "other")
    shutil.rmtree(out / names.VALIDATION)
    shutil.copytree(elsewhere / names.VALIDATION, out / names.VALIDATION)
    problem, *_ = verify_corpus(out / names.TRAIN).problems
    assert problem.message == "says that the number of records read (compare validation) is 400, expected 300"


# damaged inputs


def test_a_damaged_input_is_left_out_whole_and_listed(directory, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    write(directory, "1.jsonl", ["one"])
    lines = jsonl([{"text": f"line {number} of a file that is cut into many"} for number in range(100)])
    (directory / "2.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    write(directory, "3.jsonl", ["three"])
    sources = [directory / name for name in ("1.jsonl", "2.jsonl.gz", "3.jsonl")]
    out = build(directory, sources, on_bad_source="skip", task_bytes=64)
    assert facts(out) == (["one", "three"], [{}, {"damaged input": 1}, {}])
    (reject,) = [json.loads(line) for line in (out / names.REJECTS).read_text().splitlines()]
    assert {**reject, "detail": ""} == {
        "source": "2.jsonl.gz",
        "record": None,
        "reason": "damaged input",
        "detail": "",
    }
    assert reject["detail"].startswith("is damaged: ")
    report = json.loads((out / names.REPORT).read_text())
    assert list(report["damaged_inputs"]) == [str(sources[1])]
    assert [path.name for path in out.iterdir() if names.is_shard_name(path.name) and "-0000001-" in path.name] == []


def test_a_build_of_damaged_inputs_only_writes_nothing(directory):
    (directory / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(BuildError, match="no document was written: 1 record read, 1 damaged input"):
        build(directory, [directory / "a.parquet"], on_bad_source="skip")


def test_from_skipping_damage_to_failing_is_another_build(directory, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    (directory / "a.parquet").write_bytes(b"no parquet" * 30)
    write(directory, "b.jsonl", ["text"] * 20)
    (directory / "c.jsonl").write_bytes(b"{")
    sources = [directory / name for name in ("a.parquet", "b.jsonl", "c.jsonl")]
    with pytest.raises(BadRecordError):
        build(directory, sources, on_bad_source="skip", task_bytes=64)
    with pytest.raises(ConfigurationChangedError, match="--on-bad-source was skip, now fail"):
        build(directory, sources, on_bad_source="fail", task_bytes=64)


# too many bad records


def bad_lines(directory: Path, name: str, count: int, bad: set[int]) -> Path:
    path = directory / name
    path.write_bytes(b"".join(b"{\n" if n in bad else b'{"text": "line %d"}\n' % n for n in range(1, count + 1)))
    return path


def test_the_first_bad_record_over_the_limit_is_named(directory, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    first, second = bad_lines(directory, "a.jsonl", 40, {7, 30}), bad_lines(directory, "b.jsonl", 40, {9, 33, 34})
    options: dict[str, Any] = {"on_bad_record": "skip", "task_bytes": 64}
    expected = r"b\.jsonl, line 33: malformed: .*; this is bad record 4, and --max-bad-records allows 3"
    for dedup in ("none", "exact"):
        with pytest.raises(BadRecordError, match=expected):
            build(directory, [first, second], max_bad_records=3, dedup=dedup, **options)
        with pytest.raises(BadRecordError, match=expected):  # and again, with all receipts there
            build(directory, [first, second], max_bad_records="3", dedup=dedup, **options)
        out = build(directory, [first, second], max_bad_records=5, dedup=dedup, **options)
        assert [left_out["malformed"] for left_out in facts(out)[1]] == [2, 3]
        shutil.rmtree(out)
    with pytest.raises(BadRecordError, match=r"a\.jsonl, line 7"):
        build(directory, [first], max_bad_records=0, **options, force=True)


def test_bad_records_behind_the_limit_on_documents_do_not_count(directory, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    source = bad_lines(directory, "a.jsonl", 40, {7, 30, 31, 32})
    out = build(directory, [source], max_bad_records=1, on_bad_record="skip", task_bytes=64, max_documents=25)
    assert facts(out)[1] == [{"malformed": 1}]


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz"])
@pytest.mark.parametrize("bad", [21, 22, 30])
def test_a_limit_is_kept_where_a_task_ran_with_more_room_and_what_is_behind_it_is_not_seen(
    directory, monkeypatch, name, bad
):
    """The last job of an array runs its own task first, with room for all documents that are wanted."""
    patch_chunk_bytes(monkeypatch, 64 if name.endswith(".gz") else 4096)
    first = write(directory, "a.jsonl", [f"first {number:060}" for number in range(10)])
    lines = [json.dumps({"text": f"second {number}"}).encode() for number in range(100)]
    lines[bad - 1] = b"{"
    content = b"\n".join(lines)
    (directory / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    sources, options = [first, directory / name], {"tokenizer": directory / ".tokenizer", "out": directory / "out"}
    options |= {"task_bytes": 64, "max_documents": 30, "workers": 1}
    with contextlib.suppress(BadRecordError):
        run_job(sources, job_index=1, num_jobs=2, **options)
    run_job(sources, job_index=0, num_jobs=2, **options)
    commit_corpus(directory / "out")
    assert facts(directory / "out")[0] == [
        *(f"first {number:060}" for number in range(10)),
        *(f"second {number}" for number in range(20)),
    ]


def test_a_share_of_bad_records_is_judged_at_the_end_and_before_once_there_are_enough(directory):
    source = bad_lines(directory, "a.jsonl", 50, {1})
    with pytest.raises(BadRecordError, match=r"1 of the first 50 records are bad \(2\.00%\), and .* allows 1\.9%"):
        build(directory, [source], max_bad_records="1.9%", on_bad_record="skip")
    assert facts(build(directory, [source], max_bad_records="2%", on_bad_record="skip"))[1] == [{"malformed": 1}]
    # the limit on documents ends the build at its 11th record, long before a share is judged in between
    with pytest.raises(BadRecordError, match=r"1 of the first 11 records are bad \(9\.09%\), and .* allows 5%"):
        build(directory, [source], max_bad_records="5%", on_bad_record="skip", max_documents=10, force=True)
    limit = parse_bad_record_limit("1%")
    assert limit is not None
    assert not limit.is_exceeded(9_999, 9_999, is_end=False)
    assert limit.is_exceeded(101, 10_000, is_end=False)
    assert not limit.is_exceeded(100, 10_000, is_end=True)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "101%", "%", "1e-3"])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="max_bad_records is "):
        parse_bad_record_limit(text)


def test_a_limit_is_a_number_or_a_share():
    assert parse_bad_record_limit("12") == BadRecordLimit(count=12)
    assert parse_bad_record_limit("100%") == BadRecordLimit(share=Fraction(1))
    assert parse_bad_record_limit("1.5k") == BadRecordLimit(count=1_500)
    assert str(parse_bad_record_limit("0.5 %")) == "0.5%"
    assert parse_bad_record_limit(None) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"min_tokens": 0}, "min_tokens is 0"),
        ({"max_documents": 1 << 64}, "max_documents is 18446744073709551616"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than max_tokens"),
        ({"dedup": "fuzzy"}, "dedup is 'fuzzy'"),
        ({"on_bad_source": "ignore"}, "on_bad_source is 'ignore'"),
        ({"max_bad_records": 3}, "max_bad_records bounds how many"),
    ],
)
def test_options_that_mean_nothing_are_refused(directory, options, problem):
    source = write(directory, "a.jsonl", ["text"])
    with pytest.raises(UsageError) as caught:
        build(directory, [source], **options)
    assert caught.value.problem.startswith(problem)
    assert not (directory / "out").exists()


# special tokens in text


def test_documents_that_spell_a_special_token_are_written_and_counted(directory):
    texts = ["plain", f"one {EOS} two", "<|endoftext", f"{EOS}{EOS}", "<<|endoftext|>>"]
    out = build(directory, [write(directory, "a.jsonl", texts)])
    assert facts(out)[0] == texts
    with open_corpus(out) as corpus:
        assert corpus.manifest.records.with_special_text == 3
    assert '"with_special_text": 3' in (out / names.MANIFEST).read_text()
    out = build(directory, [write(directory, "b.jsonl", texts[:1])], out=directory / "without")
    assert "with_special_text" not in (out / names.MANIFEST).read_text()


@given(
    tokens=st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=4),
    texts=st.lists(st.text("ab<|\u00e9", max_size=300), max_size=4),
)
def test_special_text_is_found_wherever_it_is(tokens, texts):
    expected = [any(token in text for token in tokens) for text in texts]
    assert SpecialText(tokens).mask(texts).tolist() == expected


def test_special_text_behind_many_of_its_first_characters_is_found():
    texts = ["<" * 1_000 + EOS, "<" * 1_000, "<b>" * 100 + "<s>"]
    assert SpecialText([EOS, "<s>"]).mask(texts).tolist() == [True, False, True]


def test_kept_columns_stay_with_their_documents(directory):
    records = [{"text": text, "n": number} for number, text in enumerate([*TEXTS[:50], *TEXTS[:50], "x"])]
    (directory / "a.jsonl").write_bytes(jsonl(records))
    out = build(
        directory,
        [directory / "a.jsonl"],
        keep_field=["n:int64"],
        dedup="exact",
        validation_fraction=0.3,
        min_tokens=3,
    )
    found = []
    for name in (names.TRAIN, names.VALIDATION):
        with open_corpus(out / name) as corpus:
            found += [(text, corpus.metadata(index)["n"]) for index, text in enumerate(texts_of(corpus))]
    assert sorted(found) == sorted((text, number) for number, text in enumerate(TEXTS[:50]))


# settings of another build, in the words of the command line


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, {"max_tokens": 3}, "--max-tokens was not given, now 3"),
        ({"eos": "a b"}, {"eos": EOS}, f"--eos was 'a b', now '{EOS}'"),
        ({"keep_field": ["text"]}, {}, "--keep-field was text:string, now not given"),
        ({"text_field": "text"}, {"text_field": "body"}, "--text-field was text, now body"),
    ],
)
def test_another_setting_is_named_as_it_is_typed(before, now, message, directory):
    tokenizer = json.loads((directory / ".tokenizer/tokenizer.json").read_bytes())
    tokenizer["added_tokens"].append(special_token(257, "a b"))
    (directory / ".tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    source = write(directory, "a.jsonl", ["a"])
    build(directory, [source], **before)
    with pytest.raises(ConfigurationChangedError) as error:
        build(directory, [source], **now)
    assert error.value.problem.partition(" belongs to another build: ")[2].split("; ")[0] == message


def test_another_tokenizer_is_named_without_its_hashes(directory):
    source = write(directory, "a.jsonl", ["a"])
    build(directory, [source])
    tokenizer = json.loads((directory / ".tokenizer/tokenizer.json").read_bytes())
    tokenizer["added_tokens"].append(special_token(257, "<new>"))
    (directory / ".tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigurationChangedError) as error:
        build(directory, [source])
    assert error.value.problem.endswith(
        " belongs to another build: the content of the tokenizer has changed; the special tokens have changed"
    )


def test_a_source_that_was_touched_is_named_with_both_versions(directory):
    source = write(directory, "a.jsonl", ["a"])
    os.utime(source, (1_700_000_000, 1_700_000_000))
    build(directory, [source])
    os.utime(source, ns=(10**9, 1_700_000_001_500_000_000))
    was, now = r"2023-11-14T22:13:20\.0+Z", r"2023-11-14T22:13:21\.50+Z"
    with pytest.raises(ConfigurationChangedError, match=rf"version was {was}\S*, now it is {now}"):
        build(directory, [source])


def test_the_public_function_has_the_names_defaults_and_help_of_all_options():
    fields = dict(inspect.signature(BuildOptions).parameters)
    shown = inspect.signature(build_corpus).parameters
    assert ["sources", *fields] == [name for name in shown if name != "observer"]
    required = {"tokenizer", "out"}
    assert all(shown[name].default == fields[name].default for name in fields if name not in required)
    assert set(OptionalBuildOptions.__annotations__) == set(fields) - required
    for name in fields:
        assert re.search(rf"^ +(\w+, )?{name}(, \w+)?: ", build_corpus.__doc__, re.MULTILINE), name
