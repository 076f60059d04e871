"""Files as other tools write them, byte by byte from the descriptions of their formats."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.pipeline import inputs
from tests.pipeline.inputs import jsonl
from tokshard import import_corpus, open_corpus
from tokshard.inspect.verify.verification import verify_corpus

EOS = 0
"""The id that ends documents, of the tokenizer of bytes."""

Documents = Sequence[Sequence[int]]

TABLES = {**inputs.TABLES, "a.jsonl": lambda found, rows=None: jsonl(found.to_pylist())}
"""File name to what makes it of a table of ids, with so many rows in a group or batch, if that is said."""

MEGATRON_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def flat(documents: Documents, dtype: str) -> bytes:
    """The ids of all documents, one after another."""
    return np.array([token for document in documents for token in document], f"<{dtype}").tobytes()


def megatron(prefix: Path, documents: Documents, dtype: str = "u2", *, sentences: Sequence[int] | None = None) -> Path:
    """``PREFIX.bin`` and ``PREFIX.idx``.

    Args:
        documents: or sequences, of which `sentences` says how many each document has.
    """
    lengths = [len(document) for document in documents]
    width = np.dtype(dtype).itemsize
    places = [width * start for start in accumulate(lengths, initial=0)][:-1]
    bounds = list(accumulate(sentences or [1] * len(documents), initial=0))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(lengths), len(bounds))
    index = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(places)}q", *places)
    prefix.with_name(prefix.name + ".bin").write_bytes(flat(documents, dtype))
    prefix.with_name(prefix.name + ".idx").write_bytes(head + index + struct.pack(f"<{len(bounds)}q", *bounds))
    return prefix


def datatrove(file: Path, documents: Documents, dtype: str = "u2", *, masks: Documents = ()) -> Path:
    """``NAME.ds``, ``NAME.ds.index`` and ``NAME.ds.metadata``; with `masks`, ``NAME.ds.loss``."""
    if masks:
        file.with_name(file.name + ".loss").write_bytes(flat(masks, "u1"))
    ends = list(accumulate(map(len, documents)))
    file.write_bytes(flat(documents, dtype))
    file.with_name(file.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    file.with_name(file.name + ".metadata").write_text(f"gpt2|{dtype[1]}\n{sum(map(len, documents))}\n0 T")
    return file


def olmo(folder: Path, documents: Documents, masks: Documents, *, number: int = 0) -> Path:
    """``token_ids_part_NNNN.npy`` and ``labels_mask_part_NNNN.npy``, neither with a header."""
    folder.mkdir(exist_ok=True)
    file = folder / f"token_ids_part_{number:04d}.npy"
    file.write_bytes(flat(documents, "u2"))
    (folder / f"labels_mask_part_{number:04d}.npy").write_bytes(flat(masks, "u1"))
    return file


def fms(folder: Path, documents: Documents) -> Path:
    """A directory of fms-fsdp with one file of a batch for each document, and its table of counts."""
    (folder / "data" / "en").mkdir(parents=True)
    (folder / "meta").mkdir()
    schema = pa.schema([pa.field("tokens", pa.uint32())])
    with pa.ipc.new_file(str(folder / "data" / "en" / "part.arrow"), schema) as writer:
        for document in documents:
            writer.write_batch(pa.record_batch([pa.array(document[:-1], pa.uint32())], schema=schema))
    counts = f"/data/en/part.arrow,{len(documents)},{sum(map(len, documents)) - len(documents)}"
    (folder / "meta" / "combined_counts.csv").write_text(f"dataset/filename,documents,tokens\n{counts}\n")
    return folder


def npy(numbers: Sequence[int], dtype: str) -> bytes:
    """An array of one dimension, as version 1 of numpy's format."""
    text = f"{{'descr': '<{dtype}', 'fortran_order': False, 'shape': ({len(numbers)},), }}".encode()
    text = text.ljust(-(-(len(text) + 11) // 64) * 64 - 11) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + np.array(numbers, f"<{dtype}").tobytes()


def numpy_arrays(file: Path, documents: Documents, dtype: str = "u2", *, of_offsets: str = "i8") -> Path:
    """``NAME.npy`` and ``NAME.offsets.npy``."""
    file.write_bytes(npy([token for document in documents for token in document], dtype))
    offsets = list(accumulate(map(len, documents), initial=0))
    file.with_name(file.stem + ".offsets.npy").write_bytes(npy(offsets, of_offsets))
    return file


def container(samples: Sequence[bytes], between: bytes = b"") -> bytes:
    """Samples with their number and places before them, as in MDS and litdata."""
    start = 4 * (len(samples) + 2) + len(between)
    places = accumulate(map(len, samples), initial=start)
    return struct.pack(f"<{len(samples) + 2}I", len(samples), *places) + between + b"".join(samples)


MDS_ENCODINGS = ("ndarray:uint16", "bytes", "ndarray:int32:3")
MDS_CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33, "uint64": 64, "int64": 65}
"""Of arrays that say themselves how they are stored."""


def array_bytes(numbers: Sequence[int], dtype: str) -> bytes:
    """Of one dimension, behind its shape."""
    return struct.pack("<BB", 1 << 2, len(numbers)) + np.array(numbers, dtype).tobytes()


def mds(
    folder: Path,
    shards: Sequence[Documents],
    encoding: str = "ndarray:uint16",
    dtype: str = "int64",
    compress: tuple[str, Callable[[bytes], bytes]] | None = None,
    hashed: str | None = None,
    more: Mapping[str, Documents] | None = None,
) -> Path:
    """Shards with the columns ``id`` (str), ``tokens`` and ``n`` (int), and ``index.json``.

    Args:
        dtype: of the ids, where `encoding` does not say it.
        compress: suffix, and a function from bytes to bytes.
        hashed: name of the hash of the shards that the index has.
        more: columns of int32 with a list for each document.
    """
    folder.mkdir(exist_ok=True)
    kind, *said = encoding.split(":")
    dtype = said[0] if said else dtype
    listed = []
    more = more or {}
    for number, documents in enumerate(shards):
        samples = []
        for row, document in enumerate(documents):
            ids = np.array(document, dtype).tobytes()
            if kind == "ndarray" and len(said) < 2:
                ids = (b"" if said else bytes([MDS_CODES[dtype]])) + array_bytes(document, dtype)
            sizes = [3] + ([] if len(said) == 2 else [len(ids)])
            lists = [array_bytes(values[row], "int32") for values in more.values()]
            sizes += map(len, lists)
            start = struct.pack(f"<{len(sizes)}I", *sizes)
            samples.append(start + b"abc" + ids + struct.pack("<q", 7) + b"".join(lists))
        data, name = container(samples, b'{"version": 2}'), f"shard.{number:05d}.mds"
        hashes = {hashed: hashlib.new(hashed, data).hexdigest()} if hashed else {}
        shard = {
            "column_names": ["id", "tokens", "n", *more],
            "column_encodings": ["str", encoding, "int", *["ndarray:int32"] * len(more)],
            "column_sizes": [None, 12 if len(said) == 2 else None, 8, *[None] * len(more)],
            "format": "mds",
            "samples": len(documents),
            "raw_data": {"basename": name, "bytes": len(data), "hashes": hashes},
            "zip_data": None,
        }
        if compress is not None:
            suffix, function = compress
            name, data = f"{name}.{suffix}", function(data)
            shard["zip_data"] = {"basename": name, "bytes": len(data), "hashes": {}}
        (folder / name).write_bytes(data)
        listed.append(shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return folder


LITDATA_KINDS = {
    **{
        f"no_header_tensor:{code}": dtype
        for code, dtype in zip(range(11, 19), ["u1", "i1", "i2", "i2", "i4", "i4", "i8", "i8"], strict=True)
    },
    "no_header_tensor:20": "u2",
    **{f"no_header_numpy:{code}": dtype for code, dtype in enumerate(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])},
}
"""Name of how ids are stored, with its code in the library, to what that is."""


def litdata(
    folder: Path,
    chunks: Sequence[Documents],
    *,
    kind: str = "no_header_tensor:16",
    compress: tuple[str, Callable[[bytes], bytes]] | None = None,
) -> Path:
    """``chunk-0-N.bin`` and ``index.json``, as they are written for ``TokensLoader``."""
    folder.mkdir(exist_ok=True)
    dtype = LITDATA_KINDS[kind]
    listed = []
    for number, documents in enumerate(chunks):
        data = container([flat([document], dtype) for document in documents])
        name = f"chunk-0-{number}{f'.{compress[0]}' if compress else ''}.bin"
        (folder / name).write_bytes(compress[1](data) if compress else data)
        tokens = sum(map(len, documents))
        listed.append({"chunk_bytes": len(data), "chunk_size": len(documents), "dim": tokens, "filename": name})
    config = {
        "compression": compress and compress[0],
        "data_format": [kind],
        "data_spec": "[1, {}]",
        "encryption": None,
        "item_loader": "TokensLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": listed, "config": config}))
    return folder


def imported(place: Path, *sources: Path, **options: Any) -> Any:
    """Import into ``out`` of a place, in this process, for the tokenizer ``tok`` of the place."""
    return import_corpus(sources, **{"tokenizer": place / "tok", "out": place / "out", "workers": 1, **options})


def documents_of(result: Any) -> list[list[int]]:
    """The documents of a corpus, which is checked in every byte."""
    assert verify_corpus(result.directory).problems == ()
    with open_corpus(result.directory) as corpus:
        return [document.tolist() for document in corpus.documents()]
