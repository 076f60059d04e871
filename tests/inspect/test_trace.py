"""Edge cases of traces: the last sample of a pass, the end of a text, unknown sources."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.corpora import TINY_TOKENIZER, Source, change_table, documents_of, write_corpus
from tokshard.cli.main import run
from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run, open_run
from tokshard.inspect.plan.trace import DocumentReader, trace_samples, trace_steps
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.state import save_state


@pytest.fixture
def corpus(tmp_path):
    source = Source(documents=documents_of([5, 9, 2, 4]), path="\x1b]0;x\x07.jsonl")
    return write_corpus(tmp_path / "corpus", sources=[source], tokenizer=TINY_TOKENIZER)


@pytest.fixture
def finite(corpus):
    """One pass over 20 tokens in samples of 3: 7 of them, the last one padded."""
    plan = StreamPlan({"a": str(corpus)}, seq_len=3, epochs=1, allow_small_blocks=True)
    return Run(plan=plan, global_batch_size=2, cursor=plan.cursor())


def test_the_last_sample_of_a_pass_is_traced_and_the_one_after_it_refused(finite):
    assert finite.plan.num_samples == 7
    (rows,) = trace_samples(finite, range(6, 7))
    assert {row.sample for row in rows} == {6}
    assert sum(row.stop - row.start for row in rows) == 2
    (every,) = trace_samples(finite, range(7))
    assert sum(row.stop - row.start for row in every) == 20
    for samples in (range(6, 8), range(7, 8), range(3, 3)):
        with pytest.raises(UsageError, match="is not a range of the plan's samples"):
            list(trace_samples(finite, samples))


def test_the_last_step_of_a_pass_is_traced_and_the_one_after_it_refused(finite):
    (rows,) = trace_steps(finite, range(4, 5))
    assert {(row.step, row.row, row.sample) for row in rows} == {(4, 0, 6)}
    with pytest.raises(UsageError, match="there is no step 5"):
        list(trace_steps(finite, range(4, 6)))


def test_a_finished_pass_has_done_the_step_that_was_padded(corpus, tmp_path):
    mix = tmp_path / "mix.toml"
    mix.write_text(
        f'corpora = {{ a = "{corpus}" }}\nseq_len = 3\nglobal_batch_size = 2\nepochs = 1\nallow_small_blocks = true\n'
    )
    plan = StreamPlan.load(str(mix))
    for samples, step in ((7, 4), (6, 3), (5, None)):
        state = save_state(plan, plan.cursor().advanced(samples))["cursor"]
        (tmp_path / "state.json").write_text(state)
        assert open_run(str(mix), {}, checkpoint=str(tmp_path / "state.json")).step == step


def test_dots_mark_omitted_text_and_nothing_else(tmp_path):
    """Text may be cut by its characters, or by tokens before it is decoded: then it may be short and still be cut."""
    tokenizer = TINY_TOKENIZER.replace(b'"decoder": null', b'"decoder": {"type": "Fuse"}')
    assert tokenizer != TINY_TOKENIZER
    documents = [[1, 1, 1, 1, 2, 0], [2, 3, 0]]
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=tokenizer)
    plan = StreamPlan({"a": str(corpus)}, seq_len=3, allow_small_blocks=True)
    reader = DocumentReader(Run(plan=plan, global_batch_size=1, cursor=plan.cursor()))
    assert reader.text("a", 1, 0, 3, num_characters=100) == "twothree<eos>"
    assert reader.text("a", 1, 0, 2, num_characters=8) == "twothree"
    assert reader.text("a", 1, 0, 2, num_characters=7) == "twothre..."
    assert reader.text("a", 0, 4, 5, num_characters=3) == "two"


def test_dots_mark_omitted_tokens_even_without_text(tmp_path):
    without_ones = b'{"type": "Replace", "pattern": {"String": "one"}, "content": ""}'
    nothing = b'{"type": "Sequence", "decoders": [' + without_ones + b', {"type": "Fuse"}]}'
    tokenizer = TINY_TOKENIZER.replace(b'"decoder": null', b'"decoder": ' + nothing)
    corpus = write_corpus(tmp_path / "corpus", [[2, *[1] * 8, 3, 0]], tokenizer=tokenizer)
    plan = StreamPlan({"a": str(corpus)}, seq_len=3, allow_small_blocks=True)
    reader = DocumentReader(Run(plan=plan, global_batch_size=1, cursor=plan.cursor()))
    assert reader.text("a", 0, 0, 10, num_characters=5) == "two..."
    assert reader.text("a", 0, 0, 5, num_characters=5) == "two"


def test_a_document_of_a_source_that_does_not_exist_is_traced(finite, corpus):
    for source in (-1, 7):
        change_table(corpus, "shards.arrow", lambda rows, source=source: {**rows, "run_source": [[source]]})
        plan = StreamPlan({"a": str(corpus)}, seq_len=3, epochs=1, allow_small_blocks=True)
        rows = next(trace_samples(Run(plan=plan, global_batch_size=2, cursor=plan.cursor()), range(1)))
        assert {row.document.source for row in rows} == {"unknown"}


def test_names_that_would_steer_the_terminal_are_escaped_in_every_report(corpus, tmp_path, capsys):
    evil = "\x1b]0;x\x07"
    mix = tmp_path / f"{evil}.toml"
    shown = evil.replace("\x1b", "\\u001b").replace("\x07", "\\u0007")
    (tmp_path / evil).symlink_to(corpus)
    mix.write_text(
        f'corpora = {{ "{shown}" = "{tmp_path / shown}" }}\n'
        "seq_len = 3\nglobal_batch_size = 2\nallow_small_blocks = true\n"
    )
    plan = str(mix)
    for command in (
        ["trace", plan, "--step", "1"],
        ["trace", plan, "--document", f"{evil}:0"],
        ["trace", plan, "--document", f"{evil}:99"],
        ["trace", plan, "--step", "1", "--checkpoint", str(tmp_path / f"{evil}.pt")],
        ["plan", plan],
        ["inspect", str(tmp_path / evil)],
        ["inspect", str(tmp_path / evil), str(corpus)],
        ["inspect", str(tmp_path / evil), "--document", "1"],
        ["inspect", str(tmp_path / evil), "--document", "99"],
        ["inspect", str(tmp_path / evil), str(corpus), "--grep", "two"],
        ["inspect", str(tmp_path / evil), "--grep", evil],
        ["diff", str(tmp_path / evil), str(corpus)],
        ["diff", plan, plan],
        ["verify", str(tmp_path / evil)],
        ["verify", plan],
        ["verify", str(tmp_path / f"no{evil}")],
    ):
        run(command)
        captured = capsys.readouterr()
        assert captured.out + captured.err
        assert "\x1b" not in captured.out + captured.err, command
        assert "\x07" not in captured.out + captured.err, command


def test_ranks_get_contiguous_rows(finite):
    places = [replace(finite, global_batch_size=4, world_size=2).place_of(sample) for sample in range(4)]
    first = places[0][1]  # the parts of a step are turned
    assert places == [(1, first, 0), (1, first, 1), (1, 1 - first, 0), (1, 1 - first, 1)]
    (rows,) = trace_steps(replace(finite, world_size=2), range(1, 2), rank=1)
    assert np.unique([row.sample for row in rows]).tolist() == [1]
