"""Whether the peers that `constraints/` name are the newest releases there are.

    python -m benchmark.peers.newest [SECTION...]

asks the index of pip for each peer of these sections, or of all. It ends with exit code 1 if a release is newer than
the pin, whatever Python that needs; pre-releases don't count. `make benchmark-peers` begins with it.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable

from benchmark.peers.environments import SECTIONS
from benchmark.processes import ROOT

PACKAGES = {
    "datatrove": ("interop-datatrove", "datatrove"),
    "megatron": ("interop-megatron", "megatron-core"),
    "litdata": ("interop-litdata", "litdata"),
    "streaming": ("interop-streaming", "mosaicml-streaming"),
    "trl": ("interop-trl", "trl"),
    "datasets": ("peers-datasets", "datasets"),
    "grain": ("peers-grain", "grain"),
    "lance": ("peers-lance", "lancedb"),
    "guideloom": ("peers-guideloom", "guideloom"),
    "torchtitan": ("trainers", "torchtitan"),
    "bridge": ("peers-bridge", "megatron-bridge"),
}
"""The file of constraints that pins a peer, and its package."""

Newest = Callable[[str, str], str | None]
"""The newest release of a package, for a version of Python at least; None if the index does not say."""


def newest(package: str, python: str) -> str | None:
    """What the index of pip says; a release that needs a newer Python counts, too."""
    asked = ["index", "versions", "--json", "--ignore-requires-python", "--python-version", python, package]
    said = subprocess.run([sys.executable, "-m", "pip", *asked], capture_output=True, text=True, check=False)
    return str(json.loads(said.stdout)["latest"]) if said.returncode == 0 else None


def problems(sections: Iterable[str], newest: Newest = newest) -> list[str]:
    """A line for each peer of these sections whose pin is not the newest release, with what to do."""
    found = []
    for peer in dict.fromkeys(peer for section in sections for peer in SECTIONS[section] if peer in PACKAGES):
        name, package = PACKAGES[peer]
        text = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8")
        pinned = re.search(rf"^{package}==(\S+)", text, re.MULTILINE)
        python = re.search(r"^# Python (3\.\d+)", text, re.MULTILINE)
        latest = newest(package, python[1] if python else "3.11")
        if latest is None:
            sys.stderr.write(f"{package}: the index does not answer, so its pin is not checked\n")
        elif pinned is None or pinned[1] != latest:
            found.append(
                f"constraints/{name}.txt has {package} {pinned[1] if pinned else 'nowhere'}, and {latest} is the"
                f" newest: pin it there with what it requires, write '# Python 3.x' if it needs a newer Python, and"
                f" measure its rows again with 'python -m benchmark.peers --peers {peer} --write'"
            )
    return found


def main() -> None:
    found = problems(sys.argv[1:] or SECTIONS)
    sys.stderr.write("".join(f"{line}\n" for line in found))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
