"""What commands print about corpora, plans and runs: the sessions beside this module.

They are transcripts, see `tests.cli.transcripts`, in which JSON is shown in a line for each field, with long lists of
numbers cut. So is the line of an HTML page that holds its sections. `python -m tests.inspect.test_sessions` writes the
sessions again, so that a changed text is one diff to read.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.cli.transcripts import commands, is_as_expected, renewed
from tests.contract import small
from tests.corpora import TINY_TOKENIZER, TOKENIZER, Source, append_generation, documents_of, write_corpus
from tests.inspect.pages import write_evil_corpus, write_leaks, write_metrics, write_mix
from tokshard import select_corpus
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS

SESSIONS = sorted(Path(__file__).parent.glob("sessions/*.txt"))
WIDTH = 1000

TEXTS = [
    "def f(x):\n    return x\n",
    "Größe 数据 🙂 \x1b[2J",
    "word " * 2000,
    "".join(f"line {n}\n" for n in range(40)),
    "def main(): a main",
]


def write_text(directory: Path) -> None:
    """Texts with kept columns and records that were left out, in two shards."""
    encode = Tokenizer.from_file(str(TOKENIZER)).encode
    metadata = {
        "id": ["a", "b", "c", "d", "e"],
        "url": ["http://a", None, "evil\x1b[2J\n", "d", ""],
        "score": [0.5, None, float("nan"), 1.0, 2.0],
    }
    sources = [
        Source(
            documents=[[*encode(text, add_special_tokens=False).ids, 0] for text in TEXTS],
            records=[0, 2, 3, 7, 8],
            left_out={"empty": 40, "malformed": 3},
            metadata=metadata,
        ),
        Source(
            documents=[[5, 0]],
            path="sub/b\x1b[2J.jsonl",
            left_out={"empty": 1},
            metadata={name: [None] for name in metadata},
        ),
    ]
    columns = {"id": "string", "url": "string", "score": "float64"}
    write_corpus(directory / "text", sources=sources, columns=columns, shard_tokens=3_000, rejects=b"{}\n" * 3)


def write_chat(directory: Path, name: str, spans: list[list[int]], weights: Any = None, **options: Any) -> None:
    """A corpus with loss spans."""
    documents = [[1, 2, 3, 0], [0], [3, 3, 1, 2, 2, 0], [2, 0]]
    columns = {LOSS: "spans"} if weights is None else LOSS_COLUMNS
    metadata = {LOSS: spans, WEIGHTS: weights, "url": list("abcd")}
    columns = {**columns, "url": "string"}
    sources = [Source(documents=documents, metadata={column: metadata[column] for column in columns})]
    write_corpus(directory / name, sources=sources, columns=columns, tokenizer=TINY_TOKENIZER, **options)


def write_all(directory: Path) -> None:
    """What the sessions read."""
    write_text(directory)
    write_evil_corpus(directory / "evil")
    write_mix(directory)
    write_leaks(directory)
    select_corpus(directory / "leaky", out=directory / "without", drop_ids=directory / "ids.txt", workers=1)
    mix = directory / "mix.toml"
    mix.write_text(mix.read_text().replace(f"{directory}/", ""))
    ten, two = documents_of([5] * 10), [[1, 1, 1, 1, 0], [2, 2, 2, 2, 0]]
    lower = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    normal = json.dumps({**json.loads(TINY_TOKENIZER), "normalizer": lower}).encode()
    lost = [3, 0, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    for name, documents, options in (
        ("ten", ten, {"shard_tokens": 10}),
        ("same", ten, {"shard_tokens": 10}),
        ("other", [*ten[:7], [3, 3, 3, 3, 0], *ten[8:]], {"shard_tokens": 10}),
        ("whole", ten, {}),
        ("longer", [*ten, [1, 0]], {"shard_tokens": 10}),
        ("drei", ten, {"shard_tokens": 10, "tokenizer": TINY_TOKENIZER.replace(b'"three"', b'"drei"')}),
        ("lower", [[1, 1, 2, 0], [1, 0]], {"tokenizer": normal}),
        ("no-chat", [[1, 2, 3, 0], [0], [3, 3, 1, 2, 2, 0], [2, 0]], {}),
        ("one", [], {"sources": [Source(documents=[[0]][number:]) for number in range(4)], "shard_tokens": 1}),
        ("ids", two, {"ids": "ab", "shard_tokens": 5}),
        ("ids-again", two, {"ids": "ab"}),
        ("other-ids", two, {"ids": "ac", "shard_tokens": 5}),
        ("no-ids", two, {"shard_tokens": 10}),
        ("many", [], {"sources": [Source(documents=[[1, 0]], left_out={"empty": n} if n else {}) for n in lost]}),
        *((name, [[1, 0]], {}) for name in ("split/train", "split/validation", "split/other", "lost")),
    ):
        if ids := options.pop("ids", ""):
            source = Source(documents=documents, metadata={"id": ids, "score": [math.nan, None]})
            options |= {"sources": [source], "columns": {"id": "string", "score": "float64"}}
        write_corpus(directory / name, documents, **{"tokenizer": TINY_TOKENIZER, **options})
    write_corpus(directory / "grown", ten[:7], tokenizer=TINY_TOKENIZER, shard_tokens=10)
    append_generation(directory / "grown", [*ten[7:], [1] * 99 + [0]])
    spans = [[1, 3], [], [1, 2, 4, 6], [1, 2]]
    write_chat(directory, "chat", spans)
    write_chat(directory, "shifted", [[1, 3], [], [1, 2, 5, 6], [1, 2]])
    write_chat(directory, "chat-shards", spans, shard_tokens=6)
    write_chat(directory, "weighted", spans, [[0.5], [], [2.0, 0.25], [1.0]], shard_tokens=6)
    select_corpus(directory / "weighted", out=directory / "heavy", where="url!=a", workers=1)
    write_chat(directory, "lighter", spans, [[0.5], [], [2.0, 0.5], [1.0]])
    (directory / "chat.toml").write_text(
        'seq_len = 2\nseed = 1\nblock_tokens = 256\nglobal_batch_size = 1\ncorpora = { chat = "chat" }\n'
    )
    for name, change in (("small", "max_epochs = { a = 0.5 }"), ("streams", "num_streams = 2")):
        (directory / f"{name}.toml").write_text(
            'corpora = { a = "a", b = "b" }\nweights = { a = 3, b = 1 }\nseq_len = 32\nglobal_batch_size = 4\n'
            f"block_tokens = 256\nwindow_blocks = 8\nseed = 3\n{change}\n"
        )
    write_metrics(directory / "run")
    (directory / "metrics.jsonl").write_text('{"step": 1, "skipped": "loss is nan", "loss": null, "samples": [0, 4]}\n')
    write_metrics(directory / "long-run", num_steps=20_000, spike=12_345, skipped=0)
    for name, change in (
        ("plan", ""),
        ("plan-again", ""),
        ("plan-of-seed-4", "seed = 4"),
        ("plan-of-weights", "weights = { a = 1.0 }\nschedule = [[9, { a = 2.0 }]]"),
    ):
        text = f'corpora = {{ a = "chat" }}\nseq_len = 2\nglobal_batch_size = 1\nallow_small_blocks = true\n{change}\n'
        (directory / f"{name}.toml").write_text(text)
    (directory / "photos").mkdir()
    (directory / "photos" / "cat.jpg").touch()
    (directory / "lost" / "manifest.json").unlink()
    (directory / "unfinished" / ".tokshard-build").mkdir(parents=True)


def readable(shown: str) -> str:
    """What a command prints, with a line for each field of JSON, and for each field of each section of a page."""
    return "\n".join(part for line in shown.split("\n") for part in fields(line))


def fields(line: str) -> list[str]:
    if line.startswith("{"):
        return [f"  {name}: {json.dumps(abridged(value))}" for name, value in json.loads(line).items()]
    if (page := re.fullmatch(r'<script type="application/json" id="data">(.*)</script>', line)) is None:
        return [line]
    lines = []
    for section in json.loads(page[1])["sections"]:
        lines.append(f"section {section.pop('kind')}")
        for name, value in section.items():
            values = value if name in {"traces", "rows", "items"} else [value]
            lines += [f"  {name}: {json.dumps(abridged(each))}" for each in values]
    return lines


def abridged(value: Any) -> Any:
    """Long lists and texts with their ends, their length and the sum, numbers with six digits."""
    if isinstance(value, dict):
        return {name: abridged(each) for name, each in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str) and len(value) > 200:
        return f"{value[:80]} ({len(value)} characters) {value[-80:]}"
    if not isinstance(value, list):
        return value
    if len(value) <= 12:
        return [abridged(each) for each in value]
    numbers = [each for each in value if isinstance(each, int | float)]
    total = f"{len(value)} in all, {len(numbers)} numbers, whose sum is {math.fsum(numbers):.6g}"
    return [*abridged(value[:3]), total, *abridged(value[-3:])]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sessions")
    write_all(directory)
    return directory


@pytest.mark.parametrize("session", SESSIONS, ids=lambda path: path.stem)
def test_commands_print_what_their_sessions_show(session, place, monkeypatch):
    small.without_the_library_of_pages(monkeypatch.setattr)
    for command in commands(session.read_text(encoding="utf-8")):
        shown = readable(command.printed(place, columns=WIDTH))
        if not is_as_expected(shown, command.expected):
            assert shown == command.expected, command.line


if __name__ == "__main__":
    small.without_the_library_of_pages(setattr)
    for path in SESSIONS:
        path.write_text(renewed(path.read_text(encoding="utf-8"), write_all, readable, columns=WIDTH), encoding="utf-8")
