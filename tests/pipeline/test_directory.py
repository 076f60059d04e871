"""What a build does with files in its output directory: its own, and those of others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.corpora import rewrite_manifest
from tests.pipeline.places import SPLIT, build, files, write
from tokshard import open_corpus
from tokshard.errors import BuildError, ConfigurationChangedError, DamagedCorpusError
from tokshard.format import names
from tokshard.pipeline.sources.hub import HubFiles
from tokshard.pipeline.status import read_status

# what is not ours


@pytest.mark.parametrize("options", [{}, SPLIT], ids=["to a corpus", "to a split"])
@pytest.mark.parametrize("begun", [{}, SPLIT], ids=["from a corpus", "from a split"])
@pytest.mark.parametrize("is_finished", [True, False])
def test_starting_over_removes_what_builds_make_and_no_other_file(place, stop, options, begun, is_finished):
    expected = files(build(place, out=place / "expected", **options))
    build(place, **begun) if is_finished else stop(**begun)
    out, work = place / "out", place / "out" / names.WORK
    theirs = ["notes.txt", "shard-1.arrow", "manifest.json.bak", ".build/data", "../linked/0000000-000000.arrow"]
    theirs += [f"{names.TRAIN}/notes.txt"] if begun and is_finished else []
    ours = [names.REJECTS, "shard-00-0000099-000000-0000.arrow"] if is_finished and not begun else []
    for name in (*theirs, *ours):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("left here")
    if not is_finished:
        for name in ("stale-x", "receipts-old"):
            (work / name).symlink_to(place / "linked")
    elif not begun:
        manifest = json.loads((out / names.MANIFEST).read_text())
        manifest["files"]["../linked/0000000-000000.arrow"] = manifest["files"][names.TOKENIZER]
        (out / names.MANIFEST).write_text(json.dumps(manifest))
    build(place, force=True, **options)
    assert all((out / name).read_text() == "left here" for name in theirs)
    assert files(out).keys() == {*expected, *(name for name in theirs if not name.startswith(".."))}
    assert expected.items() <= files(out).items()


# which command continues a build


def test_a_corpus_that_is_replaced_while_an_append_lists_its_sources_stays_as_it_is(place, monkeypatch):
    def replace(*_: object) -> None:
        monkeypatch.undo()
        build(place, place / "a.jsonl", force=True, max_documents=2)

    build(place, place / "a.jsonl")
    monkeypatch.setattr("tokshard.pipeline.build.check_directory", replace)
    with pytest.raises(BuildError, match="was replaced by another build just now"):
        build(place, write(place / "b.jsonl", ["b"]), append=True)
    assert len(open_corpus(place / "out")) == 2


@pytest.mark.parametrize("most_listed", [0, 10])
def test_a_corpus_of_a_source_that_changed_since_is_not_taken_for_that_of_the_source(place, monkeypatch, most_listed):
    monkeypatch.setattr("tokshard.pipeline.commit._MAX_LISTED_SOURCES", most_listed)
    os.utime(write(place / "a.jsonl", ["one"]), (1, 1))
    build(place)
    os.utime(write(place / "a.jsonl", ["two"]), (2, 2))
    with pytest.raises(ConfigurationChangedError):
        build(place)


def test_the_command_that_continues_a_build_names_the_commits_of_the_hub(place, stop, monkeypatch):
    dataset = HubFiles(str(place), "hf://someone/notes@c0ffee:train", ["a.jsonl"])
    model = HubFiles(str(place / "tok"), "someone/bytes@facade", ["tokenizer.json"])
    monkeypatch.setattr("tokshard.pipeline.sources.hub.fetch_dataset", lambda _: dataset)
    monkeypatch.setattr("tokshard.pipeline.encode.tokenizer_file.fetch_tokenizer", lambda _: model)
    stop("hf://someone/notes", tokenizer="someone/bytes")
    command = read_status(place / "out").command
    assert "hf://someone/notes@c0ffee:train" in command
    assert command[command.index("--tokenizer") + 1] == "hf://someone/bytes@facade"


# generations that do not belong together


def test_a_generation_of_the_other_split_is_refused_even_where_its_manifest_says_that_it_follows(place: Path) -> None:
    build(place, **SPLIT)
    build(place, write(place / "b.jsonl", [f"more {number}" for number in range(40)]), append=True, **SPLIT)
    train, validation = (place / "out" / name for name in (names.TRAIN, names.VALIDATION))
    folder = names.generation_folder(1)
    shutil.rmtree(validation / folder)
    shutil.copytree(train / folder, validation / folder)
    previous = json.loads((validation / names.MANIFEST).read_bytes())["manifest_sha256"]
    rewrite_manifest(validation / folder, lambda fields: fields["generation"].update(previous=previous))
    with pytest.raises(DamagedCorpusError, match="another split than the generation before it"):
        open_corpus(validation)
