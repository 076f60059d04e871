"""What a build of any kind of source will hold is estimated."""

from __future__ import annotations

import base64
import bz2
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.inputs import FORMATS, patch_chunk_bytes, write_byte_tokenizer, xz
from tests.pipeline.saved import save
from tokshard.pipeline import estimate
from tokshard.pipeline.options import BuildOptions

Write = Callable[[Path, Sequence[str]], Any]
"""Puts texts without a newline into a folder."""


def _one_text_a_file(directory: Path, texts: Sequence[str]) -> None:
    for number, text in enumerate(texts):
        (directory / f"{number:04d}.txt.bz2").write_bytes(bz2.compress(text.encode()))


def _saved(directory: Path, texts: Sequence[str]) -> None:
    third = len(texts) // 3
    save(directory / "saved", [texts[:third], texts[third : 2 * third], texts[2 * third :]], rows=70)


def _lines(suffix: str, compress: Callable[[bytes], bytes], between: str = "\n") -> Write:
    return lambda directory, texts: (directory / f"a.txt{suffix}").write_bytes(compress(between.join(texts).encode()))


def _records(name: str) -> Write:
    return lambda directory, texts: (directory / name).write_bytes(FORMATS[name]([{"text": one} for one in texts], 90))


KINDS: dict[str, tuple[Write, dict[str, Any]]] = {
    **{name: (_records(name), {}) for name in FORMATS},
    "files of text": (_one_text_a_file, {}),
    "text by line": (_lines("", bytes), {"text_unit": "line"}),
    "compressed text by line": (_lines(".xz", xz), {"text_unit": "line"}),
    "text by paragraph": (_lines(".bz2", lambda data: bz2.compress(data, 1), "\n\n"), {"text_unit": "paragraph"}),
    "saved data set": (_saved, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_is_within_5_percent_for_every_kind_of_source(kind, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 1 << 16)
    monkeypatch.setattr(estimate, "_TEXT_BYTES_PER_PLACE", 1 << 18)
    monkeypatch.setattr(estimate, "_TEXT_BYTES_PER_COMPRESSED_PLACE", 3 << 20)
    draw = random.Random(17)  # 5 MB that hardly compress: their files are longer than what is read ahead of them
    texts = [base64.b64encode(draw.randbytes(6_000 + 5 * (number % 9))).decode() for number in range(630)]
    write, options = KINDS[kind]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", texts)
    tokenizer = write_byte_tokenizer(tmp_path / ".tokenizer")
    asked = BuildOptions(tokenizer=str(tokenizer), out=str(tmp_path / "out"), workers=1, task_bytes=1 << 21, **options)
    found = estimate.estimate_build([str(tmp_path / "in")], asked)
    assert found.documents == pytest.approx(len(texts), rel=0.05)
    assert found.tokens == pytest.approx(sum(len(text) + 1 for text in texts), rel=0.05)
    assert found.sampled_documents < len(texts)
    assert not (tmp_path / "out").exists()
