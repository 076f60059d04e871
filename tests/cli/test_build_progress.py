"""What a user sees of a build while it runs, and what it says of losses."""

from __future__ import annotations

import gzip
import io
import itertools
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.contract.small import stopped_before_the_corpus
from tests.pipeline.inputs import jsonl, patch_chunk_bytes, write_byte_tokenizer
from tokshard.cli import build_progress as progress
from tokshard.cli.build_progress import FileCount, StageDisplay, fitting
from tokshard.cli.main import run
from tokshard.cli.progress import byte_progress, stage_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Builds in an empty directory with a tokenizer: exit code, and what it says while it runs."""
    write_byte_tokenizer(tmp_path / ".tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def shell(*arguments: str, stream: type[io.StringIO] = io.StringIO) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream())
            code = run(["build", *arguments, "--tokenizer", ".tokenizer", "--out", "out", "--workers", "1"])
            return code, sys.stderr.getvalue()

    return shell


FILES = ("a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl", "e.jsonl.gz", "--on-bad-record", "skip", "--task-bytes", "100")
"""Three files of one task, one of several tasks with bad records, and a stream."""


@pytest.fixture
def five_files(shell, monkeypatch) -> None:
    """Files in small tasks and chunks, and a clock on which each look takes four seconds."""
    patch_chunk_bytes(monkeypatch, 64)
    line = '{"text": "text"}\n'
    for name in "abc":
        Path(f"{name}.jsonl").write_text(line)
    Path("d.jsonl").write_text(line * 12 + '{"body": 1}\n' * 3 + line * 10)
    Path("e.jsonl.gz").write_bytes(gzip.compress((line * 20).encode(), compresslevel=0, mtime=0))
    clock = itertools.count(step=4)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))


def test_lines_name_files_bytes_documents_losses_speed_and_time(shell, five_files):
    code, said = shell(*FILES)
    assert (code, said.splitlines()) == (0, LINES)
    with stopped_before_the_corpus(KeyboardInterrupt()):
        assert shell(*FILES, "--force", "--quiet") == (130, "interrupted\nhint: run the same command to continue\n")
    code, said = shell(*FILES)
    assert (code, said) == (0, "continuing: 100% done, 225 tokens kept\n")
    shutil.rmtree("out")
    code, said = shell(*FILES, "--job-index", "1", "--num-jobs", "2")  # a share, of unknown size
    first = "197 B, 0 of 2 files, 12 documents, 3 tokens/s, 0:20 elapsed"
    assert (code, said.splitlines()[0]) == (0, first)


LINES = [
    "  6%: 51 of 824 B, 0 of 5 files, 3 documents, 1 tokens/s, 0:20 elapsed, 5:03 left",
    " 22%: 179 of 824 B, 3 of 5 files, 11 documents, 2 tokens/s, 0:36 elapsed, 2:09 left",
    " 37%: 307 of 824 B, 3 of 5 files, 16 documents, 3 left out, 2 tokens/s, 0:52 elapsed, 1:27 left",
    " 53%: 435 of 824 B, 3 of 5 files, 24 documents, 3 left out, 2 tokens/s, 1:08 elapsed, 1:00 left",
    " 65%: 533 of 824 B, 4 of 5 files, 29 documents, 3 left out, 2 tokens/s, 1:24 elapsed, 0:45 left",
    " 82%: 678 of 824 B, 4 of 5 files, 37 documents, 3 left out, 2 tokens/s, 1:40 elapsed, 0:21 left",
    " 98%: 805 of 824 B, 4 of 5 files, 44 documents, 3 left out, 2 tokens/s, 1:56 elapsed, 0:02 left",
]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (64, " 824 of 824 B, 3 left out, 0:00 left"),
        (79, " 824 of 824 B, 5 of 5 files, 3 left out, 3 tokens/s, 0:00 left"),
        (200, " 824 of 824 B, 5 of 5 files, 45 documents, 3 left out, 3 tokens/s, 1:12 elapsed, 0:00 left"),
    ],
)
def test_a_bar_fits_the_terminal_and_leaves_out_the_last_ranks(shell, five_files, monkeypatch, columns, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, said = shell(*FILES, stream=Terminal)
    line = said.rstrip("\n").rpartition("\r")[2]
    head, bar, text = line.split("|")
    assert (code, head, text) == (0, "100%", shown)
    assert len(line) == columns - 1
    assert bar == "#" * max(10, len(bar))


def test_parts_are_left_out_from_the_last_rank_on():
    parts = [(0, "aa"), (2, "bb"), (1, "cc")]
    assert [fitting(parts, width) for width in (10, 9, 6, 5, 0)] == ["aa, bb, cc", "aa, cc", "aa, cc", "aa", "aa"]


def test_a_bar_of_bytes_is_where_the_work_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with stage_progress("plan c") as say:
        say("a stage")
        say("the next")
    assert sys.stderr.getvalue().split("\r")[1:4] == [" " * 0, "plan c: a stage", " " * 15]
    assert capsys.readouterr().out == ""
    with byte_progress("verify c") as show:
        show(1, 4)
        time.sleep(0.11)  # a bar is drawn ten times a second
        show(4, 4)
        assert "100%" in sys.stderr.getvalue()


def test_a_file_is_done_when_each_of_its_tasks_is_and_a_task_that_fails_or_runs_again_adds_nothing():
    files = FileCount(SimpleNamespace(key=(0, segment), is_group=False) for segment in (0, 1))
    found = []
    for segment, failure in ((0, None), (0, None), (1, "a bad record"), (1, None), (1, None)):
        files.add(SimpleNamespace(key=(0, segment), failure=failure))
        found.append(files.done)
    assert (found, files.total) == ([0, 0, 0, 1, 1], 1)


# losses


def test_a_build_that_leaves_out_half_of_its_records_warns_while_it_runs(shell):
    Path("a.jsonl").write_bytes(jsonl([{"text": "a"}, {"body": "b"}] * 600))
    exit_code, err = shell("a.jsonl", "--on-bad-record", "skip")
    warning = (
        "warning: 50% of the records read so far are bad and left out (600 of 1,200), such as: missing text: no field "
        "'text'; it has: body\n"
    )
    assert (exit_code, err.count(warning)) == (0, 1)


def test_a_wrong_text_field_is_warned_of_once_before_all_is_read(shell, monkeypatch):
    patch_chunk_bytes(monkeypatch, 1 << 14)
    Path("a.jsonl").write_bytes(jsonl([{"content": "some text"}] * 4_000))
    seen: list[int] = []
    monkeypatch.setattr(StageDisplay, "say", lambda self, line: seen.append(self._records))
    assert shell("a.jsonl", "--on-bad-record", "skip")[0] == 1  # no document
    assert len(seen) == 1
    assert 1_000 <= seen[0] < 2_000


def test_a_build_with_a_slow_encoder_says_once_what_makes_it_fast(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "version_of", {"tokenizers": "0.22.1"}.__getitem__)
    write_byte_tokenizer(tmp_path / "tok")
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": f"{number} {'text ' * 60}"} for number in range(4_000)]))
    (tmp_path / "tiny.jsonl").write_bytes(jsonl([{"text": "text"}]))
    corpora = "".join(f"corpora.{name} = {{ out = '{name}', sources = 'a.jsonl' }}\n" for name in "ab")
    Path("r.toml").write_text(f"defaults = {{ tokenizer = 'tok', dedup = 'exact' }}\n{corpora}")
    note = (
        "note: tokenizers 0.22.1 is slow: before a large build, pip install 'tokshard[fast]'; it encodes about 25 "
        "times faster per core, with the same ids for text up to Unicode 16"
    )
    for arguments, count in (
        (["build", "r.toml", "--dry-run"], 1),
        (["build", "r.toml"], 1),
        (["build", "r.toml"], 0),  # nothing is left to do
        (["build", "r.toml", "a", "b", "--force", "--quiet"], 0),
        (["copy", "a", "--out", "c"], 0),
        (["build", "tiny.jsonl", "--tokenizer", "tok", "--out", "d"], 0),
    ):
        assert run(arguments) == 0
        assert capsys.readouterr().err.splitlines().count(note) == count
