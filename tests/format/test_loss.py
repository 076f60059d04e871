"""Loss spans on disk: what a shard holds of them, what every reader sees, and what is refused."""

import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc

from tests.corpora import (
    TINY_TOKENIZER,
    Source,
    append_generation,
    change_table,
    rewrite_manifest,
    sign_shards,
    write_corpus,
)
from tests.inspect.test_verification import problems
from tokshard import copy_corpus
from tokshard.errors import DamagedCorpusError
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS, Targets, batch_targets, read_section
from tokshard.format.opening import open_corpus
from tokshard.format.shard import checked_targets

DOCUMENTS = [[1, 2, 3, 0], [0], [3, 3, 1, 2, 2, 0], [2, 0]]
SPANS = [[1, 3], [], [1, 2, 4, 6], [1, 2]]
WEIGHT_LISTS = [[0.5], [], [2.0, 0.25], [1.0]]
SHARD = "shard-00-0000000-000000-0000.arrow"


def source(documents=DOCUMENTS, spans=SPANS, weights=WEIGHT_LISTS, **kept):
    return Source(documents=documents, metadata={LOSS: spans, WEIGHTS: weights, **kept})


def corpus_at(path, *, columns=LOSS_COLUMNS, **options):
    held = {name: values for name, values in source().metadata.items() if name in columns}
    held |= {name: ["a", "b", "c", None] for name in columns if name not in LOSS_COLUMNS}
    sources = [Source(documents=DOCUMENTS, metadata=held)]
    return write_corpus(path, sources=sources, columns=columns, tokenizer=TINY_TOKENIZER, **options)


@pytest.mark.parametrize("columns", [{LOSS: "spans"}, LOSS_COLUMNS, {LOSS: "spans", "url": "string"}])
@pytest.mark.parametrize("shard_tokens", [1 << 28, 6])
def test_a_corpus_gives_the_spans_that_were_written(tmp_path, columns, shard_tokens):
    path = corpus_at(tmp_path / "corpus", columns=columns, shard_tokens=shard_tokens)
    with open_corpus(path) as corpus:
        assert [corpus.loss_spans(index).reshape(-1).tolist() for index in range(4)] == SPANS
        assert corpus.has_spans
        assert corpus.manifest.num_targets == 6 == sum(shard.content.num_targets for shard in corpus.shards)
        assert corpus.metadata(0) == ({"url": "a"} if "url" in columns else {})
    assert problems(path) == []


def test_any_arrow_reader_sees_spans_and_weights(tmp_path):
    table = ipc.open_file((corpus_at(tmp_path / "corpus") / SHARD).read_bytes()).read_all()
    assert table.column_names == ["tokens", LOSS, WEIGHTS]
    assert table.column(LOSS).to_pylist() == SPANS
    assert table.column(WEIGHTS).to_pylist() == WEIGHT_LISTS


def test_without_spans_all_tokens_but_the_first_of_each_document_are_targets(tmp_path):
    with open_corpus(write_corpus(tmp_path / "corpus", DOCUMENTS, tokenizer=TINY_TOKENIZER)) as corpus:
        assert [corpus.loss_spans(index).tolist() for index in range(4)] == [[[1, 4]], [], [[1, 6]], [[1, 2]]]
        assert not corpus.has_spans
        assert corpus.manifest.num_targets is None
        assert corpus.shards[0].content.num_targets == 9


def test_the_table_names_the_bytes_of_the_spans_and_their_crc(tmp_path):
    path = corpus_at(tmp_path / "corpus")
    content = (path / SHARD).read_bytes()
    with open_corpus(path) as corpus:
        place = corpus.shards.batch_places(0)[0]
    section = content[place.loss_position : place.loss_position + place.loss_bytes]
    offsets = np.array([0, 4, 5, 11, 13], "<i8")
    expected = np.array([0, 2, 2, 6, 8], "<i8").tobytes() + np.array([1, 3, 1, 2, 4, 6, 1, 2], "<u4").tobytes()
    expected += np.array([0, 1, 1, 3, 4], "<i8").tobytes() + np.array([0.5, 2.0, 0.25, 1.0], "<f4").tobytes()
    assert section == expected
    assert place.loss_hash == zlib.crc32(offsets.tobytes() + section)
    targets = checked_targets(section, offsets, place, is_weighted=True, where="here")
    assert targets.of_tokens(0, 13).tolist() == [0, 0.5, 0.5, 0, 0, 0, 2, 0, 0, 0.25, 0.25, 0, 1]


def test_spans_decide_about_the_content_fingerprint_and_shards_do_not(tmp_path):
    first = open_corpus(corpus_at(tmp_path / "a", columns={LOSS: "spans"})).fingerprint
    assert open_corpus(corpus_at(tmp_path / "b", columns={LOSS: "spans"}, shard_tokens=6)).fingerprint == first
    others = [
        corpus_at(tmp_path / "weighted"),
        write_corpus(tmp_path / "text", DOCUMENTS, tokenizer=TINY_TOKENIZER),
        write_corpus(
            tmp_path / "shifted",
            sources=[Source(documents=DOCUMENTS, metadata={LOSS: [[1, 3], [], [2, 3, 4, 6], [1, 2]]})],
            columns={LOSS: "spans"},
            tokenizer=TINY_TOKENIZER,
        ),
    ]
    assert len({first, *(open_corpus(path).fingerprint for path in others)}) == 4


def test_weights_of_one_are_the_same_content_as_no_weights(tmp_path):
    ones = [[1.0], [], [1.0, 1.0], [1.0]]
    weighted = write_corpus(
        tmp_path / "weighted", sources=[source(weights=ones)], columns=LOSS_COLUMNS, tokenizer=TINY_TOKENIZER
    )
    plain = corpus_at(tmp_path / "plain", columns={LOSS: "spans"})
    assert open_corpus(weighted).fingerprint == open_corpus(plain).fingerprint


def test_a_corpus_that_grew_has_the_fingerprint_of_one_that_was_written_at_once(tmp_path):
    grown = corpus_at(tmp_path / "grown")
    append_generation(grown, sources=[source([[3, 1, 0]], [[1, 3]], [[4.0]])], columns=LOSS_COLUMNS)
    more = Source(documents=[*DOCUMENTS, [3, 1, 0]], metadata={LOSS: [*SPANS, [1, 3]], WEIGHTS: [*WEIGHT_LISTS, [4.0]]})
    at_once = write_corpus(tmp_path / "once", sources=[more], columns=LOSS_COLUMNS, tokenizer=TINY_TOKENIZER)
    with open_corpus(grown) as corpus:
        assert corpus.fingerprint == open_corpus(at_once).fingerprint
        assert corpus.manifest.num_targets == 8
        assert corpus.loss_spans(4).tolist() == [[1, 3]]
    assert problems(grown) == []


@pytest.mark.parametrize("shuffle", [None, 3])
def test_a_copy_keeps_spans_and_weights(tmp_path, shuffle):
    path = corpus_at(tmp_path / "corpus", columns={**LOSS_COLUMNS, "url": "string"})
    copy_corpus(str(path), out=tmp_path / "copy", columns=(), shuffle=shuffle, workers=1)
    with open_corpus(path) as corpus, open_corpus(tmp_path / "copy") as copied:
        assert (copied.fingerprint == corpus.fingerprint) == (shuffle is None)
        assert copied.manifest.columns == LOSS_COLUMNS
        held = {bytes(corpus.document(i)): corpus.loss_spans(i).tolist() for i in range(4)}
        assert {bytes(copied.document(i)): copied.loss_spans(i).tolist() for i in range(4)} == held
    assert problems(tmp_path / "copy") == []


def test_a_copy_of_chat_and_text_gives_text_the_spans_that_it_stands_for(tmp_path):
    chat = corpus_at(tmp_path / "chat")
    text = write_corpus(tmp_path / "text", [[1, 1, 0], [0]], tokenizer=TINY_TOKENIZER)
    copy_corpus([str(text), str(chat)], out=tmp_path / "both", workers=1)
    with open_corpus(tmp_path / "both") as both:
        assert [both.loss_spans(i).tolist() for i in range(3)] == [[[1, 3]], [], [[1, 3]]]
        assert both.shard(0).columns(0)[WEIGHTS].to_pylist()[:2] == [[1.0], []]
    assert problems(tmp_path / "both") == []


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([0, 2], "has the span 0 to 2, expected"),
        ([2, 2], "has the span 2 to 2, expected"),
        ([3, 2], "has the span 3 to 2, expected"),
        ([1, 5], "has the span 1 to 5, expected"),
        ([2, 3, 1, 2], "has the span 1 to 2, expected"),
        ([1, 2, 2, 3], "has the span 2 to 3, expected"),
        ([1, 2, 3], "has an odd number of values"),
    ],
)
def test_what_is_no_span_of_a_document_is_refused_when_it_is_written(tmp_path, spans, message):
    bad = Source(documents=[[1, 2, 3, 0]], metadata={LOSS: [spans]})
    with pytest.raises(ValueError, match=message):
        write_corpus(tmp_path / "corpus", sources=[bad], columns={LOSS: "spans"}, tokenizer=TINY_TOKENIZER)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_a_positive_number(tmp_path, weight):
    bad = source([[1, 2, 3, 0]], [[1, 3]], [[weight]])
    with pytest.raises(ValueError, match="not above 0 and finite"):
        write_corpus(tmp_path / "corpus", sources=[bad], columns=LOSS_COLUMNS, tokenizer=TINY_TOKENIZER)


def test_spans_may_touch_only_where_they_have_weights():
    offsets, spans = np.array([0, 4]), (np.array([0, 4]), np.array([1, 2, 2, 4], np.uint32))
    weights = (np.array([0, 2]), np.array([1, 2], np.float32))
    assert batch_targets(spans, weights, offsets=offsets).of_tokens(0, 4).tolist() == [0, 1, 2, 2]
    with pytest.raises(ValueError, match="do not touch"):
        batch_targets(spans, offsets=offsets)


@pytest.mark.parametrize("column", [LOSS, WEIGHTS])
def test_a_flipped_byte_of_spans_is_reported_and_never_read(tmp_path, column):
    path = corpus_at(tmp_path / "corpus")
    shard = path / SHARD
    with open_corpus(path) as corpus:
        place = corpus.shards.batch_places(0)[0]
    content = bytearray(shard.read_bytes())
    content[place.loss_position + 8 * 5 + (0 if column == LOSS else 4 * 8 + 8 * 5)] ^= 1
    shard.write_bytes(content)
    with open_corpus(path) as corpus, pytest.raises(DamagedCorpusError, match="its loss spans have CRC-32"):
        corpus.loss_spans(0)
    sign_shards(path)  # the hashes of the files are right again
    assert any("its loss spans have CRC-32" in problem for problem in problems(path))


def test_a_table_that_is_wrong_about_targets_is_refused(tmp_path):
    path = corpus_at(tmp_path / "corpus")
    change_table(path, "shards.arrow", lambda rows: {**rows, "num_targets": [5]})
    with pytest.raises(DamagedCorpusError, match="column num_targets adds up to 5, expected 6"):
        open_corpus(path)


def test_a_table_that_gives_a_shard_more_targets_than_it_has_tokens_is_refused(tmp_path):
    path = corpus_at(tmp_path / "corpus", shard_tokens=6)
    with open_corpus(path) as corpus:
        counts = [shard.content.num_targets for shard in corpus.shards]
    for moved in (counts[0] + 1, -4):  # the sum stays
        change_table(
            path,
            "shards.arrow",
            lambda rows, by=moved: {**rows, "num_targets": [counts[0] - by, counts[1] + by, *counts[2:]]},
        )
        with pytest.raises(DamagedCorpusError, match="column num_targets adds up to 6, expected 6, in no shard"):
            open_corpus(path)


def test_record_batches_that_do_not_hold_the_tokens_of_their_shard_are_refused_before_spans_are_found(tmp_path):
    path = corpus_at(tmp_path / "corpus")
    change_table(path, "shards.arrow", lambda rows: {**rows, "batch_tokens": [[12]]})
    with open_corpus(path) as corpus, pytest.raises(DamagedCorpusError, match="do not hold the tokens of the shard"):
        corpus.shards.batch_tokens()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_bytes_behind_the_spans_of_a_record_batch_are_refused(is_weighted):
    section = np.array([0, 2], "<i8").tobytes() + np.array([1, 2], "<u4").tobytes()
    if is_weighted:
        section += np.array([0, 1], "<i8").tobytes() + np.array([0.5], "<f4").tobytes()
    offsets = np.array([0, 3])
    assert read_section(section, offsets, is_weighted=is_weighted).borders.tolist() == [1, 2]
    with pytest.raises(ValueError, match="loss has 4 bytes more than its offsets say"):
        read_section(section + bytes(4), offsets, is_weighted=is_weighted)


@pytest.mark.parametrize(
    "columns",
    [{"url": "string", LOSS: "spans"}, {"mask": "spans"}, {WEIGHTS: "weights"}, {WEIGHTS: "weights", LOSS: "spans"}],
)
def test_columns_of_spans_have_their_names_and_their_places(tmp_path, columns):
    path = corpus_at(tmp_path / "corpus")
    rewrite_manifest(path, lambda fields: fields.update(columns=columns))
    with pytest.raises(DamagedCorpusError, match="the columns of loss spans first and under their names"):
        open_corpus(path)


def test_a_kept_column_may_be_called_loss(tmp_path):
    kept = Source(documents=[[1, 0]], metadata={LOSS: [0.5]})
    path = write_corpus(tmp_path / "corpus", sources=[kept], columns={LOSS: "float64"}, tokenizer=TINY_TOKENIZER)
    with open_corpus(path) as corpus:
        assert not corpus.has_spans
        assert corpus.metadata(0) == {LOSS: 0.5}
    assert "num_targets" not in json.loads((path / "manifest.json").read_text())


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_weights_of_a_stretch_are_those_of_its_tokens(mask, data):
    mask[0] = False
    padded = np.diff(np.array([*mask, False], np.int64), prepend=0)
    borders = np.flatnonzero(padded)
    numbers = np.arange(1, len(borders) // 2 + 1, dtype=np.float32)
    start = data.draw(st.integers(0, len(mask)))
    stop = data.draw(st.integers(start, len(mask)))
    naive, span = [], 0
    for index, is_target in enumerate(mask):
        span += is_target and not mask[index - 1]
        naive.append(float(span) if is_target else 0.0)
    assert Targets(borders=borders, weights=numbers).of_tokens(start, stop).tolist() == naive[start:stop]
    assert Targets(borders=borders).of_tokens(start, stop).tolist() == [float(one > 0) for one in naive[start:stop]]
