"""Promise 1 wherever an input is cut: every record of every format is in the corpus once, in order, with its number."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.examples import examples
from tests.pipeline import foreign
from tests.pipeline.inputs import EOS, FORMATS, arrow_bytes, jsonl, parquet_bytes, table, texts_of
from tokshard import build_corpus, import_corpus, open_corpus

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


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_cut_where_that_is_asked_for(name: str, byte_tokenizer: Path, tmp_path: Path) -> None:
    rng = random.Random(1)  # what compresses well is smaller than a task
    records = [{"text": f"text {number} {rng.randbytes(30).hex()}"} for number in range(40)]
    (tmp_path / name).write_bytes(FORMATS[name](records, 4))
    with build([tmp_path / name], tmp_path, byte_tokenizer, chunk_bytes=64, task_bytes=256) as corpus:
        assert num_tasks(corpus) >= 3
        assert texts_of(corpus) == [record["text"] for record in records]


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


# ids of other tools


def in_a_table(encode: Callable[..., bytes], path: Path, documents: Sequence[Sequence[int]], size: int) -> Path:
    path.write_bytes(encode(table([{"tokens": list(document)} for document in documents]), size))
    return path


def flat_npy(path: Path, documents: Sequence[Sequence[int]]) -> Path:
    path.write_bytes(foreign.npy([token for document in documents for token in document], "u2"))
    return path


IMPORTS: dict[str, Callable[[Path, list[list[int]], int], Path]] = {
    "megatron": lambda place, documents, _: foreign.megatron(place / "a", documents),
    "datatrove": lambda place, documents, _: foreign.datatrove(place / "a.ds", documents),
    "numpy": lambda place, documents, _: foreign.numpy_arrays(place / "a.npy", documents),
    "flat": lambda place, documents, _: flat_npy(place / "a.npy", documents),
    "parquet": lambda place, documents, size: in_a_table(parquet_bytes, place / "a.parquet", documents, size),
    "arrow": lambda place, documents, size: in_a_table(arrow_bytes, place / "a.arrow", documents, size),
}
"""Writes documents as a source of an import."""


@pytest.mark.parametrize("form", IMPORTS)
@settings(max_examples=examples(10))
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    task_bytes=st.integers(1, 60),
    batch_bytes=st.sampled_from([8, 16, 40]),
    size=st.integers(1, 4),
)
def test_every_cut_of_an_import_gives_every_document_once(
    form: str,
    byte_tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    task_bytes: int,
    batch_bytes: int,
    size: int,
) -> None:
    place = tmp_path_factory.mktemp("place")
    eos_id = 0
    documents = [[number + 1] * length + [eos_id] for number, length in enumerate(lengths)]
    source = IMPORTS[form](place, documents, size)
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, chunk_bytes=1, import_batch_bytes=batch_bytes, import_documents=2)
        import_corpus(
            [source], tokenizer=byte_tokenizer, out=place / "out", task_bytes=task_bytes, shard_tokens=9, workers=1
        )
    with open_corpus(place / "out") as corpus:
        assert corpus.manifest.tokenizer.special_ids == {EOS: eos_id}
        assert [document.tolist() for document in corpus.documents()] == documents
        assert [corpus.provenance(index).record for index in range(len(corpus))] == [*range(1, len(documents) + 1)]
