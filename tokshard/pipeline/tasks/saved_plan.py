"""The planned tasks of a build in one file, so that several machines need not look into the inputs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import pyarrow as pa
from pyarrow import ipc

from tokshard.errors import BuildError
from tokshard.format.files import map_file
from tokshard.pipeline.sources.division import ByteRange, Groups
from tokshard.pipeline.tasks.planning import StreamTask, Task, WholeInputs
from tokshard.store import Store, written

_WHOLE, _BYTES, _GROUPS, _STREAM = range(4)
_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.int8(), nullable=False),
        pa.field("input", pa.int64(), nullable=False),
        pa.field("segment", pa.int64(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64()),
    ]
)
"""`start` and `stop` bound the inputs, bytes or groups of a task; a range of bytes without `stop` is open."""


def save_tasks(store: Store, name: str, tasks: Iterable[Task | StreamTask]) -> None:
    """Write planned tasks, 33 bytes each. None may read what can be read once only."""
    columns = [pa.array(column, field.type) for column, field in zip(_columns(tasks), _SCHEMA, strict=True)]
    with written(store, name) as file, ipc.new_file(file, _SCHEMA) as writer:
        writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))


def load_tasks(store: Store, name: str) -> list[Task | StreamTask]:
    """The tasks that `save_tasks` wrote, in order.

    Raises:
        FileNotFoundError: there is no such file.
        BuildError: the file is damaged.
    """
    try:
        batch = ipc.open_file(map_file(store, name)).get_batch(0)
        batch.validate(full=True)
        rows = zip(*(batch.column(field.name).to_pylist() for field in _SCHEMA), strict=True)
        return [_task(*row) for row in rows]
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{store.where(name)} is damaged: {error}", hint="start over with --force") from error


def _columns(tasks: Iterable[Task | StreamTask]) -> Sequence[Sequence[int | None]]:
    rows = list(map(_row, tasks))
    return list(zip(*rows, strict=True)) if rows else [[] for _ in _SCHEMA]


def _row(task: Task | StreamTask) -> tuple[int, int, int, int, int | None]:
    if isinstance(task, StreamTask):
        return (_STREAM, *task.key, 0, None)
    if isinstance(task.parts, WholeInputs):
        return (_WHOLE, *task.key, task.parts.start, task.parts.stop)
    ((_, span),) = task.parts
    assert isinstance(span, ByteRange | Groups), "an input that is read whole is in a group"
    return (_BYTES if isinstance(span, ByteRange) else _GROUPS, *task.key, span.start, span.stop)


def _task(kind: int, index: int, segment: int, start: int, stop: int | None) -> Task | StreamTask:
    key = (index, segment)
    if kind == _STREAM:
        return StreamTask(key=key)
    if kind == _BYTES:
        return Task(key=key, parts=((index, ByteRange(start, stop)),))
    if stop is None:
        raise ValueError(f"task {key} has no end")
    if kind == _WHOLE:
        return Task(key=key, parts=WholeInputs(start, stop))
    if kind == _GROUPS:
        return Task(key=key, parts=((index, Groups(start, stop)),))
    raise ValueError(f"task {key} is of kind {kind}")


def share_bytes(share: Iterable[Task | StreamTask], tasks: Iterable[Task | StreamTask], sizes: Sequence[int]) -> int:
    """About how many bytes of input some tasks read; the parts of an input count as equal.

    Args:
        tasks: all of the build.
        sizes: bytes of each input.
    """
    num_parts = Counter(task.key[0] for task in tasks)
    return sum(_whole_bytes(task, sizes) // num_parts[task.key[0]] for task in share)


def _whole_bytes(task: Task | StreamTask, sizes: Sequence[int]) -> int:
    if isinstance(task, StreamTask):
        return int(sizes[task.key[0]])
    return sum(int(sizes[index]) for index, _ in task.parts)
