"""A plan from a file: the arguments of `StreamPlan` as TOML, for the commands that need a plan."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta

from tokshard.errors import UsageError
from tokshard.forking import decodable
from tokshard.numbers import ceil_div, read_bytes, read_count, read_length
from tokshard.run_files.checkpoint_directory import is_checkpoint, state_of
from tokshard.run_files.strict_toml import change_paths, convert, example_of, key, path_beside, read_toml
from tokshard.runtime.bytes.cache import CACHE_BYTES, MEMORY_BYTES, Cache
from tokshard.runtime.order.windows import Pack
from tokshard.runtime.rows.steps import Deal
from tokshard.store import is_uri

_HINT = "the keys are the arguments of StreamPlan, and global_batch_size, uneven, deal and mask of its loader"

_NOT_OF_PLANS = {"global_batch_size", "uneven", "deal", "mask", "memory_bytes", "cache_dir", "cache_bytes"}
"""Keys of a mix that are arguments of a loader or of its cache."""

Positive = Annotated[int, Meta(ge=1)]


@decodable
@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Corpora and how they are read. Keys that are not here are arguments of `StreamPlan` and `Cache`, which say more.

    Args:
        global_batch_size: samples of an optimizer step, over all ranks.
        epochs: for a finite pass over one corpus; 0: endless.
        schedule: weights that change at a sample, as `[[1_000_000, { code = 0.5, prose = 0.5 }]]`.
        uneven: whether ranks that do not divide the batch are refused or padded.
        deal: which rank gets which rows of a step: in their order, or so that the cost of attention is even.
        mask: name to files that list documents to keep out of the loss, one number per line, or as .npy.
        memory_bytes: limit in the memory of each process, for corpora in buckets and on web servers, including the
            trainer's evaluation corpora. 2.5 windows of each corpus should fit.
    """

    corpora: Annotated[dict[str, str], Meta(min_length=1)] = field(
        metadata=key('corpora = { code = "shards/code" }', is_path=True)
    )
    seq_len: Positive = field(metadata=key("seq_len = 4096", read=read_length))
    global_batch_size: Positive = field(metadata=key("global_batch_size = 512", read=read_count))
    weights: dict[str, float] = field(default_factory=dict, metadata=key("weights = { code = 0.7, prose = 0.3 }"))
    repeats: dict[str, float] = field(default_factory=dict, metadata=key("repeats = { good = 4 }"))
    seed: int = field(default=0, metadata=key("seed = 17"))
    epochs: int = field(default=0, metadata=key("epochs = 1"))
    generations: dict[str, int] = field(default_factory=dict, metadata=key("generations = { code = 0 }"))
    block_tokens: int | None = field(default=None, metadata=key("block_tokens = 65536", read=read_length))
    window_blocks: int | None = field(default=None, metadata=key("window_blocks = 1024", read=read_length))
    num_streams: int = field(default=1, metadata=key("num_streams = 64"))
    take: float | dict[str, float] | None = field(default=None, metadata=key("take = { code = 0.1 }"))
    pack: Pack | dict[str, Pack] | None = field(default=None, metadata=key('pack = { chat = "whole" }'))
    max_epochs: float | dict[str, float] | None = field(default=None, metadata=key("max_epochs = { code = 4 }"))
    on_max_epochs: Literal["stop", "warn"] = field(default="stop", metadata=key('on_max_epochs = "warn"'))
    start_epoch: dict[str, int] = field(default_factory=dict, metadata=key("start_epoch = { code = 1 }"))
    schedule: list[tuple[int, dict[str, float]]] = field(
        default_factory=list, metadata=key("schedule = [[1_000_000, { code = 0.5, prose = 0.5 }]]")
    )
    uneven: Literal["refuse", "pad"] = field(default="refuse", metadata=key('uneven = "pad"'))
    deal: Deal = field(default="order", metadata=key('deal = "cost"'))
    mask: dict[str, list[str]] = field(
        default_factory=dict, metadata=key('mask = { code = ["opted-out.txt"] }', is_path=True)
    )
    allow_small_blocks: bool = field(default=False, metadata=key("allow_small_blocks = true"))
    allow_overlap: bool = field(default=False, metadata=key("allow_overlap = true"))
    memory_bytes: int = field(default=MEMORY_BYTES, metadata=key('memory_bytes = "2GiB"', read=read_bytes))
    cache_dir: str | None = field(default=None, metadata=key('cache_dir = "/local/tokshard"', is_path=True))
    cache_bytes: int = field(default=CACHE_BYTES, metadata=key('cache_bytes = "500GiB"', read=read_bytes))

    def arguments(self) -> dict[str, Any]:
        """The arguments of `StreamPlan`.

        Raises:
            PlanError: a size of the cache is refused.
        """
        names = {item.name for item in dataclasses.fields(Mix)} - _NOT_OF_PLANS
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        cache = Cache(memory_bytes=self.memory_bytes, cache_dir=self.cache_dir, cache_bytes=self.cache_bytes)
        empty = {name: given[name] or None for name in ("weights", "repeats", "epochs")}  # which say nothing
        return given | empty | {"cache": cache}

    def masks(self) -> Iterator[tuple[str, str]]:
        """Each file that lists documents, after the name of its corpus."""
        yield from ((name, file) for name, files in self.mask.items() for file in files)


@decodable
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerData(Mix):
    """The ``[data]`` table of a trainer's recipe: a mix, and how the trainer loads it.

    Args:
        on_resume: changes of the recipe that a continued run accepts: `corpora`, `seq_len`, or both. New weights and
            batch sizes hold in any case.
        batch_ramp: other batch sizes, each from a step on, as `[[1_000, 256]]`; steps count from 1.
    """

    on_resume: list[Literal["corpora", "seq_len"]] = field(
        default_factory=list, metadata=key('on_resume = ["corpora"]')
    )
    batch_ramp: list[tuple[Positive, Positive]] = field(
        default_factory=list, metadata=key("batch_ramp = [[1_000, 256], [5_000, 512]]")
    )

    def batch_size(self, step: int) -> int:
        """Samples of a step over all ranks; steps count from 1."""
        return next((size for first, size in reversed(self.batch_ramp) if step >= first), self.global_batch_size)

    def rows_of_rank(self, num_ranks: int) -> list[int]:
        """Rows that a rank has in a step, for each batch size of the recipe."""
        return [ceil_div(size, num_ranks) for size in (self.global_batch_size, *(size for _, size in self.batch_ramp))]


def load_mix(
    location: str, options: Mapping[str, Any] | None = None, *, defaults: Mapping[str, Any] | None = None
) -> Mix:
    """A mix from a TOML file or one corpus directory; `TrainerData` from a trainer's recipe or checkpoint.

    Paths in a file are relative to it; those in `options` are relative to the working directory.

    Args:
        location: a file, a checkpoint directory or a corpus directory.
        options: name to value; None keeps the value of the file.
        defaults: name to value, for keys that neither has.

    Raises:
        UsageError: the file does not exist or is not TOML, a key is unknown or missing, or a value has the wrong type.
    """
    prefix, fields = "", {}
    kind: type[Mix] = Mix
    if location.endswith(".toml") or os.path.isfile(location):
        fields = read_toml(location, hint="give a mix such as mix.toml, or a corpus directory")
        if isinstance(fields.get("data"), Mapping):
            kind, fields, prefix = TrainerData, dict(fields["data"]), "data."
        fields = change_paths(fields, kind, partial(path_beside, location))
    elif is_checkpoint(location):
        kind, fields, prefix = TrainerData, dict(state_of(location).config.get("data", {})), "data."
    else:
        fields = {"corpora": {os.path.basename(os.path.normpath(location)): location}}
    given = {name: value for name, value in (options or {}).items() if value is not None}
    fields = {**(defaults or {}), **fields, **given}
    for name in ("corpora", "seq_len", "global_batch_size"):
        if name not in fields and not is_uri(location) and not os.path.exists(location):
            raise UsageError(f"{location} does not exist", hint="give a mix.toml, a corpus directory or a checkpoint")
        if name not in fields:
            is_option = name in (options or {}) and name != "corpora"
            option = f", or --{name.replace('_', '-')} on the command line" if is_option else ""
            hint = f"give {example_of(Mix, name)} in a mix.toml{option}"
            hint += "; runs and checkpoints have to be on this machine" if is_uri(location) and not prefix else ""
            raise UsageError(f"{location}: no {prefix}{name}", hint=hint)
    return convert(fields, kind, where=location, hint=_HINT, prefix=prefix)
