"""What a reader of a corpus refuses: the file, what was found in it and what was expected."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pyarrow import ipc

from tests.corpora import (
    TINY_TOKENIZER,
    Source,
    append_generation,
    documents_of,
    rewrite_manifest,
    sign_files,
    write_corpus,
)
from tests.damage import Change, Damage, Edit, any_byte, check, cut, damaged, emptied, grown, replaced
from tests.examples import examples
from tests.format.edits import manifest_says, signed, table_becomes, table_says
from tests.store.memory import MemoryStore
from tokshard.errors import DamagedCorpusError, TokenizerError, TokshardError, UnsupportedFormatError
from tokshard.format import arrow_file, names, tables
from tokshard.format.corpus import Corpus
from tokshard.format.files import readable
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.format.opening import open_corpus, read_generations

SHARD = "shard-00-0000000-000000-0000.arrow"


def write_three(directory: Path, file: str = names.MANIFEST) -> Path:
    """Three shards of one batch each, with a kept column."""
    source = Source(documents=documents_of([3, 4, 6, 2, 7]), metadata={"url": ["a", "bb", None, "", "ccc"]})
    columns = {"url": "string"}
    corpus = write_corpus(
        directory / "corpus", sources=[source], columns=columns, shard_tokens=9, tokenizer=TINY_TOKENIZER
    )
    return corpus / file


def write_spans(directory: Path, file: str = names.MANIFEST) -> Path:
    """Two shards with loss spans and weights."""
    metadata = {LOSS: [[1, 3], [], [1, 2, 4, 6], [1, 2]], WEIGHTS: [[0.5], [], [2.0, 0.25], [1.0]]}
    source = Source(documents=[[1, 2, 3, 0], [0], [3, 3, 1, 2, 2, 0], [2, 0]], metadata=metadata)
    corpus = write_corpus(
        directory / "corpus", sources=[source], columns=LOSS_COLUMNS, shard_tokens=6, tokenizer=TINY_TOKENIZER
    )
    return corpus / file


def write_grown(directory: Path, file: str) -> Path:
    """A corpus that grew twice."""
    corpus = write_corpus(directory / "corpus", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    append_generation(corpus, documents_of([5]))
    append_generation(corpus, documents_of([2]))
    return corpus / file


def read_everything(directory: Path) -> None:
    with open_corpus(directory / "corpus") as corpus:
        read_all_of(corpus)


def read_all_of(corpus: Corpus) -> None:
    corpus.sources()
    for index in range(len(corpus)):
        corpus.document(index)
        corpus.metadata(index)
        corpus.provenance(index)
        corpus.loss_spans(index)
    for index in range(len(corpus.shards)):
        corpus.stride_hashes(index)
    corpus.text(0)


def read_spans(directory: Path) -> None:
    with open_corpus(directory / "corpus") as corpus:
        corpus.loss_spans(0)


def read_lists(directory: Path) -> None:
    with open_corpus(directory / "corpus") as corpus:
        corpus.shards.batch_tokens()


EDITED = "FILE is damaged or was edited: the SHA-256 of its content is *, and its last line is *"
KINDS = "expected none called 'tokens' and types of string, int64, float64, bool, spans, weights"
IN_ORDER = "the columns of loss spans first and under their names"
NONE = "FILE does not hold a manifest: "
ADDS, TOTAL = "adds up to", "and every shard holds at least 1"
ROW = "FILE: offsets of column batch_tokens, row 0, are"

MANIFESTS = [
    ("num_documents", 0, NONE + "ValueError('0 documents of 22 tokens in 3 shards of *"),
    ("base", {"path": "b", "content": "0" * 64}, NONE + "ValueError('a view has 3 shards of *"),
    ("num_tokens", -5, NONE + "ValidationError('Expected `int` >= 0 - at `$.num_tokens`')"),
    ("num_shards", "three", NONE + "ValidationError('Expected `int`, got `str` - at `$.num_shards`')"),
    ("tokenizer vocab_size", 0, NONE + "ValidationError('Expected `int` >= 1 - at `$.tokenizer.vocab_size`')"),
    ("tokenizer vocab_size", 70_000, "FILE: dtype is uint16, a vocabulary of 70000 ids has uint32"),
    ("tokenizer eos_id", 4, "FILE: delimiter 4 is outside the vocabulary of 4 ids"),
    ("tokenizer bos_id", 4, "FILE: delimiter 4 is outside the vocabulary of 4 ids"),
    ("dtype", "int8", "FILE: dtype is int8, a vocabulary of 4 ids has uint16"),
    *(
        ("columns", columns, f"FILE: columns are {columns}, {KINDS}, {IN_ORDER}")
        for columns in (
            {"url": "date"},
            {"tokens": "string"},
            {"url": "string", LOSS: "spans"},
            {"mask": "spans"},
            {WEIGHTS: "weights"},
            {WEIGHTS: "weights", LOSS: "spans"},
        )
    ),
    ("columns", {LOSS: "spans"}, "FILE: num_targets is None, columns are {'loss': 'spans'}; a corpus has *"),
    ("files ../../secret", {"num_bytes": 1, "sha256": "0" * 64}, "FILE lists the files ['../../secret', *"),
    ("files stride-hashes.bin num_bytes", 20, "*: the hashes of its shards take 12 bytes, the manifest says 20 of *"),
    ("fingerprints content", "abc", NONE + 'ValidationError("Expected `str` matching regex *'),
    ("colour", "red", NONE + "ValidationError('Object contains unknown field `colour`')"),
    ("records", None, NONE + "ValidationError('Expected `object`, got `null` - at `$.records`')"),
    ("arguments", ["\ud800"], NONE + "DecodeError('JSON is malformed: * surrogate pair *"),
    ("format_version", "1", NONE + "ValueError(\"format_version is '1', expected a positive integer\")"),
    ("format_version", 0, NONE + "ValueError('format_version is 0, expected a positive integer')"),
]
"""Keys of the manifest, a wrong value, what is said of it."""

SHARD_TABLES = [
    ("name", "../" + SHARD, f"FILE names the shard '../{SHARD}', which is not a shard's name"),
    ("name", "/etc/passwd", "FILE names the shard '/etc/passwd', which is not a shard's name"),
    *(
        ("name", wrong, f"FILE names the shard {wrong!r}, which is not a shard's name")
        for wrong in (SHARD + "\n", SHARD.replace("arrow", "parquet"), SHARD.replace("00-", "\u0660\u0660-", 1))
    ),
    ("num_tokens", 8, f"FILE: column num_tokens {ADDS} 23 with a smallest entry of 7; *, {TOTAL}"),
    ("num_documents", 0, f"FILE: column num_documents {ADDS} 3 with a smallest entry of 0; *, {TOTAL}"),
    ("num_bytes", -1, f"FILE: column num_bytes {ADDS} * with a smallest entry of -1; the manifest says *, {TOTAL}"),
    ("batch_tokens", [3, 4], f"FILE: the batches of {SHARD} hold 2 documents and 7 tokens, the shard 2 and 7; *"),
    ("batch_documents", [], f"FILE: the batches of {SHARD} hold 0 documents and 7 tokens, the shard 2 and 7; *"),
    ("batch_offsets_position", [64], f"*{SHARD}, batch 0 has offsets at byte *, expected 64"),
    ("run_record", [], f"FILE: {SHARD} has 0 entries of run_record, expected 1"),
    ("run_document", [5], f"FILE: the runs of shard {SHARD} do not cover document 0"),
]
"""A column of the shard table, a wrong first value, what is said of it."""


def overwritten(offset: int, content: bytes) -> Change:
    """Bytes of a file are others."""
    return lambda before: before[:offset] + content + before[offset + len(content) :]


def in_buffer(column: str, buffer: int, position: int, content: bytes) -> Change:
    """Bytes of a buffer of a column are others, in the first record batch of an Arrow file."""

    def change(before: bytes) -> bytes:
        mapped = pa.py_buffer(before)
        found = ipc.open_file(mapped).get_batch(0).column(column).buffers()[buffer]
        return overwritten(found.address - mapped.address + position, content)(before)

    return change


def any_byte_of(column: str, buffer: int) -> SearchStrategy[Change]:
    """Any byte of such a buffer is another one."""

    def changed(position: float, by: int) -> Change:
        def change(before: bytes) -> bytes:
            content = ipc.open_file(before).get_batch(0).column(column).buffers()[buffer].to_pybytes()
            at = int(position * len(content))
            return in_buffer(column, buffer, at, bytes([content[at] ^ by]))(before)

        return change

    return st.builds(changed, st.floats(0, 1, exclude_max=True), st.integers(1, 255))


def with_an_empty_batch(rows: dict[str, list[Any]]) -> None:
    for column in ("batch_documents", "batch_tokens", "batch_offsets_position", "batch_values_position"):
        rows[column][0].append(0)


def becomes_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def tokenizer_has(change: Callable[[Any], Any]) -> Edit:
    """The parsed tokenizer is changed in place, and the manifest vouches for it."""

    def make(file: Path) -> None:
        parsed = json.loads(file.read_bytes())
        change(parsed)
        file.write_text(json.dumps(parsed))

    return signed(make)


def moved_targets(by: int) -> Edit:
    """Targets of one shard are counted with the next one."""

    def change(rows: dict[str, list[Any]]) -> None:
        rows["num_targets"][0] -= by
        rows["num_targets"][1] += by

    return table_becomes(change)


def of_a_later_format(file: Path) -> None:
    rewrite_manifest(file.parent, lambda fields: fields.update(format_version=2, new_field="of the future"))


def int64(value: int) -> bytes:
    return struct.pack("<q", value)


MANIFEST = [
    *((f"{keys!r} {value!r}", manifest_says(keys, value), message) for keys, value, message in MANIFESTS),
    ("of a later format", Edit(of_a_later_format), "FILE has format version 2; this tokshard reads up to 1"),
    ("any byte", any_byte, EDITED),
    ("no last byte", lambda content: content[:-1], EDITED),
    ("one more line", lambda content: content + b"\n", EDITED),
    ("one more blank", lambda content: content + b" ", EDITED),
    ("an empty line", lambda content: b"\n", EDITED),
    ("a single line", lambda content: content.replace(b"\n", b""), EDITED),
    ("empty", emptied, EDITED),
]
TABLE = [("cut", cut, "FILE has * bytes, expected *"), ("missing", None, "FILE is missing")]
EMPTY_BATCH = f"FILE: the batches of {SHARD} hold 2 documents and 7 tokens, the shard 2 and 7; every batch holds at *"
SHARD_TABLE = [
    *TABLE,
    ("an empty batch", table_becomes(with_an_empty_batch), EMPTY_BATCH),
    *((f"{column} {value!r}", table_says(column, value), message) for column, value, message in SHARD_TABLES),
    ("a name that is not UTF-8", in_buffer("name", 2, 0, b"\xff"), "FILE, batch 0: Invalid UTF8 *"),
    ("an offset below 0", in_buffer("batch_tokens", 1, 8, int64(-1)), f"{ROW} [0, -1], expected ascending within 3"),
    ("an offset far below 0", in_buffer("batch_tokens", 1, 8, int64(-(2**62))), f"{ROW} [0, -{2**62}], expected *"),
    ("an offset far beyond", in_buffer("batch_tokens", 1, 8, int64(2**62)), f"{ROW} [0, {2**62}], expected *"),
]
LISTS = [
    ("an offset too far", in_buffer("batch_tokens", 1, 8, int64(4)), "FILE, batch 0: offsets * must ascend *"),
    ("too few tokens in batches", table_says("batch_tokens", [6]), "FILE: * do not hold the tokens of the shard*"),
]
SOURCES = [*TABLE, ("an unknown argument", table_says("argument", 1), "FILE: source 0 comes from argument 1, * has 1")]
OTHER_COLUMN = "FILE is not a shard of this corpus: it has a column whose name is not UTF-8 (b'u\\xffl'), expected *"
OFFSETS = "FILE, batch 0: offsets must ascend from 0 to 7, found 0, ..."
SHARDS = [
    ("missing", None, "FILE is missing; the manifest names 3 shards"),
    ("cut", cut, "FILE has * bytes, expected *"),
    ("longer", grown, "FILE has * bytes, expected *"),
    ("of zeros", lambda content: bytes(len(content)), "FILE is not an Arrow file: *"),
    ("a folder", Edit(becomes_a_folder), "FILE is missing; the manifest names 3 shards"),
    ("a column's name that is not UTF-8", replaced(b"url", b"u\xffl"), OTHER_COLUMN),
    ("kept text that is not UTF-8", replaced(b"abb", b"\xffbb"), "FILE, batch 0, column url: Invalid UTF8 *"),
    *(
        (
            f"{what} in too short a buffer",
            replaced(entry, entry[:8] + int64(8)),
            f"FILE, batch 0 has *bytes of {what}: 8, expected *",
        )
        for what, entry in (("offsets", int64(0) + int64(24)), ("tokens", int64(24) + int64(14)))
    ),
    ("an end below 0", in_buffer("tokens", 1, 8, int64(-1)), f"{OFFSETS} 0, -1, ... 7 at document 0"),
    ("an empty document", in_buffer("tokens", 1, 8, int64(0)), f"{OFFSETS} 0, 0, ... 7 at document 0"),
    ("an empty last document", in_buffer("tokens", 1, 8, int64(7)), f"{OFFSETS} 7, 7, ... 7 at document 1"),
    ("an end beyond all", in_buffer("tokens", 1, 8, int64(1 << 40)), f"{OFFSETS} {1 << 40}, 7, ... 7 at document 1"),
]
STRIDES = [
    ("any byte", any_byte, "FILE: group 0 of shard-* has the CRC-32 *, not the one in shards.arrow *"),
    ("missing", None, "FILE is missing"),
    ("no last byte", lambda content: content[:-1], "FILE: hashes 2 to 3 cannot be read: the file ends at byte 11, *"),
]
FAR = "FILE has a token with id 2,147,483,648, expected ids below 4"
TOKENIZER = [
    ("any byte", any_byte, "FILE has SHA-256 *, expected *"),
    ("a word far beyond the others", tokenizer_has(lambda found: found["model"]["vocab"].update(far=2**31)), FAR),
    ("an added token far beyond", tokenizer_has(lambda found: found["added_tokens"][0].update(id=2**31)), FAR),
    (
        "an unknown type",
        tokenizer_has(lambda found: found["model"].update(type="?")),
        "tokenizers * cannot load FILE: *",
    ),
]
GENERATION = [
    ("any byte of the manifest", any_byte, EDITED),
    ("missing", None, "*generation-02 is complete, and generation 1 is missing"),
]
SPANS = [
    *((f"any byte of {column}", any_byte_of(column, 3), "FILE, batch 0: * have CRC-32 *") for column in LOSS_COLUMNS),
    *((f"any byte of the offsets of {column}", any_byte_of(column, 1), "FILE, batch 0: *") for column in LOSS_COLUMNS),
]
TARGETS = [
    ("another sum", table_says("num_targets", 5), "FILE: column num_targets adds up to 9, expected 6, in no shard *"),
    ("more than a shard can have", moved_targets(-2), "FILE: column num_targets adds up to 6, expected 6, in no *"),
    ("less than none", moved_targets(3), "FILE: column num_targets adds up to 6, expected 6, in no shard below 0 or *"),
]
ERRORS = {"of a later format": UnsupportedFormatError, "an unknown type": TokenizerError}

DAMAGE = [
    Damage(f"{file}: {what}", partial(write, file=file), change, read, ERRORS.get(what, DamagedCorpusError), message)
    for write, file, read, rows in [
        (write_three, names.MANIFEST, read_everything, MANIFEST),
        (write_three, names.SHARD_TABLE, read_everything, SHARD_TABLE),
        (write_three, names.SHARD_TABLE, read_lists, LISTS),
        (write_three, names.SOURCE_TABLE, read_everything, SOURCES),
        (write_three, SHARD, read_everything, SHARDS),
        (write_three, names.STRIDE_HASHES, read_everything, STRIDES),
        (write_three, names.TOKENIZER, read_everything, TOKENIZER),
        (write_grown, "generation-01/manifest.json", read_everything, GENERATION),
        (write_grown, "generation-01/shard-01-0000000-000000-0000.arrow", read_everything, SHARDS[:2]),
        (write_spans, SHARD, read_spans, SPANS),
        (write_spans, names.SHARD_TABLE, read_everything, TARGETS),
    ]
    for what, change, message in rows
]


@damaged(DAMAGE)
def test_what_a_reader_refuses(damage, tmp_path):
    check(damage, tmp_path)


@settings(max_examples=examples(200))
@given(name=st.sampled_from([names.SHARD_TABLE, names.SOURCE_TABLE]), changes=st.lists(any_byte, min_size=1))
def test_a_changed_table_whose_hash_is_true_is_read_or_refused_and_never_ends_the_process(name, changes):
    """Only its structure can be refused. Large tables in other stores are read in parts."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = write_three(Path(folder), name)
        for change in changes:
            path.write_bytes(change(path.read_bytes()))
        sign_files(path.parent)
        store = MemoryStore(f"memory://{path}")
        for file in path.parent.iterdir():
            store.put(file.name, file.read_bytes())
        patch.setattr(tables, "_WHOLE_BYTES", 0)
        patch.setattr(arrow_file, "_GAP_BYTES", 0)
        for corpus in (lambda: open_corpus(path.parent), lambda: Corpus(store, read_generations(store))):
            with contextlib.suppress(TokshardError):
                read_all_of(corpus())


def test_a_file_without_permission_need_not_be_restored():
    with pytest.raises(DamagedCorpusError, match="cannot be read: Permission denied") as caught, readable("a.arrow"):
        raise PermissionError(13, "Permission denied")
    assert caught.value.hint == "check its permissions"


def test_offsets_that_change_while_a_shard_is_mapped_are_refused(tmp_path):
    path = write_three(tmp_path, SHARD)
    with open_corpus(path.parent) as corpus:
        place = corpus.shards.batch_places(0)[0]
        corpus.document(0)
        for wrong in (-1, 0, 8, 1 << 40):
            with path.open("r+b") as file:
                file.seek(place.offsets_position + 8)
                file.write(struct.pack("<q", wrong))
            with pytest.raises(DamagedCorpusError, match=f"{SHARD}, batch 0: document 0 is at 0 to {wrong}"):
                corpus.document(0)
