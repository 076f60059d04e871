"""What a user sees of a build while it runs, and what it says of losses."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.small import stopped_before_the_corpus
from tests.pipeline.inputs import jsonl, patch_chunk_bytes, write_byte_tokenizer
from tokshard import build_corpus
from tokshard.cli import build_progress as progress
from tokshard.cli.build_progress import FileCount, StageDisplay, fitting
from tokshard.cli.main import run
from tokshard.pipeline.judge import loss_warning
from tokshard.pipeline.progress import StageEnded
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.workspace.receipts import OutputCounts, Progress, Receipt, SourceCounts

MB = 1_000_000
TASKS = [
    Task(key=(0, 0), stop=3),
    Task(key=(3, 0), stop=4, span=Span(0, 8)),
    Task(key=(3, 1), stop=4, span=Span(8, None)),
    StreamTask(key=(4, 0)),
]


def receipt(*key: int, is_last: bool = True, documents: int = 2, records: int = 2, num_bytes: int = 64) -> Receipt:
    counts = SourceCounts(index=key[0], records_read=records, documents=documents, tokens=1)
    return Receipt(
        key=(key[0], key[1]),
        is_last=is_last,
        input_bytes=num_bytes,
        outputs=[OutputCounts(sources=[counts])],
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def display(stream: Any, done: Progress | None = None, *, name: str = "a.jsonl", **options: Any) -> StageDisplay:
    build: Any = SimpleNamespace(inputs=[SimpleNamespace(location=name)] * 5)
    given = {"stream": stream, "is_quiet": False, **options}
    found = StageDisplay(build, 183 * MB, FileCount(TASKS), done or Progress(0, 0, 0), **given)
    for key in ((0, 0), (3, 0)):
        found.finished(receipt(*key))
    return found


def test_files_are_done_when_all_their_tasks_are_and_a_task_that_runs_again_counts_once():
    files = FileCount(TASKS)
    assert (files.done, files.total) == (0, 5)
    done = []
    for key, is_last in [
        ((3, 1), True),
        ((0, 0), True),
        ((0, 0), True),
        ((3, 0), True),
        ((4, 0), False),
        ((4, 1), True),
    ]:
        files.add(receipt(*key, is_last=is_last))
        done.append(files.done)
    assert done == [0, 3, 3, 4, 4, 5]


def test_a_line_names_files_bytes_documents_losses_speed_and_time(clock):
    stream = io.StringIO()
    shown = display(stream)
    clock[0] += 11
    shown.progressed(Progress(43_100_000, 26_939, 26_100_000, records=28_142, bad=3))
    assert stream.getvalue() == (
        " 24%: 43.1 of 183 MB, 3 of 5 files, 26,939 documents, 1,203 left out, 2.37M tokens/s, 0:11 elapsed, "
        "0:35 left\n"
    )


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_bar_fits_the_terminal_and_cuts_no_word(columns, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    shown = display(stream)
    clock[0] += 11
    shown.progressed(Progress(43_100_000, 26_939, 26_100_000, records=28_142, bad=3))
    shown.show(StageEnded())
    line = stream.getvalue().rstrip("\n").rpartition("\r")[2]
    assert len(line) < columns
    head, bar, text = line.split("|")
    assert (head, len(bar) >= 10) == (" 24%", True)
    parts = text.strip().split(", ")
    full = "43.1 of 183 MB, 3 of 5 files, 26,939 documents, 1,203 left out, 2.37M tokens/s, 0:11 elapsed, 0:35 left"
    assert parts[0] == "43.1 of 183 MB"
    assert "1,203 left out" in text
    assert columns == 60 or "0:35 left" in text
    assert columns < 200 or text.strip() == full


def test_parts_are_left_out_from_the_last_rank_on():
    parts = [(0, "aa"), (2, "bb"), (1, "cc")]
    assert [fitting(parts, width) for width in (10, 9, 6, 5, 0)] == ["aa, bb, cc", "aa, cc", "aa, cc", "aa", "aa"]


def test_a_build_that_continues_says_what_it_kept(clock):
    stream = io.StringIO()
    display(stream, Progress(82 * MB, 9, 158_000_000, records=9))
    assert stream.getvalue() == "continuing: 45% done, 158M tokens kept\n"
    quiet = io.StringIO()
    display(quiet, Progress(82 * MB, 9, 158_000_000, records=9), is_quiet=True)
    assert quiet.getvalue() == ""


def test_a_name_cannot_steer_the_terminal(clock):
    stream = io.StringIO()
    display(stream, is_verbose=True, name="\x1b]0;x\x07\u202e.jsonl\n").finished(receipt(4, 0))
    assert stream.getvalue().splitlines()[-1].startswith("\\x1b]0;x\\x07\\u202e.jsonl\\n: 64 B, ")
    assert "\x1b" not in stream.getvalue()


# losses


@pytest.mark.parametrize(
    ("bad", "records", "is_end", "warns"),
    [
        (500, 1_000, False, True),
        (499, 1_000, False, False),
        (999, 999, False, False),
        (1, 2, True, True),
        (0, 0, True, False),
    ],
)
def test_half_of_the_records_bad_is_worth_a_warning(bad, records, is_end, warns):
    assert (loss_warning(bad, records, is_end=is_end) is not None) == warns


def test_a_display_warns_once_of_half_of_the_records_even_when_it_is_quiet(clock):
    stream = io.StringIO()
    shown = display(stream, is_quiet=True)
    for _ in range(4):
        shown.progressed(Progress(1, 300, 1, records=600, bad=300, example="missing text: no field 'text'"))
    assert stream.getvalue() == (
        "warning: 50% of the records read so far are bad and left out (600 of 1,200), such as: missing text: no field "
        "'text'\n"
    )


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """Runs a command line in an empty directory with a tokenizer: exit code, stdout, stderr."""
    write_byte_tokenizer(tmp_path / ".tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def shell(*arguments: str) -> tuple[int, str, str]:
        exit_code = run(["build", *arguments, "--tokenizer", ".tokenizer", "--out", "out", "--workers", "1"])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return shell


def test_a_build_that_leaves_out_half_of_its_records_warns_while_it_runs_and_at_the_end(shell):
    Path("a.jsonl").write_bytes(jsonl([{"text": "a"}, {"body": "b"}] * 600))
    exit_code, out, err = shell("a.jsonl", "--on-bad-record", "skip")
    assert exit_code == 0
    warning = "50% of the records are bad and left out (600 of 1,200)"
    assert f"\nwarning     {warning}\n" in f"{out}\n"
    assert "warning: 50% of the records read so far are bad and left out (600 of 1,200), such as: missing text" in err
    exit_code, _, err = shell("a.jsonl", "--on-bad-record", "skip", "--force", "--json", "--quiet")
    assert err.splitlines()[-1] == f"warning: {warning}"


def test_a_wrong_text_field_is_warned_of_before_all_is_read(shell, monkeypatch):
    patch_chunk_bytes(monkeypatch, 1 << 14)
    Path("a.jsonl").write_bytes(jsonl([{"content": "some text"}] * 4_000))
    seen: list[int] = []
    monkeypatch.setattr(StageDisplay, "say", lambda self, line: seen.append(self._records))
    assert shell("a.jsonl", "--on-bad-record", "skip")[0] == 1  # no document
    assert len(seen) == 1
    assert 1_000 <= seen[0] < 2_000


def test_duplicates_and_short_documents_are_no_bad_records(shell):
    Path("a.jsonl").write_bytes(jsonl([{"text": "aaa"}] * 1_500))
    exit_code, out, err = shell("a.jsonl", "--dedup", "exact", "--on-bad-record", "skip")
    assert (exit_code, "warning" in out, "warning" in err) == (0, False, False)


# stopping and continuing


@pytest.mark.parametrize("stop", [0, 1])
def test_a_build_that_is_interrupted_says_how_it_continues_and_then_that_it_does(stop, shell, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    Path("a.jsonl").write_bytes(jsonl([{"text": "text"}] * 40))
    with stopped_before_the_corpus(KeyboardInterrupt()):
        exit_code, _, err = shell("a.jsonl", "--task-bytes", "64", *(["--quiet"] if stop else []))
    assert err.splitlines()[-2:] == ["interrupted", "hint: run the same command to continue"]
    exit_code, _, err = shell("a.jsonl", "--task-bytes", "64")
    assert (exit_code, err.splitlines()[0]) == (0, "continuing: 100% done, 200 tokens kept")


def test_an_interrupted_build_of_an_iterable_says_that_it_starts_over(tmp_path):
    def texts() -> Any:
        yield "a"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        build_corpus(texts(), tokenizer=write_byte_tokenizer(tmp_path / "t"), out=tmp_path / "out", workers=1)
    assert error.value.__notes__ == ["<generator> can be read once only: start over with --force"]


def test_a_build_with_a_slow_encoder_says_once_what_makes_it_fast(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokshard.cli.build_progress.version_of", {"tokenizers": "0.22.1"}.__getitem__)
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
