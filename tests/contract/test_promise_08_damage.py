"""Promise 8: a flipped, missing, truncated or foreign byte anywhere is reported with its file, and crashes nothing.

More kinds of damage, of every file, are in tests/inspect/test_damage.py.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.contract import builds
from tests.examples import some
from tests.store.memory import SCHEME, MemoryStore
from tokshard import TokshardError, build_corpus, open_corpus, select_corpus
from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.runtime import StreamPlan
from tokshard.store import STORES_BY_SCHEME, open_store


@pytest.fixture(scope="module", params=["out", "view"])
def corpus(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A corpus, and a view of it. A copy beside it finds its base."""
    directory = tmp_path_factory.mktemp("corpus")
    sources = builds.write_sources(directory / "sources", documents=100)
    build_corpus(sources, tokenizer=builds.TOKENIZER, out=directory / "out", shard_tokens=8_000, workers=1)
    select_corpus(directory / "out", out=directory / "view", hash_range=(0, 0.7), workers=1)
    return directory / str(request.param)


def files_of(corpus: Path) -> list[str]:
    """Every file that must not change; the report is not pure, so nothing can vouch for it."""
    return sorted(path.name for path in corpus.iterdir() if path.name != names.REPORT)


def damage(path: Path, kind: str, rng: random.Random) -> None:
    content = path.read_bytes()
    place = rng.randrange(len(content))
    if kind == "flipped":
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
    elif kind == "truncated":
        path.write_bytes(content[:place])
    elif kind == "foreign":
        path.write_bytes(content[:place] + b"x" + content[place:])
    else:
        path.unlink()


@pytest.mark.slow
@some("kind", ["flipped", "missing", "truncated", "foreign"], default=2)
def test_damage_to_any_file_is_reported_with_that_file_and_reading_never_crashes(corpus: Path, kind: str) -> None:
    assert verify_corpus(corpus).is_ok
    for name in files_of(corpus):
        copy = corpus.parent / f"{kind}-{name}"
        shutil.copytree(corpus, copy)
        damage(copy / name, kind, random.Random(name))
        report = verify_corpus(copy)
        assert not report.is_ok
        assert name in {problem.file for problem in report.problems}, (name, report.problems)
        try:
            with open_corpus(copy) as opened:
                for document in opened.documents():
                    document.tolist()
        except TokshardError:
            pass  # an error a user can act on; what is not noticed here, verify has reported
        shutil.rmtree(copy)


def test_a_file_that_does_not_belong_is_reported(corpus: Path) -> None:
    copy = corpus.parent / "copy"
    shutil.copytree(corpus, copy)
    shutil.copy(copy / files_of(copy)[-1], copy / "shard-00-0009999-000000-0000.arrow")
    assert {problem.file for problem in verify_corpus(copy).problems} == {"shard-00-0009999-000000-0000.arrow"}
    shutil.rmtree(copy)


def samples_of(location: Path | str) -> list[list[int]]:
    plan = StreamPlan(str(location), seq_len=256, block_tokens=2_048, window_blocks=4, seed=3)
    return [plan.sample(sample)["input_ids"].tolist() for sample in range(60)]


def test_a_flipped_bit_in_a_store_is_reported_or_was_never_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    base, remote = corpus.with_name("out"), f"{SCHEME}:/{tmp_path}/{corpus.name}"
    for place in {corpus, base}:
        for name in files_of(place):
            open_store(f"{SCHEME}:/{tmp_path}/{place.name}").put(name, (place / name).read_bytes())
    store = open_store(f"{SCHEME}:/{tmp_path}/{base.name}")
    expected, rng, reported = samples_of(corpus), random.Random(0), 0
    assert samples_of(remote) == expected
    for name in [name for name in files_of(base) if name.startswith("shard-")] * 2:
        content = (base / name).read_bytes()
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        store.put(name, bytes(changed))
        try:
            assert samples_of(remote) == expected
        except DamagedCorpusError as error:
            if name not in error.problem:
                raise
            reported += 1
        store.put(name, content)
    assert reported >= 4, "most of a shard is tokens"
