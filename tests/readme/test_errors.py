"""The page of error messages is made from the tables of refusals."""

from __future__ import annotations

import subprocess
import sys

from tests.refusals import PAGE, ROOT, page, tables


def test_the_page_of_errors_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.refusals writes it"


def test_every_table_is_read_without_torch() -> None:
    """So that the page can be written, and refusals be tried, where torch is not installed."""
    program = "import sys; sys.modules['torch'] = None; from tests.refusals import page; page()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
    assert sum(map(len, tables().values())) > 200
