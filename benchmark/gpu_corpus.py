"""A corpus for the measurements: ``tokshard build`` of the Python sources that this machine has. Needs no network."""

from __future__ import annotations

import json
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark.gpu_children import ROOT, last_lines, run
from tests.corpora import TINY_TOKENIZER, write_corpus
from tokshard.format.opening import open_corpus

TOKENIZER = ROOT / "recipes" / "tokenizer"


def make_corpus(directory: Path, *, num_bytes: int, seconds: float) -> dict[str, Any]:
    """The path of the corpus, and what it holds.

    If the build fails or takes too long, the bytes of the same files are the tokens, and ``problem`` says why.
    """
    directory.mkdir()
    texts = list(python_sources(num_bytes))
    jsonl, built = directory / "texts.jsonl", directory / "built"
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    began = time.monotonic()
    command = ["-m", "tokshard", "build", str(jsonl), "--tokenizer", str(TOKENIZER), "--out", str(built)]
    status, said = run(command, seconds=seconds)
    found: dict[str, Any] = {"row": "corpus", "seconds": time.monotonic() - began}
    if status != 0:
        why = f"no end in {seconds:.0f} s" if status is None else f"ended with {status}: {last_lines(said)}"
        found["problem"] = f"tokshard build: {why}; bytes are the tokens"
        built = corpus_of_bytes(directory / "bytes", texts)
    with open_corpus(built) as corpus:
        found |= {"documents": corpus.manifest.num_documents, "tokens": corpus.manifest.num_tokens}
    return found | {"path": str(built)}


def python_sources(num_bytes: int) -> Iterator[str]:
    """Texts of the files of the standard library and of installed packages, until they are `num_bytes`."""
    total = 0
    for root in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                text = Path(folder, name).read_bytes().decode(errors="replace") if name.endswith(".py") else ""
                if text.strip():
                    total += len(text)
                    yield text
                if total >= num_bytes:
                    return


def corpus_of_bytes(directory: Path, texts: list[str]) -> Path:
    """A corpus whose ids are the bytes of texts, plus one, and 0 at the end of each."""
    fields = json.loads(TINY_TOKENIZER)
    fields["model"]["vocab"] |= {f"byte{index}": index for index in range(4, 257)}
    documents = [[*(byte + 1 for byte in text.encode()), 0] for text in texts]
    return write_corpus(directory, documents, tokenizer=json.dumps(fields).encode())
