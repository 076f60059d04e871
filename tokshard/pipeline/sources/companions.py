"""Files without which a file of ids cannot be read, such as its index. An input has changed when one of them has."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping

from tokshard.errors import BadSourceError
from tokshard.interop.tokens import ends, megatron, sample_index
from tokshard.pipeline.sources.inputs import DATATROVE, FLAT, LITDATA, MDS, MEGATRON, NPY
from tokshard.store import Entry, Store

COMPANIONS: Mapping[str, Callable[[str], tuple[str, ...]]] = {
    MEGATRON: lambda name: (megatron.index_name(name),),
    DATATROVE: lambda name: (ends.ds_index_name(name),),
    MDS: lambda name: (sample_index.index_name(name),),
    LITDATA: lambda name: (sample_index.index_name(name),),
    NPY: lambda name: (ends.offsets_name(name),),
    FLAT: lambda _: (),
}
"""Format to a function from the name of a file of ids to the names of the files that it needs."""

_SUFFIXES = (megatron.INDEX_SUFFIX, ends.DS_INDEX_SUFFIX, ".ds.metadata", ends.OFFSETS_SUFFIX, f"/{sample_index.INDEX}")


def is_companion(name: str) -> bool:
    """Whether a name is that of a file which only helps to read another one."""
    return f"/{name}".endswith(_SUFFIXES) or fnmatch.fnmatchcase(f"/{name}", "*/meta/*counts*.csv")


def has_companions(store: Store, name: str, form: str) -> bool:
    """Whether all files are there that a file of this format needs, and an index of samples is one."""
    try:
        for other in COMPANIONS[form](name):
            store.stat(other)
    except OSError:
        return False
    field = {MDS: sample_index.SHARDS, LITDATA: sample_index.CHUNKS}.get(form)
    return field is None or sample_index.lists(store, sample_index.index_name(name), field)


def with_companions(store: Store, entry: Entry, form: str) -> Entry:
    """The facts of a file, with a version that changes with those of the files that it needs.

    Raises:
        BadSourceError: one cannot be looked at.
    """
    if form not in COMPANIONS:
        return entry
    versions = [entry.version]
    for name in COMPANIONS[form](entry.name):
        try:
            versions.append(store.stat(name).version)
        except OSError as error:
            raise BadSourceError(
                f"{store.where(name)} cannot be read: {error.strerror}; {store.where(entry.name)} needs it as {form}",
                hint="put it there, or say with --format what the file is",
            ) from error
    return dataclasses.replace(entry, version="+".join(versions))
