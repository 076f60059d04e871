"""Verification beyond hashes: corpora whose hashes are right and that still break the rules of the format."""

import errno
import io
import json
import os
import shutil

import msgspec
import numpy as np
import pytest

from tests.corpora import (
    TINY_TOKENIZER,
    Source,
    change_table,
    documents_of,
    rewrite_manifest,
    sign_files,
    sign_shards,
    write_corpus,
)
from tokshard.cli.main import run
from tokshard.errors import CorpusError, TokshardError
from tokshard.format import names, stride_hashes
from tokshard.format.manifest import BuildConfig, TokenizerInfo, recipe_fingerprint
from tokshard.format.opening import open_corpus
from tokshard.inspect.verify.verification import Problem, verify_corpus
from tokshard.store.posix import PosixStore

FIRST_SHARD = "shard-00-0000000-000000-0000.arrow"


@pytest.fixture
def corpus(tmp_path):
    """Two shards from two sources, with a gap in the records of the second."""
    sources = [
        Source(documents=documents_of([3, 4, 6]), metadata={"url": ["a", None, "b"]}),
        Source(documents=documents_of([2, 7]), records=[1, 4], left_out={"empty": 4}, metadata={"url": ["c", "d"]}),
    ]
    return write_corpus(
        tmp_path / "corpus", sources=sources, columns={"url": "string"}, shard_tokens=13, tokenizer=TINY_TOKENIZER
    )


def problems(corpus):
    return [f"{problem.file} {problem.message}" for problem in verify_corpus(corpus).problems]


def set_tokens(corpus, changes, *, shard=0):
    """Overwrite token ids at positions in a shard, with every hash made true again."""
    opened = open_corpus(corpus)
    (place,) = opened.shards.batch_places(shard)
    path = corpus / opened.shards[shard].name
    content = bytearray(path.read_bytes())
    for position, token in changes.items():
        start = place.values_position + 2 * position
        content[start : start + 2] = np.uint16(token).tobytes()
    path.write_bytes(content)
    sign_shards(corpus)


def test_an_intact_corpus_passes_verification(corpus):
    report = verify_corpus(corpus)
    assert report.is_ok
    assert (report.num_documents, report.num_tokens, report.num_shards) == (5, 22, 2)
    files = [path for path in corpus.iterdir() if path.name != "manifest.json"]
    assert report.checked_bytes == sum(path.stat().st_size for path in files)


def test_progress_ends_with_every_byte_checked(corpus):
    seen = []
    report = verify_corpus(corpus, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.checked_bytes, report.checked_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_every_damaged_file_is_reported_not_only_the_first(corpus):
    (corpus / "tokenizer.json").unlink()
    (corpus / FIRST_SHARD).write_bytes(b"")
    with (corpus / "sources.arrow").open("r+b") as file:
        file.write(b"x")
    os.symlink("nowhere", corpus / "link")
    assert {problem.file for problem in verify_corpus(corpus).problems} == {
        "tokenizer.json",
        FIRST_SHARD,
        "sources.arrow",
        "link",
    }


def test_a_document_that_does_not_end_with_eos_is_reported(corpus):
    set_tokens(corpus, {2: 3, 6: 1})
    assert f"{FIRST_SHARD} batch 0, document 0 of the corpus does not end with EOS (0), and 1 more" in problems(corpus)


def test_an_eos_inside_a_document_is_reported(corpus):
    set_tokens(corpus, {3: 0}, shard=1)
    shard = open_corpus(corpus).shards[1].name
    assert problems(corpus) == [f"{shard} batch 0, document 4 of the corpus has EOS (0) inside"]


def test_an_id_outside_the_vocabulary_is_reported(corpus):
    set_tokens(corpus, {4: 4})
    assert problems(corpus) == [
        f"{FIRST_SHARD} batch 0, document 1 of the corpus: id 4 is outside the vocabulary of 4 ids"
    ]


def test_a_stride_hash_that_is_not_that_of_its_tokens_is_reported_with_shard_and_stride(corpus):
    path = corpus / "stride-hashes.bin"
    hashes = np.fromfile(path, "<u4")
    hashes[1] ^= 1
    path.write_bytes(hashes.tobytes())
    named = open_corpus(corpus).shards[1].name
    wrong = f"gives stride 0 of {named} the CRC-32 {hashes[1]:08x}, its tokens have {hashes[1] ^ 1:08x}"
    assert [message for message in problems(corpus) if "has SHA-256" not in message] == [f"stride-hashes.bin {wrong}"]
    assert len(problems(corpus)) == 2
    sign_files(corpus)
    assert problems(corpus) == [f"stride-hashes.bin {wrong}"]


def test_only_the_first_wrong_hash_of_a_shard_is_reported_and_how_many_more_there_are(corpus, monkeypatch):
    monkeypatch.setattr(stride_hashes, "HASH_STRIDE", 4)
    write_corpus(corpus, documents_of([10, 2, 4]), tokenizer=TINY_TOKENIZER)
    path = corpus / "stride-hashes.bin"
    hashes = np.fromfile(path, "<u4")
    hashes[[1, 3]] += 1
    path.write_bytes(hashes.tobytes())
    sign_files(corpus)
    (found,) = (message for message in problems(corpus) if message.startswith("stride-hashes.bin"))
    assert found.startswith(f"stride-hashes.bin gives stride 1 of {FIRST_SHARD} the CRC-32 {hashes[1]:08x}")
    assert found.endswith(", and 1 more")


@pytest.mark.parametrize(("content", "message"), [(None, "is missing"), (b"1234567", "has 7 bytes, expected 8")])
def test_a_missing_or_short_file_of_stride_hashes_is_reported_once(corpus, content, message):
    (corpus / "stride-hashes.bin").unlink()
    if content is not None:
        (corpus / "stride-hashes.bin").write_bytes(content)
    assert problems(corpus) == [f"stride-hashes.bin {message}"]


def test_a_document_that_does_not_start_with_bos_is_reported(tmp_path):
    documents = [[3, 1, 0], [3, 0], [1, 2, 0], [3, 2, 0]]
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=TINY_TOKENIZER, bos="three")
    assert problems(corpus) == [f"{FIRST_SHARD} batch 0, document 2 of the corpus does not start with BOS (3)"]


def test_a_delimiter_may_be_both_eos_and_bos(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", [[0, 1, 0], [0, 0]], tokenizer=TINY_TOKENIZER, bos="<eos>")
    assert problems(corpus) == []
    set_tokens(corpus, {1: 0})
    assert problems(corpus) == [f"{FIRST_SHARD} batch 0, document 0 of the corpus has EOS (0) inside"]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("stride_documents", [1], f"shards.arrow says that token 0 of {FIRST_SHARD} is in its document 1, expected 0"),
        ("stride_documents", [0, 0], f"shards.arrow {FIRST_SHARD} has 2 stride entries, expected 1"),
        ("run_document", [1], f"shards.arrow has runs of {FIRST_SHARD} that do not ascend from document 0 to 3"),
        ("run_source", [2], "shards.arrow names the source 2; there are 2"),
        ("run_source", [7], "shards.arrow names the source 7; there are 2"),
        ("run_source", [-1], "shards.arrow names the source -1; there are 2"),
        ("run_record", [1], "shards.arrow has record 4 of source 0 (source-0.jsonl), which has 3"),
        ("batch_values_position", [8], f"{FIRST_SHARD} batch 0 is BatchPlace(num_documents=3, num_tokens=13, "),
        ("sha256", bytes(32), f"{FIRST_SHARD} has SHA-256 "),
        (
            "loss_hash",
            bytes([1, *bytes(23)]),
            f"shards.arrow gives {FIRST_SHARD} 10 targets and a hash of its loss spans",
        ),
        ("tokens_hash", bytes(24), "manifest.json says that fingerprints.content is "),
        ("tokens_hash", bytes(24), f"shards.arrow gives {FIRST_SHARD} another hash of its tokens than the shard has"),
        (
            "name",
            "shard-00-0000000-000000-0001.arrow",
            "shards.arrow names shard-00-0000000-000000-0001.arrow more than",
        ),
    ],
)
def test_a_shard_table_that_is_wrong_about_a_shard_is_reported(corpus, column, value, message):
    def change(rows):
        rows[column][0] = value
        return rows

    change_table(corpus, "shards.arrow", change)
    assert any(problem.startswith(message) for problem in problems(corpus)), problems(corpus)


@pytest.mark.parametrize("record", [4, 5])
def test_records_of_a_source_that_go_back_are_reported(corpus, record):
    def change(rows):
        rows["run_record"][1][0] = record
        return rows

    change_table(corpus, "shards.arrow", change)
    message = f"go back to record 5 of source 1, expected {record + 2} or later"
    assert any(message in problem for problem in problems(corpus)), problems(corpus)


@pytest.mark.parametrize("documents", [[0, 0], [0, 2, 1], [0, 3], [0, -1]])
def test_runs_that_hold_no_document_are_reported(corpus, documents):
    def change(rows):
        rows["run_document"][0] = documents
        rows["run_source"][0] = [0] * len(documents)
        rows["run_record"][0] = list(range(len(documents)))
        return rows

    change_table(corpus, "shards.arrow", change)
    expected = f"shards.arrow has runs of {FIRST_SHARD} that do not ascend from document 0 to 3"
    assert expected in problems(corpus)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "records_read",
            4,
            "sources.arrow says that the number of records of source 0 (source-0.jsonl) is 4, expected 3",
        ),
        (
            "documents",
            4,
            "sources.arrow says that the number of documents of source 0 (source-0.jsonl) is 4, expected 3",
        ),
        ("tokens", 12, "sources.arrow says that the number of tokens of source 0 (source-0.jsonl) is 12, expected 13"),
        ("text_bytes", 1, "manifest.json says that text_bytes is 88, expected 37"),
        ("left_out", [("empty", 1)], "manifest.json says that records.left_out is {'empty': 4}, expected {'empty': 5}"),
        ("argument", 1, "manifest.json says that fingerprints.recipe is "),
        ("path", "x.jsonl", "manifest.json says that fingerprints.recipe is "),
        ("num_bytes", 999, "manifest.json says that fingerprints.recipe is "),
        ("argument", 2, "sources.arrow source 0 comes from argument 2, the manifest has 2"),
    ],
)
def test_a_source_table_that_does_not_add_up_is_reported(corpus, column, value, message):
    def change(rows):
        rows[column][0] = value
        return rows

    change_table(corpus, "sources.arrow", change)
    assert any(problem.startswith(message) for problem in problems(corpus)), problems(corpus)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ["document_lengths", "longest"],
            8,
            "manifest.json says that document_lengths is (2, 8, ",
        ),
        (
            ["document_lengths", "counts"],
            [0, 2],
            "manifest.json says that document_lengths is (2, 7, [0, 2]), expected ",
        ),
        (["records", "read"], 10, "manifest.json says that records.read is 10, expected 9"),
        (["text_bytes"], 1, "manifest.json says that text_bytes is 1, expected 88"),
        (["fingerprints", "content"], "0" * 64, "manifest.json says that fingerprints.content is 000"),
        (["tokenizer", "sha256"], "0" * 64, "manifest.json says that tokenizer.sha256 is 000"),
        (["tokenizer", "canonical_sha256"], "0" * 64, "manifest.json says that tokenizer.canonical_sha256 is 000"),
        (["num_tokens"], 23, "shards.arrow column num_tokens adds up to 22 "),
        (["fingerprints", "recipe"], "0" * 64, "manifest.json says that fingerprints.recipe is 000"),
        (["build", "text_field"], "body", "manifest.json says that fingerprints.recipe is "),
        (["tokenizer", "vocab_size"], 5, "manifest.json says that tokenizer.vocab_size is 5, expected 4"),
        (["tokenizer", "eos"], "two", "manifest.json says that tokenizer.eos_id is 0, expected 2"),
        (["tokenizer", "eos"], "four", "manifest.json says that tokenizer.eos_id is 0, expected None"),
        (["tokenizer", "bos"], "two", "manifest.json says that tokenizer.bos_id is None, expected 2"),
        (["tokenizer", "bos_id"], 2, "manifest.json says that tokenizer.bos_id is 2, expected None"),
        (
            ["tokenizer", "special_ids"],
            {"<eos>": 3},
            "manifest.json says that the special id of '<eos>' is 3, expected 0",
        ),
        (["tokenizer", "special_ids"], {}, "manifest.json says that the special id of '<eos>' is None, expected 0"),
        (
            ["records", "with_special_text"],
            6,
            "manifest.json says that records.with_special_text is 6, expected 5",
        ),
        (["format_version"], 2, "manifest.json has format version 2; this tokshard reads up to 1"),
    ],
)
def test_a_manifest_that_does_not_add_up_is_reported(corpus, path, value, message):
    def change(fields):
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    rewrite_manifest(corpus, change)
    assert any(problem.startswith(message) for problem in problems(corpus)), problems(corpus)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"model": {"vocab": {"one": Infinity}}}'])
def test_a_tokenizer_that_is_no_tokenizer_is_reported(corpus, content):
    (corpus / "tokenizer.json").write_bytes(content)
    sign_files(corpus)
    assert any(problem.startswith("tokenizer.json is not a tokenizer") for problem in problems(corpus))


def test_a_file_that_does_not_belong_is_reported_with_its_name(corpus):
    shutil.copy(corpus / FIRST_SHARD, corpus / "shard-00-0000009-000000-0000.arrow")
    (corpus / "rejects.jsonl").touch()
    (corpus / os.fsdecode(b"not-utf8-\xff")).touch()
    assert problems(corpus) == [
        "not-utf8-\udcff is not part of this corpus",
        "rejects.jsonl is not part of this corpus",
        "shard-00-0000009-000000-0000.arrow is a shard that the manifest does not name",
    ]


def test_the_report_of_a_build_and_its_leftover_folder_belong(corpus):
    (corpus / "build-report.json").touch()
    (corpus / names.WORK).mkdir()
    assert verify_corpus(corpus).is_ok


def test_a_damaged_shard_table_leaves_the_shards_unchecked_and_says_so(corpus):
    with (corpus / "shards.arrow").open("r+b") as file:
        file.write(b"x")
    (corpus / "shards.arrow.bak").touch()
    found = problems(corpus)
    assert [line.split(",")[0].split(" ")[0] for line in found] == ["shards.arrow", "shards.arrow", "shards.arrow.bak"]
    assert found[1] == "shards.arrow describes the 2 shards: they were not checked without it"


def test_a_corpus_that_lost_its_manifest_is_damaged(corpus):
    (corpus / "manifest.json").unlink()
    report = verify_corpus(corpus)
    assert report.problems == (
        Problem(file="manifest.json", message=f"{corpus} is not a corpus: it has no manifest.json"),
    )


@pytest.mark.parametrize("place", [".", ".."])
def test_an_unfinished_build_is_not_damaged_and_is_finished_by_its_command(corpus, place, capsys):
    """Of a build with a validation split, the folder of work is next to those of the two corpora."""
    corpus = corpus.rename(corpus.with_name("train"))
    (corpus / "manifest.json").unlink()
    (corpus / place / names.WORK).mkdir()
    build = corpus if place == "." else corpus.parent
    assert run(["verify", str(corpus)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"error: {corpus} holds an unfinished build: it has no manifest.json",
        f"hint: run its command again, which 'tokshard status {build}' shows; finished tasks are kept",
    ]


def test_a_directory_that_is_not_a_corpus_is_not_damaged_and_the_others_are_verified(corpus, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert run(["verify", str(tmp_path / "photos"), str(corpus)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith(f"ok: {corpus}: ")
    assert err.startswith(f"error: {tmp_path / 'photos'} is not a corpus: it has no manifest.json\n")
    assert "damaged" not in out + err
    assert "--force" not in out + err
    assert run(["verify", str(tmp_path / "photos"), str(corpus), "--json"]) == 2
    refused, verified = map(json.loads, capsys.readouterr().out.splitlines())
    assert (refused["exit_code"], verified["ok"]) == (2, True)


def test_a_split_is_verified_one_by_one(tmp_path, capsys):
    for name in ("train", "validation"):
        write_corpus(tmp_path / name, documents_of([3]), tokenizer=TINY_TOKENIZER)
    assert run(["verify", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(f"ok: {tmp_path / name}" in said for name in ("train", "validation")), said


def write_split(directory):
    """Two corpora as a build with a validation split writes them: 3 documents and 2, of the same 5 records."""
    documents = documents_of([3, 4, 6, 2, 7])
    for split, own, reason in (
        ("train", documents[:3], "in the validation split"),
        ("validation", documents[3:], "in the train split"),
    ):
        sources = [Source(documents=own, left_out={reason: 5 - len(own)})]
        write_corpus(directory / split, sources=sources, tokenizer=TINY_TOKENIZER)

        def change(fields, split=split):
            fields["build"] |= {"validation_fraction": 0.4, "split": split}
            fields["fingerprints"]["recipe"] = recipe_fingerprint(
                msgspec.convert(fields["build"], BuildConfig),
                msgspec.convert(fields["tokenizer"], TokenizerInfo),
                [(0, "", 1_000)],
            )

        rewrite_manifest(directory / split, change)
    return directory / "train", directory / "validation"


def test_the_two_corpora_of_a_split_are_checked_against_each_other(tmp_path):
    train, validation = write_split(tmp_path)
    assert problems(train) == problems(validation) == []

    def with_one_more_record(rows):
        return {**rows, "records_read": [6], "left_out": [[*rows["left_out"][0], ("empty", 1)]]}

    def count_it(fields):
        fields["records"]["read"] = 6
        fields["records"]["left_out"]["empty"] = 1

    change_table(validation, "sources.arrow", with_one_more_record)
    rewrite_manifest(validation, count_it)
    assert problems(train) == [
        "manifest.json says that the number of records read (compare validation) is 5, expected 6"
    ]
    (problem,) = problems(validation)
    assert problem == "manifest.json says that the number of records read (compare train) is 6, expected 5"


def test_the_two_corpora_of_a_split_disagree_about_a_document(tmp_path):
    train, validation = write_split(tmp_path)

    def write_one_less(fields):
        fields["records"]["left_out"]["in the train split"] = 2
        fields["records"]["left_out"]["empty"] = 1

    change_table(
        validation, "sources.arrow", lambda rows: {**rows, "left_out": [[("in the train split", 2), ("empty", 1)]]}
    )
    rewrite_manifest(validation, write_one_less)
    assert problems(train) == []
    expected = "manifest.json says that the number of records in the train split is 2, expected 3"
    assert expected in problems(validation)


def test_a_split_is_not_checked_against_the_other_corpus_of_another_build(tmp_path):
    train, validation = write_split(tmp_path)
    shutil.rmtree(validation)
    assert problems(train) == []
    write_corpus(validation, documents_of([3]), tokenizer=TINY_TOKENIZER)
    assert problems(train) == []


def test_a_corpus_with_many_kept_columns_passes_verification(tmp_path):
    """The description of its record batch is as long as there are columns."""
    names_of_columns = [f"column-{number}" for number in range(3_000)]
    source = Source(documents=documents_of([4, 5]), metadata={name: ["a", None] for name in names_of_columns})
    corpus = write_corpus(
        tmp_path / "corpus",
        sources=[source],
        columns=dict.fromkeys(names_of_columns, "string"),
        tokenizer=TINY_TOKENIZER,
    )
    assert problems(corpus) == []
    assert verify_corpus(corpus, is_quick=True).problems == ()


@pytest.mark.parametrize("error", [BrokenPipeError("stderr"), OSError("of the caller"), MemoryError()])
@pytest.mark.parametrize("is_quick", [True, False])
def test_an_error_in_the_progress_callback_is_not_damage(corpus, error, is_quick):
    def fail(done, total):
        raise error

    with pytest.raises(type(error)) as caught:
        verify_corpus(corpus, fail, is_quick=is_quick)
    assert caught.value is error


def test_running_out_of_address_space_is_not_damage(corpus, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("tokshard.inspect.verify.safe_read.mmap.mmap", refuse)
    with pytest.raises(TokshardError, match="no address space for a file of"):
        verify_corpus(corpus)


def test_a_file_that_cannot_be_read_is_damaged(corpus, monkeypatch):
    class Broken(io.FileIO):
        def readinto(self, buffer):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(PosixStore, "open", lambda store, name: Broken(store.where(name)))
    assert "tokenizer.json cannot be read: Input/output error" in problems(corpus)


def test_what_does_not_exist_cannot_be_verified(tmp_path):
    with pytest.raises(CorpusError, match="does not exist"):
        verify_corpus(tmp_path / "nothing")


def test_a_quick_check_finds_broken_structure_and_skips_the_content(corpus):
    set_tokens(corpus, {2: 3})
    assert verify_corpus(corpus, is_quick=True).is_ok
    opened = open_corpus(corpus)
    path = corpus / FIRST_SHARD
    content = bytearray(path.read_bytes())
    start = opened.shards.batch_places(0)[0].offsets_position
    content[start + 8 : start + 16] = bytes(8)
    path.write_bytes(content)
    (found,) = verify_corpus(corpus, is_quick=True).problems
    assert found.file == FIRST_SHARD
    assert "offsets must ascend" in found.message


def test_a_quick_check_reads_offsets_but_no_tokens(tmp_path):
    directory = write_corpus(tmp_path / "corpus", documents_of([400_000] * 3), tokenizer=TINY_TOKENIZER)
    of_tables = sum(facts.num_bytes for facts in open_corpus(directory).manifest.files.values())
    assert verify_corpus(directory, is_quick=True).checked_bytes < of_tables + 300_000
    assert verify_corpus(directory).checked_bytes > of_tables + 2_400_000


def test_a_pipe_or_device_is_reported_without_waiting_for_it(corpus):
    for name in (FIRST_SHARD, "tokenizer.json", "sources.arrow"):
        (corpus / name).unlink()
    os.mkfifo(corpus / FIRST_SHARD)
    (corpus / "tokenizer.json").symlink_to("/dev/zero")
    (corpus / "sources.arrow").mkdir()
    assert problems(corpus) == [
        "sources.arrow is not a regular file",
        "tokenizer.json is not a regular file",
        f"{FIRST_SHARD} is not a regular file",
    ]
    (corpus / "manifest.json").unlink()
    os.mkfifo(corpus / "manifest.json")
    assert problems(corpus) == ["manifest.json is not a regular file"]


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_shard_that_grows_while_it_is_checked_is_reported(corpus, is_quick):
    def grow_at_the_end(done, to_check):
        if done == to_check:
            for path in corpus.glob("shard-*"):
                path.write_bytes(path.read_bytes() + b"x")

    found = verify_corpus(corpus, grow_at_the_end, is_quick=is_quick, workers=1).problems
    assert len(found) == 1
    assert "changed while it was read" in found[0].message


def test_the_number_of_threads_changes_nothing_in_a_report(tmp_path):
    corpus = write_corpus(
        tmp_path / "corpus", documents_of([5] * 60, vocab_size=4), tokenizer=TINY_TOKENIZER, shard_tokens=10
    )
    shards = sorted(corpus.glob("shard-*"))
    for path in shards[3::4]:
        path.write_bytes(path.read_bytes()[:-1])
    reports = [verify_corpus(corpus, workers=workers) for workers in (1, 2, 7)]
    assert len(reports[0].problems) == len(shards[3::4])
    assert reports[0] == reports[1] == reports[2]


def test_an_interrupt_ends_a_verification_at_once(corpus):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_corpus(corpus, interrupt)


@pytest.mark.parametrize("chunk_bytes", [8, 16, 64])
@pytest.mark.parametrize("bos", [None, "three", "<eos>"])
def test_documents_on_the_boundaries_of_chunks_are_checked_correctly(tmp_path, monkeypatch, chunk_bytes, bos):
    """Chunks of 4 tokens and more; batches start at multiples of 64 bytes, so every length here ends some chunk."""
    monkeypatch.setattr("tokshard.inspect.verify.safe_read.CHUNK_BYTES", chunk_bytes)
    start = {None: [], "three": [3], "<eos>": [0]}[bos]
    documents = [[*start, *[1] * (length - 1 - len(start)), 0] for length in [2, *[4] * 9, 3, *range(2, 40), 8, 32, 64]]
    corpus = write_corpus(
        tmp_path / "corpus", documents, tokenizer=TINY_TOKENIZER, bos=bos, shard_tokens=300, documents_per_call=7
    )
    assert problems(corpus) == []


@pytest.mark.parametrize("chunk_bytes", [8, 64, 1 << 20])
def test_faults_are_found_across_the_chunks_in_which_a_shard_is_read(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr("tokshard.inspect.verify.safe_read.CHUNK_BYTES", chunk_bytes)
    documents = [[3, 1, 1, 2, 0], [3, 0], [3, *[1] * 90, 0], [3, 2, 0]]
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=TINY_TOKENIZER, bos="three")
    assert problems(corpus) == []
    set_tokens(corpus, {4: 1, 7: 2, 60: 0, 61: 0, 100: 9})
    assert problems(corpus) == [
        f"{FIRST_SHARD} batch 0, document 0 of the corpus does not end with EOS (0)",
        f"{FIRST_SHARD} batch 0, document 2 of the corpus does not start with BOS (3)",
        f"{FIRST_SHARD} batch 0, document 2 of the corpus has EOS (0) inside, and 1 more",
        f"{FIRST_SHARD} batch 0, document 3 of the corpus: id 9 is outside the vocabulary of 4 ids",
    ]
