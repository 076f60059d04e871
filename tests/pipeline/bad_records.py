"""Sources whose second record is bad, between two good ones that are alike, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.pipeline.inputs import COMPRESSIONS, TABLES, arrow_bytes, jsonl, parquet_bytes, write_byte_tokenizer
from tests.pipeline.vocabularies import write_word_tokenizer
from tests.refusals import said_in
from tokshard import build_corpus, import_corpus


@dataclass(frozen=True)
class BadRecord:
    """A source with a bad record.

    Args:
        what: the record is.
        file: the name of the source.
        content: the bytes of the file.
        options: of the build.
        run: the build, or import.
    """

    what: str
    file: str
    content: bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] = build_corpus
    write_tokenizer: Callable[[Path], Path] = write_byte_tokenizer

    @property
    def said(self) -> str:
        """The reason, as it is counted, and the detail. ``*`` stands for what depends on versions."""
        return SAID[self.what].problem.partition(" 2: ")[2]

    @property
    def reason(self) -> str:
        return self.said.partition(": ")[0]

    def build(self, place: Path, **options: Any) -> Any:
        """Build or import the source into ``out`` of `place`, the current directory."""
        (place / self.file).write_bytes(self.content)
        tokenizer = self.write_tokenizer(place / "tok")
        return self.run(self.file, tokenizer=tokenizer, out="out", workers=1, **self.options, **options)


# text

AT_MOST_50 = {"max_document_bytes": 50}
A_NUMBER = {"keep_field": ["n:int64"]}
GOOD = b'{"text": "good"}'

LINES: list[tuple[Any, ...]] = [
    ("a record without the text field", b'{"body": "x"}'),
    ("a null as text", b'{"text": null}'),
    ("a number as text", b'{"text": 17}'),
    ("text that is not UTF-8", b'{"text": "a\xff"}'),
    ("a document that is too long", b'{"text": "%s"}' % (b"x" * 51), AT_MOST_50),
    ("a record that is too long to hold", b'{"text": "%s"}' % (b"x" * 2_500_000), AT_MOST_50),
    ("a kept field of another type", b'{"text": "x", "n": "one"}', A_NUMBER),
]
DELIMITED: list[tuple[Any, ...]] = [
    ("a row that is too short", "a.csv", b"text,n\ngood,1\nshort\ngood,1\n"),
    ("a row that is too long", "a.csv", b'n,text\n1,good\n2,"a\nb",3\n1,good\n'),
    ("a badly quoted row", "a.csv", b'text\ngood\n"a" b\ngood\n'),
    ("a row that is too short", "a.tsv", b"text\tn\ngood\t1\na, b\ngood\t1\n"),
    ("text that is not UTF-8", "a.csv", b"text\ngood\na\xff\ngood\n"),
    ("a document that is too long", "a.csv", b"text\ngood\n" + b"x" * 51 + b"\ngood\n", AT_MOST_50),
    ("a kept field of another type", "a.csv", b"text,n\ngood,1\nx,one\ngood,\n", A_NUMBER),
]
COLUMNS: list[tuple[Any, ...]] = [
    ("a null as text", None),
    ("text that is not UTF-8", b"a\xff"),
    ("a document that is too long", b"x" * 51, AT_MOST_50),
    ("a kept field of another type", b"x", A_NUMBER),
]


def _of_text() -> Iterator[BadRecord]:
    for suffix, compress in COMPRESSIONS.items():
        content = compress(b"\n".join([GOOD, b'{"text": "open', GOOD]))
        yield BadRecord(f"a malformed record in a.jsonl{suffix}", f"a.jsonl{suffix}", content)
    for what, line, *options in LINES:
        yield BadRecord(f"{what} in a.jsonl", "a.jsonl", b"\n".join([GOOD, line, GOOD]), *options)
    nested = b'{"a": {"b": "good"}}\n{"a": {}}\n{"a": {"b": "good"}}\n'
    yield BadRecord("a record without the nested text field in a.jsonl", "a.jsonl", nested, {"text_field": "a.b"})
    for what, file, content, *options in DELIMITED:
        yield BadRecord(f"{what} in {file}", file, content, *options)
    for file, encode in TABLES.items():
        for what, value, *options in COLUMNS:
            texts = pa.array([b"good", value, b"good"], pa.binary()).view(pa.string())
            table = pa.table({"text": texts, "n": ["1", "one", None]})
            yield BadRecord(f"{what} in {file}", file, encode(table), *options)
    for unit, end in (("line", b"\n"), ("paragraph", b"\n\n")):
        content = end.join([b"good", b"x" * 51, b"good"])
        yield BadRecord(f"a long {unit} in a.txt", "a.txt", content, {"text_unit": unit, **AT_MOST_50})
    for text in ("good </s> text", "unheard of"):
        content = jsonl([{"text": some} for some in ("good text", text, "good text")])
        yield BadRecord(f"the text {text!r}", "a.jsonl", content, {"eos": "</s>"}, write_tokenizer=write_word_tokenizer)


# ids of other tools

TOKEN_LINES: list[Any] = [
    {"labels": [-100, 7]},
    {"labels": [-100]},
    {"labels": [5, None]},
    {"labels": [5, True]},
    {"labels": [5.0, 6.0]},
    {"labels": None},
    {"loss_mask": [1, 1]},
    {"seq_start_id": [0]},
    {"position_ids": [0, True]},
    {"attention_mask": [1, "0"]},
    {"attention_mask": 3},
    {"input_ids": [5, -6], "labels": [5, -6]},
    *({"input_ids": ids} for ids in ("5 6", True, 5, [1 << 63], "5" * 100, [5, 6.5], [5, 2.0], [5, None], [5, True])),
    *({"input_ids": ids} for ids in (["5"], [[5], [6]], [5, {"id": 6}], [5, "6" * 100])),
]
"""What differs from good lines."""

WHOLE_LINES: list[Any] = [{"labels": [5, 6]}, {"id": 3}, {"input_ids": [5, 6]}, "no object"]
"""What stands in place of a good line."""

TOKEN_ROWS: list[dict[str, Any]] = [
    {"loss_mask": [0, 3, 1]},
    {"loss_mask": [0, 1]},
    {"loss_mask": [0.0, 1.5, -1.0]},
    {"loss_mask": [0.0, 1.5, 1e300]},
    {"attention_mask": [1, 0, 1]},
    {"attention_mask": [1, 1]},
    {"attention_mask": [1, 3, 3]},
    {"attention_mask": [2, 2, 1]},
    {"attention_mask": [-1, 1, 1]},
    {"attention_mask": [1, 1, 0], "labels": [5, 6, 7]},
    {"attention_mask": [0, 1, 1], "loss_mask": [0.5, 1.0, 1.0]},
    {"position_ids": [0, 1, 3]},
    {"position_ids": [1, 2, 3]},
    {"position_ids": [0, 1, 1]},
    {"position_ids": [0, 1]},
    {"input_ids": [5, 7, 7], "position_ids": [0, 0, 0]},
    {"seq_lengths": [1] * 9},
    {"seq_lengths": [0, 3]},
    {"seq_lengths": [1 << 62, 1 << 62, 1 << 62, (1 << 62) + 3]},  # 2^64 more
]
"""What differs from rows of the ids 5, 6 and 7 that say nothing else."""

ONLY_IN_TABLES: list[dict[str, Any]] = [
    {"labels": [-100, 7, 7]},
    {"input_ids": [0], "labels": [7]},  # of nothing but a delimiter
    {"loss_mask": None},
    {"loss_mask": [0, 1, 1], "seq_start_id": [0]},
]

GOOD_ROW = {name: [8, 9] for name in ("input_ids", "labels")} | {"loss_mask": [1, 0], "attention_mask": [1, 1]}
GOOD_ROW |= {"position_ids": [0, 1], "seq_lengths": [2], "seq_start_id": [0]}


def _of_tokens() -> Iterator[BadRecord]:
    plain: dict[str, Any] = {"input_ids": [5, 6]}
    labelled = plain | {"labels": [5, 6]}
    for bad in (*(labelled | change for change in TOKEN_LINES), *WHOLE_LINES):
        yield BadRecord(f"{bad} in a.jsonl", "a.jsonl", jsonl([labelled, bad, labelled]), run=import_corpus)
    content = jsonl([plain, labelled, plain])
    yield BadRecord("labels that the first line does not have", "a.jsonl", content, run=import_corpus)
    for number in (b"1e999", b"7" * 5_000):
        content = b"\n".join(b'{"input_ids": [5, %s]}' % last for last in (b"6", number, b"6"))
        yield BadRecord(f"an id of {len(number)} characters", "a.jsonl", content, run=import_corpus)
    what = "a kept value of another type next to token ids"
    found = pa.table({"input_ids": [[5, 6]] * 3, "n": ["1", "one", "1"]})
    yield BadRecord(what, "a.parquet", parquet_bytes(found), A_NUMBER, run=import_corpus)
    for change in (*TOKEN_ROWS, *ONLY_IN_TABLES):
        bad = {"input_ids": [5, 6, 7], **change}
        good = {name: GOOD_ROW[name] for name in bad}
        table = pa.Table.from_pylist([good, bad, good])
        contents = {"a.parquet": parquet_bytes(table), "a.arrow": arrow_bytes(table)}
        if change in TOKEN_ROWS:
            contents["a.jsonl"] = jsonl(table.to_pylist())
        for file, content in contents.items():
            yield BadRecord(f"{bad} in {file}", file, content, run=import_corpus)


BAD_RECORDS = [*_of_text(), *_of_tokens()]
SAID = {
    row.what: row for row in said_in(Path(__file__).with_suffix(".txt"), {bad.what: bad.build for bad in BAD_RECORDS})
}
"""How builds with them are refused."""
