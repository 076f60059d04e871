"""Every error that tokshard raises on purpose: one problem, one hint, one exit code.

The tree::

    TokshardError                      exit 1: the data or the run failed
    |- UsageError                      exit 2: wrong option, path or configuration
    |  |- TokenizerError               the tokenizer cannot be used as asked
    |  |- PlanError                    corpora, weights and sizes that make no plan
    |  |- PlanMismatchError            a checkpoint of another plan
    |  `- ConfigurationChangedError    the directory holds a build with other settings
    |- SourceError                     an input has changed, or cannot be listed
    |  |- BadSourceError               an input is damaged or gone
    |  `- BadRecordError               one record of an input cannot become a document
    |- BuildError                      the build could not go on: disk, worker, lock
    |- TrainerError                    training cannot go on: loss, checkpoint
    |- LoaderError                     no batch comes: a worker died, a read hangs; a damaged checkpoint
    `- CorpusError                     a corpus cannot be opened or read
       |- MissingCorpusError           exit 2: there is no such directory
       |- UnfinishedCorpusError        the directory has no manifest
       |- UnsupportedFormatError       written by a newer tokshard
       `- DamagedCorpusError           a file is not what the manifest says

A wrong argument to a Python function is a plain `ValueError`, `TypeError` or `IndexError`.
"""

from __future__ import annotations

from typing import Any

RESTORE = "restore the file from a copy, or rebuild with 'tokshard build --force'"
"""The hint for a damaged file of a corpus."""


class TokshardError(Exception):
    """Something a user can fix.

    Args:
        problem: what is wrong with which value, where, and what was expected; one line.
        hint: the next step; one line.
    """

    exit_code = 1

    def __init__(self, problem: str, *, hint: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # keyword-only arguments do not survive the default pickling, and workers send errors home
        return (_rebuild, (type(self), self.problem, self.hint))


class UsageError(TokshardError):
    """A wrong option, path or configuration."""

    exit_code = 2


class TokenizerError(UsageError):
    """A tokenizer that cannot be loaded, or names no EOS, or lacks a token that was asked for."""


class PlanError(UsageError):
    """Corpora, weights and sizes that make no plan."""


class PlanMismatchError(UsageError):
    """A checkpoint that was taken on another plan than the one that is to continue it."""


class ConfigurationChangedError(UsageError):
    """The output directory belongs to a build with other settings or other sources."""


class SourceError(TokshardError):
    """An input that is damaged, gone, or not what it was when the build began."""


class BadSourceError(SourceError):
    """An input that is damaged or gone, under ``--on-bad-source fail``."""


class BadRecordError(SourceError):
    """A record that cannot become a document, under ``--on-bad-record fail``."""


class BuildError(TokshardError):
    """A build that could not go on: a full disk, a lost worker, a second build in the same place."""


class LoaderError(TokshardError):
    """A loader that gets no batch: a worker died, or a read hangs; or a checkpoint that is damaged."""


class TrainerError(TokshardError):
    """A training run that cannot go on: a loss that is not finite, a checkpoint of another model."""


class CorpusError(TokshardError):
    """A corpus that cannot be opened or read."""


class MissingCorpusError(CorpusError):
    """A path that is no directory: wrong use, not damage."""

    exit_code = 2


class UnfinishedCorpusError(CorpusError):
    """A directory without a manifest."""


class UnsupportedFormatError(CorpusError):
    """A corpus written by a newer tokshard than this one."""


class DamagedCorpusError(CorpusError):
    """A file of a corpus that is not what its manifest says."""


def _rebuild(kind: type[TokshardError], problem: str, hint: str) -> TokshardError:
    return kind(problem, hint=hint)
