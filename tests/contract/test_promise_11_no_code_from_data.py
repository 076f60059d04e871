"""Promise 11: no file that a user is handed is unpickled or executed.

Checkpoints are tested where they are read, in ``tests/trainer/test_checkpoint.py`` and
``tests/run_files/test_saved_state.py``; repositories of the hub in ``tests/pipeline/test_hub.py``.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.builds import TOKENIZER, complete, write_sources
from tokshard.cli import main

ROOT = Path(__file__).parents[2]

IMPORTED = """
_pickle base64 collections copyreg ctypes dataclasses encodings hashlib json logging multiprocessing pickle random re
selectors signal socket struct subprocess tempfile threading typing weakref click msgspec numpy pyarrow tokenizers
tokshard tqdm sitecustomize usercustomize torch zstandard
"""
"""Modules that a build, or Python when it starts a process, imports or looks for."""

PROGRAM = """
import sys
from tokshard.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""

READING = """
from tokshard.cli.main import run
if __name__ == "__main__":
    for words in ("inspect out", "verify out", "plan mix.toml", "trace mix.toml --sample 0",
                  "inspect out --grep nothing-like-it --workers 2", "scan out --against c.jsonl --workers 2"):
        assert run(words.split()) == 0
"""

TRAINING = """
import os
import sys
from tokshard.runtime import StreamingLoader, StreamPlan
if __name__ == "__main__":
    before = dict(os.environ)
    plan = StreamPlan("out", seq_len=16)
    with StreamingLoader(plan, global_batch_size=2) as loader:
        next(iter(loader))
    assert dict(os.environ) == before
"""


class Hostile:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Exists once hostile code has run."""
    return tmp_path / "ran"


@pytest.fixture
def downloads(tmp_path: Path, ran: Path) -> Path:
    """A data set of someone else, next to modules with the names of those that Python looks for."""
    directory = tmp_path / "downloads"
    write_sources(directory, documents=2_500)
    for name in IMPORTED.split():
        (directory / f"{name}.py").write_text(
            f"open({str(ran)!r}, 'a').write('{name} ')\nraise ImportError('hostile')\n"
        )
    return directory


def tokshard(cwd: Path, tmp_path: Path, *arguments: str, script: str = PROGRAM) -> None:
    """Run the command as it is installed: a script of another directory, whose own directory Python searches first."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    program = tmp_path / "bin" / "program.py"
    program.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_modules_next_to_the_inputs_are_not_imported_by_a_build_nor_by_its_workers(
    downloads: Path, ran: Path, tmp_path: Path
) -> None:
    sources = ["a.jsonl", "b.jsonl.zst"]
    fixed = ["--tokenizer", str(TOKENIZER), "--out", str(tmp_path / "out"), "--task-bytes", "1MiB"]
    tokshard(downloads, tmp_path, "build", *sources, *fixed, "--workers", "2")
    report = json.loads((tmp_path / "out" / "build-report.json").read_bytes())
    assert report["workers"] == 2
    assert not ran.exists(), ran.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", [READING, TRAINING], ids=["commands", "a loader"])
def test_modules_next_to_a_corpus_are_not_imported_by_those_who_read_it(
    downloads: Path, ran: Path, tmp_path: Path, script: str
) -> None:
    complete([str(downloads / "c.jsonl")], downloads / "out", "--shard-tokens", "2k")
    (downloads / "mix.toml").write_text('corpora = { it = "out" }\nseq_len = 16\nglobal_batch_size = 2\n')
    tokshard(downloads, tmp_path, script=script)
    assert not ran.exists(), ran.read_text()


def test_code_in_a_tokenizers_directory_is_not_run(ran: Path, tmp_path: Path) -> None:
    directory = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER, directory)
    config = json.loads((directory / "tokenizer_config.json").read_bytes())
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_it.It", None]}, "trust_remote_code": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "tokenization_it.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (directory / "tokenizer.pkl").write_bytes(pickle.dumps(Hostile(ran)))
    sources = write_sources(tmp_path / "in", documents=10)
    assert main.run(["build", sources[2], "--tokenizer", str(directory), "--out", str(tmp_path / "out"), "-q"]) == 0
    assert not ran.exists()


def test_the_loading_script_of_a_saved_data_set_is_not_run(ran: Path, tmp_path: Path) -> None:
    from tests.pipeline.saved import save

    directory = save(tmp_path / "saved", [["a text", "another"]])
    (directory / "saved.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (directory / "dataset.pkl").write_bytes(pickle.dumps(Hostile(ran)))
    assert main.run(["build", str(directory), "--tokenizer", str(TOKENIZER), "--out", str(tmp_path / "out"), "-q"]) == 0
    assert not ran.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ("tokenizer/tokenizer.json", ["build", "in/c.jsonl", "--tokenizer", "tokenizer", "--out", "new"]),
        ("tokenizer/tokenizer_config.json", ["build", "in/c.jsonl", "--tokenizer", "tokenizer", "--out", "new"]),
        ("in/c.jsonl", ["build", "in/c.jsonl", "--tokenizer", "tokenizer", "--out", "new"]),
        ("recipe.toml", ["build", "recipe.toml"]),
        ("out/manifest.json", ["inspect", "out"]),
        ("out/shards.arrow", ["verify", "out"]),
        ("out/tokenizer.json", ["inspect", "out", "0"]),
        ("mix.toml", ["plan", "mix.toml"]),
        ("cursor.json", ["trace", "cursor.json", "--sample", "0"]),
    ],
)
def test_a_pickle_in_place_of_a_file_is_refused_and_not_read(
    replaced: str, words: list[str], ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TOKENIZER, "tokenizer")
    write_sources(Path("in"), documents=10)
    complete(["in/c.jsonl"], Path("out"))
    Path("mix.toml").write_text('corpora = { it = "out" }\nseq_len = 16\nglobal_batch_size = 2\n')
    Path(replaced).write_bytes(pickle.dumps(Hostile(ran)))
    assert main.run(words) in (1, 2)
    assert not ran.exists()
