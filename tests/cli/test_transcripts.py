"""What commands print, to the last character: see `transcripts.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.transcripts import TRANSCRIPTS, commands, is_as_expected, workplace, write_corpora


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpora")
    write_corpora(directory)
    return directory


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda path: path.stem)
def test_commands_print_what_the_transcript_says(transcript: Path, corpora: Path) -> None:
    with workplace() as directory:
        shutil.copytree(corpora, directory, dirs_exist_ok=True)
        for command in commands(transcript.read_text(encoding="utf-8")):
            shown = command.printed(directory)
            if not is_as_expected(shown, command.expected):
                assert shown == command.expected, command.line


@pytest.mark.parametrize(
    ("shown", "expected", "is_right"),
    [
        ("a\nb", "a\nb", True),
        ("a\nb", "a", False),
        ("a\nb", "...", True),
        ("a\nb", "...\nb", True),
        ("a\nb", "b\n...", False),
        ("1.5 s", "* s", True),
        ("1\n5 s", "* s", False),
        ("", "", True),
        ("x", "", False),
    ],
)
def test_a_transcript_is_compared_line_by_line(shown: str, expected: str, is_right: bool) -> None:
    assert is_as_expected(shown, expected) == is_right
