"""A job in the code and in the model of ORDER.md and STATE.md: the same happens to both, so both read the same.

What happens is drawn: by hypothesis in tests, by a seeded generator in soak trials.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.runtime.page_model import Documents, Plan, Run, Used
from tests.runtime.state_model import resumed, saved
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

SIZES = {"block_tokens": 16, "window_blocks": 2}
SIZES_OF_WHOLE = {"block_tokens": 1024, "window_blocks": 1}
WEIGHTS = (0.0, 1e-30, 0.1, 0.25, 1.0, 3.0)
SEQ_LENS, SEQ_LENS_OF_WHOLE = (1, 3, 4, 8, 20), (1, 2, 4, 8)
EVENTS = ("read", "set_weights", "skip", "mask", "resume")

T = TypeVar("T")


class Draw(Protocol):
    """What decides."""

    def integer(self, low: int, high: int) -> int: ...
    def one(self, values: Sequence[T]) -> T: ...
    def some(self, values: Sequence[T], most: int) -> list[T]: ...


@dataclass(frozen=True)
class Dice:
    """Draws by a generator."""

    rng: random.Random

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def one(self, values: Sequence[T]) -> T:
        return self.rng.choice(values)

    def some(self, values: Sequence[T], most: int) -> list[T]:
        """Up to `most` of them, each once, in any order."""
        return self.rng.sample(values, self.rng.randint(0, most))


@dataclass(frozen=True, kw_only=True)
class Held:
    """A corpus in the code and in the model.

    Args:
        source: as a plan takes it.
        lengths: of its documents.
    """

    source: Any
    documents: Documents
    lengths: Sequence[int]


class Job:
    """The same job in the code and in the model.

    Args:
        folder: for lists of masked documents; without links in its path.
        packs: how rows of each corpus are filled.
    """

    def __init__(self, draw: Draw, folder: Path, held: Mapping[str, Held], packs: Mapping[str, Any]) -> None:
        self.draw, self.folder, self.held, self.packs = draw, folder, held, packs
        self.seed, self.streams = draw.integer(0, 2**64 - 1), draw.integer(1, 3)
        is_whole = "whole" in packs.values()
        self.seq_lens, self.sizes = (SEQ_LENS_OF_WHOLE, SIZES_OF_WHOLE) if is_whole else (SEQ_LENS, SIZES)
        long = [name for name, each in held.items() if sum(each.lengths) > self.sizes["block_tokens"]]
        self.takes = {name: draw.one([1.0, 0.7]) for name in long}
        self.names, self.seq_len = self.some_names(), draw.one(self.seq_lens)
        self.gone: set[str] = set()
        self.most = draw.one([None, 0.4, 1.0]) if self.streams == 1 else None
        self.plans()
        self.run = Run(self.model, self.limits())
        self.divide()

    def some_names(self) -> list[str]:
        return self.draw.some(sorted(self.held), 3) or [self.draw.one(sorted(self.held))]

    def limits(self) -> list[float | None]:
        return [self.most] * len(self.names)

    def weights(self) -> list[float]:
        found = [self.draw.one(WEIGHTS) for _ in self.names]
        return found if any(found) else [1.0] * len(found)

    def plans(self) -> None:
        """Plans with the names, the length and some weights."""
        first = self.weights()
        starts = sorted(self.draw.some(range(1, 61), 4))
        changes = [(start, self.weights()) for start in starts]
        takes = [self.takes.get(name, 1.0) for name in self.names]
        used = [
            Used(self.held[name].documents, take, name=name, pack=self.packs[name])
            for name, take in zip(self.names, takes, strict=True)
        ]
        shared: dict[str, Any] = {"seq_len": self.seq_len, "seed": self.seed, "num_streams": self.streams, **self.sizes}
        self.model = Plan(used, weights=first, changes=changes, **shared)
        self.plan = StreamPlan(
            {name: self.held[name].source for name in self.names},
            weights=dict(zip(self.names, first, strict=True)),
            schedule=[(start, dict(zip(self.names, values, strict=True))) for start, values in changes],
            take=dict(zip(self.names, takes, strict=True)),
            pack={name: self.packs[name] for name in self.names},
            max_epochs=self.most,
            allow_small_blocks=True,
            **shared,
        )

    def divide(self, state: dict[str, Any] | None = None, **choices: Any) -> None:
        """Go on with a batch size on a rank."""
        ranks = self.draw.integer(1, 3)
        self.place = self.draw.integer(0, ranks - 1), ranks
        self.size = self.streams * self.draw.integer(1, 4)
        self.loader = NumpyLoader(
            self.plan, global_batch_size=self.size, dp_rank=self.place[0], dp_world_size=ranks, uneven="pad"
        )
        if state is not None:
            self.loader.load_state_dict(state, **choices)

    def read(self) -> None:
        for _, batch in zip(range(self.draw.integer(1, 4)), self.loader, strict=False):
            expected = self.run.step(self.size, *self.place)
            assert {key: value.tolist() for key, value in batch.items()} == expected
        assert self.loader.cursor.sample == self.run.sample

    def set_weights(self) -> None:
        values = self.weights()
        self.loader.set_weights(dict(zip(self.names, values, strict=True)))
        self.run.set_weights(values)

    def skip(self) -> None:
        count = self.draw.integer(0, 30)
        self.loader.skip(count)
        self.run.skip(count)

    def mask(self) -> None:
        name = self.draw.one(self.names)
        number = self.draw.integer(0, len(self.held[name].lengths) - 1)
        file = self.folder / name
        with file.open("a") as lines:
            lines.write(f"{number}\n")
        self.loader.mask(name, file)
        self.run.mask(self.names.index(name), str(file))

    def resume(self) -> None:
        state, line = self.loader.state_dict(), saved(self.run)
        assert state["cursor"] == line
        choices: dict[str, Any] = dict.fromkeys(self.draw.some(["weights", "corpora", "seq_len"], 3), "plan")
        if "seq_len" in choices:
            self.seq_len = self.draw.one(self.seq_lens)
        before = self.names
        if "corpora" in choices:  # those that were removed may not come back
            self.names = [name for name in self.some_names() if name not in self.gone] or before
            self.gone |= set(before) - set(self.names)
        if choices:
            if self.names == before:
                choices["weights"] = "plan"  # the plans have other changes
            self.plans()
        self.divide(state, **choices)
        self.run = resumed(self.model, line, max_epochs=self.limits(), **choices)
        assert self.loader.state_dict()["cursor"] == saved(self.run)
