"""Trials: from a number, its seed, and nothing else follows what is tried. Each day has other seeds.

``make soak`` tries many rounds. ``--hypothesis-seed`` repeats the trials of a day, and ``-k 'kills-3'`` picks one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from random import Random

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # passes end

KINDS: dict[str, tuple[str, str, float, int, list[pytest.MarkDecorator]]] = {
    "corpora": ("tests.soak.corpora", "prepare", 100, 120, []),
    "files": ("tests.soak.files", "prepare", 200, 120, []),
    "histories": ("tests.soak.histories", "prepare", 15, 120, []),
    "kills": ("tests.soak.kills", "prepare", 3, 120, []),
    "ray": ("tests.soak.kills", "prepare_ray", 0.3, 300, [pytest.mark.ray]),
    "trainer": ("tests.soak.trainer", "prepare", 0.03, 1_200, []),
}
"""Of each kind: what makes all that its trials need, how many a round has, and after how many seconds one hangs.

A round takes about a minute of a core.
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    first = Random(str(config.option.hypothesis_seed)).randrange(10**9) * 100_000  # a seed may be any word
    metafunc.parametrize(
        "try_, seed",
        [
            pytest.param(kind, first + trial, id=f"{kind}-{trial}", marks=[*marks, pytest.mark.timeout(limit_seconds)])
            for kind, (*_, number, limit_seconds, marks) in KINDS.items()
            for trial in range(math.ceil(number * config.option.rounds))
        ],
        indirect=["try_"],
    )


@pytest.fixture(scope="module")
def try_(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], None]]:
    module, name, *_ = KINDS[request.param]
    with ExitStack() as stack:
        yield getattr(import_module(module), name)(tmp_path_factory.mktemp(request.param), stack)


def test_a_trial_holds(try_: Callable[[int], None], seed: int) -> None:
    try_(seed)
