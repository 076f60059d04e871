"""Corpora that grow: what an append adds, keeps, refuses, and what one corpus of all generations is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.contract.test_promise_01_faults import write_tokenizer
from tests.corpora import rewrite_manifest
from tests.examples import examples
from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.inputs import jsonl
from tests.store.memory import SCHEME, MemoryStore
from tokshard import build_corpus, copy_corpus, export_corpus, open_corpus
from tokshard.errors import (
    BuildError,
    ConfigurationChangedError,
    CorpusError,
    DamagedCorpusError,
    PlanError,
    UsageError,
)
from tokshard.format import names
from tokshard.inspect.corpus.report import read_documents, read_report
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline.status import read_status
from tokshard.pipeline.workspace.places import WRITE
from tokshard.runtime.plan import StreamPlan
from tokshard.store import STORES_BY_SCHEME, files_below, open_store


class Shop:
    """Sources and corpora in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = write_tokenizer(directory)

    def source(self, name: str, texts: Sequence[str]) -> str:
        path = self.directory / f"{name}.jsonl"
        path.write_bytes(jsonl([{"text": text, "n": number} for number, text in enumerate(texts)]))
        return str(path)

    def build(self, sources: str | Sequence[str], out: str = "corpus", **options: Any) -> Any:
        kept = {"tokenizer": self.tokenizer, "out": self.directory / out, "workers": 1, **options}
        return build_corpus(sources, **kept)

    def open(self, out: str = "corpus", **options: Any) -> Any:
        return open_corpus(self.directory / out, **options)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def texts_of(corpus: Any) -> list[str]:
    return [corpus.text(index) for index in range(len(corpus))]


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


LISTS = st.lists(
    st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), min_size=1, max_size=12), min_size=2, max_size=5
)


@settings(max_examples=examples(12))
@given(lists=LISTS, cuts=st.sets(st.integers(1, 4)), dedup=st.sampled_from(["none", "exact"]))
def test_appends_of_any_cut_of_the_sources_hold_what_one_build_of_all_holds(
    tmp_path_factory: pytest.TempPathFactory, lists: list[list[str]], cuts: set[int], dedup: str
) -> None:
    shop = Shop(tmp_path_factory.mktemp("shop"))
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, part_texts=5, fence_rows=2, slice_rows=8)
        # each part has a text of its own, because a build has to write a document
        sources = [shop.source(f"s{index}", [f"first of {index}", *texts]) for index, texts in enumerate(lists)]
        shop.build(sources, "whole", dedup=dedup)
        bounds = [0, *sorted(cut for cut in cuts if cut < len(sources)), len(sources)]
        for start, stop in pairwise(bounds):
            shop.build(sources[start:stop], "grown", dedup=dedup, append=start > 0)
    whole, grown = shop.open("whole"), shop.open("grown")
    assert texts_of(grown) == texts_of(whole)
    assert grown.fingerprint == whole.fingerprint
    assert grown.num_generations == len(bounds) - 1
    assert grown.manifest.records == whole.manifest.records
    assert grown.manifest.document_lengths == whole.manifest.document_lengths
    assert grown.manifest.num_tokens == whole.manifest.num_tokens
    assert [source.left_out for source in grown.sources()] == [source.left_out for source in whole.sources()]
    for index in range(len(whole)):
        assert grown.provenance(index) == whole.provenance(index)
    assert verify_corpus(shop.directory / "grown").problems == ()


def test_a_generation_can_be_pinned_and_opened_alone(shop: Shop) -> None:
    for number, texts in enumerate((["a", "b"], ["c"], ["d", "e"])):
        shop.build(shop.source(f"s{number}", texts), append=number > 0, keep_field="n:int64")
    assert texts_of(shop.open()) == ["a", "b", "c", "d", "e"]
    assert texts_of(shop.open(generation=0)) == ["a", "b"]
    assert texts_of(shop.open(generation=1)) == ["a", "b", "c"]
    alone = shop.open("corpus/generation-02")
    assert texts_of(alone) == ["d", "e"]
    assert alone.metadata(1) == {"n": 1}
    assert shop.open().metadata(4) == {"n": 1}
    with pytest.raises(UsageError, match="has no generation 3: it has generations 0 to 2"):
        shop.open(generation=3)


def test_a_corpus_that_is_open_goes_on_being_read_while_one_is_appended(shop: Shop) -> None:
    shop.build(shop.source("one", ["a", "b"]))
    before, files = shop.open(), files_of(shop.directory / "corpus")
    shop.build(shop.source("two", ["c"]), append=True)
    assert texts_of(before) == ["a", "b"]
    now = files_of(shop.directory / "corpus")
    assert {name: now[name] for name in files} == files


def test_the_same_append_again_does_nothing_and_other_sources_are_the_next_generation(shop: Shop) -> None:
    shop.build(shop.source("one", ["a"]))
    two = shop.source("two", ["b"])
    assert shop.build(two, append=True).is_new
    files = files_of(shop.directory / "corpus")
    again = shop.build(two, append=True)
    assert not again.is_new
    assert again.manifest.generation.number == 1
    assert files_of(shop.directory / "corpus") == files
    assert shop.build(shop.source("three", ["c"]), append=True).manifest.generation.number == 2


def test_sources_that_are_in_the_corpus_already_are_refused_unless_texts_are_compared(shop: Shop) -> None:
    one, two = shop.source("one", ["a"]), shop.source("two", ["b"])
    shop.build(one, dedup="exact")
    with pytest.raises(UsageError, match=r"one\.jsonl is in .*corpus already, in generation 0"):
        shop.build([two, one], append=True)
    shop.build([two, one], append=True, dedup="exact")
    assert texts_of(shop.open()) == ["a", "b"]
    assert shop.open().manifest.records.left_out == {"duplicate": 1}


@pytest.mark.parametrize("kind", ["hard link", "link", "link to its folder"])
def test_another_name_of_a_source_that_is_in_the_corpus_is_refused(shop: Shop, tmp_path: Path, kind: str) -> None:
    one, other = shop.source("one", ["a"]), tmp_path / "other.jsonl"
    shop.build([shop.source("zero", ["z"]), one])
    if kind == "hard link":
        other.hardlink_to(one)
    elif kind == "link":
        other.symlink_to(one)
    else:
        (tmp_path / "folder").symlink_to(tmp_path)
        other = tmp_path / "folder" / "one.jsonl"
    with pytest.raises(UsageError, match=r"(one|other)\.jsonl is in .*corpus already, in generation 0"):
        shop.build(str(other), append=True)
    Path(one).unlink()  # what has several names is no reason by itself
    two = shop.source("two", ["b"])
    (tmp_path / "third.jsonl").hardlink_to(two)
    shop.build(two, append=True)
    assert texts_of(shop.open()) == ["z", "a", "b"]


def test_a_corpus_without_its_build_report_says_that_it_may_hold_the_same_sources(shop: Shop, tmp_path: Path) -> None:
    shop.build(shop.source("one", ["a"]))
    (tmp_path / "corpus" / names.REPORT).unlink()
    done = shop.build(shop.source("two", ["b"]), append=True)
    assert f"generation 0 of {tmp_path}/corpus has no build report: it may hold the same sources" in done.notes


def test_a_copy_knows_where_its_sources_were(shop: Shop) -> None:
    one, two = shop.source("one", ["a"]), shop.source("two", ["b"])
    shop.build(one, "first")
    shop.build(two, "first", append=True)
    copy_corpus(shop.directory / "first", out=shop.directory / "corpus", workers=1)
    with pytest.raises(UsageError, match=r"two\.jsonl is in .*corpus already, in generation 0"):
        shop.build(two, append=True)


def test_a_copy_of_one_part_of_a_split_grows_as_a_whole(shop: Shop) -> None:
    shop.build(shop.source("one", list("abcdefgh")), "split", validation_fraction=0.5)
    copy_corpus(shop.directory / "split" / "validation", out=shop.directory / "corpus", workers=1)
    two = shop.source("two", ["i"])
    with pytest.raises(UsageError, match="--validation-fraction was not given, now"):
        shop.build(two, append=True, validation_fraction=0.5)
    shop.build(two, append=True)
    assert texts_of(shop.open())[-1] == "i"
    assert verify_corpus(str(shop.directory / "corpus")).is_ok


def test_a_source_that_has_grown_since_is_refused_because_its_first_texts_would_come_twice(shop: Shop) -> None:
    shop.build(shop.source("one", ["a"]), dedup="exact")
    one = shop.source("one", ["a", "b"])
    with pytest.raises(UsageError, match=r"one\.jsonl is in .* in generation 0, of 22 bytes then and 44 now") as caught:
        shop.build(one, append=True)
    assert "put added records into a new file" in caught.value.hint
    shop.build(one, append=True, dedup="exact")
    assert texts_of(shop.open()) == ["a", "b"]


def test_one_part_of_a_split_does_not_grow_alone(shop: Shop) -> None:
    options: dict[str, Any] = {"validation_fraction": 0.3}
    shop.build(shop.source("one", [f"text {number}" for number in range(30)]), **options)
    files = files_of(shop.directory / "corpus")
    with pytest.raises(UsageError, match="only the train part of a corpus with a validation split"):
        shop.build(shop.source("two", ["b"]), "corpus/train", append=True, **options)
    assert files_of(shop.directory / "corpus") == files


@pytest.mark.parametrize("folder", ["generation-01", "generation-03", "other"])
@pytest.mark.parametrize("options", [{}, {"append": True}, {"force": True}])
def test_nothing_is_built_inside_a_corpus(shop: Shop, grown: Path, folder: str, options: dict[str, Any]) -> None:
    files = files_of(grown)
    with pytest.raises(UsageError, match=f"corpus/{folder} lies inside the corpus .*corpus"):
        shop.build(shop.source("three", ["c"]), f"corpus/{folder}", **options)
    assert files_of(grown) == files


def test_appending_to_nothing_or_to_an_unfinished_build_is_refused(shop: Shop) -> None:
    one = shop.source("one", ["a"])
    with pytest.raises(UsageError, match=r"--append adds to a corpus, and .*corpus holds none"):
        shop.build(one, append=True)
    bad = shop.directory / "bad.jsonl"
    bad.write_bytes(b'{"text": "a"}\n{\n')
    with pytest.raises(Exception, match=r"bad\.jsonl"):
        shop.build(str(bad))
    with pytest.raises(UsageError, match="holds an unfinished build"):
        shop.build(one, append=True)


def test_a_second_append_is_refused_while_one_is_unfinished_and_the_older_generation_stays(shop: Shop) -> None:
    shop.build(shop.source("one", ["a"]))
    unfinished(shop)
    assert texts_of(shop.open()) == ["a"]
    assert verify_corpus(shop.directory / "corpus").problems == ()
    status = read_status(shop.directory / "corpus")
    assert (status.state, status.generation) == ("unfinished", 1)
    assert "--append" in status.command
    with pytest.raises(ConfigurationChangedError, match="belongs to another build"):
        shop.build(shop.source("other", ["x"]), append=True)
    # the command of the older generation finds it complete, and leaves the append alone
    assert not shop.build(str(shop.directory / "one.jsonl")).is_new
    assert read_status(shop.directory / "corpus").state == "unfinished"
    shop.build(shop.source("other", ["x"]), append=True, force=True)
    assert texts_of(shop.open()) == ["a", "x"]


def unfinished(shop: Shop) -> None:
    """Begin an append that has written a shard."""
    good, bad = shop.source("good", ["b"] * 20), shop.directory / "bad.jsonl"
    bad.write_bytes(b'{"text": "c"}\n{\n' + b" " * 4000)
    with pytest.raises(Exception, match=r"bad\.jsonl"):
        build_corpus([good, str(bad)], tokenizer=shop.tokenizer, out=shop.directory / "corpus", workers=1, append=True)
    folder = shop.directory / "corpus" / names.generation_folder(1)
    if not list(folder.glob("*.arrow")):  # both inputs were one task
        folder.mkdir(exist_ok=True)
        (folder / "shard-01-0000000-000000-0000.arrow").write_bytes(b"")


def test_starting_over_removes_all_generations_and_with_append_the_last_one_only(shop: Shop) -> None:
    one, two = shop.source("one", ["a"]), shop.source("two", ["b"])
    shop.build(one)
    shop.build(two, append=True)
    before = files_of(shop.directory / "corpus")
    assert shop.build(two, append=True, force=True).is_new
    after = files_of(shop.directory / "corpus")
    assert after.keys() == before.keys()
    # its times may be the same
    assert {name for name in before if before[name] != after[name]} <= {"generation-01/build-report.json"}
    shop.build(two, force=True)
    assert texts_of(shop.open()) == ["b"]
    assert not (shop.directory / "corpus" / "generation-01").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_field": "n:int64"}, "--keep-field was not given, now n:int64"),
        ({"min_tokens": 2}, "--min-tokens was not given, now 2"),
        ({"validation_fraction": 0.5}, "--validation-fraction was not given, now 0.5"),
        ({"shard_tokens": 1000}, "--shard-tokens was 256000000, now 1000"),
        ({"bos": "<|endoftext|>"}, "--bos was not given"),
    ],
)
def test_documents_of_another_kind_are_refused(shop: Shop, options: dict[str, Any], message: str) -> None:
    shop.build(shop.source("one", ["a"]))
    with pytest.raises(ConfigurationChangedError, match=message):
        shop.build(shop.source("two", ["b"]), append=True, **options)


def test_the_sizes_of_shards_and_tasks_are_those_of_the_corpus(shop: Shop) -> None:
    shop.build(shop.source("one", ["a"]), shard_tokens=1234, task_bytes=5 << 20)
    build = shop.build(shop.source("two", ["b"]), append=True).manifest.build
    first = shop.open(generation=0).manifest.build
    assert (build.shard_tokens, build.task_bytes) == (first.shard_tokens, first.task_bytes)
    assert first.shard_tokens == 1234


def test_both_corpora_of_a_validation_split_grow(shop: Shop) -> None:
    texts = [f"text {number}" for number in range(60)]
    options: dict[str, Any] = {"validation_fraction": 0.3, "dedup": "exact"}
    shop.build([shop.source("one", texts[:30]), shop.source("two", texts[20:])], "whole", **options)
    shop.build(shop.source("one", texts[:30]), **options)
    shop.build(shop.source("two", texts[20:]), append=True, **options)
    for split in ("train", "validation"):
        assert shop.open(f"corpus/{split}").fingerprint == shop.open(f"whole/{split}").fingerprint
        assert verify_corpus(shop.directory / "corpus" / split).problems == ()
    assert {
        path.relative_to(shop.directory / "corpus").parts[0]
        for path in shop.directory.glob("corpus/**/" + names.HASHES)
    } == {"train"}
    assert read_status(shop.directory / "corpus").documents == 60


@pytest.mark.slow
@pytest.mark.parametrize("dedup", ["none", "exact"])
def test_a_split_grows_by_nothing_where_all_new_documents_are_of_the_other_one(shop: Shop, dedup: str) -> None:
    options: dict[str, Any] = {"validation_fraction": 0.3, "dedup": dedup}
    first, later = [f"text {number}" for number in range(30)], ["a", "b", "c", "d"]
    shop.build([shop.source("one", first), *(shop.source(text, [text]) for text in later)], "whole", **options)
    shop.build(shop.source("one", first), **options)
    for text in later:
        shop.build(shop.source(text, [text]), append=True, **options)
    empty = []
    for split in ("train", "validation"):
        grown, whole = shop.open(f"corpus/{split}"), shop.open(f"whole/{split}")
        assert texts_of(grown) == texts_of(whole)
        assert grown.fingerprint == whole.fingerprint
        assert grown.manifest.document_lengths == whole.manifest.document_lengths
        assert grown.manifest.records == whole.manifest.records
        assert [grown.provenance(index) for index in range(len(grown))] == [
            whole.provenance(index) for index in range(len(whole))
        ]
        assert verify_corpus(shop.directory / "corpus" / split).problems == ()
        empty += [number for number, each in enumerate(grown.manifests) if not each.num_documents]
        for number in empty[-1:]:
            alone = shop.directory / "corpus" / split / names.generation_folder(number)
            assert verify_corpus(alone).problems == ()
            with pytest.raises(CorpusError, match="holds no document: all that was appended went into the other split"):
                read_report(alone, num_samples=1, with_tokens=True)
            with pytest.raises(CorpusError, match="holds no document: all that was appended went into the other split"):
                export_corpus(alone, format="hf", out=shop.directory / "exported")
            with pytest.raises(UsageError, match="it has 0, counted from 0") as caught:
                read_documents(alone, "0")
            assert caught.value.hint == "give a corpus that has documents"
            with pytest.raises(PlanError, match="holds no tokens"):
                StreamPlan({"new": alone}, seq_len=8)
    assert sorted(empty) == [1, 2, 3, 4], "each text went into one of the splits"
    assert not shop.build(str(shop.directory / "d.jsonl"), append=True, **options).is_new
    assert read_status(shop.directory / "corpus").documents == 34


@pytest.mark.parametrize("options", [{}, {"validation_fraction": 0.3}])
def test_an_append_of_nothing_is_refused_with_the_way_to_go_on(shop: Shop, options: dict[str, Any]) -> None:
    first = [f"text {number}" for number in range(30)]
    shop.build(shop.source("one", first), dedup="exact", **options)
    with pytest.raises(BuildError, match="no document was written: 1 record read, 1 duplicate") as caught:
        shop.build(shop.source("two", ["text 3"]), append=True, dedup="exact", **options)
    assert "--append --force" in caught.value.hint
    two = [shop.source("two", ["text 3"]), shop.source("three", ["new"])]
    assert shop.build(two, append=True, dedup="exact", force=True, **options).is_new


def test_a_manifest_of_nothing_is_refused(shop: Shop) -> None:
    from tests.corpora import rewrite_manifest

    shop.build(shop.source("one", ["a"]))

    def empty(fields: dict[str, Any]) -> None:
        fields |= dict.fromkeys(("num_documents", "num_tokens", "num_shards", "num_bytes"), 0)
        fields["document_lengths"] = {"shortest": 0, "longest": 0, "counts": []}

    rewrite_manifest(shop.directory / "corpus", empty)
    with pytest.raises(DamagedCorpusError, match="0 documents of 0 tokens in 0 shards of 0 bytes, expected at least 1"):
        shop.open()


@pytest.mark.parametrize("options", [{}, {"dedup": "exact", "max_documents": 1}])
def test_texts_can_be_compared_only_with_generations_that_kept_their_hashes(
    shop: Shop, options: dict[str, Any]
) -> None:
    shop.build(shop.source("one", ["a", "b"]), **options)
    with pytest.raises(UsageError, match="--dedup exact needs the hashes of all texts") as caught:
        shop.build(shop.source("two", ["b"]), append=True, dedup="exact")
    assert "leave out --dedup" in caught.value.hint


def test_damaged_hashes_are_refused(shop: Shop) -> None:
    shop.build(shop.source("one", ["a", "b"]), dedup="exact")
    path = shop.directory / "corpus" / names.HASHES
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(DamagedCorpusError, match=r"hashes\.bin is missing or damaged"):
        shop.build(shop.source("two", ["b"]), append=True, dedup="exact")


def test_jobs_of_an_array_append_the_same_bytes(shop: Shop) -> None:
    texts = [f"text {number}" for number in range(40)]
    one, two = shop.source("one", texts[:30]), shop.source("two", texts[20:])
    for out in ("corpus", "jobs"):
        shop.build(one, out, dedup="exact")
    shop.build(two, append=True, dedup="exact")
    options: dict[str, Any] = {"tokenizer": shop.tokenizer, "out": shop.directory / "jobs", "workers": 1}
    options |= {"append": True, "dedup": "exact"}
    for job in range(2):
        run_job(two, job_index=job, num_jobs=2, **options)
    commit_corpus(shop.directory / "jobs")
    found = [files_of(shop.directory / out) for out in ("corpus", "jobs")]
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if found[0][name] != found[1][name] and not name.endswith(names.REPORT)] == []


def test_jobs_append_to_a_corpus_whose_commit_was_killed_at_its_last_step(shop: Shop) -> None:
    options: dict[str, Any] = {"tokenizer": shop.tokenizer, "out": shop.directory / "corpus", "workers": 1}
    work, kept = shop.directory / "corpus" / names.WORK, shop.directory / "kept"
    run_job(shop.source("one", ["a", "b"]), **options)
    shutil.copytree(work, kept)
    commit_corpus(shop.directory / "corpus")
    kept.rename(work)
    two = shop.source("two", ["c"])
    run_job(two, append=True, **options)
    shutil.copytree(work, kept)
    commit_corpus(shop.directory / "corpus")
    assert texts_of(shop.open()) == ["a", "b", "c"]
    assert not work.exists()
    kept.rename(work)
    shutil.rmtree(work / WRITE)  # this one, too, and when it had begun to clean up
    assert not run_job(two, append=True, **options).is_new
    commit_corpus(shop.directory / "corpus")
    assert texts_of(shop.open()) == ["a", "b", "c"]


# what belongs together


@pytest.fixture
def grown(shop: Shop) -> Path:
    for number, texts in enumerate((["a", "b"], ["c"], ["d"])):
        shop.build(shop.source(f"s{number}", texts), append=number > 0)
    return shop.directory / "corpus"


def test_a_generation_of_another_corpus_is_refused(shop: Shop, grown: Path) -> None:
    shop.build(shop.source("other", ["x"]), "other")
    (shop.directory / "other" / "generation-01").mkdir()
    for name, content in files_of(grown / "generation-01").items():
        (shop.directory / "other" / "generation-01" / name).write_bytes(content)
    with pytest.raises(DamagedCorpusError, match="of generation 1 after the manifest"):
        shop.open("other")
    assert [problem.file for problem in verify_corpus(shop.directory / "other").problems] == [
        "generation-01/manifest.json"
    ]
    assert texts_of(shop.open("other", generation=0)) == ["x"]


def test_a_generation_of_the_other_split_is_refused_even_where_its_manifest_says_that_it_follows(shop: Shop) -> None:
    texts = [f"text {number}" for number in range(80)]
    shop.build(shop.source("a", texts[:40]), validation_fraction=0.4)
    shop.build(shop.source("b", texts[40:]), append=True, validation_fraction=0.4)
    train, validation = (shop.directory / "corpus" / name for name in (names.TRAIN, names.VALIDATION))
    folder = names.generation_folder(1)
    shutil.rmtree(validation / folder)
    shutil.copytree(train / folder, validation / folder)
    previous = json.loads((validation / names.MANIFEST).read_bytes())["manifest_sha256"]
    rewrite_manifest(validation / folder, lambda fields: fields["generation"].update(previous=previous))
    with pytest.raises(DamagedCorpusError, match="another split than the generation before it"):
        open_corpus(validation)


def test_a_generation_that_is_missing_before_another_is_refused(grown: Path) -> None:
    (grown / "generation-01" / names.MANIFEST).unlink()
    with pytest.raises(DamagedCorpusError, match="generation-02 is complete, and generation 1 is missing"):
        open_corpus(grown)
    assert not verify_corpus(grown).is_ok


def test_damage_in_a_generation_is_reported_with_its_folder(grown: Path) -> None:
    shard = next((grown / "generation-02").glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    report = verify_corpus(grown)
    assert {problem.file for problem in report.problems} == {f"generation-02/{shard.name}"}
    assert report.num_generations == 3
    (grown / "generation-01" / "stray").write_bytes(b"")
    assert "generation-01/stray" in [problem.file for problem in verify_corpus(grown).problems]
    shard.unlink()
    with pytest.raises(DamagedCorpusError, match=rf"generation-02/{shard.name} is missing"):
        open_corpus(grown)


def test_a_wrong_fingerprint_of_all_generations_is_found(grown: Path) -> None:
    from tests.corpora import rewrite_manifest

    def change(fields: dict[str, Any]) -> None:
        fields["generation"]["content"] = "0" * 64

    rewrite_manifest(grown / "generation-02", change)
    problem = verify_corpus(grown).problems[0]
    assert problem.file == "generation-02/manifest.json"
    assert "content fingerprint" in problem.message


def test_the_report_of_a_corpus_names_its_generations(grown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokshard.cli import main

    assert main.run(["inspect", str(grown)]) == 0
    assert "3: 0 to 2" in capsys.readouterr().out
    assert main.run(["inspect", str(grown), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generation"] == 2
    assert main.run(["status", str(grown)]) == 0
    assert "in 3 generations" in capsys.readouterr().out


def test_a_corpus_in_a_store_grows_to_the_same_bytes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    remote = f"{SCHEME}:/{shop.directory}/remote"
    one, two = shop.source("one", ["a", "b"]), shop.source("two", ["b", "c"])
    for out in (shop.directory / "corpus", remote):
        build_corpus(one, tokenizer=shop.tokenizer, out=out, workers=1, dedup="exact")
        build_corpus(two, tokenizer=shop.tokenizer, out=out, workers=1, dedup="exact", append=True)
    store, local = open_store(remote), files_of(shop.directory / "corpus")
    assert set(files_below(store, "")) == set(local)
    assert [name for name in local if store.get(name) != local[name] and not name.endswith(names.REPORT)] == []
    assert texts_of(open_corpus(remote)) == ["a", "b", "c"]
    assert verify_corpus(remote).problems == ()
