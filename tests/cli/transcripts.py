"""Transcripts of a shell: commands of tokshard, and all that they print.

A transcript is a file of `transcripts/`. It starts in a directory of its own with the corpora of `write_corpora`:

    # A remark.
    $ tokshard verify corpus
    what it prints on the standard output
    ! what it prints on the standard error
    [1]

The last line is the exit code, unless that is 0. Lines with ``>`` below a command are its standard input. ``DIR`` is
the directory, ``*`` stands for what differs from run to run, a line ``...`` for any lines. ``tokshard`` runs in this
process on 100 columns, unless the line begins with ``COLUMNS=60``; a shell runs other commands.

``python -m tests.cli.transcripts`` writes what is printed now where it is not what is expected: read the difference.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.corpora import TINY_TOKENIZER, TOKENIZER, documents_of, write_corpus
from tests.pipeline.inputs import write_byte_tokenizer
from tests.refusals import Refusal, Said, tokshard
from tokshard.cli.main import run

FOLDER = Path(__file__).with_suffix("")
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))

_VARIES = {
    r"(?m)^time {8}.* with (\d+ process(?:es)?).*$": r"time        * with \1*",
    r"(?m)^time {8}.* s$": r"time        * s",
    r"(?m)^(wrote .*, |  seconds: )[\d.].*": r"\1*",
    r"[\d.]+ .B free": "* free",
    r" at [\d.]+ .?B/s": " at *",
    r"'jinja2': '[^']+'": "'jinja2': '*'",
    r'(seconds|peak_worker_bytes|free_bytes)": [\d.e-]+': r'\1": *',
    r'(tokenizers"?[: ]+"?)\d[^ ,"\n]+': r"\1*",
}
"""What a transcript is written without: times, and what else depends on the machine."""


def write_corpora(directory: Path) -> None:
    """What is there when a transcript starts."""
    for name, lengths in {
        "corpus": [3, 4, 600],
        "other": [7] * 5,
        "long": [4] * 20,
        "old/train": [4],
        "old/validation": [3],
        "new/train": [4],
        "new/validation": [5],
        "code": [2_000] * 40,
        "prose": [20, 7] * 400,
    }.items():
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shard_tokens = {"corpus": 100, "long": 4}.get(name, 1 << 20)
        write_corpus(place, documents_of(lengths), tokenizer=TINY_TOKENIZER, shard_tokens=shard_tokens)
    write_byte_tokenizer(directory / "bytes")
    shutil.copytree(TOKENIZER.parent, directory / "tokenizer")


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """An empty directory, whose path has as many characters each time: lines are broken at the same words."""
    with tempfile.TemporaryDirectory(prefix="tokshard-", dir="/tmp") as directory:
        yield Path(directory)


@dataclass(frozen=True)
class Command:
    """A command of a transcript.

    Args:
        remarks: what stands before it.
        line: as a shell reads it.
        given: its standard input, with the marks of a transcript.
        expected: what it prints.
    """

    remarks: str
    line: str
    given: str
    expected: str

    def printed(self, directory: Path, *, columns: int = 100) -> str:
        """Run it in a directory: what it prints, as a transcript shows it."""
        words = shlex.split(self.line)
        variables = dict(word.split("=", 1) for word in words if re.match("[A-Z]+=", word))
        words = words[len(variables) :]
        variables = {"COLUMNS": f"{columns}", "PATH": _PATH, "PYTHONPATH": str(FOLDER.parents[2]), **variables}
        with contextlib.chdir(directory), mock.patch.dict(os.environ, variables):
            code, *texts = shell(*words[1:]) if words[0] == "tokshard" else self._ran_by_a_shell()
        out, errors = (text.splitlines() for text in texts)
        lines = [*out, *(f"! {line}" for line in errors), *([f"[{code}]"] if code else [])]
        return "\n".join(line.rstrip() for line in lines).strip("\n").replace(str(directory), "DIR")

    def _ran_by_a_shell(self) -> tuple[int, str, str]:
        given = re.sub("(?m)^> ?", "", self.given)
        done = subprocess.run(self.line, shell=True, input=given, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr


def shell(*words: object) -> tuple[int, str, str]:
    """Run a command line in this process: its exit code, and what it prints on both outputs."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run([str(word) for word in words])
    return code, out.buffer.getvalue().decode(), errors.buffer.getvalue().decode()


def json_of(*words: object) -> list[Any]:
    """The lines that a command prints as JSON, and nothing else, when it ends well."""
    code, out, errors = shell(*words, "--json")
    assert (code, errors) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def commands(transcript: str) -> Iterator[Command]:
    """All commands of a transcript."""
    remarks, *blocks = re.split(r"(?m)^\$ ", transcript)
    for block in blocks:
        found = re.fullmatch(r"(.*)\n((?:>.*\n)*)((?:.*\n)*?)((?:# .*\n|\n)*)", block)
        assert found, block
        line, given, expected, after = found.groups()
        yield Command(remarks, line, given, expected.rstrip("\n"))
        remarks = after


def is_as_expected(shown: str, expected: str) -> bool:
    """Whether what was printed fits what is expected."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else ".*".join(map(re.escape, line.split("*"))) + r"\n"
        for line in expected.split("\n")
    )
    return re.fullmatch(pattern, f"{shown}\n") is not None


def refusals(transcript: str) -> list[Refusal]:
    """What the commands of a transcript that have a name refuse."""
    found = commands(transcript)
    return [
        _refusal(each)
        for each in found
        if each.line.startswith("tokshard ") and each.expected.endswith("]") and each.remarks.strip()
    ]


def _refusal(command: Command) -> Refusal:
    *lines, code = command.expected.removesuffix("]").split("\n")
    said = Said(int(code.lstrip("[")), "\n".join(line.removeprefix("! ") for line in lines))

    def call(_: Path) -> Said:
        return tokshard(*shlex.split(command.line)[1:])

    return Refusal(command.remarks.strip("\n# "), call, said.exit_code, said.problem, said.hint)


def renewed(
    transcript: str,
    write: Callable[[Path], None] = write_corpora,
    readable: Callable[[str], str] = str,
    *,
    columns: int = 100,
) -> str:
    """A transcript with what is printed now.

    Args:
        transcript: with what is expected.
        write: what is there when it starts.
        readable: what is shown of what is printed.
    """
    text = ""
    with workplace() as directory:
        write(directory)
        for command in commands(transcript):
            shown = readable(command.printed(directory, columns=columns))
            if not is_as_expected(shown, command.expected):
                shown = functools.reduce(lambda text, one: re.sub(*one, text), _VARIES.items(), shown)
            else:
                shown = command.expected
            text += f"{command.remarks}$ {command.line}\n{command.given}{shown}" + ("\n" if shown else "")
    return text


if __name__ == "__main__":
    for path in TRANSCRIPTS:
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
