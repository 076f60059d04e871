"""Documents that are taken out of the loss in mid-run: exactly their labels, from exactly this batch on, on record.

What is refused as a list of documents, whatever the run: test_refusals.py. Masks that are damaged: test_state.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.loaders import resumed, take
from tests.runtime.sources import ListSource
from tests.runtime.states import values_of
from tests.runtime.transforms import reverse
from tokshard.errors import PlanError, PlanMismatchError
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.rows.masks import MaskedStretches
from tokshard.runtime.state import load_state, save_state

SIZES: dict[str, Any] = {"seq_len": 6, "block_tokens": 24, "window_blocks": 3, "seed": 4}
CODE = ListSource([9, 4, 30, 1, 12, 3] * 9)
PROSE = ListSource([5, 17, 2] * 6, first_token=5_000)


def plan_of(**options: Any) -> StreamPlan:
    return StreamPlan({"code": CODE, "prose": PROSE}, **{"weights": {"code": 0.7, "prose": 0.3}, **SIZES, **options})


def loader_of(plan: StreamPlan | None = None) -> NumpyLoader:
    return NumpyLoader(plan or plan_of(), global_batch_size=4, prefetch_factor=0)


def masks_of(loader: NumpyLoader) -> list[dict[str, Any]]:
    return values_of(loader.state_dict()).get("masks", [])


def test_another_pass_over_a_finite_plan_keeps_what_was_masked_in_the_one_before(tmp_path: Path) -> None:
    loader = loader_of(StreamPlan({"code": CODE}, epochs=1, **SIZES))
    (tmp_path / "list").write_text("8\n")  # 30 tokens
    take(loader, 8)
    loader.mask("code", tmp_path / "list")
    for _ in range(2):
        labels = {label for batch in loader for label in batch["labels"].ravel().tolist()}
    assert labels & {*CODE.documents()[8][1:-1]} == set()
    assert labels > {*CODE.documents()[7][1:-1]}


def test_what_is_masked_is_counted_and_traced(tmp_path: Path) -> None:
    plan = plan_of()
    loader = loader_of(plan)
    for number, documents in enumerate(([0, 2], [2, 3, 4])):
        (tmp_path / str(number)).write_text("".join(f"{document}\n" for document in documents))
    take(loader, 2)
    assert (loader.stats()["masked_documents"], loader.stats()["masked_tokens"]) == (0, 0)
    for number in (0, 1, 0):  # the same list once more changes nothing
        loader.mask("code", tmp_path / str(number))
    assert [mask["calls"] for mask in masks_of(loader)] == [[[8, 4]], [[8, 6]]]
    take(loader, 9)
    pieces = [piece for sample in range(8, 44) for piece in plan.trace(sample, loader.cursor)]
    masked = [piece for piece in pieces if piece.corpus == "code" and piece.document in (0, 2, 3, 4)]
    assert [piece for piece in pieces if piece.masked] == masked != []
    assert {piece.masked for piece in masked} == {"labels"}
    expected = sum(piece.stop - piece.start for piece in masked)
    assert (loader.stats()["masked_documents"], loader.stats()["masked_tokens"]) == (4, expected)
    assert not any(piece.masked for sample in range(8) for piece in plan.trace(sample, loader.cursor))


def test_a_plan_without_the_corpus_of_a_mask_is_told_that_others_may_have_its_documents(tmp_path: Path) -> None:
    loader = loader_of()
    (tmp_path / "list").write_text("4\n0\n")
    loader.mask("code", tmp_path / "list")
    plan = StreamPlan({"code": ListSource([9, 30, 1] * 9), "prose": PROSE}, **SIZES)
    with pytest.warns(UserWarning, match=r"masks 2 documents of corpus 'code', listed in .*/list, .*no longer has"):
        found = resumed(plan, loader.state_dict(), corpora="plan")
    resumed(plan, found.state_dict())  # it is said once
    resumed(plan_of(weights={"code": 0.1, "prose": 0.9}), loader.state_dict(), weights="plan")


@pytest.mark.parametrize("content", [b"4\r\n0\r\n\r\n2\r\n4\r\n", b"4\n0\n002", np.array([4, 0, 2, 4], np.uint32)])
def test_a_list_has_digits_in_lines_of_any_system_or_is_an_array(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "list.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    loader = loader_of()
    loader.mask("code", path)
    assert loader.cursor.masks[0].documents.tolist() == [0, 2, 4]
    again = resumed(plan_of(), loader.state_dict())
    assert again.cursor == loader.cursor
    assert again.stats()["masked_documents"] == 3


# lists that changed since

CHANGED = r"list, which lists documents that the run masks in corpus 'code' already, has other changes than appended"
GREW = "has grown, but its last line had no line end when it was masked"
OTHER = r"list was changed: the SHA-256 of its first .* bytes is"


def to(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("before", "change", "on_mask", "on_load"),
    [
        (b"4\n0\n", to(b"4\n"), CHANGED, OTHER),
        (b"4\n0\n", to(b"4\n1\n"), CHANGED, OTHER),
        (b"4\n0\n", to(b"9\n4\n0\n"), CHANGED, OTHER),
        (b"4\n1", to(b"4\n12\n"), GREW, ""),  # what was masked is still there
        (b"4\n1", to(b"4\n1\n2\n"), GREW, ""),
        (np.array([4, 0]), to(b"2\n"), CHANGED, OTHER),
        (np.array([4, 0]), lambda path: to(path.read_bytes() + b"2\n")(path), CHANGED, OTHER),
        (b"4\n", to(b""), "", OTHER),
        (b"4\n", Path.unlink, "", "list .*No such file or directory"),
        (b"4\n", lambda path: [path.unlink(), path.mkdir()], "", "list .*Is a directory"),
        (b"4\n", lambda path: [path.unlink(), path.symlink_to("/dev/zero")], "", "list .*not a regular file"),
    ],
)
def test_other_changes_of_a_list_than_appended_lines_are_refused(
    tmp_path: Path, before: Any, change: Callable[[Path], Any], on_mask: str, on_load: str
) -> None:
    path = tmp_path / "list"
    with path.open("wb") as file:
        file.write(before) if isinstance(before, bytes) else np.save(file, before)
    loader = loader_of()
    loader.mask("code", path)
    state = loader.state_dict()
    change(path)
    if on_mask:
        with pytest.raises(PlanError, match=on_mask) as refused:
            loader.mask("code", path)
        assert "append lines only" in refused.value.hint
        assert loader.state_dict() == state
    if on_load:
        with pytest.raises(PlanMismatchError, match=on_load) as caught:
            loader.load_state_dict(state)
        assert on_load != OTHER or "put the file of that run back" in caught.value.hint


def test_a_list_that_moved_is_found_if_it_is_masked_at_its_new_place_before_the_state_is_loaded(tmp_path: Path) -> None:
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other"
    old.write_text("4\n0\n")
    other.write_text("9\n")
    loader, moved = loader_of(), loader_of()
    loader.mask("code", old)
    state, expected = loader.state_dict(), take(loader, 8)
    old.rename(new)
    moved.mask("code", other)
    with pytest.raises(PlanMismatchError, match=r"4 bytes of SHA-256 [0-9a-f]{64}: .*other is another file") as caught:
        moved.load_state_dict(state)
    for way in ("loader.mask('code', FILE) before load_state_dict", "data.mask of a recipe", "trace --mask FILE"):
        assert way in caught.value.hint
    with new.open("a") as file:
        file.write("2\n")  # of what grew, the part that counts is found
    moved.mask("code", new)
    with pytest.warns(UserWarning, match=r"/other and .*/new were masked before the state was loaded"):
        moved.load_state_dict(state)
    moved.load_state_dict(state)  # nothing else is masked now
    assert [batch["labels"].tolist() for batch in take(moved, 8)] == [batch["labels"].tolist() for batch in expected]
    assert [mask["file"] for mask in masks_of(moved)] == [str(new)]


def test_a_state_has_few_bytes_for_each_call_however_much_a_list_has(tmp_path: Path) -> None:
    path, gaps = tmp_path / "list", random.Random(1)
    plan = StreamPlan({"code": ListSource([2] * 4_000)}, **SIZES)
    cursor = plan.cursor()
    for _ in range(300):
        with path.open("a") as file:
            file.writelines(f"{gaps.randrange(4_000)}\n" for _ in range(gaps.choice([1, 1, 2, 20])))
        cursor = plan.masking(cursor.advanced(4 * gaps.randrange(1, 500)), "code", path)
    state = save_state(plan, cursor)
    assert len(state["cursor"]) < 1_024 + 16 * 300
    loaded = load_state(plan, state)
    assert loaded == cursor
    assert len(loaded.masks[0].calls) == 300
    for name in ("documents", "since"):
        assert np.array_equal(getattr(loaded.masks[0], name), getattr(cursor.masks[0], name))


def test_a_transform_that_changes_the_pieces_of_a_row_with_a_masked_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("".join(f"{document}\n" for document in range(54)))
    plan = plan_of(transforms=[reverse])
    loader = loader_of(plan)
    loader.mask("code", tmp_path / "list")
    several = [one for one in range(40) if len(plan.trace(one)) > 1 and plan.trace(one)[0].corpus == "code"]
    with pytest.raises(PlanError, match=f"a transform changed the pieces of sample {several[0]}, which has a masked"):
        plan.sample(several[0], loader.cursor)


@pytest.mark.parametrize("num_tokens", [None, 1 << 20, 1 << 40])
@pytest.mark.parametrize("lengths", [[1] * 40 + [5000], [7, 1, 30], [1000]], ids=["many in one part", "mixed", "long"])
def test_a_masked_document_is_found_at_each_of_its_tokens_however_close_they_lie(
    num_tokens: int | None, lengths: list[int]
) -> None:
    rng = np.random.default_rng(1)
    stops = np.cumsum(rng.permutation(lengths * 20))
    starts, is_masked = np.concatenate([[0], stops[:-1]]), rng.random(len(stops)) < 0.5
    is_masked[-1] = True
    since, num_tokens = rng.integers(0, 3, len(stops)), num_tokens or int(stops[-1])
    stretches = MaskedStretches(
        starts=starts[is_masked], stops=stops[is_masked], since=since[is_masked], num_tokens=num_tokens
    )
    positions = np.append(rng.integers(0, stops[-1], 500), num_tokens - 1)
    document = np.searchsorted(stops, positions, "right")
    for sample in range(3):
        expected = np.append(is_masked, False)[document] & (np.append(since, 0)[document] <= sample)
        assert np.array_equal(stretches.cover(positions, np.full(len(positions), sample)), expected)
