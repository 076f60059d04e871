"""What plans, loaders and lists of masks refuse, and what is no state. Other plans: test_refusals_of_states.py."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.fill_in_the_middle import FillInTheMiddle
from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.refusals import Refusal, check, refused, said_in
from tests.runtime.loaders import one_corpus, two_corpora
from tests.runtime.sources import ListSource, PeriodicSource, SpannedSource
from tests.runtime.states import edited
from tests.runtime.transforms import WRONG, wrong
from tokshard.errors import PlanError
from tokshard.runtime import NumpyLoader, StreamPlan, expand
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.order.permutation import KEY_WORDS, Permutation, derive_key

Plan: Any = StreamPlan  # of which arguments have wrong types here
Loader: Any = NumpyLoader


def plan(lengths: tuple[int, ...] = (10,) * 8, **options: Any) -> Any:
    """A plan of 4 blocks, and 16 samples in an epoch."""
    return Plan({"a": ListSource(lengths)}, **{"seq_len": 5, "block_tokens": 20, "window_blocks": 2, **options})


def loader(**options: Any) -> Any:
    return Loader(two_corpora(), **{"global_batch_size": 4, **options})


def streaming(**options: Any) -> Any:
    from tokshard.runtime import StreamingLoader

    return StreamingLoader(two_corpora(), global_batch_size=4, **options)


def dataset(**options: Any) -> Any:
    from tokshard.runtime import StreamDataset

    return StreamDataset(two_corpora(), **{"global_batch_size": 4, **options})


def under_dataloader(data: Any, *arguments: Any, **options: Any) -> None:
    from torch.utils.data import DataLoader

    next(iter(DataLoader(data, *arguments, **options)))


SAID = Path(__file__).with_name("refusals.txt")
OPTIONS = re.findall(r"^a (plan|loader) with (\w+=.*)$", SAID.read_text(encoding="utf-8"), re.MULTILINE)
"""What is made, and the options that it does not take, as the text has them."""


def made(what: str, options: str) -> Any:
    return eval(f"{what}({options})", {"plan": plan, "loader": loader, "nan": math.nan, "inf": math.inf})


INTEGERS: dict[str, Callable[[Any], Any]] = {
    "seq_len": lambda value: plan(seq_len=value),
    "seed": lambda value: plan(seed=value),
    "block_tokens": lambda value: plan(block_tokens=value),
    "window_blocks": lambda value: plan(window_blocks=value),
    "num_streams": lambda value: plan(num_streams=value),
    "epochs": lambda value: plan(epochs=value),
    "start_epoch of 'a'": lambda value: plan(start_epoch={"a": value}),
    "a start of the schedule": lambda value: plan(schedule=[(value, {"a": 1})]),
    "sample": lambda value: plan().sample(value),
    "document": lambda value: plan().find("a", value),
    "an epoch": lambda value: plan().find("a", 0, epochs=[value]),
    "global_batch_size": lambda value: loader(global_batch_size=value),
    "dp_rank": lambda value: loader(dp_rank=value, dp_world_size=4),
    "dp_world_size": lambda value: loader(dp_rank=0, dp_world_size=value),
    "prefetch_factor": lambda value: loader(prefetch_factor=value),
    "num_samples": lambda value: loader().skip(value),
    "the generation of 'a'": lambda value: Plan({"a": "a"}, generations={"a": value}, seq_len=4),
    "memory_bytes": lambda value: Cache(memory_bytes=value),
}
"""Arguments that are whole numbers, by their names in messages."""

NO_INTEGERS = ["4k", 4.5, 1e6, np.float64(8), math.nan, math.inf, None, True, [4]]

# loaders


def at_the_last_sample() -> None:
    at_end = Loader(one_corpus(seq_len=1), global_batch_size=3)
    at_end.skip(2**62 - 1)
    next(iter(at_end))


def in_a_job(variable: str, make: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, "2")
        loader(dp_rank=0, dp_world_size=2)  # which is allowed
        make()


# tokens

KEY = derive_key(1, "pieces", words=KEY_WORDS)


def by_range(documents: list[list[int]], **options: Any) -> None:
    """A sample of documents that are found by their delimiters."""
    corpus = write_corpus(Path("corpus"), documents, tokenizer=TINY_TOKENIZER, **options)
    Plan(CorpusSource(corpus, access="pread"), seq_len=11).sample(0)


# states

FOREIGN: list[Any] = [{}, None, b"{}", {"cursor": "x"}, {"cursor": None}, {"_snapshot": {}}]


def damaged(change: dict[str, Any]) -> None:
    one = loader()
    one.load_state_dict(edited(one.state_dict(), **change))


DAMAGED: list[dict[str, Any]] = [
    {"sample": -1},
    {"weights": [[0, [math.nan, 1.0]]]},
    {"seed": 5},
    {"counts": [[0, 0]] * 2, "remainders": [[0]] * 2},
]
"""More of them, with less of what is said: test_state.py."""

# transforms and masks


def of_spans(transform: Any) -> None:
    """A sample with weights goes through a transform."""
    source = SpannedSource([[0, 1.0, 1.0, 0]] * 9)
    Plan(source, transforms=[transform], seq_len=8, block_tokens=1024, window_blocks=2).sample(0)


NUMBERS = "give a file with one document number in each line, or a .npy file of integers"


def masked(content: Any) -> None:
    if isinstance(content, bytes):
        Path("list").write_bytes(content)
    else:
        with open("list", "wb") as file:
            np.save(file, content)
    one, state = loader(), loader().state_dict()
    try:
        one.mask("a", "list")
    finally:
        assert one.state_dict() == state, "nothing is masked"


LISTS: list[Any] = [
    *(f"3\n{line}\n".encode() for line in ("+7", " 7", "7 ", "1_0", "1.5", "-5", "\u0663", "7\r8", '{"document": 7}')),
    b"%d\n" % 2**70,
    b"\x93NUMPY\x01\x00damaged",
    *(np.array(3), np.array([[1]]), np.array([True]), np.array([1.5]), np.array([2**63], np.uint64)),
]

CALLS: dict[str, Callable[[], Any]] = {
    **{f"a {what} with {options}": partial(made, what, options) for what, options in OPTIONS},
    **{f"a fraction as {name}": partial(call, 4.5) for name, call in INTEGERS.items()},
    **{f"a skip of {value!r}": partial(INTEGERS["num_samples"], value) for value in NO_INTEGERS},
    **{f"{state!r} as a state": lambda state=state: loader().load_state_dict(state) for state in FOREIGN},
    **{
        f"{state!r} as the state of a data set": lambda state=state: dataset().sampler.load_state_dict(state)
        for state in FOREIGN
    },
    **{f"a state with {change}": partial(damaged, change) for change in DAMAGED},
    **{f"documents to mask in {content!r}": partial(masked, content) for content in LISTS},
    **{
        f"a transform that returns {what}": lambda what=what: two_corpora(transforms=[partial(wrong, what)]).sample(0)
        for what in WRONG
    },
    "a transform that forgets the weights": lambda: of_spans(lambda sample, _: replace(sample, loss_weights=None)),
    **{
        f"a transform that returns a weight of {weight}": lambda weight=weight: of_spans(
            lambda sample, _: replace(sample, loss_weights=np.full_like(sample.loss_weights, weight))
        )
        for weight in (math.nan, math.inf, -1.0)
    },
    "sentinels that do not fit the ids of a corpus": lambda: Plan(
        PeriodicSource(10_000), seq_len=64, transforms=[FillInTheMiddle(prefix_id=1, suffix_id=2, middle_id=900_000)]
    ).sample(0),
    "a streaming loader with compact='false'": lambda: streaming(compact="false"),
    "a streaming loader with pin_memory='no'": lambda: streaming(pin_memory="no"),
    "a data set with compact='false'": lambda: dataset(compact="false"),
    "a plan with a path as its cache": lambda: Plan({"a": "a"}, cache="cache", seq_len=4),
    "the length of an endless loader": lambda: len(loader()),
    "a DataLoader of an endless loader": lambda: under_dataloader(streaming()),
    "a DataLoader without the sampler": lambda: under_dataloader(dataset(), batch_size=None),
    "a DataLoader that shuffles": lambda: under_dataloader(dataset(), shuffle=True),
    "sample 2**62 + 1": lambda: plan().sample(2**62 + 1),
    "a trace of sample 2**62 + 1": lambda: plan().trace(2**62 + 1),
    "traces of a list with a fraction": lambda: plan().traces([1, 1.5]),
    "sample -1": lambda: plan().sample(-1),
    "a sample behind a pass": lambda: plan(epochs=1).sample(16),
    "a pass of more than 2**62 samples": lambda: Plan(PeriodicSource(2**50), seq_len=1, epochs=2**32 - 1),
    "a full batch to expand": lambda: expand(next(iter(loader()))),
    "numpy arrays to expand on a device": lambda: expand(next(iter(loader(compact=True))), device="cpu"),
    "an unknown access": lambda: CorpusSource("corpus", access="read"),  # type: ignore[arg-type]
    "documents that end without a delimiter, by range": lambda: by_range([[1, 0, 2, 0, 0, 3, 0], [0, 0], [2, 0]]),
    "documents that do not begin at a delimiter, by range": lambda: by_range(
        [[0, 1, 2, 0], [0, 3, 0, 1, 0], [0, 0]], bos="<eos>"
    ),
    "a last document without a delimiter, by range": lambda: by_range([[1, 2, 0], [3, 1, 2]]),
    "a plan of a list of paths": lambda: Plan(["a", "b"], seq_len=4),
    "a plan of a number": lambda: Plan({"a": 5}, seq_len=4),
    "a corpus with a number as its name": lambda: Plan({5: "a"}, seq_len=4),
    "a plan without corpora": lambda: Plan({}, seq_len=4),
    "a corpus without tokens": lambda: plan(lengths=()),
    "the same corpus twice": lambda: Plan({"a": ListSource([5]), "b": ListSource([5])}, seq_len=4),
    "corpora of two tokenizers": lambda: Plan({"a": ListSource([5]), "b": PeriodicSource(100)}, seq_len=4),
    "a loader without a plan": lambda: Loader("a"),
    "a loader without a batch size": lambda: Loader(plan()),
    "a batch that streams do not divide": lambda: Loader(plan(num_streams=4), global_batch_size=10),
    "set_weights with a number": lambda: loader().set_weights(1),
    "a skip of a negative number of samples": lambda: loader().skip(-1),
    "a skip beyond the last sample": lambda: [one := loader(), one.skip(2**62), one.skip(1)],
    "a step beyond the last sample": at_the_last_sample,
    "a permutation of fewer than no items": lambda: Permutation(length=-1, key=KEY),
    "a permutation of more than 2**62 items": lambda: Permutation(length=2**62 + 1, key=KEY),
    "a permutation by too short a key": lambda: Permutation(length=3, key=KEY[:-1]),
    "a permutation by a key of int64": lambda: Permutation(length=3, key=KEY.astype(np.int64)),
    "a sample beyond 2**64 epochs": lambda: Plan(ListSource([1]), seq_len=300).sample(2**64 // 300 + 1),
    **{
        f"{variable} without the rank": partial(in_a_job, variable, loader)
        for variable in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    },
    "a loader before torch.distributed": partial(in_a_job, "WORLD_SIZE", streaming),
    "an epoch of whole rows with 2**32 tokens of room": lambda: Plan(
        PeriodicSource(4065 * (2**19 + 1), 2**19 + 1), seq_len=2**20, block_tokens=2**27, window_blocks=30, pack="whole"
    ).sample(0),
    "find in a corpus that is not in the plan": lambda: plan().find("b", 0),
    "a state where a cursor is expected": lambda: plan().sample(0, {"cursor": "{}"}),
    "a cache for corpora that are open already": lambda: plan(cache=Cache()),
    "a cache with memory_bytes=-1": lambda: Cache(memory_bytes=-1),
    "a cache with cache_bytes=0": lambda: Cache(cache_bytes=0),
    "a cache with connections=0": lambda: Cache(connections=0),
    "1,025 requests at a time": lambda: Cache(connections=1_025),
    "a DataLoader of a loader": lambda: under_dataloader(Loader(plan(epochs=1), global_batch_size=2)),
    "a DataLoader that batches batches": lambda: under_dataloader(data := dataset(), 8, sampler=data.sampler),
    "a sample of a data set": lambda: dataset()[0],
    "a step of the sampler of another data set": lambda: dataset()[next(iter(dataset(global_batch_size=2).sampler))],
    "a copy of a loader": lambda: copy.copy(loader()),
    "the state of a sampler, which would count what was read ahead": lambda: dataset().sampler.state_dict,
    "a state between two snapshots of a StatefulDataLoader": lambda: dataset().sampler.load_state_dict(
        {"_snapshot": {}, "_steps_since_snapshot": 2}
    ),
    "a cache in a bucket": lambda: Cache(cache_dir="s3://bucket/kept"),
    "an empty list of documents": lambda: masked(b""),
    "a list of documents with only empty lines": lambda: masked(b"\r\n\n"),
    "a document beyond the last one, to mask": lambda: masked(b"18\n"),
    "a negative document, to mask": lambda: masked(np.array([3, -5])),
    "a mask for a corpus that is not in the plan": lambda: loader().mask("x", "list"),
    "a set of documents, to mask": lambda: loader().mask("a", {1}),
    "a missing list of documents": lambda: loader().mask("a", "list"),
    "a folder given as a list of documents": lambda: loader().mask("a", Path.cwd()),
    "a list of documents that is not a regular file": lambda: [
        Path("list").symlink_to("/dev/zero"),
        loader().mask("a", "list"),
    ],
    "a list of documents above 1 GiB": lambda: [
        Path("list").touch(),
        os.truncate("list", (1 << 30) + 1),
        loader().mask("a", "list"),
    ],
}

REFUSALS = [
    *said_in(SAID, {what: lambda _, call=call: call() for what, call in CALLS.items()}),  # type: ignore[misc]
    Refusal(
        "a path with a zero byte",
        lambda _: loader().mask("a", "no\0where"),
        PlanError,
        "DIR/no\0where cannot be read: no path has a zero byte",
        NUMBERS,
    ),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
