"""A view has the documents that meet its conditions, is a corpus like any other, and stores none of their tokens."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.contract import small
from tests.corpora import (
    TINY_TOKENIZER,
    Source,
    append_generation,
    documents_of,
    write_corpus,
)
from tests.damage import Change, Damage, Edit, check, damaged, flipped
from tests.examples import examples
from tests.format.edits import manifest_says, table_becomes
from tests.pipeline.places import at
from tests.pipeline.test_copy import LANGUAGES, Row, copy_corpus, corpus_of, left_out, rows
from tests.refusals import Said, tokshard
from tests.store import faulty_proxy as faults
from tests.store.memory import REQUESTS
from tests.store.servers import file_server
from tokshard import open_corpus
from tokshard import select_corpus as select_by_processes
from tokshard.errors import BuildError, CorpusError, StoreError, UsageError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline.progress import StageStarted
from tokshard.pipeline.workspace.receipts import Receipt
from tokshard.runtime import Cache, CorpusSource, StreamPlan
from tokshard.store import open_store
from tokshard.testing import assert_token_source


def select_corpus(given: Any, *, out: Path | str, **options: Any) -> Any:
    """Select in this process, unless workers are asked for."""
    return select_by_processes(given, out=out, **{"workers": 1, **options})


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpus_of(tmp_path / "corpus")


def grow(corpus: Path) -> None:
    """Append a document in French and one in English."""
    source = Source(documents=documents_of([3, 30]), path="c.jsonl", metadata={"lang": ["fr", "en"]})
    append_generation(corpus, sources=[source], columns={"lang": "string"})


# any conditions


CONDITIONS: dict[str, Any] = {
    "min_tokens": st.integers(1, 12),
    "max_tokens": st.integers(12, 40),
    "where": st.sampled_from([["lang=fr"], ["lang!=en"], ["lang in en,de"]]),
    "source": st.just("*b.jsonl"),
    "hash_range": st.sampled_from([(0.0, 0.5), (0.25, 1.0)]),
}
MEETS = {"lang=fr": {"fr"}, "lang!=en": {"fr", "de", None}, "lang in en,de": {"en", "de"}}


def is_chosen(row: Row, options: dict[str, Any]) -> bool:
    """Whether a document meets conditions."""
    tokens, kept, source, _ = row
    return (
        options.get("min_tokens", 0) <= len(tokens) <= options.get("max_tokens", 1_000)
        and all(kept["lang"] in MEETS[condition] for condition in options.get("where", []))
        and ("source" not in options or source[1] == "b.jsonl")
    )


@settings(max_examples=examples(30))
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=60),
    first=st.fixed_dictionaries({}, optional=CONDITIONS),
    second=st.fixed_dictionaries({}, optional=CONDITIONS),
    task_tokens=st.sampled_from([1, 50, 1_000]),
    is_grown=st.booleans(),
)
def test_a_view_and_a_view_of_it_hold_the_chosen_documents_and_so_does_a_copy(
    lengths, first, second, task_tokens, is_grown, tmp_path_factory
):
    place = tmp_path_factory.mktemp("selected")
    languages = [LANGUAGES[number % 3] for number in range(len(lengths))]
    corpus_of(place / "corpus", lengths, languages)
    if is_grown:
        grow(place / "corpus")
    expected, given = rows(place / "corpus"), place / "corpus"
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, copy_task_tokens=task_tokens)
        for number, options in enumerate((first, second)):
            taken = [row for row in expected if is_chosen(row, options)]
            view = place / f"view-{number}"
            if not taken:
                with pytest.raises(BuildError, match="no document is selected"):
                    select_corpus(given, out=view, **options)
                return
            with contextlib.ExitStack() as stack:
                if "hash_range" in options:  # it may leave nothing
                    stack.enter_context(contextlib.suppress(BuildError))
                select_corpus(given, out=view, **options)
            if not (view / names.MANIFEST).exists():
                return
            found = rows(view)
            if "hash_range" in options:  # which the tokens decide
                other = select_corpus(given, out=place / f"other-{number}", **options | {"hash_range": (0, 1)})
                assert len(taken) == other.manifest.num_documents
                taken = [row for row in taken if row in found]
                assert len(found) <= len(expected)
            assert found == taken
            assert not [name for name in view.iterdir() if names.is_shard_name(name.name)]
            assert_token_source(CorpusSource(view, access="mmap" if number else "pread"))
            with open_corpus(view) as opened:
                assert [tuple(document.tolist()) for document in opened] == [row[0] for row in taken]
                with open_corpus(given) as whole:  # no table has the bytes of each text
                    pairs = list(zip(opened.sources(), whole.sources(), strict=True))
                assert all(one.text_bytes == of.text_bytes * one.tokens // max(1, of.tokens) for one, of in pairs)
            expected, given = taken, view
        copied = copy_corpus(given, out=place / "copy", shard_tokens=60)
    assert rows(place / "copy") == expected
    assert copied.manifest.num_tokens == sum(len(row[0]) for row in expected)


# lists


DROPPED = [3, 17, 18, 59]
NAMES = [f"doc-{number}" for number in DROPPED]


def lines(values: Sequence[Any]) -> bytes:
    return "\n".join(map(json.dumps, values)).encode()


LISTS: dict[str, Callable[[Path], object]] = {
    "ids.txt": lambda path: path.write_text("\r\n".join([f"\ufeff{NAMES[0]}", *NAMES[1:], "", ""])),
    "listed": lambda path: path.write_text("\n".join(NAMES)),
    "ids.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines([{"id": name, "why": []} for name in NAMES]))),
    "numbers.jsonl": lambda path: path.write_bytes(lines([{"document": number} for number in DROPPED])),
    "ids.parquet": lambda path: parquet.write_table(pa.table({"url": ["x"] * 4, "id": NAMES}), path),
    "ids.csv": lambda path: path.write_text("why,id\n" + "".join(f'"a,\n{"b" * 140_000}",{name}\n' for name in NAMES)),
}


@pytest.fixture
def with_ids(tmp_path: Path) -> Path:
    metadata = {"id": [f"doc-{index}" for index in range(60)], "size": [index % 5 for index in range(60)]}
    sources = [Source(documents=documents_of([2 + 3 * index % 40 for index in range(60)]), metadata=metadata)]
    columns = {"id": "string", "size": "int64"}
    return write_corpus(tmp_path / "ids", sources=sources, columns=columns, tokenizer=TINY_TOKENIZER, shard_tokens=150)


def ids(directory: Path) -> list[int]:
    return [int(row[1]["id"].removeprefix("doc-")) for row in rows(directory)]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_in_any_form_is_left_out_or_taken(with_ids, tmp_path, name):
    LISTS[name](tmp_path / name)
    done = select_corpus(with_ids, out=tmp_path / "without", drop_ids=tmp_path / name)
    assert ids(tmp_path / "without") == [number for number in range(60) if number not in DROPPED]
    assert left_out(tmp_path / "without") == {"in drop-ids": 4}
    assert not done.notes
    select_corpus(with_ids, out=tmp_path / "with", keep_ids=tmp_path / name, where="size!=3", workers=2)
    assert ids(tmp_path / "with") == [17, 59]
    assert left_out(tmp_path / "with") == {"not in keep-ids": 56, "not selected": 2}


def test_a_list_that_changes_before_it_is_read_selects_nothing_else(with_ids, tmp_path):
    (tmp_path / "ids.txt").write_text("doc-1")
    change = at(StageStarted, lambda _: (tmp_path / "ids.txt").write_text("doc-5"))
    with pytest.raises(BuildError, match=r"ids\.txt was changed while documents were selected by it"):
        select_corpus(with_ids, out=tmp_path / "view", drop_ids=tmp_path / "ids.txt", observer=change)
    (tmp_path / "ids.txt").write_text("doc-1")
    select_corpus(with_ids, out=tmp_path / "view", drop_ids=tmp_path / "ids.txt")
    assert 1 not in ids(tmp_path / "view")


# joined columns


def test_columns_are_joined_by_id_or_by_number_and_documents_without_a_row_have_none(with_ids, tmp_path):
    order = np.random.default_rng(1).permutation(50)
    tenths = pa.array(order / 10, pa.float32())
    days = pa.array(order, pa.int32()).cast(pa.date32())  # from the first one of 1970 on
    # a table of somebody else has a column that no condition can compare
    others = {"vector": [[0.5, 0.5]] * 50, "price": tenths.cast(pa.decimal128(5, 1))}
    named = pa.array([f"doc-{number}" for number in order], pa.string_view())
    by_id = {"id": named, "score": order / 50, "day": days, "tenths": tenths, **others}
    parquet.write_table(pa.table(by_id), tmp_path / "scores.parquet")
    with open_corpus(with_ids) as opened:
        metadata = {"fingerprint": opened.fingerprint}
    by_number = pa.table({"document": order, "lang": [["en", "fr"][number % 2] for number in order]})
    parquet.write_table(by_number.replace_schema_metadata(metadata), tmp_path / "langs.parquet")
    join = [tmp_path / "scores.parquet", tmp_path / "langs.parquet"]
    select_corpus(with_ids, out=tmp_path / "view", join=join, where=["score>=0.5", "lang=fr", "size<3"])
    assert ids(tmp_path / "view") == [number for number in range(25, 50) if number % 2 and number % 5 < 3]
    done = select_corpus(with_ids, out=tmp_path / "missing", join=join[:1], where="score!=0.5")
    assert done.notes == (f"{join[0]} has no row for 10 documents: values are missing there",)
    assert ids(tmp_path / "missing") == [number for number in range(60) if number != 25]
    select_corpus(with_ids, out=tmp_path / "tenths", join=join[:1], where=["tenths in 0.1,0.9,4.7", "price>=0.9"])
    assert ids(tmp_path / "tenths") == [9, 47]
    select_corpus(with_ids, out=tmp_path / "february", join=join[:1], where="day>=1970-02-01")
    assert ids(tmp_path / "february") == [*range(31, 50)]
    select_corpus(with_ids, out=tmp_path / "cells", join=join[1:], by=["lang,size"])
    found = {path.parent.relative_to(tmp_path / "cells"): ids(path.parent) for path in tmp_path.glob("cells/*/*/man*")}
    assert found[Path("lang=fr/size=3")] == [number for number in range(50) if number % 2 and number % 5 == 3]
    assert found[Path("lang=__HIVE_DEFAULT_PARTITION__/size=1")] == [51, 56]
    assert sorted(number for cell in found.values() for number in cell) == list(range(60)) == ids(tmp_path / "cells")


def test_a_row_without_an_id_names_no_document(tmp_path):
    sources = [Source(documents=documents_of([3, 4, 5]), metadata={"id": [None, "doc-1", None]})]
    corpus = write_corpus(tmp_path / "ids", sources=sources, columns={"id": "string"}, tokenizer=TINY_TOKENIZER)
    for number, named in enumerate([["doc-1", None], [None, "doc-1", None]]):
        parquet.write_table(pa.table({"id": named, "score": [1.0] * len(named)}), tmp_path / "scores.parquet")
        select_corpus(corpus, out=tmp_path / str(number), join=tmp_path / "scores.parquet", where="score=1")
        assert ids(tmp_path / str(number)) == [1]


@settings(max_examples=examples(6))
@given(st.lists(st.none() | st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=12))
@example([None, "", "__HIVE_DEFAULT_PARTITION__", "%5F_HIVE_DEFAULT_PARTITION__", ".", "..", "a/b", "a%2Fb", "a=b"])
@example(["科" * 80, "CON", " a", "a\n", "100%"])
def test_each_value_has_a_cell_of_its_own(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("values")
    source = Source(documents=documents_of([3] * len(values)), path="a.jsonl", metadata={"topic": values})
    write_corpus(folder / "corpus", sources=[source], columns={"topic": "string"})
    select_corpus(folder / "corpus", out=folder / "cells", by="topic")
    mix = tomllib.loads((folder / "cells/mix.toml").read_text())["corpora"]
    assert len(mix) == len(set(values))
    for place in mix.values():
        with open_corpus(folder / "cells" / place) as cell:
            (value,) = {cell.metadata(number)["topic"] for number in range(cell.num_documents)}
            assert cell.num_documents == values.count(value)


def test_cells_of_many_columns_have_the_values_of_their_documents(tmp_path):
    columns = {f"c{number}": ["a", "b"] for number in range(45)}  # 3**45 codes are more than an int64 has
    source = Source(documents=documents_of([3, 4]), path="a.jsonl", metadata=columns)
    write_corpus(tmp_path / "corpus", sources=[source], columns=dict.fromkeys(columns, "string"))
    select_corpus(tmp_path / "corpus", out=tmp_path / "cells", by=[",".join(columns)])
    for value, num_tokens in (("a", 3), ("b", 4)):
        with open_corpus(tmp_path / "cells" / "/".join(f"{name}={value}" for name in columns)) as cell:
            assert cell.num_tokens == num_tokens


def test_equal_numbers_have_one_cell(tmp_path):
    source = Source(documents=documents_of([3] * 4), path="a.jsonl", metadata={"score": [0.0, -0.0, nan, -nan]})
    write_corpus(tmp_path / "corpus", sources=[source], columns={"score": "float64"})
    select_corpus(tmp_path / "corpus", out=tmp_path / "cells", by="score")
    assert sorted(path.name for path in (tmp_path / "cells").glob("*=*")) == ["score=0", "score=nan"]


def test_cells_that_share_a_folder_on_a_file_system_that_ignores_case_are_refused(tmp_path, monkeypatch):
    source = Source(documents=documents_of([3] * 3), path="a.jsonl", metadata={"topic": ["Web", "web", "code"]})
    write_corpus(tmp_path / "corpus", sources=[source], columns={"topic": "string"}, tokenizer=TINY_TOKENIZER)
    select_corpus(tmp_path / "corpus", out=tmp_path / "cells", by="topic")
    store = type(open_store(tmp_path))
    where = store.where
    monkeypatch.setattr(store, "where", lambda store, name: where(store, name.casefold()))
    with pytest.raises(BuildError, match=r"the cells topic=Web and topic=web would share a folder in .*ignores case"):
        select_corpus(tmp_path / "corpus", out=tmp_path / "others", by="topic")


@pytest.mark.parametrize("order", ["sorted", "in a random order", "without statistics"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["of this corpus", "of two corpora"])
def test_a_file_with_numbers_is_read_by_row_groups(with_ids, tmp_path, monkeypatch, order, is_shared):
    """Sorted, it may have any number of rows: what is in memory at a time is bounded."""
    numbers = np.arange(60) if order == "sorted" else np.random.default_rng(1).permutation(60)
    columns = {"document": np.repeat(numbers, 1 + is_shared), "even": np.repeat(numbers, 1 + is_shared) % 2 == 0}
    if is_shared:
        with open_corpus(with_ids) as opened:
            columns["fingerprint"] = [opened.fingerprint, "0" * 64] * 60
        columns["even"][1::2] ^= True
    options = {"row_group_size": 7, "write_statistics": order != "without statistics"}
    parquet.write_table(pa.table(columns), tmp_path / "even.parquet", **options)
    given = {"join": tmp_path / "even.parquet", "where": "even=true"}
    select_corpus(with_ids, out=tmp_path / "view", **given)
    assert ids(tmp_path / "view") == [*range(0, 60, 2)]
    small.shrink(monkeypatch.setattr, join_rows=42)
    limited = (
        pytest.raises(UsageError, match=r"any of \d+ rows may name") if order != "sorted" else contextlib.nullcontext()
    )
    with limited:
        select_corpus(with_ids, out=tmp_path / "again", **given)
        assert ids(tmp_path / "again") == [*range(0, 60, 2)]


@pytest.mark.parametrize("form", ["metadata", "column", "dictionary"])
def test_scores_by_number_stay_valid_when_the_corpus_grows(corpus, tmp_path, form):
    with open_corpus(corpus) as opened:
        count, fingerprint = len(opened), opened.fingerprint
    table = pa.table({"document": range(count), "score": np.arange(count) / count})
    if form == "metadata":
        table = table.replace_schema_metadata({"fingerprint": fingerprint})
    else:
        column = pa.array([fingerprint] * count)
        table = table.append_column("fingerprint", column if form == "column" else column.dictionary_encode())
    parquet.write_table(table, tmp_path / "scores.parquet")
    grow(corpus)
    select_corpus(corpus, out=tmp_path / "view", join=tmp_path / "scores.parquet", where="score>=0.5")
    with open_corpus(tmp_path / "view") as view:
        assert [view.in_base(number) for number in range(len(view))] == [*range((count + 1) // 2, count)]


@pytest.mark.parametrize("action", ["changes", "goes"])
def test_a_joined_file_that_changes_between_two_row_groups_selects_nothing_else(
    with_ids, tmp_path, monkeypatch, action
):
    small.shrink(monkeypatch.setattr, copy_task_tokens=1)
    file = tmp_path / "even.parquet"

    def write(*, remainder: int, rows: int) -> None:
        columns = {"document": np.arange(60), "even": np.arange(60) % 2 == remainder}
        parquet.write_table(pa.table(columns), file, row_group_size=rows)

    def change(_: object) -> None:
        file.unlink()
        if action == "changes":
            write(remainder=1, rows=30)

    write(remainder=0, rows=7)
    given = {"join": file, "where": "even=true"}
    with pytest.raises(BuildError, match=r"even\.parquet was changed while documents were selected by it"):
        select_corpus(with_ids, out=tmp_path / "view", observer=at(Receipt, change), **given)
    write(remainder=0, rows=7)
    select_corpus(with_ids, out=tmp_path / "view", **given)
    assert ids(tmp_path / "view") == [*range(0, 60, 2)]


def test_cells_that_are_made_again_leave_what_others_put_beside_them(corpus, tmp_path):
    cells, copied = tmp_path / "cells", tmp_path / "copied"
    select_corpus(corpus, out=cells, by="lang")
    (cells / "lang=en" / "notes.txt").write_text("mine")
    copy_corpus(corpus, out=tmp_path / "whole")
    (tmp_path / "whole").rename(cells / "lang=all")
    shutil.copytree(cells / "lang=all", cells / "rate=1", ignore=lambda *_: {"shards.arrow"})
    select_corpus(corpus, out=cells, by="lang", where="lang=fr", force=True)
    assert os.listdir(cells / "lang=en") == ["notes.txt"]
    assert sorted(path.name for path in cells.glob("lang=*")) == ["lang=all", "lang=en", "lang=fr"]
    assert rows(cells / "lang=all") == rows(corpus)
    assert {*os.listdir(cells / "lang=all")} - {*os.listdir(cells / "rate=1")} == {"shards.arrow"}
    select_corpus(corpus, out=tmp_path / "replaced", by="lang")
    copy_corpus(corpus, out=tmp_path / "replaced", force=True)
    assert verify_corpus(tmp_path / "replaced").is_ok
    assert tokshard("copy", cells, "--cells", "--out", copied, "--workers", "1").exit_code == 0
    mix = (copied / "mix.toml").read_text().replace("temperature = 1.0", "temperature = 0.5")
    (copied / "mix.toml").write_text(mix)
    said = tokshard("copy", cells, "--cells", "--out", copied, "--workers", "1")
    assert said.exit_code == 0
    assert f"note: kept {copied}/mix.toml, although it differs from the one in {cells}" in said.errors
    assert (copied / "mix.toml").read_text() == mix


# in buckets


def test_a_view_and_its_base_may_be_in_a_bucket_or_here_and_a_bucket_is_read_by_range(corpus, tmp_path, bucket):
    local = tmp_path / "views" / "local"
    copy_corpus(corpus, out=f"{bucket}/corpus")
    select_corpus(f"{bucket}/corpus", out=f"{bucket}/views/view", where="lang!=en", by="lang")
    select_corpus(f"{bucket}/corpus", out=tmp_path / "here", where="lang!=en")
    for out in (local, f"{bucket}/of-here"):
        select_corpus(corpus, out=out, where="lang!=en")
    for path in local.iterdir():  # uploaded with its base
        open_store(bucket).put(f"views/local/{path.name}", path.read_bytes())
    for place in (f"{bucket}/views/view", tmp_path / "here", f"{bucket}/of-here", f"{bucket}/views/local"):
        assert rows(place) == rows(local)
    with open_corpus(corpus) as opened:
        langs = [str(row[1]["lang"]) for row in rows(corpus)]
        parquet.write_table(pa.table({"document": range(len(opened)), "said": langs}), tmp_path / "said.parquet")
    open_store(bucket).put("said.parquet", (tmp_path / "said.parquet").read_bytes())
    select_corpus(corpus, out=tmp_path / "joined", join=f"{bucket}/said.parquet", where="said!=en")
    assert rows(tmp_path / "joined") == rows(local)
    for place in (f"{bucket}/views/view", f"{bucket}/views/view/lang=fr", tmp_path / "here"):
        source = CorpusSource(place)
        assert not source.is_in_memory
        assert source.read_factor > 1
        assert_token_source(source)
    listed = tmp_path / "left-out.txt"
    assert tokshard("diff", f"{bucket}/corpus", f"{bucket}/views/view", "--numbers", listed).exit_code == 0
    english = [number for number, row in enumerate(rows(corpus)) if row[1]["lang"] == "en"]
    assert [int(line) for line in listed.read_text().split()] == english


def test_opening_one_more_cell_in_a_bucket_takes_three_requests(corpus, in_memory):
    copy_corpus(corpus, out=f"{in_memory}/corpus")
    select_corpus(f"{in_memory}/corpus", out=f"{in_memory}/cells", by="lang")
    cache, sources = Cache(), []
    for cell in ("en", "fr"):
        REQUESTS.clear()
        sources.append(CorpusSource(f"{in_memory}/cells/lang={cell}", cache=cache))
    assert dict(REQUESTS) == {"stat": 1, "get": 2}


def test_a_view_on_a_web_server_which_lists_nothing_is_read_with_its_base(corpus, tmp_path):
    view = tmp_path / "views" / "a%2Fb"
    select_corpus(corpus, out=view, where="lang=fr")
    mix = tmp_path / "mix.toml"
    mix.write_text('corpora = { a = "views/a%2Fb" }\nseq_len = 8\nseed = 1\nglobal_batch_size = 2\n')
    with file_server(tmp_path) as port:
        assert rows(f"http://127.0.0.1:{port}/views/a%252Fb") == rows(view)
        plan = StreamPlan.load(f"http://127.0.0.1:{port}/mix.toml")
        assert plan.fingerprint == StreamPlan.load(mix).fingerprint
        (tmp_path / "corpus" / "manifest.json").unlink()
        with pytest.raises(CorpusError, match=r"is a view .* which was at http://.*/corpus: .* is not a corpus"):
            open_corpus(f"http://127.0.0.1:{port}/views/a%252Fb")


def test_cells_are_copied_by_their_mix_from_a_web_server_too_and_none_is_left_out(corpus, tmp_path):
    cells = tmp_path / "cells"
    select_corpus(corpus, out=cells, by="lang")

    def copy(folder: Path | str, out: str) -> Said:
        return tokshard("copy", folder, "--cells", "--out", tmp_path / out, "--workers", "1")

    with file_server(tmp_path) as port:
        assert copy(f"http://127.0.0.1:{port}/cells", "copy").exit_code == 0
    assert rows(tmp_path / "copy" / "lang=fr") == rows(cells / "lang=fr")
    for pair in ((cells, tmp_path / "copy"), (tmp_path / "copy", cells)):
        assert tokshard("diff", *pair).exit_code == 0
    (cells / "lang=fr" / "manifest.json").unlink()
    assert "lang=fr is not a corpus" in copy(cells, "again").problem
    mix = cells / "mix.toml"
    mix.write_text(mix.read_text().replace('= "lang=fr"', '= "../corpus"'))
    assert "names ../corpus, expected a cell in its folder" in copy(cells, "again").problem


# its base


def test_a_view_finds_its_base_where_it_was_or_beside_it_and_refuses_another(corpus, tmp_path):
    select_corpus(corpus, out=tmp_path / "views" / "view", where="lang=fr")
    expected = rows(tmp_path / "views" / "view")
    shutil.copytree(tmp_path, tmp_path / "moved")
    assert rows(tmp_path / "moved" / "views" / "view") == expected, "both moved"
    (tmp_path / "links" / "of" / "views").mkdir(parents=True)
    (tmp_path / "links" / "of" / "views" / "view").symlink_to(tmp_path / "views" / "view")
    assert rows(tmp_path / "links" / "of" / "views" / "view") == expected, "through a link that lies deeper"
    copy_corpus(corpus, out=tmp_path / "bare", columns=[])
    grow(corpus)
    assert rows(tmp_path / "views" / "view") == expected, "the base grew"
    corpus.rename(tmp_path / "views" / "elsewhere")
    assert rows(tmp_path / "views" / "view") == expected, "beside it"
    (tmp_path / "views" / "elsewhere").rename(tmp_path / "gone")
    with pytest.raises(CorpusError, match=r"a view of the corpus with the content .*, which was at .*does not exist"):
        open_corpus(tmp_path / "views" / "view")
    write_corpus(tmp_path / "corpus", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    with pytest.raises(CorpusError, match=r"which was at .*corpus: .* has the content"):
        CorpusSource(tmp_path / "views" / "view")
    shutil.rmtree(tmp_path / "corpus")
    (tmp_path / "bare").rename(tmp_path / "corpus")
    with pytest.raises(CorpusError, match=r"which was at .*corpus: .* has no column lang: string"):
        open_corpus(tmp_path / "views" / "view")


def test_a_view_of_a_grown_corpus_finds_a_copy_of_it_which_has_fewer_generations(corpus, tmp_path):
    grow(corpus)
    view = tmp_path / "views" / "view"
    select_corpus(corpus, out=view, where="lang=fr")
    expected = rows(view)
    copy_corpus(corpus, out=tmp_path / "copy")
    shutil.rmtree(corpus)
    (tmp_path / "copy").rename(corpus)
    assert rows(view) == expected


def test_a_plan_refuses_a_generation_of_a_view_which_has_one(corpus, tmp_path):
    grow(corpus)
    select_corpus(corpus, out=tmp_path / "view", where="lang=fr")
    with pytest.raises(UsageError, match="has no generation 1: it has generation 0 only"):
        StreamPlan({"v": tmp_path / "view"}, seq_len=4, generations={"v": 1})


def test_a_view_finds_its_base_beside_it_where_the_old_place_may_not_be_read(corpus, tmp_path):
    view = tmp_path / "views" / "view"
    with file_server(tmp_path) as port, faults.FaultyProxy(("127.0.0.1", port)).running() as proxy:
        select_corpus(f"http://127.0.0.1:{proxy.port}/corpus", out=view, where="lang=fr")
        expected = rows(view)
        proxy.fail(for_ever=faults.status(403, "Forbidden"))
        with pytest.raises(StoreError, match=r"corpus/.*: access denied"):
            open_corpus(view)
        shutil.copytree(corpus, tmp_path / "views" / "base")
        assert rows(view) == expected


def add(column: str, row: int, value: int) -> Edit:
    """Add to a value in the table of a view, for which the manifest then vouches."""
    return table_becomes(lambda rows: rows[column].__setitem__(row, rows[column][row] + value))


TABLE: dict[str, tuple[Change | Edit | None, str]] = {
    "a flipped byte": (flipped(0.5), "*SHA-256*"),
    "no table": (None, "*kept.arrow*"),
    "a document twice": (add("document", 4, -4), "*expected documents after*"),
    "other documents": (add("document", 4, 1), "*tokens from*"),
    "another place": (add("position", 4, 1), "*tokens from*"),
    "other lengths": (add("token", 4, 1), "*tokens from*"),
    "beyond the base": (add("document", -1, 10**6), "*kept.arrow*"),
    "not from the first": (add("number", 0, 1), "*kept.arrow*"),
    "another end": (add("position", -1, 1), "*expected documents after*"),
}
MANIFEST = {
    "another longest document": ("document_lengths longest", 99, "manifest.json says that document_lengths is*"),
    "carries beyond the rows": ("base carries", {"token": [1, 99]}, "*kept.arrow has no carries of token*"),
    "carries of no column": ("base carries", {"tokens": [1]}, "*kept.arrow has no carries of tokens*"),
}
CHANGES = [(what, names.KEPT, *rest) for what, rest in TABLE.items()]
CHANGES += [(what, names.MANIFEST, manifest_says(*edit), said) for what, (*edit, said) in MANIFEST.items()]


def write_view(directory: Path, file: str) -> Path:
    corpus_of(directory / "corpus")
    select_corpus(directory / "corpus", out=directory / "view", where="lang=fr")
    return directory / "view" / file


def problems(directory: Path) -> list[str]:
    return [f"{problem.file} {problem.message}" for problem in verify_corpus(directory / "view").problems]


@damaged(
    [
        Damage(what, partial(write_view, file=file), change, problems, None, message)
        for what, file, change, message in CHANGES
    ]
)
def test_damage(damage: Damage, tmp_path: Path) -> None:
    check(damage, tmp_path)
