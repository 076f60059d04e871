"""Every error that tokshard raises on purpose: one problem, one hint, one exit code.

::

    TokshardError                      exit 1: the data or the run failed
    ├─ UsageError                      exit 2: a wrong option, path or configuration
    │  ├─ TokenizerError               the tokenizer cannot be used in this way
    │  ├─ PlanError                    corpora, weights and sizes do not make a plan
    │  ├─ PlanMismatchError            a checkpoint belongs to another plan
    │  └─ ConfigurationChangedError    the directory holds a build with other settings
    ├─ SourceError                     an input has changed, or cannot be listed
    │  ├─ BadSourceError               an input is damaged or gone
    │  ├─ CutSourceError               a limit needs more of a stream than was read: the build reads on by itself
    │  └─ BadRecordError               a record cannot become a document
    ├─ StoreError                      a bucket or server does not answer, or refuses a request
    ├─ BuildError                      the build cannot continue: disk, worker, lock
    ├─ ExportError                     an export cannot be written or uploaded
    ├─ LoaderError                     the loader cannot continue: a worker died, a read hangs, a checkpoint is damaged
    ├─ TrainerError                    training cannot continue: loss, checkpoint, ranks
    └─ CorpusError                     a corpus cannot be opened or read
       ├─ MissingCorpusError           exit 2: there is no corpus at the path
       ├─ UnfinishedCorpusError        a corpus lacks its manifest, or is not complete yet
       ├─ UnsupportedFormatError       written by a newer tokshard
       └─ DamagedCorpusError           a file differs from the manifest

Wrong arguments to a Python function raise a plain `ValueError`, `TypeError` or `IndexError`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec

RESTORE = "restore the file from a copy, or run the command that made the corpus again, with --force"
"""The hint for a damaged file of a corpus."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions of msgspec for unexpected bytes. Bad UTF-8 and deep nesting raise errors of Python."""


class TokshardError(Exception):
    """A problem that a user can fix.

    Args:
        problem: what is wrong with which value, where, and what was expected; one line.
        hint: the next step; one line. A traceback shows it as a note.
    """

    exit_code = 1

    def __init__(self, problem: str, *, hint: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.add_note(f"hint: {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        # keyword-only arguments do not survive the default pickling, and workers send errors home
        return (_rebuild, (type(self), self.problem, self.hint))


class UsageError(TokshardError):
    """A wrong option, path or configuration."""

    exit_code = 2


class TokenizerError(UsageError):
    """The tokenizer cannot be loaded, does not name its EOS, or lacks a token that was asked for."""


class PlanError(UsageError):
    """Corpora, weights and sizes do not make a plan."""


class PlanMismatchError(UsageError):
    """A checkpoint was taken on a plan that differs from the current one."""


class ConfigurationChangedError(UsageError):
    """The output directory belongs to a build with other settings or sources."""


class SourceError(TokshardError):
    """An input is damaged, gone, or has changed since the build began."""


class BadSourceError(SourceError):
    """An input is damaged or gone, with ``--on-bad-source fail``."""


class CutSourceError(SourceError):
    """A limit needs more of standard input, or of an iterable, than was read: the build reads on by itself."""


class BadRecordError(SourceError):
    """A record cannot become a document, with ``--on-bad-record fail``."""


class BuildError(TokshardError):
    """The build cannot continue: a full disk, a lost worker, another build in the same directory."""


class ExportError(TokshardError):
    """An export cannot be written or uploaded."""


class StoreError(TokshardError):
    """An object store or web server does not answer, or refuses a request. The files themselves may be intact."""


class LoaderError(TokshardError):
    """The loader cannot continue: a worker died, a read hangs, or a checkpoint is damaged."""


class TrainerError(TokshardError):
    """Training cannot continue: the loss is not finite, a checkpoint does not fit, ranks do not share a disk."""


class CorpusError(TokshardError):
    """A corpus cannot be opened or read."""


class MissingCorpusError(CorpusError):
    """The path does not exist, or does not hold a corpus: wrong usage, not damage."""

    exit_code = 2


class UnfinishedCorpusError(CorpusError):
    """The directory holds an unfinished build, or has lost its manifest."""


class UnsupportedFormatError(CorpusError):
    """The corpus was written by a newer tokshard."""


class DamagedCorpusError(CorpusError):
    """A file of the corpus differs from the manifest. Most have the same remedy."""

    def __init__(self, problem: str, *, hint: str = RESTORE) -> None:
        super().__init__(problem, hint=hint)


def is_panic(error: BaseException) -> bool:
    """Whether Rust code of a library panicked, which raises a `BaseException` that is not an `Exception`."""
    return type(error).__name__ == "PanicException"


@contextmanager
def warnings_to(show: Callable[[str], None]) -> Iterator[None]:
    """A block in which tokshard's own warnings go to a function, as a program shows its lines: they are for people."""
    package, others = os.path.dirname(__file__), warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> None:
        if filename.startswith(package):
            show(str(message))
        else:
            others(message, category, filename, *place)

    with warnings.catch_warnings():
        warnings.showwarning = cast("Any", shown)
        yield


def _rebuild(kind: type[TokshardError], problem: str, hint: str) -> TokshardError:
    return kind(problem, hint=hint)
