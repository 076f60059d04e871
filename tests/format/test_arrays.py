"""Arrays made from plain values and read back, without Arrow's own ways, which import pandas."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokshard.format.arrays import numbers_of, value_array

KINDS = {
    pa.string(): st.text(max_size=5),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
def test_values_are_those_that_arrow_would_make(kind, data):
    values = data.draw(st.lists(st.none() | KINDS[kind], max_size=20))
    found = value_array(values, kind)
    found.validate(full=True)
    assert found.equals(pa.array(values, type=kind))
    assert found.null_count == values.count(None)


@given(st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=4), st.integers(0, 3), st.integers(0, 5))
def test_numbers_are_those_that_arrow_would_give(parts, start, length):
    chunks = pa.chunked_array([pa.array(part, pa.uint16()) for part in parts], pa.uint16())
    for array in (chunks, chunks.slice(start, length), *chunks.chunks, pa.array(range(9), pa.int64())[start:length]):
        found = numbers_of(array)
        assert found.dtype == np.dtype(str(array.type))
        assert found.tolist() == array.to_pylist()
