"""What a build does with files in its output directory: its own, and those of others."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.examples import crossed
from tests.pipeline.arrays import run_job
from tests.pipeline.inputs import jsonl, texts_of
from tests.pipeline.places import SPLIT, TEXTS, StoppedError, build, files, write
from tokshard import build_corpus, copy_corpus, open_corpus
from tokshard.errors import BuildError, ConfigurationChangedError, DamagedCorpusError, UsageError
from tokshard.format import names
from tokshard.pipeline import build as building
from tokshard.pipeline.sources.hub import HubFiles
from tokshard.pipeline.status import read_status
from tokshard.pipeline.tasks import running

# what is not ours


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("content", ["a file", "a request of another tool", "a folder called build.json"])
def test_a_work_folder_that_no_build_made_is_refused_and_keeps_its_files(place, content, force):
    work = place / "out" / names.WORK
    (work / "receipts").mkdir(parents=True)
    (work / "receipts" / "data").write_text("theirs")
    if content == "a request of another tool":
        (work / "build.json").write_text('{"theme": "dark"}')
    if content == "a folder called build.json":
        (work / "build.json").mkdir()
    before = files(place)
    with pytest.raises((UsageError, BuildError), match=names.WORK):
        build(place, force=force)
    assert before.items() <= files(place).items()


@pytest.mark.parametrize("force", [False, True])
def test_a_work_folder_that_is_a_link_is_refused_and_its_target_keeps_its_files(place, force):
    (place / "scratch").mkdir()
    (place / "scratch" / "data").write_text("theirs")
    (place / "out").mkdir()
    (place / "out" / names.WORK).symlink_to(place / "scratch")
    before = files(place)
    with pytest.raises(UsageError, match="is a link"):
        build(place, force=force)
    assert files(place) == before


def test_a_folder_of_another_tool_called_build_is_none_of_our_business(place):
    out = build(place)
    (out / ".build").mkdir()
    (out / ".build" / "data").write_text("theirs")
    build(place, force=True)
    assert (out / ".build" / "data").read_text() == "theirs"


def test_links_inside_of_a_work_folder_are_removed_and_what_they_lead_to_stays(place, stop):
    stop()
    work = place / "out" / names.WORK
    (place / "theirs").mkdir()
    (place / "theirs" / "0000000-000000.arrow").write_text("theirs")
    for name in ("stale-x", "receipts-old"):
        (work / name).symlink_to(place / "theirs")
    (work / "stale-file").write_text("ours")
    assert texts_of(open_corpus(build(place, force=True))) == TEXTS
    assert not work.exists()
    assert (place / "theirs" / "0000000-000000.arrow").read_text() == "theirs"


def test_a_lock_that_is_a_link_is_not_written_through(place):
    (place / "theirs").write_text("theirs")
    (place / "out" / names.WORK).mkdir(parents=True)
    (place / "out" / names.WORK / "lock").symlink_to(place / "theirs")
    with pytest.raises(BuildError):
        build(place)
    assert (place / "theirs").read_text() == "theirs"


@pytest.mark.parametrize("name", [names.TOKENIZER, names.REJECTS, "shard-00-0000000-000000-0000.arrow"])
@pytest.mark.parametrize("force", [False, True])
def test_a_directory_with_a_file_that_no_build_wrote_is_refused_whatever_its_name(place, name, force):
    (place / "out").mkdir()
    (place / "out" / name).write_text("{}")
    with pytest.raises(UsageError, match=f"is not empty and holds no build: {name}"):
        build(place, force=force)
    assert files(place / "out").keys() == {name}


def test_in_a_corpus_files_with_the_names_of_one_are_the_builds_and_no_others(place):
    out = build(place)
    expected = files(out)
    for name in (
        names.REJECTS,
        "shard-00-0000099-000000-0000.arrow",
        "notes.txt",
        "shard-1.arrow",
        "manifest.json.bak",
    ):
        (out / name).write_text("left here")
    build(place, force=True)
    left = {name: content for name, content in files(out).items() if name not in expected}
    assert left.keys() == {"notes.txt", "shard-1.arrow", "manifest.json.bak"}
    assert files(out) == {**expected, **left}


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("", "the name of the corpus is empty"),
        ("https://127.0.0.1:9/out", "is on a web server, and a build cannot write there"),
        (os.fsdecode(b"out\xff"), r"b'out\\xff': the path of the corpus is not UTF-8"),
        ("a.jsonl", "a.jsonl is a file"),
    ],
)
def test_a_place_where_no_corpus_can_be_is_wrong_usage(place, monkeypatch, out, problem):
    monkeypatch.chdir(place)
    write(place / "a.jsonl", TEXTS)
    write(place / "b.jsonl", TEXTS)
    before = files(place)
    for run in (build_corpus, run_job):
        with pytest.raises(UsageError, match=problem):
            run("b.jsonl", tokenizer=place / "tok", out=out)
    assert files(place) == before


@pytest.mark.parametrize("run", [build_corpus, run_job])
def test_a_place_whose_name_is_too_long_is_named(place, run):
    out = place / ("x" * 300)
    with pytest.raises(BuildError, match="File name too long"):
        run(place / "a.jsonl", tokenizer=place / "tok", out=out)
    with pytest.raises(BuildError, match="File name too long"):
        run(place / "a.jsonl", tokenizer=place / "tok", out=out, append=True)
    with pytest.raises(BuildError, match="File name too long"):
        read_status(out)


@pytest.mark.parametrize("what", ["the tokenizer", "the working directory", "a corpus"])
def test_a_path_that_is_not_utf8_is_refused_before_anything_is_written(place, monkeypatch, what):
    corpus, odd = build(place), place / os.fsdecode(b"odd\xff")
    run = functools.partial(build_corpus, place / "a.jsonl", tokenizer=place / "tok")
    if what == "the tokenizer":
        run = functools.partial(run, tokenizer=shutil.copytree(place / "tok", odd))
    elif what == "the working directory":
        odd.mkdir()
        monkeypatch.chdir(odd)
    else:
        run = functools.partial(copy_corpus, shutil.copytree(corpus, odd))
    before = files(place)
    with pytest.raises(UsageError, match=r"odd\\xff.*: the path is not UTF-8"):
        run(out=corpus if what == "the tokenizer" else place / "new", force=what == "the tokenizer", workers=1)
    assert files(place) == before
    assert not (place / "new").exists()


@pytest.mark.parametrize("tokenizer", ["tok", "tok/tokenizer.json", "link"])
def test_an_output_that_is_the_directory_of_the_tokenizer_is_refused(place, tokenizer):
    (place / "link").symlink_to(place / "tok")
    before = files(place)
    with pytest.raises(UsageError, match="is the directory of the tokenizer"):
        build(place, tokenizer=place / tokenizer, out=place / "tok", force=True)
    assert files(place) == before


@pytest.mark.parametrize("name", [names.TRAIN, names.VALIDATION])
def test_a_split_is_not_built_over_the_tokenizer_that_lies_in_one_of_its_corpora(place, name):
    build(place, **SPLIT)
    before = files(place)
    with pytest.raises(UsageError, match="is the directory of the tokenizer"):
        build(place, **SPLIT, tokenizer=place / "out" / name, force=True)
    assert files(place) == before


# starting over


def test_the_limit_on_the_size_of_documents_may_rise_in_a_stopped_build_that_met_none_and_never_fall(place, stop):
    stop(max_document_bytes=1_000)
    with pytest.raises(ConfigurationChangedError, match="--max-document-bytes was 1000, now 5"):
        build(place, max_document_bytes=5)
    assert texts_of(open_corpus(build(place, max_document_bytes=2_000))) == TEXTS


def test_a_build_that_left_a_shard_and_no_receipt_is_not_continued_with_other_settings(place, stop):
    stop()
    for path in (place / "out" / names.WORK).rglob("*.receipt"):
        path.unlink()
    before = files(place / "out")
    with pytest.raises(ConfigurationChangedError, match="--min-tokens was"):
        build(place, min_tokens=3)
    assert files(place / "out") == before
    assert texts_of(open_corpus(build(place))) == TEXTS


@pytest.mark.parametrize("options", [{}, SPLIT], ids=["without a split", "with a split"])
def test_the_corpus_behind_a_linked_train_folder_survives_starting_over(place, options):
    elsewhere = build(place, out=place / "elsewhere", **SPLIT)
    build(place)
    for name in (names.TRAIN, names.VALIDATION):
        (place / "out" / name).symlink_to(elsewhere / name)
    before = files(elsewhere)
    if options:
        with pytest.raises(UsageError, match="train is a link"):
            build(place, force=True, **options)
    else:
        build(place, force=True)
        assert (place / "out" / names.TRAIN).is_symlink()
    assert files(elsewhere) == before


def test_starting_over_without_a_split_removes_the_two_corpora_and_no_other_file(place):
    out = build(place, **SPLIT)
    (out / names.TRAIN / "notes.txt").write_text("theirs")
    (out / "README").write_text("theirs")
    build(place, force=True)
    left = {name for name in files(out) if name.startswith((names.TRAIN, names.VALIDATION, "README"))}
    assert left == {"train/notes.txt", "README"}
    assert not (out / names.VALIDATION).exists()
    assert texts_of(open_corpus(out)) == TEXTS


def test_starting_over_with_a_split_keeps_a_file_of_the_users_in_a_folder_of_the_split(place):
    out = build(place, **SPLIT)
    before = files(out)
    (out / names.TRAIN / "notes.txt").write_text("theirs")
    build(place, force=True, **SPLIT)
    assert (out / names.TRAIN / "notes.txt").read_text() == "theirs"
    (out / names.TRAIN / "notes.txt").unlink()
    assert files(out) == before


@pytest.mark.parametrize("holds", ["a file", "another corpus"])
def test_a_folder_called_train_that_is_not_of_a_split_is_found_before_anything_is_removed(place, holds):
    out = build(place)
    if holds == "a file":
        (out / names.TRAIN).mkdir()
        (out / names.TRAIN / "picture.png").write_text("theirs")
    else:
        shutil.copytree(out, place / "copy")
        (place / "copy").rename(out / names.TRAIN)
    before = files(out)
    with pytest.raises(UsageError, match="is not empty and holds no corpus of a build with a validation split"):
        build(place, force=True, **SPLIT)
    assert files(out) == before
    build(place, force=True)
    assert files(out) == before


def test_a_manifest_that_names_files_elsewhere_removes_nothing_there(place):
    out = build(place)
    manifest = json.loads((out / names.MANIFEST).read_text())
    manifest["files"]["../precious"] = manifest["files"][names.TOKENIZER]
    (out / names.MANIFEST).write_text(json.dumps(manifest))
    (place / "precious").write_text("theirs")
    build(place, force=True)
    assert (place / "precious").exists()


def test_a_manifest_of_another_form_is_not_taken_for_that_of_a_build(place):
    (place / "out").mkdir()
    (place / "out" / names.MANIFEST).write_text('{"manifest_sha256": "x", "name": "an app"}')
    with pytest.raises(UsageError, match=r"is not empty and holds no build: manifest\.json"):
        build(place, force=True)


def test_a_corpus_with_a_damaged_manifest_is_refused_with_a_way_out(place):
    out = build(place)
    (out / names.MANIFEST).write_bytes((out / names.MANIFEST).read_bytes()[:100])
    before = files(out)
    with pytest.raises(DamagedCorpusError) as refused:
        build(place)
    assert refused.value.hint == "restore the file from a copy, or remove the directory and build again"
    with pytest.raises(UsageError, match="is not empty and holds no build") as caught:
        build(place, force=True)
    assert "manifest.json is damaged: remove the directory" in caught.value.hint
    assert files(out) == before


@pytest.mark.parametrize("begun", [{}, SPLIT], ids=["without a split", "with a split"])
def test_starting_over_in_a_stopped_build_with_other_settings_leaves_nothing_of_it(place, stop, begun):
    stop(**begun)
    options = {} if begun else SPLIT
    expected = files(build(place, out=place / "expected", **options))
    assert files(build(place, force=True, **options)) == expected


class StoppingUnlink:
    """Stops a build before it removes the file number `at`, counted from 1."""

    def __init__(self, at: int) -> None:
        self.left, self.unlink = at, os.unlink

    def __call__(self, path: str | Path) -> None:
        if not Path(path).name.startswith("."):
            self.left -= 1
            if not self.left:
                raise StoppedError
        self.unlink(path)


@pytest.mark.slow
@crossed("options, is_forced_again", [{}, SPLIT], [False, True])
def test_starting_over_that_is_stopped_at_any_file_is_finished_by_the_next_run(
    place, monkeypatch, options, is_forced_again
):
    out, begun = build(place, **({} if options else SPLIT)), place / "begun"
    wanted = files(build(place, out=place / "wanted", **options))
    shutil.copytree(out, begun)
    for at in range(1, 100):
        shutil.rmtree(out)
        shutil.copytree(begun, out)
        stopping = StoppingUnlink(at)
        with monkeypatch.context() as patch, contextlib.suppress(StoppedError):
            patch.setattr(os, "unlink", stopping)
            build(place, force=True, **options)
        if stopping.left:
            break
        if not is_forced_again:
            with contextlib.suppress(ConfigurationChangedError):  # a manifest of the build before may still be there
                build(place, **options)
        if files(out) != wanted:
            build(place, force=True, **options)
        assert files(out) == wanted, at
    assert 10 < at < 99


# what a receipt promises


def first_shard(out: Path) -> Path:
    return next(path for path in sorted(out.rglob("*.arrow")) if names.is_shard_name(path.name))


@pytest.mark.parametrize("options", [{}, SPLIT], ids=["without a split", "with a split"])
@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_shard_that_is_lost_while_a_build_is_stopped_is_written_again(place, stop, how, options):
    expected = files(build(place, out=place / "expected", **options))
    stop(**options)
    path = first_shard(place / "out")
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-8])
    assert files(build(place, **options)) == expected


@pytest.mark.parametrize("options", [{}, SPLIT], ids=["without a split", "with a split"])
@pytest.mark.parametrize("how", ["is gone", "has"])
def test_a_build_whose_shard_is_lost_before_its_end_does_not_say_that_it_is_complete(place, monkeypatch, how, options):
    expected = files(build(place, out=place / "expected", **options))
    original = building.commit

    def lose(*arguments: Any) -> Any:
        path = first_shard(place / "out")
        path.unlink() if how == "is gone" else path.write_bytes(b"short")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(building, "commit", lose)
        with pytest.raises(BuildError, match=rf"{how} .*since its task was done"):
            build(place, **options)
    assert not list((place / "out").rglob(names.MANIFEST))
    assert files(build(place, **options)) == expected


@pytest.mark.parametrize("how", ["gone", "short"])
@pytest.mark.parametrize("stage", ["write", "hash"])
def test_a_list_of_bad_records_that_is_lost_is_made_again(place, stop, how, stage):
    (place / "a.jsonl").write_bytes(b"{\n" + jsonl([{"text": text} for text in TEXTS]))
    options = {"on_bad_record": "skip", "dedup": "exact"}
    expected = files(build(place, out=place / "expected", **options))
    assert names.REJECTS in expected
    stop(**options)
    (path,) = (place / "out" / names.WORK / stage / "rejects").glob("*.jsonl")
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"")
    assert files(build(place, **options)) == expected


def test_a_list_of_bad_records_with_a_flipped_byte_is_named(place, stop):
    (place / "a.jsonl").write_bytes(b"{\n" + jsonl([{"text": text} for text in TEXTS]))
    stop(on_bad_record="skip")
    (path,) = (place / "out" / names.WORK / "write" / "rejects").glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b"source", b"rource"))
    problem = r"rejects/0000000-000000\.jsonl cannot be read: its content does not have its checksum"
    with pytest.raises(BuildError, match=problem) as caught:
        build(place, on_bad_record="skip")
    assert caught.value.hint.startswith("delete that file and run the same command again")
    path.unlink()
    assert texts_of(open_corpus(build(place, on_bad_record="skip"))) == TEXTS


@pytest.mark.parametrize("change", ["gone", "short", "long"])
def test_hashes_that_are_lost_are_made_again(place, stop, change):
    expected = files(build(place, out=place / "expected", dedup="exact"))
    stop(dedup="exact")
    (path,) = (place / "out" / names.WORK / "hash" / "files").glob("0*.bin")
    content = path.read_bytes()
    path.unlink()
    if change != "gone":
        path.write_bytes(content[:-4] if change == "short" else content + bytes(4))
    assert files(build(place, dedup="exact")) == expected


def test_a_list_of_bad_records_that_goes_while_a_build_ends_is_named(place, monkeypatch):
    (place / "a.jsonl").write_bytes(b"{\n" + jsonl([{"text": text} for text in TEXTS]))
    original = building.commit

    def lose(*arguments: Any) -> Any:
        for path in (place / "out" / names.WORK / "write" / "rejects").glob("*"):
            path.unlink()
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(building, "commit", lose)
        with pytest.raises(BuildError, match=r"rejects/0000000-000000\.jsonl cannot be read") as caught:
            build(place, on_bad_record="skip")
    assert caught.value.hint == "run the same command again: the task that left it runs again"
    assert texts_of(open_corpus(build(place, on_bad_record="skip"))) == TEXTS


# which command continues a build


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("named", ["a.jsonl b.jsonl", "x/a.jsonl y/a.jsonl"])
def test_the_same_sources_in_another_order_are_another_build(place, stop, named, is_finished):
    sources = [place / name for name in named.split()]
    for number, source in enumerate(sources):
        source.parent.mkdir(exist_ok=True)
        os.utime(write(source, [f"text {number}"]), (1, 1))
    if is_finished:
        build(place, *sources)
        assert build(place, *sources)
    else:
        stop(*sources)
    with pytest.raises(ConfigurationChangedError, match=r"(?m)the order of the sources changed$"):
        build(place, *reversed(sources))


def test_another_source_of_equal_size_and_time_is_another_build(place):
    for name in ("a.jsonl", "b.jsonl"):
        os.utime(write(place / name, [name]), (1, 1))
    build(place, place / "a.jsonl")
    with pytest.raises(ConfigurationChangedError, match=r"(?m)the sources were a\.jsonl, now b\.jsonl$") as caught:
        build(place, place / "b.jsonl")
    assert caught.value.hint.endswith("--append to add sources to the corpus, or --force to replace all of it")


@pytest.mark.parametrize("most_listed", [0, 10])
def test_a_corpus_of_a_source_that_changed_since_is_not_taken_for_that_of_the_source(place, monkeypatch, most_listed):
    monkeypatch.setattr("tokshard.pipeline.commit._MAX_LISTED_SOURCES", most_listed)
    os.utime(write(place / "a.jsonl", ["one"]), (1, 1))
    build(place)
    os.utime(write(place / "a.jsonl", ["two"]), (2, 2))
    with pytest.raises(ConfigurationChangedError):
        build(place)


@pytest.mark.parametrize(
    "report",
    [
        "[" * 100_000,
        '{"roots": 3}',
        '{"roots": [1, "a"]}',
        '{"sources": [{}]}',
        '{"sources": [{"argument": [], "path": "", "version": ""}]}',
        '{"num_sources": "many", "source_times_sha256": "another"}',
    ],
)
def test_a_report_of_another_form_counts_as_one_that_is_gone(place, report):
    out = build(place)
    (out / names.REPORT).write_text(report)
    before = files(out)
    build(place)
    assert files(out) == before
    build(place, write(place / "b.jsonl", ["more"]), append=True)
    with open_corpus(out) as corpus:
        assert corpus.num_generations == 2


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_tokenizer_whose_folder_was_renamed_is_the_same(place, stop, is_finished):
    build(place) if is_finished else stop()
    (place / "tok").rename(place / "renamed")
    assert texts_of(open_corpus(build(place, tokenizer=place / "renamed"))) == TEXTS


def test_the_command_that_continues_a_build_names_the_commits_of_the_hub(place, stop, monkeypatch):
    dataset = HubFiles(str(place), "hf://someone/notes@c0ffee:train", ["a.jsonl"])
    model = HubFiles(str(place / "tok"), "someone/bytes@facade", ["tokenizer.json"])
    monkeypatch.setattr("tokshard.pipeline.sources.hub.fetch_dataset", lambda _: dataset)
    monkeypatch.setattr("tokshard.pipeline.encode.tokenizer_file.fetch_tokenizer", lambda _: model)
    stop("hf://someone/notes", tokenizer="someone/bytes")
    command = read_status(place / "out").command
    assert "hf://someone/notes@c0ffee:train" in command
    assert command[command.index("--tokenizer") + 1] == "hf://someone/bytes@facade"


def test_several_damaged_files_of_a_group_are_found_in_one_go(place, monkeypatch):
    (place / "data").mkdir()
    for number in range(40):
        content = jsonl([{"text": f"text {number}"}])
        (place / "data" / f"{number:02d}.jsonl.gz").write_bytes(b"damaged" if number % 5 == 2 else gzip_of(content))
    reads = []
    original = running.read_span

    def counted(source: Any, *arguments: Any) -> Any:
        reads.append(source.index)
        return original(source, *arguments)

    monkeypatch.setattr(running, "read_span", counted)
    out = build(place, place / "data", on_bad_source="skip")
    assert texts_of(open_corpus(out)) == [f"text {number}" for number in range(40) if number % 5 != 2]
    assert len((out / names.REJECTS).read_text().splitlines()) == 8
    assert reads.count(0) == 2  # it comes before the first damaged one, where the task begins anew
    assert max(map(reads.count, reads)) <= 3


def test_damage_behind_a_limit_is_not_looked_for(place):
    (place / "data").mkdir()
    for number in range(6):
        content = jsonl([{"text": f"text {number}"}])
        (place / "data" / f"{number:02d}.jsonl.gz").write_bytes(b"damaged" if number in (1, 4) else gzip_of(content))
    out = build(place, place / "data", on_bad_source="skip", max_documents=2)
    assert [json.loads(line)["source"] for line in (out / names.REJECTS).read_text().splitlines()] == [
        "data/01.jsonl.gz"
    ]


def gzip_of(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)
