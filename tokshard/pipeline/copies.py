"""The requests of a copy and of a view. Their inputs are the shards of corpora."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.decode import read_tokenizer
from tokshard.format.files import file_sha256
from tokshard.format.loss import LOSS_COLUMNS, kept_columns
from tokshard.format.manifest import CopyConfig, SelectConfig
from tokshard.format.opening import open_corpus
from tokshard.format.view import View
from tokshard.format.whole_corpus import check_side_files
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.request import Request, config_of, versions_here
from tokshard.pipeline.sources.corpora import contents, share_documents
from tokshard.pipeline.sources.inputs import InputTable, input_table
from tokshard.pipeline.sources.selected import Rules
from tokshard.store import NotRegularFileError, absolute_location, locate, real_location, working_directory

T = TypeVar("T")


def copied_request(locations: Sequence[str], options: BuildOptions) -> tuple[Request, bytes]:
    """The request of a copy, and the tokenizer.json of its corpora.

    Raises:
        UsageError: the corpora do not fit together, or one is at or in `out`.
        CorpusError: a corpus cannot be opened, or its tables are damaged.
    """
    with contextlib.ExitStack() as stack:
        corpora = [stack.enter_context(open_corpus(location)) for location in locations]
        _check_apart(options, corpora)
        if not options.is_dedup:
            _check_distinct(corpora)
        first = corpora[0].manifest
        for other in corpora[1:]:
            _check_together(corpora[0], other)
        columns = _columns(corpora, options)
        held = [contents(corpus) for corpus in corpora]
        given = [corpus.fingerprint for corpus in corpora]
        whole = set[str]().union(*(found for found, _ in held))
        copied = CopyConfig(
            corpora=given,
            recipes=[corpus.manifest.fingerprints.recipe for corpus in corpora],
            holds=sorted(whole.difference(given)),
            holds_some=sorted(set[str]().union(*(parts for _, parts in held)) - whole),
            shuffle=options.shuffle,
        )
        bases = Counter(corpus.base.location for corpus in corpora if isinstance(corpus, View))
        notes = tuple(
            f"{count} views of {base}: what each leaves out is counted, also what another one has"
            for base, count in bases.items()
            if count > 1
        )
        request = _request(corpora, locations, options, columns, copied=copied)
        return msgspec.structs.replace(request, notes=notes), read_tokenizer(corpora[0].store, first)


def selected_request(locations: Sequence[str], options: BuildOptions) -> tuple[Request, bytes]:
    """The request of a view, and the tokenizer.json of its base.

    Raises:
        UsageError: there is not exactly one corpus; it is at or in `out`; or a condition does not fit it.
        CorpusError: the corpus cannot be opened, or its tables are damaged.
    """
    if len(locations) != 1:
        raise UsageError(
            f"{len(locations)} corpora are given, and a view is of one", hint="make a view of each, and mix them"
        )
    with open_corpus(locations[0]) as corpus:
        _check_apart(options, [corpus])
        lists = {"keep_ids": options.keep_ids, "drop_ids": options.drop_ids}
        here = {name: None if file is None else absolute_location(file) for name, file in lists.items()}
        joined = [absolute_location(file) for file in options.join]
        options = msgspec.structs.replace(options, join=joined, **here)
        selected = SelectConfig(
            where=list(options.where),
            source=options.source,
            hash_range=options.hash_range,
            join=[_sha256(file) for file in joined],
            by=list(options.by),
            **{name: None if file is None else _sha256(file) for name, file in here.items()},
        )
        Rules(corpus, selected, options)  # refuses what does not fit
        manifest = corpus.manifest
        request = _request([corpus], locations, options, manifest.columns, selected=selected)
        return request, read_tokenizer(corpus.store, manifest)


def _request(
    corpora: Sequence[Corpus],
    locations: Sequence[str],
    options: BuildOptions,
    columns: dict[str, str],
    *,
    copied: CopyConfig | None = None,
    selected: SelectConfig | None = None,
) -> Request:
    """The request of a copy or a view, after the small files of its corpora were checked."""
    for corpus in corpora:
        check_side_files(corpus)
    first = corpora[0].manifest
    return Request(
        options=options,
        sources=list(locations),
        directory=working_directory(),
        config=config_of(
            options,
            text_field="",
            keep_field={},
            shard_tokens=options.shard_tokens or first.build.shard_tokens,
            task_bytes=first.build.task_bytes,
            copied=copied,
            selected=selected,
            chat=_common([corpus.manifest.build.chat for corpus in corpora]),
            id_field=_common([corpus.manifest.build.id_field for corpus in corpora]) if "id" in columns else None,
        ),
        columns=columns,
        tokenizer=first.tokenizer,
        normalizer=None,
        inputs=_inputs(corpora, options.reads),
        arguments=[argument for corpus in corpora for argument in corpus.manifest.arguments],
        versions=versions_here(options.reads),
        corpora=[(absolute_location(corpus.location), corpus.num_generations - 1) for corpus in corpora],
    )


def _sha256(file: str) -> str:
    try:
        store, name = locate(file)
        store.stat(name)  # refuses a pipe, which can be read once only
        return file_sha256(store, name)
    except OSError as error:
        hint = "write it to a file first" if isinstance(error, NotRegularFileError) else "check the path"
        raise UsageError(f"{file} cannot be read: {error.strerror or error}", hint=hint) from error


def _common(values: Sequence[T]) -> T | None:
    """A setting of all corpora; None if they differ."""
    return values[0] if all(value == values[0] for value in values) else None


def _columns(corpora: Sequence[Corpus], options: BuildOptions) -> dict[str, str]:
    """The columns of the copy, name to type: loss spans, and the kept columns of all corpora or the requested ones.

    Raises:
        UsageError: a column has several types, or no corpus has it.
    """
    found: dict[str, str] = {}
    for corpus in corpora:
        for name, kind in corpus.manifest.columns.items():
            if found.setdefault(name, kind) != kind and (options.columns is None or name in options.columns):
                raise UsageError(
                    f"the kept column {name} is {found[name]} in one corpus and {kind} in {corpus.location}",
                    hint="leave it out: name the others with --keep-columns, or give --no-columns",
                )
    kept = kept_columns(found)
    for name in options.columns or ():
        if name not in kept:
            raise UsageError(f"no corpus has a kept column {name!r}", hint=f"kept columns: {', '.join(kept) or 'none'}")
    of_loss = {name: kind for name, kind in LOSS_COLUMNS.items() if found.get(name) == kind}
    return of_loss | {name: kept[name] for name in (kept if options.columns is None else options.columns)}


def _inputs(corpora: Sequence[Corpus], kind: str) -> InputTable:
    """The shards of all corpora. Their hashes are their versions, so that changed kept values are noticed, too."""
    rows = (
        (argument, info.name, info.num_bytes, info.sha256, (kind, None, ()))
        for argument, corpus in enumerate(corpora)
        for info in corpus.shards
    )
    return input_table(rows, [absolute_location(corpus.location) for corpus in corpora])


def _check_apart(options: BuildOptions, corpora: Sequence[Corpus]) -> None:
    """Refuse a place that is, or holds, a corpus that is read, or its base: starting over would remove its files.

    Raises:
        UsageError: with the corpus.
    """
    bases = [] if options.append else [corpus.shard_store.location for corpus in corpora]
    for place in (*(corpus.location for corpus in corpora), *bases):
        if f"{real_location(place)}/".startswith(f"{real_location(options.out)}/"):
            raise UsageError(f"{place}, which the copy reads, lies in {options.out}", hint="give another --out")


def _check_distinct(corpora: Sequence[Corpus]) -> None:
    """Refuse the same documents twice, also in a generation or a copy of another corpus. Weights of a plan repeat them.

    Raises:
        UsageError: with the two corpora.
    """
    for number, corpus in enumerate(corpora):
        for earlier in corpora[:number]:
            if share_documents(earlier, corpus):
                raise UsageError(
                    f"{corpus.location} holds the same documents as {earlier.location}, or some of them",
                    hint="give each corpus once, or --dedup exact to leave out equal documents; a plan can read one "
                    "more often, by its weight",
                )


def _check_together(first: Corpus, other: Corpus) -> None:
    """Refuse corpora that cannot be joined.

    Raises:
        UsageError: their tokenizers or delimiters differ.
    """
    ours, theirs = first.manifest.tokenizer, other.manifest.tokenizer
    for what, mine, its in (
        ("tokenizer", ours.canonical_sha256[:16], theirs.canonical_sha256[:16]),
        ("EOS", ours.eos, theirs.eos),
        ("BOS", ours.bos, theirs.bos),
    ):
        if mine != its:
            raise UsageError(
                f"{first.location} has the {what} {mine}, {other.location} has {its}",
                hint="only corpora with the same tokenizer and delimiters can become one",
            )
