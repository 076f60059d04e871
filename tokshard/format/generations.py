"""The generations of a corpus: which ones exist, whether they belong together, and their manifests as one.

An append adds a corpus of its own in a folder of the first one. It can be opened alone. Earlier generations do not
change, so their readers can continue.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.format.manifest import (
    FileFacts,
    Fingerprints,
    Manifest,
    Records,
    TemplateDrop,
    canonical_json,
    joined_lengths,
)


def generation_numbers(found: Iterable[str]) -> list[int]:
    """The generations after the first that have a folder, ascending.

    Args:
        found: the names in the folder of the corpus; names of folders may end in a slash.
    """
    return sorted(filter(None, (names.generation_number(name.rstrip("/")) for name in found)))


def check_generation(before: Manifest, before_hash: str, manifest: Manifest, *, number: int, path: str) -> None:
    """Refuse a manifest that does not continue the generation before it.

    Args:
        before_hash: ``manifest_sha256`` of that generation.

    Raises:
        DamagedCorpusError: it was appended to something else.
    """
    found = manifest.generation
    expected = f"expected generation {number} after the manifest {before_hash[:12]}..."
    if found is None:
        raise DamagedCorpusError(f"{path} is of no generation, {expected}")
    if (found.number, found.previous) != (number, before_hash):
        raise DamagedCorpusError(
            f"{path} is of generation {found.number} after the manifest {found.previous[:12]}..., {expected}"
        )
    if _shared_facts(before) != _shared_facts(manifest):
        raise DamagedCorpusError(
            f"{path} has another tokenizer, other columns or another split than the generation before it"
        )


def _shared_facts(manifest: Manifest) -> tuple[object, ...]:
    """The facts that all generations of a corpus share."""
    tokenizer = manifest.tokenizer
    delimiters = tokenizer.eos_id, tokenizer.bos_id
    return tokenizer.canonical_sha256, delimiters, manifest.dtype, manifest.columns, manifest.build.split


_COUNTS = ("num_documents", "num_tokens", "num_shards", "num_bytes", "text_bytes")


def combined_manifest(manifests: Sequence[Manifest]) -> Manifest:
    """One manifest for the documents of several generations in order: counts are added up.

    The newest generation gives the configuration and the library of the tokenizer. `files` has the files of all.
    """
    first, last = manifests[0], manifests[-1]
    if last.generation is None or len(manifests) == 1:
        return first
    left_out = Counter[str]()
    for each in manifests:
        left_out.update(each.records.left_out)
    recipes = b"tokshard recipes 1\n" + canonical_json([each.fingerprints.recipe for each in manifests])
    return msgspec.structs.replace(
        last,
        **{name: sum(getattr(each, name) for each in manifests) for name in _COUNTS},
        num_targets=_sum_known([each.num_targets for each in manifests]),
        fingerprints=Fingerprints(content=last.generation.content, recipe=hashlib.sha256(recipes).hexdigest()),
        arguments=[argument for each in manifests for argument in each.arguments],
        records=Records(
            read=sum(each.records.read for each in manifests),
            written=sum(each.records.written for each in manifests),
            left_out=dict(sorted(left_out.items())),
            with_special_text=_sum_known([each.records.with_special_text for each in manifests]),
            padding_ids=sum(each.records.padding_ids for each in manifests),
            template_drops=dict(_template_drops(manifests)),
        ),
        document_lengths=joined_lengths(each.document_lengths for each in manifests),
        files=dict(_files(manifests)),
    )


def _template_drops(manifests: Sequence[Manifest]) -> Iterator[tuple[str, TemplateDrop]]:
    for kind in sorted({kind for each in manifests for kind in each.records.template_drops}):
        found = [each.records.template_drops[kind] for each in manifests if kind in each.records.template_drops]
        yield kind, msgspec.structs.replace(found[0], count=sum(one.count for one in found))


def _sum_known(counts: Sequence[int | None]) -> int | None:
    """The sum of some counts; None if one is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _files(manifests: Sequence[Manifest]) -> Iterator[tuple[str, FileFacts]]:
    for number, manifest in enumerate(manifests):
        for name, facts in manifest.files.items():
            yield names.in_folder(names.generation_folder(number), name), facts
