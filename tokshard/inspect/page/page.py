"""One self-contained HTML file: data, plotting library, style and script.

The page shows text from corpora, which must never act as markup. The data is JSON in which no character can end a
script element, and the script inserts it as text. A content security policy allows only the two scripts of the file and
no connections.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokshard.extras import extra_module
from tokshard.inspect.corpus.documents import TokenPiece

Section = dict[str, Any]
"""A part of the page, by ``kind``: heading, facts, chart, tokens or table; see assets/page.js."""

Facts = Iterable[tuple[str, str]]
"""Labels and values; a value without a label continues the one before."""

_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def heading(title: str) -> Section:
    """The beginning of a chapter."""
    return {"kind": "heading", "title": title}


def facts(title: str, known: Facts) -> Section:
    """Labels and values."""
    rows: list[list[str]] = []
    for label, value in known:
        if label:
            rows.append([label, value])
        else:
            rows[-1][1] += f"; {value}"
    return {"kind": "facts", "title": title, "rows": rows}


def table(title: str, columns: Sequence[Section], rows: Sequence[Sequence[Any]], **more: str) -> Section:
    """A table that a reader can sort, and search if `search` gives a label."""
    return {"kind": "table", "title": title, "columns": columns, "rows": rows, **more}


def chart(title: str, note: str, traces: Sequence[Mapping[str, Any]], x: Any, y: Any, **more: Any) -> Section:
    """A plot: plotly's traces, the options of its axes, and of the layout."""
    axes = {
        axis: {name: {"text": value} if name == "title" else value for name, value in options.items()}
        for axis, options in (("xaxis", x), ("yaxis", y))
    }
    return {"kind": "chart", "title": title, "note": note, "traces": traces, **axes, **more}


def lines(**more: Any) -> dict[str, Any]:
    """A trace that is a line."""
    return {"type": "scatter", "mode": "lines", **more}


def token_section(
    title: str,
    note: str,
    specials: Iterable[int],
    items: Iterable[tuple[str, Iterable[tuple[str, Iterable[TokenPiece]]]]],
) -> Section:
    """Texts token by token: the ids to mark, and for each item a title and its parts, each with a title or none."""
    shown = [
        {
            "title": item,
            "parts": [
                {
                    "title": part,
                    "pieces": [[piece.text, *piece.ids] for piece in pieces],
                    "targets": [place for place, piece in enumerate(pieces) if piece.is_target],
                }
                for part, pieces in ((part, list(pieces)) for part, pieces in parts)
            ],
        }
        for item, parts in items
    ]
    return {"kind": "tokens", "title": title, "note": note, "specials": sorted(specials), "items": shown}


def render_page(*, title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The file; about 5 MB, nearly all of it the plotting library.

    Raises:
        UsageError: plotly is not installed.
    """
    plotly, script = plotly_source(), _asset("page.js")
    policy = (
        f"default-src 'none'; script-src {_digest(plotly)} {_digest(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{_text(title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n",
            f"<header><h1>{_text(title)}</h1><p>{_text(subtitle)}</p></header>\n",
            '<nav aria-label="Sections"></nav>\n<main></main>\n',
            f'<script type="application/json" id="data">{embedded_json({"sections": sections})}</script>\n',
            f"<script>{plotly}</script>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def embedded_json(value: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element, whatever text it contains."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def plotly_source() -> str:
    """The JavaScript of the plotting library, from its Python package.

    Raises:
        UsageError: the package is not installed.
    """
    extra_module("plotly", "an HTML report needs plotly, which is not installed", extra="report")
    folder = importlib.resources.files("plotly")
    return folder.joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


def _asset(name: str) -> str:
    return importlib.resources.files("tokshard.inspect.page").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _text(text: str) -> str:
    return html.escape(text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0"))
