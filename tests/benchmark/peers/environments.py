"""Where each peer is installed: an environment of its own, which `make benchmark-peers` makes.

The versions are in `constraints/`: those of `make test-interop` where a peer is tested there, and `peers-PEER.txt` for
the others. Where an installation fails, its folder keeps what pip said, and every row of the peer shows the last line.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.benchmark.processes import ROOT

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
    "dolma": ".venv-peers-dolma",
    "datasets": ".venv-peers-datasets",
    "grain": ".venv-peers-grain",
    "lance": ".venv-peers-lance",
    "torchtitan": ".venv-trainers",
    "bridge": ".venv-peers-bridge",
    "memmap": ".venv",
    "seaweedfs": ".venv-remote",
}
"""The environment of each program of `programs/`; ``PEER_chat.py`` runs in that of its peer."""


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


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
