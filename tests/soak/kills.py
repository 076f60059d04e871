"""Trials of builds, imports and copies that something happens to: in the end they have the bytes of one process."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.contract.arrays import run_array
from tests.contract.faults import Fault, Launcher, Outcome
from tests.contract.outcomes import state
from tests.contract.test_promise_01_faults import Workshop, meet_with_anything, write_sources, write_tokenizer
from tests.contract.test_promise_01_product import HERE, ON_RAY, SHARES, Cell, Table, cluster_of_two
from tests.pipeline.inputs import write_byte_tokenizer
from tests.soak.kinds import Try

ENDS = {"kill": {-9}, "orphan": {-9}, "die": {-9, 1}, "error": {1}, "full": {1}, "SIGINT": {130}, "SIGTERM": {143}}
"""With which exit codes a command ends to which something happens, if it does not end well."""
ENDS |= {"clock": set(), "run": {1}}


def prepare(folder: Path, stack: ExitStack) -> Try:
    """The table of the whole product, and a workshop of damaged sources."""
    launcher = stack.enter_context(Launcher(folder / "runs"))
    found = table_of(folder, launcher)
    (folder / "workshop").mkdir()
    sources = write_sources(folder / "workshop" / "sources")
    tokenizer = write_tokenizer(folder / "workshop")
    shop = Workshop(launcher, sources, tokenizer, folder / "workshop" / "out", references={})

    def try_(seed: int) -> str:
        rng = random.Random(f"kills {seed}")
        if rng.random() < 0.25:
            meet_with_anything(shop, rng)
            return "build of damaged sources"
        return attempt(found, rng, rng.choice(HERE))

    return try_


def prepare_ray(folder: Path, stack: ExitStack) -> Try:
    """The same table on a cluster."""
    found = table_of(folder, stack.enter_context(Launcher(folder / "runs")))
    found.ray_address = stack.enter_context(cluster_of_two())

    def try_(seed: int) -> str:
        rng = random.Random(f"ray {seed}")
        return attempt(found, rng, rng.choice(ON_RAY))

    return try_


def table_of(folder: Path, launcher: Launcher) -> Table:
    (folder / "table").mkdir()
    return Table(launcher, folder / "table", write_byte_tokenizer(folder / "tokenizer"))


def attempt(found: Table, rng: random.Random, cell: Cell) -> str:
    """Let things happen to the command of a cell, run it to its end, and compare."""
    reference, steps = found.reference(cell.kind, cell.option)
    found.begin(cell.kind, cell.option)
    command = found.command(cell.kind, cell.option)
    history = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        fault = any_fault(rng, cell, len(steps), changing(rng, cell, command))
        with kept(fault):
            outcome = run(found, cell.executor, command, fault)
        history.append(f"{fault} -> {outcome.exit_code} {outcome.errors}")
        what = f"{cell}\n" + "\n".join(history)
        assert "internal: " not in outcome.errors, what
        if cell.executor.startswith("local"):
            assert outcome.exit_code in {0, *ENDS[fault.act]}, what
    done = run(found, cell.executor, command)
    assert done.exit_code == 0, f"{what}\n{done.errors}"
    assert state(found.out) == reference, what
    return f"{cell.kind}, {cell.executor}"


def any_fault(rng: random.Random, cell: Cell, steps: int, source: str) -> Fault:
    """What happens to a command, and when."""
    has_workers = cell.executor == "local 2"
    acts = ["kill", "kill", "error", "full", "SIGINT", "SIGTERM", "clock", *["orphan", "die"] * has_workers]
    act = rng.choice([*acts, *["run"] * bool(source)])
    return Fault(
        act=act,
        at=rng.randint(1, max(1, int(steps / SHARES[cell.executor]))),
        is_after=rng.random() < 0.5 and act != "error",
        command=f"printf x >> '{source}'" if act == "run" else "",
        jumps=rng.choice([-1e9, -3600.0, 60.0, 86_400.0, 1e9]),
        pauses=rng.choice([0, 0.05, 0.2]) if has_workers else 0.0,
        pause_share=rng.choice([0.05, 0.2]),
        seed=rng.randrange(1 << 30),
        outlives=1.0 if has_workers else 0.0,
    )


def changing(rng: random.Random, cell: Cell, command: Sequence[str]) -> str:
    """A source of a build that changes while it runs."""
    if cell.kind != "build":
        return ""
    return rng.choice([word for word in command if word.endswith((".jsonl", ".bz2"))])


@contextlib.contextmanager
def kept(fault: Fault) -> object:
    """Puts a source back that the fault changes."""
    if fault.act != "run":
        yield
        return
    path = Path(fault.command.split("'")[1])
    copy = path.with_name(f"{path.name}.kept")
    shutil.copy2(path, copy)
    try:
        yield
    finally:
        shutil.copy2(copy, path)
        copy.unlink()


def run(found: Table, executor: str, command: list[str], fault: Fault | None = None) -> Outcome:
    """Run a command, and wait for workers that outlive it."""
    if executor != "array of 3":
        outcome = found._run(executor, command, fault)
        outcome.wait()
        return outcome
    before = 0 if fault is None else fault.seed % 4  # one of three jobs, or the commit
    faults = iter([*[None] * before, fault])
    done: Outcome = run_array(
        [*command, "--workers", "1"],
        found.out,
        lambda commands: [found.run(words, next(faults, None)) for words in commands],
    )
    return done


def prepare_bucket(folder: Path, stack: ExitStack) -> Try:
    """A server that speaks S3, a proxy in front of it, and what a build on this machine makes."""
    from tests.store.faulty_proxy import FaultyProxy
    from tests.store.servers import BUCKET, S3_SERVERS
    from tests.store.test_s3_build import command, content, run, write_texts

    port = stack.enter_context(S3_SERVERS["moto"]())
    proxy = stack.enter_context(FaultyProxy(("127.0.0.1", port)).running())
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "the-secret", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", **keys}
    texts = write_texts(folder / "texts", "note")
    run(*command(texts, str(folder / "local")))
    expected = content(str(folder / "local"))

    def try_(seed: int) -> str:
        rng = random.Random(f"bucket {seed}")
        words = command(texts, f"s3://{BUCKET}/{seed}/out", lease_seconds=4)
        for _ in range(rng.choice([1, 1, 2])):
            last = len(proxy.requests) + rng.randrange(1, 90)
            kill_when(words, lambda last=last: len(proxy.requests) >= last, rng.random() * 0.05)  # type: ignore[misc]
        run(*words)
        assert content(f"s3://{BUCKET}/{seed}/out") == expected
        return "build"

    return try_


def kill_when(words: Sequence[str], is_there: Callable[[], bool], lingers: float) -> None:
    """Kill all processes of a command a moment after something has come."""
    with subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        while not is_there() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(lingers)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
