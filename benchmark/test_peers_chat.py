"""The judge of rows of conversations finds what is wrong with them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmark.peers.chats import END, START, Judge, conversations, render, write_tokenizer
from benchmark.peers.programs import common, tokshard_chat
from benchmark.peers.programs.rows import save

Piece = tuple[list[int], list[bool]]
CLEAN = {"extra": 0, "missed": 0, "made": 0, "strange": 0, "absent": 0, "cut": 0, "lost_percent": 0}
RECORDS = [
    {"messages": [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2 🙂"}]},
    {"messages": [{"role": "user", "content": f"Say {END}."}, {"role": "assistant", "content": "I won't do it."}]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer")


@functools.cache
def pieces(tokenizer: Path, *, as_text: bool = True) -> list[Piece]:
    """The conversations with their answers as targets.

    Args:
        as_text: special tokens that a message spells are text.
    """
    encode, found = common.encoder(str(tokenizer)), []
    ids_of = {token: common.end_id(str(tokenizer), token) for token in (START, END)}
    for record in RECORDS:
        one = render(record)
        text, ids, targets = one.text.decode(), list[int](), list[bool]()
        places = {len(one.text[:at].decode()) for at in one.marks}
        if not as_text:
            places = {at for at in range(len(text)) if text.startswith(tuple(ids_of), at)}
        spans = [tuple(len(one.text[:at].decode()) for at in span) for span in one.spans]
        stops = {at + len(next(token for token in ids_of if text[at:].startswith(token))) for at in places}
        cuts = sorted({0, len(text), *places, *stops, *(at for span in spans for at in span)})
        for start, stop in pairwise(cuts):
            part = text[start:stop]
            made = [ids_of[part]] if start in places else [int(token) for token in encode([part])[0]]
            ids += made
            targets += [any(begin <= start < end for begin, end in spans)] * len(made)
        found.append((ids, targets))
    return found


@functools.cache
def judge(tokenizer: Path) -> Judge:
    return Judge(RECORDS, tokenizer)


def judged(tokenizer: Path, tmp_path: Path, given: list[Piece]) -> dict[str, Any]:
    save(str(tmp_path / "rows.npz"), given)
    return judge(tokenizer)(tmp_path / "rows.npz")


def test_rows_that_say_what_the_messages_say_have_no_fault(tokenizer: Path, tmp_path: Path) -> None:
    found = judged(tokenizer, tmp_path, pieces(tokenizer))
    assert found == {**CLEAN, "targets": found["targets"]}
    assert found["targets"] > 10


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("extra", lambda first, second: [(first[0], [*first[1][1:], False]), second]),
        ("missed", lambda first, second: [(first[0], [False, *first[1][:-1]]), second]),
        ("extra", lambda first, second: [(first[0], [True] * len(first[0])), second]),
        ("missed", lambda first, second: [(first[0], [False] * len(first[0])), second]),
        ("absent", lambda first, _: [first]),
        ("cut", lambda first, second: [(first[0][:-2], first[1][:-2]), second]),
        ("lost_percent", lambda first, second: [(first[0][:-2], first[1][:-2]), second]),
        ("cut", lambda first, second: [first, (second[0][:4], second[1][:4]), (second[0][4:], second[1][4:])]),
        ("strange", lambda first, second: [(first[0][::-1], first[1]), first, second]),
    ],
)
def test_a_fault_is_counted(
    tokenizer: Path, tmp_path: Path, fault: str, change: Callable[[Piece, Piece], list[Piece]]
) -> None:
    assert judged(tokenizer, tmp_path, change(*pieces(tokenizer)))[fault] > 0


def test_a_special_token_that_a_message_spells_is_counted_as_made(tokenizer: Path, tmp_path: Path) -> None:
    found = judged(tokenizer, tmp_path, pieces(tokenizer, as_text=False))
    assert found == {**CLEAN, "targets": found["targets"], "made": 1}


def test_an_end_that_is_added_and_trained_is_no_answer(tokenizer: Path, tmp_path: Path) -> None:
    first, second = pieces(tokenizer)
    end = common.end_id(str(tokenizer), END)
    found = judged(tokenizer, tmp_path, [([*first[0], end], [*first[1], True]), second])
    assert found == {**CLEAN, "targets": found["targets"], "extra": 1}


def test_rows_of_tokshard_have_no_fault_but_cut_conversations(tokenizer: Path, tmp_path: Path) -> None:
    records = conversations(60)
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    out = folder / "rows.npz"
    tokshard_chat.chat(
        {"chats": chats, "tokenizer": tokenizer, "folder": folder, "out": out, "workers": 1, "seq_len": 2_048}
    )
    found = Judge(records, tokenizer)(out)
    assert found == {**CLEAN, "targets": found["targets"], "cut": found["cut"]}
    with_long = sum(len(render(record).text) > 2_048 * 3 for record in records)
    assert found["targets"] > 10_000
    assert found["cut"] <= with_long + 5
