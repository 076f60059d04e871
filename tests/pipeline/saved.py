"""What ``save_to_disk`` of datasets writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.pipeline.inputs import arrow_stream_bytes, table


def save(directory: Path, parts: Sequence[Sequence[Any]], field: str = "text", **options: int) -> Path:
    """Texts, or other values of a field, in so many files; the test with the real library is marked interop.

    Args:
        options: `rows`, of a batch; and `indexed`, whether an index chooses rows.
    """
    directory.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, values in zip(names, parts, strict=True):
        (directory / name).write_bytes(
            arrow_stream_bytes(table([{field: value} for value in values]), options.get("rows"))
        )
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": "train"}
    if options.get("indexed"):
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return directory
