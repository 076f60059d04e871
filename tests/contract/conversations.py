"""Conversations whose tokens and targets are known without the package: token k is the byte k, and turns are ChatML."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.templates import CHATML
from tests.refusals import tokshard

Json = dict[str, Any]
CONTENTS = ("the answer", " ", "好的漢字", "thanks 🧪", "1 2 3\n", "<|im_end|>", "</s> and <s>", "\n\nx", "e\u0301")
START, END, CLOSE = (256 + chats.SPECIAL.index(token) for token in ("<|im_start|>", "<|im_end|>", "</s>"))


@dataclass(frozen=True, slots=True)
class Hand:
    """A document as its record says it must be.

    Args:
        ids: with the token that ends it.
        targets: places in `ids`.
    """

    ids: list[int]
    targets: frozenset[int]


def by_hand(record: Json) -> Hand:
    """Write down a conversation as ChatML does."""
    ids: list[int] = []
    targets: set[int] = set()
    for message in record["messages"]:
        ids += [START, *message["role"].encode(), *b"\n"]
        start = len(ids)
        ids += [*message["content"].encode(), END]
        if message["role"] == "assistant" and message.get("weight") != 0:
            targets.update(range(start, len(ids)))
        ids += b"\n"
    return Hand([*ids, CLOSE], frozenset(targets))


def targets_of(documents: Sequence[Hand]) -> Counter[tuple[int, int]]:
    """The targets of an epoch, each once: (document, place in it)."""
    return Counter((index, place) for index, document in enumerate(documents) for place in document.targets)


def conversations(count: int, seed: int) -> list[Json]:
    """Conversations of one to four turns, of which some say that an answer is not to be learned."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        messages: list[Json] = [{"role": "system", "content": "be brief"}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 4)):
            messages += [{"role": role, "content": _content(rng)} for role in ("user", "assistant")]
        if len(messages) > 3 and rng.random() < 0.4:
            messages[-3]["weight"] = 0
        found.append({"messages": messages})
    return found


def _content(rng: random.Random) -> str:
    return "".join(rng.choice(CONTENTS) for _ in range(rng.randint(0, 5)))


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose template is ChatML with marked answers, and in which token k is the byte k."""
    folder.mkdir(parents=True)
    content = chats.bytes_alone()
    added = [entry for entry in content["added_tokens"] if entry["special"]]  # the others would merge bytes
    (folder / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({**chats.VARIABLES, "chat_template": CHATML}))
    return folder


def built(folder: Path, count: int) -> tuple[Path, list[Hand]]:
    """A corpus of conversations, built by the command in several shards, and what it must hold."""
    records = conversations(count, seed=1)
    write_tokenizer(folder / "tokenizer")
    return build(records, folder, "chat", "--chat", "--shard-tokens", "1K"), [by_hand(record) for record in records]


def build(records: Sequence[Json], folder: Path, name: str, *options: str) -> Path:
    """Build a corpus by the command, in a folder that has a tokenizer."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["build", str(source), "--tokenizer", str(folder / "tokenizer"), "--out", str(folder / name)]
    said = tokshard(*words, "--workers", "1", "--quiet", *options)
    assert said.exit_code == 0, said.errors
    return folder / name
