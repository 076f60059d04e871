"""Files that a user names for output: through links, into pipes, and never over what is read."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.inspect.pages import write_mix
from tokshard.cli.main import run
from tokshard.cli.output_file import is_stdout, output_file
from tokshard.errors import UsageError


@pytest.fixture(autouse=True)
def _without_the_library(monkeypatch):
    monkeypatch.setattr("tokshard.inspect.page.page.plotly_source", lambda: "/* the library */")


@pytest.fixture
def mix(tmp_path):
    return write_mix(tmp_path)


@pytest.fixture
def write(mix):
    """Writes a page about the mix: exit code."""
    return lambda path: run(["report", str(mix), "--out", str(path)])


def snapshot(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and not path.is_symlink()}


def test_an_output_over_a_link_replaces_what_it_points_to(write, tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "other").symlink_to("real")
    assert write(tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "other").is_symlink()
    assert (tmp_path / "real").stat().st_size > 100


def test_an_output_over_a_link_that_leads_nowhere_makes_its_target(write, tmp_path):
    (tmp_path / "link").symlink_to("real")
    assert write(tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
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


def test_an_output_keeps_the_permissions_of_the_file_it_replaces(write, tmp_path):
    (tmp_path / "page").touch(mode=0o600)
    assert write(tmp_path / "page") == 0
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o600


def test_an_output_never_overwrites_an_input(write, mix, tmp_path, capsys):
    (tmp_path / "link").symlink_to("mix.toml")
    os.link(mix, tmp_path / "hard")
    shard = next((tmp_path / "a").glob("shard-*"))
    (tmp_path / "to-a").symlink_to("a")
    os.link(shard, tmp_path / "hard-shard")
    before = snapshot(tmp_path)
    for output in (
        mix,
        tmp_path / "." / "a" / ".." / "mix.toml",
        tmp_path / "link",
        tmp_path / "hard",
        tmp_path / "a" / "manifest.json",
        tmp_path / "to-a" / "new",
        tmp_path / "hard-shard",
    ):
        assert write(output) == 2, output
        assert "which this command reads" in capsys.readouterr().err
        assert snapshot(tmp_path) == before, output


def test_a_page_of_a_corpus_is_not_written_into_it(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus", documents_of([4]), tokenizer=TINY_TOKENIZER)
    before = snapshot(tmp_path)
    assert run(["report", str(corpus), "--out", str(corpus / "page.html")]) == 2
    assert f"--out {corpus / 'page.html'} belongs to {corpus}" in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_a_file_that_a_corpus_links_to_is_an_input(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", documents_of([4]), tokenizer=TINY_TOKENIZER)
    (corpus / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (corpus / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with (
        pytest.raises(UsageError, match="belongs to"),
        output_file(str(tmp_path / "elsewhere.json"), option="--out", inputs=[str(corpus)]),
    ):
        pass
    assert (tmp_path / "elsewhere.json").read_bytes() == TINY_TOKENIZER


@pytest.mark.parametrize("output", ["", "no/page", "mix.toml/page", "loop", "a"])
def test_an_output_that_cannot_be_written_is_a_one_line_error(write, tmp_path, output, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a" / "manifest.json").touch()
    assert write(output) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("error: ")
    assert "internal" not in error[0]
    assert (tmp_path / "loop").is_symlink()


def test_an_output_that_fails_keeps_the_old_file(tmp_path):
    page = tmp_path / "page"
    page.write_text("old")

    def write_half():
        with output_file(str(page), option="--out") as file:
            file.write(b"half")
            raise OSError("of the reader, not of the file")

    with pytest.raises(OSError, match="of the reader"):
        write_half()
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]


def test_the_standard_output_gets_the_page_and_nothing_else(tmp_path, monkeypatch, capfd):
    """A file that a shell redirects to is never replaced, because others may append to it."""
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("ab") as redirected:
        monkeypatch.setattr("tokshard.cli.output_file._STDOUT", redirected.fileno())
        assert is_stdout(str(log))
        corpus = write_corpus(tmp_path / "corpus", documents_of([4]), tokenizer=TINY_TOKENIZER)
        assert run(["report", str(corpus), "--out", str(log)]) == 0
    content = log.read_text(encoding="utf-8")
    assert content.startswith("before\n<!doctype html>")
    assert content.endswith("</html>\n")
    out, err = capfd.readouterr()
    assert (out, err.startswith("wrote ")) == ("", True)


def test_a_name_that_would_steer_the_terminal_is_escaped(write, tmp_path, capsys):
    assert write(tmp_path / "\x1b]0;x\x07") == 0
    assert write(tmp_path / "no" / "\x1b]0;x\x07") == 2
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
