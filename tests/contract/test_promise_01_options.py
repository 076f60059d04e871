"""Promise 1 for builds that leave documents out, or split them: the same bytes whatever happened on the way."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import zstandard

from tests.contract import builds
from tests.examples import some
from tokshard.format import names
from tokshard.format.opening import open_corpus
from tokshard.inspect.verify.verification import verify_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS = {
    "dedup": ("--dedup", "exact"),
    "split": ("--validation-fraction", "0.2"),
    "lengths": ("--min-tokens", "40", "--max-tokens", "300"),
    "bad sources": ("--on-bad-source", "skip"),
    "all": (
        *("--dedup", "exact", "--validation-fraction", "0.2", "--min-tokens", "40", "--max-tokens", "300"),
        *("--on-bad-source", "skip", "--on-bad-record", "skip", "--max-documents", "4000"),
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Many texts that come twice, near and far, and after a damaged input."""
    directory = tmp_path_factory.mktemp("sources")
    plain, zstd, small = builds.write_sources(directory, documents=5_000)
    lines = Path(plain).read_bytes().splitlines(keepends=True)
    rng = random.Random(3)
    repeats = [*lines[::3], *(builds.text(rng, 30).encode().join([b'{"text": "', b'"}\n']) for _ in range(50))]
    repeats = [line for line in repeats if line.count(b"\n") == 1]
    rng.shuffle(repeats)
    twice = directory / "twice.jsonl"
    twice.write_bytes(b"".join(repeats))
    return [small, plain, zstd, str(twice)]


@pytest.fixture(scope="module")
def damaged_sources(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same with damage in a stream, in a group of small inputs, and in the last segment of a big one."""
    directory = tmp_path_factory.mktemp("damaged")
    whole = Path(sources[1]).read_bytes()
    truncated = directory / "truncated.jsonl.gz"
    truncated.write_bytes(gzip.compress(whole, 1)[:-10])
    corrupt = directory / "corrupt.jsonl.zst"
    corrupt.write_bytes(zstandard.compress(whole)[:-1] + b"x")
    for number in range(3):
        (directory / f"small-{number}.jsonl").write_bytes(b'{"text": "small %d"}\n' % number)
    broken = directory / "small-1.parquet"
    broken.write_bytes(b"PAR1 no footer")
    small = [str(directory / f"small-{number}.jsonl") for number in range(3)]
    return [str(truncated), small[0], str(broken), *small[1:], sources[1], str(corrupt), *sources[2:]]


def hashes(out: Path) -> dict[str, str]:
    """`corpus_hashes` of a corpus, or of the two of a validation split."""
    splits = [out / name for name in (names.TRAIN, names.VALIDATION) if (out / name).exists()]
    if not splits:
        return builds.corpus_hashes(out)
    assert sorted(path.name for path in out.iterdir()) == sorted(split.name for split in splits)
    found = {f"{split.name}/{name}": sha for split in splits for name, sha in builds.corpus_hashes(split).items()}
    assert [problem for split in splits for problem in verify_corpus(split).problems] == []
    return found


def build(sources: list[str], out: Path, *options: str) -> dict[str, str]:
    builds.complete(sources, out, *options)
    return hashes(out)


@pytest.fixture(
    scope="module",
    params=[name if name in ("lengths", "all") else pytest.param(name, marks=pytest.mark.soak) for name in OPTIONS],
)
def case(
    request: pytest.FixtureRequest, sources: list[str], damaged_sources: list[str], tmp_path_factory
) -> tuple[list[str], tuple[str, ...], dict[str, str]]:
    """Sources, options, and what one undisturbed process makes of them."""
    options = OPTIONS[request.param]
    inputs = damaged_sources if "--on-bad-source" in options else sources
    out = tmp_path_factory.mktemp("reference") / "out"
    done = builds.run(builds.command(inputs, out, *options, "--workers", "1"))
    assert done.returncode == 0, done.stderr
    return inputs, options, hashes(out)


@pytest.mark.soak  # test_promise_01_rebuild.py has workers, and test_promise_01_faults.py these options
@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(case, tmp_path: Path, workers: int) -> None:
    inputs, options, reference = case
    assert build(inputs, tmp_path / "out", *options, "--workers", str(workers)) == reference


@pytest.mark.soak  # test_promise_01_faults.py kills builds with these options at chosen steps
@pytest.mark.parametrize("moment", range(12))
def test_a_build_killed_at_random_moments_and_run_again_gives_the_same_bytes(case, tmp_path: Path, moment: int) -> None:
    inputs, options, reference = case
    rng = random.Random(moment)
    for _ in range(2):
        process = builds.start(builds.command(inputs, tmp_path / "out", *options, "--workers", rng.choice("123")))
        time.sleep(rng.uniform(0.4, 2.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert build(inputs, tmp_path / "out", *options, "--workers", "2") == reference


def test_a_corpus_without_damaged_inputs_is_the_one_with_them_left_out(
    damaged_sources: list[str], tmp_path: Path
) -> None:
    build(damaged_sources, tmp_path / "skipped", "--on-bad-source", "skip", "--workers", "2")
    damaged = ("truncated.jsonl.gz", "small-1.parquet", "corrupt.jsonl.zst")
    good = [path for path in damaged_sources if not path.endswith(damaged)]
    build(good, tmp_path / "good", "--workers", "1")
    with open_corpus(tmp_path / "skipped") as skipped, open_corpus(tmp_path / "good") as expected:
        assert skipped.num_tokens == expected.num_tokens
        assert [document.tolist() for document in skipped.documents()] == [
            document.tolist() for document in expected.documents()
        ]
        left_out = [source.left_out for source in skipped.sources() if source.left_out]
        assert left_out == [{"damaged input": 1}] * 3
    rejects = [json.loads(line) for line in (tmp_path / "skipped" / names.REJECTS).read_text().splitlines()]
    assert [(reject["source"], reject["record"], reject["reason"]) for reject in rejects] == [
        (name, None, "damaged input") for name in damaged
    ]


@some(
    "dedup, limit",
    [
        ("none", 54),
        ("exact", 9_000),
        *(("none", limit) for limit in (1, 53, 700, 5_100, 9_000)),
        *(("exact", limit) for limit in (1, 53, 54, 700, 5_100)),
    ],
    default=2,
)
def test_with_damaged_inputs_left_out_a_limit_is_exact_for_any_number_of_workers(
    damaged_sources: list[str], tmp_path: Path, dedup: str, limit: int
) -> None:
    options = ["--on-bad-source", "skip", "--max-documents", str(limit), "--dedup", dedup]
    one = build(damaged_sources, tmp_path / "one", *options, "--workers", "1")
    assert build(damaged_sources, tmp_path / "three", *options, "--workers", "3") == one
    with open_corpus(tmp_path / "one") as corpus:
        assert corpus.num_documents == limit


def test_skipping_may_begin_when_a_build_has_failed_on_damage(damaged_sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    inputs = [damaged_sources[5], *damaged_sources[:5]]
    failed = builds.run(builds.command(inputs, out, "--workers", "2"))
    assert failed.returncode == 1
    assert "hint: fetch the file again and start over with --force, or leave it out with --on-bad-source skip" in (
        failed.stderr
    )
    reference = build(inputs, tmp_path / "reference", "--on-bad-source", "skip", "--workers", "1")
    assert build(inputs, out, "--on-bad-source", "skip", "--workers", "2") == reference


def test_an_input_that_vanishes_after_it_was_hashed_is_no_first_of_its_texts(
    sources: list[str], tmp_path: Path
) -> None:
    """Its hashes are forgotten, and what was encoded by them is encoded again."""
    copies = [shutil.copy2(source, tmp_path) for source in (sources[1], sources[0])]
    again = tmp_path / "again.jsonl"
    again.write_bytes(Path(copies[0]).read_bytes())
    script = (
        "import os, tokshard.pipeline.stages as p\n"
        "find = p.find_duplicates\n"
        "def find_and_remove(*arguments):\n"
        f"    os.path.exists({str(copies[0])!r}) and os.remove({str(copies[0])!r})\n"
        "    return find(*arguments)\n"
        "p.find_duplicates = find_and_remove\n"
        "from tokshard.cli.main import main\n"
        "main()\n"
    )
    options = ["--dedup", "exact", "--on-bad-source", "skip", "--workers", "2"]
    arguments = builds.command([str(copies[1]), copies[0], str(again)], tmp_path / "out", *options)
    done = builds.run([arguments[0], "-c", script, *arguments[3:]])
    assert done.returncode == 0, done.stderr
    with open_corpus(tmp_path / "out") as corpus:
        gone, kept = corpus.sources()[1:]
        assert gone.left_out == {"damaged input": 1}
        assert kept.documents > 4_000
