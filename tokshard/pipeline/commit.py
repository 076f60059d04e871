"""The last step of a build: from receipts to tables, the report, and last of all the manifest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tokshard.pipeline.append import in_its_corpus
from tokshard.pipeline.assemble import AssembledCorpus, assemble, check_shards, publish
from tokshard.pipeline.encode.passing import ADDED, INSIDE
from tokshard.pipeline.executors.base import cpu_seconds
from tokshard.pipeline.kept_fields import check_kept_fields
from tokshard.pipeline.prepare import PreparedBuild
from tokshard.pipeline.report import build_report
from tokshard.pipeline.result import BuildResult
from tokshard.pipeline.stage import Outcome
from tokshard.pipeline.tasks.bad_record_limit import loss_warning
from tokshard.pipeline.workspace.output_directory import BuiltCorpus
from tokshard.pipeline.workspace.receipts import Receipt, progress_of
from tokshard.wording import counted


def commit(prepared: PreparedBuild, outcome: Outcome) -> BuildResult:
    """Turn the receipts of all tasks into corpora: tables, then a look that every shard is there, then the manifests.

    Raises:
        UsageError: a kept field is in no record.
        BuildError: no document was written, or a shard is gone.
    """
    resolved = prepared.resolved
    check_kept_fields(outcome.receipts, resolved.context.spec, resolved.found.inputs)
    corpora = [assemble(resolved, outcome, number) for number in range(len(resolved.context.outputs))]
    if resolved.settings.generation:
        of_each = zip(corpora, resolved.settings.previous, strict=True)
        corpora = [
            replace(corpus, manifest=in_its_corpus(corpus.output, corpus.manifest, previous))
            for corpus, previous in of_each
        ]
    result = _result(prepared, outcome, corpora)
    report = build_report(resolved, result, outcome.bad_inputs)
    for corpus in corpora:
        check_shards(corpus)
    # the corpus for training is last: where it is complete, that for validation is too
    for corpus in reversed(corpora):
        publish(corpus, report)
    resolved.context.workspace.remove()
    return result


def _result(prepared: PreparedBuild, outcome: Outcome, corpora: Sequence[AssembledCorpus]) -> BuildResult:
    resolved, usage = prepared.resolved, outcome.usage
    total = progress_of(outcome.receipts)
    warning = loss_warning(total.bad, total.records, is_end=True)
    return BuildResult(
        directory=resolved.context.workspace.out,
        corpora=tuple(BuiltCorpus(directory=corpus.output.location, manifest=corpus.manifest) for corpus in corpora),
        is_new=True,
        seconds=time.monotonic() - resolved.started,
        cpu_seconds=cpu_seconds() - prepared.cpu_seconds + usage.cpu_seconds,
        tokens_encoded=outcome.tokens_encoded,
        bytes_encoded=outcome.bytes_encoded,
        num_workers=outcome.num_workers,
        peak_worker_bytes=usage.peak_worker_bytes,
        ignored=resolved.found.ignored,
        notes=(*resolved.found.notes, *resolved.read.notes, *_changes(outcome.receipts, resolved.read.info.eos)),
        warnings=() if warning is None else (warning,),
        normalizer=resolved.read.normalizer,
    )


def _changes(receipts: Iterable[Receipt], eos: str) -> Iterator[str]:
    """What was changed on the way from records to documents, a line each."""
    changes: Counter[str] = Counter()
    num_marks = 0
    for receipt in receipts:
        changes.update(receipt.changes)
        num_marks += receipt.num_marks
    if num_marks:
        yield f"{num_marks:,} byte order mark{'s' if num_marks > 1 else ''} dropped: not part of a text"
    if changes[ADDED]:
        yield f"{counted(changes[ADDED], 'document')} did not end in {eos!r}: it was added"
    if changes[INSIDE]:
        yield (
            f"{counted(changes[INSIDE], 'document')} ended at a delimiter inside a document of the source: each became "
            "a document of its own"
        )
