"""Conversations: what rendering and encoding them costs, and rows of whole ones next to cut rows.

    python -m tests.benchmark.chat [--conversations 20000] [--repeats 3] [--seq-len 4096]

One table and one line of JSON. All in this process, on one CPU; figures are of its CPU seconds.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmark.processes import ROOT
from tests.benchmark.report import aligned, commit, machine, spread_of, versions
from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.templates import CHATML
from tokshard import build_corpus
from tokshard.pipeline.encode.chat.records import conversation
from tokshard.runtime import NumpyLoader, StreamPlan

BYTES = 2_000
"""UTF-8 bytes of the messages of a conversation, on average."""
LIMIT, SHARE = 250, 0.8
"""Wanted: microseconds of a conversation at most, and tokens a second of whole rows next to cut ones at least."""


def conversations(count: int) -> list[dict[str, Any]]:
    """Conversations of 1 to 5 turns of words, code and other scripts."""
    rng = random.Random(17)
    prose = (ROOT / "tests" / "benchmark" / "README.md").read_text(encoding="utf-8")
    words = [*prose.split(), "数据", "résumé", "🙂", "\n", "\n    return x"]
    found = []
    for _ in range(count):
        turns = rng.randint(1, 5)
        contents = []
        for _ in range(2 * turns):
            wanted, parts = BYTES / 2 / turns * rng.uniform(0.5, 1.5), [""]
            while sum(map(len, parts)) + len(parts) < wanted:
                parts.append(rng.choice(words))
            contents.append(" ".join(parts[1:]))
        found.append(chats.said(*contents))
    return found


def microseconds(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    """CPU time of an item."""
    started = time.process_time()
    for item in items:
        work(item)
    return (time.process_time() - started) / len(items) * 1e6


def delivered(corpus: Path, pack: str, seq_len: int) -> tuple[float, float]:
    """Tokens of documents that an epoch gives, by CPU second; and the share of padding."""
    plan = StreamPlan({"chat": corpus}, pack=pack, seq_len=seq_len, seed=17, epochs=1)
    started = time.process_time()
    with NumpyLoader(plan, global_batch_size=8) as loader:
        num_rows = sum(int((batch["sample_index"] >= 0).sum()) for batch in loader)
    spent = time.process_time() - started
    num_tokens = plan.sources[0].num_tokens
    return num_tokens / spent, 1 - num_tokens / (num_rows * seq_len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=4_096)
    given = parser.parse_args()
    records = conversations(given.conversations)
    size = sum(len(message["content"].encode()) for record in records for message in record["messages"])
    parsed = [conversation(record) for record in records]
    template, encode = chats.template(CHATML), chats.encoder(chats.byte_level(), CHATML)
    figures: dict[str, list[float]] = {name: [] for name in ("render", "document", "cut", "whole", "share")}
    with tempfile.TemporaryDirectory(prefix="tokshard-chat-") as scratch:
        place = Path(scratch)
        (place / "tokenizer").mkdir()
        (place / "tokenizer" / "tokenizer.json").write_text(json.dumps(chats.byte_level()))
        config = {**chats.VARIABLES, "chat_template": CHATML}
        (place / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
        corpus = place / "corpus"
        build_corpus(iter(records), tokenizer=place / "tokenizer", out=corpus, chat="own", workers=1)
        for pack in ("cut", "whole"):  # so that all is imported and in memory
            delivered(corpus, pack, given.seq_len)
        for _ in range(given.repeats):
            figures["render"].append(microseconds(lambda one: template.render(one.values), parsed))
            figures["document"].append(microseconds(encode, parsed))
            (cut, _), (whole, padding) = (delivered(corpus, pack, given.seq_len) for pack in ("cut", "whole"))
            figures["cut"].append(cut)
            figures["whole"].append(whole)
            figures["share"].append(whole / cut)
    middle = {name: statistics.median(found) for name, found in figures.items()}
    rows = [
        ("", "median", "wanted"),
        ("render, us", f"{middle['render']:.0f}", ""),
        ("render and encode, us", f"{middle['document']:.0f}", f"<= {LIMIT}"),
        ("cut rows, tokens a CPU second", f"{middle['cut']:,.0f}", ""),
        ("whole rows, tokens a CPU second", f"{middle['whole']:,.0f}", ""),
        ("whole next to cut", f"{middle['share']:.2f}", f">= {SHARE}"),
        ("padding of whole rows", f"{padding:.2%}", ""),
    ]
    sys.stdout.write(aligned(rows, num_left=1) + "\n")
    line = {
        "benchmark": "chat",
        "bytes_per_conversation": round(size / len(records)),
        "padding": round(padding, 4),
        **{name: spread_of(found) for name, found in figures.items()},
        "commit": commit(ROOT),
        "versions": versions(("tokshard", "tokenizers", "jinja2", "numpy")),
        "machine": machine(),
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
