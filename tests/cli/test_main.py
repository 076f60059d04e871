"""The command line: what it prints where, and with which exit code."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import click
import pytest

from tests.corpora import TINY_TOKENIZER, TOKENIZER, Source, documents_of, write_corpus
from tests.examples import some
from tokshard import __version__
from tokshard.cli.completion import complete_files
from tokshard.cli.main import COMMANDS, cli, run
from tokshard.errors import BuildError
from tokshard.inspect.corpus.places import short_names

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tokshard"]


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", documents_of([3, 4, 600]), tokenizer=TINY_TOKENIZER, shard_tokens=100)


@pytest.fixture
def shell(capsys):
    """Runs a command line in this process: exit code, stdout, stderr."""

    def shell(*arguments):
        exit_code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return shell


@pytest.fixture
def failing(monkeypatch):
    """Makes ``tokshard verify`` raise an error."""

    def fail_with(error):
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        @click.option("--debug", is_flag=True)
        def verify(as_json, debug):
            raise error

        monkeypatch.setattr("tokshard.cli.verify.verify", verify)

    return fail_with


def test_help_lists_every_command_with_a_line(shell):
    exit_code, out, _ = shell("--help")
    assert exit_code == 0
    for name, command in COMMANDS.items():
        assert f" {name} {command.short_help}" in " ".join(out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_json_and_debug(shell, name):
    exit_code, out, _ = shell(name, "--help")
    assert exit_code == 0
    assert "--json" in out
    assert "--debug" in out
    assert "\\b" not in out  # examples keep their lines


HEADINGS = ["Input", "Text", "Output", "What is left out", "Cluster", "Display", "Advanced"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_two_screens_of_80_columns_and_48_lines(shell, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = shell(name, "--help")
    lines = out.splitlines()
    rows = sum(1 + max(0, len(line) - 1) // 80 for line in lines)  # examples may be longer than a row
    assert rows <= 2 * 48
    if rows > 48:  # more than a screen: what is seldom needed comes last
        assert [line for line in lines if line.endswith(":") and not line.startswith(" ")][-1] == "Advanced:"


@pytest.mark.parametrize("name", ["build", "import"])
def test_help_of_a_build_lists_every_option_once_under_its_heading(shell, name):
    _, out, _ = shell(name, "--help")
    assert [line[:-1] for line in out.splitlines() if line[:1].isupper() and line.endswith(":")] == HEADINGS
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    listed = [line.split()[0].rstrip(",") for line in out.splitlines() if line.startswith("  -")]
    options = [param for param in command.get_params(click.Context(command)) if isinstance(param, click.Option)]
    listed.remove("-h")  # a name that the whole program gives to --help
    assert sorted(listed) == sorted(param.opts[0] for param in options if "--help" not in param.opts)
    required = next(line for line in out.splitlines() if line.startswith("  --tokenizer"))
    assert out.index("\nText:") < out.index(required) < out.index("\nOutput:")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_the_same_as_the_help_of_the_command(name):
    context = click.Context(cli)
    command = cli.get_command(context, name)
    assert command is not None
    assert command.name == name
    assert COMMANDS[name].short_help[0] == (command.help or "")[0]


def test_the_version_is_printed(shell):
    assert shell("--version") == (0, f"tokshard {__version__}\n", "")


def environment_of(instruction, words):
    return {"_TOKSHARD_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}


@pytest.fixture
def completed(monkeypatch, capsys):
    """Asks as a shell does, in this process."""

    def completed(instruction, words=""):
        for name, value in environment_of(instruction, words).items():
            monkeypatch.setenv(name, value)
        complete_files()
        with pytest.raises(SystemExit):
            cli(prog_name="tokshard")
        return capsys.readouterr().out

    return completed


@pytest.mark.slow
def test_the_program_answers_a_shell():
    asked = {**os.environ, **environment_of("bash_complete", "tokshard build notes.js")}
    done = subprocess.run(COMMAND, env=asked, capture_output=True, text=True, check=True)
    assert done.stdout == "file,notes.js\n"


def test_bash_completes_commands_and_options(completed):
    page = (ROOT / "tokshard/cli/README.md").read_text(encoding="utf-8")
    assert 'eval "$(_TOKSHARD_COMPLETE=bash_source tokshard)"' in page
    script = completed("bash_source")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "complete -o nosort -F _tokshard_completion tokshard" in script
    assert completed("bash_complete", "tokshard ve") == "plain,verify\n"
    assert completed("bash_complete", "tokshard build --max-document-b") == "plain,--max-document-bytes\n"


@pytest.mark.parametrize("kind", ["zsh", "fish"])
def test_other_shells_have_a_script_of_completion(completed, kind):
    assert f"{kind}_complete" in completed(f"{kind}_source")


def test_a_missing_command_is_wrong_usage_and_shows_the_help(shell):
    exit_code, out, err = shell()
    assert (exit_code, out) == (2, "")
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["verfy"], "no command 'verfy'", "did you mean verify?"),
        (
            ["frobnicate"],
            "no command 'frobnicate'",
            f"commands are {', '.join(COMMANDS)}; see 'tokshard --help'",
        ),
        (["inspect", "--documnt", "3", "c"], "no option --documnt", "did you mean --document?"),
        (["inspect", "--documnt=3", "c"], "no option --documnt", "did you mean --document?"),
        (["inspect", "--xyzzy", "c"], "no option --xyzzy", "see 'tokshard inspect --help'"),
        (["inspect", "-x", "c"], "no option -x", "see 'tokshard inspect --help'"),
        (["--verson"], "no option --verson", "did you mean --version?"),
        (["inspect", "--jobs", "3", "c"], "no option --jobs", "see 'tokshard inspect --help'"),  # its dashes are known
        (["inspect"], "missing argument 'CORPUS...'", "see 'tokshard inspect --help'"),
        (["inspect", "c", "--document"], "option '--document' requires an argument", "see 'tokshard inspect --help'"),
        (
            ["inspect", "c", "--sample", "few"],
            "invalid value for '--sample': 'few' is not a whole number such as 4096, 256M, 1.5B or 1e6",
            "k, M, B (or G) and T stand for 10^3, 10^6, 10^9 and 10^12; digits may be grouped as in 1_000",
        ),
        (
            ["verify", "ftp://c"],
            "ftp://c is a URI of a scheme that tokshard does not know, expected one of s3://, gs://, az://, https://, http://",
            "copy it to one of these, or to this machine",
        ),
    ],
)
def test_wrong_usage_is_a_problem_and_a_hint_and_exit_code_2(shell, arguments, error, hint):
    exit_code, out, err = shell(*arguments)
    assert (exit_code, out) == (2, "")
    problem_line, hint_line = err.splitlines()
    assert problem_line == f"error: {error}"
    assert hint_line.startswith("hint: ")
    if hint is not None:
        assert hint_line == f"hint: {hint}"


def test_an_error_of_the_run_is_a_problem_and_a_hint_and_exit_code_1(shell, failing):
    failing(BuildError("the disk is full\nand more", hint="make room"))
    assert shell("verify") == (1, "", "error: the disk is full\\nand more\nhint: make room\n")


def test_with_json_an_error_is_on_stdout_too(shell, failing):
    failing(BuildError("the disk is full", hint="make room"))
    exit_code, out, err = shell("verify", "--json")
    assert json.loads(out) == {"error": "the disk is full", "hint": "make room", "exit_code": 1}
    assert (exit_code, err) == (1, "error: the disk is full\nhint: make room\n")


def test_with_json_wrong_usage_is_on_stdout_too(shell):
    exit_code, out, _ = shell("verify", "--json", "--wrong")
    assert (exit_code, json.loads(out)["error"]) == (2, "no option --wrong")


def test_an_unexpected_error_is_one_line_and_the_way_to_its_traceback(shell, failing):
    failing(ZeroDivisionError("division by zero"))
    exit_code, out, err = shell("verify")
    assert (exit_code, out) == (1, "")
    assert err.splitlines() == [
        "error: internal: ZeroDivisionError: division by zero",
        "hint: this is a bug in tokshard; --debug shows the traceback to report it with",
    ]


@pytest.mark.parametrize("arguments", [["--debug", "verify"], ["verify", "--debug"]])
@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), BuildError("full", hint="make room")])
def test_debug_shows_the_traceback_of_any_error(shell, failing, arguments, error):
    failing(error)
    exit_code, _, err = shell(*arguments)
    assert exit_code == 1
    assert "Traceback (most recent call last):" in err
    assert err.splitlines()[-1].startswith("hint: ")


def test_what_memory_cannot_hold_is_not_called_a_bug(shell, corpus):
    exit_code, out, err = shell("plan", corpus, *SIZES, "--simulate", "1e18")
    assert (exit_code, out) == (1, "")
    assert err.startswith("error: there is not enough memory: ")
    assert "bug" not in err


def test_a_library_error_outside_exception_is_caught(shell, failing):
    class PanicException(BaseException):  # as Rust libraries raise
        pass

    failing(PanicException("index out of bounds"))
    exit_code, _, err = shell("verify")
    assert exit_code == 1
    assert err.startswith("error: internal: PanicException: index out of bounds\n")


def test_an_interrupt_is_one_line_and_exit_code_130(shell, failing):
    failing(KeyboardInterrupt())
    assert shell("verify") == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "exit_code", "said"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_signals_end_a_command_cleanly_with_the_exit_code_of_the_signal(tmp_path, number, exit_code, said):
    os.mkfifo(tmp_path / "manifest.json")  # reading it waits for a writer
    process = subprocess.Popen(
        [*COMMAND, "inspect", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with (tmp_path / "manifest.json").open("wb"):  # both ends open: it waits for bytes now
        process.send_signal(number)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (exit_code, "", said)


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
    "scan": ["scan", "{}", "--ids", "ids.txt"],
    "verify": ["verify", "{}"],
    "plan": ["plan", "{}", *SIZES],
    "plan --checkpoint": ["plan", "corpus", *SIZES, "--checkpoint", "{}"],
    "plan a mix": ["plan", "{}.toml"],
    "trace": ["trace", "{}", *SIZES, "--step", "1"],
    "bench": ["bench", "{}", *SIZES],
    "bench a mix": ["bench", "{}.toml"],
    "import": ["import", "{}", "--tokenizer", "t", "--out", "out"],
    "copy": ["copy", "{}", "--out", "out"],
    "export": ["export", "{}", "--format", "mds", "--out", "out"],
    "convert-tokenizer": ["convert-tokenizer", "{}", "--out", "out"],
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
def test_a_path_that_does_not_exist_is_wrong_usage_for_every_command(shell, corpus, monkeypatch, command):
    monkeypatch.chdir(corpus.parent)
    exit_code, out, err = shell(*(word.format("nowhere") for word in COMMANDS_ON[command]))
    assert (exit_code, out) == (2, "")
    assert "nowhere" in err.splitlines()[0]
    assert err.splitlines()[1].startswith("hint: ")


@pytest.mark.parametrize("command", COMMANDS_ON)
@pytest.mark.parametrize("name", ["a" * 300, "loop"])
def test_a_path_that_no_file_system_can_open_is_named_and_not_called_a_bug(shell, corpus, monkeypatch, command, name):
    monkeypatch.chdir(corpus.parent)
    os.symlink("loop", "loop")
    exit_code, out, err = shell(*(word.format(name) for word in COMMANDS_ON[command]))
    assert (exit_code in {1, 2}, out) == (True, "")
    assert name in err.splitlines()[0]
    assert "internal" not in err


@pytest.mark.parametrize("command", sorted(COMMANDS_ON))
def test_an_empty_location_is_not_the_working_directory(shell, corpus, monkeypatch, command):
    """As from a variable of the shell that is not set."""
    monkeypatch.chdir(corpus)
    exit_code, out, err = shell(*(word.format("") for word in COMMANDS_ON[command]))
    assert (exit_code, out) == (2, "")
    assert err.splitlines()[1].startswith("hint: ")


@pytest.mark.parametrize("command", ["inspect", "inspect --grep", "verify", "status"])
def test_a_file_in_place_of_a_corpus_is_wrong_usage(shell, tmp_path, command):
    (tmp_path / "file").touch()
    exit_code, _, err = shell(*(word.format(tmp_path / "file") for word in COMMANDS_ON[command]))
    assert (exit_code, err.splitlines()[0]) == (2, f"error: {tmp_path / 'file'} is a file")


@pytest.mark.parametrize("command", ["plan", "trace", "bench"])
def test_a_mix_of_a_corpus_that_does_not_exist_is_wrong_usage(shell, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mix.toml").write_text('corpora = { code = "nowhere" }\n')
    exit_code, _, err = shell(*(word.format("mix.toml") for word in COMMANDS_ON[command]))
    assert (exit_code, err.splitlines()[0]) == (2, f"error: {tmp_path}/nowhere does not exist")


@pytest.mark.parametrize("command", ["inspect", "diff", "inspect --grep", "verify", "plan", "trace", "bench"])
def test_a_corpus_that_is_damaged_ends_every_command_with_1(shell, corpus, monkeypatch, command):
    monkeypatch.chdir(corpus.parent)
    (corpus / "shards.arrow").write_bytes(b"")
    assert shell(*(word.format("corpus") for word in COMMANDS_ON[command]))[0] == 1


@pytest.mark.slow
@some("closed", ["<&- >&- 2>&-", "2> /dev/full", "<&-", ">&-", "2>&-"])
def test_a_build_with_closed_streams_does_its_work_and_ends_with_0(tmp_path, closed):
    command = f"{sys.executable} -m tokshard build {tmp_path}/a.jsonl --tokenizer {ROOT}/recipes/tokenizer"
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    done = subprocess.run(
        f"{command} --out {tmp_path}/out -v --workers 2 {closed}",
        cwd=ROOT,
        shell=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert b"internal" not in done.stderr + done.stdout
    assert run(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_an_error_after_the_work_is_done(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    recipe = f'[corpora.a]\nsources = "a.jsonl"\ntokenizer = "{ROOT}/recipes/tokenizer"\nout = "out"\n'
    (tmp_path / "r.toml").write_text(recipe)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "build", str(tmp_path / "r.toml"), "--quiet"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr.splitlines() == [
        "error: standard output cannot be written: No space left on device",
        "hint: make room, or send the output to another place",
    ]
    assert done.returncode == 1
    assert run(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(corpus):
    process = subprocess.Popen(
        [*COMMAND, "inspect", *[str(corpus)] * 20, "--sample", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=100) == 1
    process.stderr.close()


@pytest.mark.slow
def test_an_error_that_nobody_reads_as_json_is_still_two_lines_and_its_exit_code():
    process = subprocess.Popen(
        [*COMMAND, "inspect", "nowhere", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read().splitlines() == [
        "error: nowhere does not exist",
        "hint: give the directory that 'tokshard build --out' wrote",
    ]
    assert process.wait(timeout=100) == 2
    process.stderr.close()


def test_a_broken_pipe_inside_the_run_is_not_taken_for_a_reader_that_left(shell, failing):
    failing(BrokenPipeError("a worker is gone"))
    exit_code, _, err = shell("verify")
    assert exit_code == 1
    assert err.startswith("error: internal: BrokenPipeError: a worker is gone\n")


@pytest.mark.slow
def test_output_fits_a_terminal_without_utf8(tmp_path):
    source = Source(documents=documents_of([3, 4, 600]), path="größe-数.jsonl", left_out={"empty": 1})
    corpus = write_corpus(tmp_path / "corpus", sources=[source], tokenizer=TINY_TOKENIZER)
    done = subprocess.run(
        [*COMMAND, "inspect", str(corpus), "--sample", "0"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert b"512-1,023          1   33.3%  ####" in done.stdout
    assert "größe-\\u6570.jsonl: 1 of 4 left out".encode("latin-1") in done.stdout


def test_verify_says_ok_and_how_much_it_checked(shell, corpus):
    exit_code, out, err = shell("verify", corpus, corpus)
    assert (exit_code, err) == (0, "")
    assert len(out.splitlines()) == 2
    assert out.startswith(f"ok: {corpus}: 3 documents, 607 tokens, 2 shards, ")


def test_verify_shows_a_bar_on_a_terminal_and_leaves_nothing_of_it(corpus):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    done = subprocess.run(
        [*COMMAND, "verify", str(corpus)], cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, check=True
    )
    shown = os.read(ours, 1 << 16).decode()  # while the other end is open: what it holds goes with it
    os.close(theirs)
    os.close(ours)
    assert done.stdout.startswith(b"ok: ")
    assert f"verify {corpus}: " in shown
    assert shown.rstrip("\r").rpartition("\r")[2].strip() == ""


def test_verify_lists_what_is_damaged_and_exits_with_1(shell, corpus, tmp_path):
    whole = write_corpus(tmp_path / "whole", documents_of([2]), tokenizer=TINY_TOKENIZER)
    with (corpus / "sources.arrow").open("ab") as file:
        file.write(b"more")
    (corpus / "foreign").touch()
    exit_code, out, err = shell("verify", corpus, whole)
    size = (corpus / "sources.arrow").stat().st_size
    assert exit_code == 1
    assert out.splitlines()[:3] == [
        f"damaged: {corpus}: 2 problems",
        f"  sources.arrow has {size} bytes, expected {size - 4}",
        "  foreign is not part of this corpus",
    ]
    assert out.splitlines()[3].startswith(f"ok: {whole}: ")
    assert err.startswith("error: 1 of 2 corpora is damaged\nhint: ")


def test_verify_prints_one_json_object_per_corpus(shell, corpus, tmp_path):
    whole = write_corpus(tmp_path / "whole", documents_of([2]), tokenizer=TINY_TOKENIZER)
    (corpus / "foreign").touch()
    exit_code, out, _ = shell("verify", "--json", corpus, whole)
    first, second = map(json.loads, out.splitlines())
    assert exit_code == 1
    assert (first["ok"], second["ok"]) == (False, True)
    assert first["problems"] == [{"file": "foreign", "message": "is not part of this corpus"}]
    assert second["num_documents"] == 1


@pytest.fixture
def folder(tmp_path):
    """Two corpora with a validation split, and one without."""
    for number, name in enumerate(["code/train", "code/validation", "docs/train", "docs/validation", "prose"]):
        place = tmp_path / "shards" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        write_corpus(place, documents_of([2 + number]), tokenizer=TINY_TOKENIZER)
    (tmp_path / "shards/notes.txt").touch()
    return tmp_path / "shards"


def test_verify_takes_both_parts_of_a_split_and_all_corpora_of_a_folder(shell, folder):
    code = [f"ok: {folder}/code/train", f"ok: {folder}/code/validation"]
    docs = [f"ok: {folder}/docs/train", f"ok: {folder}/docs/validation"]
    for given, expected in (("code", code), (".", [*code, *docs, f"ok: {folder}/prose"])):
        exit_code, out, err = shell("verify", folder / given)
        assert (exit_code, err) == (0, "")
        assert [": ".join(line.split(": ")[:2]) for line in out.splitlines()] == expected
    exit_code, _, err = shell("verify", folder / "absent")
    assert (exit_code, "absent does not exist" in err) == (2, True)


def test_inspect_names_several_corpora_by_what_tells_them_apart(shell, folder):
    exit_code, out, _ = shell("inspect", folder, "--sample", "0")
    assert exit_code == 0
    heads = [word for line in out.splitlines() if line.startswith("corpus  ") for word in line.split()[1:]]
    expected = ["code/train", "code/validation", "docs/train", "docs/validation", "prose"]
    assert [head for head in heads if not head.startswith("/")] == expected
    _, out, _ = shell("inspect", folder / "code", "--sample", "0")
    assert out.split()[:3] == ["corpus", "code/train", "code/validation"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a/code/train", "a/docs/train"], ["code/train", "docs/train"]),
        (["a/code/train"], ["code/train"]),
        (["x/a/code", "y/a/code", "y/b"], ["x/a/code", "y/a/code", "b"]),
        (["s3://b/code", "code"], ["b/code", "code"]),
        (["a/code", "a/code"], ["code", "code"]),
        (["train"], ["train"]),
    ],
)
def test_the_shortest_name_that_no_other_corpus_has(given, expected):
    assert short_names(given) == expected


def test_inspect_shows_summary_histogram_and_samples(shell, corpus):
    exit_code, out, err = shell("inspect", corpus, "--sample", "1", "--plain")
    assert (exit_code, err) == (0, "")
    assert f"corpus      {corpus}\n" in out
    assert "512-1,023          1   33.3%  " in out
    assert "document 1: 4 tokens, record 2 of source-0.jsonl\n" in out
    assert out.endswith("<eos>\n")


def test_inspect_shows_one_whole_document(shell, corpus):
    exit_code, out, _ = shell("inspect", corpus, "--document", 2)
    assert exit_code == 0
    assert out.startswith("document 2: 600 tokens, record 3 of source-0.jsonl\n")
    assert out.count(" ") > 600
    exit_code, _, err = shell("inspect", corpus, "--document", 3)
    assert exit_code == 2
    assert "has no document '3': it has 3, counted from 0" in err


def test_inspect_prints_one_json_object_per_corpus(shell, corpus):
    _, out, _ = shell("inspect", corpus, corpus, "--json", "--sample", "2")
    first, second = map(json.loads, out.splitlines())
    assert first == second
    assert [sample["document"] for sample in first["samples"]] == [0, 2]
    _, out, _ = shell("inspect", corpus, "--json", "--document", "0")
    assert json.loads(out)["num_tokens"] == 3


def test_inspect_shows_documents_token_by_token_if_they_are_asked_for(shell, corpus):
    assert "two│ <eos>│\n" in shell("inspect", corpus, "--document", 1)[1]
    assert "│" not in shell("inspect", corpus, "--document", 1, "--plain")[1]
    assert "│" not in shell("inspect", corpus)[1].partition("\ndocument ")[2]
    _, out, _ = shell("inspect", corpus, "--json", "--document", 1)
    assert json.loads(out)["pieces"][-1] == {"ids": [0], "text": " <eos>"}


def test_inspect_shows_lengths_tokens_and_shards(shell, corpus):
    _, out, _ = shell("inspect", corpus, "--sample", "0")
    assert "lengths     at most, in tokens: 1 % 3, 5 % 3, 25 % 3, 50 % 4, 75 %" in out
    assert "vocabulary  4 of 4 ids in use (100.0%), " in out
    assert "shard-00-0000000-000000-0001.arrow          1     600" in out
    report = json.loads(shell("inspect", corpus, "--json", "--sample", "0")[1])
    assert report["tokens_per_document"]["percentiles"]["50"] == 4
    assert report["token_statistics"]["is_full"]


def test_inspect_shows_the_ends_of_a_long_table_of_shards_unless_all_are_asked_for(shell, tmp_path):
    corpus = write_corpus(tmp_path / "c", documents_of([4] * 20), tokenizer=TINY_TOKENIZER, shard_tokens=4)
    _, out, _ = shell("inspect", corpus, "--sample", "0")
    assert "... 12 more; --shards shows all" in out
    assert (out.count("shard-00-"), "-0019.arrow" in out) == (8, True)
    assert shell("inspect", corpus, "--sample", "0", "--shards")[1].count("shard-00-") == 20
    assert shell("inspect", corpus, corpus, "--sample", "0", "--shards")[1].count("shard-00-") == 40
    listed = json.loads(shell("inspect", corpus, "--sample", "0", "--shards", "--json")[1])["shard_list"]
    assert (len(listed), listed[0]["tokens"], listed[19]["name"][-10:]) == (20, 4, "0019.arrow")


def test_inspect_shows_several_corpora_side_by_side(shell, corpus, tmp_path):
    other = write_corpus(tmp_path / "other", documents_of([7] * 5), tokenizer=TINY_TOKENIZER)
    _, out, _ = shell("inspect", corpus, other, "--sample", "0")
    lines = out.splitlines()
    assert lines[0].split() == ["corpus", "corpus", "other"]
    assert lines[1].split() == ["documents", "3", "5"]
    assert max(map(len, lines[: lines.index("")])) <= 80


def test_inspect_finds_documents(shell, corpus):
    exit_code, out, err = shell("inspect", corpus, "--grep", "two two two$", "--regex")
    assert (exit_code, err) == (0, "")
    assert out == "document 1: record 2 of source-0.jsonl\n    »two two two«\n"
    assert shell("inspect", corpus, "--grep", "no such text")[:2] == (0, "")
    _, out, _ = shell("inspect", corpus, corpus, "--grep", "t..", "--regex", "--limit", "4", "--json")
    assert [json.loads(line)["document"] for line in out.splitlines()] == [1, 2, 1, 2]


def test_diff_exits_with_0_for_equal_corpora_and_1_for_others(shell, corpus, tmp_path):
    other = write_corpus(tmp_path / "other", documents_of([7] * 5), tokenizer=TINY_TOKENIZER)
    exit_code, out, _ = shell("diff", corpus, other)
    assert (exit_code, out.splitlines()[0]) == (1, "different: the documents differ")
    exit_code, out, _ = shell("diff", corpus, corpus, "--json")
    assert (exit_code, json.loads(out)["equal"]) == (0, True)
    exit_code, out, _ = shell("diff", corpus, other, "--json")
    assert (exit_code, json.loads(out)["fields"]["num_documents"]) == (1, [3, 5])


def test_diff_exits_with_0_for_equal_mixes_and_1_for_others(shell, corpus, tmp_path):
    mix = f'corpora = {{ a = "{corpus}" }}\nseq_len = 8\nglobal_batch_size = 2\nseed = '
    (tmp_path / "a.toml").write_text(f"{mix}1")
    (tmp_path / "b.toml").write_text(f"{mix}2")
    assert shell("diff", tmp_path / "a.toml", tmp_path / "a.toml")[0] == 0
    exit_code, out, _ = shell("diff", tmp_path / "a.toml", tmp_path / "b.toml")
    assert exit_code == 1
    assert out.startswith("different: other orders")
    assert f"seed\n  {tmp_path}/a.toml  1\n  {tmp_path}/b.toml  2\n" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["corpus"], "missing argument 'B'"),
        (["corpus", "mix.toml"], "mix.toml is read as a mix, because it is a file, but corpus is not a mix"),
        (["mix.toml", "mix.toml", "--hash"], "--hash is for corpora"),
        (["split", "corpus"], "split holds train, validation, and corpus holds one corpus"),
    ],
)
def test_diff_of_what_cannot_be_compared_is_wrong_usage(shell, corpus, monkeypatch, arguments, problem):
    monkeypatch.chdir(corpus.parent)
    (corpus.parent / "mix.toml").touch()
    for split in ("train", "validation"):
        write_corpus(corpus.parent / "split" / split, documents_of([3]), tokenizer=TINY_TOKENIZER)
    exit_code, out, err = shell("diff", *arguments)
    assert (exit_code, out) == (2, "")
    assert problem in err.splitlines()[0]


def test_diff_compares_both_parts_of_two_splits(shell, tmp_path):
    for place, length in (("a/train", 4), ("a/validation", 3), ("b/train", 4), ("b/validation", 5)):
        write_corpus(tmp_path / place, documents_of([length]), tokenizer=TINY_TOKENIZER)
    exit_code, out, _ = shell("diff", tmp_path / "a", f"{tmp_path}/./b//")
    assert exit_code == 1
    assert [line for line in out.splitlines() if line.startswith(("a/", "equal", "different"))] == [
        "a/train",
        "equal: the same tokens by their manifests, built in the same way; the bytes were not read, --hash reads them",
        "a/validation",
        "different: the documents differ",
    ]
    exit_code, out, _ = shell("diff", tmp_path / "a", tmp_path / "b", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["second"], line["equal"]) for line in lines] == [
        (f"{tmp_path}/b/train", True),
        (f"{tmp_path}/b/validation", False),
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--grep", "a", "--document", "1"], "--document and --grep exclude each other"),
        (["--limit", "1"], "--limit is for --grep"),
        (["--document", "1", "-i"], "--ignore-case is for --grep"),
        (["--document", "1", "--shards"], "--shards does nothing with --document"),
        (["--grep", "a", "--full"], "--full does nothing with --grep"),
        (["--grep", "a", "--sample", "0"], "--sample does nothing with --grep"),
        (["--grep", "a", "--plain"], "--plain does nothing with --grep"),
    ],
)
def test_options_of_inspect_that_would_do_nothing_are_refused(shell, corpus, arguments, problem):
    exit_code, _, err = shell("inspect", corpus, *arguments)
    assert (exit_code, err.splitlines()[0]) == (2, f"error: {problem}")


def test_inspect_of_a_mix_names_what_it_can_show_of_one(shell, tmp_path):
    (tmp_path / "mix.toml").write_text("")
    exit_code, _, err = shell("inspect", tmp_path / "mix.toml")
    assert exit_code == 2
    assert "use tokshard plan, report or diff" in err


def test_verify_can_skip_the_content(shell, corpus):
    shard = corpus / "shard-00-0000000-000000-0001.arrow"
    content = bytearray(shard.read_bytes())
    content[-1000] ^= 1
    shard.write_bytes(content)
    exit_code, out, _ = shell("verify", corpus, "--quick")
    assert exit_code == 0
    assert out.startswith(f"structure ok: {corpus}: 3 documents")
    assert shell("verify", corpus, "--workers", "2")[0] == 1


def test_a_missing_option_with_choices_is_said_in_one_line(tmp_path, capsys):
    assert run(["export", str(tmp_path), "--out", "x"]) == 2
    problem = capsys.readouterr().err.splitlines()[0]
    assert (
        problem
        == "error: missing option '--format'. Choose from: megatron, mds, litdata, fms, hf, olmo, datatrove, bridge"
    )


def build_with_ids(tmp_path, *options):
    (tmp_path / "a.jsonl").write_text('{"text": "One main", "name": "x"}\n{"text": "two MAIN", "name": "7"}\n')
    words = ["build", tmp_path / "a.jsonl", "--out", tmp_path / "ids", "--tokenizer", TOKENIZER.parent, "--quiet"]
    assert run([str(word) for word in [*words, "--id-field", "name", "--workers", "1", *options]]) == 0
    return tmp_path / "ids"


def test_inspect_shows_a_document_by_its_id(shell, tmp_path):
    place = build_with_ids(tmp_path)
    shell("status", place)
    _, out, _ = shell("inspect", place, "--document", "7", "--plain")
    assert out.startswith("document 1: ")
    assert "two MAIN" in out
    assert shell("inspect", place, "--document", "#1", "--plain")[1] == out
    assert shell("inspect", place, "--document", "1", "--plain")[1] == out  # no id is "1"
    exit_code, _, err = shell("inspect", place, "--document", "y")
    assert (exit_code, "has no document with id 'y'" in err) == (2, True)
    assert "--document '#0' is its first document" in err


def test_inspect_shows_the_document_of_the_corpora_that_have_the_id(shell, corpus, tmp_path):
    place = build_with_ids(tmp_path)
    shell("status", place)
    exit_code, out, err = shell("inspect", corpus, place, "--document", "x", "--plain")
    assert (exit_code, out.startswith(f"{place}: document 0: ")) == (0, True)
    assert err == f"note: {corpus} has no document 'x': it has 3, counted from 0\n"
    assert shell("inspect", corpus, place, "--document", "y")[0] == 2
    _, out, _ = shell("inspect", corpus, place, "--document", "#0", "--json")
    assert [json.loads(line)["corpus"] for line in out.splitlines()] == [str(corpus), str(place)]


def test_a_search_shows_ids_and_ignores_case_on_request(shell, tmp_path):
    place = build_with_ids(tmp_path)
    shell("status", place)
    _, out, _ = shell("inspect", place, "--grep", "main")
    assert [line for line in out.splitlines() if line.startswith("document")] == ["document 0 (x): record 1 of a.jsonl"]
    _, out, _ = shell("inspect", place, "--grep", "main", "-i", "--json")
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["x", "7"]
