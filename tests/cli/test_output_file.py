"""Files that a user names for output: through links, into pipes, and never over what is read."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.cli.main import run
from tokshard.cli.output_file import is_stdout, output_file


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small.without_the_library_of_pages(monkeypatch.setattr)
    return write_corpus(tmp_path / "corpus", documents_of([4]), tokenizer=TINY_TOKENIZER)


@pytest.fixture
def write(corpus: Path) -> Callable[[Path], int]:
    """Writes a page about the corpus: exit code."""
    return lambda path: run(["report", str(corpus), "--out", str(path)])


def snapshot(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and not path.is_symlink()}


@pytest.mark.parametrize("is_there", [True, False])
def test_an_output_over_a_link_replaces_or_makes_what_it_points_to(write, tmp_path, is_there):
    if is_there:
        (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "other").symlink_to("real")
    assert write(tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "other").is_symlink()
    assert (tmp_path / "real").stat().st_size > 100


def test_a_pipe_gets_the_output_and_stays_a_pipe(write, tmp_path):
    pipe, expected, found = tmp_path / "pipe", tmp_path / "file", []
    assert write(expected) == 0
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert write(pipe) == 0
    reader.join(60)
    assert found == [expected.read_bytes()]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_output_keeps_the_permissions_of_the_file_it_replaces_whose_readers_go_on_with_the_old_one(write, tmp_path):
    (tmp_path / "page").touch(mode=0o600)
    (tmp_path / "page").write_text("old")
    with (tmp_path / "page").open() as reader:
        assert write(tmp_path / "page") == 0
        assert reader.read() == "old"
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o600


def test_an_output_never_overwrites_an_input(corpus, tmp_path, capsys):
    mix = tmp_path / "mix.toml"
    mix.write_text(f'corpora = {{ a = "{corpus}" }}\nseq_len = 2\nglobal_batch_size = 1\n')
    (tmp_path / "link").symlink_to("mix.toml")
    os.link(mix, tmp_path / "hard")
    os.link(next(corpus.glob("shard-*")), tmp_path / "hard-shard")
    (tmp_path / "to-corpus").symlink_to("corpus")
    (corpus / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (corpus / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    before = snapshot(tmp_path)
    for output in (
        "mix.toml",
        "corpus/../mix.toml",
        "link",
        "hard",
        "corpus/manifest.json",
        "to-corpus/new",
        "hard-shard",
        "elsewhere.json",
    ):
        assert run(["report", str(mix), "--out", str(tmp_path / output)]) == 2, output
        assert "which this command reads" in capsys.readouterr().err
        assert snapshot(tmp_path) == before, output


def test_an_output_is_a_file_of_this_machine(write, capsys):
    assert write("s3://bucket/page") == 2
    assert "--out s3://bucket/page is a URI" in capsys.readouterr().err


def test_a_link_to_itself_is_no_place_for_an_output_and_stays(write, tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert write(tmp_path / "loop") == 2
    assert "loop cannot be written: " in capsys.readouterr().err
    assert (tmp_path / "loop").is_symlink()


def test_a_full_disk_is_no_wrong_usage(write, capsys):
    assert write(Path("/dev/full")) == 1
    assert "/dev/full cannot be written: No space left on device\nhint: make room, or give" in capsys.readouterr().err


def test_an_output_that_fails_keeps_the_old_file(tmp_path):
    page = tmp_path / "page"
    page.write_text("old")

    def write_half() -> None:
        with output_file(str(page), option="--out") as write:
            write(b"half")
            raise OSError("of the reader, not of the file")

    with pytest.raises(OSError, match="of the reader"):
        write_half()
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]


def test_the_standard_output_gets_the_page_and_nothing_else(write, tmp_path, monkeypatch, capfd):
    """A file that a shell redirects to is never replaced, because others may append to it."""
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("ab") as redirected:
        monkeypatch.setattr("tokshard.cli.output_file._STDOUT", redirected.fileno())
        assert is_stdout(str(log))
        assert write(log) == 0
    content = log.read_text(encoding="utf-8")
    assert content.startswith("before\n<!doctype html>")
    assert content.endswith("</html>\n")
    out, err = capfd.readouterr()
    assert (out, err.startswith("wrote ")) == ("", True)
