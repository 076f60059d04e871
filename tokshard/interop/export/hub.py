"""Uploading an export to the Hugging Face hub, as one commit."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from tokshard.errors import ExportError, UsageError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """An upload.

    Args:
        repository: ``OWNER/NAME``.
        commit: the address of the commit.
        is_private: whether only its owner sees the data set.
    """

    repository: str
    commit: str
    is_private: bool


def check_repository(repository: str, *, split: str | None) -> None:
    """Find out before an export whether it can be pushed: the name, the account, and what is there.

    Raises:
        UsageError: the name has another form, or the data set has such files already.
        ExportError: the hub does not answer, or does not know who asks.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository!r} is not the name of a data set", hint="give --push OWNER/NAME")
    api, not_found = _hub()
    try:
        api.whoami()
    except Exception as error:
        raise ExportError(
            f"the Hugging Face hub does not say whose account this is: {_short(error)}",
            hint="log in with 'hf auth login', or set HF_TOKEN",
        ) from error
    try:
        there = api.list_repo_files(repository, repo_type="dataset")
    except not_found:
        return
    except Exception as error:
        raise _failed(repository, error, hint="check the name, and try again") from error
    prefix = "" if split is None else f"{split}/"
    data = [name for name in there if re.fullmatch(re.escape(prefix) + r"part-\d+\.parquet", name)]
    if data:
        raise UsageError(
            f"{repository} has {data[0]} already" + (f", and {len(data) - 1} more" if len(data) > 1 else ""),
            hint="push to another name or with another --split, or remove those files there",
        )


def push(folder: str, repository: str, *, split: str | None, is_private: bool) -> Pushed:
    """Upload a directory into a data set, which is made if it does not exist.

    Args:
        split: upload into a folder of this name.
        is_private: of a data set that is made; one that exists stays as it is.

    Raises:
        ExportError: the upload failed; the hub then shows nothing of it.
    """
    api, _ = _hub()
    try:
        api.create_repo(repository, repo_type="dataset", private=is_private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            repo_type="dataset",
            folder_path=folder,
            path_in_repo=split,
            commit_message="Add tokens exported by tokshard",
        )
        is_private = bool(api.repo_info(repository, repo_type="dataset").private)
    except Exception as error:
        inside = "" if split is None else f" {shlex.quote(split)}"
        again = f"hf upload {repository} {shlex.quote(folder)}{inside} --repo-type dataset"
        raise _failed(repository, error, hint=f"the files are in {folder}; upload them with '{again}'") from error
    return Pushed(repository=repository, commit=str(commit.commit_url), is_private=is_private)


def _hub() -> tuple[Any, Any]:
    try:
        import huggingface_hub
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError as error:  # errors are there from 0.25 on
        raise UsageError(
            f"--push needs huggingface_hub 0.25 or later: {error}", hint="pip install 'tokshard[hf]'"
        ) from error
    return huggingface_hub.HfApi(), RepositoryNotFoundError


def _failed(repository: str, error: Exception, *, hint: str) -> ExportError:
    return ExportError(f"{repository} cannot be pushed to: {_short(error)}", hint=hint)


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
