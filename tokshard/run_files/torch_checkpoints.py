"""Checkpoints of torch, read without executing anything in them.

torch reads the index of a checkpoint directory (``.metadata``) and the values that are not tensors with plain pickle,
which runs whatever the file says. Here, the index is read as records of plain values, and only known
classes are allowed; values are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from tokshard.errors import LoaderError
from tokshard.run_files import checkpoint_directory
from tokshard.run_files.checkpoint_directory import State

T = TypeVar("T")

METADATA_FILE = ".metadata"
_HINT = "use another checkpoint, or restore this one from a copy"

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {"torch.Size", "torch.serialization._get_layout", "torch.distributed.checkpoint.filesystem._StorageInfo"}
_RECORDS |= {f"{_METADATA}.{name}" for name in ("_MEM_FORMAT_ENCODING", "Metadata", "MetadataIndex", "StorageMeta")}
_RECORDS |= {f"{_METADATA}.{name}Metadata" for name in ("BytesStorage", "ChunkStorage", "TensorStorage")}
_RECORDS.add(f"{_METADATA}.TensorProperties")
"""The names in an index, apart from dtypes and paths. None of them is called."""


def read_metadata(path: str) -> Metadata:
    """The index of a checkpoint directory of torch.distributed.checkpoint: names, sizes and places of what it holds.

    Raises:
        OSError: the index is missing or cannot be read.
        LoaderError: it is damaged, or names what an index does not hold.
    """
    with open(os.path.join(path, METADATA_FILE), "rb") as file:
        content = file.read()
    try:
        return _metadata(_Unpickler(BytesIO(content)).load())
    except Exception as error:  # damaged bytes end in exceptions of any kind
        raise LoaderError(
            f"{os.path.join(path, METADATA_FILE)} is not the index of a checkpoint: {_line(error)}", hint=_HINT
        ) from error


def read_index(path: str) -> tuple[Metadata, State]:
    """The index of the tensors of a checkpoint of the trainer, and its state. Hashes are not checked.

    Raises:
        TokshardError: the checkpoint is damaged or incomplete.
        OSError: a file cannot be read.
    """
    index, state = read_metadata(path), checkpoint_directory.state_of(path)
    checkpoint_directory.require(path, files_of(index), checkpoint_directory.contents(path))
    return index, state


def files_of(index: Metadata) -> set[str]:
    """The file of an index, and the files of the tensors that it names."""
    return {METADATA_FILE, *(place.relative_path for place in (index.storage_data or {}).values())}


def load_checkpoint(state: dict[str, Any], path: str, *, no_dist: bool = False) -> None:
    """Fill `state` in place from a checkpoint directory, on every rank, as torch.distributed.checkpoint.load does.

    Args:
        state: flat, by the names that `read_metadata` gives: tensors or DTensors of the sizes that were saved; another
            value, such as None, for a value that is not a tensor.
        no_dist: this process reads alone, although torch.distributed may be set up.

    Raises:
        OSError: the checkpoint is missing, or its index cannot be read.
        LoaderError: it is damaged, does not have a name or size of `state`, or holds a value that
            ``torch.load(weights_only=True)`` does not take.
    """
    reader = _Reader(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(state, storage_reader=reader, planner=_Planner(flatten_state_dict=False), no_dist=no_dist)
    except CheckpointException as error:  # which is not an Exception
        causes = dict.fromkeys(_line(cause) for cause, _ in error.failures.values())
        raise LoaderError(f"{path} cannot be loaded: {'; '.join(causes)}", hint=_HINT) from error


def read_values(path: str, endings: tuple[str, ...]) -> Any:
    """The content of a file of torch.save; of a checkpoint directory, the values with some endings of names, by name.

    Raises:
        OSError, ValueError: it is neither, or a file that is damaged or holds what would have to be executed.
        LoaderError: the checkpoint directory is damaged, or holds what would have to be executed.
    """
    if not os.path.isdir(path):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except OSError:
            raise
        except pickle.UnpicklingError as error:  # torch's text proposes weights_only=False
            raise ValueError("torch cannot read it without executing what is in it") from error
        except Exception as error:  # damaged bytes end in exceptions of any kind
            raise ValueError(_line(error)) from error
    entries = read_metadata(path).state_dict_metadata
    found: dict[str, Any] = {
        name: None
        for name, entry in entries.items()
        if isinstance(entry, BytesStorageMetadata) and name.endswith(endings)
    }
    load_checkpoint(found, path, no_dist=True)
    return found


class _Reader(FileSystemReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._metadata = read_metadata(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - the signature of torch
        return self._metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


class _Record:
    """An object of the index as a record: the name of its class or function, its arguments and its state."""

    name: ClassVar[str]
    state: Any = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 -- the one whose opcodes can be replaced
    """Makes plain values, dtypes and records. Each reading has its own record classes, which it may change.

    The unpickler in C takes any key of a dict, and hashes it: 300 bytes of tuples within tuples take years, and deep
    ones overflow the stack. This one in Python takes only names. It reads an index of 50,000 tensors in 7 s instead of
    4 s.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # noqa: SLF001
    # an index has none; the last one takes as much memory as the file claims
    for _opcode in (pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8):
        del dispatch[_opcode[0]]

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: object, value: object) -> None:
        if not isinstance(key, str | _Record):
            raise pickle.UnpicklingError(f"it has a {type(key).__name__} in place of a name")
        self.stack[-1][key] = value

    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        full = f"{module}.{name}"
        if full not in _RECORDS and module.partition(".")[0] != "pathlib":
            raise pickle.UnpicklingError(f"it names {full}, which reading must not execute")
        return type(name, (_Record,), {"name": full})


def _metadata(index: Any) -> Metadata:
    """Every value that torch uses, by its type; the rest is left out."""
    fields = _fields(index, "Metadata")
    return Metadata(
        state_dict_metadata={_a(str, name): _entry(entry) for name, entry in fields["state_dict_metadata"].items()},
        storage_data={_place(place): _storage(info) for place, info in fields["storage_data"].items()},
        version=fields.get("version") and _a(str, fields["version"]),
    )


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, _Record) and record.name == f"{_METADATA}.BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_a(torch.dtype, _state(fields["properties"], "TensorProperties")[0])),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(part["offsets"]), sizes=_size(part["sizes"])) for part in chunks],
    )


def _place(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _a(str, fields["fqn"]), None if offset is None else _size(offset), None if index is None else _a(int, index)
    )


def _storage(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo", module="torch.distributed.checkpoint.filesystem")
    name = _a(str, fields["relative_path"])
    if os.path.basename(name) != name:
        raise ValueError(f"{name!r} is outside the checkpoint")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name!r} was written through an extension of torch, which is not read")
    return _StorageInfo(name, _a(int, fields["offset"]), _a(int, fields["length"]))


def _size(record: Any) -> torch.Size:
    if not isinstance(record, _Record) or record.name != "torch.Size":
        raise TypeError(f"it has a {type(record).__name__} in place of a torch.Size")
    (sizes,) = record.arguments
    return torch.Size([_a(int, size) for size in _a(tuple, sizes)])


def _fields(record: Any, name: str, module: str = _METADATA) -> dict[str, Any]:
    return _a(dict, _state(record, name, module))


def _state(record: Any, name: str, module: str = _METADATA) -> Any:
    if not isinstance(record, _Record) or record.name != f"{module}.{name}":
        raise TypeError(f"it has a {type(record).__name__} in place of a {name}")
    return record.state


def _a(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"it has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
