"""Promise 1 wherever an input is cut: every record of every format is in the corpus once, in order, with its number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.examples import examples
from tests.pipeline.inputs import FORMATS, jsonl, texts_of
from tokshard import build_corpus, open_corpus

pytestmark = pytest.mark.timeout(300)

texts = st.text(st.characters(codec="utf-8"), max_size=12).map(lambda text: f"{text}.")


def build(sources: Sequence[Any], place: Path, tokenizer: Path, *, chunk_bytes: int, **options: Any) -> Any:
    """Build in this process, with chunks of a few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, chunk_bytes=chunk_bytes)
        build_corpus(sources, tokenizer=tokenizer, out=place / "out", workers=1, **options)
    return open_corpus(place / "out")


def num_tasks(corpus: Any) -> int:
    """Tasks and segments that wrote a shard."""
    return len({shard.name.rpartition("-")[0] for shard in corpus.shards})


@given(
    data=st.data(),
    documents=st.lists(texts, min_size=1, max_size=20),
    chunk_bytes=st.integers(8, 200),
    chunks_per_task=st.integers(1, 4),
    size=st.integers(1, 9),
)
@settings(max_examples=examples(20))
def test_every_cut_of_every_format_gives_every_record_once(
    byte_tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    documents: list[str],
    chunk_bytes: int,
    chunks_per_task: int,
    size: int,
) -> None:
    place = tmp_path_factory.mktemp("place")
    records = [{"text": text, "n": number} for number, text in enumerate(documents)]
    kinds = data.draw(st.lists(st.sampled_from(list(FORMATS)), min_size=1, max_size=3), label="formats")
    paths = [place / f"{number}-{name}" for number, name in enumerate(kinds)]
    for name, path in zip(kinds, paths, strict=True):
        path.write_bytes(FORMATS[name](records, size))
    options = {"task_bytes": chunk_bytes * chunks_per_task, "shard_tokens": 100, "keep_field": ["n:int64"]}
    with build(paths, place, byte_tokenizer, chunk_bytes=chunk_bytes, **options) as corpus:
        assert texts_of(corpus) == documents * len(paths)
        found = [corpus.provenance(index) for index in range(len(corpus))]
        assert [(at.source, at.record) for at in found] == [
            (source, record) for source in range(len(paths)) for record in range(1, len(documents) + 1)
        ]
        assert [corpus.metadata(index)["n"] for index in range(len(corpus))] == [*range(len(documents))] * len(paths)


@pytest.mark.parametrize("line_bytes", [31, 32, 33])
def test_lines_that_start_or_end_where_a_task_does_are_read_once(
    line_bytes: int, byte_tokenizer: Path, tmp_path: Path
) -> None:
    documents = [f"{number:02d}".ljust(line_bytes - len('{"text": ""}\n'), ".") for number in range(20)]
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": text} for text in documents]))
    assert (tmp_path / "a.jsonl").stat().st_size == 20 * line_bytes
    with build([tmp_path / "a.jsonl"], tmp_path, byte_tokenizer, chunk_bytes=64, task_bytes=64) as corpus:
        assert texts_of(corpus) == documents
        # a line belongs to the task in which it begins
        assert num_tasks(corpus) == len({number * line_bytes // 64 for number in range(20)})
