"""A plan: what a job reads and in which order, as a pure function of corpora, seed and sizes.

    global sample g ──mixture──▶ corpus i, its sample k ──windows──▶ pieces of documents ──packing──▶ a row of tokens

Every arrow is arithmetic, so any sample can be had alone, by any process, at the same cost. README.md in this
folder follows one sample
by hand; a cursor says where in the plan a job is, and a loader gives the rows of a plan to a training loop.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError, PlanMismatchError
from tokshard.runtime.arguments import MAX_SAMPLE, integer, real
from tokshard.runtime.batches import PADDING_INDEX, Layout, Packed, corpus_rows, first_row, lay_out, widen
from tokshard.runtime.cursor import CorpusIdentity, Cursor, PlanIdentity, Schedule
from tokshard.runtime.order.finding import find_document
from tokshard.runtime.order.mixture import Balance, Mixture, Segment, are_weights
from tokshard.runtime.order.seeds import ORDER_VERSION
from tokshard.runtime.order.stream import CorpusStream
from tokshard.runtime.order.windows import Shape
from tokshard.runtime.source import TokenSource
from tokshard.runtime.transforms import Transform, transformed

MIN_BLOCK_TOKENS = 65_536
WINDOW_TOKENS = 64 << 20
MIN_WINDOW_BLOCKS = 64
MIN_WINDOW_STEPS = 16
"""A window that lasts fewer steps is worth a warning: a document meets only documents of its window."""

_MAX_SIZE = (1 << 32) - 1
"""Of a sample, a block and a window: places in a window are 32 bits wide."""

_MAX_EPOCHS = (1 << 32) - 1

Weights = Mapping[str, float]
CorpusLike = str | os.PathLike[str] | TokenSource


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document in a sample.

    Args:
        corpus: its name in the plan.
        shard: file name.
        document: number in the corpus.
        start, stop: tokens of the document.
    """

    corpus: str
    shard: str
    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A part of a document that a sample reads.

    Args:
        epoch: pass over the corpus, from 0.
        sample: global; None if it came before the first weights that the cursor keeps, so that it is known no more.
        start, stop: tokens of the document.
    """

    epoch: int
    sample: int | None
    start: int
    stop: int


class Limit(NamedTuple):
    """A corpus is used up.

    Args:
        sample: the next global sample that would read more of it than `max_epochs`.
        corpus: its name.
    """

    sample: int
    corpus: str


class StreamPlan:
    """What a job reads and in which order.

    Costs the opening of the corpora to make. Pickles by the paths of its corpora.

    Args:
        corpora: name to corpus directory, or one directory. A corpus is known by its content: it may be moved or
        renamed. weights: name to weight; default: the corpora's token counts. 0 is allowed.
        seq_len: tokens of a sample.
        seed: of everything that is shuffled.
        epochs: for a finite pass over one corpus; None: endless.
        block_tokens: consecutive tokens that stay together until they are cut at documents; default: 16 samples, at
            least 65,536.
        window_blocks: blocks whose documents are shuffled together; default: about 64M tokens, at least 64 blocks.
        schedule: (global sample, weights) for changes that are known now; `weights` count from 0.
        start_epoch: name to the epoch that counts as its first: for a new plan over corpora that were read before.
        take: the part of a corpus, in ``(0, 1]``, that is read: a number, or name to number. Whole blocks are left out,
            the same for every seed; what 0.05 reads lies inside what 0.1 reads.
        max_epochs: how often a corpus may be read, a number, or name to number: 2.5 is two and a half passes.
        on_max_epochs: ``"stop"``: the pass ends before the first step that would read more; ``"warn"``: it goes on.
        transforms: change samples as they are read, one after the other; see `tokshard.runtime.transforms`. Not
            together with loss_across_documents.
        loss_across_documents: a delimiter's label is the first token of the next piece instead of -100.
        allow_small_blocks: accept blocks under four samples, which shuffle long documents badly.

    Raises:
        PlanError: the arguments make no plan.
        CorpusError: a corpus cannot be opened.
    """

    def __init__(
        self,
        corpora: CorpusLike | Mapping[str, CorpusLike],
        *,
        seq_len: int,
        seed: int = 0,
        weights: Weights | None = None,
        epochs: int | None = None,
        block_tokens: int | None = None,
        window_blocks: int | None = None,
        schedule: Sequence[tuple[int, Weights]] = (),
        start_epoch: Mapping[str, int] | None = None,
        take: float | Mapping[str, float] = 1.0,
        max_epochs: float | Mapping[str, float] | None = None,
        on_max_epochs: Literal["stop", "warn"] = "stop",
        transforms: Sequence[Transform] = (),
        loss_across_documents: bool = False,
        allow_small_blocks: bool = False,
    ) -> None:
        named = _named(corpora)
        self._arguments: dict[str, Any] = {
            "seq_len": seq_len,
            "seed": seed,
            "weights": weights,
            "epochs": epochs,
            "block_tokens": block_tokens,
            "window_blocks": window_blocks,
            "schedule": schedule,
            "start_epoch": start_epoch,
            "take": take,
            "max_epochs": max_epochs,
            "on_max_epochs": on_max_epochs,
            "transforms": transforms,
            "loss_across_documents": loss_across_documents,
            "allow_small_blocks": allow_small_blocks,
        }
        self.names = tuple(named)
        self.sources = tuple(_open(corpus) for corpus in named.values())
        _check_sources(self.names, self.sources)
        self.has_default_windows = window_blocks is None
        self.shape = _shape(seq_len, block_tokens, window_blocks, allow_small_blocks=allow_small_blocks)
        seed = integer("seed", seed, most=(1 << 64) - 1)
        if seed < 0:
            raise PlanError(f"seed is {seed}, expected 0 to 2**64 - 1", hint="give another seed")
        epochs = None if epochs is None else integer("epochs", epochs, most=_MAX_EPOCHS)
        self.seed, self.epochs, self.loss_across_documents = seed, epochs, loss_across_documents
        if epochs is not None and (epochs < 1 or len(self.names) > 1):
            raise PlanError(
                f"epochs is {epochs} for {len(self.names)} corpora; a finite pass is at least 1 epoch of one corpus",
                hint="make one plan per corpus, or leave epochs out",
            )
        self.transforms = _transforms(transforms)
        if self.transforms and loss_across_documents:
            raise PlanError(
                "transforms and loss_across_documents exclude each other: the first token of the next piece, which is "
                "a delimiter's label, may be changed",
                hint="leave one of them out",
            )
        first_epochs = self._first_epochs({} if start_epoch is None else start_epoch)
        takes = self._per_corpus("take", take, 1.0)
        ordinals = _ordinals([source.fingerprint for source in self.sources])
        self.streams = tuple(
            CorpusStream(source, self.shape, seed=seed, copy_index=ordinal, start_epoch=first, take=part)
            for source, ordinal, first, part in zip(self.sources, ordinals, first_epochs, takes, strict=True)
        )
        self._check_takes()
        if self.num_samples is not None and self.num_samples > MAX_SAMPLE:
            raise PlanError(
                f"{epochs} epochs are {self.num_samples} samples, expected at most 2**62", hint="give fewer"
            )
        self.on_max_epochs = on_max_epochs
        most = self._per_corpus("max_epochs", math.inf if max_epochs is None else max_epochs, math.inf)
        self.max_epochs = tuple(most)
        self._max_samples = self._limits()
        default = {name: float(stream.num_tokens) for name, stream in zip(self.names, self.streams, strict=True)}
        self.schedule = self._scheduled(default if weights is None else weights, schedule)
        # one object, by which the mixture that is kept is known again
        self._start = Cursor(sample=0, segments=self.schedule.segments, balance=Balance.at_start(len(self.names)))
        self._kept_mixture: Mixture | None = None
        self.identity = _identity(self.shape, seed, self.streams)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (dict(zip(self.names, self.sources, strict=True)), self._arguments))

    def reader(self) -> StreamPlan:
        """The same plan with tables of its own: readers at different places do not throw out each other's."""
        reader = object.__new__(StreamPlan)
        reader.__dict__.update(self.__dict__)
        reader.streams = tuple(stream.reader() for stream in self.streams)
        return reader

    def __repr__(self) -> str:
        return f"<StreamPlan of {', '.join(self.names)}: {self.fingerprint[:12]}>"

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two plans read the same tokens in the same order, given the same weights."""
        return self.identity.fingerprint

    @property
    def num_samples(self) -> int | None:
        """Samples of a finite pass, the last one perhaps short; None when endless."""
        stop = self._stream_stop
        return None if stop is None else -(-stop // self.shape.seq_len)

    def steps_per_window(self, global_batch_size: int, cursor: Cursor | None = None) -> dict[str, float]:
        """How many steps read from one window, by corpus: a document meets only documents of its window.

        Infinite where the whole corpus is one window, or its weight is 0.
        """
        tokens = self._tokens_per_step(global_batch_size, cursor)
        return {
            name: math.inf if stream.num_windows == 1 or not count else self._window_tokens / count
            for name, stream, count in zip(self.names, self.streams, tokens, strict=True)
        }

    def places_per_step(self, global_batch_size: int, cursor: Cursor | None = None) -> dict[str, float]:
        """From how many random places (blocks) a step draws, by corpus. Makes the table of a window of each.

        Expected number of blocks of a window that are hit by as many random draws as the step has pieces.
        """
        found = {}
        for name, stream, tokens in zip(
            self.names, self.streams, self._tokens_per_step(global_batch_size, cursor), strict=True
        ):
            window = stream.window(0, 0)
            table = stream.table(window)
            blocks, draws = len(table.block_starts), table.num_pieces * tokens / (window.stop - window.start)
            found[name] = blocks * -math.expm1(draws * math.log1p(-1 / blocks)) if blocks > 1 else float(bool(tokens))
        return found

    def limits(self, cursor: Cursor, *, since: int | None = None) -> list[Limit]:
        """Where corpora are used up under the weights of a cursor, by ascending sample.

        Args:
            since: global sample; what was read more than `max_epochs` before it is past, and only the next sample of
                that corpus counts. Default: where the cursor is.
        """
        if all(most is None for most in self._max_samples):
            return []
        mixture = self.mixture(cursor)
        counts = mixture.counts_before(cursor.sample if since is None else since)
        return sorted(
            Limit(sample, name)
            for number, (name, most) in enumerate(zip(self.names, self._max_samples, strict=True))
            if most is not None and (sample := mixture.sample_of(number, max(most, counts[number]))) is not None
        )

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return self.shape.seq_len

    def cursor(self) -> Cursor:
        """The start of the plan."""
        return self._start

    def mixture(self, cursor: Cursor) -> Mixture:
        """The corpora of the samples under a cursor's weights."""
        if not isinstance(cursor, Cursor):
            raise PlanError(
                f"the cursor is of type {type(cursor).__name__}", hint="give loader.cursor, or leave it out"
            )
        kept = self._kept_mixture
        # cursors of one run share their weights: what these cost to count is paid once
        if kept is None or kept.balance is not cursor.balance:
            kept = cursor.mixture(self.seed)
        elif kept.segments is not cursor.segments:
            kept = kept.changed(cursor.segments)
        self._kept_mixture = kept
        return kept

    def compacted(self, cursor: Cursor) -> Cursor:
        """A cursor with the same future and a short past."""
        return cursor.compacted(self.mixture(cursor))

    def reopened(self) -> StreamPlan:
        """The same plan over corpora that are opened again: for a forked process.

        A thread of the parent may have held a lock of a corpus at the fork, which no thread of the child gives back.
        """
        sources = {name: _reopened(source) for name, source in zip(self.names, self.sources, strict=True)}
        return StreamPlan(sources, **self._arguments)

    def check_pass(self, cursor: Cursor) -> None:
        """Refuse a cursor at which a finite pass would be counted wrong.

        Raises:
            PlanMismatchError: other corpora were read before, so that samples of the run are not samples of the pass.
        """
        if self.num_samples is None:
            return
        (count,) = self.mixture(cursor).counts_before(cursor.sample)
        if count != cursor.sample:
            raise PlanMismatchError(
                f"the plan is a finite pass of {self.num_samples} samples, but of the {cursor.sample} samples of the "
                f"saved cursor only {count} are of corpus {self.names[0]!r}",
                hint="leave epochs out and give max_epochs, or start a new run without the loader's state",
            )

    def checked_weights(self, weights: Weights) -> tuple[float, ...]:
        """Weights in plan order.

        Raises:
            PlanError: a name is unknown or missing, or a weight is negative, infinite, or all are 0.
        """
        if not isinstance(weights, Mapping):
            raise PlanError(
                f"weights are {weights!r:.100}, expected a number for each corpus", hint=f"give {self._example('0.5')}"
            )
        if set(weights) != set(self.names):
            raise PlanError(
                f"weights are for {', '.join(map(str, weights))}; the plan has {', '.join(self.names)}",
                hint="give one weight per corpus; 0 leaves a corpus out",
            )
        ordered = tuple(real(f"the weight of {name!r}", weights[name]) for name in self.names)
        if not are_weights(ordered):
            raise PlanError(
                f"weights are {dict(weights)}; expected finite numbers of at least 0, not all 0",
                hint="0 leaves a corpus out",
            )
        return ordered

    def sample(self, sample: int, cursor: Cursor | None = None) -> dict[str, NDArray[Any]]:
        """One global sample, alone: the reference that every loader equals.

        Args:
            sample: global index, from 0.
            cursor: whose weights to go by; default: those of the plan.

        Returns:
            The keys of a batch. input_ids, labels, position_ids: int64 [seq_len]; corpus_index, sample_index: int64
            [1]; cu_seqlens: int32; max_seqlen: int64 [].

        Raises:
            IndexError: the plan has no such sample.
            PlanError: it is not an integer.
        """
        sample = self._checked_sample(sample)
        layout = self.lay_out(self._mixture_at(sample, cursor), np.array([sample], np.int64))
        return first_row(widen(self.pack(layout, 0, 1)))

    def trace(self, sample: int, cursor: Cursor | None = None) -> list[Piece]:
        """Where the tokens of one global sample come from, in order.

        Raises:
            IndexError: the plan has no such sample.
        """
        return self.traces(np.array([self._checked_sample(sample)], np.int64), cursor)[0]

    def traces(self, samples: NDArray[np.int64], cursor: Cursor | None = None) -> list[list[Piece]]:
        """`trace` of many global samples.

        Args:
            samples: int64 [n], ascending.

        Raises:
            IndexError: the plan has not all of them.
        """
        if not len(samples):
            return []
        self._mixture_at(int(samples[0]), cursor)
        located, ordinals = self._mixture_at(int(samples[-1]), cursor).locate(samples)
        found: list[list[Piece]] = [[] for _ in samples]
        for number in np.unique(located).tolist():
            mine = np.flatnonzero(located == number)
            counts, pieces = self.streams[number].pieces_of(ordinals[mine], self._stream_stop)
            source, name = self.sources[number], self.names[number]
            rows = np.repeat(mine, counts).tolist()
            for row, start, length in zip(rows, pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
                place = source.document_at(start)
                begin = start - place.start
                found[row].append(Piece(name, place.shard, place.document, begin, begin + length))
        return found

    def find(
        self, corpus: str, document: int, cursor: Cursor | None = None, *, epochs: int | Iterable[int] = 1
    ) -> list[Reading]:
        """The samples that read a document: the inverse of `trace`, without a replay.

        Costs the table of each window that holds a part of the document, per epoch: as much as its first sample.

        Args:
            corpus: its name in the plan.
            document: number in the corpus.
            cursor: whose weights to go by; default: those of the plan.
            epochs: passes over the corpus, numbered from 0; a number: so many from the first on.

        Returns:
            By epoch, sample and place in the document; none of parts that `take` leaves out, and none of samples that
            no weights lead to. `max_epochs` is not looked at.

        Raises:
            IndexError: the corpus has no such document.
            PlanError: the plan has no such corpus.
        """
        if corpus not in self.names:
            raise PlanError(f"the plan has no corpus {corpus!r}", hint=f"it has {', '.join(self.names)}")
        document = integer("document", document)
        if not isinstance(epochs, Iterable):
            epochs = range(integer("epochs", epochs, least=0))
        number = self.names.index(corpus)
        stream, mixture = self.streams[number], self.mixture(cursor or self.cursor())
        place = self.sources[number].place_of(document)
        found = []
        for epoch in (integer("an epoch", epoch, least=0, most=_MAX_EPOCHS) for epoch in epochs):
            parts = find_document(stream, epoch, place.start, place.stop, stream_stop=self._stream_stop)
            for part in parts:
                is_known = part.corpus_sample >= mixture.balance.counts[number]
                sample = mixture.sample_of(number, part.corpus_sample) if is_known else None
                if sample is not None or not is_known:
                    found.append(Reading(epoch, sample, part.start - place.start, part.stop - place.start))
        return found

    def lay_out(self, mixture: Mixture, samples: NDArray[np.int64], *, is_sequential: bool = False) -> Layout:
        """The rows of one or many batches, not copied yet.

        Args:
            samples: int64 [n], global samples, ascending but for rows that are padding: `PADDING_INDEX`.
            is_sequential: those that follow will be asked for next.

        Raises:
            CorpusError: a shard is missing or not what its manifest says.
        """
        rows = np.flatnonzero(samples != PADDING_INDEX)
        located, ordinals = mixture.locate(samples[rows])
        corpora = np.full(len(samples), PADDING_INDEX, np.int64)
        corpora[rows] = located
        parts = []
        for number in np.unique(located).tolist():
            mine = np.flatnonzero(located == number)
            counts, pieces = self.streams[number].pieces_of(
                ordinals[mine],
                self._stream_stop,
                extra_tokens=int(self.loss_across_documents),
                is_sequential=is_sequential,
            )
            parts.append(
                corpus_rows(
                    self.sources[number],
                    rows[mine],
                    counts,
                    pieces,
                    seq_len=self.seq_len,
                    loss_across_documents=self.loss_across_documents,
                )
            )
        dtype = self.sources[0].dtype
        return lay_out(parts, samples=samples, corpora=corpora, seq_len=self.seq_len, dtype=dtype)

    def pack(self, layout: Layout, start: int, stop: int) -> Packed:
        """Copy the rows ``[start, stop)`` of a layout together, and transform them.

        Raises:
            PlanError: a transform returned what is no sample.
        """
        packed = layout.pack(start, stop)
        return transformed(packed, self.transforms, self.seed) if self.transforms else packed

    @property
    def _stream_stop(self) -> int | None:
        return None if self.epochs is None else self.epochs * self.streams[0].num_tokens

    def _checked_sample(self, sample: int) -> int:
        sample = integer("sample", sample, most=None)
        if sample > MAX_SAMPLE:
            raise IndexError(f"sample {sample}: samples are counted up to 2**62")
        return sample

    def _mixture_at(self, sample: int, cursor: Cursor | None) -> Mixture:
        if sample < 0 or (self.num_samples is not None and sample >= self.num_samples):
            raise IndexError(f"sample {sample} of a plan of {self.num_samples or 'endless'} samples")
        mixture = self.mixture(cursor or self.cursor())
        if sample < mixture.segments[0].start:
            raise IndexError(
                f"sample {sample} was read under weights that the cursor does not keep: it keeps those from sample "
                f"{mixture.segments[0].start} on"
            )
        return mixture

    @property
    def _window_tokens(self) -> int:
        return self.shape.window_blocks * self.shape.block_tokens

    def _tokens_per_step(self, global_batch_size: int, cursor: Cursor | None) -> list[float]:
        cursor = cursor or self.cursor()
        weights = [segment for segment in cursor.segments if segment.start <= cursor.sample][-1].weights
        return [global_batch_size * self.seq_len * weight / sum(weights) for weight in weights]

    def _per_corpus(self, argument: str, value: float | Mapping[str, float], default: float) -> list[float]:
        if not isinstance(value, Mapping):
            return [real(argument, value)] * len(self.names)
        unknown = set(value) - set(self.names)
        if unknown:
            raise PlanError(
                f"{argument} is for {', '.join(map(str, value))}; the plan has {', '.join(self.names)}",
                hint="give names of the plan",
            )
        return [real(f"{argument} of {name!r}", value.get(name, default)) for name in self.names]

    def _check_takes(self) -> None:
        for name, stream in zip(self.names, self.streams, strict=True):
            if not 0 < stream.take <= 1:
                raise PlanError(f"take is {stream.take} for corpus {name!r}", hint="give a part above 0 and at most 1")
            if not stream.num_tokens:
                blocks = stream.source.num_tokens // self.shape.block_tokens
                raise PlanError(
                    f"take={stream.take} of corpus {name!r} is less than one of its {blocks} blocks of "
                    f"{self.shape.block_tokens} tokens",
                    hint="take more, or give a smaller block_tokens",
                )

    def _limits(self) -> list[int | None]:
        """Samples of each corpus that may be read."""
        if self.on_max_epochs not in ("stop", "warn"):
            raise PlanError(f"on_max_epochs is {self.on_max_epochs!r}", hint="give 'stop' or 'warn'")
        if not all(epochs > 0 for epochs in self.max_epochs):
            raise PlanError(
                f"max_epochs is {self._arguments['max_epochs']}",
                hint="give numbers above 0; a weight of 0 leaves a corpus out",
            )
        return [
            None if math.isinf(epochs) else math.ceil(Fraction(epochs) * stream.num_tokens / self.seq_len)
            for epochs, stream in zip(self.max_epochs, self.streams, strict=True)
        ]

    def _scheduled(self, weights: Weights, changes: Sequence[tuple[int, Weights]]) -> Schedule:
        try:
            pairs = [(start, later) for start, later in changes]
        except (TypeError, ValueError):
            raise PlanError(
                f"schedule is {changes!r:.100}, expected pairs of a sample and weights",
                hint=f"give [(1_000_000, {self._example('0.5')}), ...]",
            ) from None
        starts = [integer("a start of the schedule", start) for start, _ in pairs]
        if [0, *starts] != sorted({0, *starts}):
            raise PlanError(
                f"the schedule changes weights at samples {starts}, expected ascending from 1 on",
                hint="order the schedule, and give the first weights as weights=",
            )
        return Schedule(
            tuple(
                Segment(start=start, weights=self.checked_weights(given))
                for start, given in zip([0, *starts], [weights, *(later for _, later in pairs)], strict=True)
            )
        )

    def _example(self, value: str) -> str:
        return "{" + ", ".join(f"{name!r}: {value}" for name in self.names[:2]) + (", ...}" if self.names[2:] else "}")

    def _first_epochs(self, start_epoch: Any) -> list[int]:
        if not isinstance(start_epoch, Mapping) or set(start_epoch) - set(self.names):
            raise PlanError(
                f"start_epoch is {start_epoch!r:.100}; the plan has {', '.join(self.names)}",
                hint="give names of the plan, and epochs from 0",
            )
        return [
            integer(f"start_epoch of {name!r}", start_epoch.get(name, 0), least=0, most=_MAX_EPOCHS)
            for name in self.names
        ]


def _rebuild(corpora: Mapping[str, TokenSource], arguments: Mapping[str, Any]) -> StreamPlan:
    return StreamPlan(corpora, **arguments)


def _named(corpora: CorpusLike | Mapping[str, CorpusLike]) -> dict[str, CorpusLike]:
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
        if not isinstance(corpus, str | os.PathLike) and not hasattr(corpus, "fingerprint"):
            raise PlanError(
                f"corpus {name!r} is {corpus!r:.100}, expected a directory",
                hint="give {name: directory, ...}, or one directory",
            )
    return named


def _open(corpus: CorpusLike) -> TokenSource:
    if isinstance(corpus, str | os.PathLike):
        from tokshard.runtime.shards import CorpusSource  # brings pyarrow, which an order does not need

        return CorpusSource(corpus)
    return corpus


def _reopened(source: TokenSource) -> TokenSource:
    try:
        content = pickle.dumps(source)
    except Exception:  # noqa: BLE001 - of a user's class; then its locks are its own
        return source
    reopened: TokenSource = pickle.loads(content)  # noqa: S301 - of this process
    return reopened


def _check_sources(names: Sequence[str], sources: Sequence[TokenSource]) -> None:
    for name, source in zip(names, sources, strict=True):
        if source.num_tokens < 1:
            raise PlanError(f"corpus {name!r} holds no tokens", hint="leave it out of the plan")
        if source.tokenizer != sources[0].tokenizer or source.dtype != sources[0].dtype:
            raise PlanError(
                f"corpora {names[0]!r} and {name!r} have different tokenizers "
                f"({sources[0].tokenizer[:12]}..., {source.tokenizer[:12]}...): their ids mean different things",
                hint="build them with the same tokenizer.json",
            )


def _shape(seq_len: int, block_tokens: int | None, window_blocks: int | None, *, allow_small_blocks: bool) -> Shape:
    seq_len = integer("seq_len", seq_len, least=1, most=_MAX_SIZE)
    if block_tokens is not None:
        block_tokens = integer("block_tokens", block_tokens, least=1, most=_MAX_SIZE)
    if window_blocks is not None:
        window_blocks = integer("window_blocks", window_blocks, least=1, most=_MAX_SIZE)
    block = block_tokens or max(MIN_BLOCK_TOKENS, 16 * seq_len)
    if block < 4 * seq_len and not allow_small_blocks:
        raise PlanError(
            f"block_tokens is {block}, less than 4 samples of {seq_len}: a long document would be read in one go",
            hint=f"give at least {4 * seq_len}, or allow_small_blocks=True",
        )
    window = window_blocks or max(MIN_WINDOW_BLOCKS, WINDOW_TOKENS // block)
    if (window + 1) * block >= 1 << 32:
        raise PlanError(
            f"a window of {window} blocks of {block} tokens has 2**32 tokens or more",
            hint="give a smaller window_blocks or block_tokens",
        )
    return Shape(seq_len=seq_len, block_tokens=block, window_blocks=window)


def _transforms(transforms: Any) -> tuple[Transform, ...]:
    found = tuple(transforms) if isinstance(transforms, Iterable) else (transforms,)
    for transform in found:
        if not callable(transform):
            raise PlanError(
                f"{transform!r:.100} is given as a transform, expected a function of a sample and a generator",
                hint="give a list of functions, or of objects such as FillInTheMiddle(...)",
            )
    return found


def _ordinals(fingerprints: Sequence[str]) -> list[int]:
    """How often each content is listed before it."""
    return [fingerprints[:index].count(fingerprint) for index, fingerprint in enumerate(fingerprints)]


def _identity(shape: Shape, seed: int, streams: Sequence[CorpusStream]) -> PlanIdentity:
    fields = {
        "order_version": ORDER_VERSION,
        "seed": seed,
        "seq_len": shape.seq_len,
        "block_tokens": shape.block_tokens,
        "window_blocks": shape.window_blocks,
    }
    corpora = tuple(
        CorpusIdentity(
            fingerprint=stream.source.fingerprint,
            ordinal=stream.copy_index,
            start_epoch=stream.start_epoch,
            take=stream.take,
        )
        for stream in streams
    )
    return PlanIdentity(fields=fields, corpora=corpora)
