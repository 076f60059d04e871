"""Edge cases of traces: the last sample of a pass, the end of a text, unknown sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.corpora import TINY_TOKENIZER, Source, change_table, documents_of, write_corpus
from tokshard.errors import UsageError
from tokshard.format.loss import LOSS, LOSS_COLUMNS
from tokshard.inspect.plan.preview import report_plan
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


@pytest.mark.timeout(20)
def test_the_first_step_of_a_range_is_shown_at_once_however_long_it_is(corpus):
    plan = StreamPlan({"a": str(corpus)}, seq_len=3, allow_small_blocks=True)
    run = Run(plan=plan, global_batch_size=2, cursor=plan.cursor())
    assert {row.step for row in next(trace_steps(run, range(1, 10**12)))} == {1}


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


@pytest.mark.filterwarnings("ignore:the change of seq_len")
@pytest.mark.parametrize("lengths", [(2, 4), (4, 2)])
def test_a_pass_that_changed_its_seq_len_and_batch_size_ends_where_its_loader_ends(tmp_path, lengths):
    write_corpus(tmp_path / "a", documents_of([5, 9, 2, 4, 30, 1, 7]), tokenizer=TINY_TOKENIZER)
    mix, state = tmp_path / "mix.toml", {}
    for seq_len, size, num_steps in ((lengths[0], 2, 3), (lengths[1], 3, 99)):
        sizes = f"seq_len = {seq_len}\nglobal_batch_size = {size}\nblock_tokens = 16\nwindow_blocks = 1"
        mix.write_text(f'corpora = {{ a = "a" }}\nepochs = 1\n{sizes}\n')
        loader = NumpyLoader(StreamPlan.load(mix))
        if state:
            loader.load_state_dict(state, seq_len="plan")
        steps = [loader.state_dict() for _ in zip(range(num_steps), loader, strict=False)]
        state = steps[0] if state else steps[-1]
        loader.close()
    (tmp_path / "state.json").write_text(state["cursor"])
    run = replace(open_run(str(mix), {}, checkpoint=str(tmp_path / "state.json")), step=4)
    report, ends = report_plan(run, num_tokens=None), loader.stats()
    assert (report.num_steps, report.num_samples) == (3 + len(steps), ends["samples"])
    assert [(one.samples, one.tokens, one.epochs) for one in report.corpora] == [
        (of["samples"], of["tokens"], of["epoch"]) for of in ends["corpora"].values()
    ]
    assert report.num_tokens == report.corpora[0].tokens
    assert len(loader) == -(-ends["samples"] // 3)
    list(trace_samples(run, range(ends["samples"])))
    with pytest.raises(UsageError, match="is not a range of the plan's samples"):
        list(trace_samples(run, range(ends["samples"] + 1)))


def test_samples_that_a_used_up_corpus_keeps_from_being_read_are_not_traced(corpus):
    plan = StreamPlan({"a": str(corpus)}, seq_len=3, max_epochs=0.5, allow_small_blocks=True)
    run = Run(plan=plan, global_batch_size=2, cursor=plan.cursor())
    (rows,) = trace_samples(run, range(4))
    assert {(row.step, row.sample) for row in rows} == {(1, 0), (1, 1), (2, 2), (2, 3)}
    with pytest.raises(UsageError, match="is not a range of the plan's samples"):
        list(trace_samples(run, range(4, 5)))


@pytest.mark.parametrize("table", ["", "[data]\n"])
def test_an_edited_recipe_is_traced_with_its_weights_from_the_checkpoint_on_however_it_gives_them(
    corpus, tmp_path, table
):
    write_corpus(tmp_path / "b", documents_of([8, 20]), tokenizer=TINY_TOKENIZER)
    mix, state = tmp_path / "mix.toml", tmp_path / "state.json"

    def run_of(weights):
        sizes = "seq_len = 3\nglobal_batch_size = 2\nallow_small_blocks = true"
        mix.write_text(f'{table}corpora = {{ a = "{corpus}", b = "b" }}\n{sizes}\n{weights}\n')
        return open_run(str(mix), {}, checkpoint=str(state) if state.exists() else None)

    before = run_of("weights = { a = 3, b = 1 }")
    loader = NumpyLoader(before.plan, global_batch_size=2)
    loader.skip(4)
    state.write_text(loader.state_dict()["cursor"])
    for edited in ("repeats = { a = 2 }", *[""] * bool(table)):  # without weights, a mix leaves them to the program
        found = run_of(edited)
        assert found.cursor.segments[-1].weights == found.plan.schedule.at(4).weights != (3, 1)


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


def test_a_masked_piece_has_no_targets(tmp_path):
    source = Source(documents=documents_of([9, 9]), metadata={LOSS: [[1, 9], [1, 9]]})
    corpus = write_corpus(tmp_path / "corpus", sources=[source], columns={LOSS: LOSS_COLUMNS[LOSS]})
    (tmp_path / "out.txt").write_text("1\n")
    plan = StreamPlan({"a": str(corpus)}, seq_len=9, epochs=1, allow_small_blocks=True)
    run = Run(plan=plan, global_batch_size=1, cursor=plan.masking(plan.cursor(), "a", str(tmp_path / "out.txt")))
    (rows,) = trace_samples(run, range(plan.num_samples))
    assert {(row.document.document, row.masked, row.num_targets) for row in rows} == {(0, None, 8), (1, "labels", 0)}
