"""States that a plan does not resume, and generations that it does not have: what is said."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.corpora import TINY_TOKENIZER, append_generation, documents_of, write_corpus
from tests.refusals import Refusal, check, refused
from tests.runtime.loaders import two_corpora
from tests.runtime.sources import ListSource
from tests.runtime.states import edited, values_of
from tokshard.errors import PlanError, PlanMismatchError, UsageError
from tokshard.runtime import CorpusSource, NumpyLoader, StreamPlan

SOURCES = {
    "x": ListSource([9, 4, 30, 1, 12, 3]),
    "y": ListSource([5, 17, 2, 7], first_token=1000),
    "z": ListSource([25, 1, 1, 6], first_token=2000),
}
LATER = [(6, {"a": 0, "b": 1}), (14, {"a": 1, "b": 1})]
SIZES: dict[str, Any] = {"block_tokens": 24, "window_blocks": 2}
Plans = Callable[[], StreamPlan]


def plan_of(names: str, **options: Any) -> StreamPlan:
    return StreamPlan({name: SOURCES[name] for name in names}, **{"seq_len": 6, "seed": 3, **SIZES, **options})


def state_of(plan: StreamPlan, samples: int = 4) -> dict[str, Any]:
    """The state after some samples."""
    with NumpyLoader(plan, global_batch_size=plan.num_streams) as loader:
        for _, _ in zip(range(samples // plan.num_streams), loader, strict=False):
            pass
        return loader.state_dict()


def load(plan: StreamPlan, state: dict[str, Any], **choices: Any) -> NumpyLoader:
    loader = NumpyLoader(plan, global_batch_size=plan.num_streams)
    loader.load_state_dict(state, **choices)
    return loader


def resumes(before: Plans, after: Plans, **choices: Any) -> Callable[[Path], object]:
    return lambda _: load(after(), state_of(before()), **choices)


def with_weights_set(_: Path) -> None:
    loader = NumpyLoader(two_corpora(), global_batch_size=2)
    loader.set_weights({"a": 2, "b": 1})
    load(two_corpora(weights={"a": 0.1, "b": 0.9}), loader.state_dict())


def state_after_a_removal(left: str) -> dict[str, Any]:
    """The state of a run that goes on with one corpus of two."""
    return load(plan_of(left), state_of(plan_of("xy")), corpora="plan").state_dict()


def finite() -> StreamPlan:
    return plan_of("x", epochs=4)


def before_the_counts(_: Path) -> None:
    loader = load(plan_of("yz"), state_of(plan_of("xy"), 8), corpora="plan")
    loader.plan.sample(5, loader.cursor)


def whole(**options: Any) -> StreamPlan:
    return StreamPlan(ListSource([300, 1500, 700] * 40), pack="whole", **options)


SMALL_RUN = {"seq_len": 64, "block_tokens": 16_384, "window_blocks": 3}


def with_bases_that_were_not_read(_: Path) -> None:
    state = load(plan_of("x"), state_of(plan_of("x", seq_len=3)), seq_len="plan").state_dict()
    (length,) = values_of(state)["lengths"]
    load(plan_of("x"), edited(state, lengths=[{**length, "bases": [[5]]}]))


def changed(**values: Any) -> Callable[[Path], object]:
    return lambda _: load(two_corpora(), edited(state_of(two_corpora()), **values))


def grown(folder: Path) -> Path:
    """A corpus of two generations."""
    first, second = documents_of([5, 9, 2, 30, 7, 16, 3] * 6), documents_of([11, 4, 8, 21] * 5)
    corpus = write_corpus(folder / "code", first, tokenizer=TINY_TOKENIZER)
    append_generation(corpus, second)
    return corpus


def of_the_first_generation(folder: Path, **choices: Any) -> None:
    corpus = grown(folder)
    state = state_of(StreamPlan({"code": corpus}, generations={"code": 0}, seq_len=6, **SIZES))
    load(StreamPlan({"code": corpus}, seq_len=6, **SIZES), state, **choices)


OTHER_SIZES = {
    "seed": (3, 4),
    "seq_len": (6, 5),
    "block_tokens": (24, 48),
    "window_blocks": (2, 3),
    "num_streams": (1, 2),
}
VALUES = (
    "give the values of the run to be resumed (sizes of blocks and windows may be left out), or "
    "start a new run without the loader's state"
)
SEQ_LENS = (
    "give the values of the run to be resumed (sizes of blocks and windows may be left out), or "
    "load_state_dict(state, seq_len='plan') to continue with samples of another length, or start a "
    "new run without the loader's state"
)
CORPORA = (
    "give the values of the run to be resumed (sizes of blocks and windows may be left out), or "
    "load_state_dict(state, corpora='plan') to continue with other corpora, or start a new run "
    "without the loader's state"
)
WEIGHTS = (
    "give the weights and the schedule of that run, or load_state_dict(state, weights='plan') to "
    "read with those of this plan from here on, or weights='cursor' to keep what the run has"
)
NO_EPOCHS = "leave epochs out and give max_epochs, or start a new run without the loader's state"
WORDS = {"weights": "'same' or 'cursor' or 'plan'", "corpora": "'same' or 'plan'", "seq_len": "'same' or 'plan'"}
REFUSALS: list[Refusal] = [
    *(
        Refusal(
            what,
            call,
            PlanMismatchError,
            f"this plan sets other weights after sample {sample} than the plan that saved the state: {said} there",
            WEIGHTS,
        )
        for what, call, sample, said in (
            (
                "a state with other weights",
                resumes(two_corpora, lambda: two_corpora(weights={"a": 0.1, "b": 0.9})),
                4,
                "a=0.1, b=0.9; the run has a=0.7, b=0.3",
            ),
            (
                "a state with weights that the run has set, for a plan with others",
                with_weights_set,
                0,
                "a=0.1, b=0.9; the run has a=2, b=1",
            ),
            (
                "a state with other planned changes of weights",
                resumes(lambda: two_corpora(schedule=LATER), lambda: two_corpora(schedule=LATER[:1])),
                4,
                "a=0.7, b=0.3, and other changes later; the run has a=0.7, b=0.3",
            ),
        )
    ),
    Refusal(
        'a state with other planned changes, with weights="state"',
        resumes(lambda: two_corpora(schedule=LATER), two_corpora, weights="cursor"),
        PlanMismatchError,
        "the run planned other changes of weights after sample 4 than this plan, which changes them no more",
        "give the schedule of that run, or load_state_dict(state, weights='plan') to continue with this one",
    ),
    *(
        Refusal(
            f"a state of {what}",
            resumes(partial(plan_of, before), partial(plan_of, after, **options)),
            PlanMismatchError,
            f"the state belongs to another plan: {problem}",
            CORPORA,
        )
        for what, before, after, options, problem in (
            ("more corpora", "xy", "x", {}, "the number of corpora differs (2, now 1)"),
            (
                "corpora in another order",
                "xy",
                "yx",
                {},
                (
                    "the content of corpus 'x' differs (039462b07b56bef9014d, now e44ce1e926fabb1617f6); "
                    "the content of corpus 'y' differs (e44ce1e926fabb1617f6, now 039462b07b56bef9014d)"
                ),
            ),
            ("another part of a corpus", "x", "x", {"take": 0.5}, "take of corpus 'x' differs (1.0, now 0.5)"),
            (
                "another first epoch",
                "x",
                "x",
                {"start_epoch": {"x": 1}},
                "start_epoch of corpus 'x' differs (0, now 1)",
            ),
            (
                "another packing",
                "x",
                "x",
                {"pack": "whole", "block_tokens": 768},
                "block_tokens differs (24, now 768); pack of corpus 'x' differs (cut, now whole)",
            ),
        )
    ),
    Refusal(
        "a corpus that was removed before",
        lambda _: load(plan_of("xy"), state_after_a_removal("y"), corpora="plan"),
        PlanMismatchError,
        "corpus 'x' was removed from the run at sample 4, and this plan has it again",
        "give start_epoch={'x': 1} to read it anew; a corpus that is to pause stays in the plan, with weight 0",
    ),
    *(
        Refusal(
            f"a finite pass after other corpora{also}",
            call,
            PlanMismatchError,
            "the plan is a finite pass of 40 samples, but of the 4 samples of the saved cursor only 3 are from "
            "corpus 'x'",
            NO_EPOCHS,
        )
        for also, call in (
            ("", lambda _: load(finite(), state_of(plan_of("xy")), corpora="plan")),
            (", which were removed before", lambda _: load(finite(), state_after_a_removal("x"))),
        )
    ),
    Refusal(
        "a sample under weights that are not in the state",
        before_the_counts,
        IndexError,
        "sample 5 was read under weights that the cursor does not keep: it keeps those from sample 8 on",
        "",
    ),
    Refusal(
        "sizes of a run that a plan cannot have",
        lambda _: load(whole(seq_len=256), state_of(whole(**SMALL_RUN)), seq_len="plan"),
        PlanMismatchError,
        "the run has block_tokens=16384 and window_blocks=3, which do not go with this plan: "
        "block_tokens is 16384, no multiple of 128 samples of 256, and a corpus has pack='whole'",
        "give a seq_len that divides 128; a new run may grow its seq_len to any that divides block_tokens / 128",
    ),
    Refusal(
        "sizes that a plan was given, and that are not those of the run",
        lambda _: load(whole(seq_len=128, block_tokens=32_768), state_of(whole(**SMALL_RUN)), seq_len="plan"),
        PlanMismatchError,
        "the state belongs to another plan: block_tokens differs (16384, now 32768)",
        VALUES,
    ),
    Refusal(
        "a state of another version",
        changed(tokshard_cursor=2),
        PlanMismatchError,
        "the state has version 2, this tokshard reads 1",
        "load it with the tokshard that saved it, or start a new run without the loader's state",
    ),
    Refusal(
        "a state that was cut",
        lambda _: load(two_corpora(), {"cursor": state_of(two_corpora())["cursor"][:-9]}),
        PlanMismatchError,
        "the state was changed after it was saved: its checksum does not match",
        "give the line as state_dict() returned it; to continue without it, load an older checkpoint, or"
        " start without the loader's state",
    ),
    *(
        Refusal(
            f"a state of an older generation{also}",
            lambda folder, choices=choices: of_the_first_generation(folder, **choices),
            PlanMismatchError,
            "corpus 'code' has grown: the run reads it up to generation 0, the plan up to generation 1",
            "give generations={'code': 0} to continue; to also read what is new, add the folder "
            "'generation-01' as a corpus of its own, and load_state_dict(state, corpora='plan')",
        )
        for also, choices in (("", {}), (", with the corpora of the plan", {"corpora": "plan"}))
    ),
    Refusal(
        "a generation of a corpus that the plan does not have",
        lambda folder: StreamPlan({"code": grown(folder)}, generations={"prose": 0}, seq_len=6),
        PlanError,
        "generations is {'prose': 0}; the plan has code",
        "give names of the plan, and generations from 0",
    ),
    Refusal(
        "a generation for a source that is open already",
        lambda folder: StreamPlan({"code": CorpusSource(grown(folder))}, generations={"code": 0}, seq_len=6),
        PlanError,
        "generations has 'code', which is open already",
        "give its directory, or CorpusSource(directory, generation=...)",
    ),
    Refusal(
        "a generation that a corpus does not have",
        lambda folder: StreamPlan({"code": grown(folder)}, generations={"code": 2}, seq_len=6),
        UsageError,
        "DIR/code has no generation 2: it has generations 0 to 1",
        "give one of these",
    ),
    Refusal(
        "a state with more samples than a change of seq_len began with",
        with_bases_that_were_not_read,
        PlanMismatchError,
        "the state is damaged: the rest of it contradicts lengths",
        "load an older checkpoint, or start without the loader's state",
    ),
    *(
        Refusal(
            f"another word for the {what}",
            resumes(two_corpora, two_corpora, **{what: "new"}),
            ValueError,
            f"{what} must be {words}, got 'new'",
        )
        for what, words in WORDS.items()
    ),
    *(
        Refusal(
            f"a state with another {name}{also}",
            resumes(lambda: plan_of("xy"), partial(plan_of, corpora, **{name: value}), **choices),
            PlanMismatchError,
            f"the state belongs to another plan: {name} differs ({before}, now {value})",
            SEQ_LENS if name == "seq_len" else VALUES,
        )
        for name, (before, value) in OTHER_SIZES.items()
        for also, corpora, choices in (("", "xy", {}), (" and other corpora", "yz", {"corpora": "plan"}))
    ),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
