"""The options of a build: names, defaults, meaning and checks, and the command line that asks for them."""

from __future__ import annotations

import inspect
import operator
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

import msgspec

from tokshard.errors import UsageError
from tokshard.forking import decodable
from tokshard.numbers import DTYPES, read_count
from tokshard.store import look_at
from tokshard.wording import as_typed, as_typed_bytes, counted, listed

if TYPE_CHECKING:
    from tokshard.format.manifest import BuildConfig  # the help of a command needs neither numpy nor pyarrow

P = ParamSpec("P")
R = TypeVar("R")

TEXT, TOKENS, DOCUMENTS = READS = ("text", "tokens", "documents")
"""The kinds of sources: texts, which a build encodes; tokens that another tool has made; or documents of corpora."""

VIEW = "view"
"""The kind for a view: columns and bounds of documents."""

FORMATS: Mapping[str, tuple[str, ...]] = {
    TEXT: ("jsonl", "parquet", "arrow", "txt", "csv", "tsv"),
    TOKENS: ("megatron", "datatrove", "mds", "litdata", "npy", "flat", "parquet", "arrow", "jsonl"),
}
"""The formats that users may name, by what they hold, in the order of their readers in `sources.formats`."""

OWN = "own"
"""Value of ``--chat`` that stands for the tokenizer's own template."""

DEFAULT_SHARD_TOKENS = 256_000_000
DEFAULT_MAX_DOCUMENT_BYTES = 16 << 20
FAIL, SKIP = "fail", "skip"
EXACT = "exact"
ENGINES = ("fastokens",)
_RAY_ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/]+:\d{1,5}")
MIN_RECORDS = 10_000
"""Records that must have been read before a share of bad ones stops a running build."""
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)[ ]?%", re.ASCII)
_SHOWN = 60
"""Characters of a value in a message."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Policy = Literal["fail", "skip"]

INPUT, ENCODING, OUTPUT, LEFT_OUT, CLUSTER = "Input", "Text", "Output", "Filters", "Cluster"
"""Headings of the help, in its order."""


@dataclass(frozen=True, slots=True)
class Option:
    """The description of an option. The command lines, the page of keys and docstrings take it from here.

    Args:
        help: ``{formats}`` stands for the formats that can be named, ``{users}`` for `users`.
        unit: unit or kind of its value.
        group: its heading; the empty one is for options that are seldom needed.
        reads: the kinds of sources for which it means something.
        default: the default in words, if it is not a value: one text, or one for each kind.
        usual: the default of each kind as a text of the command line, if Python has another one.
        choices: the values that it may have, if its type does not say them.
        users: the formats for which an import has it; for builds, those of conversations. Empty: it is for all.
        bare: its value where none is given.
        is_kept: all generations of a corpus have the same value.
        may_differ: whether it may change from one run of a build to the next.
    """

    help: str
    unit: str = ""
    group: str = ""
    reads: tuple[str, ...] = READS
    default: str | Mapping[str, str] = ""
    usual: Mapping[str, str] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    bare: str = ""
    is_kept: bool = False
    may_differ: bool = False


_TEXTS, _TOKENS, _COPIES, _VIEWS, _RECORDS = (TEXT,), (TOKENS,), (DOCUMENTS,), (VIEW,), (TEXT, TOKENS)
_ALL = (*READS, VIEW)
_TABLES = "parquet", "arrow", "jsonl"
_CHAT = "chat_date", "loss", "document_end", "overlong", "template_drops"
"""Options of conversations that mean nothing without `chat`."""


@decodable
class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a build, in the order of the help. Each carries its description, an `Option`."""

    # what is read
    reads: Literal["text", "tokens", "documents", "view"] = "text"
    format: Annotated[
        str | None,
        Option("Read every input as {formats}.", "FORMAT", INPUT, _RECORDS, default="by name"),
    ] = None
    text_field: Annotated[str, Option("Field of texts: a or a.b.", "FIELD", INPUT, _TEXTS)] = "text"
    token_field: Annotated[
        str | None,
        Option(
            "For {users}: column of the ids.",
            "COLUMN",
            INPUT,
            _TOKENS,
            default="tokens, input_ids or token_ids",
            users=("mds", *_TABLES),
        ),
    ] = None
    loss_field: Annotated[
        str | None,
        Option(
            "For {users}: column of labels or loss masks, or none.",
            "COLUMN",
            INPUT,
            _TOKENS,
            default="by usual names",
            users=("datatrove", "flat", *_TABLES),
        ),
    ] = None
    text_unit: Annotated[Literal["file", "line", "paragraph"], Option("Text of one document.", "", INPUT, _TEXTS)] = (
        "file"
    )
    chat: Annotated[
        str | None,
        Option(
            "Read conversations with the template FILE.jinja, or with the tokenizer's own.",
            "[TEMPLATE]",
            INPUT,
            _TEXTS,
            users=("jsonl", "parquet", "arrow"),
            bare=OWN,
        ),
    ] = None
    chat_date: Annotated[str | None, Option("Date that the template writes as today.", "DATE", INPUT, _TEXTS)] = None
    loss: Annotated[
        Literal["assistant", "last", "all", "weighted"], Option("Tokens to train on.", "", INPUT, _TEXTS, is_kept=True)
    ] = "assistant"
    document_end: Annotated[str | None, Option("Special token that ends a conversation.", "TOKEN", INPUT, _TEXTS)] = (
        None
    )
    token_dtype: Annotated[
        str | None,
        Option(
            "For {users}: how ids are stored, such as uint16, if the files do not say it.",
            "DTYPE",
            INPUT,
            _TOKENS,
            choices=DTYPES,
            users=("mds", "flat"),
        ),
    ] = None
    source_eos: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        Option("Id that ends documents in the SOURCEs, if it is not EOS.", "ID", INPUT, _TOKENS),
    ] = None
    id_field: Annotated[
        str | None, Option("Field to store as column 'id'.", "FIELD", INPUT, _RECORDS, users=("mds", *_TABLES))
    ] = None
    keep_field: Annotated[
        str | Sequence[str],
        Option(
            "Field to store as a column: string, int64, float64 or bool.",
            "FIELD[:TYPE]",
            INPUT,
            _RECORDS,
            users=("mds", *_TABLES),
            is_kept=True,
        ),
    ] = []
    # how it becomes tokens
    tokenizer: Annotated[
        str,
        Option(
            "A tokenizer.json, a directory or URI that holds one, or OWNER/NAME on the Hugging Face hub.",
            "PATH",
            ENCODING,
            _RECORDS,
            default="required",
        ),
    ]
    eos: Annotated[
        str | None,
        Option(
            "Token that ends every document.",
            "TOKEN",
            ENCODING,
            _RECORDS,
            default="what tokenizer_config.json says",
            is_kept=True,
        ),
    ] = None
    bos: Annotated[
        str | None,
        Option(
            "Token that starts every document, or 'auto'.", "TOKEN", ENCODING, _RECORDS, default="none", is_kept=True
        ),
    ] = None
    special_tokens: Annotated[
        str | None,
        Option("Encode these special tokens found in texts.", "parse=TOKENS", ENCODING, _TEXTS, is_kept=True),
    ] = None
    engine: Annotated[
        str | None,
        Option("Library that encodes.", "NAME", ENCODING, _TEXTS, default="tokenizers", choices=ENGINES),
    ] = None
    join: Annotated[
        str | Sequence[str],
        Option("Parquet with more columns, by 'id' or 'document' number; may be given again.", "FILE", INPUT, _VIEWS),
    ] = []
    by: Annotated[
        str | Sequence[str],
        Option("Make a view of each combination of values, DIR/COLUMN=value/..., too.", "COLUMN,...", OUTPUT, _VIEWS),
    ] = []
    # what is written
    out: Annotated[
        str,
        Option(
            "The corpus: a directory, or a URI (s3://, gs://, az://).",
            "DIR",
            OUTPUT,
            _ALL,
            default="required",
            may_differ=True,
        ),
    ]
    append: Annotated[bool, Option("Add a generation of input to the corpus in DIR.", "", OUTPUT)] = False
    force: Annotated[
        bool, Option("Start over: first remove what a build left in DIR.", "", OUTPUT, _ALL, may_differ=True)
    ] = False
    validation_fraction: Annotated[
        Annotated[float, msgspec.Meta(gt=0, lt=1)] | None,
        Option(
            "Write DIR/train and DIR/validation; a hash of each text puts the fraction X into DIR/validation.",
            "X",
            OUTPUT,
            is_kept=True,
        ),
    ] = None
    shard_tokens: Annotated[
        Positive | None,
        Option(
            "Close a shard before the document that would exceed N tokens.",
            "N",
            OUTPUT,
            default={TEXT: "256M", TOKENS: "256M", DOCUMENTS: "as in the first CORPUS"},
        ),
    ] = None
    shuffle: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        Option("Write the documents in random order.", "SEED", OUTPUT, _COPIES),
    ] = None
    columns: Annotated[
        Sequence[str] | None,
        Option(
            "Take this kept column; may be given again.",
            "COLUMN",
            OUTPUT,
            _COPIES,
            default="all, with null where a CORPUS lacks one",
        ),
    ] = None
    # what is left out
    where: Annotated[
        str | Sequence[str],
        Option(
            "Take documents by a column: lang=en, lang!=en, score<0.5, score>=0.5 or 'lang in en,fr'; may be given "
            "again.",
            "CONDITION",
            LEFT_OUT,
            _VIEWS,
        ),
    ] = []
    source: Annotated[
        str | None,
        Option("Take documents of the sources whose names match, such as '*/wiki-*'.", "PATTERN", LEFT_OUT, _VIEWS),
    ] = None
    keep_ids: Annotated[
        str | None,
        Option("Take documents that FILE lists by id or number: lines, JSON lines, csv.", "FILE", LEFT_OUT, _VIEWS),
    ] = None
    drop_ids: Annotated[str | None, Option("Leave out documents that FILE lists.", "FILE", LEFT_OUT, _VIEWS)] = None
    hash_range: Annotated[
        tuple[float, float] | None,
        Option("Take documents whose hash, from 0 to 1, is in [A, B). Reads all tokens.", "A:B", LEFT_OUT, _VIEWS),
    ] = None
    min_tokens: Annotated[
        Positive | None, Option("Leave out shorter documents.", "N", LEFT_OUT, (*_RECORDS, VIEW), is_kept=True)
    ] = None
    max_tokens: Annotated[
        Positive | None,
        Option("Leave out longer documents; delimiters count.", "N", LEFT_OUT, (*_RECORDS, VIEW), is_kept=True),
    ] = None
    overlong: Annotated[
        Literal["skip", "head"], Option("Leave out long conversations, or cut them.", "", LEFT_OUT, _TEXTS)
    ] = "skip"
    template_drops: Annotated[
        Literal["count", "fail"],
        Option("If a template leaves something out: count it, or stop.", "", LEFT_OUT, _TEXTS),
    ] = "count"
    dedup: Annotated[
        Literal["none", "exact"],
        Option("Leave out documents that equal an earlier one. Reads the input twice.", "", LEFT_OUT),
    ] = "none"
    max_documents: Annotated[Positive | None, Option("Stop after N documents.", "N", LEFT_OUT)] = None
    on_bad_record: Annotated[
        Policy, Option("Stop at a bad record, or list it in rejects.jsonl.", "", LEFT_OUT, _RECORDS)
    ] = "fail"
    max_bad_records: Annotated[
        str | int | None, Option("Most records to skip.", "N|X%", LEFT_OUT, _RECORDS, default="no limit")
    ] = None
    max_document_bytes: Annotated[
        Positive,
        Option(
            "Reject larger documents.",
            "SIZE",
            LEFT_OUT,
            _RECORDS,
            usual={TEXT: "16MiB", TOKENS: "1GiB"},
        ),
    ] = DEFAULT_MAX_DOCUMENT_BYTES
    # who works
    workers: Annotated[
        Positive | None,
        Option(
            "Number of processes; with Ray, of tasks under way.",
            "N",
            CLUSTER,
            _ALL,
            default="one per CPU",
            may_differ=True,
        ),
    ] = None
    ray: Annotated[
        str | None,
        Option(
            "Run the tasks on a Ray cluster whose nodes share DIR and the sources: auto (this machine's, or "
            "RAY_ADDRESS), local (started for this build), or HOST:PORT.",
            "[ADDRESS]",
            CLUSTER,
            _ALL,
            default="auto if no ADDRESS is given",
            bare="auto",
            may_differ=True,
        ),
    ] = None
    # seldom needed
    task_bytes: Annotated[
        Positive | None,
        Option("Input bytes per unit of work.", "SIZE", "", _RECORDS, default="16MiB to 512MiB, by input size"),
    ] = None
    on_bad_source: Annotated[Policy, Option("Stop at an input that is damaged or gone, or skip all of it.")] = "fail"

    @property
    def is_dedup(self) -> bool:
        """Whether equal texts are left out."""
        return self.dedup == EXACT


class OptionalBuildOptions(TypedDict, total=False):
    """The fields of `BuildOptions` that have a default, for type checkers: Python cannot derive one from the other."""

    eos: str | None
    bos: str | None
    reads: Literal["text", "tokens", "documents", "view"]
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
    engine: str | None
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
    keep_ids: str | None
    drop_ids: str | None
    join: str | Sequence[str]
    by: str | Sequence[str]
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


_COMMANDS = {TEXT: "build", TOKENS: "import", DOCUMENTS: "copy", VIEW: "select"}
_FLAGS = {"columns": "--keep-columns", "token_dtype": "--dtype"}


def _said() -> Iterator[tuple[str, Option]]:
    for name, hint in get_type_hints(BuildOptions, include_extras=True).items():
        yield from ((name, of) for of in getattr(hint, "__metadata__", ()) if isinstance(of, Option))


OPTIONS: Mapping[str, Option] = dict(_said())
"""Each option of a build, with its description."""


def kept_settings() -> list[str]:
    """The options that all generations of a corpus have in common."""
    return [name for name, option in OPTIONS.items() if option.is_kept]


def help_of(name: str, reads: str) -> str:
    """The help of an option for a kind of sources, with its default in brackets."""
    option = OPTIONS[name]
    text = option.help.format(formats=listed(FORMATS.get(reads, ()), "or"), users=listed(option.users, "and"))
    default = option.default if isinstance(option.default, str) else option.default[reads]
    if not default:
        return text
    return f"{text}  [{'' if default == 'required' or name == 'ray' else 'default: '}{default}]"


BadRecordLimit = int | Fraction
"""``--max-bad-records``: a number of bad records, or their share of the records read so far.

Tasks are judged in input order, whichever ends first. A share is judged after each task once `MIN_RECORDS` were read,
and at the end.
"""


def parse_bad_record_limit(text: str | int | None) -> BadRecordLimit | None:
    """``--max-bad-records``: a count, or a share such as ``0.1%``.

    Raises:
        UsageError: it is neither.
    """
    if text is None:
        return None
    hint = "give a number such as 100, or a share such as 0.1%"
    match = _SHARE.fullmatch(str(text).strip())
    if match is not None and (share := Fraction(match[1]) / 100) <= 1:
        return share
    try:
        return read_count(str(text))
    except UsageError as error:
        raise UsageError(f"max_bad_records is {text!r}", hint=hint) from error


def takes_build_options(reads: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function with ``**keywords: Unpack[OptionalBuildOptions]`` the signature and help of the options.

    The line ``{options}`` of its docstring becomes the help of each option.

    Args:
        reads: the kind of sources that it reads.
    """

    def given(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        named = {"tokenizer", *(one.name for one in own)}
        fields = inspect.signature(BuildOptions).parameters
        hints, defaults = (
            get_type_hints(BuildOptions),
            BuildOptions(tokenizer="", out=""),
        )  # without the descriptions
        added = [name for name, option in OPTIONS.items() if name not in named and reads in option.reads]
        vars(function)["__signature__"] = signature.replace(
            parameters=[
                *own,
                *(fields[name].replace(annotation=hints[name], default=getattr(defaults, name)) for name in added),
            ]
        )
        if function.__doc__:  # python -OO has none
            lines = "\n        ".join(f"{name}: {help_of(name, reads)}" for name in added)
            function.__doc__ = function.__doc__.replace("{options}", lines)
        return function

    return given


def checked_options(options: BuildOptions) -> BuildOptions:
    """The options as plain Python values; meaningless ones are refused.

    Raises:
        UsageError: one is of another type, or out of range, or unknown, or two of them contradict each other.
    """
    values = {name: _plain(getattr(options, name)) for name in options.__struct_fields__}
    for name in ("keep_field", "where", "join", "by"):
        values[name] = [values[name]] if isinstance(values[name], str) else values[name]
    for name, value in values.items():
        if isinstance(value, set | frozenset):
            raise UsageError(f"{name} is a set: {value!r:.{_SHOWN}}", hint="give a list: the columns follow its order")
    try:
        options = msgspec.convert(values, BuildOptions)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), values) from error
    by = [name.strip() for given in options.by for name in given.split(",")]
    options = msgspec.structs.replace(options, by=by)
    for name in options.by:
        if options.by.count(name) > 1:
            raise UsageError(f"by names the column {name!r} twice", hint="name it once")
    _check_reads(options)
    _check_pairs(options)
    parse_bad_record_limit(options.max_bad_records)
    return options


def _plain(value: Any) -> Any:
    """A number of another library as Python's own; a sequence as a list; a path as a string."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if hasattr(value, "tolist"):  # an array or a number of numpy, of which some have no `__index__`
        return value.tolist()
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
    for name, value in _given(options).items():
        if value in ("", [""]):
            raise UsageError(f"{name} is empty", hint=f"give {flag(name)} a value, or leave it out")
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
    if options.engine not in (None, *ENGINES):
        raise UsageError(f"engine is {options.engine!r}", hint=f"give {listed(ENGINES, 'or')}, or leave out --engine")


def _check_chat(options: BuildOptions) -> None:
    given = _given(options)
    check_template(options.chat)
    if options.chat is None:
        for name in _CHAT:
            if name in given:
                raise UsageError(f"{flag(name)} needs --chat", hint=f"add --chat, or leave out {flag(name)}")
        return
    for name in ("text_field", "text_unit", "eos", "bos", "special_tokens", "engine"):
        if name in given:
            end = "; --document-end says what ends a conversation" if name == "eos" else ""
            raise UsageError(f"{flag(name)} does not go with --chat", hint=f"leave out {flag(name)}{end}")
    if "overlong" in given and options.max_tokens is None:
        raise UsageError("--overlong needs --max-tokens", hint="add --max-tokens N, or leave out --overlong")


def check_template(location: str | None) -> None:
    """Refuse a value that is no chat template, such as a source behind ``--chat``.

    Raises:
        UsageError: with the forms of a chat template.
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
    for name, option in OPTIONS.items():
        if name in given and options.reads not in option.reads:
            others = [_COMMANDS[reads] for reads in option.reads]
            raise UsageError(
                f"{name} is given, and the sources are read as {options.reads}",
                hint=f"leave out {flag(name)}, or use tokshard {' or '.join(others)}",
            )
    known = FORMATS.get(options.reads, ())
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
    of_chats = OPTIONS["chat"].users
    others = sorted(set(found).difference(of_chats))
    if options.chat is not None and others:
        raise UsageError(
            f"chat is given, and the sources are {' and '.join(others)}, which hold texts",
            hint=f"leave out --chat, or give conversations as {listed(of_chats, 'or')}",
        )
    for name, option in OPTIONS.items() if options.reads == TOKENS else ():
        if name in given and option.users and not set(option.users).intersection(found):
            raise UsageError(
                f"{name} is given, and the sources are {' and '.join(found)}, which do not use it",
                hint=f"leave out {flag(name)}, which is for {', '.join(option.users)}",
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


def options_of(tokenizer: str | os.PathLike[str], out: str | os.PathLike[str], keywords: Any) -> BuildOptions:
    """The options of a call.

    Raises:
        TypeError: one does not exist.
    """
    for name in set(keywords).difference(BuildOptions.__struct_fields__):
        near = get_close_matches(name, OPTIONS, n=1)
        said = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(OPTIONS)}"
        raise TypeError(f"a build has no argument {name!r}: {said}")
    return BuildOptions(tokenizer=path_option("tokenizer", tokenizer), out=path_option("out", out), **keywords)


def _given(options: BuildOptions) -> dict[str, Any]:
    """The options that do not have their defaults."""
    defaults = BuildOptions(tokenizer="", out="")
    return {name: value for name, value in msgspec.structs.asdict(options).items() if value != getattr(defaults, name)}


def settings_shared_by_runs(options: BuildOptions) -> dict[str, Any]:
    """The options that two runs of one build have in common."""
    may_differ = {name for name, option in OPTIONS.items() if option.may_differ}
    return {name: value for name, value in msgspec.structs.asdict(options).items() if name not in may_differ}


def command_words(sources: Sequence[str], options: BuildOptions, *, is_array: bool) -> list[str]:
    """The command line that continues a build, for an array as one job; ``--force`` is left out."""
    words = ["tokshard", _COMMANDS[options.reads], *sources]
    for name, value in _given(options).items():
        words += _words_of(name, value) if name not in {"force", "reads"} else ()
    return [*words, "--job-index", "0", "--num-jobs", "1"] if is_array else words


def _words_of(name: str, value: Any) -> Iterator[str]:
    if name == "columns" and not value:
        yield "--no-columns"
        return
    values = [f"{field}:{kind}" for field, kind in value.items()] if isinstance(value, dict) else value
    for item in values if isinstance(values, list) else [values]:
        yield from [flag(name)] if item is True else [flag(name), _as_typed(name, item)]


def _as_typed(name: str, value: Any) -> str:
    """A value of an option as the command line takes it."""
    if isinstance(value, tuple):  # two bounds
        return ":".join(str(bound).removesuffix(".0") for bound in value)
    unit = OPTIONS[name].unit if name in OPTIONS else ""
    if not isinstance(value, int) or unit not in {"N", "SIZE"}:
        return str(value)
    return as_typed(value) if unit == "N" else as_typed_bytes(value)


def settings_text(config: BuildConfig) -> str:
    """The command that made a corpus, without tokenizer, sources, and most options that have their defaults."""
    found = {
        name: value
        for part in (config, config.chat, config.copied, config.selected)
        if part is not None
        for name, value in msgspec.structs.asdict(part).items()
    }
    if config.chat is not None:
        found |= {"chat": config.chat.template[:_SHOWN_HASH]}
    for name in ("keep_ids", "drop_ids"):
        if (of_list := getattr(config.selected, name, None)) is not None:
            found |= {name: of_list[:_SHOWN_HASH]}
    found |= {"join": [one[:_SHOWN_HASH] for one in getattr(config.selected, "join", ())]}
    words = [_COMMANDS[config.reads]]
    if config.copied is not None:
        words.append(counted(len(config.copied.corpora), "corpus", "corpora"))
    defaults, kept = BuildOptions(tokenizer="", out=""), list[str]()
    for name, option in OPTIONS.items():
        value = found.get(name)
        if value in (None, "", [], {}) or (name == "text_field" and config.chat is not None):
            continue
        is_default, is_own = value == getattr(defaults, name), config.reads in option.reads
        if is_own and (name in _SHOWN_SETTINGS or not is_default):
            words += map(shlex.quote, _words_of(name, value))
        # what all corpora of a copy agree on
        elif (
            config.reads in {DOCUMENTS, VIEW}
            and option.group in (INPUT, ENCODING)
            and (name == "loss" or not is_default)
        ):
            kept += map(shlex.quote, _words_of(name, value))
    of_corpora = ["made with", *kept] if kept else []
    return " ".join([*words, *of_corpora, *([f"({config.split} split)"] if config.split else [])])


_SHOWN_SETTINGS = "text_field", "loss", "shard_tokens", "max_document_bytes"
"""Settings that are shown also where they have their defaults."""
_SHOWN_HASH = 12


def change_text(name: str, before: Any, now: Any) -> str:
    """How a setting of a build has changed, in the words of the command line.

    Args:
        name: a field of `BuildConfig`, `CopyConfig` or `TokenizerInfo`.
    """
    return _CHANGED.get(name) or f"{flag(name)} was {_change_side(name, before)}, now {_change_side(name, now)}"


_CHANGED = {
    "sha256": "the content of the tokenizer has changed",
    "special_ids": "the special tokens have changed",
    "corpora": "the corpora hold other documents",
    "holds": "the corpora hold other corpora",
    "holds_some": "the corpora hold parts of other corpora",
    "recipes": "the corpora were made in another way",
    "keep_ids": "--keep-ids lists other documents",
    "drop_ids": "--drop-ids lists other documents",
    "join": "--join has other files",
    "loss_spans": "only one has loss spans, or weights of them: 'tokshard copy' joins corpora with and without",
    "template": "the chat template has changed",
}
"""Settings whose values would say nothing to a reader."""


def _change_side(name: str, value: Any) -> str:
    if value is None or value in ({}, []):
        return "not given"
    if isinstance(value, dict):
        value = [f"{field}:{kind}" for field, kind in value.items()]
    text = " ".join(_as_typed(name, item) for item in (value if isinstance(value, list) else [value]))
    return shlex.quote(text) if len(text) <= _SHOWN else f"{text:.{_SHOWN}}..."


def flag(name: str) -> str:
    """The option of the command line for a field of `BuildOptions`."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")
