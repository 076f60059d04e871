"""A plan: the samples of a job and their order, as a pure function of corpora, seed and sizes.

    global sample g ──mixture──▶ corpus i, its sample k ──windows──▶ pieces of documents ──packing──▶ a row of tokens

Every arrow is arithmetic, so any process can compute any sample alone, at the same cost. README.md follows one sample
by hand. A plan with C streams consists of C such pipelines: g is sample ``g div C`` of stream ``g mod C``. Each stream
has its own mixture and windows, so a node reads only the blocks of its streams. A cursor is the position of a job in
its plan. A loader feeds the rows of a plan to a training loop.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime import options
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.cursor import MAX_SAMPLE, Cursor, Length, Schedule, identity_of
from tokshard.runtime.options import MAX_EPOCHS, CorpusLike, Weights, integer
from tokshard.runtime.order.mixture import Balance, Mixture
from tokshard.runtime.order.pieces import PieceReader
from tokshard.runtime.order.windows import CorpusOrder, Pack, Shape
from tokshard.runtime.overlap import check_apart
from tokshard.runtime.rows.expand import full_batch
from tokshard.runtime.rows.masks import Mask, MaskedTokens, masked_tokens, masking
from tokshard.runtime.rows.narrow import PADDING_INDEX, Layout, NarrowBatch, lay_out
from tokshard.runtime.rows.steps import RankRows
from tokshard.runtime.rows.transforms import Transform, transformed
from tokshard.runtime.trace import Occurrence, Piece, occurrences, pieces_of_samples
from tokshard.wording import counted, listed, one_line


class StreamPlan:
    """The samples of a job and their order.

    The constructor opens the corpora. A plan pickles without its tables, and with the paths of its corpora.

    Args:
        corpora: name to corpus directory; in Python also one directory. A corpus is identified by its content: it may
            be moved or renamed.
        seq_len: tokens of a sample.
        seed: seed of all shuffling.
        weights: name to weight, the shares of the samples; default: the corpora's token counts. 0 is allowed.
            ``{"temperature": t}`` gives a corpus of n tokens the weight n ** t: 1 is by tokens, 0 the same for all.
        repeats: instead of weights: name to how often a corpus is read while an unnamed one is read once.
        epochs: for a finite pass over one corpus; None: endless.
        generations: name to the last generation of a grown corpus that is read; 0 is its first. Default: the newest
            when the plan is made.
        block_tokens: consecutive tokens that are shuffled as a unit before they are cut at documents; default: 16
            samples, at least 65,536; with a corpus that is packed whole, a multiple of 128 samples, at least 1,048,576.
        window_blocks: blocks of a stream whose documents are shuffled together; default: about 64M tokens over all
            streams; half of it if no corpus ever has more than half of the samples, and so on; at least 64 blocks.
        num_streams: independent streams, each over its own blocks of large corpora. With as many nodes, each node reads
            only its own blocks; `tokshard plan --nodes` recommends a number. It must divide the global batch size.
        schedule: (global sample, weights) for planned changes; `weights` count from 0.
        start_epoch: name to the first epoch of a corpus, for a new plan over corpora that were read before.
        take: the share of a corpus, in ``(0, 1]``, that is read: a number, or name to number. Whole blocks are left
            out, the same for every seed; 0.1 includes all blocks of 0.05.
        pack: how rows are filled, a word, or name to word. ``"cut"``: rows have `seq_len` tokens, and cut the first and
            the last document. ``"whole"``: documents are cut if they are longer than a row, or if a window of a large
            corpus has no room for them; about 1 token in 129 is padding. Default: whole for corpora with loss spans,
            cut for all others.
        max_epochs: how often a corpus may be read: a number, or name to number. 2.5 is two and a half passes.
        on_max_epochs: ``"stop"``: the pass ends before the first sample that would read more, and the rest of its step
            is padding; ``"warn"``: it continues.
        transforms: change samples as they are read, one after the other; see `tokshard.runtime.rows.transforms`.
        allow_small_blocks: accept blocks under four samples, which shuffle long documents badly.
        allow_overlap: accept corpora that share documents: views of one corpus, a view and its corpus, two generations.
        cache: shared by the corpora of the plan that are in buckets or on web servers; default: ``Cache()``, 2 GiB in
            memory and nothing on disk.

    Attributes:
        names, sources, corpora, readers: in plan order; `corpora` are the orders, and `readers` find the pieces.
        shape, seq_len: seq_len, block_tokens and window_blocks, with their defaults.
        schedule: the weights, and their planned changes.
        num_samples: samples of a finite pass, the last one perhaps short; None: endless.
        max_epochs: how often each corpus may be read, in plan order; infinity: any number of times.
        identity: the settings that determine the samples at a cursor.
        global_batch_size: for loaders that are not given one; None: they need one. Only plans from files have it, see
            `load`.
        has_default_windows: whether `window_blocks` was not given.

    Raises:
        PlanError: an argument is refused.
        CorpusError: a corpus cannot be opened.
    """

    def __init__(
        self,
        corpora: CorpusLike | Mapping[str, CorpusLike],
        *,
        seq_len: int,
        seed: int = 0,
        weights: Weights | None = None,
        repeats: Mapping[str, float] | None = None,
        epochs: int | None = None,
        generations: Mapping[str, int] | None = None,
        block_tokens: int | None = None,
        window_blocks: int | None = None,
        num_streams: int = 1,
        schedule: Sequence[tuple[int, Weights]] = (),
        start_epoch: Mapping[str, int] | None = None,
        take: float | Mapping[str, float] = 1.0,
        pack: Pack | Mapping[str, Pack] | None = None,
        max_epochs: float | Mapping[str, float] | None = None,
        on_max_epochs: Literal["stop", "warn"] = "stop",
        transforms: Sequence[Transform] = (),
        allow_small_blocks: bool = False,
        allow_overlap: bool = False,
        cache: Cache | None = None,
    ) -> None:
        named = options.named_corpora(corpora)
        self.names = tuple(named)
        wanted = options.generations_of(named, generations)
        if cache is not None and not any(isinstance(corpus, str | os.PathLike) for corpus in named.values()):
            raise PlanError(
                "cache is for corpora that the plan opens, and all of them are open",
                hint="give CorpusSource(..., cache=) the cache, or the plan their paths",
            )
        cache = Cache() if cache is None else cache
        if not isinstance(cache, Cache):
            raise PlanError(f"cache is {cache!r:.100}, expected a Cache", hint="give Cache(cache_dir=...)")
        self.sources = _open(named, wanted, cache)
        options.check_sources(self.names, self.sources)
        if not options.flag("allow_overlap", allow_overlap):
            check_apart(self.names, self.sources)
        self.has_default_windows = window_blocks is None
        self.num_streams = integer("num_streams", num_streams, least=1, most=options.MAX_STREAMS)
        packs = options.packs_of(self.names, self.sources, pack)
        self._given_sizes = block_tokens is not None, window_blocks is not None
        shape = options.shape_of(
            seq_len, block_tokens, window_blocks, packs=packs, allow_small_blocks=allow_small_blocks
        )
        self.seq_len = shape.seq_len
        self.seed = integer("seed", seed, least=0, most=(1 << 64) - 1)
        self.epochs = options.epochs_of(epochs, len(self.names), self.num_streams)
        self.transforms = options.transforms_of(transforms)
        orders = options.corpora_of(
            self.names,
            self.sources,
            shape,
            seed=self.seed,
            start_epoch=start_epoch,
            take=take,
            num_streams=self.num_streams,
            packs=packs,
            epochs=self.epochs,
        )
        self._given_weights, self._changes, self._repeats = weights, schedule, repeats
        self.schedule = self._schedule_of(orders)
        if window_blocks is None:
            window_blocks = options.default_window_blocks(shape.block_tokens, self.num_streams, self.schedule)
            shape = replace(shape, window_blocks=window_blocks)
        self.shape = shape
        self.corpora = tuple(replace(order, shape=shape) for order in orders)
        self.readers = tuple(map(PieceReader, self.corpora))
        self.num_samples = _samples_of_pass(self.corpora, self.epochs)
        if self.num_samples is not None and self.num_samples > MAX_SAMPLE:
            raise PlanError(f"{epochs} epochs are more than 2**62 samples", hint="give fewer")
        self.on_max_epochs = on_max_epochs
        self.max_epochs = options.max_epochs_of(max_epochs, self.names, on_max_epochs, self.num_streams)
        # one object, so that `mixture` recognizes its weights
        balance = Balance.at_start(self.seed, self.num_streams, len(self.names))
        self._start = Cursor(sample=0, segments=self.schedule.segments, balance=balance)
        self._kept_mixture: Mixture | None = None
        # of the masks that were looked up last; copies share it
        self._kept_masks: list[tuple[tuple[Mask, ...], MaskedTokens | None]] = [((), None)]
        self._kept_lengths: list[tuple[StreamPlan, Length, StreamPlan]] = []
        self.identity = identity_of(self.shape, self.seed, self.num_streams, self.corpora)
        self.global_batch_size: int | None = None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> StreamPlan:
        """The plan in a file, as for `tokshard plan` and `trace`: a mix.toml, or the recipe of a training run.

        Loaders use its `global_batch_size` unless they are given another. `uneven` is their argument.

        Raises:
            UsageError: the file does not exist or is not TOML, a key is unknown, or a value has the wrong type.
            PlanError: a value is refused, or the file has a `mask`, which belongs to a loader.
            CorpusError: a corpus cannot be opened.
        """
        # late, because the room of files that describe a job is above the runtime; `plan_file` itself knows no plans
        from tokshard.run_files.plan_file import load_mix

        absent = MAX_SAMPLE + 1  # which no loader would accept
        mix = load_mix(os.fspath(path), defaults={"global_batch_size": absent})
        if mix.mask:
            raise PlanError(
                f"{os.fspath(path)} has a mask, and a plan has all documents in the loss",
                hint="leave mask out of the file, and call loader.mask(corpus, file)",
            )
        plan = StreamPlan(**mix.arguments())
        plan.global_batch_size = None if mix.global_batch_size == absent else mix.global_batch_size
        return plan

    def _schedule_of(self, corpora: Sequence[CorpusOrder]) -> Schedule:
        """The weights; by default the tokens of each corpus, which depend on the size of blocks with `take`."""
        tokens = {name: float(corpus.num_tokens) for name, corpus in zip(self.names, corpora, strict=True)}
        return options.schedule_of(tokens, self._given_weights, self._repeats, self._changes)

    def __getstate__(self) -> dict[str, Any]:
        corpora = tuple(map(replace, self.corpora))  # without the permutations that they keep
        found = {**self.__dict__, "corpora": corpora, "_kept_mixture": None, "_kept_masks": [((), None)]}
        return found | {"readers": (), "_kept_lengths": []}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self.readers, self._kept_lengths = tuple(map(PieceReader, self.corpora)), []

    def __repr__(self) -> str:
        return f"<StreamPlan of {', '.join(self.names)}: {self.fingerprint[:12]}>"

    def __str__(self) -> str:
        """The plan in a few lines, in the words of its arguments."""
        sizes = [
            f"{name} {value:,}" for name, value in self.identity.fields.items() if name not in ("seed", "order_version")
        ]
        lines = [f"plan {self.fingerprint[:12]}: seed {self.seed}, {', '.join(sizes)}"]
        first, *later = self.schedule.segments
        for name, corpus, weight, most in zip(self.names, self.corpora, first.weights, self.max_epochs, strict=True):
            facts = [f"weight {weight:,.12g}", f"{corpus.num_tokens:,} tokens", f"pack {corpus.pack}"]
            facts += [f"take {corpus.take:g}"] if corpus.take != 1 else []
            facts += [f"start_epoch {corpus.start_epoch}"] if corpus.start_epoch else []
            facts += [f"max_epochs {most:g}"] if math.isfinite(most) else []
            lines.append(f"  {one_line(name)}: {', '.join(facts)}")
        if later:
            lines.append(f"  schedule: other weights from {listed((f'{one.start:,}' for one in later), 'and')} on")
        if self.num_samples is not None:
            lines.append(f"  epochs {self.epochs}: {counted(self.num_samples, 'sample')}")
        if self.transforms:
            lines.append(f"  transforms: {', '.join(one_line(repr(one)) for one in self.transforms)}")
        return "\n".join(lines)

    @property
    def fingerprint(self) -> str:
        """A hash, equal if and only if two plans read the same tokens in the same order, given the same weights."""
        return self.identity.fingerprint

    def copy(self, *, reopened: bool = False) -> StreamPlan:
        """The same plan with its own tables, so readers at different places do not evict each other's tables.

        Args:
            reopened: over newly opened corpora, for a forked process: a thread of the parent may have held a lock of a
                corpus at the fork, which no thread of the child releases.
        """
        if not reopened:
            return self._with()
        sources = _reopened(self.sources)
        corpora = (replace(corpus, source=source) for corpus, source in zip(self.corpora, sources, strict=True))
        return self._with(sources=sources, corpora=tuple(corpora))

    def at(self, cursor: Cursor, sample: int | None = None) -> StreamPlan:
        """The plan for a run that changed its `seq_len`, with the places where its corpora continued.

        Args:
            sample: a global sample; default: the cursor's sample.
        """
        sample, plan = cursor.sample if sample is None else sample, self
        for length in cursor.lengths:
            if length.sample > sample:
                break
            plan = self._after(length, plan)
        return plan

    def _after(self, length: Length, before: StreamPlan) -> StreamPlan:
        """The plan from a change of the length on, given the plan before it."""
        for since, kept, plan in self._kept_lengths:
            if since is before and (kept is length or kept == length):  # each state that is loaded has a copy of it
                return plan
        shape, bases = replace(self.shape, seq_len=length.seq_len), length.of_corpora
        corpora = tuple(
            order.resized(bases[number], length.seq_len) if len(bases) else replace(order, shape=shape)
            for number, order in enumerate(before.corpora)
        )
        plan = self._resized(shape, corpora)
        self._kept_lengths.append((before, length, plan))
        return plan

    def left_out(self, cursor: Cursor) -> list[int]:
        """Tokens of each corpus that changes of `seq_len` left out, padding of rows included."""
        return [0 if order.place is None else order.place.left_out for order in self.at(cursor).corpora]

    def with_sizes_of(self, block_tokens: int, window_blocks: int) -> StreamPlan:
        """The plan with the sizes of a run, where it was not given its own.

        Raises:
            PlanError: it cannot have these sizes.
        """
        sizes = self.shape.block_tokens, self.shape.window_blocks
        wanted = zip(self._given_sizes, sizes, (block_tokens, window_blocks), strict=True)
        block_tokens, window_blocks = (own if is_given else of_run for is_given, own, of_run in wanted)
        if (block_tokens, window_blocks) == sizes:
            return self
        packs = [order.pack for order in self.corpora]
        shape = options.shape_of(self.seq_len, block_tokens, window_blocks, packs=packs, allow_small_blocks=True)
        corpora = tuple(replace(order, shape=shape) for order in self.corpora)
        options.check_takes(self.names, corpora)
        identity = identity_of(shape, self.seed, self.num_streams, corpora)
        schedule = self._schedule_of(corpora)
        start = replace(self._start, segments=schedule.segments)
        return self._resized(shape, corpora, identity=identity, schedule=schedule, _start=start)

    def _resized(self, shape: Shape, corpora: tuple[CorpusOrder, ...], **changes: Any) -> StreamPlan:
        """The plan with corpora of another shape."""
        num_samples = _samples_of_pass(corpora, self.epochs)
        return self._with(shape=shape, seq_len=shape.seq_len, corpora=corpora, num_samples=num_samples, **changes)

    def _with(self, **changes: Any) -> StreamPlan:
        """The plan with some changed attributes, and its own tables: all copies are made here."""
        plan = object.__new__(StreamPlan)
        plan.__setstate__(self.__dict__ | changes)
        return plan

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
        # cursors of one run share their weights, whose samples are counted once
        if kept is None or kept.balance is not cursor.balance:
            kept = cursor.mixture(self.seed, self.num_streams)
        elif kept.segments is not cursor.segments:
            kept = kept.changed(cursor.segments)
        self._kept_mixture = kept
        return kept

    def sample(self, sample: int, cursor: Cursor | None = None) -> dict[str, NDArray[Any]]:
        """One global sample, alone: the reference for every loader.

        Args:
            sample: global index, from 0.
            cursor: the weights; default: weights of the plan.

        Returns:
            A batch of one row as `StreamingLoader` lists it, in numpy arrays. input_ids, labels and position_ids are
            [seq_len].

        Raises:
            IndexError: the plan has no such sample.
            PlanError: it is not an integer.
        """
        sample = _checked_sample(sample)
        _check_sample(self, sample, cursor)
        batch = full_batch(self.read(self.lay_out(cursor or self.cursor(), np.array([sample])), 0, 1))
        return {key: value[0] if value.ndim == 2 else value for key, value in batch.items()}

    def trace(self, sample: int, cursor: Cursor | None = None) -> list[Piece]:
        """The parts of documents in one global sample, in order.

        Raises:
            IndexError: the plan has no such sample.
        """
        return self.traces(np.array([_checked_sample(sample)], np.int64), cursor)[0]

    def traces(self, samples: NDArray[np.int64], cursor: Cursor | None = None) -> list[list[Piece]]:
        """`trace` of many global samples.

        Args:
            samples: int64 [n], ascending within each stream.

        Raises:
            IndexError: the plan does not have all of them.
            PlanError: they are not integers.
        """
        if not len(samples):
            return []
        samples = np.asarray(samples)
        for sample in (samples.min(), samples.max()):
            _check_sample(self, _checked_sample(sample), cursor)
        cursor = cursor or self.cursor()
        mixture = self.mixture(cursor)
        found: list[list[Piece]] = [[] for _ in samples]
        which = np.searchsorted([length.sample for length in cursor.lengths], samples, "right")
        for number in np.unique(which).tolist():
            here = np.flatnonzero(which == number)
            plan = self.at(cursor, int(samples[here[0]]))
            corpora = list(zip(self.names, plan.readers, strict=True))
            of_plan = pieces_of_samples(corpora, mixture, samples[here], self.masked(cursor))
            for row, pieces in zip(here.tolist(), of_plan, strict=True):
                found[row] = pieces
        return found

    def find(
        self, corpus: str, document: int, cursor: Cursor | None = None, *, epochs: int | Iterable[int] = 1
    ) -> list[Occurrence]:
        """The samples that read a document: the inverse of `trace`.

        Makes the table of each window that holds a part of the document, per epoch: each costs as much as its first
        sample.

        Args:
            corpus: its name in the plan.
            document: number in the corpus.
            cursor: the weights; default: weights of the plan.
            epochs: numbers of passes over the corpus, from 0; or the number of first passes.

        Returns:
            By epoch, sample and place in the document, without parts that `take` leaves out and samples of a corpus
            that the weights stop reading. `max_epochs` is ignored.

        Raises:
            IndexError: the corpus has no such document.
            PlanError: the plan has no such corpus.
        """
        number, document = self._number_of(corpus), integer("document", document)
        if not isinstance(epochs, Iterable):
            epochs = range(integer("epochs", epochs, least=0))
        checked = (integer("an epoch", epoch, least=0, most=MAX_EPOCHS) for epoch in epochs)
        cursor = cursor or self.cursor()
        readers = [self.at(cursor, length.sample).readers[number] for length in cursor.lengths]
        readers = readers or [self.readers[number]]
        ends = [*(length.of_corpora[number].tolist() for length in cursor.lengths[1:]), None]
        return occurrences(list(zip(readers, ends, strict=True)), self.mixture(cursor), number, document, checked)

    def masking(self, cursor: Cursor, corpus: str, file: str | os.PathLike[str]) -> Cursor:
        """The cursor after documents are taken out of the loss, as `StreamingLoader.mask` does it, with its errors."""
        source = self.sources[self._number_of(corpus)]
        masks = masking(cursor.masks, file, sample=cursor.sample, fingerprint=source.fingerprint, name=corpus)
        after = replace(cursor, masks=masks)
        self.masked(after)  # refuses what does not exist
        return after

    def masked(self, cursor: Cursor) -> MaskedTokens | None:
        """The documents that a cursor masks; None if it never masked any.

        Raises:
            PlanError: a corpus has no such document.
            CorpusError: a shard is missing, or differs from its manifest.
        """
        if not cursor.masks:
            return None
        masks, found = self._kept_masks[0]
        if masks != cursor.masks:
            found = masked_tokens(cursor.masks, self.sources)
            self._kept_masks[0] = cursor.masks, found
        return found

    def _number_of(self, corpus: str) -> int:
        if corpus not in self.names:
            raise PlanError(f"the plan has no corpus {corpus!r}", hint=f"it has {', '.join(self.names)}")
        return self.names.index(corpus)

    def knows_steps(self, ranks: RankRows) -> bool:
        """Whether a rank can count the targets of a whole step.

        Not if a transform may change them, or if other ranks read streams of their own.
        """
        is_all_read = ranks.world_size == 1 or not any(corpus.is_dealt for corpus in self.corpora)
        return not self.transforms and is_all_read

    def lay_out(self, cursor: Cursor, samples: NDArray[np.int64], *, is_sequential: bool = False) -> Layout:
        """The rows of batches, without their tokens.

        Args:
            cursor: the weights, and the documents that are out of the loss.
            samples: int64 [n], global samples of one length, ascending within each stream; `PADDING_INDEX` for rows of
                padding.
            is_sequential: whether the following samples are read next.

        Raises:
            CorpusError: a shard is missing, or differs from its manifest.
        """
        rows = np.flatnonzero(samples != PADDING_INDEX)
        plan = self.at(cursor, int(samples[rows[0]])) if len(rows) else self.at(cursor)
        located, corpus_samples = self.mixture(cursor).locate(samples[rows])
        corpora = np.full(len(samples), PADDING_INDEX, np.int64)
        corpora[rows] = located
        parts = []
        for number in np.bincount(located).nonzero()[0].tolist():
            here = (located == number).nonzero()[0]
            mine = rows[here]
            sorted_rows, *of_parts = plan.corpora[number].by_part(samples[mine], corpus_samples[here])
            counts, pieces = plan.readers[number].pieces_of(*of_parts, is_sequential=is_sequential)
            parts.append((number, mine[sorted_rows].repeat(counts), pieces))
        masked = self.masked(cursor)
        return lay_out(parts, self.sources, samples=samples, corpora=corpora, seq_len=plan.seq_len, masked=masked)

    def read(self, layout: Layout, start: int, stop: int) -> NarrowBatch:
        """Read the rows ``[start, stop)`` of a layout, and transform them. The next call may overwrite them.

        Raises:
            PlanError: a transform did not return a sample of the same size and dtype.
        """
        narrow = layout.read(start, stop)
        return transformed(narrow, self.transforms, self.seed) if self.transforms else narrow


def _samples_of_pass(corpora: Sequence[CorpusOrder], epochs: int | None) -> int | None:
    return None if epochs is None else int(corpora[0].num_samples(epochs)[0])


def _check_sample(plan: StreamPlan, sample: int, cursor: Cursor | None) -> None:
    """Refuse a sample that the plan does not have, or whose weights the cursor does not keep."""
    cursor = cursor or plan.cursor()
    first, num_samples = plan.mixture(cursor).segments[0].start, plan.at(cursor).num_samples
    if sample < 0 or (num_samples is not None and sample >= num_samples):
        has = "samples from 0 on" if num_samples is None else f"{num_samples} samples"
        raise IndexError(f"the plan has no sample {sample}: it has {has}")
    if sample < first:
        raise IndexError(
            f"sample {sample} was read under weights that the cursor does not keep: it keeps those from sample "
            f"{first} on"
        )


def _checked_sample(sample: int) -> int:
    sample = integer("sample", sample, most=None)
    if sample > MAX_SAMPLE:
        raise IndexError(f"sample {sample}: samples are counted up to 2**62")
    return sample


def _open(
    corpora: Mapping[str, CorpusLike], generations: Mapping[str, int | None], cache: Cache
) -> tuple[TokenSource, ...]:
    closed = {name: os.fspath(one) for name, one in corpora.items() if isinstance(one, str | os.PathLike)}
    sources: dict[str, Any] = {**corpora}
    if closed:
        from tokshard.runtime.bytes.corpus import open_sources  # imports pyarrow, which an order does not need

        sources |= open_sources(closed, generations, cache)
    return tuple(sources.values())


def _reopened(sources: tuple[TokenSource, ...]) -> tuple[TokenSource, ...]:
    try:
        content = pickle.dumps(sources)  # together: they may share a cache
    except Exception:  # noqa: BLE001 - of a user's class; then its locks are its own
        return sources if len(sources) == 1 else tuple(_reopened((source,))[0] for source in sources)
    reopened: tuple[TokenSource, ...] = pickle.loads(content)  # noqa: S301 - of this process
    return reopened
