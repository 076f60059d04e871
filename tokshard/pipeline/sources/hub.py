"""Data sets and tokenizers of the Hugging Face hub: which files they are, at which revision, in the hub's own cache.

Files come through `huggingface_hub`; `datasets` says which ones a configuration and split consist of. tokshard reads
them itself, and no code of a repository is ever run.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tokshard.errors import SourceError, UsageError

SCHEME = "hf://"

_PART = r"[\w.-]+"
_DATASET = re.compile(
    rf"hf://(?:datasets/)?(?P<repository>{_PART}/{_PART})(?:/(?P<config>{_PART}))?"
    rf"(?:@(?P<revision>[^:]+))?(?::(?P<split>{_PART}))?"
)
_MODEL = re.compile(rf"(?:hf://)?(?P<repository>{_PART}/{_PART})(?:@(?P<revision>.+))?")
_FIRST_WITHOUT_SCRIPTS = 4
"""Major version of `datasets` that runs no code of a repository, whatever the environment asks for."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class HubFiles:
    """Files of one revision of a repository, on this disk.

    Args:
        root: the directory that `paths` are relative to.
        label: the id with its commit.
    """

    root: str
    label: str
    paths: Sequence[str]


def fetch_dataset(argument: str) -> HubFiles:
    """Download the files of ``hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]`` that are not in the cache yet.

    Raises:
        UsageError: the data set does not exist, or has several configurations or splits and none was chosen.
        SourceError: the hub does not answer.
    """
    match = _DATASET.fullmatch(argument)
    if match is None:
        raise UsageError(
            f"{argument} is not a dataset of the hub", hint="give hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]"
        )
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            f"{argument} needs the packages datasets and huggingface_hub: {error}",
            hint="pip install 'tokshard[hf]'",
        ) from error
    if int(datasets.__version__.partition(".")[0]) < _FIRST_WITHOUT_SCRIPTS:
        raise UsageError(
            f"{argument} needs datasets {_FIRST_WITHOUT_SCRIPTS} or later, this is {datasets.__version__}, "
            "which may run the code of a repository",
            hint="pip install 'tokshard[hf]'",
        )
    repository, config, split = match["repository"], match["config"], match["split"]
    commit = _commit(argument, lambda api: api.dataset_info(repository, revision=match["revision"]))
    try:
        builder = datasets.load_dataset_builder(repository, name=config, revision=commit)
    except (ValueError, OSError, RuntimeError) as error:  # a missing configuration, no data files, a loading script
        _refuse(argument, error)
    data_files: dict[str, Sequence[str]] = {
        str(name): list(files) for name, files in (builder.config.data_files or {}).items()
    }
    chosen = _choose_split(argument, split, list(data_files))
    marker = f"@{commit}/"
    paths = sorted({str(file).partition(marker)[2] for file in data_files[chosen]}, key=str.encode)
    if not all(paths):
        raise UsageError(
            f"{argument} names files outside its repository", hint="download them, and give their directory"
        )
    try:
        root = huggingface_hub.snapshot_download(
            repository, repo_type="dataset", revision=commit, allow_patterns=[glob.escape(path) for path in paths]
        )
    except Exception as error:  # noqa: BLE001 - the hub's client raises errors of several HTTP libraries
        _fail(argument, error)
    suffix = (f"/{config}" if config else "") + f"@{commit}:{chosen}"
    return HubFiles(str(root), f"{SCHEME}{repository}{suffix}", paths)


def is_model_id(location: str) -> bool:
    """Whether a location, which is not a local path, has the form of a repository of the hub."""
    return _MODEL.fullmatch(location) is not None


def fetch_tokenizer(location: str) -> HubFiles:
    """Download the tokenizer files of ``[hf://]OWNER/NAME[@REVISION]`` that are not in the cache yet, and nothing else.

    Raises:
        UsageError: the repository does not exist, or lacks a ``tokenizer.json``.
        SourceError: the hub does not answer.
    """
    match = _MODEL.fullmatch(location)
    if match is None:
        raise UsageError(f"{location} is not a model of the hub", hint="give hf://OWNER/NAME[@REVISION]")
    import huggingface_hub  # tokenizers depends on it

    repository = match["repository"]
    found: list[str] = []

    def info(api: Any) -> Any:
        answer = api.model_info(repository, revision=match["revision"])
        found.extend(file.rfilename for file in answer.siblings or [])
        return answer

    commit = _commit(location, info)
    if _TOKENIZER_FILES[0] not in found:
        others = [name for name in found if name.endswith((".model", ".tiktoken"))]
        raise UsageError(
            f"{location} has no {_TOKENIZER_FILES[0]}" + (f"; it has {', '.join(others)}" if others else ""),
            hint=f"download it, and then: tokshard convert-tokenizer {others[0]} --out DIR"
            if others
            else "give another --tokenizer",
        )
    wanted = [name for name in _TOKENIZER_FILES if name in found]
    try:
        root = huggingface_hub.snapshot_download(repository, revision=commit, allow_patterns=wanted)
    except Exception as error:  # noqa: BLE001 - the hub's client raises errors of several HTTP libraries
        _fail(location, error)
    return HubFiles(str(root), f"{repository}@{commit}", wanted)


def _commit(argument: str, info: Callable[[Any], Any]) -> str:
    """The commit for which a revision stands now."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return str(info(huggingface_hub.HfApi()).sha)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        _refuse(argument, error)
    except Exception as error:  # noqa: BLE001 - the hub's client raises errors of several HTTP libraries
        _fail(argument, error)


def _choose_split(argument: str, split: str | None, known: Sequence[str]) -> str:
    if split is None and len(known) == 1:
        return known[0]
    if split in known:
        return str(split)
    problem = f"{argument} has no split {split!r}" if split else f"{argument} has {len(known)} splits"
    base = argument.removesuffix(f":{split}")
    raise UsageError(
        f"{problem}; it has {', '.join(known)}", hint=f"choose one: {base}:{known[0] if known else 'SPLIT'}"
    )


def _refuse(argument: str, error: Exception) -> NoReturn:
    raise UsageError(
        f"{argument} cannot be used: {_first_line(error)}",
        hint="check the id; a private one needs the token of 'hf auth login', and a repository's code is never run",
    ) from error


def _fail(argument: str, error: Exception) -> NoReturn:
    raise SourceError(
        f"{argument} cannot be fetched: {_first_line(error)}",
        hint="check the network and HF_ENDPOINT, and run the same command again; what was fetched is kept",
    ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
