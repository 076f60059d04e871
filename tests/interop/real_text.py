"""A corpus of real text, small enough for every environment: the pages of this repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokshard import build_corpus, open_corpus

ROOT = Path(__file__).parents[2]


def build(directory: Path, **options: Any) -> tuple[Path, list[list[int]]]:
    """A corpus of several shards, with its documents; the paragraphs of the longest page are documents, too."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.md")) if ".venv" not in str(path)]
    texts = pages + max(pages, key=len).split("\n\n")
    build_corpus(
        ({"text": text, "page": number} for number, text in enumerate(texts)),
        tokenizer=str(ROOT / "recipes/tokenizer"),
        out=str(directory),
        keep_field=["page:int64"],
        workers=1,
        shard_tokens=5_000,
        **options,
    )
    with open_corpus(directory) as corpus:
        assert len(corpus.shards) > 1
        return directory, [document.tolist() for document in corpus]
