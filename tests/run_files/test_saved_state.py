"""A checkpoint is read without executing anything that is in it."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from tests.contract.test_promise_11_no_code_from_data import Hostile
from tests.runtime.sources import ListSource
from tokshard.errors import LoaderError, UsageError
from tokshard.run_files.saved_state import read_state
from tokshard.run_files.torch_checkpoints import load_checkpoint, read_metadata
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def cursor() -> dict[str, Any]:
    return StreamingLoader(StreamPlan({"one": ListSource([50])}, seq_len=4), global_batch_size=3).state_dict()


def saved(directory: Path, **values: Any) -> str:
    save({"loader": cursor(), "weight": torch.arange(6).reshape(2, 3), **values}, checkpoint_id=directory, no_dist=True)
    return str(directory)


def test_the_index_is_the_one_that_torch_reads(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", half=torch.ones(3, dtype=torch.bfloat16), scalar=torch.tensor(1.0))
    ours, torchs = read_metadata(path), FileSystemReader(path).read_metadata()
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert ours.storage_data == torchs.storage_data
    assert ours.version == torchs.version


def test_a_checkpoint_loads_as_it_does_with_torch(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", list=[1, "two"])
    state: dict[str, Any] = {"weight": torch.zeros(2, 3, dtype=torch.int64), "list": None, "loader.cursor": None}
    load_checkpoint(state, path, no_dist=True)
    assert torch.equal(state["weight"], torch.arange(6).reshape(2, 3))
    assert state["list"] == [1, "two"]
    assert state["loader.cursor"] == cursor()["cursor"] == read_state(path).cursor


def index_that_executes(index: Any, ran: Path) -> bytes:
    index.planner_data = Hostile(ran)
    return pickle.dumps(index)


def index_that_leads_outside(index: Any, _: Path) -> bytes:
    for info in index.storage_data.values():
        info.relative_path = "../" + info.relative_path
    return pickle.dumps(index)


def index_of_an_extension(index: Any, _: Path) -> bytes:
    for info in index.storage_data.values():
        info.transform_descriptors = ["zstd"]
    return pickle.dumps(index)


def index_that_changes_the_classes_of_torch(_: Any, __: Path) -> bytes:
    name = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    return b"\x80\x02c" + name + b"N}U\x07versionU\x03badds\x86b."  # BUILD on the class


def index_that_calls(module: str, name: str) -> Callable[[Any, Path], bytes]:
    def index(_: Any, ran: Path) -> bytes:
        words = [
            pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name, f"mkdir {ran}")
        ]
        ends = pickle.STACK_GLOBAL, words[2], pickle.TUPLE1, pickle.REDUCE, pickle.STOP
        return pickle.PROTO + b"\x04" + words[0] + words[1] + b"".join(ends)

    return index


def lists_of_lists() -> Any:
    """As much text as 10**40 lists, in 894 bytes."""
    found: Any = []
    for _ in range(40):
        found = [found] * 10
    return found


def index_of_lists(place: str) -> Callable[[Any, Path], bytes]:
    def index(whole: Any, _: Path) -> bytes:
        if place == "entries":
            whole.state_dict_metadata = lists_of_lists()
        elif place == "entry":
            whole.state_dict_metadata["weight"].size = lists_of_lists()
        return pickle.dumps(lists_of_lists() if place == "whole" else whole)

    return index


def index_of_tuples(made: bytes, tuples: bytes) -> Callable[[Any, Path], bytes]:
    """Tuples within tuples for names: their hash would take years, or overflow the stack."""
    return lambda *_: b"\x80\x04" + made % (b")" + tuples) + b"."


METADATA = "torch.distributed.checkpoint.metadata"
REACHED = {"torch": "load", "torch.serialization": "load", "builtins": "getattr", "pathlib.os": "system"}
TUPLES = {"wide": (b"q\x000(" + b"h\x00" * 10 + b"t") * 40, "deep": b"\x85" * 200_000}
"""Opcodes of pickle that replace what was made last by a tuple of ten of it, or of it alone."""
NAMED = {
    "SETITEM": b"}%bNs",
    "SETITEMS": b"}(%bNu",
    "DICT": b"(%bNd",
    "ADDITEMS": b"\x8f(%b\x90",
    "FROZENSET": b"(%b\x91",
}
INDEXES: dict[str, tuple[Callable[[Any, Path], bytes], str]] = {
    "executes": (index_that_executes, "it names posix.mkdir"),
    "leads outside": (index_that_leads_outside, "is outside the checkpoint"),
    "is of an extension": (index_of_an_extension, "was written through an extension of torch"),
    "has a name without a value": (lambda *_: b"\x80\x04}(X\x01\x00\x00\x00au.", "is shorter than"),
    "claims a petabyte": (lambda *_: b"\x80\x05\x96" + (1 << 50).to_bytes(8, "little"), "150"),  # an unknown opcode
    "changes the classes of torch": (index_that_changes_the_classes_of_torch, ""),
    **{f"calls {module}.{name}": (index_that_calls(module, name), "") for module, name in REACHED.items()},
    **{f"calls {name}": (index_that_calls(METADATA, name), "") for name in ("Metadata.__init__", "dataclass")},
    **{f"lists for the {place}": (index_of_lists(place), "") for place in ("whole", "entries", "entry")},
    **{
        f"{size} tuples for names, by {name}": (index_of_tuples(made, tuples), "")
        for name, made in NAMED.items()
        for size, tuples in TUPLES.items()
    },
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_of_anything_else_is_refused_at_once_and_executes_and_reaches_nothing(
    tmp_path: Path, kind: str
) -> None:
    path, ran = saved(tmp_path / "ck"), tmp_path / "executed"
    index, (make, problem) = FileSystemReader(path).read_metadata(), INDEXES[kind]
    (Path(path) / ".metadata").write_bytes(make(index, ran))
    for read in (read_state, read_metadata, lambda path: load_checkpoint({}, path, no_dist=True)):
        with pytest.raises(LoaderError, match=rf"\.metadata is not the index of a checkpoint: .*{problem}"):
            read(path)
    assert not ran.exists()
    assert type(index).version is None


@pytest.mark.timeout(120)
def test_a_state_within_lists_of_lists_is_found_at_once(tmp_path: Path) -> None:
    torch.save({"many": lists_of_lists(), "loader": cursor()}, tmp_path / "ck.pt")
    assert read_state(str(tmp_path / "ck.pt")).cursor == cursor()["cursor"]


def test_a_state_that_is_older_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    loader = {"_snapshot": cursor(), "_steps_since_snapshot": 2}
    torch.save({"loader": loader}, tmp_path / "ck.pt")
    for path in (str(tmp_path / "ck.pt"), saved(tmp_path / "ck", loader=loader)):
        with pytest.raises(UsageError, match="has a state of a StatefulDataLoader from 2 steps before it was saved"):
            read_state(path)


def test_a_value_that_would_execute_something_is_refused_and_does_not(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", **{"other.cursor": Hostile(tmp_path / "executed")})
    for read in (read_state, lambda path: load_checkpoint({"other.cursor": None}, path, no_dist=True)):
        with pytest.raises(LoaderError, match="ck cannot be loaded: ") as caught:
            read(path)
        assert "copy" in caught.value.hint
    assert not (tmp_path / "executed").exists()


def test_values_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", other=Hostile(tmp_path / "executed"))
    assert read_state(path).cursor == cursor()["cursor"]


def test_a_file_that_would_execute_something_is_refused_and_does_not(tmp_path: Path) -> None:
    torch.save({"cursor": Hostile(tmp_path / "executed")}, tmp_path / "file.pt")
    with pytest.raises(UsageError, match=r"file\.pt is not a checkpoint: torch cannot read it without executing"):
        read_state(str(tmp_path / "file.pt"))
    assert not (tmp_path / "executed").exists()


def zipped(path: Path, *, is_zip: bool = True) -> Path:
    torch.save({"loader": cursor()}, path / "file.pt", _use_new_zipfile_serialization=is_zip)
    return path / "file.pt"


@pytest.mark.parametrize(
    ("write", "step"),
    [(zipped, 5), (partial(zipped, is_zip=False), 5), (lambda path: Path(saved(path / "ck")) / ".metadata", 1)],
    ids=["zip", "pickle", "index"],
)
def test_damaged_bytes_anywhere_raise_no_error_but_those_of_files(
    tmp_path: Path, write: Callable[[Path], Path], step: int
) -> None:
    file = write(tmp_path)
    content = file.read_bytes()
    for place in range(0, len(content), step):
        for bad in (content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :], content[:place]):
            file.write_bytes(bad)
            with contextlib.suppress(LoaderError if file.name == ".metadata" else UsageError):
                read_metadata(str(file.parent)) if file.name == ".metadata" else read_state(str(file))


def test_the_same_state_of_every_rank_is_one_state_and_those_of_two_loaders_are_refused(tmp_path: Path) -> None:
    other = {"cursor": cursor()["cursor"].replace('"sample":', '"sample":1')}
    (tmp_path / "state.json").write_text(json.dumps({"rank 0": cursor(), "rank 1": cursor()}))
    assert read_state(str(tmp_path / "state.json")).cursor == cursor()["cursor"]
    (tmp_path / "state.json").write_text(json.dumps({"loader 0": cursor(), "loader 1": other}))
    with pytest.raises(UsageError, match="2 states, of several loaders or workers"):
        read_state(str(tmp_path / "state.json"))


def test_a_state_in_json_is_found_at_any_depth_that_json_can_be_read_to(tmp_path: Path) -> None:
    for depth, refused in ((500, contextlib.nullcontext()), (100_000, pytest.raises(UsageError, match="is not a"))):
        (tmp_path / "state.json").write_text('{"a":' * depth + json.dumps(cursor()) + "}" * depth)
        with refused:
            assert read_state(str(tmp_path / "state.json")).cursor == cursor()["cursor"]


def test_damaged_data_of_a_checkpoint_is_a_loader_error_with_a_way_out(tmp_path: Path) -> None:
    path = Path(saved(tmp_path / "ck"))
    (data,) = path.glob("*.distcp")
    content = data.read_bytes()
    for bad in (b"", content[:1000], bytes(len(content))):
        data.write_bytes(bad)
        with pytest.raises(LoaderError, match="ck cannot be loaded: ") as caught:
            read_state(str(path))
        assert "restore" in caught.value.hint
    data.unlink()
    with pytest.raises(LoaderError, match="No such file"):
        read_state(str(path))
