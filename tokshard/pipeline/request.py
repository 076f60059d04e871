"""The request of a build, resolved: one form, saved by every build and read back by every process.

"The same command" means an equal request. It also names the libraries that determine bytes: a process with other
versions is refused, on any machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tokshard.errors import UNDECODABLE, BuildError, ConfigurationChangedError, UsageError
from tokshard.extras import version_of
from tokshard.forking import cached_property, decodable
from tokshard.format import names
from tokshard.format.loss import has_spans, has_weights
from tokshard.format.manifest import BuildConfig, ChatConfig, TokenizerInfo
from tokshard.format.schema import token_dtype
from tokshard.interop.tokens.batches import TokenSpec
from tokshard.pipeline.options import (
    SKIP,
    TEXT,
    TOKENS,
    BuildOptions,
    change_text,
    flag,
    settings_shared_by_runs,
)
from tokshard.pipeline.sources.chats import TemplateSource
from tokshard.pipeline.sources.inputs import InputTable, read_once_name
from tokshard.pipeline.sources.records import RecordSpec, parse_columns
from tokshard.pipeline.workspace.lease import TOO_MANY_FILES
from tokshard.pipeline.workspace.places import INPUTS, REQUEST, TOKENIZER, Output, Workspace, has_request
from tokshard.store import absolute_location, is_uri, present, real_location, working_directory
from tokshard.version import __version__

_MAX_SHOWN = 5
_CHECKSUM = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')
_SAME_BYTES = ("pyarrow", "zstandard")
"""Packages besides tokshard on which the bytes of every corpus depend; for texts, tokenizers is one of them."""


@decodable
class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved request of a build.

    Args:
        options: after checks.
        sources: the sources as given.
        directory: the working directory, where relative paths start.
        config: the options as the manifest records them.
        columns: the columns of loss spans, then the kept columns; name to type.
        tokenizer: its entry in the manifest; its file is in the workspace.
        normalizer: steps that change text before it is encoded; None if there are none.
        inputs: all files to read, as they were when the build began. The table has a file of its own.
        arguments: the name of each source in tables; one on the hub with the commit that it stands for.
        ignored: suffix to the number of files of unknown format.
        notes: notes for the user, one line each.
        versions: the versions of the packages that determine bytes.
        generation: the one that the build writes: 0 for a new corpus, else the number of an append.
        previous: ``manifest_sha256`` of the generation before, for each corpus.
        corpora: location and newest generation of each corpus that is copied.
        is_array: the build was begun by a job of an array.
        chat: the template that renders conversations; None where texts are read.
    """

    options: BuildOptions
    sources: list[str]
    directory: str
    config: BuildConfig
    columns: dict[str, str]
    tokenizer: TokenizerInfo
    normalizer: str | None
    inputs: InputTable
    arguments: list[str]
    ignored: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    generation: int = 0
    previous: list[str] = []
    corpora: list[tuple[str, int]] = []
    is_array: bool = False
    chat: TemplateSource | None = None


class Build(Request, frozen=True, kw_only=True, dict=True):
    """A request and the place where its build works: everything that a task or a process gets.

    Args:
        workspace: the place.
    """

    workspace: Workspace

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """The corpora to write: two with a validation split."""
        is_split = self.config.validation_fraction is not None
        return self.workspace.outputs(is_split=is_split, generation=self.generation)

    @property
    def is_complete(self) -> bool:
        """Whether all of its corpora have their manifests."""
        return all(names.MANIFEST in present(output.store) for output in self.outputs)

    @property
    def dtype(self) -> str:
        """The dtype of the tokens of its corpus."""
        return token_dtype(self.tokenizer.vocab_size)

    @cached_property
    def spec(self) -> RecordSpec:
        """The parts of a record that the build reads."""
        config, eos, tokens = self.config, self.tokenizer.eos_id, None
        if config.reads == TOKENS:
            tokens = TokenSpec(
                field=config.token_field,
                dtype=config.token_dtype,
                delimiters=(eos,) if config.source_eos is None else (eos, config.source_eos),
                narrowest=self.dtype,
                max_document_bytes=config.max_document_bytes,
                loss_field=config.loss_field,
                has_loss=has_spans(self.columns),
                has_weights=has_weights(self.columns),
            )
        return RecordSpec(
            text_field="" if config.chat is not None else config.text_field,
            columns=parse_columns(self.options.id_field, self.options.keep_field),
            max_document_bytes=config.max_document_bytes,
            text_unit=config.text_unit,
            tokens=tokens,
            is_chat=config.chat is not None and config.reads == TEXT,
        )

    @property
    def is_leaving_out(self) -> bool:
        """Whether damaged inputs are left out."""
        return self.options.on_bad_source == SKIP

    @property
    def start_over(self) -> str:
        """How a user starts over, as the end of a sentence."""
        if self.is_array and not self.generation:
            return f"remove {self.workspace.out} and run the jobs again"
        return f"start over with {'--append ' if self.generation else ''}--force"


def config_of(options: BuildOptions, **others: Any) -> BuildConfig:
    """The options as the manifest records them.

    Args:
        others: settings that differ from the given ones.
    """
    same = BuildConfig.__struct_fields__, BuildOptions.__struct_fields__
    return BuildConfig(**{name: getattr(options, name) for name in set.intersection(*map(set, same))} | others)


def placed(request: Request, workspace: Workspace) -> Build:
    """The build of a request at a place."""
    return Build(workspace=workspace, **{name: getattr(request, name) for name in Request.__struct_fields__})


def versions_here(reads: str, *more: str) -> dict[str, str]:
    """The packages of this process on which the bytes of a corpus depend, with their versions.

    Args:
        more: others, which may be missing.
    """
    packages = (*_SAME_BYTES, "tokenizers") if reads == TEXT else _SAME_BYTES
    found = {"tokshard": __version__} | {package: version_of(package) for package in packages}
    for package in more:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = version_of(package)
    return found


def other_versions(request: Request) -> list[str]:
    """The packages whose version here differs from that at the start of the build, each as a clause."""
    here = versions_here(request.config.reads, *(request.versions.keys() & {"jinja2", request.tokenizer.library}))
    return [
        f"{package} was {version} when the build began, and is {here.get(package)} here"
        for package, version in request.versions.items()
        if here.get(package) != version
    ]


def check_versions(build: Build) -> None:
    """Refuse a process that has other packages than the one that began the build: its bytes could differ.

    Raises:
        BuildError: with the packages.
    """
    others = other_versions(build)
    if others:
        raise BuildError(
            f"{build.workspace.out}: {'; '.join(others)}: the bytes could differ",
            hint=f"install the versions with which the build began, or {build.start_over}",
        )


def save_request(build: Build) -> None:
    """Save the request, without the place. The table of the inputs has a file of its own."""
    build.inputs.save(build.workspace.store, INPUTS)
    build.workspace.store.put(REQUEST, _encoded(build))


def check_saves(request: Request) -> None:
    """Refuse a request that cannot be saved, before anything is written or removed.

    Raises:
        UsageError: a path in it is not UTF-8.
    """
    try:
        _encoded(request)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{os.fsencode(error.object)!r}: the path is not UTF-8, and the build records it",
            hint="rename it, or run the command in another folder",
        ) from None


def _encoded(request: Request) -> bytes:
    fields = {name: getattr(request, name) for name in Request.__struct_fields__}
    content = msgspec.json.encode(fields, enc_hook=lambda inputs: (inputs.roots, inputs.digest))
    return b'{"crc32":"%08x",' % zlib.crc32(content) + content[1:]


def _checked(saved: bytes) -> bytes:
    """A saved request, whose first field is the CRC-32 of the others."""
    found = _CHECKSUM.match(saved)
    if found is None or int(found[1], 16) != zlib.crc32(b"{" + saved[found.end() :]):
        raise ValueError("its content does not have its checksum")
    return saved


def load_request(workspace: Workspace) -> Request | None:
    """The request of the build in this directory; None if it holds no build. Reads no source.

    Raises:
        BuildError: the file cannot be read, or is damaged.
    """

    def inputs(_: type, reference: object) -> InputTable:
        roots, digest = msgspec.convert(reference, tuple[list[str], str])
        return InputTable(roots, None, [(workspace.store, INPUTS)], digest)

    try:
        request = msgspec.json.decode(_checked(workspace.store.get(REQUEST)), type=Request, dec_hook=inputs)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BuildError(
            f"{workspace.store.where(REQUEST)} cannot be read: {error.strerror or error}",
            hint="check the path and its permissions, or give another --out",
        ) from error
    except (BuildError, ValueError, *UNDECODABLE) as error:
        if not has_request(workspace.store):
            return None  # the build ended between two reads
        if isinstance(error, BuildError):
            raise
        raise BuildError(
            f"{workspace.store.where(REQUEST)} is damaged, so nothing says which files the build wrote: {error}",
            hint=f"remove {workspace.out}, or give another --out",
        ) from error
    request = msgspec.structs.replace(request, options=_options_at(workspace.out, request))
    if request.directory == working_directory():
        return request
    found, once = request.inputs, request.inputs.read_once
    roots = [root if is_uri(root) or root in once else os.path.join(request.directory, root) for root in found.roots]
    return msgspec.structs.replace(request, inputs=found.at(roots))


def _options_at(out: str, request: Request) -> BuildOptions:
    """The options of a build, with its present place if its folder was moved: commands that continue it name that."""
    then = request.options.out
    before = then if is_uri(then) else os.path.join(request.directory, then)
    is_moved = real_location(before) != real_location(out)
    return msgspec.structs.replace(request.options, out=absolute_location(out)) if is_moved else request.options


def saved_tokenizer(build: Build) -> bytes:
    """The ``tokenizer.json`` as it was given.

    Raises:
        BuildError: it cannot be read, or is damaged.
    """
    store = build.workspace.store
    try:
        content = store.get(TOKENIZER)
        if hashlib.sha256(content).hexdigest() == build.tokenizer.sha256:
            return content
        problem = "its content does not have its hash"
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise
        problem = error.strerror or str(error)
    raise BuildError(
        f"{store.where(TOKENIZER)} cannot be read or is damaged: {problem}",
        hint=f"copy the tokenizer.json of the build to it, or {build.start_over}",
    )


def check_same(before: Request, now: Build, *, is_complete: bool = False) -> None:
    """Refuse to continue a build with other settings. A policy may change from fail to skip, but not back.

    Args:
        is_complete: the build has become a corpus, which can grow and which starting over would remove.

    Raises:
        ConfigurationChangedError: it says what differs.
    """
    found, out = list(differences(before, now)), now.workspace.out
    way_back = "the settings of that build, another" if found else "another"
    if is_complete:
        found += [f"{read_once_name(root)} cannot be read again" for root in now.inputs.read_once]
    if found:
        shown = "; ".join(found[:_MAX_SHOWN]) + (f"; and {len(found) - _MAX_SHOWN} more" if found[_MAX_SHOWN:] else "")
        way_out = (
            "or --force to replace it"
            if is_complete and now.config.selected is not None
            else "--append to add sources to the corpus, or --force to replace all of it"
            if is_complete
            else f"remove {out} to start over"
            if before.is_array
            else "or --force to start over"
        )
        raise ConfigurationChangedError(
            f"{out} belongs to another build: {shown}",
            hint=f"give {way_back} --out, {way_out}",
        )


def differences(before: Request, now: Request) -> Iterator[str]:
    """Each option or source of a build that differs, as a clause."""
    if before.config.reads != now.config.reads:
        yield f"it reads {before.config.reads}, not {now.config.reads}"
        return
    is_same_inputs = before.inputs.absolute() == now.inputs.absolute()
    old, new = settings_of(before.config, before.tokenizer), settings_of(now.config, now.tokenizer)
    # the size of tasks follows from the sources; naming the sources says more
    yield from changes(old, new, [name for name in old if name != "task_bytes" or is_same_inputs])
    if before.generation != now.generation:
        yield f"it writes generation {before.generation}, not {now.generation}"
    elif before.previous != now.previous:
        yield "the corpus that it appends to was replaced"
    for policy in ("on_bad_record", "on_bad_source"):
        if getattr(before.options, policy) == SKIP and getattr(now.options, policy) != SKIP:
            yield f"{flag(policy)} was skip, now fail"
    if not is_same_inputs or before.arguments != now.arguments:
        yield from _other_sources(before, now)
    for package, version in before.versions.items():
        if now.versions.get(package, version) != version:
            yield f"the package {package} was {version}, now {now.versions[package]}"


def settings_of(config: BuildConfig, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """All settings on which the documents of a corpus depend, and how they are laid out."""
    found = msgspec.structs.asdict(config)
    copied, chat = found.pop("copied") or found.pop("selected", None), config.chat
    found.pop("chat")
    found |= {name: getattr(chat, name, None) for name in ChatConfig.__struct_fields__}
    found |= {name: getattr(tokenizer, name) for name in ("sha256", "eos", "bos", "special_ids")}
    return found | (msgspec.structs.asdict(copied) if copied is not None else {})


def changes(before: Mapping[str, Any], now: Mapping[str, Any], settings: Iterable[str]) -> Iterator[str]:
    """Each of these settings that differs, as a clause."""
    return (change_text(name, before[name], now[name]) for name in settings if before[name] != now[name])


def _other_sources(before: Request, now: Request) -> Iterator[str]:
    old, new = before.inputs.absolute(), now.inputs.absolute()
    if before.arguments != now.arguments and sorted(before.arguments) == sorted(now.arguments):
        yield "the order of the sources changed"
    elif before.arguments != now.arguments:
        yield f"the sources were {', '.join(before.arguments)}, now {', '.join(now.arguments)}"
    elif now.corpora:
        yield "the corpora hold other shards"
    else:
        # sources that can be read only once are compared with their spools
        then = {one.location: (one.num_bytes, one.version) for one in old if not one.is_read_once}
        here = {one.location: (one.num_bytes, one.version) for one in new if not one.is_read_once}
        yield from (f"source {location} is gone" for location in then.keys() - here.keys())
        yield from (f"source {location} is new" for location in here.keys() - then.keys())
        for location in (location for location in then if then[location] != here.get(location, then[location])):
            (size, version), (size_now, version_now) = then[location], here[location]
            yield (
                f"source {location} had {size} bytes, now {size_now}"
                if size != size_now
                else f"source {location} was modified since: its version was {version}, now it is {version_now}"
            )
        if then == here:
            yield "the order of the sources changed"


def is_same_command(saved: Request, sources: Iterable[object], options: BuildOptions) -> bool:
    """Whether a command equals the saved one to the letter, in the same directory."""
    is_here = saved.directory == working_directory()
    return (
        is_here
        and [*map(str, sources)] == saved.sources
        and settings_shared_by_runs(options) == settings_shared_by_runs(saved.options)
    )
