"""Sources whose second record is bad, between two good ones that are alike, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.pipeline.inputs import COMPRESSIONS, TABLES, arrow_bytes, jsonl, parquet_bytes, write_byte_tokenizer
from tests.pipeline.vocabularies import write_word_tokenizer
from tokshard import build_corpus, import_corpus

OTHERS = {
    "missing text": "check --text-field",
    "over max-document-bytes": "allow longer documents with --max-document-bytes",
    "id outside the vocabulary": "give the tokenizer that made the ids with --tokenizer",
}
"""Reason to what its hint says instead of ``repair the record``."""


@dataclass(frozen=True)
class BadRecord:
    """A source with a bad record.

    Args:
        what: the record is.
        file: the name of the source.
        content: the bytes of the file.
        said: the reason, as it is counted, and the detail. ``*`` stands for what depends on versions.
        options: of the build.
        run: the build, or import.
    """

    what: str
    file: str
    content: bytes
    said: str
    options: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] = build_corpus
    write_tokenizer: Callable[[Path], Path] = write_byte_tokenizer

    @property
    def problem(self) -> str:
        return f"{self.file}, {'line' if '.jsonl' in self.file else 'record'} 2: {self.said}"

    @property
    def reason(self) -> str:
        return self.said.partition(": ")[0]

    @property
    def hint(self) -> str:
        return f"{OTHERS.get(self.reason, 'repair the record')}, or leave out such records with --on-bad-record skip"

    def build(self, place: Path, **options: Any) -> Any:
        """Build or import the source into ``out`` of `place`, the current directory."""
        (place / self.file).write_bytes(self.content)
        tokenizer = self.write_tokenizer(place / "tok")
        return self.run(self.file, tokenizer=tokenizer, out="out", workers=1, **self.options, **options)


# text

BAD_BYTE = "'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"
AT_MOST_50 = {"max_document_bytes": 50}
LONG = "over max-document-bytes: text has 51 bytes, at most 50 are allowed", AT_MOST_50
HELD = "over max-document-bytes: line has 2,500,013 bytes, at most 1,048,976 are allowed", AT_MOST_50
OTHER_TYPE = "kept field of another type: field 'n' is 'one', not int64", {"keep_field": ["n:int64"]}
SPECIAL = "the tokenizer gives this text the id of a special token, which would be read as control"
MISSING_UNK = "tokenizers * fails on the text: WordLevel error: Missing [UNK]*"
GOOD = b'{"text": "good"}'

LINES: list[tuple[Any, ...]] = [
    ("a record without the text field", b'{"body": "x"}', "missing text: no field 'text'; it has: body"),
    ("a null as text", b'{"text": null}', "missing text: field 'text' is null"),
    ("a number as text", b'{"text": 17}', "text is not a string: field 'text' is 17"),
    ("text that is not UTF-8", b'{"text": "a\xff"}', f"invalid UTF-8: {BAD_BYTE}"),
    ("a document that is too long", b'{"text": "%s"}' % (b"x" * 51), *LONG),
    ("a record that is too long to hold", b'{"text": "%s"}' % (b"x" * 2_500_000), *HELD),
    (
        "a kept field of another type",
        b'{"text": "x", "n": "one"}',
        OTHER_TYPE[0].replace("'one'", '"one"'),
        OTHER_TYPE[1],
    ),
]
DELIMITED: list[tuple[Any, ...]] = [
    (
        "a row that is too short",
        "a.csv",
        b"text,n\ngood,1\nshort\ngood,1\n",
        "malformed: line 3: 1 fields, the header has 2",
    ),
    (
        "a row that is too long",
        "a.csv",
        b'n,text\n1,good\n2,"a\nb",3\n1,good\n',
        "malformed: line 4: 3 fields, the header has 2",
    ),
    ("a badly quoted row", "a.csv", b'text\ngood\n"a" b\ngood\n', "malformed: line 3: ',' expected after '\"'"),
    (
        "a row that is too short",
        "a.tsv",
        b"text\tn\ngood\t1\na, b\ngood\t1\n",
        "malformed: line 3: 1 fields, the header has 2",
    ),
    ("text that is not UTF-8", "a.csv", b"text\ngood\na\xff\ngood\n", f"invalid UTF-8: {BAD_BYTE}"),
    ("a document that is too long", "a.csv", b"text\ngood\n" + b"x" * 51 + b"\ngood\n", *LONG),
    ("a kept field of another type", "a.csv", b"text,n\ngood,1\nx,one\ngood,\n", *OTHER_TYPE),
]
COLUMNS: list[tuple[Any, ...]] = [
    ("a null as text", None, "missing text: no value in field 'text'"),
    ("text that is not UTF-8", b"a\xff", f"invalid UTF-8: {BAD_BYTE}"),
    ("a document that is too long", b"x" * 51, *LONG),
    ("a kept field of another type", b"x", *OTHER_TYPE),
]


def _of_text() -> Iterator[BadRecord]:
    for suffix, compress in COMPRESSIONS.items():
        content = compress(b"\n".join([GOOD, b'{"text": "open', GOOD]))
        said = """malformed: Input data was truncated: '{"text": "open'"""
        yield BadRecord(f"a malformed record in a.jsonl{suffix}", f"a.jsonl{suffix}", content, said)
    for what, line, *said in LINES:
        yield BadRecord(f"{what} in a.jsonl", "a.jsonl", b"\n".join([GOOD, line, GOOD]), *said)
    nested = b'{"a": {"b": "good"}}\n{"a": {}}\n{"a": {"b": "good"}}\n', "missing text: no field 'a.b'; it has: a"
    yield BadRecord("a record without the nested text field in a.jsonl", "a.jsonl", *nested, {"text_field": "a.b"})
    for what, file, content, *said in DELIMITED:
        yield BadRecord(f"{what} in {file}", file, content, *said)
    for file, encode in TABLES.items():
        for what, value, *said in COLUMNS:
            texts = pa.array([b"good", value, b"good"], pa.binary()).view(pa.string())
            table = pa.table({"text": texts, "n": ["1", "one", None]})
            yield BadRecord(f"{what} in {file}", file, encode(table), *said)
    for unit, end in (("line", b"\n"), ("paragraph", b"\n\n")):
        content = end.join([b"good", b"x" * 51, b"good"])
        yield BadRecord(f"a long {unit} in a.txt", "a.txt", content, LONG[0], {"text_unit": unit, **AT_MOST_50})
    for text, said in (
        ("good </s> text", f"special token in text: {SPECIAL}"),
        ("unheard of", f"tokenizer fails on the text: {MISSING_UNK}"),
    ):
        content = jsonl([{"text": some} for some in ("good text", text, "good text")])
        yield BadRecord(
            f"the text {text!r}", "a.jsonl", content, said, {"eos": "</s>"}, write_tokenizer=write_word_tokenizer
        )


# ids of other tools

LABELS, ROW = "loss mask or labels do not fit", "padding or documents of the row do not fit"
IDS, VOCABULARY, MALFORMED = "missing token ids", "id outside the vocabulary", "malformed"
NO_LABELS = "the record has no mask or labels to say what is trained, and others do"
NUMBERS = "expected 0 for padding and 1 for ids, or 1, 2, 3 ... for the documents of a row"
POSITIONS = "expected 0 where a document begins, and one more at each id"
LENGTHS = "expected numbers above 0 whose sum is 3, its ids"
EQUAL = "and before it, and both ids are equal: padding that no attention_mask shows"
TWICE = "several columns that may say what is trained: labels, loss_mask"
SHIFTED = "expected -100 or the id itself, 6: labels are not shifted"
INSIDE = "inside a document: padding is at its start or end"
PADDING = "is trained, and attention_mask is 0 there, as for padding"
A_LIST = "expected a list of ids"
IN_PACKS = "expected 0 at the last token: it is shifted by one in packs"

Change = tuple[str, dict[str, Any], str]
TOKEN_LINES: list[Change] = [
    (LABELS, {"labels": [-100, 7]}, f"labels is 7 at token 1, {SHIFTED}"),
    (LABELS, {"labels": [-100]}, "labels has 1 values for 2 ids"),
    (LABELS, {"labels": [5, None]}, f"labels is a list with null at index 1, {A_LIST}"),
    (LABELS, {"labels": [5, True]}, f"labels is a list with true at index 1, {A_LIST}"),
    (LABELS, {"labels": [5.0, 6.0]}, f"labels is a list with 5.0 at index 0, {A_LIST}"),
    (LABELS, {"labels": None}, NO_LABELS),
    (LABELS, {"loss_mask": [1, 1]}, f"the record has {TWICE}"),
    (ROW, {"seq_start_id": [0]}, "the record is a pack (seq_start_id); packs are read from parquet"),
    (ROW, {"position_ids": [0, True]}, "position_ids is a list with true at index 1, expected a list of integers"),
    (ROW, {"attention_mask": [1, "0"]}, 'attention_mask is a list with "0" at index 1, expected a list of integers'),
    (ROW, {"attention_mask": 3}, "attention_mask is 3, expected a list of integers"),
    (VOCABULARY, {"input_ids": [5, -6], "labels": [5, -6]}, "id -6 at token 1; the vocabulary has ids up to 256"),
]
"""What differs from good lines."""

NO_IDS: list[tuple[Any, str]] = [
    *(("5 6", '"5 6"'), (True, "true"), (5, "5"), ([1 << 63], "[9223372036854775808]"), ("5" * 100, '"' + "5" * 79)),
    ([5, 6.5], "a list with 6.5 at index 1"),
    ([5, 2.0], "a list with 2.0 at index 1"),
    ([5, None], "a list with null at index 1"),
    ([5, True], "a list with true at index 1"),
    (["5"], 'a list with "5" at index 0'),
    ([[5], [6]], "a list with [5] at index 0"),
    ([5, {"id": 6}], 'a list with {"id": 6} at index 1'),
    ([5, "6" * 100], 'a list with "' + "6" * 79 + " at index 1"),
]
"""What is no list of ids, and what it is called."""

TOKEN_ROWS: list[Change] = [
    (LABELS, {"loss_mask": [0, 3, 1]}, "loss_mask is 3 at token 1, expected 0 or 1"),
    (LABELS, {"loss_mask": [0, 1]}, "loss_mask has 2 values for 3 ids"),
    (LABELS, {"loss_mask": [0.0, 1.5, -1.0]}, "loss_mask is -1.0 at token 2, expected a weight of 0 or more"),
    (ROW, {"attention_mask": [1, 0, 1]}, f"attention_mask is 0 before token 2, {INSIDE}"),
    (ROW, {"attention_mask": [1, 1]}, "attention_mask has 2 values for 3 ids"),
    (ROW, {"attention_mask": [1, 3, 3]}, f"attention_mask is 3 at token 1, {NUMBERS}"),
    (ROW, {"attention_mask": [2, 2, 1]}, f"attention_mask is 2 at token 0, {NUMBERS}"),
    (ROW, {"attention_mask": [-1, 1, 1]}, f"attention_mask is -1 at token 0, {NUMBERS}"),
    (ROW, {"attention_mask": [1, 1, 0], "labels": [5, 6, 7]}, f"token 2 {PADDING}"),
    (ROW, {"attention_mask": [0, 1, 1], "loss_mask": [0.5, 1.0, 1.0]}, f"token 0 {PADDING}"),
    (ROW, {"position_ids": [0, 1, 3]}, f"position_ids is 3 at token 2, {POSITIONS}"),
    (ROW, {"position_ids": [1, 2, 3]}, f"position_ids is 1 at token 0, {POSITIONS}"),
    (ROW, {"position_ids": [0, 1, 1]}, f"position_ids is 1 at token 2, {POSITIONS}"),
    (ROW, {"position_ids": [0, 1]}, "position_ids has 2 values for 3 ids"),
    (ROW, {"input_ids": [5, 7, 7], "position_ids": [0, 0, 0]}, f"position_ids is 0 at token 2 {EQUAL}"),
    (ROW, {"seq_lengths": [1] * 9}, f"seq_lengths of the row are [1, 1, 1, 1, 1, 1, 1, 1], ..., {LENGTHS}"),
    (ROW, {"seq_lengths": [0, 3]}, f"seq_lengths of the row are [0, 3], {LENGTHS}"),
]
"""What differs from rows of the ids 5, 6 and 7 that say nothing else."""

ONLY_IN_TABLES: list[Change] = [
    (LABELS, {"labels": [-100, 7, 7]}, f"labels is 7 at token 1, {SHIFTED}"),
    # of nothing but a delimiter
    (LABELS, {"input_ids": [0], "labels": [7]}, f"labels is 7 at token 0, {SHIFTED.replace('6', '0')}"),
    (LABELS, {"loss_mask": None}, "loss_mask has 0 values for 3 ids"),
    (LABELS, {"loss_mask": [0, 1, 1], "seq_start_id": [0]}, f"loss_mask is 1 at token 2, {IN_PACKS}"),
]

GOOD_ROW = {name: [8, 9] for name in ("input_ids", "labels")} | {"loss_mask": [1, 0], "attention_mask": [1, 1]}
GOOD_ROW |= {"position_ids": [0, 1], "seq_lengths": [2], "seq_start_id": [0]}


def _of_tokens() -> Iterator[BadRecord]:
    labelled: dict[str, Any] = {"input_ids": [5, 6], "labels": [5, 6]}
    lines = [(reason, labelled | change, said) for reason, change, said in TOKEN_LINES]
    expected = "expected a list of integers below 2^63"
    lines += [(IDS, labelled | {"input_ids": ids}, f"input_ids is {said}, {expected}") for ids, said in NO_IDS]
    lines += [
        (IDS, {"labels": [5, 6]}, f"it has no ids, {expected}"),
        (IDS, {"id": 3}, "no ids; it has: id"),
        (LABELS, {"input_ids": [5, 6]}, NO_LABELS),
        (MALFORMED, "no object", "Expected `object`, got `str`: '\"no object\"'"),
    ]
    for reason, bad, said in lines:
        content = jsonl([labelled, bad, labelled])
        yield BadRecord(f"{bad} in a.jsonl", "a.jsonl", content, f"{reason}: {said}", run=import_corpus)
    plain = {"input_ids": [5, 6]}
    content, said = jsonl([plain, labelled, plain]), f"{LABELS}: the record has labels to say what is trained, and *"
    yield BadRecord("labels that the first line does not have", "a.jsonl", content, said, run=import_corpus)
    found = pa.table({"input_ids": [[5, 6]] * 3, "n": ["1", "one", "1"]})
    yield BadRecord(
        "a kept value of another type next to token ids",
        "a.parquet",
        parquet_bytes(found),
        *OTHER_TYPE,
        run=import_corpus,
    )
    for reason, change, said in (*TOKEN_ROWS, *ONLY_IN_TABLES):
        bad = {"input_ids": [5, 6, 7], **change}
        good = {name: GOOD_ROW[name] for name in bad}
        table = pa.Table.from_pylist([good, bad, good])
        contents = {"a.parquet": parquet_bytes(table), "a.arrow": arrow_bytes(table)}
        if (reason, change, said) in TOKEN_ROWS:
            contents["a.jsonl"] = jsonl(table.to_pylist())
        for file, content in contents.items():
            yield BadRecord(f"{bad} in {file}", file, content, f"{reason}: {said}", run=import_corpus)


BAD_RECORDS = [*_of_text(), *_of_tokens()]
