"""The options of a build: names, defaults, meaning and checks, and the command line that asks for them."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ParamSpec, TypedDict, TypeVar

from tokshard.errors import UsageError
from tokshard.interop.tokens.batches import DTYPES
from tokshard.pipeline.sources.formats import FORMATS_OF_OPTION, INPUT_FORMATS, TOKEN_FORMATS
from tokshard.pipeline.sources.inputs import READS, TEXT, TOKENS
from tokshard.pipeline.sources.records import FILE, TEXT_MODES
from tokshard.pipeline.tasks.bad_record_limit import parse_bad_record_limit

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_SHARD_TOKENS = 256_000_000
DEFAULT_MAX_DOCUMENT_BYTES = 16 << 20
LOCAL, RAY = "local", "ray"
"""Executors."""
_SHOWN = 60
"""Characters of a value in a message."""

_REQUIRED_NUMBERS = ("shard_tokens", "max_document_bytes")
_WHOLE_NUMBERS = (*_REQUIRED_NUMBERS, "task_bytes", "min_tokens", "max_tokens", "limit", "workers")
_OF_TEXT = ("text_field", "text_mode", "dedup")
_OF_TOKENS = ("token_field", "token_dtype", "delimiter")
_STRINGS = ("eos", "bos", "text_field", "id_field", "ray_address", "token_field")
_CHOICES = {
    "on_bad_record": ("fail", "skip"),
    "on_bad_source": ("fail", "skip"),
    "dedup": ("none", "exact"),
    "reads": READS,
    "input_format": (None, *dict.fromkeys([*INPUT_FORMATS, *TOKEN_FORMATS])),
    "token_dtype": (None, *DTYPES),
    "text_mode": TEXT_MODES,
    "executor": (LOCAL, RAY),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What a build can be asked for.

    Args:
        tokenizer: a ``tokenizer.json``, a directory that holds one, the URI of either, or a model of the hub.
        out: the corpus: a directory, or an ``s3://``, ``gs://`` or ``az://`` URI.
        eos: token that ends every document; default: what ``tokenizer_config.json`` says.
        bos: token that starts every document, or ``auto`` for what ``tokenizer_config.json`` says; default: none.
        reads: ``text``, which is encoded, or ``tokens``, which another tool has made; see `import_corpus`.
        token_field: column of the ids; default: ``tokens``, ``input_ids`` or ``token_ids``, the first that is there.
        token_dtype: how ids are stored in files that do not say it, such as ``uint16``.
        delimiter: id that ends documents in the sources, if it is not that of EOS.
        text_field: dotted path of the text in a record.
        id_field: field to store as column ``id``.
        keep: fields to store as columns, each ``FIELD`` or ``FIELD:TYPE`` (string, int64, float64, bool).
        input_format: read every input as this format instead of going by its name.
        text_mode: what a document is in plain text: a ``file``, ``line`` or ``paragraph``.
        shard_tokens: a shard closes before the document that would exceed this.
        task_bytes: size of the unit of work in bytes of input; default: by the size of the inputs.
        max_document_bytes: a longer text is a bad record.
        min_tokens, max_tokens: leave out documents with fewer or more tokens, delimiters included.
        dedup: ``exact`` leaves out texts that are equal to an earlier one, over all sources; ``none`` keeps them.
        validation_fraction: share of the documents that goes into ``OUT/validation``, by a hash of the text, the rest
            into ``OUT/train``; default: one corpus in `out`.
        on_bad_record: ``fail``, or ``skip`` to leave out records that cannot become documents.
        on_bad_source: ``fail``, or ``skip`` to leave out inputs that are damaged or gone, whole.
        max_bad_records: fail when more bad records than that would be skipped: a number, or a share of the records
            read, such as ``0.1%``.
        limit: documents to write at most, in input order; with a validation split, in both corpora together.
        workers: processes; default: one for each CPU that this process may use. With Ray, the most tasks under way;
            default: enough to keep the CPUs of the cluster busy.
        executor: what runs the tasks: ``local`` processes, or a ``ray`` cluster, whose nodes all need `out` and the
            sources at the same paths.
        ray_address: the cluster: ``auto`` for the one that runs on this machine or that RAY_ADDRESS names, HOST:PORT,
            or ``local`` to start Ray here; default: ``auto``, or what the program has connected to.
        append: add the sources to the corpus in `out`, as its next generation; what is there stays unchanged.
        force: start over, removing the corpus or unfinished build in `out`; with `append`, only
            the generation that was being added.
    """

    tokenizer: str
    out: str
    eos: str | None = None
    bos: str | None = None
    reads: str = TEXT
    token_field: str | None = None
    token_dtype: str | None = None
    delimiter: int | None = None
    text_field: str = "text"
    id_field: str | None = None
    keep: str | Sequence[str] = ()
    input_format: str | None = None
    text_mode: str = FILE
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    task_bytes: int | None = None
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    min_tokens: int | None = None
    max_tokens: int | None = None
    dedup: str = "none"
    validation_fraction: float | None = None
    on_bad_record: str = "fail"
    on_bad_source: str = "fail"
    max_bad_records: str | int | None = None
    limit: int | None = None
    workers: int | None = None
    executor: str = LOCAL
    ray_address: str | None = None
    append: bool = False
    force: bool = False


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(BuildOptions)}


class OptionalBuildOptions(TypedDict, total=False):
    """The fields of `BuildOptions` that have a default, for type checkers: Python cannot derive one from the other."""

    eos: str | None
    bos: str | None
    reads: str
    token_field: str | None
    token_dtype: str | None
    delimiter: int | None
    text_field: str
    id_field: str | None
    keep: str | Sequence[str]
    input_format: str | None
    text_mode: str
    shard_tokens: int
    task_bytes: int | None
    max_document_bytes: int
    min_tokens: int | None
    max_tokens: int | None
    dedup: str
    validation_fraction: float | None
    on_bad_record: str
    on_bad_source: str
    max_bad_records: str | int | None
    limit: int | None
    workers: int | None
    executor: str
    ray_address: str | None
    append: bool
    force: bool


def takes_build_options(function: Callable[P, R]) -> Callable[P, R]:
    """Give a function with ``**keywords: Unpack[OptionalBuildOptions]`` the signature and help of all options.

    The line ``{options}`` of its docstring becomes the arguments of `BuildOptions`.
    """
    signature = inspect.signature(function)
    options = inspect.signature(BuildOptions).parameters.values()
    own = [given for given in signature.parameters.values() if given.kind is not given.VAR_KEYWORD]
    named = {given.name for given in own}
    added = [option for option in options if option.name not in named]
    vars(function)["__signature__"] = signature.replace(parameters=[*own, *added])
    if function.__doc__ and BuildOptions.__doc__:  # python -OO has neither
        arguments = BuildOptions.__doc__.partition("Args:\n")[2].strip()
        function.__doc__ = function.__doc__.replace("{options}", arguments)
    return function


def checked_options(options: BuildOptions) -> BuildOptions:
    """The options with numbers as Python has them; values that mean nothing are refused.

    Raises:
        UsageError: one is of another type, or out of range, or unknown, or two of them contradict each other.
    """
    numbers: dict[str, Any] = {name: _whole_number(name, getattr(options, name)) for name in _WHOLE_NUMBERS}
    keep = (options.keep,) if isinstance(options.keep, str) else tuple(options.keep)
    fraction = _share(options.validation_fraction)
    options = dataclasses.replace(options, **numbers, keep=keep, validation_fraction=fraction)
    for name in _STRINGS:
        value = getattr(options, name)
        if value is not None and not isinstance(value, str):
            raise _wrong_type(name, value, "a string", "leave it out for the default")
    for item in options.keep:
        if not isinstance(item, str):
            raise _wrong_type("keep", item, "a string", "give FIELD or FIELD:TYPE")
    for name, allowed in _CHOICES.items():
        if getattr(options, name) not in allowed:
            known = ", ".join(filter(None, allowed))
            raise UsageError(f"{name} is {getattr(options, name)!r}", hint=f"give one of {known}")
    # msgspec leaves a default out of the manifest only if it is the same object, which a word from a file is not
    words: dict[str, Any] = {name: allowed[allowed.index(getattr(options, name))] for name, allowed in _CHOICES.items()}
    options = dataclasses.replace(options, **words)
    if fraction is not None and not 0 < fraction < 1:
        raise UsageError(
            f"validation_fraction is {fraction}, expected a share between 0 and 1",
            hint="give --validation-fraction 0.01 for one document in a hundred, or leave it out",
        )
    if options.min_tokens is not None and options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise UsageError(
            f"min_tokens is {options.min_tokens}, more than max_tokens, which is {options.max_tokens}",
            hint="give a --min-tokens that is not above --max-tokens",
        )
    _check_pairs(options)
    _check_reads(options)
    parse_bad_record_limit(options.max_bad_records)
    return options


def _check_pairs(options: BuildOptions) -> None:
    """Refuse an option that means nothing without another one."""
    if options.max_bad_records is not None and options.on_bad_record != "skip":
        raise UsageError(
            "max_bad_records bounds how many bad records are skipped, and on_bad_record is fail",
            hint="give --on-bad-record skip too",
        )
    if options.ray_address is not None and options.executor != RAY:
        raise UsageError(
            f"ray_address is given, and executor is {options.executor}",
            hint="give --executor ray too, or leave out --ray-address",
        )


def _check_reads(options: BuildOptions) -> None:
    """Refuse an option of texts for tokens, and the other way round."""
    is_import = options.reads == TOKENS
    for name in _OF_TEXT if is_import else _OF_TOKENS:
        if getattr(options, name) != _DEFAULTS[name]:
            raise UsageError(
                f"{name} is given, and the sources are read as {options.reads}",
                hint=f"leave out {_flag(name)}" + ("" if is_import else ", or use tokshard import"),
            )
    if options.delimiter is not None and (type(options.delimiter) is not int or options.delimiter < 0):
        raise _wrong_type("delimiter", options.delimiter, "a token id", "give a number such as 50256")
    known = TOKEN_FORMATS if is_import else INPUT_FORMATS
    if options.input_format not in (None, *known):
        raise UsageError(f"input_format is {options.input_format!r}", hint=f"give one of {', '.join(known)}")


def check_used(options: BuildOptions, formats: Collection[str]) -> None:
    """Refuse an option that says of the sources what their formats say themselves.

    Args:
        formats: of the inputs.

    Raises:
        UsageError: none of them uses it.
    """
    found = sorted({form.removesuffix("-stream") for form in formats})
    for name, users in FORMATS_OF_OPTION.items() if options.reads == TOKENS else ():
        if getattr(options, name) != _DEFAULTS[name] and not set(users).intersection(found):
            raise UsageError(
                f"{name} is given, and the sources are {' and '.join(found)}, which do not use it",
                hint=f"leave out {_flag(name)}, which is for {', '.join(users)}",
            )


def path_option(name: str, value: Any) -> str:
    """A path as a string.

    Raises:
        UsageError: it is not a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise _wrong_type(name, value, "a path", f"give {name} as a string or pathlib.Path")
    return os.fsdecode(value)


def _whole_number(name: str, value: Any) -> int | None:
    if value is None and name not in _REQUIRED_NUMBERS:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise _wrong_type(name, value, "a whole number", "give a number such as 1_000_000")
    if number < 1:
        raise UsageError(f"{name} is {number}, expected at least 1", hint=f"give {_flag(name)} 1 or more")
    return number


def _share(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type("validation_fraction", value, "a number between 0 and 1", "give a number such as 0.01")
    return float(value)


def _wrong_type(name: str, value: Any, expected: str, hint: str) -> UsageError:
    return UsageError(f"{name} is {value!r:.60}, expected {expected}", hint=hint)


def command_words(sources: Sequence[str], options: BuildOptions) -> list[str]:
    """The command line that asks for a build; options that only concern the run at hand are left out."""
    words = ["tokshard", "import" if options.reads == TOKENS else "build", *sources]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default or field.name in {"force", "reads"}:
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            words += [_flag(field.name)] if item is True else [_flag(field.name), str(item)]
    return words


def change_text(name: str, before: Any, now: Any) -> str | None:
    """How a setting of a build has changed, in the words of the command line; None if it follows from another change.

    Args:
        name: a field of `BuildConfig`, `CopyConfig` or `TokenizerInfo`, or an option.
    """
    if name in _FOLLOWING:
        return None
    if name in _CHANGED:
        return _CHANGED[name]
    flag = _flag("tokenizer" if name == "name" else name)
    subject = _NO_OPTIONS.get(name, flag)
    return f"{subject} was {_as_typed(before)}, now {_as_typed(now)}"


_FOLLOWING = ("canonical_sha256", "vocab_size", "eos_id", "bos_id")
"""Facts of a tokenizer that only change with its content or with the option."""
_NO_OPTIONS = {
    "library": "the library of the tokenizer",
    "library_version": "the version of the tokenizer's library",
    "special_ids": "the list of special tokens",
    "hashes": "--hash",
}
_CHANGED = {
    "sha256": "the content of the tokenizer has changed",
    "corpora": "the corpora hold other documents",
    "recipes": "the corpora were made in another way",
}
"""Settings whose values would say nothing to a reader."""


def _as_typed(value: Any) -> str:
    if value is None or value == {}:
        return "not given"
    if isinstance(value, dict):
        value = " ".join(f"{name}:{kind}" for name, kind in value.items())
    text = value if isinstance(value, str) else str(value)
    return shlex.quote(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
