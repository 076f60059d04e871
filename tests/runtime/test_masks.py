"""Documents that are taken out of the loss in mid-run: exactly their labels, from exactly this batch on, on record."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.corpora import Source as WrittenSource
from tests.examples import examples
from tests.runtime.loaders import dataloader
from tests.runtime.sources import EOS, ListSource
from tests.runtime.states import edited, values_of
from tokshard.errors import PlanError, PlanMismatchError
from tokshard.inspect.plan.run import open_run
from tokshard.runtime import FillInTheMiddle, NumpyLoader, StreamDataset, StreamingLoader, StreamPlan, expand
from tokshard.runtime.state import load_state

SIZES = {"seq_len": 6, "block_tokens": 24, "window_blocks": 3, "seed": 4}


class Source(ListSource):
    """A corpus that names its EOS. All tokens are unique, also its delimiters: so a label tells its document."""

    eos_id = EOS

    def __init__(self, lengths: list[int], first_token: int = 1) -> None:
        super().__init__(lengths)
        self.first_token = first_token
        self.tokens = np.arange(first_token, first_token + sum(lengths), dtype=np.uint32)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Source, (self.lengths, self.first_token))

    def document_of(self, token: int) -> int | None:
        position = token - self.first_token
        return self.document_at(position).document if 0 <= position < len(self.tokens) else None


CODE = Source([9, 4, 30, 1, 12, 3] * 9)
PROSE = Source([5, 17, 2] * 6, first_token=5_000)


FOLDER = tempfile.TemporaryDirectory()


def file_of(documents: Iterable[int]) -> Path:
    """A file that lists documents, the same for the same ones."""
    content = "".join(f"{document}\n" for document in documents)
    path = Path(FOLDER.name, hashlib.sha256(content.encode()).hexdigest())
    path.write_text(content)
    return path


def plan_of(**options: Any) -> StreamPlan:
    return StreamPlan({"code": CODE, "prose": PROSE}, **{"weights": {"code": 0.7, "prose": 0.3}, **SIZES, **options})


@dataclass(frozen=True)
class Call:
    """A call of `mask`, before the sample at which it was made."""

    sample: int
    corpus: str
    documents: tuple[int, ...]


def masked_row(plan: StreamPlan, sample: int, calls: list[Call]) -> dict[str, Any]:
    """A row as it must be, token by token, from the row without masks and the documents that it is traced to."""
    row = plan.sample(sample)
    labels = row["labels"].tolist()
    owners = [(piece.corpus, piece.document) for piece in plan.trace(sample) for _ in range(piece.start, piece.stop)]
    hidden = {(call.corpus, one) for call in calls if sample >= call.sample for one in call.documents}
    for place, owner in enumerate(owners):
        target = ("code", CODE.document_of(labels[place])), ("prose", PROSE.document_of(labels[place]))
        if hidden & set(target):
            labels[place] = -100
        if owner in hidden:
            labels[place] = -100
    return {"input_ids": row["input_ids"].tolist(), "labels": labels, "position_ids": row["position_ids"].tolist()}


def rows_of(batches: Iterator[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        int(sample): {key: batch[key][row].tolist() for key in ("input_ids", "labels", "position_ids")}
        for batch in batches
        for row, sample in enumerate(batch["sample_index"])
        if sample >= 0
    }


calls_of_mask = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it
        st.sampled_from(["code", "prose"]),
        st.lists(st.integers(0, 17), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=4,
)


EXAMPLES = itertools.count()


@settings(max_examples=examples(10))
@given(
    history=calls_of_mask,
    num_streams=st.sampled_from([1, 1, 2]),
    compact=st.booleans(),
    kind=st.sampled_from([NumpyLoader, StreamingLoader]),
    ranks=st.lists(st.sampled_from([1, 2, 3]), min_size=4, max_size=4),
    restarts=st.booleans(),
    grows=st.booleans(),
)
def test_exactly_the_labels_of_masked_documents_are_gone_from_the_next_batch_on(
    history: list[Any], num_streams: int, compact: bool, kind: Any, ranks: list[int], restarts: bool, grows: bool
) -> None:
    plan, example = plan_of(num_streams=num_streams), next(EXAMPLES)
    rows: dict[int, dict[str, Any]] = {}
    calls: list[Call] = []
    states: list[Any] = [None]
    for (steps, corpus, documents), size in zip(history, ranks, strict=False):
        after = []
        file = Path(FOLDER.name, f"{example} {corpus}") if grows else file_of(documents)
        if grows:
            with file.open("a") as appended:
                appended.writelines(f"{document}\n" for document in documents)
        for rank in range(size):
            options = {"dp_rank": rank, "dp_world_size": size, "uneven": "pad", "compact": compact}
            with kind(plan.reader(), global_batch_size=4, **options) as loader:
                if states[0] is not None:
                    loader.load_state_dict(states[0])
                first = list(itertools.islice(loader, steps))  # more batches are made ahead
                loader.mask(corpus, file)
                call = Call(loader.cursor.sample, corpus, tuple(documents))
                if restarts:
                    loader.load_state_dict(loader.state_dict())
                first += list(itertools.islice(loader, 2))
                rows |= rows_of(map(expand, first) if compact else iter(first))
                after.append(loader.state_dict())
        assert after == after[:1] * size
        states, calls = after, [*calls, call]
    assert sorted(rows) == list(range(len(rows)))
    for sample, row in rows.items():
        assert row == masked_row(plan, sample, calls), sample
    # and each sample alone, under the last state
    cursor = load_state(plan, states[0])
    for sample in range(0, len(rows) + 20, 3):
        alone = plan.sample(sample, cursor)
        assert {key: alone[key].tolist() for key in rows[0]} == masked_row(plan, sample, calls)


def take(loader: Any, count: int) -> list[dict[str, Any]]:
    return list(itertools.islice(loader, count))


def saved(loader: Any) -> dict[str, Any]:
    return values_of(loader.state_dict())


def test_a_mask_changes_neither_the_order_nor_the_rest_of_the_state() -> None:
    with NumpyLoader(plan_of(), global_batch_size=4) as plain, NumpyLoader(plan_of(), global_batch_size=4) as loader:
        take(plain, 3), take(loader, 3)
        loader.mask("code", file_of([2, 0, 2]))
        before, after = saved(plain), saved(loader)
        (mask,) = after.pop("masks")
        assert after == before
        assert (mask["calls"], mask["name"], mask["file"]) == ([[12, 6]], "code", str(file_of([2, 0, 2])))
        for one, other in zip(take(plain, 9), take(loader, 9), strict=True):
            for key in set(one) - {"labels"}:
                assert np.array_equal(one[key], other[key]), key
            assert {*np.unique(other["labels"][other["labels"] != one["labels"]])} <= {-100}


def test_the_same_documents_once_more_change_nothing() -> None:
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        for _ in range(3):
            take(loader, 1)
            loader.mask("code", file_of([2, 0]))
        assert [mask["calls"] for mask in saved(loader)["masks"]] == [[[4, 4]]]


def test_what_is_masked_is_counted() -> None:
    plan = plan_of()
    with NumpyLoader(plan, global_batch_size=4) as loader:
        take(loader, 2)
        assert (loader.stats()["masked_documents"], loader.stats()["masked_tokens"]) == (0, 0)
        loader.mask("code", file_of([0, 2]))
        loader.mask("code", file_of(range(2, 5)))
        take(loader, 9)
        pieces = [piece for sample in range(8, 44) for piece in plan.trace(sample, loader.cursor)]
        masked = [piece for piece in pieces if piece.corpus == "code" and piece.document in (0, 2, 3, 4)]
        assert [piece for piece in pieces if piece.masked] == masked != []
        assert {piece.masked for piece in masked} == {"labels"}
        stats = loader.stats()
        expected = sum(piece.stop - piece.start for piece in masked)
        assert (stats["masked_documents"], stats["masked_tokens"]) == (4, expected)
        assert not any(piece.masked for sample in range(8) for piece in plan.trace(sample, loader.cursor))


def test_a_dataset_goes_on_with_the_masks_of_a_state() -> None:
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", file_of([2]))
        expected, dataset = loader.state_dict(), StreamDataset(plan_of(), global_batch_size=4)
        dataset.sampler.load_state_dict(expected)
        assert rows_of(iter(take(dataloader(dataset), 5))) == rows_of(iter(take(loader, 5)))
        assert json.loads(iter(dataset.sampler).state_dict()["cursor"])["masks"] == saved(loader)["masks"]


def test_masks_stay_when_corpora_come_and_go() -> None:
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("prose", file_of([0, 1]))
        state = loader.state_dict()
    without = StreamPlan({"code": CODE}, **SIZES)
    with NumpyLoader(without, global_batch_size=4) as loader:
        loader.load_state_dict(state, corpora="plan")
        assert loader.stats()["masked_documents"] == 0
        take(loader, 2)
        state = loader.state_dict()
    back = StreamPlan({"again": PROSE, "code": CODE}, take={"again": 0.9}, **SIZES)
    with NumpyLoader(back, global_batch_size=4) as loader:
        loader.load_state_dict(state, corpora="plan")
        assert loader.stats()["masked_documents"] == 2, "a corpus is known by its content"
        take(loader, 20)
        assert loader.stats()["masked_tokens"] > 0


@pytest.mark.parametrize("kind", ["lines", "npy"])
def test_a_list_is_kept_by_the_hash_of_its_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "opted-out"
    if kind == "lines":
        path.write_text("4\n0\n\n2\n17\n2\n")
    else:
        with path.open("wb") as file:
            np.save(file, np.array([4, 0, 2, 17, 2], np.uint32))
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", path)
        state = loader.state_dict()
        assert str(path) in state["cursor"]
        expected = rows_of(iter(take(loader, 8)))
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.load_state_dict(state)
        assert rows_of(iter(take(loader, 8))) == expected
        assert loader.stats()["masked_documents"] == 4
        path.write_text("4\n0\n2\n16\n")
        with pytest.raises(
            PlanMismatchError, match=r"listed in .*opted-out.* was changed: the SHA-256 of its first .* bytes is"
        ) as refused:
            loader.load_state_dict(state)
        assert "put the file of that run back" in str(refused.value.hint)
        path.unlink()
        with pytest.raises(PlanMismatchError, match="opted-out cannot be read: No such file"):
            loader.load_state_dict(state)


def test_a_state_does_not_grow_with_the_documents_of_a_list() -> None:
    many = Source([2] * 200_000)
    documents = np.random.default_rng(0).choice(200_000, 10_000, replace=False)
    with NumpyLoader(StreamPlan(many, **SIZES), global_batch_size=4) as loader:
        loader.mask("corpus", file_of(documents.tolist()))
        state = loader.state_dict()
        assert len(state["cursor"]) < 1_500
        loader.load_state_dict(state)
        assert loader.stats()["masked_documents"] == 10_000


# lists that grow


def test_what_is_appended_to_a_list_is_masked_from_the_next_call_on_and_resumes_so(tmp_path: Path) -> None:
    path, plan = tmp_path / "opted-out", plan_of()
    path.write_text("4\n0\n")
    with NumpyLoader(plan, global_batch_size=4) as loader:
        loader.mask("code", path)
        rows = rows_of(iter(take(loader, 5)))
        for added in ("2\n17\n", "", "4\n\n5\n"):  # 4 is in the list already
            with path.open("a") as file:
                file.write(added)
            loader.mask("code", path)
            rows |= rows_of(iter(take(loader, 5)))
        calls = [Call(0, "code", (4, 0)), Call(20, "code", (2, 17)), Call(60, "code", (5,))]
        (mask,) = saved(loader)["masks"]
        assert mask["calls"] == [[0, 4], [20, 9], [60, 14]]
        assert loader.stats()["masked_documents"] == 5
        state = loader.state_dict()
    with path.open("a") as file:
        file.write("8\n")  # which no call has counted
    with NumpyLoader(plan, global_batch_size=4) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        rows |= rows_of(iter(take(loader, 5)))
        for sample, row in rows.items():
            assert row == masked_row(plan, sample, calls), sample
            alone = plan.sample(sample, loader.cursor)
            assert alone["labels"].tolist() == row["labels"], sample
        loader.mask("code", path)
        assert loader.stats()["masked_documents"] == 6
        before = loader.state_dict()
        for content in ("4\n0\n2\n17\n4\n\n5", "4\n1\n2\n17\n4\n\n5\n8\n9\n", "9\n4\n0\n2\n17\n4\n\n5\n8\n"):
            path.write_text(content)
            with pytest.raises(
                PlanError,
                match=r"opted-out, which lists documents that the run masks .* has other changes than appended lines",
            ):
                loader.mask("code", path)
            assert loader.state_dict() == before
            with pytest.raises(PlanMismatchError, match=r"listed in .*opted-out.* was changed"):
                loader.load_state_dict(state if len(content) > 14 else before)


def test_a_list_that_moved_is_found_if_it_is_masked_at_its_new_place_before_the_state_is_loaded(tmp_path: Path) -> None:
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other"
    old.write_text("4\n0\n")
    other.write_text("9\n")
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", old)
        state = loader.state_dict()
        expected = rows_of(iter(take(loader, 8)))
    old.rename(new)
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", other)
        with pytest.raises(PlanMismatchError, match=r"other is another file") as caught:
            loader.load_state_dict(state)
        assert f"4 bytes of SHA-256 {hashlib.sha256(new.read_bytes()).hexdigest()}" in caught.value.problem
        for way in ("loader.mask('code', FILE) before load_state_dict", "data.mask of a recipe", "trace --mask FILE"):
            assert way in caught.value.hint
        with new.open("a") as file:
            file.write("2\n")  # of what grew, the part that counts is found
        loader.mask("code", new)
        loader.load_state_dict(state)
        assert rows_of(iter(take(loader, 8))) == expected
        assert [mask["file"] for mask in saved(loader)["masks"]] == [str(new)]


@pytest.mark.parametrize("content", ["4\r\n0\r\n\r\n2\r\n", "4\n0\n002"])
def test_a_list_has_digits_in_lines_of_any_system(tmp_path: Path, content: str) -> None:
    (tmp_path / "list").write_bytes(content.encode())
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", tmp_path / "list")
        assert loader.stats()["masked_documents"] == 3


@pytest.mark.parametrize("line", ["+7", " 7", "7 ", "1_0", "\u0663", "7\r8", '{"document": 7}', "-5"])
def test_what_is_not_digits_alone_is_refused_with_the_way_for_other_lists(tmp_path: Path, line: str) -> None:
    (tmp_path / "list").write_text(f"3\n{line}\n", encoding="utf-8", newline="")
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        with pytest.raises(PlanError, match="expected digits") as caught:
            loader.mask("code", tmp_path / "list")
        assert "ids_file=" in caught.value.hint


def test_a_negative_number_in_an_array_is_refused_with_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "list.npy", np.array([3, -5]))
    with (
        NumpyLoader(plan_of(), global_batch_size=4) as loader,
        pytest.raises(PlanError, match=r"list\.npy lists document -5 of corpus 'code'"),
    ):
        loader.mask("code", tmp_path / "list.npy")


def test_a_document_of_two_lists_is_masked_from_the_earlier_one_on_also_if_that_list_grows_later(
    tmp_path: Path,
) -> None:
    plan, lists = plan_of(), [tmp_path / "first", tmp_path / "second"]
    with NumpyLoader(plan, global_batch_size=4) as loader:
        rows: dict[int, dict[str, Any]] = {}
        for number, documents in ((0, "2\n4\n"), (1, "4\n2\n5\n"), (0, "17\n")):
            with lists[number].open("a") as file:
                file.write(documents)
            loader.mask("code", lists[number])
            rows |= rows_of(iter(take(loader, 10)))
        calls = [Call(0, "code", (2, 4)), Call(40, "code", (5,)), Call(80, "code", (17,))]
        for sample, row in rows.items():
            assert row == masked_row(plan, sample, calls), sample
            assert plan.sample(sample, loader.cursor)["labels"].tolist() == row["labels"], sample


def test_a_number_that_got_more_digits_is_a_change_of_the_list(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("4\n1")
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", path)
        for content in ("4\n12\n", "4\n1\n2\n"):
            path.write_text(content)
            with pytest.raises(PlanError, match="has grown, but its last line had no line end"):
                loader.mask("code", path)


def test_an_array_cannot_grow(tmp_path: Path) -> None:
    path = tmp_path / "list.npy"
    np.save(path, np.array([4, 0]))
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", path)
        state = loader.state_dict()
        with path.open("ab") as file:
            file.write(b"2\n")
        with pytest.raises(PlanError, match="has other changes than appended lines"):
            loader.mask("code", path)
        with pytest.raises(PlanMismatchError, match=r"listed in .*list\.npy.* was changed"):
            loader.load_state_dict(state)


def test_one_list_may_grow_for_two_corpora(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("4\n")
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", path)
        take(loader, 1)
        path.write_text("4\n5\n")
        loader.mask("prose", path)
        take(loader, 1)
        loader.mask("code", path)
        found = {mask["name"]: mask["calls"] for mask in saved(loader)["masks"]}
        assert found == {"prose": [[4, 4]], "code": [[0, 2], [8, 4]]}
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert loader.state_dict() == state


@pytest.mark.slow
def test_a_state_stays_small_however_often_a_list_grows(tmp_path: Path) -> None:
    plan, path, gaps = StreamPlan({"code": Source([2] * 1_000)}, **SIZES), tmp_path / "list", random.Random(1)
    with NumpyLoader(plan, global_batch_size=4) as loader, path.open("a") as file:
        for _ in range(300):
            loader._walk.cursor = loader.cursor.advanced(4 * gaps.randrange(1, 500))  # as a loop does
            file.writelines(f"{gaps.randrange(1_000)}\n" for _ in range(gaps.choice([1, 1, 2, 20])))
            file.flush()
            loader.mask("code", path)
        state, cursor = loader.state_dict(), loader.cursor
        assert len(state["cursor"]) < 2_048
        (mask,) = cursor.masks
        assert len(mask.calls) == 300
    with NumpyLoader(plan, global_batch_size=4) as loader:
        loader.load_state_dict(state)
        assert loader.cursor == cursor
        (loaded,) = loader.cursor.masks
        assert np.array_equal(loaded.documents, mask.documents)
        assert np.array_equal(loaded.since, mask.since)
        calls = [*values_of(state)["masks"]]
        for bad in ("AAAA", calls[0]["calls"][:-8], calls[0]["calls"] * 2):
            with pytest.raises(PlanMismatchError, match="the state is damaged"):
                loader.load_state_dict(edited(state, masks=[{**calls[0], "calls": bad}]))


# files that are none


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "large", "empty without end"])
def test_what_is_no_file_of_a_sensible_size_is_refused_before_it_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "list"
    path.write_text("1\n")
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", path)
        state = loader.state_dict()
        path.unlink()
        match kind:
            case "device":
                path.symlink_to("/dev/zero")
                problem = "list cannot be read: not a regular file"
            case "pipe":
                os.mkfifo(path)
                problem = "list cannot be read: not a regular file"
            case "folder":
                path.mkdir()
                problem = "list cannot be read: Is a directory"
            case "large":
                with path.open("wb") as file:
                    file.truncate((1 << 30) + 1)
                problem = "list has 1073741825 bytes, expected at most 1073741824"
            case _:
                path.symlink_to("/proc/kmsg")
                problem = "was changed|list has no documents"
        with pytest.raises(PlanMismatchError, match=problem):
            loader.load_state_dict(state)
        with pytest.raises(PlanError, match=problem if kind == "large" or "cannot" in problem else "has other changes"):
            loader.mask("code", path)
        with NumpyLoader(plan_of(), global_batch_size=4) as other, pytest.raises(PlanError, match=problem):
            other.mask("code", path)


@pytest.mark.parametrize(
    ("corpus", "documents", "problem"),
    [
        ("cod", [1], "no corpus 'cod'"),
        ("code", [54], "lists a document that is not in corpus 'code'"),
        ("code", [-1], "'-1', expected digits"),
        ("code", [], "no documents"),
        ("code", [1.5], "is not a list of documents"),
        ("code", np.array(3), r"array\(3\) is not a file of document numbers"),
        ("code", 5, "5 is not a file of document numbers"),
        ("code", {1}, r"\{1\} is not a file of document numbers"),
        ("code", [2**70], "expected document numbers|not a list"),
        ("code", "nowhere.txt", "nowhere.txt cannot be read"),
        ("code", "no\0where.txt", "cannot be read: no path has a zero byte"),
    ],
)
def test_what_is_not_a_list_of_documents_is_refused_and_changes_nothing(
    corpus: str, documents: Any, problem: str
) -> None:
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        before = loader.state_dict()
        with pytest.raises(PlanError, match=problem):
            loader.mask(corpus, file_of(documents) if isinstance(documents, list) else documents)
        assert loader.state_dict() == before


@pytest.mark.parametrize("number", [3, 3.5, True])
def test_an_array_of_one_number_without_a_dimension_is_not_a_list_of_documents(tmp_path: Path, number: Any) -> None:
    np.save(tmp_path / "one.npy", np.array(number))
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        with pytest.raises(PlanError, match=r"one\.npy is not a list of documents"):
            loader.mask("code", tmp_path / "one.npy")
        assert "masks" not in saved(loader)


@pytest.mark.parametrize("shape", [b"(3, ", b"(3999999999999,)", b"(x,)"])
def test_an_array_whose_header_is_damaged_is_not_a_list_of_documents(tmp_path: Path, shape: bytes) -> None:
    np.save(tmp_path / "torn.npy", np.arange(3))
    content = (tmp_path / "torn.npy").read_bytes()
    old = b"(3,), }".ljust(len(shape) + 3)  # the header has spaces at its end
    assert old in content
    (tmp_path / "torn.npy").write_bytes(content.replace(old, shape + b", }"))
    with (
        NumpyLoader(plan_of(), global_batch_size=4) as loader,
        pytest.raises(PlanError, match=r"torn\.npy is not a list") as caught,
    ):
        loader.mask("code", tmp_path / "torn.npy")
    assert " object at " not in caught.value.problem


@pytest.mark.parametrize("content", [b"1\ntwo\n", b"\x93NUMPY\x01\x00damaged", b"", b"1.5\n"])
def test_a_file_that_is_not_a_list_of_documents_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "list"
    path.write_bytes(content)
    with NumpyLoader(plan_of(), global_batch_size=4) as loader, pytest.raises(PlanError, match="list"):
        loader.mask("code", path)


@pytest.mark.parametrize(
    "change",
    [
        {"calls": [[99, 4]]},
        {"calls": [["0", 4]]},
        {"calls": [[0, 0]]},
        {"calls": []},
        {"calls": [[0, 2], [0, 4]]},
        {"calls": "AAAA"},
        {"sha256": "0"},
        {"name": ...},
        {"file": ...},
    ],
)
def test_a_damaged_mask_is_refused(change: dict[str, Any]) -> None:
    with NumpyLoader(plan_of(), global_batch_size=4) as loader:
        loader.mask("code", file_of([1, 2]))
        mask = {**saved(loader)["masks"][0], **change}
        masks = [{key: value for key, value in mask.items() if value is not ...}]
        with pytest.raises(PlanMismatchError, match="damaged"):
            loader.load_state_dict(edited(loader.state_dict(), masks=masks))


def test_transforms_that_keep_pieces_are_masked_and_others_refused() -> None:
    fim = FillInTheMiddle(prefix_id=70_001, middle_id=70_002, suffix_id=70_003, rate=0.7)
    longer = {"seq_len": 16, "block_tokens": 64}
    plain, documents = plan_of(transforms=[fim], **longer), [2, 8, 14, 20]
    with NumpyLoader(plan_of(transforms=[fim], **longer), global_batch_size=4) as loader:
        loader.mask("code", file_of(documents))
        cursor = loader.cursor
        found = rows_of(iter(take(loader, 8)))
    num_masked = num_changed = 0
    for sample, row in found.items():
        expected = plain.sample(sample)
        pieces = plain.trace(sample)
        hidden = [
            piece.document in documents and piece.corpus == "code"
            for piece in pieces
            for _ in range(piece.start, piece.stop)
        ]
        num_masked += sum(hidden)
        num_changed += row["input_ids"] != plan_of(**longer).sample(sample)["input_ids"].tolist() and not any(hidden)
        assert row["labels"] == np.where(hidden, -100, expected["labels"]).tolist()
        assert row["input_ids"] == expected["input_ids"].tolist()
    assert num_masked > 0
    assert num_changed > 0
    other = plan_of(transforms=[joined], **longer)
    traces = {one: plain.trace(one, cursor) for one in range(40)}
    (sample, *_) = [one for one, pieces in traces.items() if len(pieces) > 1 and any(p.masked for p in pieces)]
    with pytest.raises(PlanError, match=f"a transform changed the pieces of sample {sample}, which has a masked"):
        other.sample(sample, cursor)


def joined(sample: Any, random: Any) -> Any:
    """All pieces as one."""
    from tokshard.runtime import Sample

    size = len(sample.tokens)
    return Sample(tokens=sample.tokens, piece_lengths=np.array([size]), next_tokens=np.array([-100]))


def test_another_pass_over_a_finite_plan_keeps_what_was_masked_in_the_one_before() -> None:
    plan = StreamPlan({"code": CODE}, epochs=1, **SIZES)
    with NumpyLoader(plan, global_batch_size=4) as loader:
        take(loader, 8)
        loader.mask("code", file_of([4]))
        first, second = rows_of(iter(loader)), rows_of(iter(loader))
        assert min(first) == 32
        assert len(second) == plan.num_samples
        cursor, state = loader.cursor, loader.state_dict()
    masked = [sample for sample in second if any(piece.document == 4 for piece in plan.trace(sample))]
    assert min(masked) < 32 < max(masked), "some of it was read before it was masked, and some is read after"
    for sample, row in second.items():
        hidden = [piece.document == 4 for piece in plan.trace(sample) for _ in range(piece.start, piece.stop)]
        labels = plan.sample(sample)["labels"]
        assert row["labels"] == np.where(hidden + [False] * (6 - len(hidden)), -100, labels).tolist()
        assert row["labels"] == plan.sample(sample, cursor)["labels"].tolist()
    dataset = StreamDataset(plan, global_batch_size=4)
    dataset.sampler.load_state_dict(state)  # at the end of a pass
    with pytest.warns(UserWarning, match="was over where this loader begins"):
        assert not list(dataloader(dataset))
    assert rows_of(iter(dataloader(dataset))) == second


# lists of ids


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A corpus with ids: document 3 has the id d3."""
    folder = tmp_path / "corpus"
    documents = documents_of([5, 9, 4, 30, 12, 3] * 9)
    source = WrittenSource(documents=documents, metadata={"id": [f"d{number}" for number in range(len(documents))]})
    write_corpus(folder, sources=[source], columns={"id": "string"}, shard_tokens=90, tokenizer=TINY_TOKENIZER)
    return str(folder)


def loader_of(corpus: str, **options: Any) -> NumpyLoader:
    return NumpyLoader(StreamPlan({"code": corpus}, **SIZES), global_batch_size=4, **options)


def test_a_list_of_ids_masks_what_their_numbers_mask_and_the_numbers_are_found_once(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_ids, by_numbers = tmp_path / "gone.jsonl", tmp_path / "numbers.txt"
    by_ids.write_text("".join(f'{{"id": "{name}", "reason": "x"}}\n' for name in ("d33", "d3", "nobody", "d3", "d10")))
    by_numbers.write_text("3\n10\n33\n")
    expected, found = loader_of(corpus), loader_of(corpus)
    expected.mask("code", by_numbers)
    with pytest.warns(UserWarning, match=r"1 row of .*gone\.jsonl names no document of corpus 'code': nobody$"):
        found.mask("code", ids_file=by_ids)
    assert found.stats()["masked_documents"] == 3
    for one, other in itertools.islice(zip(expected, found, strict=True), 60):
        assert (one["labels"] == other["labels"]).all()
    (written,) = tmp_path.glob("gone.jsonl.*.numbers")
    assert written.read_text() == by_numbers.read_text()
    state = found.state_dict()
    assert values_of(state)["masks"][0]["file"] == str(written)
    monkeypatch.setattr("tokshard.runtime.bytes.listed.find_listed", None)  # not called again
    again = loader_of(corpus)
    again.load_state_dict(state)
    again.mask("code", ids_file=by_ids)
    assert again.state_dict() == state
    written.unlink()
    with pytest.raises(PlanMismatchError, match="cannot be read: No such file"):
        loader_of(corpus).load_state_dict(state)


def test_a_list_of_ids_that_grew_masks_more_and_one_without_documents_of_the_corpus_masks_nothing(
    corpus: str, tmp_path: Path
) -> None:
    ids, others = tmp_path / "gone.txt", tmp_path / "others.txt"
    ids.write_text("d3\n")
    others.write_text("x\ny\n")
    loader = loader_of(corpus)
    loader.mask("code", ids_file=ids)
    next(iter(loader))
    ids.write_text("d3\nd4\n")
    loader.mask("code", ids_file=ids)
    for _ in range(2):
        loader.mask("code", ids_file=ids)
    calls = [mask.calls[0][0] for mask in loader.cursor.masks]
    assert (calls, loader.stats()["masked_documents"]) == ([0, 4], 2)
    state = loader.state_dict()
    with pytest.warns(UserWarning, match="2 rows of"):
        loader.mask("code", ids_file=others)
    loader.mask("code", ids_file=others)
    assert loader.state_dict() == state


def test_a_mix_names_lists_of_ids_and_of_numbers_which_trace_reads_and_a_plan_refuses(
    corpus: str, tmp_path: Path
) -> None:
    for name, text in (("gone.csv", "id,why\nd3,x\nd10,y\n"), ("numbers.txt", "5\n")):
        (tmp_path / name).write_text(text)
    sizes = "".join(f"{name} = {value}\n" for name, value in SIZES.items())
    mix = tmp_path / "mix.toml"
    lists = 'mask = { code = ["numbers.txt"] }\nmask_ids = { code = ["gone.csv"] }\n'
    mix.write_text(f'corpora = {{ code = "corpus" }}\nglobal_batch_size = 4\n{sizes}{lists}')
    cursor = open_run(str(mix), {}).cursor
    assert [mask.documents.tolist() for mask in cursor.masks] == [[5], [3, 10]]
    with pytest.raises(PlanError, match="has a mask"):
        StreamPlan.load(mix)


def test_what_is_no_list_of_ids_for_this_corpus_is_refused_and_nothing_is_masked(corpus: str, tmp_path: Path) -> None:
    ids = tmp_path / "gone.txt"
    ids.write_text("d3\n")
    loader = loader_of(corpus)
    for arguments in ({}, {"file": ids, "ids_file": ids}):
        with pytest.raises(PlanError, match="mask needs one list"):
            loader.mask("code", **arguments)
    with pytest.raises(PlanError, match=r"none\.txt cannot be read: No such file"):
        loader.mask("code", ids_file=tmp_path / "none.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanError, match="cannot be read"):
        loader.mask("code", ids_file=tmp_path / "pipe")
    plain = tmp_path / "plain"
    write_corpus(plain, documents_of([5, 6, 7] * 30), tokenizer=TINY_TOKENIZER)
    with pytest.raises(PlanError, match="no corpus has a column 'id'"):
        loader_of(str(plain)).mask("code", ids_file=ids)
    with (
        NumpyLoader(plan_of(), global_batch_size=4) as other,
        pytest.raises(PlanError, match="is not a corpus on disk"),
    ):
        other.mask("code", ids_file=ids)
    assert not loader.cursor.masks


def test_a_list_of_ids_where_nothing_can_be_written_is_refused_with_the_command_that_writes_elsewhere(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tmp_path / "gone.txt"
    ids.write_text("d3\n")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")  # root may write everywhere

    monkeypatch.setattr("tokshard.store.posix.PosixStore.put", refuse)
    with pytest.raises(PlanError, match=r"cannot be written next to it: Permission denied") as error:
        loader_of(corpus).mask("code", ids_file=ids)
    assert "tokshard scan CORPUS --ids FILE --numbers OUT" in error.value.hint
