"""The frame of the comparison with peers, with programs that need no peer."""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmark.peers import building, environments, faults, frame, growth, loading, newest, report, store
from tests.benchmark.peers.__main__ import main
from tests.benchmark.peers.environments import MissingError
from tests.benchmark.peers.frame import Case, Frame, Row, Section
from tests.benchmark.processes import ROOT

PROGRAM = """
import os, sys, time
from tests.benchmark.peers.programs.common import CannotError, main

def build(settings):
    raise CannotError("It has no way to do this.")

def crash(settings):
    raise ValueError("no luck")

def burn(settings):
    if os.fork() == 0:  # a process that nobody waits for counts too
        while time.process_time() < 0.2:
            pass
        os._exit(0)
    return {"tokens": settings["tokens"]}

def sleep(settings):
    time.sleep(60)

def count(settings):
    return {"files": len(os.listdir(settings["out"]))}

main({"build": build, "crash": crash, "burn": burn, "sleep": sleep, "count": count}, [])
"""


class Here:
    """tokshard and a program that can't do anything; no other peer is installed."""

    def python(self, peer: str) -> str:
        if peer in {"tokshard", "fake"}:
            return sys.executable
        raise MissingError("It is not installed.")

    def newer_tokenizers(self) -> str:
        raise MissingError("It is not installed.")


class Everywhere(Here):
    """Each peer is installed, in this environment."""

    def python(self, peer: str) -> str:
        return sys.executable


@pytest.fixture
def here() -> Iterator[Frame]:
    with tempfile.TemporaryDirectory(prefix="peers-") as work:  # workers listen on sockets below it: a short path
        yield Frame(quick=True, work=Path(work), repeats=2, environments=Here(), megabytes=0.05)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes" / "fake.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(frame, "PROGRAMS", "fakes")


@pytest.mark.usefixtures("fakes")
def test_a_call_measures_a_program_with_the_processes_that_it_left_behind(here):
    found = here.call("fake", "burn", {"tokens": 7})
    assert found["tokens"] == 7
    assert found["exit_code"] == 0
    assert 0.2 < found["cpu_seconds"] < 2
    assert found["peak_bytes"] > 5e6


@pytest.mark.usefixtures("fakes")
def test_what_a_program_cannot_do_how_it_fails_and_that_it_takes_too_long_are_its_row(here):
    cases = [Case(label=name, peer="fake", case=name) for name in ("build", "crash", "unknown")]
    rows = here.turns([*cases, Case(label="gone", peer="other", case="build")])
    assert [row.reason for row in rows] == [
        "cannot: It has no way to do this.",
        "failed: ValueError: no luck",
        "cannot: It has no such function.",
        "cannot: It is not installed.",
    ]
    assert all(len(row.runs) == 1 for row in rows)
    assert here.call("fake", "sleep", {}, limit=0.5)["failed"] == "it took more than 0 s"
    assert here.call("fake", "sleep", {}, limit=0.5, killed=True)["killed"] is True


@pytest.mark.usefixtures("fakes")
def test_a_reader_that_fails_at_one_folder_counts_the_others(here, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").touch()
    builder = faults.Builder(frame=here, peer="fake", options=[], place=tmp_path)
    missing, one = builder.count("missing", "one")
    assert missing["failed"].startswith("FileNotFoundError")
    assert one == {"files": 1}


@pytest.mark.soak
def test_building_counts_the_tokens_of_tokshard_and_says_who_is_missing(here):
    section = building.run(here)
    first, second, *others = section.rows
    assert first.median("tokens") == second.median("tokens") > here.text_facts["documents"]
    assert len(first.runs) == 2
    assert "differs" not in first.runs[0]
    assert {row.reason for row in others} == {"cannot: It is not installed."}


@pytest.mark.usefixtures("fakes")
def test_a_peer_that_is_not_asked_for_is_not_run_and_keeps_its_row(here):
    cases = [Case(label=name, peer="fake", case="burn", settings={"tokens": 7}) for name in ("old", "new")]
    asked, not_asked = (
        Section(title="One", paragraphs=[], columns={"tokens": "tokens"}, rows=rows)
        for rows in (here.turns(cases), replace(here, peers=frozenset(["another"])).turns(cases))
    )
    machine = {"cpu": "a CPU", "cores": 2, "memory_gb": 8, "load": 0.1}
    before, now = (report.described(each, quick=False, seconds=2, here=machine) for each in (asked, not_asked))
    assert not_asked.rows[0].reason == "cannot: It was not asked for."
    before["rows"][0] |= {"month": "May 2020"}
    (kept,) = report.merged([before], [now])
    assert [(row["label"], row["month"], row["tokens"]["median"]) for row in kept["rows"]] == [
        ("old", "May 2020", 7),
        ("new", before["rows"][1]["month"], 7),
    ]
    assert report.merged([now], [before])[0]["rows"] == before["rows"]


@pytest.mark.parametrize("options", [["--quick"], []])
def test_a_quick_run_or_a_part_prints_and_leaves_the_guide(options, tmp_path, capsys, monkeypatch):
    page, out = tmp_path / "page.md", tmp_path / "out"
    part = ["--only", "growth", "--peers", "grain", *options, "--page", str(page), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["peers", *part])
    main()
    assert "| tokshard: 1,000,000 documents" in capsys.readouterr().out
    assert not page.exists()
    assert not out.exists()
    monkeypatch.setattr(sys, "argv", ["peers", *part, "--write"])
    with pytest.raises(SystemExit) if options else nullcontext():
        main()
    assert page.exists() == (not options)


def test_make_installs_what_the_sections_need_and_no_more():
    assert environments.stamps(["chat"]) == [
        ".venv-interop-trl/stamp-test",
        ".venv-peers-bridge/stamp-peer",
        ".venv-trainers/stamp-test",
    ]
    assert ".venv-peers-tokenizers/stamp-peer" in environments.stamps(["building"])
    measured = {
        "building": {*building.BUILDERS, "tokenizers"},
        "faults": {*building.BUILDERS},
        "loading": {program.partition("_")[0] for program in loading.PEERS},
        "store": {program.partition("_")[0] for program in store.PEERS} | {"seaweedfs"},
        "growth": {*growth.NAMES},
    }
    for section, peers in measured.items():
        assert set(environments.SECTIONS[section]) == peers - {"tokshard", "memmap"}


def test_a_pin_that_is_older_than_the_newest_release_is_named_with_both():
    pinned = {package: _pin(package, name) for name, package in newest.PACKAGES.values()}
    asked = []

    def index(package: str, python: str) -> str | None:
        asked.append((package, python))
        return "99.1" if package == "trl" else None if package == "torchtitan" else pinned[package]

    (line,) = newest.problems(["chat"], index)
    assert line.startswith(f"constraints/interop-trl.txt has trl {pinned['trl']}, and 99.1 is the newest: ")
    assert asked == [("trl", "3.11"), ("torchtitan", "3.11"), ("megatron-bridge", "3.12")]


def _pin(package: str, name: str) -> str:
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def test_the_floor_has_the_tokens_of_all_files_in_processes_of_one_thread(here):
    environment = replace(here, environments=Everywhere())
    settings = {"texts": here.texts(), "tokenizer": here.tokenizer}
    one, two = (environment.call("tokenizers", "floor", {**settings, "processes": count}) for count in (1, 2))
    assert one["tokens"] == two["tokens"] > one["documents"] == two["documents"] == here.text_facts["documents"]


def test_results_of_sections_that_ran_at_different_times_are_on_one_page(tmp_path):
    here = {"cpu": "a CPU", "cores": 2, "memory_gb": 8, "load": 0.1}
    runs = [{"speed": value, "said": "a | b", "versions": {"peer": "1.2"}} for value in (1.0, 3.0, 2.0)]
    rows = [Row(label="tokshard", runs=runs), Row(label="other", runs=[{"cannot": "It has no <end>."}])]
    rows.append(Row(label="third", runs=[{"cannot": "It numbers documents in int32, | and so it ends at 2^31."}]))
    columns = {"speed": "MB/s", "said": "said"}
    section = Section(title="One", paragraphs=["How."], columns=columns, rows=rows, notes=["Note."], plot="speed")
    out, page = tmp_path / "out", tmp_path / "page.md"
    described = report.described(section, quick=True, seconds=2, here=here)
    report.save({"one": [described]}, out, page)
    report.save(report.load(out) | {"two": [described | {"title": "Two"}]}, out, page)
    text = page.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## One", "## Two"]
    assert "2 (1 to 3)" in text
    assert "peer 1.2" in text
    assert "cannot: It has no <end>." in text
    assert "cannot, see below" in text
    assert "- **third** (cannot): It numbers documents in int32, / and so it ends at 2^31." in text
    assert "(out/peers-one.svg)" in text
    assert json.loads((out / "peers.json").read_bytes())["sections"]["one"][0]["rows"][0]["speed"] == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
    }
    assert (out / "peers-two.svg").read_text().count("<rect") == 2  # the ground and one bar
