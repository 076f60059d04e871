"""Compressed bytes, which are decompressed ahead of the records that are read."""

from __future__ import annotations

import json

import pytest
import zstandard

from tests.pipeline.places import build
from tokshard.errors import BadRecordError, SourceError

LINES = [json.dumps({"text": f"text {number}"}) for number in range(200_000)]


@pytest.mark.parametrize(
    ("line", "error", "says"), [(3, BadRecordError, "line 3: malformed"), (0, SourceError, "damaged")]
)
def test_a_bad_record_before_damage_is_found_first(place, line, error, says):
    """All of the file is decompressed at once: it has 4 MB."""
    lines = [*LINES[: line - 1], "{", *LINES[line:]] if line else LINES
    content = zstandard.compress("\n".join(lines).encode())
    (place / "a.jsonl.zst").write_bytes(content[: len(content) * 3 // 4])
    with pytest.raises(error, match=says):
        build(place, place / "a.jsonl.zst")
