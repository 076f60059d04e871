"""All text about plans: previews, traces, occurrences of documents and speeds, for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from tokshard.inspect.plan.bench import ModeSpeed, SpeedReport, notes_of
from tokshard.inspect.plan.occurrences import DocumentOccurrences, current_epoch
from tokshard.inspect.plan.preview import CorpusPlan, PlanReport
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.simulation import UNIFORM_DISTANCE, Simulation
from tokshard.inspect.plan.trace import ID, DocumentFacts, TraceRow
from tokshard.inspect.terminal import can_encode, columns_line, table
from tokshard.wording import aligned, bytes_text, counted, one_line, wrapped

_BRANCH, _LAST, _TRUNK = "├─ ", "└─ ", "│    "

_TRACE_HEADER = ("step", "rank", "row", "sample", "corpus", "document", "tokens", "shard", "record")
_TRACE_LEFT = (4, 7, 8)
_INDENT = " " * 6

_MAX_SHARES = 8


def plan_text(report: PlanReport, *, width: int, encoding: str) -> str:
    """A preview of a plan.

    Args:
        width: characters per line; only the fingerprint and long paths are never broken.
        encoding: of the output; one without line-drawing characters gets an ASCII tree.
    """
    step_tokens = report.global_batch_size * report.sizes["seq_len"]
    size = bytes_text(report.num_tokens * report.bytes_per_token)
    head = [
        ("reads", f"{tokens_text(report.num_tokens)} tokens in {counted(report.num_steps, 'step')} of {step_tokens:,}"),
        ("", f"{size} of token ids, {counted(report.bytes_per_token, 'byte')} each"),
    ]
    for change in report.changes:
        step = "" if change.step is None else f" (step {change.step:,})"
        shares = ", ".join(f"{one_line(name)} {share:.1%}" for name, share in change.shares.items())
        head.append(("weights", f"from sample {change.sample:,}{step} on: {shares}"))
    parts = [
        plan_tree(report, width=width, encoding=encoding),
        aligned(head, width=width),
        table(list(_corpus_rows(report.corpora)), width=width),
    ]
    if report.simulation is not None:
        parts.append(_simulation_text(report.simulation, width=width))
    if report.warnings:
        parts.append(aligned([("warning", warning) for warning in report.warnings], width=width))
    return "\n\n".join(parts)


def plan_tree(report: PlanReport, *, encoding: str, width: int) -> str:
    """The order as a tree: everything that its fingerprint depends on, and the weights, on which it does not depend.

    Arguments as for `plan_text`.
    """
    sizes = report.sizes
    branch, last, trunk = (_BRANCH, _LAST, _TRUNK) if can_encode(_BRANCH + _LAST, encoding) else ("|- ", "`- ", "|    ")
    longest = max(len(one_line(corpus.name)) for corpus in report.corpora)
    blocks = f"blocks of {sizes['block_tokens']:,}, windows of {counted(sizes['window_blocks'], 'block')}"
    order = f"order {sizes['order_version']}, seed {sizes['seed']}: samples of {sizes['seq_len']:,} tokens, {blocks}"
    lines = [f"plan {report.fingerprint}", *wrapped(branch + order, width=width, indent=trunk)]
    for number, corpus in enumerate(report.corpora, 1):
        is_last = number == len(report.corpora)
        line = f"{last if is_last else branch}{one_line(corpus.name):<{longest}} {_corpus_text(corpus)}"
        lines += wrapped(line, width=width, indent=" " * len(trunk) if is_last else trunk)
    return "\n".join(lines)


def _corpus_text(corpus: CorpusPlan) -> str:
    parts = [
        f"{tokens_text(corpus.epoch_tokens)} tokens",
        f"{counted(corpus.num_blocks, 'block')} in {counted(corpus.num_windows, 'window')}",
    ]
    if corpus.take != 1:
        parts.append(f"the part {corpus.take:g} of it")
    if corpus.start_epoch:
        parts.append(f"from epoch {corpus.start_epoch} on")
    if corpus.max_epochs is not None:
        parts.append(f"at most {corpus.max_epochs:g} {'epoch' if corpus.max_epochs == 1 else 'epochs'}")
    head = f"{corpus.weight_share:7.2%}  {corpus.fingerprint[:12]}"
    return f"{head}  {', '.join(parts)}: {one_line(corpus.directory)}"


def _corpus_rows(corpora: Sequence[CorpusPlan]) -> Iterator[list[str]]:
    yield ["corpus", "share", "tokens", "epochs", "documents", "bytes", "steps per window"]
    for corpus in corpora:
        is_all = corpus.documents == corpus.num_documents and corpus.epochs >= 1
        steps = corpus.steps_per_window
        yield [
            one_line(corpus.name),
            f"{corpus.share:.2%}",
            tokens_text(corpus.tokens),
            f"{corpus.epochs:,.2f}",
            f"{'' if is_all else '~'}{corpus.documents:,} of {corpus.num_documents:,}",
            bytes_text(corpus.bytes),
            "one window" if steps is None else f"{steps:,.1f}",
        ]


def _simulation_text(simulation: Simulation, *, width: int) -> str:
    fewest, median, most = simulation.blocks_per_step
    last = simulation.first + simulation.num_samples - 1
    head = [
        ("simulated", f"samples {simulation.first:,} to {last:,}"),
        ("places", f"a step draws from {median:,.0f} blocks in the median, {fewest:,} to {most:,}"),
        (
            "distance",
            f"of successive samples in the corpus, in the median; random places are {UNIFORM_DISTANCE:.0%} apart",
        ),
    ]
    rows = [["corpus", "samples", "worst error", "distance"]]
    for corpus in simulation.corpora:
        distance = "-" if corpus.median_distance is None else f"{corpus.median_distance:.1%}"
        rows.append([one_line(corpus.name), f"{corpus.num_samples:,}", f"{corpus.worst_error:.2f} samples", distance])
    return aligned(head, width=width) + "\n\n" + table(rows, width=width)


def tokens_text(number: int) -> str:
    """A number of tokens; large ones with four digits."""
    for power, suffix in ((12, "T"), (9, "B"), (6, "M")):
        if number >= 10**power:
            return f"{float(f'{number / 10**power:.4g}'):.12g}{suffix}"
    return f"{number:,}"


def run_text(run: Run, *, width: int) -> str:
    """The plan and the checkpoint of a run, in two lines."""
    plan = run.plan
    lines = [("plan", f"{_step_text(plan.seq_len, run.global_batch_size)}, seed {plan.seed}: {plan.fingerprint[:12]}")]
    if run.checkpoint:
        done = "" if run.step is None else f"step {run.step:,}, "
        skipped = [f"{start:,} to {stop - 1:,}" for start, stop in run.cursor.skipped]
        without = f", without {', '.join(skipped)}, which were skipped" if skipped else ""
        lines.append(
            ("checkpoint", f"{run.checkpoint}: {done}samples up to {run.cursor.sample - 1:,} are read{without}")
        )
    return aligned(lines, width=width)


def _step_text(seq_len: int, global_batch_size: int) -> str:
    return f"{counted(seq_len, 'token')} x {counted(global_batch_size, 'sample')} a step"


def trace_text(parts: Iterable[Sequence[TraceRow]], *, width: int) -> Iterator[str]:
    """A table of all rows, part by part: a line per document, followed by its id, metadata and text.

    Args:
        width: characters per line; columns that do not fit are named below their line.
    """
    widths = [len(name) for name in _TRACE_HEADER]
    for number, rows in enumerate(parts):
        cells = [_trace_cells(row) for row in rows]
        widths = [max(sizes) for sizes in zip(widths, *(map(len, line) for line in cells), strict=True)]
        ends = itertools.accumulate(size + 2 for size in widths)
        fitting = widths[: sum(end - 2 <= width for end in ends)]
        lines = [] if number else [_trace_line(_TRACE_HEADER, fitting)]
        for row, line in zip(rows, cells, strict=True):
            lines.append(_trace_line(line, fitting))
            if rest := [f"{name} {cell}" for name, cell in zip(_TRACE_HEADER, line, strict=True)][len(fitting) :]:
                lines += wrapped(_INDENT + ", ".join(rest), width=width, indent=_INDENT)
            lines += [_INDENT + _start(detail, max(20, width - len(_INDENT))) for detail in _details(row)]
        if lines:
            yield "\n".join(lines)


def _trace_cells(row: TraceRow) -> tuple[str, ...]:
    facts = row.document
    return (
        *map(_number, (row.step, row.rank, row.row, row.sample)),
        one_line(facts.corpus),
        f"{facts.document:,}",
        f"{row.start:,}-{row.stop:,} of {facts.num_tokens:,}",
        one_line(facts.shard),
        f"{facts.record_number:,} of {one_line(facts.source)}",
    )


def _trace_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return columns_line(cells, widths, left=_TRACE_LEFT).rstrip()


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _start(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def _details(row: TraceRow) -> Iterator[str]:
    if metadata := _metadata_text(row.document):
        yield metadata
    if row.text is not None:
        yield one_line(row.text)


def _metadata_text(facts: DocumentFacts) -> str:
    """Id and metadata of a document in a line; empty if it has none."""
    values = {ID: facts.id, **facts.metadata}
    return ", ".join(f"{one_line(name)} {one_line(str(value))}" for name, value in values.items() if value is not None)


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
        rows.append((*numbers, f"{one.start:,}-{one.stop:,}", one.when))
    if len(rows) == 1:
        return aligned([*lines, ("", "it is not read in these epochs")], width=width)
    return aligned(lines, width=width) + "\n\n" + table(rows, width=width)


def speed_text(report: SpeedReport, *, gpu_tokens: int, gpu_reason: str, width: int) -> str:
    """The result of a benchmark.

    Args:
        gpu_tokens: tokens per second that one GPU consumes.
        gpu_reason: where that figure comes from.
        width: characters per line.
    """
    mix, memory = report.mix, report.memory
    shares = [f"{one_line(name)} {share:.1%}" for name, share in list(report.shares.items())[:_MAX_SHARES]]
    if more := len(report.shares) - len(shares):
        shares.append(f"and {more} more")
    gather = f"documents of {counted(memory.document_tokens, 'token')} from random places"
    head = [
        ("mix", ", ".join(shares)),
        ("plan", f"{_step_text(mix.seq_len, mix.global_batch_size)}, seed {mix.seed}: {report.fingerprint[:12]}"),
        (
            "data",
            f"{counted(report.num_tokens, 'token')} in documents of {report.mean_document_tokens:,.0f} on average",
        ),
        ("limits", "the most that one core can read, from memory-mapped shards to int64:"),
        ("contiguous", f"{_millions(memory.contiguous)} M tokens/s, one shard after another"),
        ("gather", f"{_millions(memory.gather)} M tokens/s, {gather}"),
    ]
    cores = report.rank_cpu_seconds * gpu_tokens
    feeds = f"one loader process per GPU, each of which reads one row of a step, takes {cores * 100:.2g} % of a core"
    tail = [("feeds", _feeds_text(report.default_mode, gpu_tokens, gpu_reason)), ("", feeds)]
    tail += [("note", note) for note in notes_of(report)]
    rows = table(list(_mode_rows(report, gpu_tokens)), width=width)
    return "\n\n".join([aligned(head, width=width), rows, aligned(tail, width=width)])


def _feeds_text(mode: ModeSpeed, gpu_tokens: int, gpu_reason: str) -> str:
    gpus = counted(int(mode.steps.tokens_per_second // gpu_tokens), "GPU")
    reason = f" ({gpu_reason})" if gpu_reason else ""
    return f"one loader process ({mode.name}) feeds {gpus} of {gpu_tokens:,} tokens/s{reason}"


def _mode_rows(report: SpeedReport, gpu_tokens: int) -> Iterator[Sequence[str]]:
    limits = ("of gather limit", "of contiguous limit")
    yield ("mode", "M tokens/s", *limits, "first batch", "median step", "longest step", "GPUs")
    for mode in report.modes:
        steps, speed = mode.steps, mode.steps.tokens_per_second
        yield (
            mode.name,
            _millions(speed),
            f"{speed / report.memory.gather:.0%}",
            f"{speed / report.memory.contiguous:.0%}",
            _milliseconds(mode.first_batch_seconds),
            _milliseconds(steps.median_seconds),
            f"{_milliseconds(steps.longest_seconds)} ({steps.longest_seconds / steps.median_seconds:,.0f}x)",
            f"{int(speed // gpu_tokens):,}",
        )


def _millions(speed: float) -> str:
    return f"{speed / 1e6:,.0f}" if speed >= 1e8 else f"{speed / 1e6:,.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
