"""Promise 1 on disk: what is durable when, what a disk that fails ends with, and whose directory it is."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.commands import Command, build_words, shards
from tests.contract.faults import Fault
from tests.contract.table import KINDS, TOGETHER, WITH_SHARDS, Table
from tests.refusals import tokshard
from tokshard.format import names

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def command(table: Table) -> Command:
    """A build that has what every stage writes; its directory is empty."""
    found = table.command("build", TOGETHER)
    table.steps(found)
    table.begin(found)
    return found


def alone(command: Command, *more: str) -> list[str]:
    return [*command.words, *more, "--workers", "1"]


# what reaches the disk, and in which order


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_durable_before_it_is_renamed_and_its_name_before_the_next_step(table: Table, kind: str) -> None:
    steps = [step.partition(" ")[::2] for step in table.steps(table.command(kind, TOGETHER))]
    replaced = [(at, *paths.split(" -> ")) for at, (step, paths) in enumerate(steps) if step == "replace"]
    assert len(replaced) > 20
    for at, partial, final in replaced:
        opened = max(before for before, step in enumerate(steps[:at]) if step == ("open", partial))
        assert ("fsync", partial) in steps[opened:at], final
        folder = Path(final).parent
        later = steps[at + 1 :]
        if "=" in folder.name:  # cells are written side by side: the next step of this one
            later = [one for one in later if folder in (Path(one[1]), Path(one[1].split(" -> ")[-1]).parent)]
        assert later[0] == ("fsync", str(folder)), final
    finals = [final for *_, final in replaced]
    assert Path(finals[-1]).name == names.MANIFEST


@pytest.mark.parametrize("kind", WITH_SHARDS)
def test_a_receipt_comes_after_all_that_it_promises(table: Table, kind: str) -> None:
    steps = table.steps(table.command(kind, TOGETHER))
    finals = [Path(step.partition(" -> ")[2]) for step in steps if step.startswith("replace ")]
    promised = 0
    for receipt in (path for path in finals if path.parent.name == "receipts"):
        stage, key = receipt.parents[1], receipt.stem
        files = {stage / "rejects" / f"{key}.jsonl", stage / "files" / f"{key}.bin"}
        if stage.name == "write":
            files |= {path for path in finals if names.is_shard_name(path.name) and f"-{key}-" in path.name}
        times = [at for at, path in enumerate(finals) if path in files]
        receipts = [at for at, path in enumerate(finals) if path == receipt]
        promised += len(times)
        assert max(times, default=-1) < max(receipts), receipt
    assert promised > 10


# a disk that fails


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_of_a_file_is_a_clear_error(byte_tokenizer: Path, tmp_path: Path) -> None:
    """A limit of the process stands for the disk: it lets small files pass, and stops at a whole shard."""
    source, out, limit = tmp_path / "a.txt", tmp_path / "out", 150_000
    source.write_text(("100 characters ".ljust(99, ".") + "\n") * 3_000)
    words = build_words([source], out, byte_tokenizer, "--text-unit", "line", "--shard-tokens", "100K")
    full = subprocess.run(
        [sys.executable, "-m", "tokshard", *words],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert full.returncode == 1
    assert full.stderr.splitlines() == [
        f"error: cannot write to {out}: File too large",
        "hint: make room, or give another --out; the same command continues where this one stopped",
    ]
    assert shards(out) == []
    assert tokshard(*words).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "exit_code"), [("EIO", 1), ("EROFS", 1), ("ESTALE", 1), ("EINVAL", 0), ("ENOTSUP", 0)]
)
def test_a_folder_that_the_disk_cannot_sync_ends_a_build_and_one_that_no_file_system_syncs_does_not(
    table: Table, command: Command, error: str, exit_code: int
) -> None:
    ended = table.run(alone(command), Fault(on="fsync .*/receipts$", act="error", error=error, times=100))
    assert ended.exit_code == exit_code, ended.errors
    assert ("error: cannot write to " in ended.errors) == bool(exit_code)
    table.check(command, error)


# whose directory it is


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_corpus_is_left_alone_and_force_makes_the_same_bytes_again(table: Table, kind: str) -> None:
    command = table.command(kind, "plain")
    table.steps(command)
    table.begin(command)
    table.check(command)
    before = {path: path.stat().st_mtime_ns for path in table.out.rglob("*")}
    again = table.run(alone(command))
    assert "nothing to do" in again.errors
    assert table.run(alone(command, "--max-documents", "10")).exit_code == 2
    table.check(command)
    assert {path: path.stat().st_mtime_ns for path in table.out.rglob("*")} == before
    assert table.run(alone(command, "--force")).exit_code == 0
    table.check(command)
    assert (table.out / names.MANIFEST).stat().st_mtime_ns > before[table.out / names.MANIFEST]


def test_starting_over_removes_the_manifest_before_anything_else(table: Table) -> None:
    command = table.command("build", "plain")
    table.steps(command)
    table.begin(command)
    table.check(command)
    forced = table.run(alone(command, "--force"))
    removed = [step for step in forced.steps if step.startswith("unlink ") and f"/{names.WORK}/" not in step]
    assert removed[0] == f"unlink {table.out / names.MANIFEST}"
    first = next(at for at, step in enumerate(removed) if "/shard-" in step)
    later = [step for step in removed[first:] if "/shard-" not in step]
    assert not {Path(step).name for step in later} & {names.SHARD_TABLE, names.SOURCE_TABLE, names.TOKENIZER}, (
        "shards go last: where there are some, other settings are refused"
    )
    assert len(removed) > 5
