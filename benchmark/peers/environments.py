"""Where each peer is installed: an environment of its own, which `make benchmark-peers` makes.

    python -m benchmark.peers.environments [SECTION...]

prints what make has to make for these sections, or for all. The versions are in `constraints/`: those of
`make test-interop` where a peer is tested there, and `peers-PEER.txt` for the others; `newest.py` checks them. Where an
installation fails, its folder keeps what pip said, and every row of the peer shows the last line.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmark.processes import ROOT

NEWER_TOKENIZERS = ".venv-peers-tokenizers"
"""A folder with `tokenizers` 1.x alone, which goes first on the path of a peer that is to encode with it."""

ENVIRONMENTS = {
    "tokshard": ".venv",
    "tokenizers": ".venv-interop-datatrove",
    "datatrove": ".venv-interop-datatrove",
    "megatron": ".venv-interop-megatron",
    "litdata": ".venv-interop-litdata",
    "streaming": ".venv-interop-streaming",
    "trl": ".venv-interop-trl",
    "datasets": ".venv-peers-datasets",
    "grain": ".venv-peers-grain",
    "lance": ".venv-peers-lance",
    "guideloom": ".venv-peers-guideloom",
    "torchtitan": ".venv-trainers",
    "bridge": ".venv-peers-bridge",
    "memmap": ".venv",
    "seaweedfs": ".venv-remote",
}
"""The environment of each program of `programs/`; ``PEER_chat.py`` runs in that of its peer."""

SECTIONS = {
    "building": ("datatrove", "megatron", "litdata", "streaming", "datasets", "tokenizers"),
    "loading": ("streaming", "litdata", "megatron", "grain", "lance", "guideloom", "datasets"),
    "store": ("streaming", "litdata", "seaweedfs"),
    "chat": ("trl", "torchtitan", "bridge"),
    "faults": ("datatrove", "megatron", "litdata", "streaming", "datasets"),
    "growth": ("megatron", "datasets", "streaming", "guideloom"),
}
"""The peers of each section; all have tokshard as well."""


class MissingError(Exception):
    """The peer is not installed; the message says why."""


@dataclass(frozen=True, slots=True)
class Environments:
    """Finds the interpreters.

    Args:
        root: the folder with the environments; default: the root of the repository.
    """

    root: Path = ROOT

    def python(self, peer: str) -> str:
        """The interpreter of a peer.

        Raises:
            MissingError: it is not installed.
        """
        environment = self.root / ENVIRONMENTS[peer.partition("_")[0]]
        failed, python = environment / "failed.txt", environment / "bin" / "python"
        if failed.exists():
            raise MissingError(f"It can't be installed here: {last_line(failed.read_text(encoding='utf-8'))}")
        if not python.exists():
            raise MissingError(f"{environment.name} is missing: `make benchmark-peers` installs it.")
        return str(python)

    def newer_tokenizers(self) -> str:
        """The folder with `tokenizers` 1.x, for ``PYTHONPATH``."""
        folder = self.root / NEWER_TOKENIZERS
        if not (folder / "tokenizers").is_dir():
            raise MissingError(f"{NEWER_TOKENIZERS} is missing: `make benchmark-peers` installs it.")
        return str(folder)


def stamps(sections: Iterable[str]) -> list[str]:
    """The targets of make that install what these sections need."""
    environments = {ENVIRONMENTS[peer] for section in sections for peer in SECTIONS[section]}
    found = [f"{each}/stamp-{'peer' if each.startswith('.venv-peers-') else 'test'}" for each in environments]
    return sorted([*found, f"{NEWER_TOKENIZERS}/stamp-peer"] if "building" in sections else found)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    sys.stdout.write(" ".join(stamps(sys.argv[1:] or SECTIONS)) + "\n")
