"""Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import click

from tokshard.wording import bytes_text, one_line

_LINE_SECONDS = 10.0


@contextlib.contextmanager
def byte_progress(label: str, *, unit: str = "B") -> Iterator[Callable[[int, int], None]]:
    """A function that shows the finished and the total amount, in bytes or another unit, while the context lasts."""
    label = one_line(label)
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(
            desc=label,
            unit=unit if unit == "B" else f" {unit}",
            unit_scale=True,
            leave=False,
            dynamic_ncols=True,
            file=sys.stderr,
        ) as bar:

            def show_bar(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield show_bar
        return
    last = time.monotonic()

    def show_line(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_SECONDS:
            last = now
            shown = [bytes_text(count) if unit == "B" else f"{count:,} {unit}" for count in (done, total)]
            click.echo(f"{label}: {done / max(1, total):.0%}, {shown[0]} of {shown[1]}", err=True)

    yield show_line


@contextlib.contextmanager
def stage_progress(label: str) -> Iterator[Callable[[str], None]]:
    """A function that shows the current stage, on a terminal only, while the context lasts."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    shown = ""

    def show(stage: str) -> None:
        nonlocal shown
        click.echo("\r" + " " * len(shown), nl=False, err=True)
        shown = f"{one_line(label)}: {one_line(stage)}"
        click.echo("\r" + shown, nl=False, err=True)

    try:
        yield show
    finally:
        click.echo("\r" + " " * len(shown) + "\r", nl=False, err=True)
