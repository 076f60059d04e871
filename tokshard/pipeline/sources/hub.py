"""Data sets and tokenizers of the Hugging Face hub, in the hub's own cache, and data sets saved by `datasets`.

`huggingface_hub` downloads files of the hub; `datasets` tells which files belong to a configuration and split. tokshard
reads the files itself, and never runs code of a repository.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokshard.errors import SourceError, UsageError
from tokshard.store import NotRegularFileError, Store
from tokshard.wording import first_line

SCHEME = "hf://"

_PART = r"[\w.-]+"
_DATASET = re.compile(
    rf"hf://(?:datasets/)?(?P<repository>{_PART}/{_PART})(?:/(?P<config>{_PART}))?"
    rf"(?:@(?P<revision>[^:]+))?(?::(?P<split>{_PART}))?"
)
_MODEL = re.compile(rf"(?:hf://)?(?P<repository>{_PART}/{_PART})(?:@(?P<revision>.+))?")
_FIRST_WITHOUT_SCRIPTS = 4
"""Major version of `datasets` that runs no code of a repository, whatever the environment asks for."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files that ``Dataset.save_to_disk`` writes next to its data."""


@dataclass(frozen=True, slots=True)
class HubFiles:
    """Files of one revision of a repository, on the local disk.

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
        UsageError: the data set does not exist, or has several configurations or splits and none is chosen.
        SourceError: the hub does not answer.
    """
    match = _DATASET.fullmatch(argument)
    if match is None:
        raise UsageError(
            f"{argument} is not a dataset of the hub", hint="give hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]"
        )
    repository, config, split = match["repository"], match["config"], match["split"]
    datasets = _datasets(argument)
    with _errors_of(argument):
        commit = str(_api().dataset_info(repository, revision=match["revision"]).sha)
    try:
        builder = datasets.load_dataset_builder(repository, name=config, revision=commit)
    except (ValueError, OSError, RuntimeError) as error:  # a missing configuration, no data files, a loading script
        raise _refused(argument, error) from error
    found = {str(name): list(files) for name, files in (builder.config.data_files or {}).items()}
    if split is None and len(found) == 1:
        (split,) = found
    if split not in found:
        raise UsageError(
            f"{argument} has {f'no split {split!r}' if split else f'{len(found)} splits'}; it has {', '.join(found)}",
            hint=f"choose one: {argument.removesuffix(f':{split}')}:{next(iter(found), 'SPLIT')}",
        )
    paths = sorted({str(file).partition(f"@{commit}/")[2] for file in found[split]}, key=str.encode)
    if not all(paths):
        raise UsageError(
            f"{argument} names files outside its repository", hint="download them, and give their directory"
        )
    root = _download(argument, repository, commit, [glob.escape(path) for path in paths], "dataset")
    suffix = (f"/{config}" if config else "") + f"@{commit}:{split}"
    return HubFiles(root, f"{SCHEME}{repository}{suffix}", paths)


def is_model_id(location: str) -> bool:
    """Whether a location that does not exist has the form of a repository of the hub."""
    return _MODEL.fullmatch(location) is not None and not location.startswith(".")


def fetch_tokenizer(location: str) -> HubFiles:
    """Download the tokenizer files of ``[hf://]OWNER/NAME[@REVISION]`` that are not in the cache yet, and no others.

    Raises:
        UsageError: the repository does not exist, or lacks a ``tokenizer.json``.
        SourceError: the hub does not answer.
    """
    match = _MODEL.fullmatch(location)
    if match is None:
        raise UsageError(f"{location} is not a model of the hub", hint="give hf://OWNER/NAME[@REVISION]")
    with _errors_of(location):
        info = _api().model_info(match["repository"], revision=match["revision"])
    found = [file.rfilename for file in info.siblings or []]
    wanted = [name for name in _TOKENIZER_FILES if name in found]
    if _TOKENIZER_FILES[0] not in wanted:
        others = [name for name in found if name.endswith((".model", ".tiktoken"))]
        raise UsageError(
            f"{location} has no {_TOKENIZER_FILES[0]}" + (f"; it has {', '.join(others)}" if others else ""),
            hint=f"download {others[0]}, and make a tokenizer.json of it, as recipes/convert_tokenizer.py does"
            if others
            else "give another --tokenizer",
        )
    root = _download(location, match["repository"], str(info.sha), wanted, "model")
    return HubFiles(root, f"{match['repository']}@{info.sha}", wanted)


def _datasets(argument: str) -> Any:
    """The library `datasets`, which lists the files of a data set.

    Raises:
        UsageError: it is missing, or so old that it may run the code of a repository.
    """
    try:
        import datasets
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{argument} needs the packages datasets and huggingface_hub: {error}", hint="pip install 'tokshard[hf]'"
        ) from error
    if int(datasets.__version__.partition(".")[0]) < _FIRST_WITHOUT_SCRIPTS:
        raise UsageError(
            f"{argument} needs datasets {_FIRST_WITHOUT_SCRIPTS} or later, this is {datasets.__version__}, "
            "which may run the code of a repository",
            hint="pip install 'tokshard[hf]'",
        )
    return datasets


def _api() -> Any:
    import huggingface_hub  # tokenizers depends on it

    return huggingface_hub.HfApi()


def _download(argument: str, repository: str, commit: str, patterns: list[str], kind: str) -> str:
    import huggingface_hub

    with _errors_of(argument):
        return str(
            huggingface_hub.snapshot_download(repository, repo_type=kind, revision=commit, allow_patterns=patterns)
        )


@contextlib.contextmanager
def _errors_of(argument: str) -> Iterator[None]:
    """Turn errors of the hub's client, which come from several HTTP libraries, into errors about an argument."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise _refused(argument, error) from error
    except Exception as error:
        raise SourceError(
            f"{argument} cannot be fetched: {first_line(error)}",
            hint="check the network and HF_ENDPOINT, and run the same command again; what was fetched is kept",
        ) from error


def _refused(argument: str, error: Exception) -> UsageError:
    return UsageError(
        f"{argument} cannot be used: {first_line(error)}",
        hint="check the id; a private one needs the token of 'hf auth login', and a repository's code is never run",
    )


def saved_files(store: Store, folder: str) -> frozenset[str] | None:
    """The files of a folder to read: the data files of a saved data set; None (all files) for any other folder.

    A saved data set with one split has a folder in place of files; its name ends in a slash.

    Raises:
        UsageError: it holds several splits, or rows selected by an index.
        SourceError: a data file is missing, or the description is damaged.
    """
    place = f"{folder}/" if folder else ""
    if _is_file(store, place + _SPLITS):
        return frozenset({f"{_only_split(store, place)}/"})
    if not (_is_file(store, place + _STATE) and _is_file(store, place + _INFO)):
        return None
    state = _description(store, place + _STATE)
    try:
        files, indices = (
            frozenset(os.path.basename(entry["filename"]) for entry in state.get(key) or [])
            for key in ("_data_files", "_indices_data_files")
        )
    except (TypeError, KeyError) as error:
        raise SourceError(f"{store.where(place + _STATE)} names no files", hint="fetch the directory again") from error
    if indices:
        raise UsageError(
            f"{store.where(folder)} was saved with an index of its chosen rows, which tokshard does not read",
            hint="save it again after dataset.flatten_indices()",
        )
    missing = sorted(files.difference(store.names(folder)))
    if missing:
        raise SourceError(
            f"{store.where(folder)} was saved by datasets with {missing[0]}, which is gone",
            hint="fetch the directory again",
        )
    return files


def _is_file(store: Store, name: str) -> bool:
    try:
        store.stat(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularFileError):
        return False
    return True


def _only_split(store: Store, place: str) -> str:
    splits = _description(store, place + _SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(split, str) for split in splits):
        raise SourceError(f"{store.where(place + _SPLITS)} names no splits", hint="fetch the directory again")
    if len(splits) > 1:
        raise UsageError(
            f"{store.where(place).rstrip('/')} holds {len(splits)} splits: {', '.join(splits)}",
            hint=f"give the ones that you want, such as {store.where(place + splits[0])}",
        )
    return str(splits[0])


def _description(store: Store, name: str) -> dict[str, Any]:
    try:
        parsed = json.loads(store.get(name))
        if not isinstance(parsed, dict):
            raise TypeError(f"it holds a {type(parsed).__name__}, expected an object")
    except OSError as error:
        problem = f"{store.where(name)} cannot be read: {error.strerror or error}"
        raise SourceError(problem, hint="check the file and its permissions") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{store.where(name)} is damaged: {error}", hint="fetch the directory again") from error
    return parsed
