"""Where the duplicates of each task lie, in one file: a job that writes reads no receipts but those of its tasks."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import ipc

from tokshard.errors import BuildError
from tokshard.format.files import map_file
from tokshard.pipeline.tasks.duplicates import DropLists
from tokshard.pipeline.tasks.sorted_rows import AGAIN, Run
from tokshard.pipeline.workspace.places import DROPS, Workspace
from tokshard.store import written

_METADATA_KEY = "tokshard.drops"


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says besides the tasks and their ranges.

    Args:
        bad_inputs: those that were left out when duplicates were looked for.
    """

    bad_inputs: list[int]
    digest: str
    runs: list[Run]


def save_drops(drops: DropLists, bad_inputs: Collection[int]) -> None:
    """Write down where the duplicates of each task are found: 8 bytes per task, and 16 per run and task.

    Args:
        bad_inputs: the inputs that were left out.
    """
    header = _Header(bad_inputs=sorted(bad_inputs), digest=drops.digest, runs=list(drops.runs))
    columns = [drops.tasks, *drops.ranges.transpose(0, 2, 1).reshape(2 * len(drops.runs), len(drops.tasks))]
    fields = [pa.field(f"column {number}", pa.from_numpy_dtype(column.dtype)) for number, column in enumerate(columns)]
    schema = pa.schema(fields, metadata={_METADATA_KEY: msgspec.json.encode(header)})
    with written(drops.workspace.store, DROPS) as file, ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))


def load_drops(workspace: Workspace, bad_inputs: Collection[int]) -> DropLists | None:
    """What `save_drops` wrote; None if it wrote nothing, or if other inputs were left out.

    Args:
        workspace: of the hashing stage.

    Raises:
        BuildError: the file is damaged.
    """
    try:
        reader = ipc.open_file(map_file(workspace.store, DROPS))
        header = msgspec.json.decode(reader.schema.metadata[_METADATA_KEY.encode()], type=_Header)
        if header.bad_inputs != sorted(bad_inputs):
            return None
        batch = reader.get_batch(0)
        batch.validate(full=True)
        tasks, *bounds = (column.to_numpy() for column in batch.columns)
        ranges = np.array(bounds, np.int64).reshape(len(header.runs), 2, len(tasks)).transpose(0, 2, 1)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise BuildError(f"{workspace.store.where(DROPS)} is damaged: {error}", hint=AGAIN) from error
    return DropLists(workspace=workspace, tasks=tasks, runs=tuple(header.runs), ranges=ranges, digest=header.digest)
