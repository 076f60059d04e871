"""The failure of a stage, in the user's words: where it is in the inputs, and what to do."""

from __future__ import annotations

import itertools

from tokshard import errors
from tokshard.errors import BadRecordError, TokshardError
from tokshard.pipeline.encode.passing import OUT_OF_VOCABULARY
from tokshard.pipeline.judge import Judge, TooManyBadRecords
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.inputs import original_error
from tokshard.pipeline.sources.records import MISSING_TEXT, TOO_LONG
from tokshard.pipeline.tasks.writing import read_rejects
from tokshard.pipeline.workspace.receipts import Key, rejects_folder

_REPAIRS = {
    MISSING_TEXT: "check --text-field",
    TOO_LONG: "allow longer documents with --max-document-bytes",
    OUT_OF_VOCABULARY: "give the tokenizer that made the ids with --tokenizer",
}


def user_error(build: Build, stage: str, judge: Judge, *, is_share: bool = False) -> TokshardError:
    """The failure that a judge found, as the user should see it.

    Args:
        stage: name of the stage.
        is_share: the judge does not know all that was read before.
    """
    found, store, allowed = judge.failure, build.workspace.store, judge.max_bad_records
    if isinstance(found, TooManyBadRecords):
        assert allowed is not None
        hint = (
            f"they are listed in {store.where(rejects_folder(stage))}; repair the sources, or allow more "
            "with --max-bad-records"
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
    assert found is not None
    assert found.failure is not None
    failure = found.failure
    if failure.kind == "record":
        repair = _REPAIRS.get(failure.reason) if build.config.chat is None else None
        place = _place(build, None if is_share else judge, found.key, failure.source, failure.record)
        return BadRecordError(
            f"{place}: {failure.reason}: {failure.problem}",
            hint=f"{repair or 'repair the record'}, or leave out such records with --on-bad-record skip",
        )
    kind = getattr(errors, failure.error, errors.SourceError)
    return original_error(build.inputs, kind(failure.place + failure.problem, hint=failure.hint))


def _place(build: Build, judge: Judge | None, key: Key, index: int, record: int) -> str:
    """The place of a record in its input, from its number within a task.

    Args:
        judge: has counted the tasks before it; None if nobody has.
    """
    source = build.inputs[index]
    unit = "line" if source.format == "jsonl" else "record"
    if judge is None:
        return f"{source.location}, {unit} {record + 1} of the part that task {key[0]}-{key[1]} reads"
    return f"{source.location}, {unit} {judge.records_before(key, index) + record + 1}"
