"""What a build did, for its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokshard.format.manifest import Manifest
from tokshard.pipeline.workspace.output_directory import BuiltCorpus


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuildResult:
    """What a build did.

    Args:
        directory: the `out` that it was given: the corpus, or with a validation split the directory of two.
        corpora: what it wrote; with a validation split the corpus for training, then that for validation.
        is_new: False if it was complete before and nothing was done.
        seconds, cpu_seconds: of this run, its workers included; 0 if nothing was done.
        tokens_encoded: in this run, without those of runs before it.
        ignored: suffix to count of files in source directories whose format is not known.
        notes: what the user should know, one line each.
        warnings: what is probably wrong, one line each.
        normalizer: what changes text before it is encoded, such as ``NFKC``; None if text is encoded unchanged.
    """

    directory: str
    corpora: tuple[BuiltCorpus, ...]
    is_new: bool
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens_encoded: int = 0
    bytes_encoded: int = 0
    num_workers: int = 0
    peak_worker_bytes: int = 0
    ignored: Mapping[str, int]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    normalizer: str | None = None

    def __repr__(self) -> str:
        return f"<BuildResult {', '.join(map(str, self.corpora))}>"

    @property
    def manifest(self) -> Manifest:
        """The manifest of the corpus; with a validation split, of the one for training."""
        return self.corpora[0].manifest
