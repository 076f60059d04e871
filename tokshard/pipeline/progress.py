"""The reports of a build to its observer while it runs, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tokshard.format.manifest import Manifest
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.planning import AnyTask, StepTask
from tokshard.pipeline.workspace.receipts import Progress, Receipt
from tokshard.wording import counted, one_line


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the user, before the work begins or during it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """The tasks of a stage are about to run.

    Args:
        name: the name of the stage.
        tasks: all that this process may run.
        done: receipts of the tasks that earlier runs of the same build finished.
    """

    build: Build
    name: str
    tasks: Sequence[AnyTask]
    done: Sequence[Receipt]

    @property
    def total_bytes(self) -> int:
        """Bytes of all inputs; 0 if these tasks are a share, or read no inputs."""
        is_share = self.build.is_array or not self.tasks or isinstance(self.tasks[0], StepTask)
        return 0 if is_share else self.build.inputs.num_bytes


@dataclass(frozen=True, slots=True)
class InputLeftOut:
    """An input is left out, because it is damaged or gone."""

    location: str
    problem: str


@dataclass(frozen=True, slots=True)
class StageEnded:
    """No task of the stage runs any more, whether it succeeded or not."""


Report = Note | StageStarted | Progress | Receipt | InputLeftOut | StageEnded

Observer = Callable[[Report], None]
"""Called in the process and thread that build, which wait for it. `Progress` comes after every chunk."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuiltCorpus:
    """A corpus that a build wrote."""

    directory: str
    manifest: Manifest

    def __str__(self) -> str:
        found = self.manifest
        sizes = f"{counted(found.num_documents, 'document')}, {counted(found.num_tokens, 'token')}"
        place = counted(found.num_shards, "shard") if found.base is None else f"a view of {one_line(found.base.path)}"
        return f"{one_line(self.directory)}: {sizes} in {place}"

    def __repr__(self) -> str:
        return f"<BuiltCorpus {self}>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuildResult:
    """The result of a build.

    Args:
        directory: the given `out`: the corpus, or with a validation split the directory of two.
        corpora: the written corpora; with a validation split the one for training, then the one for validation.
        is_new: False if it was complete before and nothing was done.
        seconds, cpu_seconds: time of this run, with its workers; 0 if nothing was done.
        tokens_written: tokens that this run wrote.
        ignored: suffix to count of files in source directories whose format is not known.
        notes: notes for the user, one line each.
        warnings: probable mistakes, one line each.
        normalizer: steps that change text before it is encoded, such as ``NFKC``; None if there are none.
    """

    directory: str
    corpora: tuple[BuiltCorpus, ...]
    is_new: bool
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens_written: int = 0
    num_workers: int = 0
    peak_worker_bytes: int = 0
    ignored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    normalizer: str | None = None

    def __repr__(self) -> str:
        return f"<BuildResult {', '.join(map(str, self.corpora))}>"

    @property
    def manifest(self) -> Manifest:
        """The manifest of the corpus; with a validation split, of the one for training."""
        return self.corpora[0].manifest

    @property
    def num_tokens(self) -> int:
        """Tokens of all corpora."""
        return sum(corpus.manifest.num_tokens for corpus in self.corpora)

    @property
    def num_targets(self) -> int | None:
        """Tokens of all corpora that lie in loss spans; None if the corpora have none."""
        found = [corpus.manifest.num_targets for corpus in self.corpora]
        return None if None in found else sum(number or 0 for number in found)
