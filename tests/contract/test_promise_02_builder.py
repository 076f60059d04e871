"""Promises 2 and 9, of whole builds: what is written and left out is what a naive builder says, which has no tasks."""

from __future__ import annotations

import bz2
import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.examples import examples
from tests.pipeline.inputs import parquet_bytes, table
from tests.spec import builder
from tests.spec.builder import Files, RefusedError
from tokshard import TokshardError, build_corpus, open_corpus
from tokshard.format import names

texts = st.sampled_from(["one", "two", "two words", "<|endoftext|>", "ä\r\nb", " ", "x" * 30]) | st.text(
    st.characters(codec="utf-8"), max_size=8
)
good_lines = texts.map(lambda text: json.dumps({"text": text, "id": len(text), "deep": {"text": text}}).encode())
odd_lines = st.sampled_from(
    [b"", b"  ", b"{bad", b"[1]", b'{"text": null}', b'{"no": 1}', b'{"text": 5}', b'{"text": "\xff"}', b'{"text": ""}']
)
ends = st.sampled_from([b"\n", b"\r\n"])


def joined(lines: Sequence[tuple[bytes, bytes]], mark: bytes, is_ended: bool) -> bytes:
    content = b"".join(line + end for line, end in lines)
    return mark + (content if is_ended or not lines else content.removesuffix(lines[-1][1]))


def lines_of(lines: st.SearchStrategy[bytes], most: int = 12) -> st.SearchStrategy[bytes]:
    marks = st.sampled_from([b"", b"", builder.MARK])
    return st.builds(joined, st.lists(st.tuples(lines, ends), max_size=most), marks, st.booleans())


rows = st.lists(st.none() | texts, min_size=1, max_size=6)
contents: dict[str, st.SearchStrategy[bytes]] = {
    "a.jsonl": lines_of(good_lines),
    "sub/b.jsonl": lines_of(good_lines | odd_lines),
    "sub-c.jsonl.gz": lines_of(good_lines).map(gzip.compress),
    "d.txt": lines_of(texts.map(str.encode) | st.sampled_from([b"", b" ", b"\t", b"\xff", b"long " * 12])),
    "e.txt.bz2": lines_of(texts.map(str.encode)).map(bz2.compress),
    "f.parquet": rows.map(lambda found: parquet_bytes(table([{"text": text, "id": "7"} for text in found]))),
    ".hidden.txt": st.just(b"hidden"),
    "page.md": st.just(b"of another format"),
}
directories = st.dictionaries(st.sampled_from(sorted(contents)), st.none(), min_size=1, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: contents[name] for name in names})
)
options = st.fixed_dictionaries(
    {},
    optional={
        "text_unit": st.sampled_from(["line", "paragraph"]),
        "id_field": st.just("id"),
        "min_tokens": st.integers(1, 4),
        "max_tokens": st.integers(4, 12),
        "max_document_bytes": st.integers(8, 20),
        "dedup": st.just("exact"),
        "validation_fraction": st.sampled_from([0.3, 0.5]),
        "max_documents": st.integers(1, 12),
    },
)
policies = st.sampled_from([{"on_bad_record": "skip"}] * 3 + [{}, {"on_bad_record": "skip", "max_bad_records": 2}])


def written(folder: Path, directories: Sequence[Files]) -> list[Path]:
    """The arguments of a build; a directory with one file is that file alone."""
    arguments = []
    for number, files in enumerate(directories):
        for name, content in files.items():
            path = folder / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        arguments.append(folder / str(number))
    return arguments


def read(folder: Path) -> builder.Corpus:
    """A corpus on disk."""
    found = builder.Corpus()
    with open_corpus(folder) as corpus:
        for index, document in enumerate(corpus.documents()):
            place, kept = corpus.provenance(index), corpus.metadata(index)
            found.documents.append(builder.Document(document.tolist(), place.source, place.record, kept.get("id")))
        found.sources = [
            builder.SourceRow(row.path, row.records_read, row.documents, Counter(row.left_out))
            for row in corpus.sources()
        ]
        assert corpus.manifest.records.written == len(found.documents)
    file = folder / names.REJECTS
    entries = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    found.rejects = [(entry["source"].partition("/")[2], entry["record"], entry["reason"]) for entry in entries]
    return found


def check(
    folder: Path, tokenizer: Path, files: Sequence[Files], given: dict[str, Any], task_bytes: int, earlier: Texts
) -> bool:
    """Build the first generation, or the second one if there are texts of the first; returns whether it is written."""
    said = builder.Options(encode=lambda text: [byte + 1 for byte in text.encode()], eos=0, **given)
    run = partial(
        build_corpus,
        written(folder / f"in-{earlier is not None}", files),
        tokenizer=tokenizer,
        out=folder / "out",
        append=earlier is not None,
        workers=1,
        task_bytes=task_bytes,
        **given,
    )
    try:
        expected = builder.build(files, said, earlier)
    except RefusedError as error:
        reason = f" {error.record}: {error.reason}" if error.record else ""
        with pytest.raises(TokshardError) as caught:
            run()
        if not all(part in caught.value.problem for part in (error.source, reason)):
            raise
        return False
    ids = [document.id for corpus in expected.values() for document in corpus.documents]
    assume("id_field" not in given or any(ids))  # a field that no document has is an error
    run()
    generation = "" if earlier is None else "generation-01"
    for split, corpus in expected.items():
        assert read(folder / "out" / split / generation) == corpus
    return True


Texts = set[str] | None


# to find smaller builds takes minutes
@settings(max_examples=examples(150), deadline=None, phases=[Phase.explicit, Phase.generate])
@example(files=[{"a.jsonl": b'{"text": "a"}'}], more={"d.txt": b""}, given={"dedup": "exact"}, policy={}, chunk_bytes=9)
@given(
    files=st.lists(directories, min_size=1, max_size=2),
    more=directories,
    given=options,
    policy=policies,
    chunk_bytes=st.sampled_from([200, 40, 9]),
)
def test_a_build_and_an_append_write_what_the_naive_builder_says(
    byte_tokenizer: Path,
    files: list[Files],
    more: Files,
    given: dict[str, Any],
    policy: dict[str, Any],
    chunk_bytes: int,
) -> None:
    given |= policy
    if given.get("dedup") and given.get("max_documents"):
        given.pop("max_bad_records", None)  # the pages do not say which bad records count then
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, **small.TINY | {"chunk_bytes": chunk_bytes})  # many tasks
        folder = Path(name)
        is_written = check(folder, byte_tokenizer, files, given, 2 * chunk_bytes, None)
        if is_written and not (
            given.get("dedup") and given.get("max_documents")
        ):  # such a corpus does not know all texts
            said = builder.Options(encode=lambda text: [], eos=0, **given)
            earlier = builder.texts_of(files, said) if given.get("dedup") else set()
            check(folder, byte_tokenizer, [more], given, 2 * chunk_bytes, earlier)
