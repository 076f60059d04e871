"""What plans, loaders and lists of masks refuse, and what is no state. Other plans: test_refusals_of_states.py."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.refusals import Refusal, check, refused, said_in
from tests.runtime.loaders import one_corpus, two_corpora
from tests.runtime.sources import ListSource, PeriodicSource
from tests.runtime.states import edited
from tests.runtime.transforms import wrong
from tokshard.errors import PlanError, PlanMismatchError
from tokshard.runtime import NumpyLoader, StreamPlan, expand
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource

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


def in_words(argument: Any) -> str:
    """The options of a call, or its only argument."""
    if isinstance(argument, dict) and "cursor" not in argument:
        return ", ".join(f"{name}={value!r:.60}" for name, value in argument.items())
    return argument if isinstance(argument, str) else repr(argument)


def each(
    what: str,
    call: Callable[[Any], Any],
    rows: Iterable[tuple[Any, ...]],
    *,
    problem: str = "{}",
    hint: str = "",
    error: type[BaseException] = PlanError,
) -> list[Refusal]:
    """A refusal for each argument of a call.

    Args:
        rows: the argument, what the problem line says of it, and the hint, if they do not all have the same.
    """
    return [
        Refusal(
            what.format(in_words(argument)),
            lambda _, argument=argument: call(argument),
            error,
            problem.replace("{}", said),
            *(own or [hint]),
        )
        for argument, said, *own in rows
    ]


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

NO_INTEGERS: list[tuple[Any, str, int | str]] = [
    ("4k", "'4k' (str)", 4096),
    (4.5, "4.5 (float)", "4 or 5"),
    (1e6, "1000000.0 (float)", 1_000_000),  # what was meant
    (np.float64(8), "np.float64(8.0) (float64)", 8),
    (math.nan, "nan (float)", 4096),
    (math.inf, "inf (float)", 4096),
    (None, "None (NoneType)", 4096),
    (True, "True (bool)", 4096),
    ([4], "[4] (list)", 4096),
]

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


UNSIZED = (
    "the sampler of a StreamDataset determines what is read: give DataLoader(dataset, batch_size=None, "
    "sampler=dataset.sampler)"
)
ENDLESS = "the plan is endless: it has no length. Iterate the loader itself, without a DataLoader around it"
UNCOUNTABLE = "sample 4611686018427387905: samples are counted up to 2**62"

PLAIN: list[tuple[str, Callable[[], Any], type[BaseException], str]] = [
    ("the length of an endless loader", lambda: len(loader()), TypeError, ENDLESS),
    ("a DataLoader of an endless loader", lambda: under_dataloader(streaming()), TypeError, ENDLESS),
    ("a DataLoader without the sampler", lambda: under_dataloader(dataset(), batch_size=None), TypeError, UNSIZED),
    ("a DataLoader that shuffles", lambda: under_dataloader(dataset(), shuffle=True), TypeError, UNSIZED),
    ("sample 2**62 + 1", lambda: plan().sample(2**62 + 1), IndexError, UNCOUNTABLE),
    ("a trace of sample 2**62 + 1", lambda: plan().trace(2**62 + 1), IndexError, UNCOUNTABLE),
    ("sample -1", lambda: plan().sample(-1), IndexError, "the plan has no sample -1: it has samples from 0 on"),
    (
        "a sample behind a pass",
        lambda: plan(epochs=1).sample(16),
        IndexError,
        "the plan has no sample 16: it has 16 samples",
    ),
    (
        "a full batch to expand",
        lambda: expand(next(iter(loader()))),
        ValueError,
        "the batch has input_ids, labels, *, and no next_tokens: expand is for a loader's compact=True",
    ),
    (
        "numpy arrays to expand on a device",
        lambda: expand(next(iter(loader(compact=True))), device="cpu"),
        ValueError,
        "device is 'cpu', and the batch has numpy arrays, which have no device",
    ),
    (
        "an unknown access",
        lambda: CorpusSource("corpus", access="read"),  # type: ignore[arg-type]
        ValueError,
        "access must be 'mmap' or 'pread', got 'read'",
    ),
]

# states

FOREIGN: list[tuple[Any, str]] = [
    ({}, "None"),
    (None, "None"),
    (b"{}", "b'{}'"),
    ({"cursor": "x"}, "'x'"),
    ({"cursor": None}, "None"),
    ({"_snapshot": {}}, "None"),
]


def damaged(change: dict[str, Any]) -> None:
    one = loader()
    one.load_state_dict(edited(one.state_dict(), **change))


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"sample": -1}, "Expected `int` >= 0 - at `$.sample`"),
    ({"weights": [[0, [math.nan, 1.0]]]}, "JSON is malformed: invalid character (byte *)"),
    ({"seed": 5}, "the rest of it contradicts plan"),
    ({"counts": [[0, 0]] * 2, "remainders": [[0]] * 2}, "the rest of it contradicts counts"),
]
"""More of them, with less of what is said: test_state.py."""

# masks

NUMBERS = "give a file with one document number in each line, or a .npy file of integers"
NO_NUMBERS = f"{NUMBERS}; a list of ids becomes a view with tokshard select, and numbers with tokshard diff"


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


LISTS: list[tuple[Any, str]] = [
    *(
        (f"3\n{line}\n".encode(), f"a line is {line!r}, expected digits")
        for line in ("+7", " 7", "7 ", "1_0", "1.5", "-5", "\u0663", "7\r8", '{"document": 7}')
    ),
    (b"%d\n" % 2**70, "*"),
    (b"\x93NUMPY\x01\x00damaged", "EOF: reading array header, expected * bytes got 5"),
    (np.array(3), "it holds int64 [], expected document numbers"),
    (np.array([[1]]), "it holds int64 [1, 1], expected document numbers"),
    (np.array([True]), "it holds bool [1], expected document numbers"),
    (np.array([1.5]), "it holds float64 [1], expected document numbers"),
    (np.array([2**63], np.uint64), "it holds uint64 [1], expected document numbers"),
]

CALLS: dict[str, Callable[[], Any]] = {
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
"""What is refused once."""

# transforms

KEEPS = "a transform keeps the number of tokens and their dtype"
ADDS_UP = "piece_lengths are at least 1 and add up to the tokens"
EXPECTED = "expected 6 tokens and one next token per piece"
ONE_DIMENSION = "give both as one-dimensional arrays of integers"

TRANSFORMS: list[tuple[str, str, str]] = [
    ("nothing", "NoneType, expected a Sample", "return a Sample from transforms"),
    ("an array", "ndarray, expected a Sample", "return a Sample from transforms"),
    ("fewer tokens", "tokens uint32 [5], expected uint32 [6]", KEEPS),
    ("tokens of int64", "tokens int64 [6], expected uint32 [6]", KEEPS),
    ("a list", "tokens list, expected uint32 [6]", KEEPS),
    ("pieces longer than the tokens", f"3 pieces of 7 tokens with 3 next tokens, {EXPECTED}", ADDS_UP),
    ("an empty piece", f"3 pieces of 6 tokens with 3 next tokens, {EXPECTED}", ADDS_UP),
    ("a negative piece", f"2 pieces of 6 tokens with 2 next tokens, {EXPECTED}", ADDS_UP),
    ("no pieces", f"0 pieces of 0 tokens with 0 next tokens, {EXPECTED}", ADDS_UP),
    ("labels", f"2 pieces of 6 tokens with 3 next tokens, {EXPECTED}", ADDS_UP),
    (
        "pieces as floats",
        "piece_lengths float64 [2] and next_tokens int64 [2], expected int64 [pieces]",
        ONE_DIMENSION,
    ),
    ("a list of pieces", "piece_lengths list and next_tokens int64 [2], expected int64 [pieces]", ONE_DIMENSION),
    ("labels as floats", "piece_lengths int64 [2] and next_tokens float64 [2], expected int64 [pieces]", ONE_DIMENSION),
    (
        "pieces of two dimensions",
        "piece_lengths int64 [2, 1] and next_tokens int64 [2, 1], expected int64 [pieces]",
        ONE_DIMENSION,
    ),
    (
        "a label of -1",
        "next_tokens from -1 on, expected token ids or -100",
        "-100 is for a token that has no label",
    ),
]


REFUSALS = [
    *said_in(
        SAID,
        {
            what: lambda _, call=call: call()  # type: ignore[misc]
            for what, call in {
                **{f"a {what} with {options}": partial(made, what, options) for what, options in OPTIONS},
                **CALLS,
            }.items()
        },
    ),
    *each(
        "a fraction as {}",
        lambda name: INTEGERS[name](4.5),
        zip(INTEGERS, INTEGERS, strict=True),
        problem="{} is 4.5 (float), expected an integer",
        hint="give an integer such as 4 or 5",
    ),
    *each(
        "a skip of {}",
        lambda value: loader().skip(value),
        [(value, shown, f"give an integer such as {such}") for value, shown, such in NO_INTEGERS],
        problem="num_samples is {}, expected an integer",
    ),
    *(
        row
        for what, make in (("a state", loader), ("the state of a data set", lambda: dataset().sampler))
        for row in each(
            "{} as " + what,
            lambda state, make=make: make().load_state_dict(state),
            FOREIGN,
            problem="this is not a state of a tokshard loader: {}",
            hint="give the value of StreamingLoader.state_dict(); the state of another loader cannot be continued",
            error=PlanMismatchError,
        )
    ),
    *each(
        "a state with {}",
        damaged,
        DAMAGED,
        problem="the state is damaged: {}",
        hint="load an older checkpoint, or start without the loader's state",
        error=PlanMismatchError,
    ),
    *each("documents to mask in {}", masked, LISTS, problem="DIR/list is not a list of documents: {}", hint=NO_NUMBERS),
    *each(
        "a transform that returns {}",
        lambda what: two_corpora(transforms=[partial(wrong, what)]).sample(0),
        TRANSFORMS,
        problem="functools.partial(<function wrong at *>, *) returned {}",
    ),
    Refusal(
        "a path with a zero byte",
        lambda _: loader().mask("a", "no\0where"),
        PlanError,
        "DIR/no\0where cannot be read: no path has a zero byte",
        NUMBERS,
    ),
    *(Refusal(what, lambda _, call=call: call(), error, problem) for what, call, error, problem in PLAIN),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
