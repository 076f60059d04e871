"""Verification beyond hashes: corpora whose hashes are right and that still break the rules of the format."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.contract import small
from tests.corpora import (
    TINY_TOKENIZER,
    Source,
    append_generation,
    documents_of,
    rewrite_manifest,
    sign_files,
    sign_shards,
    write_corpus,
)
from tests.damage import Damage, Edit, check, cut, damaged, flipped, grown
from tests.format import test_damage
from tests.format.edits import manifest_says, set_tokens, signed, table_becomes, table_says
from tokshard import select_corpus
from tokshard.errors import TokshardError
from tokshard.format import names
from tokshard.format.manifest import BuildConfig, TokenizerInfo, recipe_fingerprint
from tokshard.format.opening import open_corpus
from tokshard.inspect.verify import safe_read
from tokshard.inspect.verify.safe_read import ByteCounter, SafeFile, SparseImage, hash_chunks
from tokshard.inspect.verify.verification import verify_corpus

FIRST = "shard-00-0000000-000000-0000.arrow"
SECOND = "shard-00-0000000-000000-0001.arrow"


def write_two(directory: Path, file: str) -> Path:
    """Two shards from two sources, with a gap in the records of the second."""
    sources = [
        Source(documents=documents_of([3, 4, 6]), metadata={"url": ["a", None, "b"]}),
        Source(documents=documents_of([2, 7]), records=[1, 4], left_out={"empty": 4}, metadata={"url": ["c", "d"]}),
    ]
    columns = {"url": "string"}
    corpus = write_corpus(
        directory / "corpus", sources=sources, columns=columns, shard_tokens=13, tokenizer=TINY_TOKENIZER
    )
    return corpus / file


def write_grown(directory: Path, file: str) -> Path:
    corpus = write_corpus(directory / "corpus", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    append_generation(corpus, documents_of([5]))
    return corpus / file


def write_view(directory: Path, file: str) -> Path:
    """Documents of a corpus whose records are in no order, as after a shuffle."""
    source = Source(documents=documents_of([3, 4, 6]), records=[4, 2, 0], left_out={"empty": 2})
    write_corpus(directory / "base", sources=[source], tokenizer=TINY_TOKENIZER)
    select_corpus(directory / "base", out=directory / "corpus", min_tokens=4, workers=1)
    return directory / "corpus" / file


def problems(directory: Path) -> list[str]:
    """What is wrong with a corpus, a line for each problem."""
    return [f"{problem.file} {problem.message}" for problem in verify_corpus(directory / "corpus").problems]


def runs_at(*starts: int) -> Edit:
    """The runs of the first shard start at other documents."""

    def change(rows: dict[str, list[Any]]) -> None:
        rows["run_document"][0] = [*starts]
        rows["run_source"][0] = [0] * len(starts)
        rows["run_record"][0] = [*range(len(starts))]

    return table_becomes(change)


def second_record(file: Path) -> None:
    table_says("run_record", [4, 4], row=1).make(file)


def other_hash(file: Path) -> None:
    file.write_bytes(flipped(0.5)(file.read_bytes()))


def holds(content: bytes) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(content)


def of_no_table(file: Path) -> None:
    other_hash(file)
    file.with_name("shards.arrow.bak").touch()


def with_other_files(file: Path) -> None:
    shutil.copy(file.with_name(FIRST), file.with_name("shard-00-0000009-000000-0000.arrow"))
    for name in (names.REJECTS, os.fsdecode(b"not-utf8-\xff"), names.REPORT):
        file.with_name(name).touch()
    file.with_name(names.WORK).mkdir()


def much(file: Path) -> None:
    file.with_name(names.TOKENIZER).unlink()
    file.with_name(FIRST).write_bytes(b"")
    other_hash(file.with_name(names.SOURCE_TABLE))
    file.with_name("link").symlink_to("nowhere")


def no_files(file: Path) -> None:
    for name in (FIRST, names.TOKENIZER, names.SOURCE_TABLE):
        file.with_name(name).unlink()
    os.mkfifo(file.with_name(FIRST))
    file.with_name(names.TOKENIZER).symlink_to("/dev/zero")
    file.with_name(names.SOURCE_TABLE).mkdir()


def two_bytes_later(file: Path) -> None:
    """The tokens of a batch begin where Arrow lets no buffer begin, and all agree on it."""
    with open_corpus(file.parent) as corpus:
        (place,) = corpus.shards.batch_places(0)
    content, start = bytearray(file.read_bytes()), place.values_position
    stop = start + 2 * place.num_tokens
    content[start : stop + 2] = bytes(2) + content[start:stop]
    within = struct.pack("<q", start - place.offsets_position)
    content[content.rindex(within, 0, place.offsets_position)] += 2
    file.write_bytes(content)
    sign_shards(file.parent)
    table_says("batch_values_position", [start + 2]).make(file.with_name(names.SHARD_TABLE))


def becomes_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


SAYS = "manifest.json says that"
RECIPE = f"{SAYS} fingerprints.recipe is *, expected *"
OF_0 = "of source 0 (source-0.jsonl) is"
ASCEND = f"shards.arrow has runs of {FIRST} that do not ascend from document 0 to 3"
STRIDE = f"stride-hashes.bin gives stride 0 of {SECOND} the CRC-32 *, its tokens have *"
NO_TABLE = """\
shards.arrow has SHA-256 *
shards.arrow describes the 2 shards: they were not checked without it
shards.arrow.bak is not part of this corpus"""
FOREIGN = """\
not-utf8-\udcff is not part of this corpus
rejects.jsonl is not part of this corpus
shard-00-0000009-000000-0000.arrow is a shard that the manifest does not name"""
MUCH = f"""\
sources.arrow has SHA-256 *
tokenizer.json is missing
{FIRST} has 0 bytes, expected *
link is not part of this corpus"""
NO_FILES = f"""\
sources.arrow is not a regular file
tokenizer.json is not a regular file
{FIRST} is not a regular file"""
INFINITE = b'{"model": {"vocab": {"one": Infinity}}}'
NO_RUNS = ([0, 0], [0, 2, 1], [0, 3], [0, -1])

SHARD_TABLE = [
    ("stride_documents", [1], f"shards.arrow says that token 0 of {FIRST} is in its document 1, expected 0"),
    ("stride_documents", [0, 0], f"shards.arrow {FIRST} has 2 entries of stride_documents, expected 1"),
    ("run_document", [1], ASCEND),
    ("run_source", [2], "shards.arrow names the source 2; there are 2\n*"),
    ("run_source", [-1], "shards.arrow names the source -1; there are 2\n*"),
    ("run_record", [1], "shards.arrow has record 4 of source 0 (source-0.jsonl), which has 3"),
    ("batch_values_position", [8], f"{FIRST} batch 0 has tokens at byte *, expected 8"),
    ("sha256", bytes(32), f"{FIRST} has SHA-256 *"),
    ("loss_hash", bytes([1, *bytes(23)]), f"shards.arrow gives {FIRST} 10 targets and a hash of its loss spans, *"),
    (
        "tokens_hash",
        bytes(24),
        f"shards.arrow gives {FIRST} another hash of its tokens *\n{SAYS} fingerprints.content is *",
    ),
    ("group_hashes", [7], f"shards.arrow has another hash of group 0 of {FIRST} than its tokens"),
    ("name", SECOND, f"*shards.arrow names {SECOND} more than once*"),
]
SOURCES = [
    ("records_read", 4, f"sources.arrow says that the number of records {OF_0} 4, expected 3\n*"),
    ("documents", 4, f"*sources.arrow says that the number of documents {OF_0} 4, expected 3\n*"),
    ("tokens", 12, f"sources.arrow says that the number of tokens {OF_0} 12, expected 13"),
    ("text_bytes", 1, f"{SAYS} text_bytes is 88, expected 37"),
    ("left_out", [("empty", 1)], f"*{SAYS} records.left_out is {{'empty': 4}}, expected {{'empty': 5}}"),
    ("argument", 1, RECIPE),
    ("path", "x.jsonl", RECIPE),
    ("num_bytes", 999, RECIPE),
]
MANIFEST = [
    ("document_lengths longest", 8, f"{SAYS} document_lengths is (2, 8, *"),
    ("document_lengths shortest", 1, f"{SAYS} document_lengths is (1, 7, *"),
    ("document_lengths counts", [0, 2], f"{SAYS} document_lengths is (2, 7, [0, 2]), expected *"),
    ("records read", 10, f"{SAYS} records.read is 10, expected 9"),
    ("records with_special_text", 6, f"{SAYS} records.with_special_text is 6, expected 5"),
    ("text_bytes", 1, f"{SAYS} text_bytes is 1, expected 88"),
    ("fingerprints content", "0" * 64, f"{SAYS} fingerprints.content is 000*"),
    ("fingerprints recipe", "0" * 64, f"{SAYS} fingerprints.recipe is 000*"),
    ("build text_field", "body", RECIPE),
    ("num_tokens", 23, "shards.arrow column num_tokens adds up to 22 *"),
    ("tokenizer sha256", "0" * 64, f"{SAYS} tokenizer.sha256 is 000*"),
    ("tokenizer canonical_sha256", "0" * 64, f"{SAYS} tokenizer.canonical_sha256 is 000*"),
    ("tokenizer vocab_size", 5, f"{SAYS} tokenizer.vocab_size is 5, expected 4*"),
    ("tokenizer eos", "two", f"{SAYS} tokenizer.eos_id is 0, expected 2*"),
    ("tokenizer eos", "four", f"{SAYS} tokenizer.eos_id is 0, expected None*"),
    ("tokenizer bos", "two", f"{SAYS} tokenizer.bos_id is None, expected 2*"),
    ("tokenizer bos_id", 2, f"{SAYS} tokenizer.bos_id is 2, expected None*"),
    ("tokenizer special_ids", {"<eos>": 3}, f"{SAYS} the special id of '<eos>' is 3, expected 0*"),
    ("tokenizer special_ids", {}, f"{SAYS} the special id of '<eos>' is None, expected 0*"),
]
VIEW = [
    ("document_lengths longest", 8, f"{SAYS} document_lengths is (4, 8, *"),
    ("fingerprints content", "0" * 64, f"{SAYS} fingerprints.content is 000*"),
    ("records read", 10, f"{SAYS} records.read is 10, expected *"),
]
OTHERS = [
    (names.SHARD_TABLE, "a record twice", Edit(second_record), "*go back to record 5 of source 1, expected 6 or later"),
    *((names.SHARD_TABLE, f"runs that start at {starts}", runs_at(*starts), ASCEND) for starts in NO_RUNS),
    (names.SHARD_TABLE, "any byte, with another file", Edit(of_no_table), NO_TABLE),
    (FIRST, "tokens between words", Edit(two_bytes_later), f"{FIRST} batch 0: tokens at byte *"),
    (names.STRIDE_HASHES, "a hash", Edit(other_hash), f"stride-hashes.bin has SHA-256 *\n{STRIDE}"),
    (names.STRIDE_HASHES, "a hash, and that of the file", signed(other_hash), STRIDE),
    (names.STRIDE_HASHES, "missing", None, "stride-hashes.bin is missing"),
    (names.STRIDE_HASHES, "short", lambda content: content[:-1], "stride-hashes.bin has 7 bytes, expected 8"),
    (names.TOKENIZER, "too deep", signed(holds(b"[" * 100_000)), "tokenizer.json is not a tokenizer: *"),
    (names.TOKENIZER, "an id without end", signed(holds(INFINITE)), "tokenizer.json is not a tokenizer: *"),
    (names.MANIFEST, "other files", Edit(with_other_files), FOREIGN),
    (names.MANIFEST, "much damage", Edit(much), MUCH),
    (names.MANIFEST, "files that are none", Edit(no_files), NO_FILES),
    (names.MANIFEST, "a pipe", Edit(becomes_a_pipe), "manifest.json is not a regular file"),
]
LATER = "generation-01/manifest.json"
GROWN = [
    (LATER, "content", manifest_says("generation content", "0" * 64), f"{LATER} gives the content fingerprint 000*"),
    (LATER, "number", manifest_says("generation number", 2), f"{LATER} is of generation 2 *, expected generation 1 *"),
    (LATER, "missing", None, f"{LATER} is missing, and no build has begun there"),
]

DAMAGE = [
    Damage(what, partial(write, file=file), change, problems, None, message)
    for write, what, file, change, message in [
        *(
            (write_two, f"{file}: {what!r} {value!r}", file, edit(what, value), message)
            for file, edit, rows in [
                (names.SHARD_TABLE, table_says, SHARD_TABLE),
                (names.SOURCE_TABLE, table_says, SOURCES),
                (names.MANIFEST, manifest_says, MANIFEST),
            ]
            for what, value, message in rows
        ),
        *(
            (write_view, f"a view: {what}", names.MANIFEST, manifest_says(what, value), message)
            for what, value, message in VIEW
        ),
        *((write_two, f"{file}: {what}", file, change, message) for file, what, change, message in OTHERS),
        *((write_grown, f"a generation: {what}", file, change, message) for file, what, change, message in GROWN),
    ]
]


@damaged(DAMAGE)
def test_what_is_damaged_is_reported_with_its_file(damage, tmp_path):
    check(damage, tmp_path)


@damaged(test_damage.DAMAGE)
def test_what_a_reader_refuses_is_reported(damage, tmp_path):
    check(replace(damage, read=problems, error=None, message="* *"), tmp_path)


def test_an_intact_corpus_passes_verification_and_progress_ends_with_every_byte_checked(tmp_path):
    corpus, seen = write_two(tmp_path, names.MANIFEST).parent, []
    report = verify_corpus(corpus, lambda done, total: seen.append((done, total)))
    assert (report.is_ok, report.num_documents, report.num_tokens, report.num_shards) == (True, 5, 22, 2)
    files = [path for path in corpus.iterdir() if path.name != names.MANIFEST]
    assert report.checked_bytes == sum(path.stat().st_size for path in files)
    assert seen[-1] == (report.checked_bytes, report.checked_bytes)
    assert seen == sorted(seen)


def test_only_the_first_wrong_hash_of_a_shard_is_reported_and_how_many_more_there_are(tmp_path, monkeypatch):
    small.shrink(monkeypatch.setattr, hash_stride=4)
    write_corpus(tmp_path / "corpus", documents_of([10, 2, 4]), tokenizer=TINY_TOKENIZER)
    path = tmp_path / "corpus" / names.STRIDE_HASHES
    hashes = np.fromfile(path, "<u4")
    hashes[[1, 3]] += 1
    path.write_bytes(hashes.tobytes())
    sign_files(path.parent)
    (found,) = problems(tmp_path)
    assert found.startswith(f"stride-hashes.bin gives stride 1 of {FIRST} the CRC-32 {hashes[1]:08x}")
    assert found.endswith(", and 1 more")


def split(directory: Path, *left_out: tuple[str, int]) -> list[str]:
    """The problems of the two corpora that a build with a validation split writes: 3 documents of 5 records, and 2.

    Args:
        left_out: of the records of the second, why and how many.
    """
    documents = documents_of([3, 4, 6, 2, 7])
    for name, own, lost in (
        (names.TRAIN, documents[:3], {"in the validation split": 2}),
        (names.VALIDATION, documents[3:], dict(left_out)),
    ):
        source = Source(documents=own, left_out=lost)
        write_corpus(directory / name, sources=[source], tokenizer=TINY_TOKENIZER)

        def change(fields: dict[str, Any], name: str = name) -> None:
            fields["build"] |= {"validation_fraction": 0.4, "split": name}
            build, tokenizer = (
                msgspec.convert(fields[what], kind)
                for what, kind in (("build", BuildConfig), ("tokenizer", TokenizerInfo))
            )
            fields["fingerprints"]["recipe"] = recipe_fingerprint(build, tokenizer, [(0, "", 1_000)])

        rewrite_manifest(directory / name, change)
    return [
        f"{name}: {problem.message}"
        for name in (names.TRAIN, names.VALIDATION)
        for problem in verify_corpus(directory / name).problems
    ]


def test_the_two_corpora_of_a_split_are_checked_against_each_other(tmp_path):
    assert split(tmp_path / "whole", ("in the train split", 3)) == []
    read = "says that the number of records read"
    assert split(tmp_path / "more", ("in the train split", 3), ("empty", 1)) == [
        f"train: {read} (compare validation) is 5, expected 6",
        f"validation: {read} (compare train) is 6, expected 5",
    ]
    assert split(tmp_path / "other", ("in the train split", 2), ("empty", 1)) == [
        "validation: says that the number of records in the train split is 2, expected 3"
    ]
    write_corpus(tmp_path / "whole" / names.VALIDATION, documents_of([3]), tokenizer=TINY_TOKENIZER)  # another build
    assert verify_corpus(tmp_path / "whole" / names.TRAIN).is_ok
    shutil.rmtree(tmp_path / "whole" / names.VALIDATION)
    assert verify_corpus(tmp_path / "whole" / names.TRAIN).is_ok


def test_a_view_of_documents_of_nothing_but_eos_passes_verification(tmp_path):
    write_corpus(tmp_path / "base", documents_of([1, 1, 1]), tokenizer=TINY_TOKENIZER)
    select_corpus(tmp_path / "base", out=tmp_path / "corpus", hash_range=(0, 1), workers=1)
    assert problems(tmp_path) == []


def test_a_corpus_with_many_kept_columns_passes_verification(tmp_path):
    """The description of its record batch is as long as there are columns."""
    columns = dict.fromkeys((f"column-{number}" for number in range(3_000)), "string")
    source = Source(documents=documents_of([4, 5]), metadata=dict.fromkeys(columns, ("a", None)))
    corpus = write_corpus(tmp_path / "corpus", sources=[source], columns=columns, tokenizer=TINY_TOKENIZER)
    assert problems(tmp_path) == []
    assert verify_corpus(corpus, is_quick=True).is_ok


def test_a_check_holds_the_kept_columns_of_one_record_batch_and_no_tokens(tmp_path, monkeypatch):
    small.shrink(monkeypatch.setattr, batch_tokens=10)
    source = Source(documents=documents_of([8] * 4), metadata={"url": ["a" * 200_000] * 4})
    write_corpus(tmp_path / "corpus", sources=[source], columns={"url": "string"}, tokenizer=TINY_TOKENIZER)
    freed: list[tuple[int, int]] = []
    loaded: list[tuple[int, int]] = []
    load = SparseImage.load
    monkeypatch.setattr(SparseImage, "load", lambda image, *bounds: loaded.append(bounds) or load(image, *bounds))
    monkeypatch.setattr(SparseImage, "unload", lambda _, *bounds: freed.append(bounds))
    assert problems(tmp_path) == []
    assert len(freed) == 3
    assert all(stop - start > 100_000 for start, stop in freed)
    assert [start for start, _ in freed] == sorted({start for start, _ in freed})
    with open_corpus(tmp_path / "corpus") as corpus:
        tokens = [place.values_position for place in corpus.shards.batch_places(0)[1:]]
    assert [at for at in tokens if any(start <= at < stop for start, stop in loaded)] == []


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError("of the caller"), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("is_quick", [True, False])
def test_an_error_in_the_progress_callback_ends_a_verification_and_is_not_damage(tmp_path, error, is_quick):
    def fail(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        verify_corpus(write_two(tmp_path, ""), fail, is_quick=is_quick)
    assert caught.value is error


def test_running_out_of_address_space_is_not_damage(tmp_path, monkeypatch):
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(safe_read.mmap, "mmap", refuse)
    with pytest.raises(TokshardError, match="no address space for a file of"):
        verify_corpus(write_two(tmp_path, ""))


def test_a_file_that_cannot_be_read_is_damaged(tmp_path, monkeypatch):
    class Broken(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

    write_two(tmp_path, "")
    small.on_disk(monkeypatch.setattr, open=lambda store, name: Broken(store.where(name)))
    assert "tokenizer.json cannot be read: Input/output error" in problems(tmp_path)


@pytest.mark.parametrize("method", ["get", "open"])  # of the manifest, and of all other files
def test_what_may_not_be_read_needs_permissions_and_no_other_build(tmp_path, monkeypatch, method):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    corpus = write_two(tmp_path, "")
    small.on_disk(monkeypatch.setattr, **{method: refuse})
    hints = {each.hint for each in verify_corpus(corpus).problems if "Permission denied" in each.message}
    assert len(hints) == 1
    assert "permissions" in hints.pop()


def test_a_manifest_of_a_newer_format_is_not_to_be_built_again(tmp_path):
    path = write_two(tmp_path, names.MANIFEST)
    manifest_says("format_version", 2).make(path)
    assert [problem.hint for problem in verify_corpus(path.parent).problems] == ["install a newer tokshard"]


def test_a_quick_check_finds_broken_structure_and_skips_the_content(tmp_path):
    shard = write_two(tmp_path, FIRST)
    set_tokens(shard, {2: 3})
    assert verify_corpus(shard.parent, is_quick=True).is_ok
    shard.write_bytes(test_damage.in_buffer("tokens", 1, 8, bytes(8))(shard.read_bytes()))
    (found,) = verify_corpus(shard.parent, is_quick=True).problems
    assert (found.file, "offsets must ascend" in found.message) == (FIRST, True)


def test_a_quick_check_reads_offsets_but_no_tokens(tmp_path):
    directory = write_corpus(tmp_path / "corpus", documents_of([400_000] * 3), tokenizer=TINY_TOKENIZER)
    of_tables = sum(facts.num_bytes for facts in open_corpus(directory).manifest.files.values())
    assert verify_corpus(directory, is_quick=True).checked_bytes < of_tables + 300_000
    assert verify_corpus(directory).checked_bytes > of_tables + 2_400_000


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [("shard-*", grown, "changed while *"), ("shards.arrow", cut, "has * bytes, *")],
)
def test_a_file_that_changes_when_all_of_it_has_been_checked_is_reported(tmp_path, is_quick, name, change, said):
    (file,) = write_grown(tmp_path, "generation-01").glob(name)

    def change_at_the_end(done: int, to_check: int) -> None:
        if done == to_check:
            file.write_bytes(change(file.read_bytes()))

    (found,) = verify_corpus(tmp_path / "corpus", change_at_the_end, is_quick=is_quick, workers=1).problems
    assert found.file == f"generation-01/{file.name}"
    assert fnmatchcase(found.message, said)


def test_the_one_id_of_uint16_that_is_outside_a_vocabulary_of_65_535_is_found(tmp_path):
    fields = json.loads(TINY_TOKENIZER)
    fields["model"]["vocab"] |= {f"word{token}": token for token in range(4, 65_535)}
    corpus = write_corpus(tmp_path / "corpus", [[1, 65_534, 0]], tokenizer=json.dumps(fields).encode())
    assert problems(tmp_path) == []
    set_tokens(corpus / FIRST, {1: 65_535})
    told = "document 0 of the corpus: id 65535 is outside the vocabulary of 65535 ids"
    assert problems(tmp_path) == [f"{FIRST} batch 0, {told}"]


@pytest.mark.parametrize("chunk_bytes", [8, 16, 64, 1 << 20])
@pytest.mark.parametrize("start", [[], [3], [0]], ids=["no BOS", "BOS", "BOS is EOS"])
def test_documents_and_faults_on_the_boundaries_of_chunks_are_checked_correctly(
    tmp_path, monkeypatch, chunk_bytes, start
):
    """Chunks of 4 tokens and more; batches start at multiples of 64 bytes, so every length here ends some chunk."""
    monkeypatch.setattr(safe_read, "CHUNK_BYTES", chunk_bytes)
    lengths = [5, *[4] * 9, 3, 92, *range(2, 40), 8, 32, 64]
    documents = [[*start, *[1] * (length - 1 - len(start)), 0] for length in lengths]
    bos = {0: "<eos>", 3: "three"}.get(sum(start)) if start else None
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=TINY_TOKENIZER, bos=bos, documents_per_call=7)
    assert problems(tmp_path) == []
    set_tokens(corpus / FIRST, {4: 1, 41: 2, 60: 0, 61: 0, 139: 9})
    expected = [
        "document 0 of the corpus does not end with EOS (0)",
        *(f"document 10 of the corpus does not start with BOS ({bos_id})" for bos_id in start),
        "document 11 of the corpus has EOS (0) inside, and 1 more",
        "document 13 of the corpus: id 9 is outside the vocabulary of 4 ids",
    ]
    assert problems(tmp_path) == [f"{FIRST} batch 0, {one}" for one in expected]


def test_parts_that_lie_outside_of_a_file_are_loaded_and_freed_as_far_as_they_are_in_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a" * 50_000)
    with path.open("rb", buffering=0) as file:
        image = SparseImage(SafeFile(file), 50_000, lambda _: None)
        image.load(-5, 90_000)
    for start, stop in ((-9_000, 9_000), (60_000, 90_000), (40_000, 90_000), (-90_000, -60_000)):
        image.unload(start, stop)
    assert set(bytes(image.buffer)[10_000:40_000]) == set(b"a")


def test_what_follows_the_place_where_a_file_was_cut_for_a_moment_is_not_taken_for_tokens(tmp_path, monkeypatch):
    class CutForAMoment(SafeFile):
        def fill(self, buffer, position):
            return min(5, filled) if (filled := super().fill(buffer, position)) and position == 8 else filled

    monkeypatch.setattr(safe_read, "CHUNK_BYTES", 8)
    (tmp_path / "shard").write_bytes(bytes(32))
    seen = []
    with (tmp_path / "shard").open("rb", buffering=0) as file:
        hash_chunks(CutForAMoment(file), 32, ByteCounter(32, lambda *_: None), lambda place, _: seen.append(place))
    assert seen == [0]
