"""The table of a view, of which `tests/contract/test_promise_13_view.py` says how it is read."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tokshard.format.files import HashingFile
from tokshard.format.names import KEPT
from tokshard.format.view import KeptWriter, load_kept

numbers = st.one_of(st.integers(1, 9), st.sampled_from([(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 5 << 32]))


@given(
    stretches=st.lists(st.tuples(st.integers(0, 5 << 32), numbers, numbers), min_size=1, max_size=12),
    num_first=st.integers(0, 12),
)
def test_the_places_of_trillions_of_tokens_are_read_as_they_were_written(stretches, num_first):
    expected = np.zeros((len(stretches) + 1, 4), np.int64)
    for row, (gap, documents, tokens) in enumerate(stretches):
        expected[row, :2] += gap
        expected[row + 1] = expected[row] + [documents, tokens, documents, tokens]
    sizes = np.diff(expected[:, 2:], axis=0)
    rows = np.concatenate([expected[:-1, :2], sizes], axis=1)
    writer, file = KeptWriter(""), io.BytesIO()
    for part in (rows[:num_first], rows[num_first:]):
        writer.add(part)
    writer.finish(HashingFile(file))
    writer.close()
    (batch,) = pa.ipc.open_file(pa.py_buffer(file.getvalue())).read_all().to_batches()
    assert batch.nbytes == 16 * len(expected)
    num_documents, num_tokens = expected[-1, 2:].tolist()
    facts = {KEPT: SimpleNamespace(num_bytes=len(file.getvalue()))}
    base = SimpleNamespace(carries=writer.carries, num_documents=1 << 62, location="")
    manifest = SimpleNamespace(files=facts, num_documents=num_documents, num_tokens=num_tokens, base=base)
    kept = load_kept(SimpleNamespace(where=str), manifest, base, lambda *_: pa.py_buffer(file.getvalue()))
    for column, of_column in zip((kept.documents, kept.positions, kept.numbers, kept.tokens), expected.T, strict=True):
        assert column[np.arange(len(expected))].tolist() == of_column.tolist()
        asked = np.concatenate([of_column - 1, of_column, of_column + 1, of_column + (1 << 33)])
        asked = np.maximum(asked, 0)
        for side in ("left", "right"):
            assert column.searchsorted(asked, side).tolist() == of_column.searchsorted(asked, side).tolist()
    # documents to their numbers in the base, and back
    some = np.unique(np.concatenate([expected[:-1, 2], expected[1:, 2] - 1]))
    assert kept.of_base(kept.in_base(some)).tolist() == some.tolist()
    starts, stops = kept.ranges(0, 1 << 40)
    left_out = np.array([stop for stop, start in zip(stops, [*starts[1:], stops[-1] + 9], strict=True) if stop < start])
    assert (kept.of_base(left_out.astype(np.int64)) == -1).all()
