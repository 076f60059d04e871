"""Edge cases of traces: the last sample of a pass, the end of a text, unknown sources."""

from __future__ import annotations

import pytest

from tests.corpora import TINY_TOKENIZER, change_table, documents_of, write_corpus
from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run, open_run
from tokshard.inspect.plan.trace import DocumentReader, trace_samples, trace_steps
from tokshard.runtime import NumpyLoader, StreamPlan


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", documents_of([5, 9, 2, 4]), tokenizer=TINY_TOKENIZER)


@pytest.fixture
def finite(corpus):
    """One pass over 20 tokens in samples of 3: 7 of them, the last one padded."""
    plan = StreamPlan({"a": str(corpus)}, seq_len=3, epochs=1, allow_small_blocks=True)
    return Run(plan=plan, global_batch_size=2, cursor=plan.cursor())


def test_the_last_sample_and_step_of_a_pass_are_traced_and_those_after_them_refused(finite):
    (rows,) = trace_samples(finite, range(6, 7))
    assert {row.sample for row in rows} == {6}
    assert sum(row.stop - row.start for row in rows) == 2
    (every,) = trace_samples(finite, range(7))
    assert sum(row.stop - row.start for row in every) == 20
    (rows,) = trace_steps(finite, range(4, 5))
    assert {(row.step, row.row, row.sample) for row in rows} == {(4, 0, 6)}
    for samples in (range(6, 8), range(7, 8), range(3, 3)):
        with pytest.raises(UsageError, match="is not a range of the plan's samples"):
            list(trace_samples(finite, samples))
    with pytest.raises(UsageError, match="there is no step 5"):
        list(trace_steps(finite, range(4, 6)))


def test_a_finished_pass_has_done_the_step_that_was_padded(corpus, tmp_path):
    mix = tmp_path / "mix.toml"
    mix.write_text(
        f'corpora = {{ a = "{corpus}" }}\nseq_len = 3\nglobal_batch_size = 2\nepochs = 1\nallow_small_blocks = true\n'
    )
    plan = StreamPlan.load(str(mix))
    with NumpyLoader(plan, global_batch_size=1) as loader:
        states = [loader.state_dict()["cursor"] for _ in loader]
    for samples, step in ((7, 4), (6, 3), (5, None)):
        (tmp_path / "state.json").write_text(states[samples - 1])
        assert open_run(str(mix), {}, checkpoint=str(tmp_path / "state.json")).step == step


FUSED = b'{"type": "Fuse"}'
WITHOUT_ONES = b'{"type": "Replace", "pattern": {"String": "one"}, "content": ""}'
SILENT = b'{"type": "Sequence", "decoders": [' + WITHOUT_ONES + b", " + FUSED + b"]}"


@pytest.mark.parametrize(
    ("decoder", "document", "tokens", "num_characters", "text"),
    [
        (FUSED, [2, 3, 0], (0, 3), 100, "twothree<eos>"),
        (FUSED, [2, 3, 0], (0, 2), 8, "twothree"),
        (FUSED, [2, 3, 0], (0, 2), 7, "twothre..."),
        (FUSED, [1, 1, 1, 1, 2, 0], (4, 5), 3, "two"),
        (SILENT, [2, *[1] * 8, 3, 0], (0, 10), 5, "two..."),
        (SILENT, [2, *[1] * 8, 3, 0], (0, 5), 5, "two"),
    ],
)
def test_dots_mark_omitted_text_or_tokens_and_nothing_else(tmp_path, decoder, document, tokens, num_characters, text):
    """Text may be cut by its characters, or by tokens before it is decoded: then it may be short and still be cut."""
    tokenizer = TINY_TOKENIZER.replace(b'"decoder": null', b'"decoder": ' + decoder)
    corpus = write_corpus(tmp_path / "corpus", [document], tokenizer=tokenizer)
    plan = StreamPlan({"a": str(corpus)}, seq_len=3, allow_small_blocks=True)
    reader = DocumentReader(Run(plan=plan, global_batch_size=1, cursor=plan.cursor()))
    assert reader.text("a", 0, *tokens, num_characters=num_characters) == text


def test_a_document_of_a_source_that_does_not_exist_is_traced(finite, corpus):
    for source in (-1, 7):
        change_table(corpus, "shards.arrow", lambda rows, source=source: {**rows, "run_source": [[source]]})
        plan = StreamPlan({"a": str(corpus)}, seq_len=3, epochs=1, allow_small_blocks=True)
        rows = next(trace_samples(Run(plan=plan, global_batch_size=2, cursor=plan.cursor()), range(1)))
        assert {row.document.source for row in rows} == {"unknown"}
