"""What was found, as JSON, as Markdown and as plots; the pages are a function of the JSON alone."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmark.peers.frame import NOT_ASKED, Row, Section
from benchmark.processes import ROOT
from benchmark.report import commit, markdown, spread_of

RESULTS = ROOT / "benchmark" / "results"
GUIDE = ROOT / "recipes" / "guides" / "benchmarks.md"
TITLE = "tokshard compared with other builders and loaders"
_LONG_CELL = 32

Results = dict[str, list[dict[str, Any]]]
"""By the name of a section: its tables as JSON."""


def described(section: Section, *, quick: bool, seconds: float, here: Mapping[str, Any]) -> dict[str, Any]:
    """A section as JSON: medians with least and greatest, versions, machine."""
    return {
        "title": section.title,
        "commit": commit(ROOT),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "form": "quick" if quick else "whole",
        "seconds": round(seconds),
        "machine": dict(here),
        "paragraphs": section.paragraphs,
        "columns": section.columns,
        "rows": [_row(row, section.columns) for row in section.rows],
        "notes": section.notes,
        "plot": section.plot,
    }


def _row(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"label": row.label, "versions": row.versions, "runs": len(row.runs)}
    found["month"] = time.strftime("%B %Y", time.gmtime())
    if row.reason:
        return found | {"reason": row.reason}
    for key in columns:
        values = [run[key] for run in row.runs if run.get(key) is not None]
        if not values:
            continue
        found[key] = spread_of(values) if all(_is_number(value) for value in values) else str(values[0])
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tables of which only some peers were measured: their rows are new, the others stay as they were.

    A row that neither has goes, and the columns, texts and notes are the new ones.
    """
    tables = []
    for index, table in enumerate(new):
        before = old[index] if index < len(old) else table
        known = {row["label"]: row for row in before["rows"]}
        is_asked = {row["label"]: row.get("reason") != f"cannot: {NOT_ASKED}" for row in table["rows"]}
        rows = [row if is_asked[row["label"]] else known.get(row["label"]) for row in table["rows"]]
        origin = {key: before[key] for key in ("commit", "date", "form", "seconds", "machine")}
        tables.append(table | origin | {"rows": [row for row in rows if row is not None]})
    return tables


def load(out: Path) -> Results:
    """What earlier runs left in the folder."""
    path = out / "peers.json"
    return json.loads(path.read_bytes())["sections"] if path.exists() else {}


def save(results: Results, out: Path, page: Path) -> None:
    """Write ``peers.json``, ``peers.md`` and the plots, and the page."""
    out.mkdir(parents=True, exist_ok=True)
    whole = {"benchmark": "peers", "sections": results}
    (out / "peers.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, tables in results.items():
        for index, table in enumerate(tables):
            if table["plot"]:
                (out / _plot_name(name, index)).write_text(bars(table), encoding="utf-8")
    (out / "peers.md").write_text(rendered(results, ""), encoding="utf-8")
    plots = os.path.relpath(out, page.parent).replace(os.sep, "/") + "/"
    page.write_text(rendered(results, plots), encoding="utf-8")


def rendered(results: Results, plots: str | None) -> str:
    """The page.

    Args:
        plots: what goes before the name of a plot in a link; None: there are no plots.
    """
    lines = [
        f"# {TITLE}",
        "",
        "`make benchmark-peers` makes this page anew on your machine, in about an hour once the peers are installed.",
        '`QUICK=1` and `ONLY="building chat"` print tables and leave the page as it is; quick ones show little but',
        "start-up. A figure is a median, with the least and the greatest behind it. Every peer has an environment of",
        "its own, its newest release on the Python that this needs, and the same text, tokenizer and cores.",
        "Repetitions take turns. Every row measured is here, whoever is ahead; a row without figures says why.",
    ]
    for name, tables in results.items():
        for index, table in enumerate(tables):
            lines += ["", f"## {table['title']}", ""]
            lines += [line for paragraph in table["paragraphs"] for line in (paragraph, "")]
            reasons: list[str] = []
            lines += [markdown(_cells(table, reasons), num_left=3), ""]
            lines += [f"- {note}" for note in [*dict.fromkeys(reasons), *table["notes"]]]
            if table["plot"] and plots is not None:
                lines += ["", f"![{table['columns'][table['plot']]}]({plots}{_plot_name(name, index)})"]
            lines += ["", _origin(table)]
    return "\n".join(lines) + "\n"


def _origin(table: Mapping[str, Any]) -> str:
    here = table["machine"]
    return (
        f"*{table['date']}, {table['form']} form, {table['seconds']:,} s, commit {table['commit']}, {here['cores']} x"
        f" {here['cpu']}, {here['memory_gb']} GB, load {here['load']} before.*"
    )


def _cells(table: Mapping[str, Any], reasons: list[str]) -> Iterator[list[str]]:
    """The rows of the table. What is too long for a cell is added to `reasons`."""

    def shown(label: str, text: str) -> str:
        text = text.replace("|", "/")
        word, _, reason = text.partition(": ")
        if word not in ("cannot", "failed", "fails", "refuses") or len(text) <= _LONG_CELL:
            return text
        reasons.append(f"**{label}** ({word}): {reason}")
        return f"{word}, see below"

    yield ["", "versions", "measured", *table["columns"].values()]
    for row in table["rows"]:
        head = [row["label"], ", ".join(f"{name} {version}" for name, version in row["versions"].items()), row["month"]]
        if "reason" in row:
            yield [*head, shown(row["label"], row["reason"]), *[""] * (len(table["columns"]) - 1)]
        else:
            yield [*head, *(shown(row["label"], _cell(row.get(key))) for key in table["columns"])]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if value["min"] == value["max"]:
        return number(value["median"])
    return f"{number(value['median'])} ({number(value['min'])} to {number(value['max'])})"


def number(value: float) -> str:
    """Three digits or more, and no more than are known."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _plot_name(name: str, index: int) -> str:
    return f"peers-{name}{f'-{index + 1}' if index else ''}.svg"


def bars(table: Mapping[str, Any]) -> str:
    """One bar a row, with the least and the greatest as a line; rows without this figure have none."""
    key = table["plot"]
    rows = [(row["label"], row[key]) for row in table["rows"] if isinstance(row.get(key), dict)]
    greatest = max((value["max"] for _, value in rows), default=1) or 1
    left, width, height = 330, 380, 24
    scale = width / greatest
    box = f"0 0 {left + width + 90} {height * len(rows) + 34}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18" font-weight="bold">{escape(table["columns"][key])}</text>',
    ]
    for index, (label, value) in enumerate(rows):
        top, middle = 28 + height * index, 28 + height * index + 9
        end = left + value["max"] * scale
        fill = "#2563eb" if label.startswith("tokshard") else "#94a3b8"
        lines += [
            f'<text x="{left - 8}" y="{middle + 5}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left}" y="{top}" width="{value["median"] * scale:.1f}" height="18" fill="{fill}"/>',
            f'<path d="M{left + value["min"] * scale:.1f} {middle}H{end:.1f}" stroke="black"/>',
            f'<text x="{end + 6:.1f}" y="{middle + 5}">{number(value["median"])}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
