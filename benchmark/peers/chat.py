"""Conversations: prepared and packed by those who train on them, and judged by what the messages say."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence

from benchmark.peers.chats import Json, Judge, conversations, write_tokenizer
from benchmark.peers.frame import Case, Frame, Row, Section, log

SEQ_LEN = 8_192
GENERATED = (
    "They have one to five turns; 15 % of them are long (log-normal, up to 60,000 tokens); some have system prompts,"
    " tools, emoji, and special tokens that a message spells. The template is ChatML with `{% generation %}`"
    " around answers and the ends of their turns, the tokenizer is that of the recipes, and rows have"
    f" {SEQ_LEN:,} tokens. *Prepare* is reading, rendering, encoding and masking, without imports. tokshard"
    " packs when it is read, so its *pack* is the delivery of an epoch. torchtitan prepares in one process, the others"
    " with"
)
JUDGED = (
    "A judge compares the rows with the text of the messages, byte by byte, without a tokenizer. *Not an"
    " answer* counts targets that hold no byte of an assistant's message. *Answers not trained* counts tokens that"
    " lie wholly in an assistant's message and are not targets. A token that is only partly an answer may be"
    " either, and so may the first token of a piece that continues a conversation. *Made tokens* counts special"
    " tokens that a message spelled and the template did not write. *Cut* counts conversations that are in more"
    " than one piece or lack their end. *Absent* counts conversations that are in no row. *Padding* is the share"
    " of the rows that holds no conversation; tokshard's ends of documents count as padding. TRL does not compute"
    " padding."
)
TRL = (
    f"TRL's `bfd_split` pads least. Its default, `bfd`, drops everything after the first {SEQ_LEN:,} tokens of a"
    " conversation."
)
TORCHTITAN = (
    "torchtitan refuses conversations of more than one question and one answer, and those with a system"
    " prompt. Its jinja2 environment does not know the markers, so it gets the template without them."
)
BRIDGE = (
    "Megatron-Bridge can't be imported without CUDA, so the modules of its preparation are run alone, as its own"
    " builder calls them. It leaves out conversations that are longer than a row, with a warning. It finds answers by"
    " the ChatML markers that it knows, in place of the template's `{% generation %}`, so the newline behind an answer"
    " becomes a target."
)


def run(frame: Frame) -> Section:
    """Six ways to prepare the same conversations."""
    records = conversations(200 if frame.quick else 4_000)
    place = frame.work / "chat"
    tokenizer = write_tokenizer(place / "tokenizer")
    chats, with_text = place / "chats.jsonl", place / "chats-with-text-of-tools.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    as_text = [{**record, "tools": json.dumps(record["tools"]) if "tools" in record else None} for record in records]
    with_text.write_text("".join(json.dumps(record) + "\n" for record in as_text), encoding="utf-8")
    workers = len(os.sched_getaffinity(0))
    common = {
        "tokenizer": tokenizer,
        "chats": chats,
        "chats_with_text_of_tools": with_text,
        "seq_len": SEQ_LEN,
        "workers": workers,
    }
    cases = [
        Case(label="tokshard, whole", peer="tokshard_chat", case="chat"),
        Case(label="tokshard, whole, with tokenizers 0.2x", peer="trl", case="tokshard_chat"),
        Case(label="TRL, `bfd`", peer="trl", case="chat", settings={"strategy": "bfd"}),
        Case(label="TRL, `bfd_split`", peer="trl", case="chat", settings={"strategy": "bfd_split"}),
        Case(label="torchtitan, one turn alone", peer="torchtitan", case="chat"),
        Case(label="Megatron-Bridge, up to 8,192 tokens", peer="bridge", case="chat"),
    ]
    judge = Judge(records, tokenizer)
    rows = [Row(label=case.label, runs=[]) for case in cases]
    for repeat in range(1 if frame.quick else frame.repeats):
        for index, (case, row) in enumerate(zip(cases, rows, strict=True)):
            if row.reason is not None:
                continue
            folder = place / f"{index}-{repeat}"
            folder.mkdir()
            out = folder / "rows.npz"
            found = frame.call(case.peer, case.case, {**common, **case.settings, "folder": folder, "out": out})
            if out.exists():
                found["padding_percent"] = 100 * (1 - found["used"] / (found["rows"] * SEQ_LEN))
                found |= judge(out)
            if found.get("strange"):
                found["failed"] = f"{found['strange']} pieces are no part of a conversation"
            row.runs.append(found)
            shutil.rmtree(folder)
            log(f"chat {repeat + 1}: {case.label}: {row.reason or round(found['wall_seconds'], 1)}")
    num_one = sum(len(record["messages"]) == 2 and "tools" not in record for record in records)
    return Section(
        title="Conversations, prepared and packed",
        paragraphs=[_conversations(records, workers), JUDGED],
        columns={
            "prepare_seconds": "prepare, s",
            "prepare_cpu_seconds": "prepare, CPU s",
            "pack_seconds": "pack, s",
            "pack_cpu_seconds": "pack, CPU s",
            "rows": "rows",
            "padding_percent": "padding, %",
            "cut": "cut",
            "absent": "absent",
            "lost_percent": "text in no row, %",
            "targets": "targets",
            "extra": "not an answer",
            "missed": "answers not trained",
            "made": "made tokens",
        },
        rows=rows,
        notes=[
            TRL,
            f"{TORCHTITAN} Of these conversations it takes {num_one:,}.",
            BRIDGE,
        ],
    )


def _conversations(records: Sequence[Json], workers: int) -> str:
    num_bytes = sum(len(message["content"].encode()) for record in records for message in record["messages"])
    size = f"{len(records):,} generated conversations, {num_bytes / 1e6:.1f} MB of messages."
    return f"{size} {GENERATED} {workers} workers."
