"""Promise 8: a flipped, missing, truncated or foreign byte anywhere is reported with its file, and crashes nothing.

Damage of any kind to any file on a disk is in tests/inspect/test_damage.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.contract import builds
from tokshard import build_corpus
from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.runtime import StreamPlan
from tokshard.store import open_store


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    sources = builds.write_sources(directory / "sources", documents=100)
    build_corpus(sources, tokenizer=builds.TOKENIZER, out=directory / "out", shard_tokens=8_000, workers=1)
    return directory / "out"


def files_of(corpus: Path) -> list[str]:
    """Every file that must not change; the report is not pure, so nothing can vouch for it."""
    return sorted(path.name for path in corpus.iterdir() if path.name != names.REPORT)


def samples_of(location: Path | str) -> list[list[int]]:
    plan = StreamPlan(str(location), seq_len=256, block_tokens=2_048, window_blocks=4, seed=3)
    return [plan.sample(sample)["input_ids"].tolist() for sample in range(60)]


def test_a_flipped_bit_in_a_store_is_reported_or_was_never_read(corpus: Path, in_memory: str) -> None:
    for name in files_of(corpus):
        open_store(in_memory).put(name, (corpus / name).read_bytes())
    expected, rng, reported = samples_of(corpus), random.Random(0), 0
    assert samples_of(in_memory) == expected
    for name in [name for name in files_of(corpus) if name.startswith("shard-")] * 2:
        content = (corpus / name).read_bytes()
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        open_store(in_memory).put(name, bytes(changed))
        try:
            assert samples_of(in_memory) == expected
        except DamagedCorpusError as error:
            if name not in error.problem:
                raise
            reported += 1
        open_store(in_memory).put(name, content)
    assert reported >= 4, "most of a shard is tokens"
