"""The corpora that a location means, and unique names for several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tokshard.format import names
from tokshard.store import Store, open_store, present

_SPLITS = (names.TRAIN, names.VALIDATION)


def corpora_at(locations: Sequence[str]) -> list[str]:
    """The corpora that each location means: itself, both parts of a split, or all corpora in a folder.

    A location without a corpus is returned unchanged, so that opening it raises the right error.
    Lists each folder once.

    Raises:
        UsageError: a location is of an unknown scheme.
    """
    return [corpus for location in locations for corpus in list(_inside(location)) or [location]]


def trained_on(location: str) -> dict[str, str]:
    """The corpora of a folder of corpora, or of a split, by short names, without those for validation.

    Empty if the location is no such folder: then it stands for itself.
    """
    found = corpora_at([location])
    kept = [corpus for corpus in found if not corpus.endswith(f"/{names.VALIDATION}")]
    return {} if found == [location] else dict(zip(short_names(kept), kept, strict=True))


def _inside(location: str) -> Iterator[str]:
    store = open_store(location)
    try:
        listed = store.names()
        found = {name.rstrip("/") for name in listed}
        if names.MANIFEST in found or names.WORK in found:
            return
        split = [store.where(part) for part in _SPLITS if part in found and _is_corpus(store.below(part))]
        if split:
            yield from split
            return
        for name in sorted(name.rstrip("/") for name in listed if name.endswith("/")):
            below = store.below(name)
            if _is_corpus(below):
                yield store.where(name)
            else:
                yield from (below.where(part) for part in _SPLITS if _is_corpus(below.below(part)))
    except OSError:  # nothing is there, or a web server, which lists no folders
        return


def _is_corpus(store: Store) -> bool:
    return names.MANIFEST in present(store)


def short_names(locations: Sequence[str]) -> list[str]:
    """For each location the end of its path that no other one has; a part of a split is never named alone."""
    parts = [location.rstrip("/").split("/") for location in locations]
    counts = Counter(tuple(path[-length:]) for path in set(map(tuple, parts)) for length in range(1, len(path) + 1))

    def short(path: list[str]) -> str:
        least = 2 if path[-1] in _SPLITS else 1
        lengths = (length for length in range(least, len(path)) if counts[tuple(path[-length:])] == 1)
        return "/".join(path[-next(lengths, len(path)) :])

    return [short(path) for path in parts]
