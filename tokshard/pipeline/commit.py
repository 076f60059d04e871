"""The last step of a build: turns receipts into tables, the report and, last, the manifest.

Nothing before the manifest makes a corpus, so a build that is killed at any moment is continued or commits again.
"""

from __future__ import annotations

import heapq
import json
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tokshard.errors import BuildError, UsageError
from tokshard.format import names
from tokshard.format.document_list import read_document_list, rows_not_found
from tokshard.format.loss import has_spans
from tokshard.format.manifest import (
    DAMAGED_INPUT,
    IN_OTHER_SPLIT,
    FileFacts,
    Fingerprints,
    Manifest,
    Records,
    TemplateDrop,
    content_fingerprint,
    encode_manifest,
    recipe_fingerprint,
)
from tokshard.format.opening import open_corpus
from tokshard.format.schema import FORMAT_VERSION
from tokshard.pipeline.adopt import read_report
from tokshard.pipeline.append import in_its_corpus
from tokshard.pipeline.encode.chat.spans import NOTHING_TO_LEARN
from tokshard.pipeline.encode.chat.texts import CUT_SHORT, CUT_TOKENS, STAYED
from tokshard.pipeline.encode.documents import DUPLICATE, TOO_FEW_TOKENS, TOO_MANY_TOKENS
from tokshard.pipeline.encode.maker import SPELLED
from tokshard.pipeline.encode.passing import ADDED, INSIDE
from tokshard.pipeline.executors.base import RunUsage, cpu_time
from tokshard.pipeline.judge import loss_warning
from tokshard.pipeline.options import DOCUMENTS, TEXT, TOKENS
from tokshard.pipeline.progress import BuildResult, BuiltCorpus
from tokshard.pipeline.request import Build, saved_tokenizer
from tokshard.pipeline.sources.inputs import display_path
from tokshard.pipeline.sources.records import TOO_LONG, UNREAD, WRONG_TYPE
from tokshard.pipeline.sources.selected import NO_ROW
from tokshard.pipeline.stages import StageResults
from tokshard.pipeline.tables import Totals, check_kept_fields, side_file
from tokshard.pipeline.tasks.duplicates import write_text_hashes
from tokshard.pipeline.tasks.writing import MARKS, read_rejects
from tokshard.pipeline.views import write_views
from tokshard.pipeline.workspace.places import Output
from tokshard.pipeline.workspace.receipts import Receipt, progress_of
from tokshard.store import Store
from tokshard.version import __version__
from tokshard.wording import counted, one_line

_MAX_LISTED_SOURCES = 10_000
"""With more sources, the report has a hash of their versions instead of a list."""
_MAX_SHOWN_FIELDS = 12
_MAX_SHOWN_ROWS = 5
"""Rows of a list of documents."""
_LISTED = ("argument", "path", "location", "num_bytes", "version")


def commit(build: Build, settled: StageResults, usage: RunUsage) -> BuildResult:
    """Turn the receipts of all tasks into corpora: tables, then a check that every shard is there, then the manifests.

    Raises:
        UsageError: a kept field is in no record.
        BuildError: no document was written, or a shard is gone.
    """
    check_kept_fields(build, settled.counts[1])
    if build.config.selected is None:
        assembled = [(output, *_assemble(build, settled, number)) for number, output in enumerate(build.outputs)]
    else:
        assembled = [(build.outputs[0], {}, write_views(build, settled.shards))]
    result = _result(build, settled.counts[1], usage, [manifest for *_, manifest in assembled])
    report = json.dumps(_report(build, result, settled.left_out), indent=2, ensure_ascii=False).encode() + b"\n"
    unused = [_unused_files(output, sizes, manifest) for output, sizes, manifest in assembled]
    # the training corpus comes last: if it is complete, so is the validation corpus
    for (output, _, manifest), others in reversed([*zip(assembled, unused, strict=True)]):
        output.store.delete(*others)
        output.store.put(names.REPORT, report)  # the names before it are durable then, too
        output.store.put(names.MANIFEST, encode_manifest(manifest))
    build.workspace.remove()
    return result


def _assemble(build: Build, settled: StageResults, number: int) -> tuple[dict[str, int], Manifest]:
    """Write all files of a corpus but its report and manifest. Returns the sizes of its shards, and the manifest.

    Args:
        number: which of the build's corpora.
    """
    output = build.outputs[number]
    out, files = output.store, dict[str, FileFacts]()
    totals = Totals(build, settled, number)
    totals.write_tables(out, files)
    is_in_other_split = IN_OTHER_SPLIT.get(output.split) in totals.left_out
    # an append may add to one corpus of a split alone
    if not totals.documents and not (output.generation and is_in_other_split):
        out.delete(*files)
        raise _nothing_written(build, totals, output.split if is_in_other_split else "")
    tokenizer = saved_tokenizer(build)
    out.put(names.TOKENIZER, tokenizer)
    files[names.TOKENIZER] = FileFacts(num_bytes=len(tokenizer), sha256=build.tokenizer.sha256)
    if totals.with_rejects or settled.left_out:
        _write_rejects(build, settled, totals, out, files)
    # with a limit, some texts became no document; of a split, the first corpus keeps the hashes of both
    if settled.texts is not None and build.options.max_documents is None and not number:
        with side_file(out, names.HASHES, files) as file:
            write_text_hashes(settled.texts, file)
    manifest = _manifest(build, output, totals, files)
    if build.generation:
        manifest = in_its_corpus(output, manifest, build.previous[number])
    return totals.shard_sizes, manifest


def _write_rejects(
    build: Build, settled: StageResults, totals: Totals, out: Store, files: dict[str, FileFacts]
) -> None:
    """Write a line of JSON for each record or input that was left out, in input order."""
    damaged = (
        {"source": index, "record": None, "reason": DAMAGED_INPUT, "detail": problem}
        for index, problem in sorted(settled.left_out.items())
    )
    rejects = heapq.merge(_rejected_records(build, settled, totals), damaged, key=itemgetter("source"))
    with side_file(out, names.REJECTS, files) as file:
        for reject in rejects:
            reject["source"] = _shown_source(build, reject["source"])
            file.write(json.dumps(reject, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _shown_source(build: Build, index: int) -> str:
    source = build.inputs[index]
    root = (build.inputs.roots if build.corpora else build.arguments)[source.argument]
    return display_path(root, source.path)


def _rejected_records(build: Build, settled: StageResults, totals: Totals) -> Iterator[dict[str, Any]]:
    """The rejects of the tasks, with records counted from the start of their input, from 1."""
    for key in totals.with_rejects:
        before = totals.records_before.get(key, {})
        for reject in read_rejects(build.workspace.store, settled.counts[0], key):
            reject["record"] += before.get(reject["source"], 0) + 1
            yield reject


def _manifest(build: Build, output: Output, totals: Totals, files: dict[str, FileFacts]) -> Manifest:
    tokenizer = build.tokenizer
    config = msgspec.structs.replace(build.config, split=output.split or None)
    sources = ((one.argument, one.path, one.num_bytes) for one in totals.originals or build.inputs)
    content = content_fingerprint(totals.content, tokenizer, build.columns)
    return Manifest(
        format_version=FORMAT_VERSION,
        num_documents=totals.documents,
        num_tokens=totals.tokens,
        num_shards=len(totals.shard_sizes),
        num_bytes=sum(totals.shard_sizes.values()),
        text_bytes=totals.text_bytes,
        dtype=build.dtype,
        columns=build.columns,
        fingerprints=Fingerprints(content=content, recipe=recipe_fingerprint(config, tokenizer, sources)),
        tokenizer=tokenizer,
        arguments=build.arguments,
        build=config,
        records=Records(
            read=totals.records,
            written=totals.documents,
            left_out=dict(sorted(totals.left_out.items())),
            with_special_text=None if build.corpora else totals.with_special_text,
            padding_ids=totals.padding_ids,
            template_drops={
                kind: TemplateDrop(count=number, source=_shown_source(build, index), record=record + 1, message=message)
                for kind, (number, index, record, message) in sorted(totals.omitted.items())
            },
        ),
        document_lengths=totals.lengths,
        files=files,
        num_targets=totals.content.num_targets if has_spans(build.columns) else None,
    )


def _nothing_written(build: Build, totals: Totals, split: str) -> BuildError:
    """The error for a corpus without documents.

    Args:
        split: the part of a split whose documents are all in the other part; empty if there is another reason.
    """
    reasons = (f"{count:,} {reason}" for reason, count in sorted(totals.left_out.items()))
    found = ", ".join([f"{counted(totals.records, 'record')} read", *reasons])
    what = f"the {split} split got no document" if split else "no document was written"
    most = max(totals.left_out, key=totals.left_out.__getitem__, default="")
    others = "check the sources and the chat template" if build.chat is not None else _WAYS_OUT[build.config.reads]
    way_out = "change --validation-fraction or leave it out" if split else _WAYS_OUT.get(most, others)
    return BuildError(f"{what}: {found}", hint=f"{way_out}, and {build.start_over}")


_WAYS_OUT = {
    TEXT: "check the sources and --text-field",
    TOKENS: "check the sources and --format",
    DOCUMENTS: "give other conditions, or leave them out",
    DUPLICATE: "give sources with other texts, or leave out --dedup",
    TOO_FEW_TOKENS: "lower --min-tokens",
    TOO_MANY_TOKENS: "raise --max-tokens",
    TOO_LONG: "raise --max-document-bytes",
    WRONG_TYPE: "check the types of --keep-field",
    NOTHING_TO_LEARN: "check that --max-tokens leaves answers, and what the chat template marks as {% generation %}",
}
"""What to do if no document was written: by the reason for most records, else by the kind of the sources."""


def _unused_files(output: Output, shards: Mapping[str, int], manifest: Manifest) -> set[str]:
    """Check that every shard of a corpus is there, with the size in its receipt.

    Returns:
        Other files: left by a task past the limit, by an attempt that left no receipt, or by a commit that was stopped.

    Raises:
        BuildError: one is gone or has another size.
    """
    found = output.shard_sizes()
    for name, num_bytes in shards.items():
        if found.get(name) != num_bytes:
            what = "is gone" if name not in found else f"has {found[name]:,} bytes, and had {num_bytes:,}"
            raise BuildError(
                f"{output.store.where(name)} {what} since its task was done",
                hint="run the same command again: the task that wrote it runs again",
            )
    return (found.keys() - shards.keys()) | ({names.REJECTS, names.HASHES} - manifest.files.keys())


def _result(build: Build, receipts: Sequence[Receipt], usage: RunUsage, manifests: Sequence[Manifest]) -> BuildResult:
    total = progress_of(receipts)
    warning = loss_warning(total.bad, total.records, is_end=True)
    corpora = zip(build.outputs, manifests, strict=True)
    return BuildResult(
        directory=build.workspace.out,
        corpora=tuple(BuiltCorpus(directory=output.store.location, manifest=manifest) for output, manifest in corpora),
        is_new=True,
        seconds=time.monotonic() - usage.started,
        cpu_seconds=cpu_time() - usage.cpu_before + usage.workers.cpu_seconds,
        tokens_written=usage.tokens,
        num_workers=usage.workers.num_workers,
        peak_worker_bytes=usage.workers.peak_bytes,
        ignored=build.ignored,
        notes=(*build.notes, *_changes(receipts, build.tokenizer.eos), *_not_found(build, receipts)),
        warnings=() if warning is None else (warning,),
        normalizer=build.normalizer,
    )


def _changes(receipts: Iterable[Receipt], eos: str) -> Iterator[str]:
    """The changes between records and documents, a line each."""
    changes: Counter[str] = Counter()
    for receipt in receipts:
        changes.update(receipt.changes)
    for what, (noun, text) in _CHANGES.items():
        if changes[what]:
            yield text.format(counted(changes[what], noun), eos=eos)
    unread = {what.removeprefix(UNREAD): count for what, count in changes.items() if what.startswith(UNREAD)}
    if unread:
        named = sorted(unread, key=lambda name: (-unread[name], name))
        shown = ", ".join(f"{one_line(name)} ({unread[name]:,})" for name in named[:_MAX_SHOWN_FIELDS])
        more = f", and {len(named) - _MAX_SHOWN_FIELDS:,} more" if len(named) > _MAX_SHOWN_FIELDS else ""
        yield f"fields that are not read, with the number of their records: {shown}{more}"
    for what, count in sorted(changes.items()):
        if what.startswith(NO_ROW):
            yield f"{what.removeprefix(NO_ROW)} has no row for {counted(count, 'document')}: values are missing there"
        if what.startswith(SPELLED):
            token = what.removeprefix(SPELLED)
            yield (
                f"{counted(count, 'text spells', 'texts spell')} {token!r}, an added token that is not special: it "
                "becomes that token"
            )
        if what.startswith(STAYED):
            token = what.removeprefix(STAYED)
            yield (
                f"{counted(count, 'conversation spells', 'conversations spell')} {token!r}, which the chat template "
                "writes: it stays text there"
            )


_CHANGES = {
    MARKS: ("byte order mark", "{} dropped: not part of a text"),
    CUT_SHORT: ("conversation", "{} cut to --max-tokens"),
    CUT_TOKENS: ("conversation", "in {} an answer begins inside a token: the whole token is a target"),
    ADDED: ("document", "{} did not end in {eos!r}: it was added"),
    INSIDE: ("document", "{} ended inside a document or row of the source: each became a document of its own"),
}
"""Each kind of change, with its unit and its sentence in the notes."""


def _not_found(build: Build, receipts: Iterable[Receipt]) -> Iterator[str]:
    """A line with the number of rows of a list of drops that name no document. Unknown with a limit."""
    location = build.options.drop_ids
    if location is None or build.options.max_documents is not None:
        return
    found = np.frombuffer(b"".join(receipt.listed for receipt in receipts), "<u4").astype(np.int64)
    try:
        ((place, number),) = build.corpora  # a list is of a view, which has one base
        with open_corpus(place, generation=number) as corpus:
            listed = read_document_list(location, corpus)
        count, shown = rows_not_found(location, listed, found, most=_MAX_SHOWN_ROWS)
    except UsageError as error:  # the copy is done: whoever makes the corpus may not see the list
        yield f"{error.problem}: the number of its rows that name no document is unknown"
        return
    if count:
        more = "" if count == len(shown) else ", ..."
        verb = "names" if count == 1 else "name"
        yield f"{counted(count, 'row')} of {location} {verb} no document: {', '.join(map(one_line, shown))}{more}"


def _report(build: Build, result: BuildResult, left_out: Mapping[int, str]) -> dict[str, Any]:
    """The facts that may differ between two builds of one corpus, such as times, machine, absolute paths."""
    inputs = build.inputs.absolute()
    report = {
        "tokshard": __version__,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "seconds": round(result.seconds, 3),
        "cpu_seconds": round(result.cpu_seconds, 3),
        "workers": result.num_workers,
        "peak_worker_bytes": result.peak_worker_bytes,
        "tokens_written": result.tokens_written,
        "on_bad_record": build.options.on_bad_record,
        "on_bad_source": build.options.on_bad_source,
        "damaged_inputs": {inputs[index].location: problem for index, problem in sorted(left_out.items())},
        "ignored_files": dict(build.ignored),
        "notes": list(result.notes),
        "roots": _original_roots(build) if build.corpora else inputs.roots,
    }
    if len(inputs) > _MAX_LISTED_SOURCES or build.corpora:
        return {**report, "sources": [], "num_sources": len(inputs), "source_times_sha256": inputs.versions_sha256}
    return {**report, "sources": [{name: getattr(one, name) for name in _LISTED} for one in inputs]}


def _original_roots(build: Build) -> list[str]:
    """The roots of the corpora's sources, so that an append can refuse sources that it has read; empty if unknown."""
    roots: list[str] = []
    for location, generation in build.corpora:
        with open_corpus(location, generation=generation) as corpus:
            roots += (root for store, _ in corpus.generations for root in read_report(store).roots)
    return roots if len(roots) == len(build.arguments) else []
