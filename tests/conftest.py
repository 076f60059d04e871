"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.contract import small
from tests.contract.faults import Launcher
from tests.store.memory import SCHEME, MemoryStore
from tokshard.store import STORES_BY_SCHEME

# Tests run side by side. Threads of torch and numpy spin while they wait for one that has no core: tests of the trainer
# would cost four times as much CPU. Read when torch is imported, and by processes that tests start.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# The timeout of pytest ends what hangs; a deadline per example only fails on a busy machine. Examples are drawn from
# the seed that `pytest_configure` sets, and never from a database: who has the seed has the run.
settings.register_profile("dev", deadline=None, max_examples=6, database=None, print_blob=False)
settings.register_profile("soak", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-and-last", action="store_true", help="run only the first and the last case of each test")
    parser.addoption("--rounds", type=float, default=0.1, help="how many rounds of trials tests/soak makes")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    """Each day tries other examples; `--hypothesis-seed` repeats those of a day."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = f"{time.gmtime().tm_year}{time.gmtime().tm_yday:03}"


def pytest_report_header(config: pytest.Config) -> str:
    return f"examples of properties: --hypothesis-seed={config.option.hypothesis_seed}"


@pytest.hookimpl(trylast=True)  # of those that markers leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An old version of a package mostly fails in every case of a test: two of them will do."""
    if config.getoption("first_and_last"):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = {item for each in cases.values() for item in (each[0], each[-1])}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: if the garbage collector passes over them, tests take 8 % less time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("forks") / "runs", has_torch=True) as launcher:
        yield launcher


@pytest.fixture
def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty location in a store of this process."""
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    return f"{SCHEME}:/{tmp_path}"


@pytest.fixture(scope="session", autouse=True)
def _workers_start_in_a_moment() -> None:
    """Whoever asks for a worker process first decides what its server has imported: the builds, which import most."""
    small.start_the_server_of_workers()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """What a shell without job control starts in the background ignores Ctrl-C, and so would all that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _files_reach_the_disk_when_they_like() -> Iterator[None]:
    """Builds in this process are not synced: half of their time would be waiting. Those that are killed are others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
