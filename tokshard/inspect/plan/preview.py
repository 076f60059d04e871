"""A preview of a run: tokens and epochs of each corpus, steps, bytes, and warnings."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from tokshard.errors import UsageError
from tokshard.inspect.plan.balance import Balance, balance_of
from tokshard.inspect.plan.run import Run, check_sample
from tokshard.inspect.plan.streams import StreamsAdvice, advise
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.cursor import MAX_SAMPLE
from tokshard.runtime.locality import MIN_WINDOW_STEPS, enough_window_blocks, steps_per_window
from tokshard.runtime.order.mixture import Segment
from tokshard.runtime.order.packing import count_put_off
from tokshard.runtime.order.pieces import packing_of
from tokshard.runtime.order.windows import CorpusOrder
from tokshard.wording import counted

_MUCH_READ = 1.5
"""Bytes fetched for each that is used, above which a view is better copied."""

_MOST_WARNINGS = 8
"""Corpora that are named with one warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The rows of a corpus that is packed whole.

    Args:
        rows: of an epoch.
        padding: the part of them that is padding.
        num_chunks, num_cut: of its first window, and those of them that rows cut though they fit into one; None if the
            corpus is not mapped.
        num_pieces: that those are cut into.
    """

    rows: int
    padding: float
    num_chunks: int | None
    num_cut: int | None
    num_pieces: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPlan:
    """A corpus in a plan.

    Args:
        fingerprint: hash of the corpus's content.
        weight_share: its share of the weights at the start.
        take, start_epoch: as in the plan.
        max_epochs: as in the plan; None: no limit.
        epoch_tokens: tokens of one pass over the part that is taken.
        target_share: the share of its tokens that are targets; None without loss spans.
        num_documents: documents in the whole corpus.
        num_blocks, num_windows: per epoch, without the short tail.
        num_parts: streams that own a part of it; 1 if they share the corpus.
        samples, tokens, epochs: how much is read; tokens and epochs include padding, and epochs what changes of the
            length of samples left out, but at most the epochs of the pass.
        share: its share of all samples that are read.
        documents: about how many different documents are read, at least in part.
        bytes: size of the token ids that are read.
        steps_per_window: of the largest batch; None if the whole corpus is one window, or if it is not read.
        packing: None if it is not packed whole.
    """

    name: str
    directory: str
    fingerprint: str
    weight_share: float
    take: float
    start_epoch: int
    max_epochs: float | None
    epoch_tokens: int
    target_share: float | None
    num_documents: int
    num_blocks: int
    num_windows: int
    num_parts: int
    samples: int
    tokens: int
    epochs: float
    share: float
    documents: int
    bytes: int
    steps_per_window: float | None
    packing: Packing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """Shares that apply from a sample on; `step` contains that sample, None if the step is unknown."""

    sample: int
    step: int | None
    shares: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A preview of a run.

    Args:
        fingerprint: hash of the order.
        sizes: order_version, seed, seq_len, block_tokens, window_blocks and num_streams.
        num_steps, num_samples, num_tokens: how much is read; samples that a checkpoint skipped count as read.
        batch_ramp: (step, global_batch_size) from that step on; `global_batch_size` until then.
        seq_len_changes: (sample, seq_len before it, seq_len from it on), in order.
        bytes_per_token: on disk.
        changes: changes of the weights after the start.
        warnings: probable mistakes.
        streams: a recommended number of them, if nodes are given.
        balance: how even the work of the ranks is, if they are given.
    """

    fingerprint: str
    sizes: dict[str, int]
    global_batch_size: int
    batch_ramp: Sequence[tuple[int, int]]
    seq_len_changes: Sequence[tuple[int, int, int]]
    num_steps: int
    num_samples: int
    num_tokens: int
    bytes_per_token: int
    corpora: Sequence[CorpusPlan]
    changes: Sequence[WeightChange]
    warnings: Sequence[str]
    streams: StreamsAdvice | None = None
    balance: Balance | None = None


def report_plan(
    run: Run,
    *,
    num_tokens: int | None,
    max_epochs_warn: float = math.inf,
    num_nodes: int | None = None,
    has_ranks: bool = False,
    hidden: int | None = None,
    layers: int | None = None,
    held_out: Mapping[str, str] = MappingProxyType({}),
) -> PlanReport:
    """Compute the reading of a run. Only arithmetic, so the cost does not depend on its size, without held-out corpora.

    Args:
        num_tokens: tokens to train on, rounded up to whole steps; None: a finite pass, or as many as the corpora hold.
        max_epochs_warn: warn about corpora that are read more often.
        num_nodes: recommend a number of streams for so many nodes.
        has_ranks: look at the work of the ranks of the run in its next steps.
        hidden, layers: as for `balance_of`.
        held_out: corpora to compare with those that are read, besides the run's own, name to directory.

    Raises:
        CorpusError: a held-out corpus cannot be read.
        UsageError: there are more nodes than samples in a step, or the checkpoint does not say how much of each
            corpus was read up to there.
    """
    plan = run.plan
    steps, samples, wanted = _end_of(run, num_tokens)
    check_sample(samples)
    mixture = plan.mixture(run.cursor)
    if samples < mixture.segments[0].start:
        raise UsageError(
            f"{run.checkpoint} keeps the weights from sample {mixture.segments[0].start} on, beyond the {samples} "
            "samples that are asked for",
            hint="give more --tokens, or leave out --checkpoint",
        )
    corpora = _corpora(run, mixture.counts_before(samples), samples)
    reason = "it is finite" if run.stop.corpus is None else f"corpus {run.stop.corpus!r} is used up"
    ended = [f"the pass ends after step {steps:,} of {wanted:,}: {reason}"] if steps < wanted else []
    return PlanReport(
        fingerprint=plan.fingerprint,
        sizes=dict(plan.identity.fields),
        global_batch_size=run.global_batch_size,
        batch_ramp=run.ramp,
        seq_len_changes=[(new.sample, old.seq_len, new.seq_len) for old, new in pairwise(run.cursor.lengths)],
        num_steps=steps,
        num_samples=samples,
        num_tokens=run.cursor.tokens_before(samples, plan.seq_len),
        bytes_per_token=plan.sources[0].dtype.itemsize,
        corpora=corpora,
        changes=[_change(run, segment) for segment in run.cursor.segments[1:]],
        warnings=[*ended, *_warnings(run, corpora, max_epochs_warn), *_shared(run, held_out)],
        streams=None if num_nodes is None else advise(run, num_nodes),
        balance=balance_of(run, hidden=hidden, layers=layers) if has_ranks else None,
    )


def _end_of(run: Run, num_tokens: int | None) -> tuple[int, int, int]:
    """The steps and samples of a run that reads so many tokens, and the steps if its pass did not end before."""
    plan, cursor, stop = run.plan, run.cursor, run.stop.sample
    num_samples = plan.at(cursor).num_samples
    if num_tokens is not None or num_samples is None:
        num_tokens = sum(corpus.padded_tokens for corpus in plan.corpora) if num_tokens is None else num_tokens
        tokens_before = partial(cursor.tokens_before, seq_len=plan.seq_len)
        num_samples = max(1, bisect_left(range(MAX_SAMPLE + 2), num_tokens, key=tokens_before))
    wanted, within = _step_of(run, num_samples - 1)
    samples = num_samples - 1 - within + run.size_of(wanted)
    if stop is None or samples <= stop:
        return wanted, samples, wanted
    return _step_of(run, stop - 1)[0], stop, wanted


def _step_of(run: Run, sample: int) -> tuple[int, int]:
    """The step that has a sample and its place there; if it has none that is known, as if no sample was skipped."""
    return run.step_of(sample) or run.step_with(sample)


def _change(run: Run, segment: Segment) -> WeightChange:
    place = run.place_of(segment.start)
    return WeightChange(sample=segment.start, step=place and place[0], shares=run.shares(segment))


def _corpora(run: Run, counts: Sequence[int], samples: int) -> list[CorpusPlan]:
    plan, found = run.plan, []
    windows = steps_per_window(plan, max(run.batch_sizes), run.cursor)
    shares, corpora = run.shares(run.cursor.segments[0]), run.corpora
    read, left_out = run.cursor.tokens_of(counts, plan.seq_len), plan.left_out(replace(run.cursor, sample=samples))
    for number, (name, source, shuffled, most, count, tokens) in enumerate(
        zip(plan.names, plan.sources, plan.corpora, plan.max_epochs, counts, read, strict=True)
    ):
        corpus = corpora[name]
        length = source.num_tokens / corpus.num_documents
        part = _part_met(shuffled, tokens, length)
        found.append(
            CorpusPlan(
                name=name,
                directory=corpus.location,
                fingerprint=source.fingerprint,
                weight_share=shares[name],
                take=shuffled.take,
                start_epoch=shuffled.start_epoch,
                max_epochs=None if math.isinf(most) else most,
                epoch_tokens=shuffled.num_tokens,
                target_share=None if (targets := corpus.manifest.num_targets) is None else targets / source.num_tokens,
                num_documents=corpus.num_documents,
                num_blocks=shuffled.num_full_blocks,
                num_windows=shuffled.num_windows,
                num_parts=shuffled.num_parts,
                samples=count,
                tokens=tokens,
                epochs=shuffled.epochs_of(tokens + left_out[number]),
                share=count / samples if samples else 0.0,
                documents=math.ceil(part * corpus.num_documents),
                bytes=tokens * source.dtype.itemsize,
                steps_per_window=None if math.isinf(windows[name]) else windows[name],
                packing=_packing(run, number) if shuffled.pack == "whole" else None,
            )
        )
    return found


def _part_met(corpus: CorpusOrder, tokens: int, length: float) -> float:
    """About the part of a corpus's documents, of a mean length, of which so many tokens of its order have some.

    Windows have blocks from anywhere, and the rows of a window come in random order. So a document of many rows or
    blocks is met early.
    """
    shape, num_windows = corpus.shape, max(1.0, corpus.num_windows / corpus.num_parts)
    windows, last = divmod(min(1.0, tokens / corpus.padded_tokens) * num_windows, 1)
    more = 0.5 if corpus.pack == "whole" else 1.0  # rows of a document, besides length / seq_len: rounded up, or cut
    in_window = 1 - (1 - last) ** max(1.0, min(length, shape.block_tokens) / shape.seq_len + more)
    met = min(1.0, (windows + in_window) / num_windows)  # with streams, the last window may be a part of one
    met *= corpus.num_tokens / corpus.source.num_tokens
    return float(1 - (1 - met) ** (1 + length / shape.block_tokens))


def _packing(run: Run, number: int) -> Packing:
    order, cut = run.plan.corpora[number], None
    if order.source.is_in_memory:
        window = order.window(0, 0, 0)
        cut = count_put_off(order.source, *packing_of(order, window), order.blocks(window))
    num_cut, num_pieces, num_chunks = cut or (None, None, None)
    return Packing(
        rows=order.padded_tokens // order.shape.seq_len,
        padding=1 - order.num_tokens / order.padded_tokens,
        num_chunks=num_chunks,
        num_cut=num_cut,
        num_pieces=num_pieces,
    )


def _above(number: float, limit: float) -> str:
    """A number with as many digits as show that it is above a limit."""
    digits = next((digits for digits in range(1, 17) if round(number, digits) > limit), 17)
    return f"{number:,.{digits}f}"


def _warnings(run: Run, corpora: Sequence[CorpusPlan], max_epochs_warn: float) -> Iterator[str]:
    if run.unread_mix:
        yield f"{run.unread_mix} is not read: the corpora are weighted by their tokens"
    yield from _few(
        f"corpus {corpus.name!r} is read {_above(corpus.epochs, max_epochs_warn)} times, "
        f"more than --max-epochs-warn {max_epochs_warn:g}"
        for corpus in corpora
        if corpus.epochs > max_epochs_warn
    )
    yield from _few(
        f"a window of corpus {corpus.name!r} lasts {steps:.1f} steps: documents are shuffled only within a window; "
        f"window_blocks = {enough_window_blocks(planned, steps)} makes it {MIN_WINDOW_STEPS}"
        for planned, corpus in zip(run.plan.corpora, corpora, strict=True)
        if (steps := corpus.steps_per_window) is not None and steps < MIN_WINDOW_STEPS
    )
    yield from _few(
        f"corpus {name!r} is a view of scattered documents: about {source.read_factor:.1f} bytes are fetched for each "
        "that is used; 'tokshard copy' makes a corpus of it"
        for name, source in zip(run.plan.names, run.plan.sources, strict=True)
        if not source.is_in_memory and source.read_factor > _MUCH_READ
    )


def _few(warnings: Iterable[str]) -> Iterator[str]:
    """The first warnings of one kind, and of how many corpora the others are: a mix may have a thousand cells."""
    found = list(warnings)
    yield from found[:_MOST_WARNINGS]
    if rest := len(found[_MOST_WARNINGS:]):
        yield f"so {counted(rest, 'other corpus', 'other corpora')}"


def _shared(run: Run, held_out: Mapping[str, str]) -> Iterator[str]:
    """The held-out corpora that share documents with those that are read; what is not known only where it was asked."""
    for corpora, is_asked in ((run.held_out, False), (held_out, True)):
        for name, location in corpora.items():
            source, num_unknown = CorpusSource(location), 0
            for other, read in zip(run.plan.names, run.plan.sources, strict=True):
                if count := source.num_shared(read):
                    yield f"held-out corpus {name!r} shares {count} with {other!r}"
                num_unknown += count is None
            if is_asked and num_unknown:
                others = counted(num_unknown, "corpus", "corpora")
                yield (
                    f"held-out corpus {name!r} cannot be compared with {others}: only builds with --dedup exact, and "
                    "views of one corpus, can"
                )
