"""Generations that do not belong together.

What an append adds, keeps and refuses is in the transcripts, and in tests/contract, in test_promise_02_builder.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.corpora import rewrite_manifest
from tests.pipeline.places import SPLIT, build, write
from tokshard import open_corpus
from tokshard.errors import DamagedCorpusError
from tokshard.format import names


def test_a_generation_of_the_other_split_is_refused_even_where_its_manifest_says_that_it_follows(place: Path) -> None:
    build(place, **SPLIT)
    build(place, write(place / "b.jsonl", [f"more {number}" for number in range(40)]), append=True, **SPLIT)
    train, validation = (place / "out" / name for name in (names.TRAIN, names.VALIDATION))
    folder = names.generation_folder(1)
    shutil.rmtree(validation / folder)
    shutil.copytree(train / folder, validation / folder)
    previous = json.loads((validation / names.MANIFEST).read_bytes())["manifest_sha256"]
    rewrite_manifest(validation / folder, lambda fields: fields["generation"].update(previous=previous))
    with pytest.raises(DamagedCorpusError, match="another split than the generation before it"):
        open_corpus(validation)
