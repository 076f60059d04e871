"""Tokenizers of every class that chats are encoded with, small enough to be made here; and conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.pipeline.inputs import TOKENIZER, letters_of_bytes, special_token
from tests.pipeline.vocabularies import numbered, tokenizer_json
from tokshard.pipeline.encode.chat.records import ChatRecordError, conversation  # noqa: F401 - for other rooms
from tokshard.pipeline.encode.chat.spans import (  # noqa: F401 - two are for other rooms
    NOT_RENDERED,
    NOTHING_TO_LEARN,
    ChatDocument,
    ChatEncoder,
    Loss,
)
from tokshard.pipeline.encode.chat.template import ChatTemplate
from tokshard.pipeline.encode.chat.tokens import Speller, document_end
from tokshard.pipeline.sources.chats import TemplateSource

Json = dict[str, Any]

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")
MEANT = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "\n\n")
"""Added tokens that are not special."""
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}


def _added(first: int) -> list[Json]:
    return [
        *(special_token(first + n, token) for n, token in enumerate(SPECIAL)),
        *(special_token(first + len(SPECIAL) + n, token, special=False) for n, token in enumerate(MEANT)),
    ]


def byte_level(**parts: Any) -> Json:
    """The tokenizer of the recipes, with the tokens of chats."""
    content: Json = json.loads((TOKENIZER / "tokenizer.json").read_bytes())
    first = 1 + max([*content["model"]["vocab"].values(), *(entry["id"] for entry in content["added_tokens"])])
    return {**content, "added_tokens": [*content["added_tokens"], *_added(first)], **parts}


def byte_fallback(**parts: Any) -> Json:
    """A BPE in the manner of Llama 2: a token for each byte, and a few words."""
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the", "▁▁", "er", "▁a", "字"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": numbered(*tokens),
        "merges": ["t h", "th e", "▁ the", "▁ ▁", "e r", "▁ a"],
    }
    return tokenizer_json(model, added=[special_token(0, "<unk>"), *_added(len(tokens))], **parts)


def metaspace(scheme: str) -> Json:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": scheme == "first"}


def bytes_alone() -> Json:
    """A tokenizer in which token k is the byte k."""
    content = byte_level(model={"type": "BPE", "vocab": {}, "merges": []})
    content["model"]["vocab"] = {letter: byte for byte, letter in sorted(letters_of_bytes().items())}
    return {**content, "added_tokens": _added(256)}


CLASSES: dict[str, Callable[[], Json]] = {
    "byte-level": byte_level,
    "byte-level, NFC": lambda: byte_level(normalizer={"type": "NFC"}),
    "byte fallback, Prepend and Replace": lambda: byte_fallback(
        normalizer={"type": "Sequence", "normalizers": [PREPEND, SPACES]}
    ),
    "byte fallback, Replace": lambda: byte_fallback(
        normalizer=SPACES,
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    ),
    **{
        f"byte fallback, Metaspace {scheme}": lambda scheme=scheme: byte_fallback(pre_tokenizer=metaspace(scheme))
        for scheme in ("always", "first", "never")
    },
}


def speller(content: Json) -> Speller:
    return Speller(json.dumps(content).encode())


def template(
    text: str, *, needs_spans: bool = True, date: str | None = None, max_characters: int = 1 << 20
) -> ChatTemplate:
    source = TemplateSource(text=text, variables=VARIABLES, date=date)
    return ChatTemplate(source, needs_spans=needs_spans, max_characters=max_characters)


def encoder(content: Json | Speller, text: str, *, loss: Loss = "assistant") -> ChatEncoder:
    made = template(text, needs_spans=loss != "all")
    known = content if isinstance(content, Speller) else speller(content)
    _, end = document_end(
        known, None, config=VARIABLES, literals=made.syntax.literals, written=made.written_variables()
    )
    return ChatEncoder(made, known, loss=loss, end_id=end)


def said(*contents: str, **more: Any) -> Json:
    """A record in which user and assistant take turns."""
    turns = zip(contents, ("user", "assistant") * len(contents), strict=False)
    return {"messages": [{"role": role, "content": content} for content, role in turns], **more}


def encode(made: ChatEncoder, record: Json) -> ChatDocument:
    return made(conversation(record))


def mask_of(document: ChatDocument) -> list[int]:
    """Whether each token is a target, as 0 and 1; without the end of the document."""
    mask = [0] * (len(document.ids) - 1)
    for start, stop in document.loss.reshape(-1, 2).tolist():
        mask[start:stop] = [1] * (stop - start)
    return mask


def learned(document: ChatDocument) -> list[NDArray[np.uint32]]:
    """The ids of each span."""
    return [document.ids[start:stop] for start, stop in document.loss.reshape(-1, 2).tolist()]


PARTS: Sequence[str] = (
    *("", " ", "\n", "  ", "\n\n", "\r\n", "\0", "\u00a0"),
    *("the other ", "a the", "1234", "def f(x):\n    return x", "'s", "▁", "<0x0A>"),
    *("好的漢字", "🧪", "👩‍🔬", "각", "e\u0301", "\u0301x", "ﬁ", "\u212b"),
)
contents = st.lists(st.sampled_from(PARTS), max_size=5).map("".join)
spellings = st.sampled_from([*SPECIAL, *MEANT[:-1]])
answers = st.one_of(
    contents, st.tuples(contents, contents).map(lambda pair: f"<think>\n{pair[0]}</think>\n\n{pair[1]}")
)


@st.composite
def records(draw: Any, contents: st.SearchStrategy[str] = contents) -> Json:
    """Conversations of up to three turns, some with a system message."""
    messages = [{"role": "system", "content": draw(contents)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": draw(contents)}, {"role": "assistant", "content": draw(answers)}]
    return {"messages": messages}
