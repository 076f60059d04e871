"""The preview of a plan as text: the order as a tree, the tokens read, and how well they are mixed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from tokshard.cli.tables import can_encode, table
from tokshard.inspect.plan.balance import Balance
from tokshard.inspect.plan.preview import CorpusPlan, PlanReport
from tokshard.inspect.plan.streams import StreamsAdvice
from tokshard.wording import aligned, bytes_text, counted, one_line, wrapped

_BRANCH, _LAST, _TRUNK = "├─ ", "└─ ", "│    "


def plan_text(report: PlanReport, *, width: int, encoding: str | None) -> str:
    """A preview of a plan.

    Args:
        width: characters per line; only the fingerprint and long paths are never broken.
        encoding: of the output; one without line-drawing characters gets an ASCII tree.
    """
    step_tokens = report.global_batch_size * report.sizes["seq_len"]
    size = bytes_text(report.num_tokens * report.bytes_per_token)
    head = [
        ("reads", f"{tokens_text(report.num_tokens)} tokens in {counted(report.num_steps, 'step')} of {step_tokens:,}"),
        *(("", f"from step {step:,} on, a step has {counted(each, 'sample')}") for step, each in report.batch_ramp),
        *(
            ("", f"from sample {sample:,} on, a sample has {new:,} tokens, and {old:,} before")
            for sample, old, new in report.seq_len_changes
        ),
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
    more = [
        [line for corpus in report.corpora for line in _packing_lines(corpus)],
        [] if report.streams is None else _streams_lines(report.streams, report.sizes["num_streams"]),
        [] if report.balance is None else _balance_lines(report.balance),
        [("warning", warning) for warning in report.warnings],
    ]
    return "\n\n".join([*parts, *(aligned(lines, width=width) for lines in more if lines)])


def plan_tree(report: PlanReport, *, encoding: str | None, width: int) -> str:
    """The order as a tree: everything that its fingerprint depends on, and the weights, which do not change it.

    Arguments as for `plan_text`.
    """
    sizes = report.sizes
    branch, last, trunk = (_BRANCH, _LAST, _TRUNK) if can_encode(_BRANCH + _LAST, encoding) else ("|- ", "`- ", "|    ")
    longest = max(len(one_line(corpus.name)) for corpus in report.corpora)
    blocks = f"blocks of {sizes['block_tokens']:,}, windows of {counted(sizes['window_blocks'], 'block')}"
    if sizes["num_streams"] > 1:
        blocks += f", {counted(sizes['num_streams'], 'stream')}"
    order = f"order version {sizes['order_version']}, seed {sizes['seed']}"
    order += f": samples of {sizes['seq_len']:,} tokens, {blocks}"
    lines = [f"plan {report.fingerprint}", *wrapped(branch + order, width=width, indent=trunk)]
    for number, corpus in enumerate(report.corpora, 1):
        is_last = number == len(report.corpora)
        line = f"{last if is_last else branch}{one_line(corpus.name):<{longest}} {_corpus_text(corpus)}"
        lines += wrapped(line, width=width, indent=" " * len(trunk) if is_last else trunk)
    return "\n".join(lines)


def _corpus_text(corpus: CorpusPlan) -> str:
    parts = [
        f"{tokens_text(corpus.epoch_tokens)} tokens"
        + ("" if corpus.target_share is None else f" ({corpus.target_share:.1%} targets)"),
    ]
    if corpus.num_windows > 1:
        parts.append(f"{counted(corpus.num_blocks, 'block')} in {corpus.num_windows:,} windows")
    if corpus.num_parts > 1:
        parts.append(f"dealt to {counted(corpus.num_parts, 'stream')}")
    if corpus.take != 1:
        parts.append(f"the part {corpus.take:g} of it")
    if corpus.packing is not None:
        parts.append("packed whole")
    if corpus.start_epoch:
        parts.append(f"from epoch {corpus.start_epoch} on")
    if corpus.max_epochs is not None:
        parts.append(f"at most {corpus.max_epochs:g} {'epoch' if corpus.max_epochs == 1 else 'epochs'}")
    head = f"{corpus.weight_share:7.2%}  {corpus.fingerprint[:12]}"
    return f"{head}  {', '.join(parts)}: {one_line(_from_here(corpus.directory))}"


def _from_here(directory: str) -> str:
    """A directory below the working directory by its path from there."""
    return directory.removeprefix(os.path.join(os.getcwd(), ""))


def _packing_lines(corpus: CorpusPlan) -> Iterator[tuple[str, str]]:
    """How the rows of a corpus are packed, if they are packed whole."""
    if (packing := corpus.packing) is None:
        return
    rows = (
        f"corpus {one_line(corpus.name)!r} has {counted(packing.rows, 'row')} an epoch, {packing.padding:.2%} padding"
    )
    if packing.num_chunks is not None:
        cut = f"{packing.num_cut:,} cut into {packing.num_pieces:,} pieces" if packing.num_cut else "none cut"
        chunks = counted(packing.num_chunks, "document or row-long part of one", "documents or row-long parts of one")
        rows += f"; its first window has {chunks}, {cut}"
    yield "packed", rows


def _corpus_rows(corpora: Sequence[CorpusPlan]) -> Iterator[list[str]]:
    has_windows = any(corpus.steps_per_window is not None for corpus in corpora)
    yield ["corpus", "share", "tokens", "epochs", "documents", "bytes", *["steps per window"] * has_windows]
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
            *["one window" if steps is None else f"{steps:,.1f}"] * has_windows,
        ]


def _streams_lines(advice: StreamsAdvice, num_streams: int) -> list[tuple[str, str]]:
    """The recommended number of streams, and why."""
    nodes, wanted = counted(advice.num_nodes, "node"), advice.num_streams
    best = f"{nodes} would read {advice.reads_with:,.1f} bytes per byte that they train on"
    if wanted == 1:
        why = f"with one stream {best}, and more streams would not change it much"
    else:
        why = f"{best}, and without streams {advice.reads_without:,.1f}, because each has samples of every window"
    rows = [("streams", f"num_streams = {wanted} for {nodes}: {why}")]
    if num_streams != wanted:
        rows.append(("", f"the plan has {counted(num_streams, 'stream')}, with which it is {advice.reads_now:,.1f}"))
    rows += [
        ("", f"corpus {one_line(name)!r} has fewer than {needed:,} blocks, so it is shared: all nodes read all of it")
        for name, needed in advice.shared.items()
    ]
    if wanted > 1:
        rows.append(("", "a run cannot change its number of streams: choose for the most nodes that it will have"))
    return rows


def _balance_lines(balance: Balance) -> list[tuple[str, str]]:
    """How even the work of the ranks is, and whether another deal is worth it."""
    ranks, rows = counted(balance.num_ranks, "rank"), counted(balance.rows_per_rank, "row")
    slowest = f"of {ranks} with {rows} each, the slowest has {balance.in_order:,.2f} times the mean attention"
    found = [("work", f'{slowest}, and {balance.by_cost:,.2f} times with deal = "cost"')]
    if balance.saved is not None:
        found.append(("", f"a step of this model is {max(0.0, balance.saved):.1%} shorter with it"))
    return found


def tokens_text(number: int) -> str:
    """A number of tokens; large ones with four digits."""
    for power, suffix in ((12, "T"), (9, "B"), (6, "M")):
        rounded = float(f"{number / 10**power:.4g}")
        if rounded >= 1 and number >= 10**6:  # what rounds to 1,000 of a suffix is 1 of the next
            return f"{rounded:.12g}{suffix}"
    return f"{number:,}"


def step_text(seq_len: int, global_batch_size: int) -> str:
    """The size of a step."""
    return f"{counted(seq_len, 'token')} x {counted(global_batch_size, 'sample')} a step"
