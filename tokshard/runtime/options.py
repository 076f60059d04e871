"""The arguments of plans and loaders: their defaults and checks."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

from tokshard.errors import PlanError
from tokshard.numbers import ceil_div
from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.cursor import MAX_SAMPLE, Schedule
from tokshard.runtime.order.mixture import Segment, are_weights, times_the_largest
from tokshard.runtime.order.windows import BLOCK_SECTIONS, CorpusOrder, Pack, Shape
from tokshard.runtime.rows.transforms import Transform

MIN_BLOCK_TOKENS = 65_536
WHOLE_SEQ_LEN = 8_192
"""With default sizes, a run whose corpora are packed whole can change its `seq_len` to any that divides this one."""

WINDOW_TOKENS = 64 << 20
MIN_WINDOW_BLOCKS = 64

MAX_EPOCHS = (1 << 32) - 1
MAX_STREAMS = 65_536

_MAX_SIZE = (1 << 32) - 1
"""The largest seq_len, block and window: positions in a window are 32 bits wide."""

Weights = Mapping[str, float]
CorpusLike = str | os.PathLike[str] | TokenSource


def integer(
    name: str, value: Any, *, least: int | None = None, most: int | None = MAX_SAMPLE, example: int = 4096
) -> int:
    """An argument as a Python integer. numpy integers are accepted, floats never.

    Args:
        example: for the hint, if the value suggests no number.

    Raises:
        PlanError: it is not an integer, or out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        near = {example}
        if isinstance(value, float) and math.isfinite(value):
            near = {number for number in (math.floor(value), math.ceil(value)) if least is None or number >= least}
        raise PlanError(
            f"{name} is {value!r:.100} ({type(value).__name__}), expected an integer",
            hint=f"give an integer such as {' or '.join(map(str, sorted(near) or [example]))}",
        ) from None
    if least is not None and number < least:
        raise PlanError(f"{name} is {number}, expected at least {least}", hint=f"give {least} or more")
    if most is not None and number > most:
        raise PlanError(f"{name} is {number}, expected at most {most}", hint="give a smaller number")
    return number


def real(name: str, value: Any) -> float:
    """An argument as a float.

    Raises:
        PlanError: it is not a number.
    """
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return float(value)
    except (OverflowError, TypeError, ValueError):
        raise PlanError(
            f"{name} is {value!r:.100} ({type(value).__name__}), expected a number", hint="give a number such as 0.5"
        ) from None


def flag(name: str, value: Any) -> bool:
    """An argument that is true or false. A text such as "false", from a configuration, would count as true.

    Raises:
        PlanError: it is neither.
    """
    if not isinstance(value, bool):
        raise PlanError(f"{name} is {value!r:.100} ({type(value).__name__})", hint="give True or False")
    return value


def named_corpora(corpora: CorpusLike | Mapping[str, CorpusLike]) -> dict[str, CorpusLike]:
    """The corpora of a plan by their names; a single directory is named after itself.

    Raises:
        PlanError: there are no corpora, or one is neither a path nor a source.
    """
    if isinstance(corpora, Mapping):
        named = dict(corpora)
    elif isinstance(corpora, str | os.PathLike):
        named = {os.path.basename(os.path.normpath(corpora)): corpora}
    else:
        named = {"corpus": corpora}
    if not named:
        raise PlanError("the plan has no corpus", hint="give {name: directory, ...}, or one directory")
    for name, corpus in named.items():
        if not isinstance(name, str):
            raise PlanError(f"{name!r} names a corpus, expected a string", hint="give {name: directory, ...}")
        if not isinstance(corpus, str | os.PathLike) and not isinstance(corpus, TokenSource):
            raise PlanError(
                f"corpus {name!r} is {corpus!r:.100}, expected a directory",
                hint="give {name: directory, ...}, or one directory",
            )
    return named


def generations_of(corpora: Mapping[str, CorpusLike], generations: Any) -> dict[str, int | None]:
    """The generation up to which each corpus is read; None: the newest.

    Raises:
        PlanError: a name is unknown or names an open source; or a value is not a generation.
    """
    given = _of_plan("generations", {} if generations is None else generations, corpora, "generations from 0")
    for name in given:
        if not isinstance(corpora[name], str | os.PathLike):
            raise PlanError(
                f"generations has {name!r}, which is open already",
                hint="give its directory, or CorpusSource(directory, generation=...)",
            )
    numbers = {name: integer(f"the generation of {name!r}", value, least=0, example=0) for name, value in given.items()}
    return {name: numbers.get(name) for name in corpora}


def check_sources(names: Sequence[str], sources: Sequence[TokenSource]) -> None:
    """Refuse empty corpora, and corpora of different tokenizers."""
    for name, source in zip(names, sources, strict=True):
        if source.num_tokens < 1:
            raise PlanError(f"corpus {name!r} holds no tokens", hint="leave it out of the plan")
        if source.tokenizer != sources[0].tokenizer or source.dtype != sources[0].dtype:
            raise PlanError(
                f"corpora {names[0]!r} and {name!r} have different tokenizers "
                f"({sources[0].tokenizer[:12]}..., {source.tokenizer[:12]}...): the same id means different tokens",
                hint="build them with the same tokenizer.json",
            )


def shape_of(
    seq_len: int,
    block_tokens: int | None,
    window_blocks: int | None,
    *,
    packs: Sequence[Pack] = (),
    allow_small_blocks: bool = False,
) -> Shape:
    """The sizes of a plan, with their defaults; the windows are the smallest ones, unless their size is given.

    Args:
        packs: how the rows of its corpora are filled.
    """
    seq_len = integer("seq_len", seq_len, least=1, most=_MAX_SIZE)
    if block_tokens is not None:
        block_tokens = integer("block_tokens", block_tokens, least=1, most=_MAX_SIZE)
    if window_blocks is not None:
        window_blocks = integer("window_blocks", window_blocks, least=1, most=_MAX_SIZE)
    default, has_sections = max(MIN_BLOCK_TOKENS, 16 * seq_len), "whole" in packs
    if has_sections:
        default = ceil_div(WHOLE_SEQ_LEN, seq_len) * BLOCK_SECTIONS * seq_len
    block = block_tokens or default
    if has_sections and block % (unit := BLOCK_SECTIONS * seq_len):
        raise PlanError(
            f"block_tokens is {block}, no multiple of {BLOCK_SECTIONS} samples of {seq_len}, and a corpus has "
            "pack='whole'",
            hint=f"leave it out, or give {ceil_div(block, unit) * unit}"
            + f"; a run that goes on keeps its block_tokens, so its seq_len has to divide {block // BLOCK_SECTIONS}"
            * (block >= BLOCK_SECTIONS),
        )
    if not flag("allow_small_blocks", allow_small_blocks) and block < 4 * seq_len:
        raise PlanError(
            f"block_tokens is {block}, less than 4 samples of {seq_len}: long documents would be shuffled badly",
            hint=f"give at least {4 * seq_len}, or allow_small_blocks=True",
        )
    window = window_blocks or MIN_WINDOW_BLOCKS
    room = block + block // BLOCK_SECTIONS * has_sections
    if (window + 1) * room >= 1 << 32:
        raise PlanError(
            f"a window of {window} blocks of {block} tokens has 2**32 tokens or more",
            hint="give a smaller window_blocks or block_tokens",
        )
    return Shape(seq_len=seq_len, block_tokens=block, window_blocks=window)


def default_window_blocks(block_tokens: int, num_streams: int, schedule: Schedule) -> int:
    """Blocks in a window of one stream: as many as make it last as many steps as that of a single corpus.

    So the windows of all streams, and those of all corpora, together need the memory of few windows. The largest share
    of a corpus decides: it halves the window as often as it is at most a half. Windows of other corpora last longer.
    """
    times = min(times_the_largest(segment.weights) for segment in schedule.segments)
    return max(MIN_WINDOW_BLOCKS, WINDOW_TOKENS // (block_tokens * num_streams << times.bit_length() - 1))


def epochs_of(epochs: int | None, num_corpora: int, num_streams: int) -> int | None:
    """The number of epochs of a finite pass; None: the plan is endless."""
    if epochs is None:
        return None
    epochs = integer("epochs", epochs, most=MAX_EPOCHS)
    if epochs < 1 or num_corpora > 1:
        raise PlanError(
            f"epochs is {epochs} for {num_corpora} corpora; a finite pass is at least 1 epoch of one corpus",
            hint="make one plan per corpus, or leave epochs out",
        )
    if num_streams > 1:
        raise PlanError(
            f"epochs is {epochs} and num_streams {num_streams}: streams end their epochs at different samples, so a "
            "finite pass needs one stream",
            hint="leave epochs out, or num_streams",
        )
    return epochs


def transforms_of(transforms: Any) -> tuple[Transform, ...]:
    """One transform, or several."""
    found = tuple(transforms) if isinstance(transforms, Iterable) else (transforms,)
    for transform in found:
        if not callable(transform):
            raise PlanError(
                f"{transform!r:.100} is given as a transform, expected a function of a sample and a generator",
                hint="give a list of functions, or of objects that can be called",
            )
    return found


def corpora_of(
    names: Sequence[str],
    sources: Sequence[TokenSource],
    shape: Shape,
    *,
    seed: int,
    start_epoch: Mapping[str, int] | None,
    take: float | Mapping[str, float],
    num_streams: int,
    packs: Sequence[Pack],
    epochs: int | None,
) -> tuple[CorpusOrder, ...]:
    """The orders of the corpora, in plan order."""
    given = _of_plan("start_epoch", {} if start_epoch is None else start_epoch, names, "epochs from 0")
    first_epochs = [integer(f"start_epoch of {name!r}", given.get(name, 0), least=0, most=MAX_EPOCHS) for name in names]
    takes = _per_corpus("take", take, names, default=1.0)
    _check_copies(names, sources, first_epochs)
    corpora = tuple(
        CorpusOrder(
            source=source,
            shape=shape,
            seed=seed,
            start_epoch=first_epochs[index],
            take=takes[index],
            num_streams=num_streams,
            pack=packs[index],
            epochs=epochs,
        )
        for index, source in enumerate(sources)
    )
    check_takes(names, corpora)
    return corpora


def _check_copies(names: Sequence[str], sources: Sequence[TokenSource], start_epochs: Sequence[int]) -> None:
    """Refuse the same content twice with the same first epoch: both would read the same samples in the same order."""
    known: dict[tuple[str, int], str] = {}
    for name, source, epoch in zip(names, sources, start_epochs, strict=True):
        first = known.setdefault((source.fingerprint, epoch), name)
        if first != name:
            raise PlanError(
                f"corpora {first!r} and {name!r} have the same content, and both begin at epoch {epoch}: they would "
                "read the same samples",
                hint=f"list it once with the sum of the weights, or give start_epoch={{{name!r}: {epoch + 1_000_000}}}",
            )


def _per_corpus(
    argument: str, value: float | Mapping[str, float], names: Sequence[str], *, default: float
) -> tuple[float, ...]:
    """One number for all corpora or a number for each name, in plan order."""
    if not isinstance(value, Mapping):
        return (real(argument, value),) * len(names)
    given = _of_plan(argument, value, names, "numbers")
    return tuple(real(f"{argument} of {name!r}", given.get(name, default)) for name in names)


def _of_plan(argument: str, given: Any, names: Collection[str], values: str) -> Mapping[str, Any]:
    """Check that values by corpus use only names of the plan."""
    if not isinstance(given, Mapping) or set(given) - set(names):
        raise PlanError(
            f"{argument} is {given!r:.100}; the plan has {', '.join(names)}",
            hint=f"give names of the plan, and {values}",
        )
    return given


def packs_of(names: Sequence[str], sources: Sequence[TokenSource], pack: Any) -> tuple[Pack, ...]:
    """How the rows of each corpus are filled, in plan order; by default, corpora with loss spans are packed whole."""
    defaults: dict[str, Pack] = {
        name: "whole" if source.has_spans else "cut" for name, source in zip(names, sources, strict=True)
    }
    if pack is None:
        return tuple(defaults.values())
    given = pack if isinstance(pack, Mapping) else dict.fromkeys(names, pack)
    if set(given) - set(names) or not all(word in get_args(Pack) for word in given.values()):
        raise PlanError(
            f"pack is {pack!r:.100}; the plan has {', '.join(names)}",
            hint=f"give 'cut' or 'whole', or one of them for names of the plan: {{{names[0]!r}: 'whole'}}",
        )
    return tuple((defaults | dict(given)).values())


def check_takes(names: Sequence[str], corpora: Sequence[CorpusOrder]) -> None:
    """Refuse shares outside of ``(0, 1]``, and shares of less than a block."""
    for name, corpus in zip(names, corpora, strict=True):
        if not 0 < corpus.take <= 1:
            raise PlanError(f"take is {corpus.take} for corpus {name!r}", hint="give a part above 0 and at most 1")
        if not corpus.num_tokens:
            block_tokens = corpus.shape.block_tokens
            blocks = corpus.source.num_tokens // block_tokens
            raise PlanError(
                f"take={corpus.take} of corpus {name!r} is less than one of its {blocks} blocks of "
                f"{block_tokens} tokens",
                hint=f"give a smaller block_tokens, or {'take more' if blocks else 'leave take out'}",
            )


def max_epochs_of(
    max_epochs: float | Mapping[str, float] | None, names: Sequence[str], on_max_epochs: str, num_streams: int
) -> tuple[float, ...]:
    """How often each corpus may be read, in plan order; infinity: any number of times.

    Raises:
        PlanError: a number is not above 0, or a plan with several streams would stop at it.
    """
    if on_max_epochs not in ("stop", "warn"):
        raise PlanError(f"on_max_epochs is {on_max_epochs!r}", hint="give 'stop' or 'warn'")
    found = _per_corpus("max_epochs", math.inf if max_epochs is None else max_epochs, names, default=math.inf)
    if not all(epochs > 0 for epochs in found):
        raise PlanError(
            f"max_epochs is {max_epochs}",
            hint="give numbers above 0; a weight of 0 leaves a corpus out",
        )
    if num_streams > 1 and on_max_epochs == "stop" and any(math.isfinite(epochs) for epochs in found):
        raise PlanError(
            f"max_epochs is {max_epochs} and num_streams {num_streams}: streams end their epochs at different samples, "
            "so a pass that stops needs one stream",
            hint="give on_max_epochs='warn', or leave num_streams or max_epochs out",
        )
    return found


def checked_weights(names: Sequence[str], weights: Weights) -> tuple[float, ...]:
    """Weights in plan order.

    Raises:
        PlanError: a name is unknown or missing, or a weight is negative, infinite, or all are 0.
    """
    if not isinstance(weights, Mapping):
        raise PlanError(
            f"weights are {weights!r:.100}, expected a number for each corpus", hint=f"give {_example(names)}"
        )
    if set(weights) != set(names):
        raise PlanError(
            f"weights are for {', '.join(map(str, weights))}; the plan has {', '.join(names)}",
            hint="give one weight per corpus; 0 leaves a corpus out",
        )
    ordered = tuple(real(f"the weight of {name!r}", weights[name]) + 0.0 for name in names)  # -0 is 0
    if not are_weights(ordered):
        raise PlanError(
            f"weights are {dict(weights)}; expected finite numbers of at least 0, not all 0",
            hint="0 leaves a corpus out",
        )
    return ordered


def schedule_of(
    tokens: Mapping[str, float],
    weights: Weights | None,
    repeats: Mapping[str, float] | None,
    changes: Sequence[tuple[int, Weights]],
) -> Schedule:
    """The first weights of a plan, and its planned changes.

    Args:
        tokens: of each corpus, in plan order.
        repeats: how often corpora are read, relative to each other, instead of weights; 1 where none is given.

    Raises:
        PlanError: the changes are not in order, or weights do not fit the corpora.
    """
    names = list(tokens)
    if weights is not None and repeats is not None:
        raise PlanError("both weights and repeats are given", hint="give one of them: weights = tokens x repeats")
    if weights is None:
        given = _of_plan("repeats", {} if repeats is None else repeats, names, "numbers")
        times = {name: real(f"repeats of {name!r}", given.get(name, 1)) for name in names}
        weights = {name: count * times[name] for name, count in tokens.items()}
        if not are_weights(tuple(weights.values())):
            raise PlanError(
                f"repeats are {dict(given)}; expected finite numbers of at least 0, not all 0",
                hint="0 leaves a corpus out",
            )
    try:
        pairs = [(start, later) for start, later in changes]
    except (TypeError, ValueError):
        raise PlanError(
            f"schedule is {changes!r:.100}, expected pairs of a sample and weights",
            hint=f"give [(1_000_000, {_example(names)}), ...]",
        ) from None
    starts = [integer("a start of the schedule", start) for start, _ in pairs]
    if [0, *starts] != sorted({0, *starts}):
        raise PlanError(
            f"the schedule changes weights at samples {starts}, expected ascending from 1 on",
            hint="order the schedule, and give the first weights as weights=",
        )
    return Schedule(
        tuple(
            Segment(start=start, weights=checked_weights(names, _tempered(given, tokens)))
            for start, given in zip([0, *starts], [weights, *(later for _, later in pairs)], strict=True)
        )
    )


TEMPERATURE = "temperature"
"""The only key of weights by a power of the tokens: 1 is by tokens, 0 the same for all corpora."""


def _tempered(weights: Any, tokens: Mapping[str, float]) -> Weights:
    """Weights as given, or by a temperature: a corpus of n tokens gets n ** temperature."""
    if TEMPERATURE in tokens or not isinstance(weights, Mapping) or set(weights) != {TEMPERATURE}:
        return weights  # type: ignore[no-any-return] # checked later
    power = real(f"the weight of {TEMPERATURE!r}", weights[TEMPERATURE])
    if not 0 <= power <= 1:
        raise PlanError(f"the temperature is {power:g}", hint="give a number from 0 (all alike) to 1 (by tokens)")
    most = max(tokens.values())
    return {name: (count / most) ** power for name, count in tokens.items()}


def _example(names: Sequence[str]) -> str:
    return "{" + ", ".join(f"{name!r}: 0.5" for name in names[:2]) + (", ...}" if names[2:] else "}")
