"""Files of documents tokenized by another tool: how each is recognized, divided and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tokshard.errors import BadSourceError
from tokshard.interop.tokens import ends, flat, megatron, sample_index, samples
from tokshard.interop.tokens.batches import TokenBatch, TokenSpec, damaged
from tokshard.interop.tokens.loss import NO_LOSS, LossField, check_loss
from tokshard.pipeline.options import TOKENS
from tokshard.pipeline.sources.division import INDIVISIBLE, LINES, Divisibility, Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import needed_names, store_of
from tokshard.pipeline.sources.protocol import Format, Read
from tokshard.pipeline.sources.records import RecordSpec, typed_columns
from tokshard.store import Entry, Store


def _reader(read: Callable[[Store, str, int, int | None, TokenSpec], Iterator[TokenBatch]]) -> Read:
    """The reader of a format whose documents are ranges of bytes of a file.

    Args:
        read: yields the documents whose first byte lies in a range of a file; without an end, to the end of the file.
    """

    def chunks(input_: Input, span: Span, spec: RecordSpec) -> Iterator[tuple[None, TokenBatch]]:
        tokens = _token_spec(spec)
        has_loss = _loss_file(input_, tokens.loss_field) is not None
        check_loss(input_.location, has_loss=has_loss, is_wanted=tokens.has_loss, wanted=tokens.loss_field)
        for batch in read(*store_of(input_.location), span.start, span.stop, tokens):
            yield None, with_columns(batch, spec, batch.columns)

    return chunks


def _loss_file(input_: Input, wanted: str | None) -> LossField | None:
    """The mask in a file next to the file of ids, if there is one and the user wants it."""
    found = tuple(need for need in input_.needs if need in _MASKS)
    return LossField(name=needed_names(input_.location, found)[0]) if found and wanted != NO_LOSS else None


def _token_spec(spec: RecordSpec) -> TokenSpec:
    assert spec.tokens is not None
    return replace(spec.tokens, kept=tuple(spec.kept_paths))


def with_columns(batch: TokenBatch, spec: RecordSpec, values: Mapping[str, Sequence[Any]]) -> TokenBatch:
    """A batch with its kept columns in their requested types.

    Args:
        values: for some paths, one value for each document; other paths have no values.
    """
    if not spec.columns:
        return batch
    missing = [None] * len(batch.ends)
    columns, problems = typed_columns(spec, [values.get(path, missing) for path in spec.kept_paths])
    columns_by_name = dict(zip(spec.columns, columns, strict=True))
    return replace(batch, columns=columns_by_name, problems={**problems, **batch.problems})


def _complete_pairs(ids: str, index: str, store: Store, entries: Sequence[Entry], is_folder: bool) -> Sequence[Entry]:
    """Refuse a folder that lacks one file of a pair: its documents would be missing.

    Args:
        ids, index: suffixes of the two files.

    Raises:
        BadSourceError: one file of a pair is missing; it names the other.
    """
    found = {end: {e.name.removesuffix(end) for e in entries if e.name.endswith(end)} for end in (ids, index)}
    if not is_folder or not found[index]:
        return entries  # files of another format may end in the same
    for stem in sorted(found[ids] ^ found[index]):
        there, missing = (ids, index) if stem in found[ids] else (index, ids)
        if there == ids and sample_index.lists(store, sample_index.index_name(stem), sample_index.CHUNKS):
            continue
        raise BadSourceError(
            f"{store.where(stem + there)} has no {stem.rpartition('/')[2]}{missing} next to it",
            hint="fetch the missing file, or give the files to read instead of their directory",
        )
    return entries


def _complete_masks(store: Store, entries: Sequence[Entry], is_folder: bool) -> Sequence[Entry]:
    """Refuse a folder with a mask of OLMo-core whose ids are missing.

    Raises:
        BadSourceError: with the mask.
    """
    masked = {flat.mask_name(entry.name) for entry in entries if flat.mask_name(entry.name) != entry.name}
    for entry in entries if is_folder else ():
        base = entry.name.rpartition("/")[2]
        if base.startswith(flat.MASK) and base.endswith(ends.NPY_SUFFIX) and entry.name not in masked:
            raise BadSourceError(
                f"{store.where(entry.name)} has no {base.replace(flat.MASK, flat.IDS)} next to it",
                hint="fetch the missing file, or give the files to read instead of their directory",
            )
    return entries


def _in_listed_order(store: Store, entries: Sequence[Entry], is_folder: bool) -> Sequence[Entry]:
    """Files in their order; files listed in an ``index.json`` in its order, so ``chunk-0-10`` is not third.

    MDS can keep a shard both compressed and uncompressed; then it is read once.

    Raises:
        BadSourceError: an index is damaged, or lists a missing file.
    """
    names = {entry.name for entry in entries}
    plain, *packed = samples.MDS_SUFFIXES
    twins = {name.removesuffix(plain) + suffix for name in names if name.endswith(plain) for suffix in packed}
    found = [entry for entry in entries if entry.name not in twins]
    if not is_folder:
        return found
    needing = {
        _folder(name)
        for name in names
        if name.endswith(samples.MDS_SUFFIXES)
        or (name.endswith(samples.LITDATA_SUFFIX) and megatron.index_name(name) not in names)
    }
    ordered = list(found)
    places = {entry.name: place for place, entry in enumerate(found)}
    for name in places:
        folder = _folder(name)
        if name != folder + sample_index.INDEX:
            continue
        try:
            index = sample_index.read_index(store, name)
        except BadSourceError:
            if folder in needing:
                raise
            continue  # it belongs to something else, like an index that lists no existing file
        listed, missing = [], []
        for either in sample_index.listed_names(index):
            there = [places[folder + base] for base in either if folder + base in places]
            listed += there
            missing += [] if there else [either[0] if either else "a file"]
        if missing and (listed or folder in needing):
            raise damaged(store, name, f"it lists {missing[0]}, which is not there")
        for place, file in zip(sorted(listed), listed, strict=True):
            ordered[place] = found[file]
    return ordered


def _folder(name: str) -> str:
    return name[: name.rfind("/") + 1]


def _is_listed_in(field: str) -> Callable[[Store, str], bool]:
    return lambda store, name: sample_index.lists(store, sample_index.index_name(name), field)


def _format(name: str, read: Any, divisibility: Divisibility, *suffixes: str, **more: Any) -> Format:
    options = {"needs": _INDEX if divisibility == INDIVISIBLE else (), **more}
    return Format(
        name=name, reads=TOKENS, read=_reader(read), divide=lambda *_: divisibility, suffixes=suffixes, **options
    )


_INDEX = (("/", sample_index.INDEX),)
"""What files of samples need: the index in their folder."""

_MEGATRON = (megatron.SUFFIX, megatron.INDEX_SUFFIX)

_MASKS = (("", ends.LOSS_SUFFIX), (f"*{flat.IDS}", flat.MASK))
"""The mask that a file needs if there is one beside it."""


def _with_mask(mask: tuple[str, str], form: Format) -> Format:
    """A format whose files may have a mask beside them; such a file has a variant of the format that needs the mask."""
    masked = replace(form, needs=(*form.needs, mask))

    def examine(store: Store, entry: Entry) -> Format:
        (name,) = needed_names(entry.name, (mask,))
        try:
            is_masked = name != entry.name and bool(store.stat(name))
        except OSError:
            is_masked = False
        return masked if is_masked else form

    return replace(form, examine=examine, loss=_loss_file)


FORMATS = (
    _format(
        "megatron",
        megatron.read,
        LINES,
        megatron.SUFFIX,
        needs=(_MEGATRON,),
        helpers=(f"*{megatron.INDEX_SUFFIX}",),
        omitted=megatron.SUFFIX,  # Megatron-LM names its two files by their common prefix
        arrange=partial(_complete_pairs, *_MEGATRON),
    ),
    _with_mask(
        _MASKS[0],
        _format(
            "datatrove",
            ends.read_ds,
            LINES,
            ends.DS_SUFFIX,
            needs=(("", ".index"),),
            helpers=(f"*{ends.DS_INDEX_SUFFIX}", "*.ds.metadata", f"*{ends.DS_SUFFIX}{ends.LOSS_SUFFIX}"),
            arrange=partial(_complete_pairs, ends.DS_SUFFIX, ends.DS_INDEX_SUFFIX),
        ),
    ),
    _format(
        "mds",
        samples.read_mds,
        INDIVISIBLE,
        *samples.MDS_SUFFIXES,
        helpers=(f"*/{sample_index.INDEX}",),
        fits=_is_listed_in(sample_index.SHARDS),
        arrange=_in_listed_order,
        columns=lambda input_, spec: samples.mds_columns(*store_of(input_.location), _token_spec(spec)),
    ),
    _format(
        "litdata",
        samples.read_litdata,
        INDIVISIBLE,
        samples.LITDATA_SUFFIX,
        fits=_is_listed_in(sample_index.CHUNKS),
    ),
    _format(
        "npy",
        ends.read_npy,
        LINES,
        ends.NPY_SUFFIX,
        needs=((ends.NPY_SUFFIX, ends.OFFSETS_SUFFIX),),
        helpers=(f"*{ends.OFFSETS_SUFFIX}",),
    ),
    _with_mask(
        _MASKS[1],
        _format(
            "flat",
            flat.read,
            LINES,
            ends.NPY_SUFFIX,
            helpers=(f"*/{flat.MASK}*{ends.NPY_SUFFIX}",),
            arrange=_complete_masks,
        ),
    ),
)
