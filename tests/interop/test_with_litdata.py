"""Chunks that litdata writes are imported."""

from __future__ import annotations

import pytest

from tests.interop.real_text import imported

pytest.importorskip("litdata")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


def test_what_litdata_writes_is_imported(corpus, tmp_path):
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(tmp_path / "theirs"), chunk_bytes=64 << 20, item_loader=TokensLoader())
    for index, document in enumerate(corpus[1]):
        writer[index] = torch.tensor(document, dtype=torch.uint16)
    writer.done()
    writer.merge(1)
    assert imported(tmp_path / "theirs", tmp_path / "again")[1] == corpus[1]
