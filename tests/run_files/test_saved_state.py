"""A checkpoint is read without executing anything that is in it."""

from __future__ import annotations

import contextlib
import json
import pickle
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


def test_an_index_that_would_execute_something_is_refused_and_does_not(tmp_path: Path) -> None:
    path = Path(saved(tmp_path / "ck"))
    index = FileSystemReader(path).read_metadata()
    index.planner_data = Hostile(tmp_path / "executed")
    (path / ".metadata").write_bytes(pickle.dumps(index))
    for read in (read_state, read_metadata, lambda path: load_checkpoint({}, path, no_dist=True)):
        with pytest.raises(LoaderError, match=r"\.metadata is not the index of a checkpoint: it names posix\.mkdir"):
            read(str(path))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "dataclass"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("builtins", "getattr"),
        ("pathlib.os", "system"),
    ],
)
def test_an_index_can_reach_nothing_through_what_it_may_name(tmp_path: Path, module: str, name: str) -> None:
    path = Path(saved(tmp_path / "ck"))
    marker = tmp_path / "executed"
    (path / ".metadata").write_bytes(
        pickle.PROTO
        + b"\x04"
        + b"".join(pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name))
        + pickle.STACK_GLOBAL
        + pickle.SHORT_BINUNICODE
        + bytes([len(f"mkdir {marker}")])
        + f"mkdir {marker}".encode()
        + pickle.TUPLE1
        + pickle.REDUCE
        + pickle.STOP
    )
    with pytest.raises(LoaderError, match="is not the index of a checkpoint"):
        read_metadata(str(path))
    assert not marker.exists()


def test_an_index_cannot_change_the_classes_of_torch(tmp_path: Path) -> None:
    path = Path(saved(tmp_path / "ck"))
    before = FileSystemReader(path).read_metadata()
    name = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    (path / ".metadata").write_bytes(b"\x80\x02c" + name + b"N}U\x07versionU\x03badds\x86b.")  # BUILD on the class
    with pytest.raises(LoaderError):
        read_metadata(str(path))
    assert type(before).version is None


def lists_of_lists() -> Any:
    """As much text as 10**40 lists, in 894 bytes."""
    found: Any = []
    for _ in range(40):
        found = [found] * 10
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["index", "entries", "entry"])
def test_an_index_of_lists_within_lists_is_refused_at_once(tmp_path: Path, place: str) -> None:
    path = saved(tmp_path / "ck")
    index: Any = FileSystemReader(path).read_metadata()
    if place == "index":
        index = lists_of_lists()
    elif place == "entries":
        index.state_dict_metadata = lists_of_lists()
    else:
        index.state_dict_metadata["weight"].size = lists_of_lists()
    (Path(path) / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(LoaderError, match="is not the index of a checkpoint"):
        read_state(path)


TUPLE_OF_IT, TUPLE_OF_TEN = b"\x85", b"q\x000(" + b"h\x00" * 10 + b"t"
"""Opcodes of pickle that replace what was made last."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tuples", [TUPLE_OF_TEN * 40, TUPLE_OF_IT * 200_000], ids=["wide", "deep"])
@pytest.mark.parametrize(
    "made",
    [b"}%bNs", b"}(%bNu", b"(%bNd", b"\x8f(%b\x90", b"(%b\x91"],
    ids=["SETITEM", "SETITEMS", "DICT", "ADDITEMS", "FROZENSET"],
)
def test_an_index_with_tuples_within_tuples_for_names_is_refused_at_once(
    tmp_path: Path, made: bytes, tuples: bytes
) -> None:
    """Their hash would take years, or overflow the stack."""
    path = saved(tmp_path / "ck")
    (Path(path) / ".metadata").write_bytes(b"\x80\x04" + made % (b")" + tuples) + b".")
    with pytest.raises(LoaderError, match="is not the index of a checkpoint"):
        read_metadata(path)


@pytest.mark.timeout(120)
def test_a_state_within_lists_of_lists_is_found_at_once(tmp_path: Path) -> None:
    torch.save({"many": lists_of_lists(), "loader": cursor()}, tmp_path / "ck.pt")
    assert read_state(str(tmp_path / "ck.pt")).cursor == cursor()["cursor"]


def test_a_value_that_would_execute_something_is_refused_and_does_not(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", **{"other.cursor": Hostile(tmp_path / "executed")})
    for read in (read_state, lambda path: load_checkpoint({"other.cursor": None}, path, no_dist=True)):
        with pytest.raises(LoaderError, match="ck cannot be loaded: ") as caught:
            read(path)
        assert "copy" in caught.value.hint
    assert not (tmp_path / "executed").exists()


def test_a_file_that_would_execute_something_is_refused_and_does_not(tmp_path: Path) -> None:
    torch.save({"cursor": Hostile(tmp_path / "executed")}, tmp_path / "file.pt")
    with pytest.raises(UsageError, match=r"file\.pt is not a checkpoint: torch cannot read it without executing"):
        read_state(str(tmp_path / "file.pt"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("is_zip", [True, False])
def test_damaged_bytes_anywhere_in_a_file_are_no_checkpoint_or_change_nothing(tmp_path: Path, is_zip: bool) -> None:
    file = tmp_path / "file.pt"
    torch.save({"loader": cursor()}, file, _use_new_zipfile_serialization=is_zip)
    content = file.read_bytes()
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        for bad in (bytes(damaged), content[:place]):
            file.write_bytes(bad)
            with contextlib.suppress(UsageError):
                read_state(str(file))


def test_the_same_state_of_every_rank_is_one_state_and_those_of_two_loaders_are_refused(tmp_path: Path) -> None:
    other = {"cursor": cursor()["cursor"].replace('"sample":', '"sample":1')}
    (tmp_path / "state.json").write_text(json.dumps({"rank 0": cursor(), "rank 1": cursor()}))
    assert read_state(str(tmp_path / "state.json")).cursor == cursor()["cursor"]
    (tmp_path / "state.json").write_text(json.dumps({"loader 0": cursor(), "loader 1": other}))
    with pytest.raises(UsageError, match="2 states, of several loaders or workers"):
        read_state(str(tmp_path / "state.json"))


def test_a_state_in_json_that_is_nested_as_deeply_as_it_can_be_is_found(tmp_path: Path) -> None:
    for depth in (500, 900, 100_000):
        (tmp_path / "state.json").write_text('{"a":' * depth + json.dumps(cursor()) + "}" * depth)
        with contextlib.suppress(UsageError):
            assert read_state(str(tmp_path / "state.json")).cursor == cursor()["cursor"]


def test_an_index_that_leads_outside_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = Path(saved(tmp_path / "ck"))
    index = FileSystemReader(path).read_metadata()
    for info in index.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(LoaderError, match="is outside the checkpoint"):
        read_state(str(path))


def test_damaged_bytes_anywhere_in_the_index_are_a_loader_error_or_change_nothing(tmp_path: Path) -> None:
    path = Path(saved(tmp_path / "ck"))
    content = (path / ".metadata").read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        for bad in (bytes(damaged), content[:place]):
            (path / ".metadata").write_bytes(bad)
            with contextlib.suppress(LoaderError):
                read_metadata(str(path))


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
