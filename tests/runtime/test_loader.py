"""Loaders of every kind give exactly the samples of `plan.sample`, and states that continue each other.

That these are the samples of the pages, for every rank and history: test_page_model.py and test_histories.py.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.fill_in_the_middle import FillInTheMiddle
from tests.examples import examples
from tests.runtime.loaders import SIZES, dataloader, expected_rows, one_corpus, rows_of, take, two_corpora
from tests.runtime.plans import plans
from tests.runtime.sources import ListSource, PeriodicSource
from tests.runtime.transforms import note, roll
from tokshard.errors import LoaderError, PlanMismatchError
from tokshard.runtime import NumpyLoader, expand, prefetch
from tokshard.runtime.locality import steps_per_window
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows import narrow
from tokshard.runtime.tensors import StreamDataset, StreamingLoader, belong_to_the_loop

SOAK = pytest.mark.soak


def label(sample: Any, random: Any) -> Any:
    """Labels of its own behind the pieces."""
    following = np.where(random.uniform(len(sample.next_tokens)) < 0.5, -100, 2**40)
    return replace(sample, next_tokens=following)


TRANSFORMS = {
    "none": [],
    "some": [FillInTheMiddle(prefix_id=1, middle_id=2, suffix_id=3, rate=0.8), roll],
    "labels": [label],
}


def fully(batch: Any) -> dict[str, Any]:
    """All that can differ between two batches."""
    return {key: (str(value.dtype)[-5:], tuple(value.shape), value.tolist()) for key, value in batch.items()}


@contextlib.contextmanager
def opened(kind: str, plan: StreamPlan, state: Any, **options: Any) -> Iterator[Any]:
    """What gives batches from a state on; as a data set without a state of its own."""
    if kind == "data set":
        del options["prefetch_factor"]
        dataset = StreamDataset(plan.copy(), **options)
        dataset.sampler.load_state_dict(state)
        yield dataloader(dataset)
        return
    with {"arrays": NumpyLoader, "tensors": StreamingLoader}[kind](plan.copy(), **options) as loader:
        loader.load_state_dict(state)
        yield loader


def change(data: st.DataObject, plan: StreamPlan, loader: Any, folder: Path) -> None:
    """One of the things that a loop does between steps."""
    match data.draw(st.sampled_from(["nothing", "skip", "set_weights", "mask", "mask"])):
        case "skip":
            loader.skip(data.draw(st.integers(0, 30)))
        case "set_weights":
            loader.set_weights({name: data.draw(st.sampled_from([0.1, 1.0])) for name in plan.names})
        case "mask":
            name = data.draw(st.sampled_from(plan.names))
            numbers = st.integers(0, len(plan.sources[plan.names.index(name)].lengths) - 1)  # type: ignore[attr-defined]
            with (folder / f"{name}{data.draw(st.integers(0, 1))}").open("a") as file:  # new, or grown
                file.writelines(f"{number}\n" for number in data.draw(st.lists(numbers, min_size=1, max_size=4)))
            loader.mask(name, file.name)


@pytest.mark.filterwarnings("ignore:the pass:UserWarning", "ignore:.*is used up:UserWarning")
@pytest.mark.filterwarnings("ignore:set_weights replaces:UserWarning")
@settings(max_examples=examples(40), deadline=None)
@given(
    plan=st.sampled_from(sorted(TRANSFORMS)).flatmap(lambda name: plans(transforms=TRANSFORMS[name])),
    ranks=st.integers(1, 3),
    rounds=st.integers(1, 4),
    read_tokens=st.sampled_from([1, 50, 1 << 20]),
    data=st.data(),
)
def test_loaders_of_every_kind_give_the_same_batches_and_states_which_continue_each_other(
    plan: StreamPlan,
    ranks: int,
    rounds: int,
    read_tokens: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("lists").resolve()
    sizes: dict[str, Any] = {
        "global_batch_size": rounds * plan.num_streams,
        "dp_rank": data.draw(st.integers(0, ranks - 1)),
        "dp_world_size": ranks,
        "uneven": "pad",
    }
    state = NumpyLoader(plan, **sizes).state_dict()
    for _ in range(data.draw(st.integers(1, 5))):
        kind, compact = data.draw(st.sampled_from(["arrays", "tensors", "data set"])), data.draw(st.booleans())
        ahead, steps = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
        with NumpyLoader(plan, prefetch_factor=0, **sizes) as plain, pytest.MonkeyPatch.context() as patch:
            patch.setattr(narrow, "READ_TOKENS", read_tokens)
            plain.load_state_dict(state)
            change(data, plan, plain, folder)
            options = {"compact": compact, "prefetch_factor": ahead, **sizes}
            with opened(kind, plan, plain.state_dict(), **options) as loader:
                found, expected = take(loader, steps), take(plain, steps)
                state = plain.state_dict()
                assert [fully(expand(each) if compact else each) for each in found] == list(map(fully, expected))
                assert kind == "data set" or loader.state_dict() == state
        for batch in expected:
            for row, sample in enumerate(batch["sample_index"].tolist()):
                alone = plan.sample(sample, plain.cursor) if sample >= 0 else {}
                for key in {"input_ids", "labels", "position_ids", "loss_weights"} & set(alone):
                    assert batch[key][row].tolist() == alone[key].tolist(), (key, sample)


def test_loaders_of_every_kind_have_the_same_defaults() -> None:
    arrays, *others = (inspect.signature(kind).parameters for kind in (NumpyLoader, StreamingLoader, StreamDataset))
    for of_kind in others:
        both = of_kind.keys() & arrays.keys()
        assert {name: of_kind[name].default for name in both} == {name: arrays[name].default for name in both}


def test_batches_have_the_documented_arrays() -> None:
    plan = StreamPlan(ListSource([9, 4, 30, 1, 12, 3, 7]), epochs=1, seed=4, **SIZES)
    rows = dict.fromkeys(["input_ids", "labels", "position_ids"], ("int64", (4, 6)))
    both = dict.fromkeys(["corpus_index", "sample_index"], ("int64", (4,)))
    both |= {"cu_seqlens": ("int32", (64,)), "max_seqlen": ("int64", ())}
    both |= {"step_targets": ("int64", ()), "step_weight": ("float32", ())}
    narrow = {"input_ids": ("uint32", (4, 6)), "next_tokens": ("int64", (63,)), "num_tokens": ("int32", (4,))}
    for compact, expected in ((False, rows | both), (True, narrow | both)):
        with NumpyLoader(plan, global_batch_size=4, compact=compact) as arrays:
            batch = list(arrays)[-1]  # 66 tokens are 11 samples: the last row is padding
        assert {key: (value.dtype.name, value.shape) for key, value in batch.items()} == expected
        with StreamingLoader(plan, global_batch_size=4, compact=compact) as tensors:
            found = {key: (str(value.dtype), tuple(value.shape)) for key, value in next(iter(tensors)).items()}
        assert found == {key: (f"torch.{dtype}", shape) for key, (dtype, shape) in expected.items()}
    assert batch["num_tokens"].tolist() == [6, 6, 6, 0]


@pytest.mark.parametrize("document_tokens", [40, 750])
def test_a_tenth_of_the_bytes_goes_to_the_device_with_compact(document_tokens: int) -> None:
    plan = StreamPlan(PeriodicSource(10**9, document_tokens), seq_len=4096, seed=1, window_blocks=64)
    sizes = {}
    for is_compact in (False, True):
        with NumpyLoader(plan, global_batch_size=8, compact=is_compact) as loader:
            sizes[is_compact] = sum(value.nbytes for value in next(iter(loader)).values())
    assert sizes[True] < 0.1 * sizes[False]


def test_expanding_never_asks_the_device_for_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamingLoader(two_corpora(), global_batch_size=4, compact=True) as loader:
        batch = next(iter(loader))

    def refuse(*_: Any) -> Any:
        raise AssertionError("this waits for the device")

    repeat, sizes = torch.Tensor.repeat_interleave, []

    def repeat_interleave(tensor: torch.Tensor, *arguments: Any, output_size: int | None = None) -> torch.Tensor:
        sizes.append(output_size)
        return repeat(tensor, *arguments, output_size=output_size)

    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__index__", "__float__"):
            patched.setattr(torch.Tensor, name, refuse)
        patched.setattr(torch.Tensor, "repeat_interleave", repeat_interleave)
        expand(batch)
    assert sizes == [24]  # which it would ask the device for


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("compact", [False, True])
def test_every_tensor_is_pinned_where_there_is_an_accelerator_and_else_a_warning(
    monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    options: dict[str, Any] = {"global_batch_size": 2, "pin_memory": True, "compact": compact}
    with pytest.warns(UserWarning, match="pin_memory has no effect"):
        StreamingLoader(two_corpora(), **options)
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with StreamingLoader(two_corpora(), prefetch_factor=0, **options) as loader:
        batch = next(iter(loader))
    assert len(pinned) == len(batch)
    assert not {*pinned} & {tensor.data_ptr() for tensor in batch.values()}


def test_a_loader_has_a_thread_from_its_first_batch_to_its_end_unless_it_makes_none_ahead() -> None:
    threads = threading.active_count()
    for ahead in (0, 4):
        with NumpyLoader(two_corpora(), global_batch_size=4, prefetch_factor=ahead) as loader:
            assert threading.active_count() == threads
            take(loader, 1)
            assert threading.active_count() == threads + (ahead > 0)
            assert (loader.stats()["batches"], loader.stats()["queue"] <= ahead) == (1, True)
        assert threading.active_count() == threads


def test_a_loader_says_what_it_reads_and_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = two_corpora()
    with NumpyLoader(plan, global_batch_size=4, dp_rank=1, dp_world_size=2) as loader:
        take(loader, 3)
        assert repr(loader) == f"<NumpyLoader of {plan!r} at sample 12: global batches of 4, rank 1 of 2>"
    monkeypatch.setenv("WORLD_SIZE", "1")  # without torch.distributed
    assert "rank 0 of 1" in repr(StreamingLoader(plan, global_batch_size=2))


def test_the_global_random_generators_are_left_alone() -> None:
    def states() -> tuple[Any, ...]:
        legacy = np.random.get_state()[1].tolist()  # noqa: NPY002 - the global state that must not change
        return random.getstate(), legacy, torch.get_rng_state().tolist()

    before = states()
    with StreamingLoader(two_corpora(transforms=[note]), global_batch_size=2) as loader:
        take(loader, 5)
    assert states() == before


def test_windows_of_fewer_than_16_steps_are_a_warning_unless_they_were_chosen() -> None:
    source = PeriodicSource(10**10)
    tokens_per_step = 8 << 20  # a default window has 64M tokens
    with pytest.warns(UserWarning, match=r"a window of corpus 'big' lasts 8\.0 steps.*window_blocks=2048 has 16"):
        StreamingLoader(StreamPlan({"big": source}, seq_len=4096), global_batch_size=tokens_per_step // 4096)
    quarters = dict.fromkeys("abcd", 0.25)
    plan = StreamPlan({name: PeriodicSource(10**10 + ord(name)) for name in quarters}, seq_len=4096, weights=quarters)
    loader = StreamingLoader(plan, global_batch_size=512)
    loader.set_weights(quarters | {"a": 0.5})
    with pytest.warns(UserWarning, match=r"'a' lasts 8\.0 steps.*window_blocks=512 has 16"):
        loader.set_weights(dict.fromkeys(quarters, 0) | {"a": 1})
    StreamingLoader(StreamPlan({"big": source}, seq_len=4096, window_blocks=1024), global_batch_size=2048)
    StreamingLoader(StreamPlan({"big": source}, seq_len=4096), global_batch_size=1024)


def test_a_plan_says_how_many_steps_read_a_window_over_all_streams() -> None:
    corpora = {"big": PeriodicSource(10**10), "small": PeriodicSource(10**6), "off": PeriodicSource(10**9)}
    for num_streams in (1, 16):
        plan = StreamPlan(
            corpora, weights={"big": 0.75, "small": 0.25, "off": 0}, seq_len=4096, num_streams=num_streams
        )
        assert steps_per_window(plan, 1024) == {"big": pytest.approx(64 / 3), "small": math.inf, "off": math.inf}
    least = StreamPlan(corpora, weights={"big": 1, "small": 1, "off": 5e-324}, seq_len=1)
    assert steps_per_window(least, 1)["off"] == math.inf


# passes that end


def real_rows(batches: Any) -> list[dict[str, Any]]:
    return [row for row in rows_of(list(batches)) if row["sample_index"] >= 0]


def test_a_data_set_takes_the_choices_of_a_loader_that_its_refusals_name() -> None:
    edited = two_corpora(weights={"a": 1, "b": 5})
    with StreamingLoader(two_corpora(), global_batch_size=4) as loader:
        loader.skip(8)
        state = loader.state_dict()
    dataset, expected = (kind(edited, global_batch_size=4) for kind in (StreamDataset, StreamingLoader))
    with pytest.raises(PlanMismatchError) as refused:
        dataset.sampler.load_state_dict(state)
    assert "weights='plan'" in refused.value.hint
    dataset.sampler.load_state_dict(state, weights="plan")
    expected.load_state_dict(state, weights="plan")
    assert fully(next(iter(dataloader(dataset)))) == fully(next(iter(expected)))
    expected.close()


def test_a_finished_pass_that_is_resumed_is_over_for_one_loop() -> None:
    plan = one_corpus(epochs=1)
    whole = expected_rows(plan, range(plan.num_samples or 0))
    first = StreamingLoader(plan, global_batch_size=4)
    assert len(list(first)) == len(first) == 3
    assert real_rows(first) == whole, "a further loop begins again"
    skipping = StreamingLoader(plan, global_batch_size=4)
    skipping.skip(10**6)
    resumed, dataset = StreamingLoader(plan, global_batch_size=4), StreamDataset(plan, global_batch_size=4)
    resumed.load_state_dict(first.state_dict())
    dataset.sampler.load_state_dict(first.state_dict())
    for loader in (skipping, resumed, dataloader(dataset)):
        with pytest.warns(UserWarning, match="this loop is empty; the next one begins the pass again"):
            assert list(loader) == []
        assert real_rows(loader) == whole
    for loader in (first, skipping, resumed):
        loader.close()


def test_a_loop_that_leaves_a_resumed_pass_at_its_last_batch_is_followed_by_a_whole_pass() -> None:
    plan = one_corpus(epochs=1)
    with NumpyLoader(plan, global_batch_size=1) as first, NumpyLoader(plan, global_batch_size=1) as loader:
        take(first, 1)
        loader.load_state_dict(first.state_dict())
        take(loader, len(loader) - 1)
        assert len(list(loader)) == len(loader)


def test_a_loader_goes_on_without_the_tables_that_a_thread_that_hangs_may_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths, over, calls = [5, 9, 30, 12, 7] * 8, threading.Event(), itertools.count()
    slow = ListSource(lengths)

    def hang_once(*arguments: Any) -> Any:
        if next(calls) == 0:
            over.wait(60)  # what reads comes back when the test is over
        return ListSource.ends(slow, *arguments)

    monkeypatch.setattr(prefetch, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(slow, "is_in_memory", False)
    monkeypatch.setattr(slow, "ends", hang_once)
    loader = StreamingLoader(StreamPlan({"corpus": slow}, **SIZES), global_batch_size=4, timeout_seconds=1)
    with pytest.raises(LoaderError, match="no batch came for 1 s"):
        take(loader, 1)
    assert rows_of(take(loader, 9)) == expected_rows(StreamPlan({"corpus": ListSource(lengths)}, **SIZES), range(36))
    over.set()


# under DataLoaders
#
# These passes are finite and read to their end: a DataLoader that is left in the middle ends its workers, and torch
# sometimes aborts one while it does.


def stateful(plan: StreamPlan, workers: int, method: str | None = "fork", **options: Any) -> Any:
    dataloaders = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = StreamDataset(plan, global_batch_size=4)
    if workers:
        options |= {"num_workers": workers, "multiprocessing_context": method, "worker_init_fn": belong_to_the_loop}
    return dataloaders.StatefulDataLoader(dataset, batch_size=None, sampler=dataset.sampler, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning", "ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("before", "after", "method"),
    [(0, 2, "fork"), (2, 0, "fork"), (2, 1, "fork"), pytest.param(2, 2, "spawn", marks=SOAK)],
)
def test_a_stateful_dataloader_resumes_with_any_number_of_workers(before: int, after: int, method: str) -> None:
    plan = one_corpus(epochs=3)
    whole, batch = expected_rows(plan, range(plan.num_samples or 0)), 4
    first = stateful(plan, before, method)
    states = [json.loads(json.dumps(first.state_dict())) for _ in first]
    for stop in (1, 4):
        same, other = stateful(plan, before, method), stateful(plan, after, method)
        same.load_state_dict(states[stop - 1])
        other.sampler.load_state_dict(states[stop - 1])
        assert real_rows(same) == real_rows(other) == whole[batch * stop :]
    # after the loop, the next one is a pass, as in the loader that gave the state; at its last batch, nothing is left
    for state, lengths in ((first.state_dict(), [len(states)] * 2), (states[-1], [0, len(states)])):
        same = stateful(plan, before, method)
        same.load_state_dict(state)
        assert [len(list(same)) for _ in range(2)] == lengths
