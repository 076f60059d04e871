"""How far a build is, on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

from tokshard.build.receipts import Receipt
from tokshard.build.runner import Progress

_LINE_SECONDS = 10.0
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class ProgressDisplay:
    """Shows bytes done, documents, tokens per second and time left.

    Args:
        total_bytes: of all inputs.
        done: what earlier runs of the same build did.
        is_quiet: show nothing.
        is_verbose: show each task that is done, even then.
        label: stands before everything.
    """

    def __init__(
        self,
        total_bytes: int,
        done: Progress,
        *,
        is_quiet: bool,
        is_verbose: bool = False,
        label: str = "",
        stream: TextIO | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_verbose = is_verbose
        self._label = f"{label}: " if label else ""
        self._total_bytes = total_bytes
        self._is_quiet = is_quiet
        self._bytes, self._documents, self._tokens = done.input_bytes, done.documents, done.tokens
        self._new_tokens = 0
        self._bytes_before = done.input_bytes
        self._started = self._last_line = time.monotonic()
        self._bar: tqdm[None] | None = None
        if not is_quiet and self._stream.isatty():
            self._bar = tqdm(
                total=total_bytes,
                initial=min(self._bytes, total_bytes),
                unit="B",
                unit_scale=True,
                file=self._stream,
                dynamic_ncols=True,
                bar_format=self._label + _BAR,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, progress: Progress) -> None:
        """Count what was done, and show it if it is time."""
        self._bytes += progress.input_bytes
        self._documents += progress.documents
        self._tokens += progress.tokens
        self._new_tokens += progress.tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._numbers(), refresh=False)
            self._bar.update(progress.input_bytes)
        elif not self._is_quiet and time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            print(self._line(), file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """A line that stays, beside the bar."""
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            tqdm.write(line, file=self._stream)

    def say_task(self, receipt: Receipt, location: str) -> None:
        """A line on a task that is done, if that is asked for."""
        if not self._is_verbose:
            return
        more = len(receipt.inputs) - 1
        segment = f", segment {receipt.key[1]}" if receipt.key[1] or not receipt.is_last else ""
        read = receipt.records_read
        self.say(
            f"{self._label}{location}{segment}{f' and {more:,} more' if more else ''}: {human(receipt.input_bytes)}B, "
            + (f"{read:,} records" if self._label else f"{receipt.documents:,} documents of {read:,} records, ")
            + ("" if self._label else f"{receipt.tokens:,} tokens")
        )

    def _numbers(self) -> str:
        if self._label:
            return f"{human(self._bytes - self._bytes_before)}B"
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self._documents:,} documents, {human(self._new_tokens / seconds)} tokens/s"

    def _line(self) -> str:
        share = self._bytes / max(1, self._total_bytes)
        seconds = time.monotonic() - self._started
        fresh = self._bytes - self._bytes_before
        left = seconds * (self._total_bytes - self._bytes) / fresh if fresh > 0 else None
        eta = "" if left is None else f", {clock(max(0.0, left))} left"
        return (
            f"{self._label}{share:4.0%}: {human(self._bytes)}B of {human(self._total_bytes)}B, {self._numbers()}, "
            f"{clock(seconds)} elapsed{eta}"
        )


class PartitionDisplay:
    """Shows how many partitions of hashes have been searched for duplicates; a line now and then."""

    def __init__(self, *, is_quiet: bool, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_quiet = is_quiet
        self._last_line = time.monotonic()

    def __call__(self, done: int, count: int) -> None:
        """Show it if it is time."""
        if not self._is_quiet and time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            print(f"duplicates: {done:,} of {count:,} partitions", file=self._stream, flush=True)


def human(number: float) -> str:
    """A number in three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g}{prefix}" if prefix else f"{number:.0f}"
        number /= 1000
    return f"{number:.3g}P"


def clock(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
