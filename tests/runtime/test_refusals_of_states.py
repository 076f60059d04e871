"""States that a plan does not resume, and generations that it does not have: what is said."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.corpora import TINY_TOKENIZER, append_generation, documents_of, write_corpus
from tests.refusals import Call, Refusal, check, refused, said_in
from tests.runtime.loaders import resumed, state_after, two_corpora
from tests.runtime.sources import ListSource
from tests.runtime.states import edited, values_of
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


def resumes(before: Plans, after: Plans, **choices: Any) -> Callable[[Path], object]:
    return lambda _: resumed(after(), state_after(before(), 4), **choices)


def of(before: str, after: str, choices: Any = None, **options: Any) -> Call:
    """A plan over some corpora and another one."""
    return resumes(partial(plan_of, before), partial(plan_of, after, **options), **choices or {})


def with_weights_set(_: Path) -> None:
    loader = NumpyLoader(two_corpora(), global_batch_size=2)
    loader.set_weights({"a": 2, "b": 1})
    resumed(two_corpora(weights={"a": 0.1, "b": 0.9}), loader.state_dict())


def state_after_a_removal(left: str) -> dict[str, Any]:
    """The state of a run that goes on with one corpus of two."""
    return resumed(plan_of(left), state_after(plan_of("xy"), 4), corpora="plan").state_dict()


def finite() -> StreamPlan:
    return plan_of("x", epochs=4)


def before_the_counts(_: Path) -> None:
    loader = resumed(plan_of("yz"), state_after(plan_of("xy"), 8), corpora="plan")
    loader.plan.sample(5, loader.cursor)


def whole(**options: Any) -> StreamPlan:
    return StreamPlan(ListSource([300, 1500, 700] * 40), pack="whole", **options)


SMALL_RUN = {"seq_len": 64, "block_tokens": 16_384, "window_blocks": 3}


def with_bases_that_were_not_read(_: Path) -> None:
    state = resumed(plan_of("x"), state_after(plan_of("x", seq_len=3), 4), seq_len="plan").state_dict()
    (length,) = values_of(state)["lengths"]
    resumed(plan_of("x"), edited(state, lengths=[{**length, "bases": [[5]]}]))


def changed(**values: Any) -> Callable[[Path], object]:
    return lambda _: resumed(two_corpora(), edited(state_after(two_corpora(), 4), **values))


def grown(folder: Path) -> Path:
    """A corpus of two generations."""
    first, second = documents_of([5, 9, 2, 30, 7, 16, 3] * 6), documents_of([11, 4, 8, 21] * 5)
    corpus = write_corpus(folder / "code", first, tokenizer=TINY_TOKENIZER)
    append_generation(corpus, second)
    return corpus


def of_the_first_generation(folder: Path, **choices: Any) -> None:
    corpus = grown(folder)
    state = state_after(StreamPlan({"code": corpus}, generations={"code": 0}, seq_len=6, **SIZES), 4)
    resumed(StreamPlan({"code": corpus}, seq_len=6, **SIZES), state, **choices)


def plan_over(folder: Path, **options: Any) -> StreamPlan:
    """A plan over a corpus of two generations."""
    return StreamPlan({"code": grown(folder)}, seq_len=6, **options)


OTHER_SIZES = {"seed": 4, "seq_len": 5, "block_tokens": 48, "window_blocks": 3, "num_streams": 2}

CALLS: dict[str, Call] = {
    "a state with other weights": resumes(two_corpora, lambda: two_corpora(weights={"a": 0.1, "b": 0.9})),
    "a state with weights that the run has set, for a plan with others": with_weights_set,
    "a state with other planned changes of weights": resumes(
        lambda: two_corpora(schedule=LATER), lambda: two_corpora(schedule=LATER[:1])
    ),
    'a state with other planned changes, with weights="state"': resumes(
        lambda: two_corpora(schedule=LATER), two_corpora, weights="cursor"
    ),
    "a state of more corpora": of("xy", "x"),
    "a state of corpora in another order": of("xy", "yx"),
    "a state of another part of a corpus": of("x", "x", take=0.5),
    "a state of another first epoch": of("x", "x", start_epoch={"x": 1}),
    "a state of another packing": of("x", "x", pack="whole", block_tokens=768),
    "a corpus that was removed before": lambda _: resumed(plan_of("xy"), state_after_a_removal("y"), corpora="plan"),
    "a finite pass after other corpora": lambda _: resumed(finite(), state_after(plan_of("xy"), 4), corpora="plan"),
    "a finite pass after other corpora, which were removed before": lambda _: resumed(
        finite(), state_after_a_removal("x")
    ),
    "a sample under weights that are not in the state": before_the_counts,
    "sizes of a run that a plan cannot have": lambda _: resumed(
        whole(seq_len=256), state_after(whole(**SMALL_RUN), 4), seq_len="plan"
    ),
    "a plan with other sizes than the run": lambda _: resumed(
        whole(seq_len=128, block_tokens=32_768), state_after(whole(**SMALL_RUN), 4), seq_len="plan"
    ),
    "a state of another version": changed(tokshard_cursor=2),
    "a state that was cut": lambda _: resumed(two_corpora(), {"cursor": state_after(two_corpora(), 4)["cursor"][:-9]}),
    "a state of an older generation": of_the_first_generation,
    "a state of an older generation, with the corpora of the plan": partial(of_the_first_generation, corpora="plan"),
    "a generation of a corpus that the plan does not have": partial(plan_over, generations={"prose": 0}),
    "a generation for a source that is open already": lambda folder: StreamPlan(
        {"code": CorpusSource(grown(folder))}, generations={"code": 0}, seq_len=6
    ),
    "a generation that a corpus does not have": partial(plan_over, generations={"code": 2}),
    "a state with more samples than a change of seq_len began with": with_bases_that_were_not_read,
    **{
        f"another word for the {what}": resumes(two_corpora, two_corpora, **{what: "new"})
        for what in ("weights", "corpora", "seq_len")
    },
    **{
        f"a state with another {name}{also}": of("xy", corpora, choices, **{name: value})
        for name, value in OTHER_SIZES.items()
        for also, corpora, choices in (("", "xy", {}), (" and other corpora", "yz", {"corpora": "plan"}))
    },
}
REFUSALS = said_in(Path(__file__).with_name("refusals_of_states.txt"), CALLS)


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
