"""The worked example of ``tokshard/format/README.md`` is what the writer writes."""

import hashlib
from pathlib import Path

import pytest

from tests.corpora import TINY_TOKENIZER, Source, write_corpus
from tokshard.format.opening import open_corpus
from tokshard.format.schema import FORMAT_VERSION

README = Path(__file__).parents[2] / "tokshard" / "format" / "README.md"
SHARD = "shard-00-0000000-000000-0000.arrow"


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
    files = "\n".join(
        f"{path.name:<36}{path.stat().st_size:>5}  {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(corpus.iterdir())
    )
    manifest = (corpus / "manifest.json").read_text()
    opened = open_corpus(corpus)
    place, runs = opened.shards.batch_places(0)[0], opened.shards.runs(0)
    info = opened.shards[0]
    row = (
        f"num_documents 3, num_tokens 8, num_bytes {info.num_bytes}, sha256 {info.sha256[:8]}...\n"
        f"batch_documents [{place.num_documents}], batch_tokens [{place.num_tokens}], "
        f"batch_offsets_position [{place.offsets_position}], batch_values_position [{place.values_position}]\n"
        f"stride_documents {opened.shards.stride_documents(0).tolist()}, run_document {runs.document.tolist()}, "
        f"run_source {runs.source.tolist()}, run_record {runs.record.tolist()}"
    )
    parts = [
        "Files, bytes and SHA-256:",
        files,
        "`manifest.json`:",
        manifest.rstrip("\n"),
        f"The row of `shards.arrow`, after `name` `{SHARD}`:",
        row,
        "The shard, from the body of its record batch to the end of its kept text (the rest is Arrow's own metadata):",
        _hex((corpus / SHARD).read_bytes(), 0x338, 0x388),
    ]
    return "\n\n".join(f"```\n{part}\n```" if number % 2 else part for number, part in enumerate(parts))


def _hex(content, start, stop):
    lines = []
    for position in range(start, stop, 16):
        part = content[position : min(position + 16, stop)]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{position:06x}  {part.hex(' '):<47}  {text}")
    return "\n".join(lines)


def test_the_worked_example_is_what_the_writer_writes(corpus):
    # golden: if the bytes change, readers of this version must still understand them, or FORMAT_VERSION goes up
    assert FORMAT_VERSION == 1
    _, _, rest = README.read_text(encoding="utf-8").partition("<!-- example: ")
    shown = rest.partition("-->\n")[2].partition("\n<!-- end of example -->")[0]
    assert shown == example(corpus)


def test_the_fingerprint_of_the_worked_example_follows_from_the_page(corpus):
    by_hand = b'tokshard content 1\n{"bos_id":null,"eos_id":0,"num_documents":3,"num_tokens":8}'
    for base, prime in (
        (1415926, 2097143),
        (535897, 2096867),
        (932384, 2096687),
        (626433, 2095943),
        (832795, 2095547),
        (288419, 2095343),
    ):
        residue = 0
        for token in (1, 2, 0, 0, 3, 3, 1, 0):
            residue = (residue * base + token + 1) % prime
        by_hand += residue.to_bytes(4, "little")
    assert by_hand[-24:].hex(" ") in README.read_text(encoding="utf-8")
    assert open_corpus(corpus).fingerprint == hashlib.sha256(by_hand).hexdigest()
