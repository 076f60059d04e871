"""A saved cursor of a corpus that has grown since: refused, because the corpus would be read from its start again."""

from __future__ import annotations

from collections.abc import Sequence

from tokshard.errors import PlanMismatchError
from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.cursor_json import SavedCursor


def check_growth(saved: SavedCursor, names: Sequence[str], sources: Sequence[TokenSource]) -> None:
    """Refuse a cursor that read an earlier generation of a corpus of the plan.

    Args:
        saved: the saved cursor.
        names, sources: of the plan.

    Raises:
        PlanMismatchError: it did, and names the ways to continue.
    """
    read = {corpus.fingerprint for corpus in saved.corpora}
    gone = read - {source.fingerprint for source in sources}
    for name, source in zip(names, sources, strict=True):
        if source.fingerprint in read:
            continue  # the run read this corpus as it is; an earlier generation was another corpus of the run
        earlier = source.earlier_fingerprints
        for generation, fingerprint in enumerate(earlier):
            if fingerprint in gone:
                raise PlanMismatchError(
                    f"corpus {name!r} has grown: the run reads it up to generation {generation}, the plan up to "
                    f"generation {len(earlier)}",
                    hint=f"give generations={{{name!r}: {generation}}} to go on; to read what was appended too, add "
                    f"its folder 'generation-{generation + 1:02d}' as a corpus of its own, and "
                    "load_state_dict(state, corpora='plan')",
                )
