"""The commit of a view: from the receipts of its tasks to the tables of the view and of its cells."""

from __future__ import annotations

import contextlib
import json
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

import numpy as np

from tokshard.errors import BuildError
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.manifest import (
    Base,
    FileFacts,
    Fingerprints,
    Manifest,
    Records,
    encode_manifest,
    recipe_fingerprint,
)
from tokshard.format.opening import open_corpus
from tokshard.format.schema import FORMAT_VERSION
from tokshard.format.tables import SourceInfo
from tokshard.format.view import KeptWriter, Stretches, View
from tokshard.pipeline.encode.documents import ChunkResult, apply_rules, split_documents
from tokshard.pipeline.request import Build, saved_tokenizer
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.selected import NOT_SELECTED
from tokshard.pipeline.tables import kept_source, side_file, write_sources
from tokshard.pipeline.tasks.cells import ALL, Cells
from tokshard.pipeline.tasks.running import InputReader
from tokshard.pipeline.workspace.ownership import files_of_cells
from tokshard.pipeline.workspace.places import WRITE
from tokshard.pipeline.workspace.receipts import CellCounts, Receipt, read_receipt
from tokshard.store import Store, is_uri, real_location, side_by_side, temporary_file
from tokshard.wording import counted

MISSING = "__HIVE_DEFAULT_PARTITION__"
"""How folders of cells spell a missing value."""

_MOST_CELLS = 4_096
_MAX_NAME_BYTES = 255
"""Of the name of a folder, in most file systems."""
_LAST_ASCII = 127
_STRETCH_FIELDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSize:
    """The documents of a cell, or of a whole view.

    Args:
        folder: its place in the folder of the view; empty for all of it.
    """

    folder: str
    documents: int
    tokens: int


def preview_cells(build: Build) -> list[CellSize]:
    """The sizes that a view and then its cells would have. Writes nothing, and reads as much as making the view."""
    selected, reader = build.config.selected, InputReader(build)
    assert selected is not None, "only a view has cells"
    sink = Cells(selected.by)
    for index in range(len(build.inputs)):
        for made in reader.chunks(index, Span()):
            assert isinstance(made, ChunkResult), "a corpus is read as documents"
            sink.extend(split_documents(apply_rules(made, build.config).documents), 0, 0)
    found = sink.finish(Receipt(key=(0, 0))).cells
    return [
        CellSize(folder=_folder(selected.by, label), documents=found[label].documents, tokens=found[label].tokens)
        for label in sorted(found, key=lambda label: (label == ALL, label))
    ]


def write_views(build: Build, receipts: Sequence[Receipt]) -> Manifest:
    """Write the cells of a view, each with its manifest, and all files of the view but its report and manifest.

    Memory does not grow with the documents: the stretches in the receipts are spooled.

    Raises:
        BuildError: no document is selected, or there are too many cells.
    """
    selected, store = build.config.selected, build.workspace.store
    assert selected is not None, "only a view has cells"
    cells, left_out = defaultdict[str, CellCounts](CellCounts), defaultdict[int, Counter[str]](Counter)
    places = defaultdict[str, list[tuple[int, int]]](list)
    out = build.outputs[0].store
    with temporary_file() as spool, open_corpus(build.corpora[0][0], generation=build.corpora[0][1]) as corpus:
        for receipt in side_by_side(store, partial(read_receipt, store, WRITE), (one.key for one in receipts)):
            for label, found in receipt.cells.items():
                cells[label].add(found)
                places[label].append((spool.tell(), len(found.stretches)))
                spool.write(found.stretches)
            for source in receipt.outputs[0].sources:
                left_out[source.index].update(source.left_out)
            if len(cells) > 1 + _MOST_CELLS:
                raise BuildError(
                    f"the columns {', '.join(selected.by)} have more than {_MOST_CELLS:,} combinations of values",
                    hint=f"divide by other columns, and {build.start_over}",
                )
        if not cells:
            total = sum(left_out.values(), Counter[str]())
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(total.items()))
            raise BuildError(
                f"no document is selected: {corpus.num_documents:,} read, {reasons}",
                hint=f"give other conditions, and {build.start_over}",
            )
        spool.flush()
        spooled = np.memmap(spool, np.uint8, "r")
        stretches = {
            label: (spooled[at : at + size].view("<i8").reshape(-1, _STRETCH_FIELDS) for at, size in places[label])
            for label in cells
        }
        out.delete(*files_of_cells(out))
        sources, labels = corpus.sources(), sorted(cells.keys() - {ALL})

        def write_cell(label: str) -> Manifest:
            kept, below = cells[label], out.below(_folder(selected.by, label))
            of_cell = [_of_cell(source, *kept.sources.get(index, (0, 0))) for index, source in enumerate(sources)]
            values = dict(zip(selected.by, json.loads(label), strict=True))
            manifest = _write(
                build, corpus, below, total=kept, stretches=stretches[label], sources=of_cell, values=values
            )
            below.put(names.MANIFEST, encode_manifest(manifest))
            return manifest

        manifests = dict(zip(labels, side_by_side(out, write_cell, labels, are_slow=True), strict=True))
        _check_apart(out, {_folder(selected.by, label): manifest for label, manifest in manifests.items()})
        if selected.by:
            out.put(names.MIX, _mix(selected.by, manifests).encode())
        kept = cells[ALL]
        of_view = [
            kept_source(source, *kept.sources.get(index, (0, 0)), left_out[index])
            for index, source in enumerate(sources)
        ]
        return _write(build, corpus, out, total=kept, stretches=stretches[ALL], sources=of_view, values={})


def _check_apart(out: Store, manifests: Mapping[str, Manifest]) -> None:
    """Refuse cells that share a folder, because their file system does not tell all names apart.

    Raises:
        BuildError: with two of them.
    """
    alike = defaultdict[str, list[str]](list)
    for folder in manifests:
        alike[unicodedata.normalize("NFC", folder).casefold()].append(folder)
    for folders in alike.values():
        for folder in folders if len(folders) > 1 else ():
            if out.get(names.in_folder(folder, names.MANIFEST)) != encode_manifest(manifests[folder]):
                raise BuildError(
                    f"the cells {' and '.join(folders[:2])} would share a folder in {out.location}, whose file system "
                    "ignores case or accents",
                    hint="give an --out on another file system, or divide by another column",
                )


def _folder(by: Sequence[str], label: str) -> str:
    """The folder of a cell: ``topic=a/quality=3``.

    Raises:
        BuildError: a value is too long for the name of a folder.
    """
    folders = [f"{_spelled(name)}={_spelled(value)}" for name, value in zip(by, json.loads(label), strict=False)]
    for name, folder in zip(by, folders, strict=False):
        if len(folder.encode()) > _MAX_NAME_BYTES:
            raise BuildError(
                f"column {name} has the value {folder.partition('=')[2][:40]}..., whose folder would have a name of "
                f"{len(folder.encode())} bytes, and {_MAX_NAME_BYTES} is the most",
                hint="divide by another column, or join one with shorter values",
            )
    return "/".join(folders)


def _spelled(value: str | None) -> str:
    """A name or value in the name of a folder: signs of ASCII that it should not have as ``%2F`` and the like."""
    if value is None:
        return MISSING
    head, rest = ("%5F", value[1:]) if value == MISSING else ("", value)
    return head + "".join(sign if ord(sign) > _LAST_ASCII else quote(sign, safe=" ,+@:()") for sign in rest)


def _mix(by: Sequence[str], manifests: dict[str, Manifest]) -> str:
    """A mix of all cells. At temperature 1, each document is read as often as any other."""
    lines = [f"# {counted(len(manifests), 'cell')} by {', '.join(by)}"]
    for label, manifest in manifests.items():
        folder = json.dumps(_folder(by, label), ensure_ascii=False)
        size = f"{counted(manifest.num_documents, 'document')}, {counted(manifest.num_tokens, 'token')}"
        lines.append(f"{folder} = {folder}  # {size}")
    return "\n".join([lines[0], "weights = { temperature = 1.0 }", "", "[corpora]", *lines[1:], ""])


def _of_cell(source: SourceInfo, documents: int, tokens: int) -> SourceInfo:
    """A source with the counts of a cell. Documents are left out of it for one reason."""
    return kept_source(source, documents, tokens, Counter({NOT_SELECTED: source.documents - documents}))


def _write(
    build: Build,
    corpus: Corpus,
    out: Store,
    *,
    total: CellCounts,
    stretches: Iterable[Stretches],
    sources: Sequence[SourceInfo],
    values: dict[str, str | None],
) -> Manifest:
    """Write all files of a view but its manifest, and return that.

    Args:
        sources: those of the corpus, with the counts of the view.
        values: of the columns of a cell.
    """
    files, base = dict[str, FileFacts](), corpus.base if isinstance(corpus, View) else corpus
    kept = KeptWriter(base.fingerprint)
    with contextlib.closing(kept), side_file(out, names.KEPT, files) as file:
        for some in stretches:
            kept.add(some)
        fingerprint = kept.finish(file)
    with side_file(out, names.SOURCE_TABLE, files) as file:
        write_sources(file, sources)
    with side_file(out, names.TOKENIZER, files) as file:
        file.write(saved_tokenizer(build))
    reasons = sum((Counter(source.left_out) for source in sources), Counter[str]())
    paths = ((one.argument, one.path, one.num_bytes) for one in sources)
    return Manifest(
        format_version=FORMAT_VERSION,
        num_documents=total.documents,
        num_tokens=total.tokens,
        num_shards=0,
        num_bytes=0,
        text_bytes=sum(source.text_bytes for source in sources),
        dtype=build.dtype,
        columns=build.columns,
        fingerprints=Fingerprints(content=fingerprint, recipe=recipe_fingerprint(build.config, build.tokenizer, paths)),
        tokenizer=build.tokenizer,
        arguments=build.arguments,
        build=build.config,
        records=Records(
            read=sum(source.records_read for source in sources),
            written=total.documents,
            left_out=dict(sorted(reasons.items())),
            with_special_text=None,
        ),
        document_lengths=total.lengths,
        files=files,
        num_targets=total.targets if corpus.has_spans else None,
        base=Base(
            path=_path_from(out, base.location),
            content=base.fingerprint,
            generation=base.num_generations - 1,
            cell=values,
            carries=kept.carries,
        ),
    )


def _path_from(view: Store, location: str) -> str:
    """The place of a base as a view names it: relative, if both are on this machine."""
    place = real_location(location)
    if is_uri(place) or view.local_path("") is None:
        return place
    return os.path.relpath(place, real_location(view.location))
