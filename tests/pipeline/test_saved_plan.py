"""The planned tasks in a file: what comes back is what was planned, or an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokshard.errors import BuildError
from tokshard.pipeline.sources.division import Grouped, Indivisible, Lines, Stream
from tokshard.pipeline.tasks.planning import plan_tasks
from tokshard.pipeline.tasks.saved_plan import load_tasks, save_tasks, share_bytes
from tokshard.store import open_store

SPLITS = st.one_of(
    st.just(Lines()),
    st.just(Stream()),
    st.just(Indivisible()),
    st.builds(Grouped, st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple)),
)


@given(inputs=st.lists(st.tuples(st.integers(0, 40), SPLITS), max_size=12), num_jobs=st.integers(1, 5))
def test_any_plan_comes_back_and_its_jobs_read_all_of_it(tmp_path_factory, inputs, num_jobs):
    store = open_store(tmp_path_factory.mktemp("plan"))
    sizes = [size for size, _ in inputs]
    tasks = list(plan_tasks(sizes, [split for _, split in inputs], 10))
    save_tasks(store, "tasks.arrow", tasks)
    assert load_tasks(store, "tasks.arrow") == tasks
    shares = [share_bytes(tasks[index::num_jobs], tasks, sizes) for index in range(num_jobs)]
    assert 0 <= sum(sizes) - sum(shares) < max(1, len(tasks))  # each part is rounded down


def test_a_damaged_plan_is_an_error_that_names_the_file(tmp_path):
    store = open_store(tmp_path)
    store.put("tasks.arrow", b"no plan")
    with pytest.raises(BuildError, match=r"tasks\.arrow is damaged"):
        load_tasks(store, "tasks.arrow")
