"""The wheel and the archive of sources have what they should, and run without this folder."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tokshard.version import __version__

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(directory: Path) -> Path:
    run(sys.executable, "-m", "venv", directory, cwd=directory.parent)
    return directory / "bin"


def test_the_citation_and_the_changelog_name_the_version_of_the_package() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.soak
def test_the_wheel_of_the_archive_runs_in_an_environment_of_its_own(tmp_path: Path) -> None:
    builder = environment(tmp_path / "builder")
    run(builder / "pip", "install", "--quiet", "hatchling>=1.27", cwd=tmp_path)  # the only thing from a network
    run(builder / "hatchling", "build", "--target", "sdist", "--directory", tmp_path, cwd=ROOT)
    with tarfile.open(next(tmp_path.glob("tokshard-*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    sources = next(path for path in tmp_path.glob("tokshard-*") if path.is_dir())
    for name in ("README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "constraints/default.txt"):
        assert (sources / name).read_bytes() == (ROOT / name).read_bytes()
    assert (sources / "tests/architecture" / Path(__file__).name).exists()

    run(builder / "hatchling", "build", "--target", "wheel", "--directory", tmp_path, cwd=sources)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "tokshard").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert names == {path.relative_to(ROOT).as_posix() for path in files}
    assert "tokshard/py.typed" in names

    own = environment(tmp_path / "own")
    run(own / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # the libraries of this environment, without tokshard: Python reads no .pth of a folder that a .pth names
    site = next((tmp_path / "own").glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{sysconfig.get_paths()['platlib']}\n")
    version = run(own / "tokshard", "--version", cwd=tmp_path)
    assert version.split()[-1] == wheel.name.split("-")[1]
    (tmp_path / "notes.jsonl").write_text('{"text": "A first document."}\n')
    words = ["notes.jsonl", "--tokenizer", sources / "recipes/tokenizer", "--out", "shards"]
    run(own / "tokshard", "build", *words, cwd=tmp_path)
    run(own / "tokshard", "verify", "shards", cwd=tmp_path)
    where = run(own / "python", "-c", "import tokshard; print(tokshard.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
