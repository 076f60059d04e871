"""The failure of a task, in the user's words: where it is in the inputs, and what to do."""

from __future__ import annotations

import itertools

from tokshard.errors import BadRecordError, TokshardError
from tokshard.pipeline.encode.passing import OUT_OF_VOCABULARY
from tokshard.pipeline.failures import BadInputError, RejectedRecordError, TooManyBadRecordsError
from tokshard.pipeline.sources.inputs import Input, InputTable, original_error
from tokshard.pipeline.sources.records import MISSING_TEXT, TOO_LONG
from tokshard.pipeline.tasks.bad_record_limit import BadRecordLimit
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.tasks.rejects import read_rejects
from tokshard.pipeline.tasks.schedule import Schedule
from tokshard.pipeline.workspace.places import Workspace

_REPAIRS = {
    MISSING_TEXT: "check --text-field",
    TOO_LONG: "allow longer documents with --max-document-bytes",
    OUT_OF_VOCABULARY: "give the tokenizer that made the ids with --tokenizer",
}


def user_error(
    failure: tuple[Key, Exception],
    schedule: Schedule,
    *,
    inputs: InputTable,
    workspace: Workspace,
    max_bad_records: BadRecordLimit | None,
    is_counted: bool = True,
) -> Exception:
    """The failure that decides a stage, as the user should see it. A bug of tokshard is returned unchanged.

    Args:
        schedule: of the stage, for what was read before the task that failed.
        is_counted: the schedule knows all that was read of the input before that.
    """
    key, error = failure
    if isinstance(error, RejectedRecordError):
        repair = _REPAIRS.get(error.reason, "repair the record")
        place = _place(schedule, key, inputs[error.source], error.record, is_counted=is_counted)
        return BadRecordError(
            f"{place}: {error.reason}: {error.detail}",
            hint=f"{repair}, or leave out such records with --on-bad-record skip",
        )
    if isinstance(error, TooManyBadRecordsError):
        assert max_bad_records is not None
        listed = workspace.store.where(workspace.rejects)
        hint = f"they are listed in {listed}; repair the sources, or allow more with --max-bad-records"
        problem = _too_many(error, max_bad_records)
        if max_bad_records.count is not None:
            skipped = max_bad_records.count - error.bad_before
            first = next(itertools.islice(read_rejects(workspace, key), skipped, None))
            place = _place(schedule, key, inputs[first["source"]], first["record"], is_counted=is_counted)
            problem = f"{place}: {first['reason']}: {first['detail']}; {problem}"
        return BadRecordError(problem, hint=hint)
    if isinstance(error, BadInputError):
        return error.error
    return original_error(inputs, error) if isinstance(error, TokshardError) else error


def _too_many(error: TooManyBadRecordsError, allowed: BadRecordLimit) -> str:
    if allowed.count is not None:
        return f"this is bad record {allowed.count + 1:,}, and --max-bad-records allows {allowed}"
    share = error.bad / max(1, error.records)
    return (
        f"{error.bad:,} of the first {error.records:,} records are bad ({share:.2%}), "
        f"and --max-bad-records allows {allowed}"
    )


def _place(schedule: Schedule, key: Key, source: Input, record: int, *, is_counted: bool) -> str:
    """The place of a record in its input, from its number within a task."""
    unit = "line" if source.format == "jsonl" else "record"
    if not is_counted:
        return f"{source.location}, {unit} {record + 1} of the part that task {key[0]}-{key[1]} reads"
    before = sum(receipt.records_of(source.index) for receipt in schedule.receipts_before(key))
    return f"{source.location}, {unit} {before + record + 1}"
