"""Sources that go bad: every one is named with its path, and left out whole where that is asked for."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.damage import Change, Damage, check, cut, damaged, emptied, grown, replaced
from tests.examples import examples
from tests.pipeline import foreign
from tests.pipeline.foreign import EOS, imported
from tests.pipeline.inputs import FORMATS, build, jsonl, patch_chunk_bytes, texts_of, write_byte_tokenizer, zstd
from tests.pipeline.saved import save
from tokshard import build_corpus, copy_corpus
from tokshard.errors import BadSourceError, DamagedCorpusError, SourceError, TokshardError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus

RECORDS = [{"text": f"line {number} {random.Random(number).random()}"} for number in range(200)]
GOOD = jsonl([{"text": "good"}])

# texts


def at(start: int, content: bytes) -> Change:
    """Bytes at a place, from the end if it is negative, become others."""

    def change(before: bytes) -> bytes:
        place = start % len(before)
        return before[:place] + content + before[place + len(content) :]

    return change


def without(count: int) -> Change:
    """The last bytes are missing."""
    return lambda content: content[:-count]


def followed(content: bytes) -> bytes:
    """Something else follows."""
    return content + b"more of something else"


def other(content: bytes) -> bytes:
    """The name of the file is that of another format."""
    return jsonl(RECORDS)


def before_the_last_batch(stream: bytes) -> bytes:
    """Whole messages of an Arrow stream, and no end."""
    return stream[: stream.rindex(b"\xff\xff\xff\xff", 0, len(stream) - 8)]


STREAMS = {"members.jsonl.gz": "gzip", "streams.jsonl.bz2": "bz2", "streams.jsonl.xz": "xz", "members.csv.gz": "gzip"}
COMPRESSED = [*STREAMS, "frames.jsonl.zst"]
TABLES = ["table.parquet", "file.arrow", "stream.arrow", "file.feather"]


def _built(place: Path, source: Path, **options: Any) -> Any:
    write_byte_tokenizer(place / "tok")
    return build_corpus(source, tokenizer=place / "tok", out=place / "out", workers=1, **options)


def _build(place: Path) -> Any:
    (source,) = (path for path in place.iterdir() if path.name in FORMATS)
    return _built(place, source, force=True)


def _of_text() -> Iterator[Damage]:
    def row(name: str, what: str, change: Change, detail: str = "*") -> Damage:
        def write(place: Path) -> Path:
            (place / name).write_bytes(FORMATS[name](RECORDS, 50))
            return place / name

        return Damage(f"{name}: {what}", write, change, _build, BadSourceError, f"FILE is damaged: {detail}")

    for name in (*COMPRESSED, *TABLES):
        yield row(name, "it is cut", cut)
        yield row(name, "it is empty", emptied)
        yield row(name, "it is of another format", other)
    for name in (*COMPRESSED, *TABLES):
        yield row(name, "its last byte is missing", without(1))
    for name, kind in STREAMS.items():
        yield row(name, "something follows", followed, f"the bytes after * whole {kind} stream* are not {kind}")
    yield row("frames.jsonl.zst", "something follows", followed)
    for name in ("plain.csv", "plain.tsv"):
        yield row(name, "it is empty", emptied, "the file is empty, expected a header line")
        in_utf_16 = "this looks like UTF-16; save the file as UTF-8"
        yield row(name, "it is UTF-16", lambda text: text.decode().encode("utf-16"), in_utf_16)
        yield row(name, "its header is open", lambda _: b'"text\na\n', "lines 1 to 2: unexpected end of data")
    yield row("stream.arrow", "its end is missing", without(8))
    yield row("stream.arrow", "it is cut between two batches", before_the_last_batch)
    yield row("table.parquet", "its first page is another", at(4, b"\x55" * 100))
    yield row("table.parquet", "its footer is another", at(-60, b"\x55" * 40))


# ids of other tools

DOCUMENTS = [[5, 6, EOS], [7, EOS], [8, 9, 10, 11, EOS], [12, EOS], [255, 256, EOS]]
MASKS = [[0, 1, 1], [0, 1], [0, 1, 0, 1, 1], [0, 0], [0, 1, 1]]


def _import(place: Path) -> Any:
    write_byte_tokenizer(place / "tok")
    return imported(place, place / "in", force=True)


def _megatron(folder: Path) -> Path:
    foreign.megatron(folder / "b", DOCUMENTS)
    return foreign.megatron(folder / "a", DOCUMENTS)


def _twice(content: bytes) -> bytes:
    """An index lists its first file a second time."""
    index = json.loads(content)
    listed = index.get("shards") or index["chunks"]
    listed.append(listed[0])
    return json.dumps(index).encode()


def _checked_parquet(folder: Path) -> None:
    ids = pa.array([[7, 7, EOS]], pa.list_(pa.int32()))
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"tokens": ids}), folder / "a.parquet", **options)


def _mds(**options: Any) -> Callable[[Path], Path]:
    return lambda folder: foreign.mds(folder, [DOCUMENTS[:2], DOCUMENTS[2:]], **options)


def _litdata(folder: Path) -> Path:
    return foreign.litdata(folder, [DOCUMENTS[:2], DOCUMENTS[2:]])


def _masked(folder: Path) -> Path:
    return foreign.datatrove(folder / "a.ds", DOCUMENTS, masks=MASKS)


def _olmo(folder: Path) -> Path:
    return foreign.olmo(folder, DOCUMENTS, MASKS)


def _index(content: bytes) -> Change:
    return lambda _: content


def _zipped(change: Change) -> Change:
    return lambda content: gzip.compress(change(gzip.decompress(content)))


LAST_ID = replaced(b"\xff\0\0\1", b"\xfe\0\0\1")
CHECKED = replaced(b"\7\0\0\0\7\0\0\0", b"\7\0\0\0\6\0\0\0")
GZ = ("gz", gzip.compress)
NO_INDEX = (
    f"FILE is not the index of a data set: it has {', '.join(map(repr, 'abcdefghij'))}; expected 'shards' (MDS) or "
    "'chunks' (litdata)"
)
COUNTS, ARROW = "meta/combined_counts.csv", "DIR/in/data/en/part.arrow is damaged:"
MISSING = "is missing; DIR/in/meta counts it"
COUNTED = f"{ARROW} it holds 5 documents and 10 tokens;"
Write = Callable[[Path], Any]
FOREIGN: dict[Write, list[tuple[str, Change | None, str]]] = {
    _megatron: [
        ("a.idx", at(0, b"XX"), "it begins with *"),
        ("a.idx", at(9, b"\2"), "it has version 2, expected 1"),
        ("a.idx", at(17, b"\7"), "its dtype has the code 7 (float32)*"),
        ("a.idx", without(1), "it has 141 bytes, expected 142 for 5 sequences and 6 bounds*"),
        ("a.idx", lambda index: index[:20], "it has 20 bytes, expected at least 34"),
        ("a.idx", at(18, b"\xff" * 8), "it has 142 bytes, expected 221,360,928,884,514,619,462 *"),
        ("a.idx", at(26, b"\0"), "it has no bound of a document, expected at least one"),
        ("a.idx", lambda index: index + b"\0\0\1\0\0", "FILE has sequences of another mode than 0, which is text"),
        ("a.idx", at(34, b"\xff" * 4), "sequence 0 has -1 tokens"),
        ("a.idx", at(54, b"\2"), "its sequences lie at bytes 2 to 30, and there are 30 bytes of ids"),
        ("a.idx", at(62, b"\0"), "sequence 1 begins at byte 0, and the one before it ends at 6"),
        ("a.idx", at(-8, b"\4"), "its documents are sequences 0 to 4 of 5*"),
        ("a.idx", at(-16, b"\6"), "*expected ascending numbers up to 5"),
        ("a.bin", without(2), "DIR/in/a.idx is damaged: its sequences lie at bytes 0 to 30, and there are 28 *"),
        ("a.idx", None, "DIR/in/a.bin has no a.idx next to it"),
        ("a.bin", None, "DIR/in/a.idx has no a.bin next to it"),
    ],
    _mds(): [
        ("shard.00000.mds", at(4, b"\0"), "its samples do not lie one after another*"),
        ("shard.00000.mds", at(9, b"\xff"), "its samples do not lie one after another up to its end*"),
        ("shard.00000.mds", at(13, b"\1"), "its samples do not lie one after another up to its end, byte *"),
        ("shard.00000.mds", at(42, b"\2"), "6 bytes are not an array [2] of uint16"),
    ],
    _mds(hashed="sha1"): [("shard.00001.mds", LAST_ID, "its sha1 is *, its index says *")],
    _mds(hashed="blake2b", compress=GZ): [
        ("shard.00001.mds.gz", _zipped(LAST_ID), "its blake2b is *, its index says *"),
        ("shard.00001.mds.gz", at(10, b"\7"), "it cannot be decompressed: * invalid block type"),
        ("shard.00001.mds.gz", _zipped(emptied), "it ends after 0 bytes, its index says 117"),
        ("index.json", _twice, "it lists shard.00000.mds twice"),
        ("index.json", _index(b"{"), "it is no JSON: *"),
    ],
    _litdata: [
        ("index.json", _twice, "it lists chunk-0-0.bin twice"),
        ("index.json", replaced(b"TokensLoader", b"PyTreeLoader"), "its samples are not those of TokensLoader*"),
        ("index.json", _index(json.dumps(dict.fromkeys("abcdefghijk")).encode()), NO_INDEX),
        ("index.json", _index(b'{"chunks": [{"id": 7}]}'), "it lists None, which is not there"),
        ("index.json", _index(b"[]"), "it holds a list, expected an object"),
        ("chunk-0-0.bin", None, "DIR/in/index.json is damaged: it lists chunk-0-0.bin, which is not there"),
    ],
    lambda folder: foreign.fms(folder, DOCUMENTS): [
        (COUNTS, replaced(b"5,10", b"6,10"), f"{COUNTED} DIR/in/meta says 6 and 10"),
        (COUNTS, replaced(b"5,10", b"5,11"), f"{COUNTED} DIR/in/meta says 5 and 11"),
        (COUNTS, replaced(b"part", b"other"), f"{ARROW} DIR/in/meta counts other files and *"),
        (COUNTS, lambda table: table + b"/data/en/gone.arrow,1,2\n", f"DIR/in/data/en/gone.arrow {MISSING}"),
        (
            COUNTS,
            lambda table: table + b"/data/fr/gone.arrow,1,2\n/data/en/part.arrow,5,9",
            f"{COUNTED} * says 5 and 9",
        ),
        (COUNTS, replaced(b"/data/", b"in\ra/"), "a line is not a file and two numbers: *"),
    ],
    _checked_parquet: [("a.parquet", CHECKED, "*checksum verification failed*")],
    _masked: [
        ("a.ds.loss", without(1), "it has 14 bytes for 15 ids, expected one for each"),
        ("a.ds.loss", at(3, b"\2"), "byte 3 is 2, expected 0 or 1"),
        ("a.ds.index", grown, "it has 41 bytes, expected a multiple of 8"),
    ],
    lambda folder: foreign.numpy_arrays(folder / "a.npy", DOCUMENTS): [
        ("a.npy", grown, "it has * bytes, expected 15 numbers as uint16")
    ],
    _olmo: [
        ("token_ids_part_0000.npy", None, "DIR/in/labels_mask_part_0000.npy has no token_ids_part_0000.npy next *"),
        ("token_ids_part_0000.npy", grown, "it has 31 bytes, and an id takes 2 (--dtype)"),
    ],
}
"""What writes into a folder; for files in it, what becomes of them, and what is said of the file, or of another."""


def _of_tokens() -> Iterator[Damage]:
    def write(put: Write, file: str, place: Path) -> Path:
        (place / "in").mkdir()
        put(place / "in")
        return place / "in" / file

    for put, rows in FOREIGN.items():
        for file, change, said in rows:
            message = said if said.startswith(("FILE", "DIR")) else f"FILE is damaged: {said}"
            error = SourceError if said.endswith(MISSING) else BadSourceError
            yield Damage(f"{file}: {said}", partial(write, put, file), change, _import, error, message)


def _saved() -> Iterator[Damage]:
    """Data sets that datasets saved."""

    def write(place: Path) -> Path:
        return save(place / "in", [["a"], ["b"]])

    def read(place: Path) -> Any:
        return build(place / "in", place / "out", force=True)

    gone = "DIR/in was saved by datasets with data-00001-of-00002.arrow, which is gone"
    for file, change, message in (
        ("data-00001-of-00002.arrow", None, gone),
        ("state.json", _index(b'{"_data'), "FILE is damaged: Unterminated string*"),
        ("state.json", _index(b"[]"), "FILE is damaged: it holds a list, expected an object"),
        ("state.json", _index(b'{"_data_files": [1]}'), "FILE names no files"),
    ):
        yield Damage(message, lambda place, file=file: write(place) / file, change, read, SourceError, message)


def _loss_spans() -> Damage:
    """A copy reads them without the tokens that a hash covers."""

    def write(place: Path) -> Path:
        (place / "in").mkdir()
        _masked(place / "in")
        _import(place)
        return next((place / "out").glob("shard-*"))

    def read(place: Path) -> Any:
        return copy_corpus([place / "out"], out=place / "copy", workers=1, force=True)

    first_spans = np.array([1, 3, 1, 2], "<u4").tobytes()
    change = replaced(first_spans, np.array([1, 2, 1, 2], "<u4").tobytes())
    return Damage("loss spans", write, change, read, DamagedCorpusError, "FILE, batch 0: its loss spans have CRC-32 *")


OF_TEXT = [*_of_text()]
DAMAGE = [*OF_TEXT, *_of_tokens(), *_saved(), _loss_spans()]


@damaged(DAMAGE)
def test_damage(damage: Damage, tmp_path: Path) -> None:
    check(damage, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("task_bytes", [64, 1 << 24])  # in tasks of its own, or in one task with others
@pytest.mark.parametrize(
    "damage",
    # damage stops a build by one error, whatever it says
    [pytest.param(each, marks=pytest.mark.soak if number % 6 else ()) for number, each in enumerate(OF_TEXT)],
    ids=lambda damage: damage.what,
)
def test_what_is_damaged_is_left_out_whole_if_that_is_asked_for(damage, task_bytes, tmp_path, monkeypatch):
    file = damage.write(tmp_path)
    file.write_bytes(damage.change(file.read_bytes()))
    patch_chunk_bytes(monkeypatch, 64)
    for name in ("0.jsonl", "z.jsonl"):
        (tmp_path / name).write_bytes(GOOD)
    sources = [tmp_path / "0.jsonl", file, tmp_path / "z.jsonl"]
    corpus = build(sources, tmp_path / "out", on_bad_source="skip", on_bad_record="skip", task_bytes=task_bytes)
    assert texts_of(corpus) == ["good", "good"]
    assert [source.left_out for source in corpus.sources()] == [{}, {"damaged input": 1}, {}]
    (reject,) = map(json.loads, (tmp_path / "out" / names.REJECTS).read_text().splitlines())
    assert (reject["source"], reject["record"], reject["reason"]) == (file.name, None, "damaged input")
    assert str(file) not in reject["detail"]  # where it lay is not part of a corpus
    assert [*json.loads((tmp_path / "out" / names.REPORT).read_text())["damaged_inputs"]] == [str(file)]


TOKENS: dict[str, Callable[[Path], Any]] = {
    "megatron": _megatron,
    "datatrove": _masked,
    "numpy": lambda folder: foreign.numpy_arrays(folder / "a.npy", DOCUMENTS),
    "flat": lambda folder: (folder / "a.npy").write_bytes(foreign.npy([1, 2, EOS, 3], "u2")),
    "olmo": _olmo,
    "mds": _mds(),
    "mds without dtype": _mds(encoding="ndarray"),
    "compressed mds": _mds(compress=("zstd", zstd)),
    "litdata": _litdata,
    **{
        name: lambda folder, name=name: (folder / name).write_bytes(
            FORMATS[name]([{"tokens": document, "labels": document} for document in DOCUMENTS], 2)
        )
        for name in ("plain.jsonl", "members.jsonl.gz", *TABLES)
    },
}


def _write_text(name: str) -> Write:
    return lambda folder: (folder / name).write_bytes(FORMATS[name](RECORDS, 50))


FORMS: dict[str, tuple[Write, Callable[..., Any]]] = {
    **{f"ids in {form}": (write, imported) for form, write in TOKENS.items()},
    **{name: (_write_text(name), _built) for name in (*COMPRESSED, *TABLES)},
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_changed_byte_or_a_cut_is_an_error_or_another_corpus(form, data, tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    (place / "in").mkdir()
    write, read = FORMS[form]
    write(place / "in")
    file = data.draw(st.sampled_from(sorted(path for path in (place / "in").iterdir() if path.suffix != ".metadata")))
    content = file.read_bytes()
    start, mask = data.draw(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)))
    rest = bytes([content[start] ^ mask]) + content[start + 1 :] if mask else b""
    file.write_bytes(content[:start] + rest)
    write_byte_tokenizer(place / "tok")
    with contextlib.suppress(TokshardError):
        result = read(place, place / "in", on_bad_record="skip")
        assert verify_corpus(result.directory).problems == ()
