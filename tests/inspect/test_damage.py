"""Promise 8: damage anywhere is reported with its file, and no input crashes the process."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.inspect.damage import DAMAGES, SAME_SIZE
from tokshard.inspect.verify import safe_read
from tokshard.inspect.verify.safe_read import ByteCounter, SafeFile, SparseImage, hash_chunks

ROOT = Path(__file__).parents[2]
CASES = 1_120
CASES_PER_PROCESS = 140
SECONDS_PER_CASE = 20
"""A case takes a few milliseconds; one that takes so long hangs."""
DESCRIBE_OTHERS = ("manifest.json", "shards.arrow")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Ten files: manifest, tables, stride hashes, tokenizer, rejects and four shards with kept columns."""
    rng = random.Random(3)
    documents = documents_of([rng.randint(1, 40) for _ in range(60)])
    metadata = {
        "url": [rng.choice([None, "", "http://a/ü", f"http://b/{n}"]) for n in range(60)],
        "score": [rng.choice([None, n / 7]) for n in range(60)],
    }
    return write_corpus(
        tmp_path_factory.mktemp("damage") / "corpus",
        sources=[Source(documents=documents, metadata=metadata, left_out={"malformed": 2})],
        columns={"url": "string", "score": "float64"},
        shard_tokens=350,
        tokenizer=TINY_TOKENIZER,
        rejects=b'{"record": 9, "reason": "malformed"}\n{"record": 11, "reason": "malformed"}\n',
    )


def run_cases(corpus, start, stop):
    """The outcomes of these cases, from a process that must survive them and may not hang in any."""
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", "tests.inspect.damage", str(corpus), str(start), str(stop)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        watchdog = threading.Timer(SECONDS_PER_CASE, process.kill)
        watchdog.start()
        for line in process.stdout:
            watchdog.cancel()
            lines.append(json.loads(line))
            watchdog = threading.Timer(SECONDS_PER_CASE, process.kill)
            watchdog.start()
        watchdog.cancel()
    case = start + len(lines)
    assert process.returncode != -signal.SIGKILL, f"case {case} hangs"
    assert process.returncode == 0, f"case {case} ended the process with {process.returncode}"
    return lines


def check(outcomes):
    for outcome in outcomes:
        # nothing says what the files should be that a damaged manifest or shard table describes
        expected = next(({name} for name in DESCRIBE_OTHERS if name in outcome["changed"]), set(outcome["changed"]))
        assert expected <= set(outcome["reported"]), outcome
        # bytes of the same number may hold other ids, which only verify sees; all else is refused or does not matter
        assert outcome["reading"] != "wrong" or outcome["damage"] in SAME_SIZE, outcome


@pytest.mark.parametrize(
    "start",
    [
        0,
        *(pytest.param(start, marks=pytest.mark.soak) for start in range(CASES_PER_PROCESS, CASES, CASES_PER_PROCESS)),
    ],
)
def test_damage_of_any_kind_is_reported_with_its_file(corpus, tmp_path, start):
    shutil.copytree(corpus, tmp_path / "corpus")  # cases run at the same time, each process on its own copy
    outcomes = run_cases(tmp_path / "corpus", start, start + CASES_PER_PROCESS)
    assert len(outcomes) == CASES_PER_PROCESS
    assert {outcome["damage"] for outcome in outcomes} == {damage.__name__ for damage in DAMAGES}
    check(outcomes)


@pytest.mark.soak
@pytest.mark.parametrize("start", range(10_000, 16_000, 3_000))
def test_thousands_more_cases_of_damage_are_reported_too(corpus, start):
    check(run_cases(corpus, start, start + 3_000))


def test_parts_that_lie_outside_of_a_file_are_loaded_and_freed_as_far_as_they_are_in_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a" * 50_000)
    with path.open("rb", buffering=0) as file:
        image = SparseImage(SafeFile(file), 50_000, lambda _: None)
        image.load(-5, 90_000)
    for start, stop in ((-9_000, 9_000), (60_000, 90_000), (40_000, 90_000), (-90_000, -60_000)):
        image.unload(start, stop)
    assert set(bytes(image.buffer)[10_000:40_000]) == set(b"a")


def test_what_is_left_of_a_file_that_is_cut_while_it_is_read_is_not_taken_for_tokens(tmp_path):
    (tmp_path / "shard").write_bytes(bytes(10))
    seen = []
    with (tmp_path / "shard").open("rb", buffering=0) as file:
        os.truncate(tmp_path / "shard", 7)
        hash_chunks(SafeFile(file), 10, ByteCounter(10, lambda *_: None), lambda *chunk: seen.append(chunk))
    assert not seen


def test_what_follows_the_place_where_a_file_was_cut_for_a_moment_is_not_taken_for_tokens(tmp_path, monkeypatch):
    class CutForAMoment(SafeFile):
        def fill(self, buffer, position):
            return min(5, filled) if (filled := super().fill(buffer, position)) and position == 8 else filled

    monkeypatch.setattr(safe_read, "CHUNK_BYTES", 8)
    (tmp_path / "shard").write_bytes(bytes(32))
    seen = []
    with (tmp_path / "shard").open("rb", buffering=0) as file:
        hash_chunks(CutForAMoment(file), 32, ByteCounter(32, lambda *_: None), lambda place, _: seen.append(place))
    assert seen == [0]


@pytest.mark.slow
def test_a_file_truncated_at_any_moment_does_not_stop_verification(corpus, tmp_path):
    """The real thing, where `cut_while_it_is_read` chooses the moment."""
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    script = (
        "import sys; from tokshard.inspect.verify.verification import verify_corpus\n"
        "for _ in range(80): print(len(verify_corpus(sys.argv[1], workers=2).problems), flush=True)\n"
    )
    files = {path: path.read_bytes() for path in copy.iterdir() if path.name != "manifest.json"}
    rng = random.Random(1)
    with subprocess.Popen([sys.executable, "-c", script, str(copy)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            path = rng.choice(sorted(files))
            os.truncate(path, rng.randrange(len(files[path])))
            path.write_bytes(files[path])
        counts = process.stdout.read().split()
    assert process.returncode == 0
    assert len(counts) == 80
    assert any(count != b"0" for count in counts)
