"""The stages of ``--dedup exact``, as jobs are asked for them."""

from __future__ import annotations

from tokshard.pipeline.workspace.places import Stage

HASH, DUPLICATES, WRITE = STAGES = ("hash", "duplicates", "write")
"""Values of ``--stage``, in the order in which a build with ``--dedup exact`` needs them."""

STAGE_NAMES = {Stage.HASHING: HASH, Stage.DUPLICATES: DUPLICATES, Stage.ENCODING: WRITE}
