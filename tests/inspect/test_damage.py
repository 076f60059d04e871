"""Promise 8: damage anywhere is reported with its file, and no input crashes the process."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.inspect.damage import DAMAGES, SAME_SIZE

ROOT = Path(__file__).parents[2]
CASES_PER_PROCESS = 60
DESCRIBE_OTHERS = ("manifest.json", "shards.arrow")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Nine files: manifest, tables, tokenizer, rejects and four shards with kept columns."""
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
    """The outcomes of these cases, from a process that must survive them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.inspect.damage", str(corpus), str(start), str(stop)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"case {start + len(lines)} ended the process with {done.returncode}: {done.stderr}"
    return [json.loads(line) for line in lines]


def check(outcomes):
    for outcome in outcomes:
        # nothing says what the files should be that a damaged manifest or shard table describes
        expected = next(({name} for name in DESCRIBE_OTHERS if name in outcome["changed"]), set(outcome["changed"]))
        assert expected <= set(outcome["reported"]), outcome
        # bytes of the same number may hold other ids, which only verify sees; all else is refused or does not matter
        assert outcome["reading"] != "wrong" or outcome["damage"] in SAME_SIZE, outcome


@pytest.mark.parametrize("start", range(0, 360, CASES_PER_PROCESS))
def test_damage_of_any_kind_is_reported_with_its_file(corpus, start):
    outcomes = run_cases(corpus, start, start + CASES_PER_PROCESS)
    assert len(outcomes) == CASES_PER_PROCESS
    assert {outcome["damage"] for outcome in outcomes} == {damage.__name__ for damage in DAMAGES}
    check(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 16_000, 3_000))
def test_thousands_more_cases_of_damage_are_reported_too(corpus, start):
    check(run_cases(corpus, start, start + 3_000))
