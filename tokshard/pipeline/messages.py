"""The failure of a stage, in the user's words: where it is in the inputs, and what to do."""

from __future__ import annotations

import itertools

from tokshard import errors
from tokshard.errors import BadRecordError, TokshardError
from tokshard.format import names
from tokshard.pipeline.encode.passing import OUT_OF_VOCABULARY
from tokshard.pipeline.judge import Judge, TooManyBadRecords
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.inputs import original_error
from tokshard.pipeline.sources.records import MISSING_TEXT, TOO_LONG
from tokshard.pipeline.tasks.writing import read_rejects
from tokshard.pipeline.workspace.receipts import Key, Receipt

_REPAIRS = {
    MISSING_TEXT: "check --text-field",
    TOO_LONG: "allow longer documents with --max-document-bytes",
    OUT_OF_VOCABULARY: "give the tokenizer that made the ids with --tokenizer",
}


def user_error(build: Build, stage: str, judge: Judge) -> TokshardError:
    """The failure that a judge found, as the user should see it.

    Args:
        stage: name of the stage.
    """
    found = judge.failure
    assert found is not None
    if isinstance(found, TooManyBadRecords):
        return _too_many(build, stage, judge, found)
    return task_error(build, found, judge)


def task_error(build: Build, receipt: Receipt, judge: Judge, *, is_counted: bool = True) -> TokshardError:
    """What a failed receipt says, as the user should see it.

    Args:
        judge: has counted the tasks before it.
        is_counted: the judge knows all that was read of the input before that.
    """
    failure = receipt.failure
    assert failure is not None
    if failure.kind == "record":
        repair = _REPAIRS.get(failure.reason, "repair the record")
        place = _place(build, judge, receipt.key, failure.source, failure.record, is_counted=is_counted)
        return BadRecordError(
            f"{place}: {failure.reason}: {failure.problem}",
            hint=f"{repair}, or leave out such records with --on-bad-record skip",
        )
    kind = getattr(errors, failure.error, errors.SourceError)
    return original_error(build.inputs, kind(failure.place + failure.problem, hint=failure.hint))


def _too_many(build: Build, stage: str, judge: Judge, found: TooManyBadRecords) -> TokshardError:
    store, allowed = build.workspace.store, judge.max_bad_records
    assert allowed is not None
    hint = (
        f"they are listed in {store.where(f'{names.WORK}/{stage}/rejects')}; repair the sources, or allow more with "
        "--max-bad-records"
    )
    if allowed.count is None:
        return BadRecordError(
            f"{found.bad:,} of the first {found.records:,} records are bad ({found.bad / found.records:.2%}), "
            f"and --max-bad-records allows {allowed}",
            hint=hint,
        )
    first = next(itertools.islice(read_rejects(store, stage, found.key), allowed.count - found.before, None))
    place = _place(build, judge, found.key, first["source"], first["record"])
    return BadRecordError(
        f"{place}: {first['reason']}: {first['detail']}; this is bad record {allowed.count + 1:,}, "
        f"and --max-bad-records allows {allowed}",
        hint=hint,
    )


def _place(build: Build, judge: Judge, key: Key, index: int, record: int, *, is_counted: bool = True) -> str:
    """The place of a record in its input, from its number within a task."""
    source = build.inputs[index]
    unit = "line" if source.format == "jsonl" else "record"
    if not is_counted:
        return f"{source.location}, {unit} {record + 1} of the part that task {key[0]}-{key[1]} reads"
    before = judge.records_before(key, index)
    return f"{source.location}, {unit} {before + record + 1}"
