"""Loss spans reach the labels: the labels of an epoch are the tokens of the spans, through every loader and form."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora import Source, write_corpus
from tests.examples import examples
from tokshard.errors import DamagedCorpusError, PlanError
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.runtime import FillInTheMiddle, NumpyLoader, StreamingLoader, StreamPlan, expand
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.targets import TargetReader
from tokshard.runtime.rows.transforms import Sample

SIZES = {"seq_len": 8, "block_tokens": 64, "window_blocks": 2, "seed": 5, "allow_small_blocks": True, "pack": "cut"}


def documents_and_spans(lengths, marks):
    """Documents whose tokens are 1, 2, 3, ... over all of them, delimiters 0; spans where marks are true."""
    documents, spans, following, marks = [], [], 1, iter(marks)
    for length in lengths:
        documents.append([*range(following, following + length - 1), 0])
        following += length - 1
        mask = [False, *(next(marks) for _ in range(length - 1)), False]
        edges = np.flatnonzero(np.diff(np.array(mask, np.int64), prepend=0))
        spans.append(edges.tolist())
    return documents, spans


def corpus_of(path, lengths, marks, *, weights=None, **options):
    documents, spans = documents_and_spans(lengths, marks)
    columns = {LOSS: "spans"} if weights is None else LOSS_COLUMNS
    metadata = {LOSS: spans}
    if weights is not None:
        metadata[WEIGHTS] = [[weights(index, k) for k in range(len(one) // 2)] for index, one in enumerate(spans)]
    write_corpus(path, sources=[Source(documents=documents, metadata=metadata)], columns=columns, **options)
    return documents, spans


def targets_by_hand(documents, spans):
    """What a loop may be asked to predict: (token before, target), counted."""
    found = Counter()
    for document, bounds in zip(documents, spans, strict=True):
        for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
            found.update((document[place - 1], document[place]) for place in range(start, stop))
    return found


def targets_of(batches):
    found = Counter()
    for batch in batches:
        inputs, labels = np.asarray(batch["input_ids"]), np.asarray(batch["labels"])
        counts = labels != -100
        assert ((np.asarray(batch["loss_weights"]) != 0) == counts).all()
        found.update(zip(inputs[counts].tolist(), labels[counts].tolist(), strict=True))
    return found


WHOLE = {"seq_len": 8, "block_tokens": 1024, "window_blocks": 2, "seed": 5}
"""Sizes for rows that are packed whole, which corpora with loss spans are by default."""

LENGTHS = [5, 1, 30, 2, 17, 9, 64, 3, 3, 21]
MARKS = (np.random.default_rng(3).random(sum(LENGTHS)) < 0.6).tolist()


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("shard_tokens", [1 << 28, 40])
def test_the_labels_of_an_epoch_are_the_tokens_of_the_spans(tmp_path, access, shard_tokens):
    held = corpus_of(tmp_path / "chat", LENGTHS, MARKS, shard_tokens=shard_tokens)
    plan = StreamPlan({"chat": CorpusSource(tmp_path / "chat", access=access)}, epochs=1, **SIZES)
    with NumpyLoader(plan, global_batch_size=3) as loader:
        assert targets_of(loader) == targets_by_hand(*held)


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("num_documents", [10, 300])
def test_whole_rows_have_the_targets_of_an_epoch_and_cut_no_document_that_fits(tmp_path, access, num_documents):
    rng = np.random.default_rng(num_documents)
    lengths = rng.integers(1, 24, num_documents).tolist()
    held = corpus_of(tmp_path / "chat", lengths, (rng.random(sum(lengths)) < 0.5).tolist(), shard_tokens=700)
    plan = StreamPlan({"chat": CorpusSource(tmp_path / "chat", access=access)}, epochs=1, **WHOLE | {"seq_len": 8})
    assert plan.corpora[0].pack == "whole"
    with NumpyLoader(plan, global_batch_size=3) as loader:
        batches = list(loader)
    found = targets_of(batches)
    # a document is cut at each 8 tokens of its own; the token before a cut still has its label
    assert found == targets_by_hand(*held)
    assert sum(found.values()) == plan.sources[0].corpus.manifest.num_targets
    starts = Counter(
        int(token) for batch in batches for token in batch["input_ids"][batch["position_ids"] == 0] if token
    )
    wanted = Counter(token for document in held[0] for token in document[::8] if token)
    assert starts == wanted


def test_packing_of_a_corpus_follows_its_spans_unless_it_is_given(tmp_path):
    corpus_of(tmp_path / "chat", LENGTHS, MARKS)
    write_corpus(tmp_path / "text", [[*range(1000, 1000 + length), 0] for length in LENGTHS])
    corpora = {"text": tmp_path / "text", "chat": tmp_path / "chat"}
    assert [one.pack for one in StreamPlan(corpora, **WHOLE).corpora] == ["cut", "whole"]
    assert [one.pack for one in StreamPlan(corpora, pack={"text": "whole"}, **WHOLE).corpora] == ["whole", "whole"]
    assert [one.pack for one in StreamPlan(corpora, pack="cut", **WHOLE).corpora] == ["cut", "cut"]


def test_every_form_of_a_batch_has_the_same_labels_and_weights(tmp_path):
    corpus_of(tmp_path / "chat", LENGTHS, MARKS, weights=lambda index, k: 0.5 + index + k / 4)
    plan = StreamPlan({"chat": tmp_path / "chat"}, epochs=1, **SIZES)
    with NumpyLoader(plan, global_batch_size=4) as numpy_loader:
        expected = list(numpy_loader)
    with StreamingLoader(plan, global_batch_size=4) as full:
        found = list(full)
    with StreamingLoader(plan, global_batch_size=4, compact=True) as compact:
        narrow = list(compact)
    assert len(expected) == len(found) == len(narrow)
    for one, two, small in zip(expected, found, narrow, strict=True):
        wide = expand(small)
        for key in ("input_ids", "labels", "loss_weights", "position_ids"):
            np.testing.assert_array_equal(one[key], two[key].numpy())
            assert torch.equal(two[key], wide[key])
        assert wide["loss_weights"].dtype == torch.float32
        assert set(wide) == set(two)


def test_a_target_has_the_weight_of_its_span(tmp_path):
    documents, spans = corpus_of(tmp_path / "chat", LENGTHS, MARKS, weights=lambda index, k: 1 + index + k / 4)
    expected = {}
    for index, (document, bounds) in enumerate(zip(documents, spans, strict=True)):
        for k, (start, stop) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
            expected |= {(document[place - 1], document[place]): 1 + index + k / 4 for place in range(start, stop)}
    plan = StreamPlan({"chat": tmp_path / "chat"}, epochs=1, **SIZES)
    found = {}
    with NumpyLoader(plan, global_batch_size=3) as loader:
        for batch in loader:
            triples = zip(*(batch[key].ravel() for key in ("input_ids", "labels", "loss_weights")), strict=True)
            found |= {(int(one), int(two)): float(weight) for one, two, weight in triples if two != -100}
    # an input 0 is a delimiter, which nothing follows
    assert found == expected


@pytest.mark.parametrize("dp_world_size", [1, 2, 3])
def test_text_and_chat_mix_and_ranks_change_nothing(tmp_path, dp_world_size):
    corpus_of(tmp_path / "chat", LENGTHS, MARKS)
    write_corpus(tmp_path / "text", [[*range(1000, 1000 + length), 0] for length in LENGTHS])
    plan = StreamPlan(
        {"text": tmp_path / "text", "chat": tmp_path / "chat"}, weights={"text": 0.5, "chat": 0.5}, **SIZES
    )
    rows = {}
    for rank in range(dp_world_size):
        with NumpyLoader(plan, global_batch_size=6, dp_rank=rank, dp_world_size=dp_world_size) as loader:
            for _, batch in zip(range(5), loader, strict=False):
                for row, sample in enumerate(batch["sample_index"].tolist()):
                    rows[sample] = batch["labels"][row].tolist(), batch["loss_weights"][row].tolist()
    for sample, (labels, weights) in rows.items():
        whole = plan.sample(sample)
        assert labels == whole["labels"].tolist()
        is_text = plan.names[whole["corpus_index"].item()] == "text"
        ends = whole["input_ids"] == 0
        if is_text:
            assert weights == (~ends[: len(weights)]).astype(float).tolist()


def test_masked_documents_stay_out_of_the_loss(tmp_path):
    documents, spans = corpus_of(tmp_path / "chat", LENGTHS, MARKS)
    (tmp_path / "out.txt").write_text("2\n6\n")
    plan = StreamPlan({"chat": tmp_path / "chat"}, epochs=1, **SIZES)
    kept = [index for index in range(len(documents)) if index not in {2, 6}]
    with StreamingLoader(plan, global_batch_size=2) as loader:
        loader.mask("chat", tmp_path / "out.txt")
        expected = targets_by_hand([documents[i] for i in kept], [spans[i] for i in kept])
        assert targets_of(loader) == expected


def test_infilling_leaves_conversations_as_they_are_and_changes_text(tmp_path):
    held = corpus_of(tmp_path / "chat", LENGTHS, MARKS)
    infilling = FillInTheMiddle(prefix_id=900, suffix_id=901, middle_id=902, rate=1.0)
    plan = StreamPlan({"chat": tmp_path / "chat"}, epochs=1, transforms=[infilling], **SIZES | {"seq_len": 16})
    with NumpyLoader(plan, global_batch_size=2) as loader:
        found = targets_of(loader)
    whole = {pair: count for pair, count in found.items() if not {900, 901, 902} & set(pair)}
    assert whole.items() <= targets_by_hand(*held).items()
    assert sum(found.values()) <= sum(targets_by_hand(*held).values())


def test_a_transform_that_forgets_the_weights_is_refused(tmp_path):
    corpus_of(tmp_path / "chat", LENGTHS, MARKS)

    def forgetful(sample, _):
        return Sample(tokens=sample.tokens, piece_lengths=sample.piece_lengths, next_tokens=sample.next_tokens)

    plan = StreamPlan({"chat": tmp_path / "chat"}, epochs=1, transforms=[forgetful], **SIZES)
    with NumpyLoader(plan, global_batch_size=2) as loader, pytest.raises(PlanError, match="keep the loss_weights"):
        next(iter(loader))


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_a_transform_that_makes_a_weight_no_finite_number_from_0_on_is_refused(tmp_path, weight):
    corpus_of(tmp_path / "chat", LENGTHS, MARKS)

    def spoiling(sample, _):
        return replace(sample, loss_weights=np.full_like(sample.loss_weights, weight))

    plan = StreamPlan({"chat": tmp_path / "chat"}, epochs=1, transforms=[spoiling], **SIZES)
    with NumpyLoader(plan, global_batch_size=2) as loader, pytest.raises(PlanError, match="of finite numbers from 0"):
        next(iter(loader))


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_damaged_spans_end_a_loop_before_a_wrong_label(tmp_path, access):
    corpus_of(tmp_path / "chat", LENGTHS, MARKS)
    source = CorpusSource(tmp_path / "chat", access=access)
    place = source.corpus.shards.batch_places(0)[0]
    shard = tmp_path / "chat" / source.corpus.shards[0].name
    content = bytearray(shard.read_bytes())
    content[place.loss_position + place.loss_bytes - 4] ^= 2
    shard.write_bytes(content)
    plan = StreamPlan({"chat": source}, epochs=1, **SIZES)
    with NumpyLoader(plan, global_batch_size=2) as loader, pytest.raises(DamagedCorpusError, match="loss spans"):
        next(iter(loader))


def test_spans_that_are_kept_make_room_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr("tokshard.runtime.bytes.targets.KEPT_BYTES", 16)
    held = corpus_of(tmp_path / "chat", LENGTHS, MARKS, shard_tokens=20)
    plan = StreamPlan({"chat": tmp_path / "chat"}, epochs=1, **SIZES)
    with NumpyLoader(plan, global_batch_size=2) as loader:
        assert targets_of(loader) == targets_by_hand(*held)


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_conversations_have_their_targets(tmp_path_factory, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    marks = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    seq_len = data.draw(st.sampled_from([1, 2, 5, 16]))
    path: Path = tmp_path_factory.mktemp("corpus") / "chat"
    held = corpus_of(path, lengths, marks, shard_tokens=data.draw(st.sampled_from([1 << 28, 30])))
    sizes = SIZES | {"seq_len": seq_len, "seed": data.draw(st.integers(0, 99))}
    plan = StreamPlan({"chat": path}, epochs=1, **sizes)
    with NumpyLoader(plan, global_batch_size=data.draw(st.integers(1, 5))) as loader:
        assert targets_of(loader) == targets_by_hand(*held)
        with open_count(path) as count:
            assert sum(targets_by_hand(*held).values()) == count


class open_count:  # noqa: N801 - reads as a function
    """The targets that a manifest states."""

    def __init__(self, path):
        self._source = CorpusSource(path)

    def __enter__(self):
        return self._source.corpus.manifest.num_targets

    def __exit__(self, *_):
        self._source.corpus.close()


def test_stretches_are_found_across_record_batches():
    from tokshard.format.loss import Targets

    batches = [Targets(borders=np.array([1, 4])), Targets(borders=np.array([2, 3, 5, 9]))]
    reader = TargetReader(np.array([0, 6, 16]), batches.__getitem__)
    found = reader.find(np.array([7, 0, 8, 15]), np.array([15, 6, 9, 16]))
    assert found.stretches.tolist() == [0, 0, 1, 2]
    assert found.starts.tolist() == [8, 11, 1, 8]
    assert found.stops.tolist() == [9, 15, 4, 9]
