"""Loss spans on disk: what a shard holds of them, and what every reader sees."""

from __future__ import annotations

import contextlib
import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc

from tests.corpora import TINY_TOKENIZER, Source, append_generation, documents_of, loss_metadata, write_corpus
from tests.format.test_damage import SHARD
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS, Targets, read_section
from tokshard.format.opening import open_corpus
from tokshard.format.shard import checked_targets
from tokshard.inspect.verify.verification import verify_corpus

weights_of_tokens = st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.25]), max_size=9).map(lambda found: [0.0, *found])
weights_of_documents = st.lists(weights_of_tokens, min_size=1, max_size=8)


def source(documents, *, before=()):
    """Documents whose tokens have these weights, after some others."""
    metadata = loss_metadata(documents) | {"url": ["a"] * len(documents)}
    return Source(documents=documents_of([*map(len, [*before, *documents])])[len(before) :], metadata=metadata)


def write(directory, documents, columns=LOSS_COLUMNS, **options):
    held = source(documents)
    sources = [Source(documents=held.documents, metadata={name: held.metadata[name] for name in columns})]
    return write_corpus(directory, sources=sources, columns=columns, tokenizer=TINY_TOKENIZER, **options)


@given(documents=weights_of_documents, more=weights_of_documents, shard_tokens=st.integers(1, 40))
def test_spans_and_weights_come_back_and_decide_about_the_content_however_it_is_cut(documents, more, shard_tokens):
    every = [*documents, *more]
    with tempfile.TemporaryDirectory() as folder:
        whole = write(Path(folder) / "whole", every, {**LOSS_COLUMNS, "url": "string"})
        grown = write(Path(folder) / "grown", documents, shard_tokens=shard_tokens)
        append_generation(grown, sources=[source(more, before=documents)], columns=LOSS_COLUMNS)
        ones = [[float(weight > 0) for weight in one] for one in every]
        plain = write(Path(folder) / "plain", ones, {LOSS: "spans"})
        for path, written in ((whole, every), (grown, every), (plain, ones)):
            expected = [weight for one in written for weight in one]
            with open_corpus(path) as corpus:
                found = [corpus.loss_spans(index).reshape(-1).tolist() for index in range(len(corpus))]
                assert found == loss_metadata(written)[LOSS]
                shards = [corpus.shard(index).targets(0) for index in range(len(corpus.shards))]
                sizes = [shard.num_tokens for shard in corpus.shards]
                assert np.concatenate([*map(Targets.of_tokens, shards, [0] * len(sizes), sizes)]).tolist() == expected
                assert corpus.manifest.num_targets == np.count_nonzero(expected)
                assert corpus.metadata(0) == ({"url": "a"} if path == whole else {})
            assert verify_corpus(path).is_ok
        manifests = [open_corpus(path).manifest for path in (whole, grown)]
        for field in (
            "num_documents",
            "num_tokens",
            "num_targets",
            "text_bytes",
            "dtype",
            "document_lengths",
            "records",
        ):
            assert getattr(manifests[0], field) == getattr(manifests[1], field)
        contents = [open_corpus(path).fingerprint for path in (whole, grown, plain)]
        assert contents[0] == contents[1]
        assert (contents[0] == contents[2]) == (every == ones)


def test_without_spans_all_tokens_but_the_first_of_each_document_are_targets(tmp_path):
    with open_corpus(write_corpus(tmp_path / "text", documents_of([4, 1, 6]), tokenizer=TINY_TOKENIZER)) as corpus:
        assert [corpus.loss_spans(index).tolist() for index in range(3)] == [[[1, 4]], [], [[1, 6]]]
        assert (corpus.has_spans, corpus.manifest.num_targets, corpus.shards.content(0).num_targets) == (False, None, 8)
    with open_corpus(write(tmp_path / "chat", [[0, 1, 1, 1], [0], [0, 1, 1, 1, 1, 1]], {LOSS: "spans"})) as chat:
        assert (chat.has_spans, chat.fingerprint != corpus.fingerprint) == (True, True)


def test_the_table_names_the_bytes_of_the_spans_and_their_crc(tmp_path):
    weights = [[0, 0.5, 0.5, 0], [0], [0, 2, 0, 0, 0.25, 0.25], [0, 1]]
    content = (write(tmp_path / "corpus", weights) / SHARD).read_bytes()
    table = ipc.open_file(content).read_all()
    assert table.column_names == ["tokens", LOSS, WEIGHTS]
    assert table.column(LOSS).to_pylist() == [[1, 3], [], [1, 2, 4, 6], [1, 2]]
    assert table.column(WEIGHTS).to_pylist() == [[0.5], [], [2.0, 0.25], [1.0]]
    with open_corpus(tmp_path / "corpus") as corpus:
        place = corpus.shards.batch_places(0)[0]
    section = content[place.loss_position : place.loss_position + place.loss_bytes]
    offsets = np.array([0, 4, 5, 11, 13], "<i8")
    expected = np.array([0, 2, 2, 6, 8], "<i8").tobytes() + np.array([1, 3, 1, 2, 4, 6, 1, 2], "<u4").tobytes()
    expected += np.array([0, 1, 1, 3, 4], "<i8").tobytes() + np.array([0.5, 2.0, 0.25, 1.0], "<f4").tobytes()
    assert section == expected
    assert place.loss_hash == zlib.crc32(offsets.tobytes() + section)
    targets = checked_targets(section, offsets, place, is_weighted=True, where="here")
    assert targets.of_tokens(0, 13).tolist() == [weight for one in weights for weight in one]


INT64, UINT32, FLOAT = "<i8", "<u4", "<f4"


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([(INT64, [0, 2]), (UINT32, [1, 2])], None),
        ([(INT64, [0, 2]), (UINT32, [1, 2, 3])], "loss has 4 bytes more than its offsets say"),
        ([(INT64, [0])], "loss has 8 bytes for the offsets of 1 documents"),
        ([(INT64, [0, 2]), (UINT32, [1])], "loss has 20 bytes, its offsets ask for 24"),
        ([(INT64, [0, -2]), (UINT32, [1])], "loss has 20 bytes, its offsets ask for 8"),
        ([(INT64, [1, 2]), (UINT32, [1, 2])], "offsets of loss must ascend from 0 to 2"),
        ([(INT64, [0, 2]), (UINT32, [1, 2]), (INT64, [0, 1]), (FLOAT, [0.5])], None),
        ([(INT64, [0, 2]), (UINT32, [1, 2]), (INT64, [0, 1]), (FLOAT, [0.5, 1])], "loss has 4 bytes more"),
        ([(INT64, [0, 2]), (UINT32, [1, 2]), (INT64, [0, 2]), (FLOAT, [0.5, 1])], "loss_weights has not one number"),
    ],
)
def test_a_loss_section_holds_the_spans_of_its_documents_and_nothing_else(parts, problem):
    section = b"".join(np.array(values, kind).tobytes() for kind, values in parts)
    with pytest.raises(ValueError, match=problem) if problem else contextlib.nullcontext():
        targets = read_section(section, np.array([0, 3]), is_weighted=len(parts) > 2)
        assert targets.of_tokens(0, 3).tolist() == [0, 0.5 if len(parts) > 2 else 1, 0]


def test_a_kept_column_may_be_called_loss(tmp_path):
    kept = Source(documents=[[1, 0]], metadata={LOSS: [0.5]})
    path = write_corpus(tmp_path / "corpus", sources=[kept], columns={LOSS: "float64"}, tokenizer=TINY_TOKENIZER)
    with open_corpus(path) as corpus:
        assert (corpus.has_spans, corpus.metadata(0)) == (False, {LOSS: 0.5})
    assert "num_targets" not in json.loads((path / "manifest.json").read_text())


@given(weights=weights_of_tokens, data=st.data())
def test_weights_of_a_stretch_are_those_of_its_tokens(weights, data):
    found = loss_metadata([weights])
    start = data.draw(st.integers(0, len(weights)))
    stop = data.draw(st.integers(start, len(weights)))
    targets = Targets(borders=np.array(found[LOSS][0], np.int64), weights=np.array(found[WEIGHTS][0], np.float32))
    assert targets.of_tokens(start, stop).tolist() == weights[start:stop]
