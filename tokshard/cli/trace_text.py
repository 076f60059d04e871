"""Traces and occurrences of documents as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tokshard.cli.plan_text import step_text
from tokshard.cli.tables import table, table_line
from tokshard.inspect.corpus.documents import COLUMN_CHARACTERS, ID
from tokshard.inspect.plan.occurrences import DocumentOccurrences, current_epoch
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.trace import DocumentFacts, TraceRow
from tokshard.wording import aligned, counted, one_line, shorten, wrapped

_HEADER = ("step", "rank", "row", "sample", "corpus", "document", "tokens", "shard", "record")
_LEFT = (4, 7, 8)
_INDENT = " " * 6


def run_text(run: Run, *, width: int) -> str:
    """The plan and the checkpoint of a run, in a few lines."""
    plan = run.plan
    lines = [("plan", f"{step_text(plan.seq_len, run.global_batch_size)}, seed {plan.seed}: {plan.fingerprint[:12]}")]
    if run.checkpoint:
        done = "" if run.step is None else f"step {run.step:,}, "
        skipped = [f"{start:,} to {stop - 1:,}" for start, stop in run.cursor.skipped]
        without = f", without {', '.join(skipped)}, which were skipped" if skipped else ""
        lines.append(
            ("checkpoint", f"{run.checkpoint}: {done}samples up to {run.cursor.sample - 1:,} are read{without}")
        )
    for before, length in itertools.pairwise(run.cursor.lengths):
        left_out = [
            f"{count:,} of {one_line(name)}"
            for name, count in zip(plan.names, plan.left_out(replace(run.cursor, sample=length.sample)), strict=True)
            if count
        ]
        sizes = f"{length.seq_len:,} tokens from sample {length.sample:,} on, {before.seq_len:,} before"
        lines.append(("seq_len", sizes + (f"; left out by then: {', '.join(left_out)}" if left_out else "")))
    names = {source.fingerprint: name for name, source in zip(plan.names, plan.sources, strict=True)}
    for mask in run.cursor.masks:
        what = f"{counted(len(mask.documents), 'document')} of {one_line(names.get(mask.fingerprint, mask.name))}"
        what += "" if mask.fingerprint in names else ", a corpus that the plan no longer has"
        samples = [f"{sample:,}" for sample, _ in mask.calls]
        grown = f", more of them up to sample {samples[-1]}, as the list grew" if len(samples) > 1 else ""
        lines.append(("masked", f"{what}, from sample {samples[0]} on{grown}"))
    return aligned(lines, width=width)


def trace_text(parts: Iterable[Sequence[TraceRow]], *, width: int) -> Iterator[str]:
    """A table of all rows, part by part: a line per document, followed by its id, metadata and text.

    Args:
        width: characters per line; columns that do not fit are named below their line.
    """
    widths = [len(name) for name in _HEADER]
    for number, rows in enumerate(parts):
        cells = [_cells(row) for row in rows]
        widths = [max(sizes) for sizes in zip(widths, *(map(len, line) for line in cells), strict=True)]
        ends = itertools.accumulate(size + 2 for size in widths)
        fitting = widths[: sum(end - 2 <= width for end in ends)]
        lines = [] if number else [table_line(_HEADER, fitting, left=_LEFT)]
        for row, line in zip(rows, cells, strict=True):
            lines.append(table_line(line, fitting, left=_LEFT))
            if rest := [f"{name} {cell}" for name, cell in zip(_HEADER, line, strict=True)][len(fitting) :]:
                lines += wrapped(_INDENT + ", ".join(rest), width=width, indent=_INDENT)
            lines += [_INDENT + _start(detail, max(20, width - len(_INDENT))) for detail in _details(row)]
        if lines:
            yield "\n".join(lines)


def _cells(row: TraceRow) -> tuple[str, ...]:
    facts = row.document
    return (
        *map(_number, (row.step, row.rank, row.row, row.sample)),
        one_line(facts.corpus),
        f"{facts.document:,}",
        f"{row.start:,}-{row.stop:,} of {facts.num_tokens:,}",
        one_line(facts.shard),
        f"{facts.record_number:,} of {one_line(facts.source)}",
    )


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _start(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def _details(row: TraceRow) -> Iterator[str]:
    if row.masked:
        yield f"masked: {row.masked}"
    if row.num_targets is not None:
        yield f"targets: {row.num_targets:,} of {row.stop - row.start:,} tokens"
    if metadata := _metadata_text(row.document):
        yield metadata
    if row.text is not None:
        yield one_line(row.text)


def _metadata_text(facts: DocumentFacts) -> str:
    """Id and metadata of a document in a line; empty if it has none."""
    values = {ID: facts.id, **facts.metadata}
    known = {
        name: shorten(one_line(str(value)), COLUMN_CHARACTERS) for name, value in values.items() if value is not None
    }
    return ", ".join(f"{one_line(name)} {text}" for name, text in known.items())


def occurrences_text(found: DocumentOccurrences, run: Run, *, width: int) -> str:
    """A document and where it occurs."""
    facts = found.document
    place = f"record {facts.record_number:,} of {facts.source}, in {facts.shard}"
    epochs = f"epoch {found.epochs[0]}" if len(found.epochs) == 1 else f"epochs {found.epochs[0]} to {found.epochs[-1]}"
    current = f"; the run is in epoch {current_epoch(run, facts.corpus)} of this corpus" if run.checkpoint else ""
    lines = [
        ("document", f"{facts.corpus}:{facts.document:,}, {counted(facts.num_tokens, 'token')}, {place}"),
        *([("metadata", metadata)] if (metadata := _metadata_text(facts)) else []),
        ("searched", f"{epochs}{current}"),
    ]
    rows: list[Sequence[str]] = [("epoch", "step", "rank", "row", "sample", "tokens", "when")]
    for one in found.occurrences:
        numbers = map(_number, (one.epoch, one.step, one.rank, one.row, one.sample))
        when = f"{one.when}, {one.masked} masked" if one.masked else one.when
        rows.append((*numbers, f"{one.start:,}-{one.stop:,}", when))
    if len(rows) == 1:
        return aligned([*lines, ("", "it is not read in these epochs")], width=width)
    return aligned(lines, width=width) + "\n\n" + table(rows, width=width)


def notes_of(run: Run, steps: range | None) -> list[str]:
    """Reasons to distrust the numbers of steps, one sentence each."""
    if run.other_run:
        differs = f"the run that has begun differs: {run.other_run}; tokshard trace takes its directory"
        return [f"this is the recipe as a new run would read it, and {differs}"]
    if run.unread_mix:
        return [f"{run.unread_mix} is not read: the corpora are weighted by their tokens"]
    size = f"{run.global_batch_size:,} a step"
    if run.is_step_counted:
        each = counted(run.global_batch_size, "sample")
        counting = f"{run.checkpoint} does not say its step: steps are counted with {each} each"
        return [f"{counting}, which is right if all batches had that size; --sample is right in any case"]
    notes, left_out = list[str](), [] if steps is None else run.left_out(steps)
    if steps is not None and 0 < len(left_out) < steps.stop - steps.start:
        notes = [f"left out of the run, and not shown: {', '.join(f'step {step}' for step in left_out)}"]
    if not (run.step and run.had_other_batch_size) or (steps and steps[0] > run.step):
        return notes
    read = f"{run.checkpoint} has read {counted(run.num_received, 'sample')} in {counted(run.step, 'step')}, not {size}"
    return [*notes, f"{read}; earlier steps are counted back from it, and right as far as they had {size}"]
