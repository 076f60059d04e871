"""What tasks that hash leave behind, made up."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from tokshard.format.files import HashingFile
from tokshard.pipeline.tasks.hashing import hashes_bytes
from tokshard.pipeline.tasks.sorted_rows import RunWriter
from tokshard.pipeline.workspace.places import HASH
from tokshard.pipeline.workspace.receipts import OutputCounts, Receipt, file_path, write_receipt
from tokshard.store import Store, written


def leave_hashes(store: Store, index: int, hashes: NDArray[np.uint64]) -> Receipt:
    """The file and the receipt of the task with this number, whose texts have these hashes: uint64 [n, 2]."""
    order = np.argsort(hashes[:, 0], kind="stable")
    rows = np.column_stack([hashes[order], order.astype(np.uint64)])
    _, first = np.unique(rows[:, 0], return_index=True)
    repeats = np.setdiff1d(order, order[first]).astype("<u4")
    name = file_path(HASH, (index, 0))
    with written(store, name) as file:
        hashing = HashingFile(file)
        writer = RunWriter(hashing, name)
        writer.append(rows[first])
        writer.finish()
        content = repeats.tobytes()
        hashing.write(content + zlib.crc32(content).to_bytes(4, "little"))
        digest = hashing.digest().hex()
    parts = [(len(first), len(repeats))] if len(hashes) else []
    receipt = Receipt(
        key=(index, 0),
        outputs=[OutputCounts()],
        parts=parts,
        file_bytes=hashes_bytes(parts),
        file_sha256=digest,
    )
    write_receipt(store, HASH, receipt)
    return receipt
