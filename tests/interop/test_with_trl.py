"""Every chat template with marked answers that TRL ships, by tokshard and by `transformers`: the same ids and masks."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given

from tests.interop.real_text import of_transformers
from tests.pipeline.encode.chat.chats import (
    CLASSES,
    MEANT,
    NOT_RENDERED,
    NOTHING_TO_LEARN,
    SPECIAL,
    VARIABLES,
    ChatEncoder,
    ChatRecordError,
    Json,
    byte_level,
    encode,
    mask_of,
    records,
    speller,
    template,
)
from tests.pipeline.inputs import special_token

pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

FOLDER = Path(trl.__file__).parent / "chat_templates"
OF_IMAGES = {"llava_next_training"}
"""Templates that take lists of parts alone."""
TEMPLATES = {
    path.stem: path.read_text() for path in sorted(FOLDER.glob("*_training.jinja")) if path.stem not in OF_IMAGES
}
FAULTY = {"diffusion_gemma_training"}
"""Templates whose span ends in mid-text: there `transformers` trains too few tokens of a last character."""
END = "<|document end|>"


def with_end() -> Json:
    """A tokenizer with a token that no template writes."""
    content = byte_level()
    number = 1 + max(entry["id"] for entry in content["added_tokens"])
    return {**content, "added_tokens": [*content["added_tokens"], special_token(number, END)]}


@cache
def ours(name: str) -> ChatEncoder:
    content = with_end()
    end_id = next(entry["id"] for entry in content["added_tokens"] if entry["content"] == END)
    made = template(TEMPLATES[name], date=datetime.now().astimezone().date().isoformat())  # what transformers writes
    return ChatEncoder(made, speller(content), loss="assistant", end_id=end_id)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return of_transformers(with_end(), tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", **VARIABLES)


def test_trl_ships_the_templates_that_this_compares() -> None:
    assert len(TEMPLATES) >= 30
    assert TEMPLATES.keys() >= FAULTY
    assert CLASSES["byte-level"] is byte_level
    assert END not in SPECIAL


@pytest.mark.parametrize("name", TEMPLATES)
@given(record=records())
def test_a_marked_template_of_trl_gives_what_transformers_makes_of_it(theirs: Any, name: str, record: Json) -> None:
    # a control token that a message spells is text here, and a token for `transformers`
    spelled = [token for token in MEANT if any(token in one["content"] for one in record["messages"])]
    assume(not any(token in TEMPLATES[name] for token in spelled if not token.isspace()))
    try:
        document = encode(ours(name), record)
    except ChatRecordError as error:
        if error.reason not in {NOT_RENDERED, NOTHING_TO_LEARN}:
            raise
        assume(False)
    ids, mask = theirs(record, TEMPLATES[name])
    assert document.ids[:-1].tolist() == ids
    if name not in FAULTY:
        assert mask_of(document) == mask
