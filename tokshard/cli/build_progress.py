"""The progress of a build, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from tokshard.extras import version_of
from tokshard.pipeline.judge import loss_warning
from tokshard.pipeline.options import TEXT
from tokshard.pipeline.progress import InputLeftOut, Note, Report, StageEnded, StageStarted
from tokshard.pipeline.spool import SPOOLING
from tokshard.pipeline.tasks.planning import AnyTask, StepTask, StreamTask
from tokshard.pipeline.workspace.places import DEAL, FIND, HASH, WRITE
from tokshard.pipeline.workspace.receipts import Key, Progress, Receipt, progress_of
from tokshard.wording import bytes_text, clock, count_text, counted, one_line

if TYPE_CHECKING:
    from tqdm import tqdm  # its import asks for the metadata of all packages

_LINE_SECONDS = 10.0
_NOT_TINY = 1_000_000
"""Bytes of input that take about half a second with a slow encoder."""
_MIN_BAR = 10
"""Columns."""
_LABELS = {SPOOLING: "reading", HASH: "hashing", FIND: "duplicates", DEAL: "dealing"}
"""The label of each line, by stage; none for the one that writes."""


class BuildDisplay:
    """The observer of a build on the command line.

    Warnings, and inputs that are left out, are always shown.

    Args:
        is_quiet: show no progress and no notes.
        is_verbose: show each task that is done, even then.

    Attributes:
        notes: the notes shown so far.
    """

    def __init__(self, *, is_quiet: bool, is_verbose: bool) -> None:
        self._is_quiet, self._is_verbose = is_quiet, is_verbose
        self._stage: StageDisplay | None = None
        self.notes: set[str] = set()
        self._has_said_speed = False

    def __call__(self, report: Report) -> None:
        """Show a report, if it is time."""
        match report:
            case Note(text):
                self.notes.add(text)
                if not self._is_quiet:
                    click.echo(f"note: {one_line(text)}", err=True)
            case StageStarted():
                self.say_speed(report.build.config.reads, report.total_bytes)
                self._stage = StageDisplay(report, is_quiet=self._is_quiet, is_verbose=self._is_verbose)
            case _ if self._stage is not None:
                self._stage.show(report)

    def say_speed(self, reads: str, input_bytes: int) -> None:
        """Say once what another version of tokenizers saves, if a build that is not tiny encodes with a slow one."""
        version = version_of("tokenizers")
        is_slow = reads == TEXT and version.startswith("0.") and input_bytes >= _NOT_TINY
        if is_slow and not (self._is_quiet or self._has_said_speed):
            self._has_said_speed = True
            click.echo(
                f"note: tokenizers {version} is slow: before a large build, pip install 'tokshard[fast]'; it encodes "
                "about 25 times faster per core, with the same ids for text up to Unicode 16",
                err=True,
            )


class FileCount:
    """Counts the finished inputs of a build.

    Args:
        tasks: all.
    """

    def __init__(self, tasks: Iterable[AnyTask]) -> None:
        self._whole: dict[Key, int] = {}
        self._parts: Counter[int] = Counter()  # of inputs that are cut
        self._seen: set[Key] = set()
        self.done = 0
        streams = 0
        for task in tasks:
            if isinstance(task, StreamTask):
                streams += 1
            elif isinstance(task, StepTask) or task.is_group:
                self._whole[task.key] = 1 if isinstance(task, StepTask) else len(task.inputs)
            else:
                self._parts[task.key[0]] += 1
        self.total = streams + sum(self._whole.values()) + len(self._parts)

    def add(self, receipt: Receipt) -> None:
        """Count a finished task; a task that runs again counts once."""
        key = receipt.key
        if key in self._seen or receipt.failure is not None:
            return
        self._seen.add(key)
        if key in self._whole:
            self.done += self._whole[key]
        elif key[0] in self._parts:
            self._parts[key[0]] -= 1
            self.done += not self._parts[key[0]]
        else:
            self.done += receipt.is_last


class StageDisplay:
    """Shows inputs and bytes done, documents, records left out, tokens per second and time left.

    It warns when half of the records turn out to be bad, even if progress is not shown.

    Args:
        stage: with what earlier runs of the same build did.
        is_quiet: show nothing.
        is_verbose: show each task that is done, even then.
    """

    def __init__(self, stage: StageStarted, *, is_quiet: bool, is_verbose: bool) -> None:
        is_reading = not any(isinstance(task, StepTask) for task in stage.tasks[:1])
        self._is_quiet = is_quiet or not (is_reading or stage.name == WRITE)
        self._is_verbose = is_verbose and is_reading
        label = _LABELS.get(stage.name.partition("-")[0], "")
        self._label = f"{label}: " if label else ""
        self._build, self._total_bytes, self._files = stage.build, stage.total_bytes, FileCount(stage.tasks)
        for receipt in stage.done:
            self._files.add(receipt)
        self._before = done = progress_of(stage.done)
        self._bytes, self._documents, self._tokens = done.input_bytes, done.documents, done.tokens
        self._records, self._bad = done.records, done.bad
        self._started = self._last_line = time.monotonic()
        self._has_warned = False
        self._bar: tqdm[None] | None = None
        if not self._is_quiet and (done.records or done.input_bytes):
            self.say(self._continuing())
        if not self._is_quiet and sys.stderr.isatty():
            from tqdm import tqdm

            total = self._total_bytes or None
            self._bar = tqdm(total=total, initial=self._shown_bytes, file=sys.stderr, bar_format=self._bar_format())

    def show(self, report: Report) -> None:
        """Show a report on the stage, if it is time."""
        match report:
            case Progress():
                self.progressed(report)
            case Receipt():
                self.finished(report)
            case InputLeftOut(location, problem):
                self.say(f"left out: {location} {problem}")
            case StageEnded() if self._bar is not None:
                self._set_format(self._bar)
                self._bar.refresh()
                self._bar.close()

    def progressed(self, progress: Progress) -> None:
        """Count finished work, and show it if it is time."""
        self._bytes += progress.input_bytes
        self._documents += progress.documents
        self._tokens += progress.tokens
        self._records += progress.records
        self._bad += progress.bad
        if progress.bad and not self._has_warned:
            warning = loss_warning(self._bad, self._records, progress.example, is_end=False)
            if warning is not None:
                self._has_warned = True
                self.say(f"warning: {warning}")
        if self._bar is not None:
            self._set_format(self._bar)
            self._bar.update(self._shown_bytes - self._bar.n)
        elif not self._is_quiet and time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(self._line())

    def finished(self, receipt: Receipt) -> None:
        """Count the inputs of a finished task, and show a line about it with ``-v``."""
        self._files.add(receipt)
        if not self._is_verbose or receipt.failure is not None:
            return
        location = self._build.inputs[receipt.key[0]].location
        more = len(receipt.outputs[0].sources) - 1
        segment = f", segment {receipt.key[1]}" if receipt.key[1] or not receipt.is_last else ""
        records = counted(receipt.records_read, "record")
        done = (
            records
            if self._label
            else f"{counted(receipt.documents, 'document')} of {records}, {counted(receipt.tokens, 'token')}"
        )
        place = f"{location}{segment}{f' and {more:,} more' if more > 0 else ''}"
        self.say(f"{self._label}{place}: {bytes_text(receipt.input_bytes)}, {done}")

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        if self._bar is None:
            click.echo(one_line(line), err=True)
        else:
            self._bar.write(one_line(line), file=sys.stderr)

    @property
    def _shown_bytes(self) -> int:
        return min(self._bytes, self._total_bytes) if self._total_bytes else self._bytes

    @property
    def _share(self) -> float:
        return self._shown_bytes / self._total_bytes

    def _continuing(self) -> str:
        done = f"{self._share:.0%} done" if self._total_bytes else f"{bytes_text(self._bytes)} done"
        kept = "" if self._label else f", {count_text(self._tokens)} tokens kept"
        return f"{self._label}continuing: {done}{kept}"

    def _parts(self) -> list[tuple[int, str]]:
        """The parts to show, in order, each with its rank: if room is short, the last ranks are left out."""
        size, total = bytes_text(self._bytes), bytes_text(self._total_bytes)
        if size.rpartition(" ")[2] == total.rpartition(" ")[2]:
            size = size.rpartition(" ")[0]
        parts = [(0, f"{size} of {total}" if self._total_bytes else bytes_text(self._bytes))]
        if self._files.total > 1:
            parts.append((4, f"{self._files.done:,} of {self._files.total:,} files"))
        seconds = max(time.monotonic() - self._started, 1e-9)
        left_out = self._bad if self._label else self._records - self._documents
        if not self._label:
            parts.append((5, counted(self._documents, "document")))
        if left_out:
            parts.append((1, f"{left_out:,} left out"))
        if not self._label:
            parts.append((3, f"{count_text((self._tokens - self._before.tokens) / seconds)} tokens/s"))
        parts.append((6, f"{clock(seconds)} elapsed"))
        fresh = self._bytes - self._before.input_bytes
        if self._total_bytes and fresh > 0:
            left = seconds * max(0, self._total_bytes - self._bytes) / fresh
            parts.append((2, f"{clock(left)} left"))
        return parts

    def _line(self) -> str:
        share = f"{self._share:4.0%}: " if self._total_bytes else ""
        return f"{self._label}{share}{', '.join(part for _, part in self._parts())}"

    def _bar_format(self) -> str:
        if not self._total_bytes:
            return self._label + fitting(self._parts(), self._columns() - 1 - len(self._label))
        head = f"{self._label}{self._share:4.0%}|"
        return f"{head}{{bar}}| {fitting(self._parts(), self._columns() - 1 - len(head) - _MIN_BAR - 2)}"

    def _set_format(self, bar: tqdm[None]) -> None:
        bar.bar_format, bar.ncols = self._bar_format(), self._columns() - 1

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):
            return shutil.get_terminal_size().columns


def fitting(parts: Sequence[tuple[int, str]], width: int) -> str:
    """Parts with commas between, in their order: all, or as many of the first ranks as fit, at least one."""
    kept = list(parts)
    while len(kept) > 1 and len(", ".join(part for _, part in kept)) > width:
        kept.remove(max(kept))
    return ", ".join(part for _, part in kept)
