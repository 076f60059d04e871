"""Recipes: a TOML file that describes several corpora with the options of the command line."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from tokshard.cli.failures import did_you_mean
from tokshard.cli.sizes import WrongNumber
from tokshard.errors import UsageError
from tokshard.pipeline.sources.hub import is_model_id
from tokshard.pipeline.sources.inputs import STDIN
from tokshard.pipeline.sources.listing import is_glob, split_glob
from tokshard.run_files.strict_toml import path_beside, read_toml

_SECTIONS = ("defaults", "corpora")
_NO_KEYS = frozenset({"sources", "force", "as_json", "dry_run", "help", "debug", "job_index", "num_jobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRequest:
    """One corpus to build: the arguments of `build_corpus`."""

    name: str
    sources: Sequence[str]
    options: Mapping[str, Any]


def options_of_recipes(command: click.Command) -> dict[str, click.Option]:
    """The options of a build that are keys of a recipe, by their names there."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    return {option.name: option for option in options if option.name and option.name not in _NO_KEYS}


def one_corpus(sources: Sequence[str], options: Mapping[str, Any], *, name: str = "") -> CorpusRequest:
    """One corpus, from options that are already converted.

    Raises:
        UsageError: the tokenizer or the directory is missing.
    """
    for key in ("tokenizer", "out"):
        if key in options and options[key] is None:
            raise UsageError(
                f"missing option '--{key}'" if not name else f"{name} has no {key}",
                hint=f"give --{key}" if not name else f"give {key} = ... there or under [defaults]",
            )
    return CorpusRequest(name=name, sources=sources, options=options)


def read_recipe(path: str, chosen: Sequence[str], context: click.Context) -> list[CorpusRequest]:
    """The corpora of a recipe, in its order. Options on the command line win over the recipe.

    Args:
        chosen: names of the requested corpora; empty for all.

    Raises:
        UsageError: there is no such corpus, or all are to start over without being named; the file cannot be read, asks
            for no corpus, has an unknown key or a value of the wrong type, or writes two corpora into one directory.
    """
    sections = read_toml(path, hint="give a recipe, such as recipes/*.toml")
    _check_keys(sections, _SECTIONS, path)
    defaults, corpora = (_table(sections.get(name, {}), f"{path}: {name}") for name in _SECTIONS)
    if not corpora:
        raise UsageError(f"{path} asks for no corpus", hint='add [corpora.NAME] with sources = [...] and out = "..."')
    options = options_of_recipes(context.command)
    _check_keys(defaults, options, f"{path}: defaults")
    for name in chosen:
        if name not in corpora:
            hint = did_you_mean(name, corpora) or f"it has {', '.join(corpora)}"
            raise UsageError(f"{path} has no corpus {name!r}", hint=hint)
    if context.params["force"] and not chosen:
        raise UsageError(
            "--force would remove and rebuild every corpus of the recipe",
            hint=f"name the corpora that start over: tokshard build {shlex.quote(path)} NAME... --force; it has "
            f"{', '.join(corpora)}",
        )
    requests = []
    for name, found in corpora.items():
        where = f"{path}: corpora.{name}"
        table = _table(found, where)
        _check_keys(table, ["sources", *options], where)
        values = {
            key: _convert(options[key], value, where, context)
            for key, value in {**defaults, **table}.items()
            if key != "sources"
        }
        given = {
            key: context.params[key]
            for key in options
            if key not in values or context.get_parameter_source(key) is ParameterSource.COMMANDLINE
        }
        values = _paths_beside(path, values, given, where) | given
        values["force"] = context.params["force"]
        sources = [_source_beside(path, source) for source in _sources(table, where)]
        requests.append(one_corpus(sources, values, name=where))
    requests = [request for name, request in zip(corpora, requests, strict=True) if name in (chosen or corpora)]
    _check_apart(requests)
    readers = [request.name for request in requests if STDIN in request.sources]
    if len(readers) > 1:
        raise UsageError(
            f"{readers[0]} and {readers[1].rpartition(': ')[2]} read standard input, which can be read once only",
            hint="write it to a file first",
        )
    return requests


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {value!r}, expected a table", hint="write [section], and below it key = value")
    return value


def _check_keys(found: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in found:
        if key not in known:
            hint = did_you_mean(key.replace("-", "_"), known) or f"known here: {', '.join(known)}"
            raise UsageError(f"{where}: no key {key!r}", hint=hint)


def _convert(option: click.Option, value: Any, where: str, context: click.Context) -> Any:
    """Convert a value of TOML like a value of the command line."""
    items = value if isinstance(value, list) else [value]
    is_right = isinstance(value, list) <= option.multiple and all(
        isinstance(item, bool) if option.is_flag else isinstance(item, str | int | float) and not isinstance(item, bool)
        for item in items
    )
    if not is_right:
        kind = "a list" if option.multiple else "true or false" if option.is_flag else "a string or a number"
        raise UsageError(
            f"{where}: {option.name} is {value!r}, expected {kind}", hint="write it as on the command line"
        )
    try:
        converted = tuple(option.type.convert(item if option.is_flag else str(item), option, context) for item in items)
    except click.BadParameter as error:
        hint = error.hint if isinstance(error, WrongNumber) else "write it as on the command line"
        raise UsageError(f"{where}: {option.name}: {error.message.removesuffix('.')}", hint=hint) from error
    return converted if option.multiple else converted[0]


def _paths_beside(recipe: str, values: Mapping[str, Any], given: Collection[str], where: str) -> dict[str, Any]:
    """The options of a recipe, with paths for the working directory, but for those that are given in their place."""
    found = {name: value for name, value in values.items() if name not in given}
    if found.get("out"):
        found["out"] = path_beside(recipe, found["out"])
    if found.get("tokenizer"):
        found["tokenizer"] = _tokenizer_beside(recipe, found["tokenizer"], where)
    return found


def _tokenizer_beside(recipe: str, value: str, where: str) -> str:
    """The path of a tokenizer, or a model of the hub, of which nothing lies beside the recipe."""
    path = path_beside(recipe, value)
    if path == value or not is_model_id(value) or os.path.exists(path):
        return path
    if os.path.exists(value):  # it may be the one that is meant
        raise UsageError(
            f"{where}: there is no {path}",
            hint=f"paths in a recipe are relative to the recipe, and {value} is in the working directory",
        )
    return value


def _source_beside(recipe: str, source: str) -> str:
    """A source of the recipe, which may be a pattern. The folder of the recipe is none, whatever its name."""
    path = path_beside(recipe, source)
    if source in {STDIN, path}:
        return source
    if not is_glob(source) or os.path.exists(path):
        return path
    folder, parts = split_glob(source)
    return os.path.join(glob.escape(path_beside(recipe, folder)), *parts)


def _sources(table: Mapping[str, Any], where: str) -> list[str]:
    sources = table.get("sources", [])
    if isinstance(sources, str):
        sources = [sources]
    if not sources or not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise UsageError(
            f"{where}: sources is {sources!r}, expected a list of paths", hint='give sources = ["file", "directory"]'
        )
    return sources


def _check_apart(requests: Sequence[CorpusRequest]) -> None:
    """Refuse to write two of the corpora into one directory."""
    taken: dict[str, str] = {}
    for request in requests:
        place = os.path.realpath(request.options["out"])
        for other, name in taken.items():
            if os.path.commonpath([place, other]) in (place, other):
                raise UsageError(
                    f"{request.name} and {name.rpartition(': ')[2]} are written into the same directory",
                    hint="give each corpus its own out directory, outside the others",
                )
        taken[place] = request.name
