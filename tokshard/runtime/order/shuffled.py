"""One corpus, or the part of it that a stream owns, as the endless sequence of shuffled pieces that a plan reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.tables import Pieces, PieceTable, Tables
from tokshard.runtime.order.windows import CorpusOrder, Shape, Window


class ShuffledCorpus:
    """One corpus, or the part of it that a stream owns, as the endless sequence of shuffled pieces that a plan reads.

    The window of a sample follows from arithmetic. Making the table of a window scans its document boundaries; the
    tables of two windows are kept, the current and the next. Safe to use from several
    threads, and in a forked child. Readers at different places have one each.

    Args:
        seed: of the plan.
        start_epoch, take, stream, num_parts: as of `CorpusOrder`.
    """

    def __init__(
        self,
        source: TokenSource,
        shape: Shape,
        *,
        seed: int,
        start_epoch: int = 0,
        take: float = 1.0,
        stream: int = 0,
        num_parts: int = 1,
    ) -> None:
        self.source, self.shape = source, shape
        content = bytes.fromhex(source.fingerprint)
        self.order = CorpusOrder(
            source.num_tokens,
            content,
            shape,
            seed=seed,
            start_epoch=start_epoch,
            take=take,
            stream=stream,
            num_parts=num_parts,
        )
        self.tables = Tables(source, self.order)

    @property
    def num_full_blocks(self) -> int:
        """Blocks of `block_tokens` tokens that are read; the rest is the tail."""
        return self.order.num_full_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return self.order.num_tokens

    @property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return self.order.num_windows

    def window_at(self, position: int) -> Window:
        """The window that holds a position of the sequence."""
        return self.order.window_at(position)

    def window(self, epoch: int, index: int) -> Window:
        """A window by epoch and index."""
        return self.order.window(epoch, index)

    def table(self, window: Window) -> PieceTable:
        """The pieces of a window, found when they are first needed."""
        return self.tables.table(window)

    def pieces_of(
        self,
        samples: NDArray[np.int64],
        pass_stop: int | None = None,
        *,
        is_sequential: bool = False,
    ) -> tuple[NDArray[np.int64], Pieces]:
        """The pieces that samples read.

        Sample k reads slice ``[j * seq_len, (j + 1) * seq_len)`` of the sequence, where j is the entry of k in a
        permutation of all samples that lie in the same window. A slice that continues in the next window comes last, so
        the next window is not needed earlier.

        Args:
            samples: int64 [n], ascending.
            pass_stop: where a finite pass ends; slices are cut there.
            is_sequential: the following samples will be read next, so part of the next window's table is made now.

        Returns:
            int64 [n], how many pieces each sample has, and the pieces of all of them one after another.
        """
        seq_len = self.shape.seq_len
        counts: list[NDArray[np.int64]] = []
        parts: list[Pieces] = []
        done = 0
        while done < len(samples):
            # Python integers: a position can lie beyond 2**63
            window = self.window_at(int(samples[done]) * seq_len)
            first, stop = window.first_slice, -(-window.stop // seq_len)
            here = samples[done : done + int(np.searchsorted(samples[done:], stop))]
            starts = self.order.slices(window, here - first) * seq_len + (first * seq_len - window.start)
            found = self._read(window, starts, seq_len, pass_stop)
            counts += found[0]
            parts += found[1]
            done += len(here)
            if is_sequential and (pass_stop is None or pass_stop > window.stop):
                before, after = int(here[0]) - first, int(here[-1]) + 1 - first
                self.tables.prepare(
                    self.window_at(window.stop), before / (stop - first), after / (stop - first), pass_stop
                )
        if not parts:
            none = np.empty(0, np.int64)
            return none, Pieces(starts=none, lengths=none, ends_document=np.empty(0, np.bool_))
        return counts[0] if len(counts) == 1 else np.concatenate(counts), Pieces.joined(parts)

    def _read(
        self,
        window: Window,
        starts: NDArray[np.int64],
        length: int,
        pass_stop: int | None,
    ) -> tuple[list[NDArray[np.int64]], list[Pieces]]:
        """The pieces of stretches that start in one window, in order. Few of them reach beyond it."""
        counts: list[NDArray[np.int64]] = []
        parts: list[Pieces] = []
        room = window.stop - window.start
        if pass_stop is not None:
            room = min(room, pass_stop - window.start)
        lengths = np.minimum(length, room - starts)
        is_over = starts + length > window.stop - window.start
        if pass_stop is not None and pass_stop <= window.stop:
            is_over[:] = False
        table = self.table(window)
        if not is_over.any():
            found, pieces = table.cut(starts, lengths)
            return [found], [pieces]
        for group in np.split(np.arange(len(starts)), np.flatnonzero(is_over) + 1):
            if not len(group):
                continue
            found, pieces = table.cut(starts[group], lengths[group])
            counts.append(found)
            parts.append(pieces)
            if is_over[group[-1]]:  # goes on in the next window, or in several if they are short
                more = self._continue(window.stop, length - int(lengths[group[-1]]), pass_stop)
                found[-1] += sum(len(part.starts) for part in more)
                parts.extend(more)
        return counts, parts

    def _continue(self, position: int, length: int, pass_stop: int | None) -> list[Pieces]:
        if pass_stop is not None:
            length = min(length, pass_stop - position)
        parts = []
        while length > 0:
            window = self.window_at(position)
            take = min(length, window.stop - position)
            start = np.array([position - window.start], np.int64)
            parts.append(self.table(window).cut(start, np.array([take], np.int64))[1])
            position, length = position + take, length - take
        return parts
