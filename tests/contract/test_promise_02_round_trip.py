"""Promise 2: a corpus holds exactly what the reference tokenizer gives for each document, in input order.

A document of a conversation is exactly what the template renders, with the template's spans.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import builds
from tests.contract.builds import select
from tests.contract.conversations import Json, by_hand, write_tokenizer
from tests.examples import examples
from tests.pipeline.encode.chat import chats
from tests.pipeline.inputs import jsonl
from tests.pipeline.test_tokenizer import reference_of
from tokshard import build_corpus, open_corpus


def places_of(corpus: Path, num_records: int) -> dict[Path, Sequence[int]]:
    """A corpus and a view of every other document of it, and the records that each has."""
    view = select(corpus, corpus.with_name("view"), list(range(0, num_records, 2)))
    return {corpus: range(num_records), view: range(0, num_records, 2)}


written = st.lists(st.text(st.characters(codec="utf-8"), max_size=9) | chats.spellings, max_size=3).map("".join)


@settings(max_examples=examples(12), deadline=None)
@given(records=st.lists(chats.records(written), min_size=1, max_size=40))
def test_every_conversation_has_the_ids_and_the_targets_that_its_template_writes(
    records: list[Json], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = write_tokenizer(folder / "tokenizer")
    build_corpus(iter(records), tokenizer=tokenizer, out=folder / "out", chat="own", workers=1)
    documents = list(map(by_hand, records))
    for location, numbers in places_of(folder / "out", len(records)).items():
        with open_corpus(location) as corpus:
            assert corpus.num_documents == len(numbers)
            for index, number in enumerate(numbers):
                assert corpus.document(index).tolist() == documents[number].ids
                spans = corpus.loss_spans(index).reshape(-1, 2).tolist()
                assert {place for start, stop in spans for place in range(start, stop)} == documents[number].targets


@pytest.mark.slow
def test_real_source_code_has_the_ids_of_the_reference_through_spawned_workers(tmp_path: Path) -> None:
    texts = [
        path.read_text(encoding="utf-8")
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-m]*.py"))
        if path.stat().st_size
    ]
    texts += ["text with <|endoftext|> inside"] * 50
    assert sum(map(len, texts)) > 1_000_000
    source, reference = tmp_path / "source.jsonl", reference_of(builds.TOKENIZER / "tokenizer.json")
    source.write_bytes(jsonl([{"text": text} for text in texts]))
    options: dict[str, Any] = {"workers": 2, "task_bytes": 1 << 20, "shard_tokens": 100_000}
    build_corpus([source], tokenizer=builds.TOKENIZER, out=tmp_path / "out", **options)
    expected = [reference(text) for text in texts]
    for location, records in places_of(tmp_path / "out", len(texts)).items():
        with open_corpus(location) as corpus:
            assert corpus.num_documents == len(records)
            for index, record in enumerate(records):
                assert corpus.document(index).tolist() == [*expected[record], corpus.eos_id]
                assert corpus.provenance(index).record == record + 1
