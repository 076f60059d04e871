"""`tokshard build --chat`: conversations of files become a corpus with loss spans."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.contract.small import shrink
from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.chats import said
from tests.pipeline.encode.chat.templates import CHATML
from tests.pipeline.inputs import jsonl, zstd
from tests.pipeline.vocabularies import write_vocabulary
from tokshard import build_corpus, open_corpus
from tokshard.errors import BadRecordError, BuildError, UsageError
from tokshard.format import names
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.store import files_below, open_store

RECORDS = [said("q", "one", "r", "two"), said("what is <|im_end|>?", "a ü 🧪"), said("x", "three")]


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A tokenizer in which token k is the byte k, and that has a chat template."""
    return write_vocabulary(tmp_path / "tok", chats.bytes_alone(), {**chats.VARIABLES, "chat_template": CHATML})


def build(source: Any, tokenizer: Path, out: Path, **options: Any) -> Any:
    return build_corpus(source, tokenizer=str(tokenizer), out=str(out), **{"workers": 1, "chat": "own", **options})


def learned(out: Path) -> list[list[str]]:
    """The text of each span of each document."""
    with open_corpus(out) as corpus:
        assert corpus.has_spans
        spans = [corpus.loss_spans(index).reshape(-1, 2).tolist() for index in range(len(corpus))]
        return [
            [_text(document[start:stop].tolist()) for start, stop in found]
            for document, found in zip(corpus, spans, strict=True)
        ]


def _text(ids: list[int]) -> str:
    added = {256 + n: token.encode() for n, token in enumerate([*chats.SPECIAL, *chats.MEANT])}
    return b"".join(added[one] if one in added else bytes([one]) for one in ids).decode()


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_bytes(jsonl(records))
    return path


def test_the_first_record_of_which_a_template_leaves_something_out_is_counted_in_its_source(
    tmp_path, tokenizer, monkeypatch
):
    answer = {"role": "assistant", "content": "a", "thinking": "why"}
    records = [*RECORDS * 4, {"messages": [{"role": "user", "content": "q"}, answer]}] * 2
    shrink(monkeypatch.setattr, chunk_bytes=256)
    result = build(write(tmp_path / "a.jsonl", records), tokenizer, tmp_path / "out")
    found = result.manifest.records.template_drops["reasoning"]
    assert (found.count, found.record, found.message) == (2, 13, 1)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "records"])
def test_fields_that_are_not_read_are_named_with_the_number_of_records(kind, tmp_path, tokenizer):
    records = [
        {**record, "lang": "en", "meta": {"id": n}, "name": str(n), "none": None} for n, record in enumerate(RECORDS)
    ]
    records[0]["messages"] = [{**one, "loss": 0} for one in records[0]["messages"]]
    source = iter(records) if kind == "records" else write(tmp_path / f"a.{kind}", records)
    result = build(source, tokenizer, tmp_path / "out", keep_field="name")
    (note,) = [note for note in result.notes if "not read" in note]
    assert "not read, with the number of their records: lang (3), meta (3), messages[].loss (1)" in note


@pytest.mark.parametrize("content", [object(), {"a set"}, [{("a tuple",): "as key"}]])
def test_an_object_in_a_conversation_is_no_text(content, tmp_path, tokenizer):
    source = iter([{"messages": [{"role": "user", "content": content}]}])
    with pytest.raises(BadRecordError, match=r"record 1: malformed: the conversation cannot be JSON: "):
        build(source, tokenizer, tmp_path / "out")


def test_values_that_are_nested_too_deeply_end_no_build(tmp_path, tokenizer):
    start = json.dumps(said("q", "a"))[:-1] + ', "documents": [{"a": '
    deep = [start + "[" * depth + "]" * depth + "}]}" for depth in range(300, 999, 50)]
    (tmp_path / "a.jsonl").write_text("\n".join([*deep, json.dumps(said("q", "a"))]))
    result = build(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", on_bad_record="skip")
    assert result.manifest.records.read == len(deep) + 1
    assert result.manifest.records.left_out.keys() <= {"not a conversation", "malformed"}


def test_messages_of_a_type_that_is_not_read_are_refused_without_an_option_of_kept_fields(tmp_path, tokenizer):
    messages = pa.StructArray.from_arrays(
        [pa.array(["user"]).dictionary_encode(), pa.array(["q"])], ["role", "content"]
    )
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 1], messages)}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"field 'messages' has type .*, which a build cannot read") as caught:
        build(tmp_path / "a.parquet", tokenizer, tmp_path / "out")
    assert caught.value.hint.endswith("in the source")


def test_a_record_gives_the_same_document_from_json_lines_tables_and_python_objects(tmp_path, tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": 1, "unit": None}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None, "thinking": ""}
    record = {"messages": [{"role": "user", "content": "q", "tool_calls": None}, message], "tools": [], "system": None}
    nested = pa.StructArray.from_arrays(
        [pa.array([one["role"] for one in record["messages"]])]
        + [_json_array([one.get(key) for one in record["messages"]]) for key in ("content", "tool_calls")],
        ["role", "content", "tool_calls"],
    )
    for name, items in {"json": _json_array(record["messages"]), "nested": nested}.items():
        pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 2], items)}), tmp_path / f"{name}.parquet")
    sources = {
        "jsonl": write(tmp_path / "a.jsonl", [record]),
        "parquet": write(tmp_path / "a.parquet", [{"messages": record["messages"]}]),
        "json": tmp_path / "json.parquet",
        "nested": tmp_path / "nested.parquet",
        "pandas": iter([{**record, "documents": float("nan")}]),
    }
    for kind, source in sources.items():
        build(source, tokenizer, tmp_path / kind)
        called = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call><|im_end|>'
        assert learned(tmp_path / kind) == [[called]], kind


@pytest.mark.parametrize("kind", ["parquet", "python"])
def test_bytes_inside_a_conversation_and_a_kept_value_are_text(kind, tmp_path, tokenizer):
    messages = [{"role": role, "content": text.encode()} for role, text in (("user", "ß"), ("assistant", "ü"))]
    record = {"messages": messages, "tags": ["ö".encode()]}
    python = {"messages": np.array(messages, dtype=object), "tags": np.array(record["tags"], dtype=object)}
    source = iter([python]) if kind == "python" else write(tmp_path / "a.parquet", [record])
    build(source, tokenizer, tmp_path / "out", keep_field="tags")
    assert learned(tmp_path / "out") == [["ü<|im_end|>"]]
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.metadata(0)["tags"] == '["ö"]'
    messages[1]["content"], record["tags"] = b"\xff", []
    write(tmp_path / "b.parquet", [record, {**record, "messages": messages[:1] * 2, "tags": [b"\xff"]}])
    with pytest.raises(BuildError, match="2 invalid UTF-8"):
        build(tmp_path / "b.parquet", tokenizer, tmp_path / "bad", keep_field="tags", on_bad_record="skip")


def _json_array(values: list[Any]) -> pa.Array:
    """Arrow's type for JSON, in which `datasets` stores values of mixed types."""
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value) for value in values]))


def test_weights_of_messages_are_those_of_their_targets(tmp_path, tokenizer):
    records = [said("q", "one", "r", "two"), said("x", "three"), said("x", "four")]
    records[0]["messages"][1]["weight"], records[2]["messages"][1]["weight"] = 0.25, 3
    path = write(tmp_path / "a.jsonl", records)
    build(path, tokenizer, tmp_path / "out", loss="weighted")
    expected: Counter[float] = Counter()
    with open_corpus(tmp_path / "out") as corpus:
        assert list(corpus.manifest.columns) == ["loss", "loss_weights"]
        for index, weights in enumerate(([0.25, 1], [1], [3])):
            for (start, stop), weight in zip(corpus.loss_spans(index).reshape(-1, 2).tolist(), weights, strict=True):
                expected[weight] += stop - start
    plan = StreamPlan({"chat": tmp_path / "out"}, seq_len=64, epochs=1, seed=1)
    with NumpyLoader(plan, global_batch_size=2) as loader:
        read = Counter(weight for batch in loader for weight in batch["loss_weights"].ravel().tolist() if weight)
    assert read == expected
    build(path, tokenizer, tmp_path / "skipped", on_bad_record="skip")
    assert learned(tmp_path / "skipped") == [["three<|im_end|>"]], "weights are no targets of every loss"


# who runs it


def many(count: int) -> list[dict[str, Any]]:
    """Conversations of which some are equal, some bad, and some have nothing to learn."""
    found = [said("q" * (n % 5), "one 🧪 " * (n % 7), f"{n % 13}", "<|im_end|> two") for n in range(count)]
    for n in range(0, count, 9):
        found[n]["messages"][3]["weight"], found[n]["messages"][1]["weight"] = 0, 1
    for n in range(0, count, 11):
        found[n]["messages"].pop(n % 4)["role"] = "nobody"
    return [{"messages": []} if n % 10 == 3 else {**record, "pad": "x" * 30_000} for n, record in enumerate(found)]


@pytest.mark.slow
def test_workers_and_jobs_in_a_store_make_the_bytes_of_one_process_of_conversations(in_memory, tmp_path, tokenizer):
    options: dict[str, Any] = {"chat": "own", "on_bad_record": "skip", "task_bytes": 1 << 20, "dedup": "exact"}
    options |= {"max_tokens": 40, "overlong": "head", "min_tokens": 25, "loss": "weighted", "validation_fraction": 0.3}
    records = many(40)  # so large, since workers know nothing of smaller chunks
    content = {f"in/{n}.jsonl": jsonl(records[n:]) for n in range(2)} | {"in/c.jsonl.zst": zstd(jsonl(records[:30]))}
    content |= {f"tok/{path.name}": path.read_bytes() for path in tokenizer.iterdir()}
    found = []
    for root in (str(tmp_path / "alone"), str(tmp_path / "workers"), in_memory):
        for path, data in content.items():
            open_store(root).put(path, data)
        here: dict[str, Any] = {"tokenizer": f"{root}/tok", "out": f"{root}/out", **options}
        if root == in_memory:
            for index in (2, 0, 1):
                run_job(f"{root}/in", job_index=index, num_jobs=3, workers=1, **here)
            commit_corpus(here["out"])
        else:
            build_corpus(f"{root}/in", **here, workers=2 if root.endswith("workers") else 1)
        store = open_store(here["out"])
        found.append({path: store.get(path) for path in files_below(store, "") if Path(path).name != names.REPORT})
    assert found[0] == found[1] == found[2]
    assert sum(names.is_shard_name(Path(path).name) for path in found[0]) > 1
