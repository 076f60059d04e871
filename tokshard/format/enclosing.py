"""Whether a place is inside a corpus, where its files would count as damage, or be removed with the corpus."""

from __future__ import annotations

from tokshard.errors import TokshardError, UsageError
from tokshard.format import names
from tokshard.format.opening import read_manifest
from tokshard.store import Store, locate, real_location, side_by_side


def check_outside_corpora(out: str) -> None:
    """Refuse a place in a folder of a corpus, at any depth.

    Checks all folders above it for a manifest, up to the root of the file system or of the bucket. In a bucket the
    requests run concurrently and take as long as one.

    Raises:
        UsageError: one of them holds a corpus.
    """
    folders = _folders_above(real_location(out))
    if not folders:
        return
    for folder, is_corpus in zip(folders, side_by_side(folders[0], _is_corpus, folders), strict=True):
        if is_corpus:
            raise UsageError(
                f"--out {out} lies inside the corpus {folder.location}",
                hint="give a place outside of it; what is added to a corpus goes into it by 'tokshard build --append'",
            )


def _folders_above(location: str) -> list[Store]:
    """The folders above a place, all as parts of one store, from the root down."""
    path: list[str] = []
    root, name = locate(location)
    while name:
        path.insert(0, name)
        root, name = locate(root.location)
    return [root.below("/".join(path[:depth])) for depth in range(len(path))]


def _is_corpus(store: Store) -> bool:
    try:
        store.stat(names.MANIFEST)
        read_manifest(store)
    except (OSError, TokshardError):  # there is none, or it may not be read
        return False
    return True
