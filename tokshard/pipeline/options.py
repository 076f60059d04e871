"""The options of a build: names, defaults, meaning and checks, and the command line that asks for them."""

from __future__ import annotations

import inspect
import operator
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from tokshard.errors import UsageError
from tokshard.format.manifest import BuildConfig
from tokshard.interop.tokens.batches import DTYPES
from tokshard.pipeline.judge import parse_bad_record_limit
from tokshard.pipeline.sources.chats import OWN
from tokshard.pipeline.sources.formats import FORMATS_OF_OPTION, INPUT_FORMATS, TOKEN_FORMATS
from tokshard.pipeline.sources.inputs import DOCUMENTS, RECORDS, TEXT, TOKENS
from tokshard.store import look_at

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_SHARD_TOKENS = 256_000_000
DEFAULT_MAX_DOCUMENT_BYTES = 16 << 20
FAIL, SKIP = "fail", "skip"
EXACT = "exact"
_RAY_ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/]+:\d{1,5}")
_SHOWN = 60
"""Characters of a value in a message."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Policy = Literal["fail", "skip"]


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a build.

    Args:
        tokenizer: a ``tokenizer.json``, a directory that holds one, the URI of either, or a model of the hub.
        out: the corpus: a directory, or an ``s3://``, ``gs://`` or ``az://`` URI.
        eos: token that ends every document; default: the one in ``tokenizer_config.json``.
        bos: token that starts every document, or ``auto`` for the one in ``tokenizer_config.json``; default: none.
        reads: ``text``, which is encoded; ``tokens``, which another tool has made, see `import_corpus`; or
            ``documents`` of corpora, see `copy_corpus`.
        token_field: column of the ids; default: ``tokens``, ``input_ids`` or ``token_ids``, the first that is there.
        loss_field: column that says which tokens are trained: labels with -100 elsewhere, or a mask; or ``none`` to
            leave masks out. Default: ``labels``, ``loss_mask``, ``assistant_masks`` or ``completion_mask``, if one
            is there.
        token_dtype: how ids are stored, such as ``uint16``, in files that do not say it.
        source_eos: id that ends documents in the sources, if it differs from EOS.
        text_field: dotted path of the text in a record.
        chat: make documents of conversations, and of the answers targets: by this chat template, a file or the folder
            of a tokenizer; or ``own`` for the one of `tokenizer`. Default: documents are texts.
        chat_date: the date that a chat template writes as today's, such as ``2026-11-23``.
        loss: the targets of a conversation: what its template marks as written by the ``assistant``, the ``last`` of
            these answers, or ``all``; or these answers ``weighted`` by the ``weight`` of their messages.
        document_end: token that ends each conversation: a special one that its template does not write; default: the
            first that is there.
        overlong: with `chat` and `max_tokens`: ``skip`` longer conversations, or keep their ``head``.
        template_drops: with `chat`: ``count`` what the template leaves out, such as reasoning or tools, or ``fail``.
        special_tokens: ``parse=TOKEN,...`` for text that was rendered elsewhere: these special tokens are read where a
            text spells them. Default: text never becomes a special token.
        id_field: field to store as column ``id``.
        keep_field: fields to store as columns, each ``FIELD`` or ``FIELD:TYPE`` (string, int64, float64, bool).
        format: read every input as this format instead of going by its name.
        text_unit: unit of plain text that becomes a document: ``file``, ``line`` or ``paragraph``.
        shard_tokens: a shard closes before the document that would exceed this; default: 256M, and of a copy as in the
            first corpus.
        task_bytes: size of the unit of work in bytes of input; default: by the size of the inputs.
        max_document_bytes: reject longer texts as bad records.
        min_tokens, max_tokens: leave out documents with fewer or more tokens, delimiters included.
        dedup: ``exact`` leaves out texts that are equal to an earlier one, over all sources; ``none`` keeps them. Where
            no text is read, documents are equal if their tokens are.
        validation_fraction: share of the documents that goes into ``OUT/validation``, by a hash of the text, the rest
            into ``OUT/train``; default: one corpus in `out`.
        where: of a copy: take the documents whose kept columns meet all of these conditions: ``lang=en``, ``lang!=en``,
            ``score<0.5``, ``score>0.5`` or ``lang in en,fr``. A missing value only meets ``!=``.
        source: of a copy: take the documents of sources whose name matches this shell pattern.
        drop_ids: of a copy: leave out the documents that this file lists, by their ids or numbers: a text with an
            id in each line, or JSON lines, csv or parquet.
        hash_range: of a copy: take the documents whose hash lies in this half-open part of [0, 1). Equal documents are
            taken together, and parts that do not overlap divide a corpus.
        columns: the kept columns that a copy takes; default: all columns of all corpora. A document of a corpus without
            the column has null.
        shuffle: of a copy: the seed of a random order; default: the order of the corpora.
        on_bad_record: ``fail``, or ``skip`` to leave out records that cannot become documents.
        on_bad_source: ``fail``, or ``skip`` to leave out whole inputs that are damaged or gone.
        max_bad_records: fail when more bad records than that would be skipped: a number, or a share of the records
            read, such as ``0.1%``.
        max_documents: documents to write at most, in input order; with a validation split, in both corpora together.
        workers: processes; default: one for each CPU that this process may use. With Ray, the most tasks under way;
            default: enough to keep the CPUs of the cluster busy.
        ray: run the tasks on a Ray cluster, whose nodes all need `out` and the sources at the same paths: ``auto`` for
            the cluster that the program has connected to, or that runs on this machine or that RAY_ADDRESS names;
            HOST:PORT; or ``local`` to start Ray here. Default: processes of this machine.
        append: add the sources to the corpus in `out`, as its next generation; existing files stay unchanged.
        force: start over, removing the corpus or unfinished build in `out`; with `append`, only
            the generation that was being added.
    """

    tokenizer: str
    out: str
    eos: str | None = None
    bos: str | None = None
    reads: Literal["text", "tokens", "documents"] = "text"
    token_field: str | None = None
    loss_field: str | None = None
    token_dtype: str | None = None
    source_eos: Annotated[int, msgspec.Meta(ge=0)] | None = None
    text_field: str = "text"
    chat: str | None = None
    chat_date: str | None = None
    loss: Literal["assistant", "last", "all", "weighted"] = "assistant"
    document_end: str | None = None
    overlong: Literal["skip", "head"] = "skip"
    template_drops: Literal["count", "fail"] = "count"
    special_tokens: str | None = None
    id_field: str | None = None
    keep_field: str | Sequence[str] = []
    format: str | None = None
    text_unit: Literal["file", "line", "paragraph"] = "file"
    shard_tokens: Positive | None = None
    task_bytes: Positive | None = None
    max_document_bytes: Positive = DEFAULT_MAX_DOCUMENT_BYTES
    min_tokens: Positive | None = None
    max_tokens: Positive | None = None
    dedup: Literal["none", "exact"] = "none"
    validation_fraction: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    where: str | Sequence[str] = []
    source: str | None = None
    drop_ids: str | None = None
    hash_range: tuple[float, float] | None = None
    columns: Sequence[str] | None = None
    shuffle: Annotated[int, msgspec.Meta(ge=0)] | None = None
    on_bad_record: Policy = "fail"
    on_bad_source: Policy = "fail"
    max_bad_records: str | int | None = None
    max_documents: Positive | None = None
    workers: Positive | None = None
    ray: str | None = None
    append: bool = False
    force: bool = False

    @property
    def is_dedup(self) -> bool:
        """Whether equal texts are left out."""
        return self.dedup == EXACT


class OptionalBuildOptions(TypedDict, total=False):
    """The fields of `BuildOptions` that have a default, for type checkers: Python cannot derive one from the other."""

    eos: str | None
    bos: str | None
    reads: Literal["text", "tokens", "documents"]
    token_field: str | None
    loss_field: str | None
    token_dtype: str | None
    source_eos: int | None
    text_field: str
    chat: str | None
    chat_date: str | None
    loss: Literal["assistant", "last", "all", "weighted"]
    document_end: str | None
    overlong: Literal["skip", "head"]
    template_drops: Literal["count", "fail"]
    special_tokens: str | None
    id_field: str | None
    keep_field: str | Sequence[str]
    format: str | None
    text_unit: Literal["file", "line", "paragraph"]
    shard_tokens: int | None
    task_bytes: int | None
    max_document_bytes: int
    min_tokens: int | None
    max_tokens: int | None
    dedup: Literal["none", "exact"]
    validation_fraction: float | None
    where: str | Sequence[str]
    source: str | None
    drop_ids: str | None
    hash_range: tuple[float, float] | None
    columns: Sequence[str] | None
    shuffle: int | None
    on_bad_record: Policy
    on_bad_source: Policy
    max_bad_records: str | int | None
    max_documents: int | None
    workers: int | None
    ray: str | None
    append: bool
    force: bool


_OF_CHAT = ("chat", "chat_date", "loss", "document_end", "overlong", "template_drops")
"""Options of conversations; all but the first mean nothing without it."""
_OF_TOKENS = ("token_field", "loss_field", "token_dtype", "source_eos")
_OF_COPIES = ("where", "source", "drop_ids", "hash_range", "columns", "shuffle")
_FORMATS_OF_CHAT = frozenset({"jsonl", "parquet", "arrow", RECORDS})
_NOT_FOR = {
    TEXT: (*_OF_TOKENS, *_OF_COPIES),
    TOKENS: (*_OF_CHAT, "special_tokens", "text_field", "text_unit", *_OF_COPIES),
    DOCUMENTS: (
        *(*_OF_CHAT, "eos", "bos", *_OF_TOKENS, "special_tokens", "text_field", "text_unit", "id_field", "keep_field"),
        *("format", "max_document_bytes", "task_bytes", "on_bad_record", "max_bad_records"),
    ),
}
"""Options that mean nothing for what a build reads."""
_COMMANDS = {TEXT: "build", TOKENS: "import", DOCUMENTS: "copy"}
_RUN_ONLY = frozenset({"out", "workers", "ray", "force"})
"""Options that may differ from one run of a build to the next. The location may be spelled in another way."""
_FLAGS = {"columns": "--keep-columns", "token_dtype": "--dtype"}


def takes_build_options(function: Callable[P, R]) -> Callable[P, R]:
    """Give a function with ``**keywords: Unpack[OptionalBuildOptions]`` the signature and help of all options.

    The line ``{options}`` of its docstring becomes the arguments of `BuildOptions`.
    """
    signature = inspect.signature(function)
    options = inspect.signature(BuildOptions).parameters.values()
    own = [given for given in signature.parameters.values() if given.kind is not given.VAR_KEYWORD]
    named = {given.name for given in own} | {"tokenizer"}
    added = [option for option in options if option.name not in named]
    vars(function)["__signature__"] = signature.replace(parameters=[*own, *added])
    if function.__doc__ and BuildOptions.__doc__:  # python -OO has neither
        arguments = BuildOptions.__doc__.partition("Args:\n")[2].strip()
        function.__doc__ = function.__doc__.replace("{options}", arguments)
    return function


def checked_options(options: BuildOptions) -> BuildOptions:
    """The options as plain Python values; meaningless ones are refused.

    Raises:
        UsageError: one is of another type, or out of range, or unknown, or two of them contradict each other.
    """
    values = {name: _plain(getattr(options, name)) for name in options.__struct_fields__}
    for name in ("keep_field", "where"):
        values[name] = [values[name]] if isinstance(values[name], str) else values[name]
    try:
        options = msgspec.convert(values, BuildOptions)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), values) from error
    _check_reads(options)
    _check_pairs(options)
    parse_bad_record_limit(options.max_bad_records)
    return options


def _plain(value: Any) -> Any:
    """A number of another library as Python's own; a sequence as a list; a path as a string."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, np.generic):
        return value.item()
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _wrong_value(message: str, values: dict[str, Any]) -> UsageError:
    """The error for a value that msgspec refuses; its message ends in the place: ``- at `$.name` ``."""
    problem, _, place = message.replace("Expected ", "expected ").partition(" - at `$.")
    name = place.rstrip("`").partition("[")[0]
    choices = [word for word in get_args(get_type_hints(BuildOptions)[name]) if isinstance(word, str)]
    return UsageError(
        f"{name} is {values[name]!r:.{_SHOWN}}" + ("" if choices else f": {problem.replace('`', '')}"),
        hint=f"give one of {', '.join(choices)}" if choices else f"give {flag(name)} another value, or leave it out",
    )


def _check_pairs(options: BuildOptions) -> None:
    """Refuse an option that means nothing without another one, or contradicts it."""
    low, high = options.min_tokens, options.max_tokens
    if low is not None and high is not None and low > high:
        raise UsageError(
            f"min_tokens is {low}, more than max_tokens, which is {high}",
            hint="give a --min-tokens that is not above --max-tokens",
        )
    if options.hash_range is not None and not 0 <= options.hash_range[0] < options.hash_range[1] <= 1:
        raise UsageError(
            "hash_range is {}:{}, expected a part of 0:1".format(*options.hash_range), hint="give a part such as 0:0.9"
        )
    if options.max_bad_records is not None and options.on_bad_record != SKIP:
        raise UsageError(
            "max_bad_records bounds how many bad records are skipped, and on_bad_record is fail",
            hint="give --on-bad-record skip too",
        )
    _check_chat(options)
    check_ray(options.ray)
    if options.token_dtype not in (None, *DTYPES):
        raise UsageError(f"token_dtype is {options.token_dtype!r}", hint=f"give one of {', '.join(DTYPES)}")


def _check_chat(options: BuildOptions) -> None:
    given = _given(options)
    check_template(options.chat)
    if options.chat is None:
        for name in _OF_CHAT:
            if name in given:
                raise UsageError(f"{flag(name)} needs --chat", hint=f"add --chat, or leave out {flag(name)}")
        return
    for name in ("text_field", "text_unit", "eos", "bos", "special_tokens"):
        if name in given:
            end = "; --document-end says what ends a conversation" if name == "eos" else ""
            raise UsageError(f"{flag(name)} does not go with --chat", hint=f"leave out {flag(name)}{end}")
    if "overlong" in given and options.max_tokens is None:
        raise UsageError("--overlong needs --max-tokens", hint="add --max-tokens N, or leave out --overlong")


def check_template(location: str | None) -> None:
    """Refuse what is no chat template, such as a source behind ``--chat``.

    Raises:
        UsageError: with what one is.
    """
    if location in (None, OWN) or location.endswith((".jinja", ".jinja2")):
        return
    found = look_at(location)
    if found is not None and not found.name.endswith("/"):
        raise UsageError(
            f"chat is {location!r:.{_SHOWN}}, which does not end in .jinja",
            hint=f"give a FILE.jinja or the folder of a tokenizer; in front of a SOURCE, write --chat={OWN}",
        )


def check_ray(address: str | None) -> None:
    """Refuse a value that is no address of a Ray cluster, such as a source behind ``--ray``.

    Raises:
        UsageError: with the forms of an address.
    """
    if address is not None and _RAY_ADDRESS.fullmatch(address) is None:
        raise UsageError(
            f"ray is {address!r:.{_SHOWN}}, which is not the address of a cluster",
            hint="give auto, local or HOST:PORT; in front of a SOURCE, write --ray=auto",
        )


def _check_reads(options: BuildOptions) -> None:
    """Refuse an option that is for builds that read something else."""
    given = _given(options)
    for name in _NOT_FOR[options.reads]:
        if name in given:
            others = [_COMMANDS[reads] for reads, names in _NOT_FOR.items() if name not in names]
            raise UsageError(
                f"{name} is given, and the sources are read as {options.reads}",
                hint=f"leave out {flag(name)}, or use tokshard {' or '.join(others)}",
            )
    known = TOKEN_FORMATS if options.reads == TOKENS else INPUT_FORMATS
    if options.format not in (None, *known):
        raise UsageError(f"format is {options.format!r}", hint=f"give one of {', '.join(known)}")


def check_used(options: BuildOptions, formats: Collection[str]) -> None:
    """Refuse an option about sources if their formats give its value.

    Args:
        formats: the formats of the inputs.

    Raises:
        UsageError: none of them uses it.
    """
    found, given = sorted({form.removesuffix("-stream") for form in formats}), _given(options)
    others = sorted(set(found) - _FORMATS_OF_CHAT)
    if options.chat is not None and others:
        raise UsageError(
            f"chat is given, and the sources are {' and '.join(others)}, which hold texts",
            hint="leave out --chat, or give conversations as JSON lines, parquet or Arrow",
        )
    for name, users in FORMATS_OF_OPTION.items() if options.reads == TOKENS else ():
        if name in given and not set(users).intersection(found):
            raise UsageError(
                f"{name} is given, and the sources are {' and '.join(found)}, which do not use it",
                hint=f"leave out {flag(name)}, which is for {', '.join(users)}",
            )


def path_option(name: str, value: Any) -> str:
    """A path as a string.

    Raises:
        UsageError: it is not a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise UsageError(
            f"{name} is {value!r:.{_SHOWN}}, expected a path", hint=f"give {name} as a string or pathlib.Path"
        )
    return os.fsdecode(value)


def config_of(options: BuildOptions, **others: Any) -> BuildConfig:
    """What the manifest says of the options.

    Args:
        others: settings that differ from the given ones.
    """
    same = BuildConfig.__struct_fields__, BuildOptions.__struct_fields__
    return BuildConfig(**{name: getattr(options, name) for name in set.intersection(*map(set, same))} | others)


def _given(options: BuildOptions) -> dict[str, Any]:
    """The options that do not have their defaults."""
    defaults = BuildOptions(tokenizer="", out="")
    return {name: value for name, value in msgspec.structs.asdict(options).items() if value != getattr(defaults, name)}


def asked_for(options: BuildOptions) -> dict[str, Any]:
    """The options that two runs of one build have in common."""
    return {name: value for name, value in msgspec.structs.asdict(options).items() if name not in _RUN_ONLY}


def command_words(sources: Sequence[str], options: BuildOptions, *, is_array: bool) -> list[str]:
    """The command line that continues a build, for an array as one job; ``--force`` is left out."""
    words = ["tokshard", _COMMANDS[options.reads], *sources]
    for name, value in _given(options).items():
        words += _words_of(name, value) if name not in {"force", "reads"} else ()
    return [*words, "--job-index", "0", "--num-jobs", "1"] if is_array else words


def _words_of(name: str, value: Any) -> Iterator[str]:
    if name == "columns" and not value:
        yield "--no-columns"
    elif name == "hash_range":
        yield from (flag(name), "{}:{}".format(*value))
    else:
        for item in value if isinstance(value, list | tuple) else [value]:
            yield from [flag(name)] if item is True else [flag(name), str(item)]


def change_text(name: str, before: Any, now: Any) -> str:
    """How a setting of a build has changed, in the words of the command line.

    Args:
        name: a field of `BuildConfig`, `CopyConfig` or `TokenizerInfo`.
    """
    return _CHANGED.get(name) or f"{flag(name)} was {_as_typed(before)}, now {_as_typed(now)}"


_CHANGED = {
    "sha256": "the content of the tokenizer has changed",
    "special_ids": "the special tokens have changed",
    "corpora": "the corpora hold other documents",
    "holds": "the corpora hold other corpora",
    "holds_some": "the corpora hold parts of other corpora",
    "recipes": "the corpora were made in another way",
    "drop_ids": "--drop-ids lists other documents",
    "loss_spans": "only one has loss spans, or weights of them: 'tokshard copy' joins corpora with and without",
    "template": "the chat template has changed",
}
"""Settings whose values would say nothing to a reader."""


def _as_typed(value: Any) -> str:
    if value is None or value in ({}, []):
        return "not given"
    if isinstance(value, dict):
        value = " ".join(f"{name}:{kind}" for name, kind in value.items())
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return shlex.quote(str(value)) if len(str(value)) <= _SHOWN else f"{value!s:.{_SHOWN}}..."


def flag(name: str) -> str:
    """The option of the command line for a field of `BuildOptions`."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")
