"""The command line: help, completion, and how a command ends."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli.transcripts import shell
from tests.contract import small
from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.examples import some
from tests.pipeline.inputs import write_byte_tokenizer
from tests.store.memory import SCHEME
from tokshard import __version__
from tokshard.cli.completion import complete_files
from tokshard.cli.main import COMMANDS, cli, run
from tokshard.errors import BuildError
from tokshard.store import STORES_BY_SCHEME

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tokshard"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", documents_of([3, 4, 600]), tokenizer=TINY_TOKENIZER, shard_tokens=100)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes ``tokshard verify`` raise an error."""

    def fail_with(error: BaseException) -> None:
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        @click.option("--debug", is_flag=True)
        def verify(as_json: bool, debug: bool) -> None:
            raise error

        monkeypatch.setattr("tokshard.cli.verify.verify", verify)

    return fail_with


# help


def test_without_a_command_help_is_an_error():
    exit_code, out, err = shell()
    assert (exit_code, out) == (2, "")
    assert re.findall("(?m)^(.*):$", err) == ["Options", "Make corpora", "Look at corpora", "Train on them"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_two_screens_of_80_columns_and_48_lines(monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    exit_code, out, _ = shell(name, "--help")
    assert exit_code == 0
    assert "--json" in out
    assert "--debug" in out
    assert "\\b" not in out  # examples keep their lines
    lines = out.splitlines()
    rows = sum(1 + max(0, len(line) - 1) // 80 for line in lines)  # examples may be longer than a row
    assert rows <= 2 * 48
    if rows > 48:  # more than a screen: what is seldom needed comes last
        assert [line for line in lines if line.endswith(":") and not line.startswith(" ")][-1] == "Advanced:"


def test_help_names_the_uris_that_it_takes():
    _, out, _ = shell("build", "--help")
    sources, out_option = out.partition("A SOURCE is")[2], out.partition("--out DIR")[2]
    schemes = set(STORES_BY_SCHEME) - {SCHEME}
    for shown, end, taken in [
        (sources, "Documents keep", schemes - {"http"}),
        (out_option, "--append", schemes - {"http", "https"}),
    ]:
        words = shown.partition(end)[0].replace(",", " ").split()
        assert {word.partition("://")[0].strip("(") for word in words if "://" in word} - {"hf"} == taken


def test_the_version_is_printed():
    assert shell("--version") == (0, f"tokshard {__version__}\n", "")


# completion


def environment_of(instruction: str, words: str) -> dict[str, str]:
    return {"_TOKSHARD_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}


@pytest.mark.slow
def test_the_program_answers_a_shell():
    asked = {**os.environ, **environment_of("bash_complete", "tokshard build notes.js")}
    done = subprocess.run(COMMAND, env=asked, capture_output=True, text=True, check=True)
    assert done.stdout == "file,notes.js\n"


def test_shells_complete_commands_and_options(monkeypatch, capsys):
    def completed(instruction: str, words: str = "") -> str:
        for name, value in environment_of(instruction, words).items():
            monkeypatch.setenv(name, value)
        complete_files()
        with pytest.raises(SystemExit):
            cli(prog_name="tokshard")
        return capsys.readouterr().out

    page = (ROOT / "tokshard/cli/README.md").read_text(encoding="utf-8")
    assert 'eval "$(_TOKSHARD_COMPLETE=bash_source tokshard)"' in page
    script = completed("bash_source")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "complete -o nosort -F _tokshard_completion tokshard" in script
    assert completed("bash_complete", "tokshard ve") == "plain,verify\n"
    assert completed("bash_complete", "tokshard build --max-document-b") == "plain,--max-document-bytes\n"
    for kind in ("zsh", "fish"):
        assert f"{kind}_complete" in completed(f"{kind}_source")


# errors


class PanicException(BaseException):
    """As Rust libraries raise."""


LESS = "hint: ask for less at once, or use a machine with more memory\n"
BUG = "hint: this is a bug in tokshard; --debug shows the traceback to report it with\n"


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (
            BuildError("the disk is full\nand more", hint="make room"),
            1,
            "error: the disk is full\\nand more\nhint: make room\n",
        ),
        (ZeroDivisionError("division by zero"), 1, f"error: internal: ZeroDivisionError: division by zero\n{BUG}"),
        (PanicException("out of bounds"), 1, f"error: internal: PanicException: out of bounds\n{BUG}"),
        (BrokenPipeError("a worker is gone"), 1, f"error: internal: BrokenPipeError: a worker is gone\n{BUG}"),
        (MemoryError("8 EiB"), 1, f"error: there is not enough memory: 8 EiB\n{LESS}"),
        (
            RuntimeError("can't start new thread"),
            1,
            "error: the system starts no more threads\nhint: raise its limit (ulimit -u, or pids of a container)\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_is_a_line_and_what_to_do(failing, error, exit_code, said):
    failing(error)
    assert shell("verify") == (exit_code, "", said)


def test_with_json_an_error_is_on_stdout_too(failing):
    failing(BuildError("the disk is full", hint="make room"))
    exit_code, out, err = shell("verify", "--json")
    assert json.loads(out) == {"error": "the disk is full", "hint": "make room", "exit_code": 1}
    assert (exit_code, err) == (1, "error: the disk is full\nhint: make room\n")
    exit_code, out, _ = shell("verify", "--json", "--wrong")
    assert (exit_code, json.loads(out)["error"]) == (2, "no option --wrong")


@pytest.mark.parametrize("arguments", [["--debug", "verify"], ["verify", "--debug"]])
@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), BuildError("full", hint="make room")])
def test_debug_shows_the_traceback_of_any_error(failing, arguments, error):
    failing(error)
    exit_code, _, err = shell(*arguments)
    assert exit_code == 1
    assert "Traceback (most recent call last):" in err
    assert err.splitlines()[-1].startswith("hint: ")


# paths

SIZES = ["--seq-len", "8", "--global-batch-size", "1"]
"""Makes a plan of a corpus."""

COMMANDS_ON = {
    "build": ["build", "{}", "--tokenizer", "none", "--out", "out"],
    "build a recipe": ["build", "{}.toml"],
    "inspect": ["inspect", "{}"],
    "report": ["report", "{}", "--out", "page.html"],
    "report of a mix": ["report", "{}.toml", "--out", "page.html"],
    "diff": ["diff", "{}", "{}"],
    "inspect --grep": ["inspect", "{}", "--grep", "text"],
    "status": ["status", "{}"],
    "commit": ["commit", "{}"],
    "scan": ["scan", "{}", "--against", "items.txt"],
    "verify": ["verify", "{}"],
    "plan": ["plan", "{}", *SIZES],
    "plan --checkpoint": ["plan", "corpus", *SIZES, "--checkpoint", "{}"],
    "plan a mix": ["plan", "{}.toml"],
    "trace": ["trace", "{}", *SIZES, "--step", "1"],
    "bench": ["bench", "{}", *SIZES],
    "bench a mix": ["bench", "{}.toml"],
    "import": ["import", "{}", "--tokenizer", "t", "--out", "out"],
    "copy": ["copy", "{}", "--out", "out"],
    "select": ["select", "{}", "--out", "out"],
    "export": ["export", "{}", "--format", "mds", "--out", "out"],
}
"""Each command on a path."""


@pytest.fixture(autouse=True)
def _bench_needs_torch(request):
    case = getattr(request.node, "callspec", None)
    if case is not None and str(case.params.get("command")).startswith("bench"):
        pytest.importorskip("torch")


def test_every_command_is_tried_on_paths():
    assert {arguments[0] for arguments in COMMANDS_ON.values()} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS_ON)
def test_a_path_that_cannot_be_read_is_named_in_an_error_with_a_hint(corpus, monkeypatch, command):
    """One that does not exist, one that no file system can open, a link to itself, a variable that is not set."""
    monkeypatch.chdir(corpus.parent)
    os.symlink("loop", "loop")
    for name in ("nowhere", "a" * 300, "loop", ""):
        exit_code, out, err = shell(*(word.format(name) for word in COMMANDS_ON[command]))
        assert out == ""
        problem, hint = err.splitlines()[:2]
        assert name in problem
        assert "internal" not in problem
        assert hint.startswith("hint: ")
        assert exit_code == 2 or (name in {"a" * 300, "loop"} and exit_code == 1)


ESCAPE = "\x1b]0;x\x07\u202e"
NAMED = """
build E.jsonl E.csv OPTIONS --out Eout -v
build E.jsonl OPTIONS --out newE --dry-run
build E.jsonl Ebad.jsonl OPTIONS --out unfinishedE
status unfinishedE
status Eout
trace E.toml --step 1
trace E.toml --document E:0
trace E.toml --document E:99
trace E.toml --step 1 --checkpoint E.pt
plan E.toml
inspect E
inspect E corpus
inspect E --document 1
inspect E --document 99
inspect E corpus --grep two
inspect E --grep E
diff E other
diff E.toml other.toml
verify E
verify E.toml
report E --out E.html
report E --out no/E
verify no/E
"""


def test_no_name_reaches_the_terminal_unescaped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small.without_the_library_of_pages(monkeypatch.setattr)
    write_byte_tokenizer(tmp_path / ".tokenizer")
    source = Source(documents=documents_of([5, 9, 2, 4]), path=f"{ESCAPE}.jsonl")
    write_corpus(tmp_path / "corpus", sources=[source], tokenizer=TINY_TOKENIZER)
    write_corpus(tmp_path / "other", documents_of([5, 9, 3, 4]), tokenizer=TINY_TOKENIZER)
    (tmp_path / ESCAPE).symlink_to("corpus")
    sizes = "seq_len = 3\nglobal_batch_size = 2\nallow_small_blocks = true\n"
    for name, text in (
        ("E.jsonl", '{"text": "a"}'),
        ("E.csv", "x"),
        ("Ebad.jsonl", "{"),
        ("E.toml", f"corpora.{json.dumps(ESCAPE)} = {json.dumps(ESCAPE)}\n{sizes}"),
        ("other.toml", f"corpora.other = 'other'\n{sizes}"),
    ):
        Path(name.replace("E", ESCAPE)).write_text(text)
    options = "--tokenizer .tokenizer --workers 1 --on-bad-source skip"
    for command in NAMED.strip().splitlines():
        _, out, err = shell(*command.replace("OPTIONS", options).replace("E", ESCAPE).split())
        assert "\\x1b]0;x\\x07\\u202e" in out + err, command
        assert not {"\x1b", "\x07", "\u202e"} & set(out + err), command


# streams and signals


def started(*words: object, **streams: Any) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams}
    return subprocess.Popen([*COMMAND, *map(str, words)], cwd=ROOT, **streams)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "exit_code", "said"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_signals_end_a_command_cleanly_with_the_exit_code_of_the_signal(tmp_path, number, exit_code, said):
    os.mkfifo(tmp_path / "manifest.json")  # reading it waits for a writer
    process = started("inspect", tmp_path)
    with (tmp_path / "manifest.json").open("wb"):  # both ends open: it waits for bytes now
        process.send_signal(number)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (exit_code, "", said)


@pytest.mark.slow
@some("closed", ["<&- >&- 2>&-", "2> /dev/full", "<&-", ">&-", "2>&-"])
def test_a_build_with_closed_streams_does_its_work_and_ends_with_0(tmp_path, closed):
    command = f"{sys.executable} -m tokshard build {tmp_path}/a.jsonl --tokenizer {ROOT}/recipes/tokenizer"
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    words = f"{command} --out {tmp_path}/out -v --workers 2 {closed}"
    done = subprocess.run(words, cwd=ROOT, shell=True, capture_output=True, check=False)
    assert done.returncode == 0
    assert b"internal" not in done.stderr + done.stdout
    assert run(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_an_error_after_the_work_is_done(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    recipe = f'[corpora.a]\nsources = "a.jsonl"\ntokenizer = "{ROOT}/recipes/tokenizer"\nout = "out"\n'
    (tmp_path / "r.toml").write_text(recipe)
    with open("/dev/full", "wb") as full:
        process = started("build", tmp_path / "r.toml", "--quiet", stdout=full)
        _, err = process.communicate(timeout=100)
    assert (process.returncode, err.splitlines()) == (
        1,
        [
            "error: standard output cannot be written: No space left on device",
            "hint: make room, or send the output to another place",
        ],
    )
    assert run(["verify", str(tmp_path / "out")]) == 0


def test_a_full_temporary_directory_is_named_and_not_what_needed_it(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert run(["inspect", str(corpus), "--grep", "x"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert said.startswith(
        f"error: the temporary directory {tmp_path} cannot be written: File too large\nhint: make room"
    )


@pytest.mark.slow
def test_a_difference_that_cannot_be_written_is_an_error_too(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    with open("/dev/full", "wb") as full:
        process = started("diff", corpus, other, stdout=full)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert err.startswith("error: standard output cannot be written: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["inspect", *["{}"] * 20, "--sample", "0"], 1, ""),
        (
            ["inspect", "nowhere", "--json"],
            2,
            "error: nowhere does not exist\nhint: give the directory that 'tokshard build --out' wrote\n",
        ),
    ],
)
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(corpus, words, exit_code, said):
    process = started(*(word.format(corpus) for word in words))
    process.stdout.close()
    assert process.stderr.read() == said
    assert process.wait(timeout=100) == exit_code
    process.stderr.close()


@pytest.mark.slow
def test_output_fits_a_terminal_without_utf8(tmp_path):
    source = Source(documents=documents_of([3, 4, 600]), path="größe-数.jsonl", left_out={"empty": 1})
    corpus = write_corpus(tmp_path / "corpus", sources=[source], tokenizer=TINY_TOKENIZER)
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    out, _ = started("inspect", corpus, "--sample", 0, text=False, env=environment).communicate()
    assert b"512-1,023          1   33.3%  ####" in out
    assert "größe-\\u6570.jsonl: 1 of 4 left out".encode("latin-1") in out


def test_verify_shows_a_bar_on_a_terminal_and_leaves_nothing_of_it(corpus):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    out, _ = started("verify", corpus, stderr=theirs).communicate()
    shown = os.read(ours, 1 << 16).decode()  # while the other end is open: what it holds goes with it
    os.close(theirs)
    os.close(ours)
    assert out.startswith("ok: ")
    assert f"verify {corpus}: " in shown
    assert shown.rstrip("\r").rpartition("\r")[2].strip() == ""


def test_without_a_terminal_verify_says_now_and_then_how_far_it_is(corpus, monkeypatch):
    assert shell("verify", corpus)[2] == ""  # it took no ten seconds
    monkeypatch.setattr("tokshard.cli.progress._LINE_SECONDS", 0.0)
    lines = shell("verify", corpus)[2].splitlines()
    assert len(lines) > 1
    assert lines[0].endswith(" of 12.6 kB")
    assert "12.6 kB of" not in lines[0]
    assert lines[-1] == f"verify {corpus}: 100%, 12.6 kB of 12.6 kB"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("mkdir gone; cd gone; rmdir ../gone", "the current directory does not exist any more"),
        ("export LC_ALL=C PYTHONUTF8=0", "the arguments are not ASCII, and Python reads them as ascii, not as UTF-8"),
    ],
)
def test_an_environment_in_which_paths_mean_something_else_is_refused(corpus, tmp_path, before, said):
    words = shlex.join([*COMMAND, "inspect", str(corpus), "--grep", "größe"])
    before += f"; export PYTHONPATH={ROOT}"
    done = subprocess.run(f"{before}; {words}", cwd=tmp_path, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: {said}")
