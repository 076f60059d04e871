"""The guide "Stream from S3", on a server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.contract.faults import ROOT, Launcher
from tests.readme.test_readme import run_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_guide_to_s3_runs_and_prints_what_it_shows(small_s3: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    text = (ROOT / "recipes/guides/stream-from-s3.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    with Launcher(tmp_path / "runs", has_torch=True) as forks:  # with the environment of the server of this test
        run_page(text.replace("s3://my-bucket", small_s3), tmp_path, forks)
