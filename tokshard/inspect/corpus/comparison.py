"""Several corpora side by side: a column each."""

from __future__ import annotations

from collections.abc import Sequence

from tokshard.inspect.corpus.report import CorpusReport, column_of
from tokshard.inspect.terminal import one_line, shorten

_NAME_WIDTH = 24


def comparison_text(reports: Sequence[CorpusReport], *, width: int) -> str:
    """A line per fact and a column per corpus, as many columns as fit and the others below."""
    columns = [column_of(report) for report in reports]
    for column, report in zip(columns, reports, strict=True):
        column["corpus"] = shorten(one_line(report.directory), _NAME_WIDTH)
    labels = list(dict.fromkeys(label for column in columns for label in column))
    label_width = max(map(len, labels))
    blocks, waiting = [], columns
    while waiting:
        taken: list[dict[str, str]] = []
        room = width - label_width
        while waiting and (not taken or _width(waiting[0]) <= room):
            room -= _width(waiting[0])
            taken.append(waiting[0])
            waiting = waiting[1:]
        blocks.append(
            "\n".join(
                f"{label:<{label_width}}" + "".join(f"{column.get(label, '-'):>{_width(column)}}" for column in taken)
                for label in labels
            )
        )
    return "\n\n".join(blocks)


def _width(column: dict[str, str]) -> int:
    return 2 + max(map(len, column.values()))
