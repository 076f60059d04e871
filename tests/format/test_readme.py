"""The worked example of ``tokshard/format/README.md`` is what the writer writes."""

import hashlib
import json
import struct
import zlib
from pathlib import Path

import pytest

from tests.corpora import TINY_TOKENIZER, Source, append_generation, write_corpus
from tokshard import build_corpus
from tokshard.format import schema
from tokshard.format.opening import open_corpus

README = Path(__file__).parents[2] / "tokshard" / "format" / "README.md"
SHARD = "shard-00-0000000-000000-0000.arrow"
MORE = Source(documents=[[2, 1, 0]], metadata={"url": ["d"]})


@pytest.fixture
def corpus(tmp_path):
    source = Source(
        documents=[[1, 2, 0], [0], [3, 3, 1, 0]],
        records=[0, 1, 3],
        left_out={"empty": 1},
        metadata={"url": ["a", None, "bc"]},
    )
    return write_corpus(tmp_path / "corpus", sources=[source], columns={"url": "string"}, tokenizer=TINY_TOKENIZER)


def example(corpus):
    """The example, as Markdown."""
    manifest = (corpus / "manifest.json").read_text()
    opened = open_corpus(corpus)
    place, runs = opened.shards.batch_places(0)[0], opened.shards.runs(0)
    info = opened.shards[0]
    row = (
        f"num_documents 3, num_tokens 8, num_bytes {info.num_bytes}, sha256 {info.sha256[:8]}...\n"
        f"batch_documents [{place.num_documents}], batch_tokens [{place.num_tokens}], "
        f"batch_offsets_position [{place.offsets_position}], batch_values_position [{place.values_position}]\n"
        f"stride_documents {opened.shards.stride_documents(0).tolist()}, "
        f"group_hashes [{opened.shards.group_hashes(0)[0]:#010x}], run_document {runs.document.tolist()}, "
        f"run_source {runs.source.tolist()}, run_record {runs.record.tolist()}"
    )
    parts = [
        "Files, bytes and SHA-256:",
        _files(corpus),
        "`manifest.json`:",
        manifest.rstrip("\n"),
        f"The row of `shards.arrow`, after `name` `{SHARD}`:",
        row,
        "`stride-hashes.bin`, the CRC-32 of the only stride:",
        (corpus / "stride-hashes.bin").read_bytes().hex(" "),
        "The shard, from the body of its record batch to the end of its kept text (the rest is Arrow's own metadata):",
        _hex((corpus / SHARD).read_bytes(), 0x338, 0x388),
    ]
    return _alternating(parts)


def _alternating(parts):
    """Lines of text, each followed by what it is about."""
    return "\n\n".join(f"```\n{part}\n```" if number % 2 else part for number, part in enumerate(parts))


def _files(folder):
    return "\n".join(
        f"{path.name:<36}{path.stat().st_size:>5}  {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(folder.iterdir())
    )


def _shown(name):
    """An example of the page."""
    _, _, rest = README.read_text(encoding="utf-8").partition(f"<!-- {name}: ")
    return rest.partition("-->\n")[2].partition(f"\n<!-- end of {name} -->")[0]


def _hex(content, start, stop):
    lines = []
    for position in range(start, stop, 16):
        part = content[position : min(position + 16, stop)]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{position:06x}  {part.hex(' '):<47}  {text}")
    return "\n".join(lines)


def test_the_worked_example_is_what_the_writer_writes_and_follows_from_the_page(corpus):
    # golden: if the bytes change, readers of this version must still understand them, or FORMAT_VERSION goes up
    assert schema.FORMAT_VERSION == 1
    ids = (1, 2, 0, 0, 3, 3, 1, 0)
    assert _shown("example") == example(corpus)
    assert (corpus / "stride-hashes.bin").read_bytes() == struct.pack("<I", zlib.crc32(struct.pack("<8H", *ids)))
    check_fingerprint(corpus, 3, ids)
    assert _shown("appended") == appended(corpus)
    check_fingerprint(corpus, 4, (*ids, 2, 1, 0))


def test_the_constants_of_the_page_are_those_of_the_writer():
    sizes = schema.MAX_BATCH_TOKENS, schema.MAX_BATCH_CHARACTERS, schema.ORDINAL_STRIDE, schema.HASH_STRIDE
    listed = f"Its constants are {', '.join(f'{size:,}' for size in sizes)} and {schema.HASH_GROUP:,} (three times)"
    assert listed in " ".join(README.read_text(encoding="utf-8").split())


def appended(corpus):
    """The example of an append, as Markdown."""
    folder = append_generation(corpus, sources=[MORE], columns={"url": "string"})
    content = json.loads((folder / "manifest.json").read_text())
    parts = [
        "Files of `generation-01`, bytes and SHA-256:",
        _files(folder),
        "`generation` in its `manifest.json`, the last field:",
        json.dumps({"generation": content["generation"]}, indent=2)[2:-2],
    ]
    return _alternating(parts)


def test_a_build_that_compares_texts_keeps_their_hashes_as_the_page_says(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "b"}\n{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "tokenizer.json").write_bytes(TINY_TOKENIZER)
    options = {"tokenizer": tmp_path / "tokenizer.json", "eos": "<eos>", "workers": 1, "dedup": "exact"}
    build_corpus(str(tmp_path / "texts.jsonl"), out=tmp_path / "corpus", **options)
    pairs = sorted(struct.unpack("<2Q", hashlib.sha256(text).digest()[:16]) for text in (b"a", b"b"))
    expected = b"".join(struct.pack("<2Q", *pair) for pair in pairs) + struct.pack("<Q", pairs[0][0])
    assert (tmp_path / "corpus" / "hashes.bin").read_bytes() == expected
    shown = "\n".join(expected[start : start + 16].hex(" ") for start in range(0, len(expected), 16))
    assert shown in README.read_text(encoding="utf-8")


def check_fingerprint(corpus, num_documents, tokens):
    """The content fingerprint is the SHA-256 of the bytes that the page says."""
    counts = {"bos_id": None, "eos_id": 0, "num_documents": num_documents, "num_tokens": len(tokens)}
    by_hand = b"tokshard content 1\n" + json.dumps(counts, separators=(",", ":")).encode()
    primes = (2097143, 2096867, 2096687, 2095943, 2095547, 2095343)
    for base, prime in zip((1415926, 535897, 932384, 626433, 832795, 288419), primes, strict=True):
        residue = 0
        for token in tokens:
            residue = (residue * base + token + 1) % prime
        by_hand += residue.to_bytes(4, "little")
    assert by_hand[-24:].hex(" ") in README.read_text(encoding="utf-8")
    assert open_corpus(corpus).fingerprint == hashlib.sha256(by_hand).hexdigest()
