"""`tokshard build --chat`: conversations of files become a corpus with loss spans."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.contract import small
from tests.examples import crossed
from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.chats import said
from tests.pipeline.encode.chat.templates import BARE, CHATML
from tests.pipeline.inputs import jsonl, zstd
from tests.store.memory import SCHEME, MemoryStore
from tokshard import build_corpus, copy_corpus, open_corpus
from tokshard.cli.corpus_text import summary_text
from tokshard.errors import BadRecordError, ConfigurationChangedError, TokenizerError, UsageError
from tokshard.format import names
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

RECORDS = [said("q", "one", "r", "two"), said("what is <|im_end|>?", "a ü 🧪"), said("x", "three")]
LEARNED = [["one<|im_end|>", "two<|im_end|>"], ["a ü 🧪<|im_end|>"], ["three<|im_end|>"]]


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A tokenizer in which token k is the byte k, and that has a chat template."""
    folder = tmp_path / "tok"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(chats.bytes_alone()))
    (folder / "tokenizer_config.json").write_text(json.dumps({**chats.VARIABLES, "chat_template": CHATML}))
    return folder


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


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("workers", [1, 2])
def test_conversations_of_files_become_documents_with_their_answers_as_targets(name, workers, tmp_path, tokenizer):
    build(write(tmp_path / name, RECORDS), tokenizer, tmp_path / "out", workers=workers)
    assert learned(tmp_path / "out") == LEARNED
    with open_corpus(tmp_path / "out") as corpus:
        end = corpus.eos_id
        assert [document.tolist().count(end) for document in corpus] == [1, 1, 1]
        assert corpus.manifest.num_targets == sum(len(text.encode()) - 9 for spans in LEARNED for text in spans)


def test_python_records_and_kept_fields(tmp_path, tokenizer):
    records = [{**record, "id": str(n), "name": None} for n, record in enumerate(RECORDS)]
    build(iter(records), tokenizer, tmp_path / "out", id_field="id")
    assert learned(tmp_path / "out") == LEARNED
    with open_corpus(tmp_path / "out") as corpus:
        assert list(corpus.manifest.columns) == ["loss", "id"]


def test_structs_of_parquet_lose_their_padding(tmp_path, tokenizer):
    text = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    (tmp_path / "t.jinja").write_text(text)
    record = said("q", "a")
    record["messages"][1]["calls"] = [{"b": 1}, {"c": 2}]
    out = tmp_path / "out"
    build(write(tmp_path / "a.parquet", [record]), tokenizer, out, chat=str(tmp_path / "t.jinja"))
    with open_corpus(out) as corpus:
        text = _text(corpus.document(0).tolist()[:-1])
    assert '"calls": [{"b": 1}, {"c": 2}]' in text
    assert "null" not in text


DROPPED = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "thinking": "why"},
        {"role": "assistant", "content": "b", "thinking": "how"},
    ],
    "tools": [{"name": "find"}],
    "lang": "en",
}


def test_what_the_template_leaves_out_is_counted_in_manifest_and_summary_with_the_first_place(tmp_path, tokenizer):
    (tmp_path / "bare.jinja").write_text(BARE)
    path = write(tmp_path / "a.jsonl", [RECORDS[0], {**DROPPED, "lang": ""}, DROPPED, DROPPED, RECORDS[1]])
    result = build(path, tokenizer, tmp_path / "out", chat=str(tmp_path / "bare.jinja"), dedup="exact")
    assert not _notes(result, "not read")  # the records that say lang repeat the one that does not
    with open_corpus(tmp_path / "out") as corpus:
        manifest = corpus.manifest
    drops = {kind: (one.count, one.record, one.message) for kind, one in manifest.records.template_drops.items()}
    assert drops == {"reasoning": (2, 2, 1), "tools": (1, 2, -1)}
    shown = summary_text(manifest, width=1_000)
    assert "leaves out reasoning of 2 messages (first: a.jsonl, record 2, message 1), tools of 1 conversation" in shown
    build(path, tokenizer, tmp_path / "all", chat=str(tmp_path / "bare.jinja"))
    with open_corpus(tmp_path / "all") as corpus:
        assert corpus.manifest.records.template_drops["reasoning"].count == 6


def test_a_build_can_stop_at_what_the_template_leaves_out(tmp_path, tokenizer):
    (tmp_path / "bare.jinja").write_text(BARE)
    path = write(tmp_path / "a.jsonl", [RECORDS[0], DROPPED])
    given = {"chat": str(tmp_path / "bare.jinja"), "template_drops": "fail"}
    with pytest.raises(BadRecordError, match=r"line 2: .*does not write the reasoning of message 1 and the reasoning"):
        build(path, tokenizer, tmp_path / "out", **given)
    build(path, tokenizer, tmp_path / "out", **given, on_bad_record="skip")
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.manifest.records.left_out == {"chat template leaves something out": 1}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "records"])
def test_fields_that_are_not_read_are_named_with_the_number_of_records(kind, tmp_path, tokenizer):
    records = [{**record, "lang": "en", "meta": {"id": n}, "name": str(n)} for n, record in enumerate(RECORDS)]
    records[0]["messages"] = [{**one, "loss": 0} for one in records[0]["messages"]]
    source = iter(records) if kind == "records" else write(tmp_path / f"a.{kind}", records)
    result = build(source, tokenizer, tmp_path / "out", keep_field="name")
    assert _notes(result, "not read, with the number of their records: lang (3), meta (3), messages[].loss (1)")


def test_a_record_gives_the_same_document_from_json_lines_tables_and_python_objects(tmp_path, tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": 1, "unit": None}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None, "thinking": ""}
    record = {"messages": [{"role": "user", "content": "q", "tool_calls": None}, message], "tools": [], "system": None}
    whole = _json_array(record["messages"])
    nested = pa.StructArray.from_arrays(
        [pa.array([one["role"] for one in record["messages"]])]
        + [_json_array([one.get(key) for one in record["messages"]]) for key in ("content", "tool_calls")],
        ["role", "content", "tool_calls"],
    )
    for name, items in {"json": whole, "nested": nested}.items():
        pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 2], items)}), tmp_path / f"{name}.parquet")
    sources = {
        "jsonl": write(tmp_path / "a.jsonl", [record]),
        "parquet": write(tmp_path / "a.parquet", [{"messages": record["messages"]}]),
        "json": tmp_path / "json.parquet",
        "nested": tmp_path / "nested.parquet",
        "python": iter([record]),
    }
    for kind, source in sources.items():
        build(source, tokenizer, tmp_path / kind)
    for kind in sources:
        called = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call><|im_end|>'
        assert learned(tmp_path / kind) == [[called]], kind


def _json_array(values: list[Any]) -> pa.Array:
    """Arrow's type for JSON, in which `datasets` stores values of mixed types."""
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value) for value in values]))


def test_bad_conversations_stop_a_build_or_are_skipped_and_those_without_targets_are_left_out(tmp_path, tokenizer):
    bad = {"messages": [{"content": "x"}]}
    pair = {"chosen": RECORDS[0]["messages"], "rejected": []}
    idle = {"messages": [{"role": "user", "content": "x"}]}
    path = write(tmp_path / "a.jsonl", [RECORDS[0], idle, bad, pair, {"text": "x"}, RECORDS[1]])
    with pytest.raises(BadRecordError, match=r"a.jsonl, line 3: not a conversation: message 0 has no role"):
        build(path, tokenizer, tmp_path / "out")
    build(path, tokenizer, tmp_path / "out", on_bad_record="skip")
    assert learned(tmp_path / "out") == LEARNED[:2]
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.manifest.records.left_out == {
            "missing text": 1,
            "not a conversation": 1,
            "nothing to learn": 1,
            "preference pair": 1,
        }


def test_long_conversations_are_left_out_or_cut_to_their_head(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", RECORDS)
    build(path, tokenizer, tmp_path / "out", max_tokens=35)
    assert learned(tmp_path / "out") == LEARNED[2:]
    build(path, tokenizer, tmp_path / "head", max_tokens=35, overlong="head")
    with open_corpus(tmp_path / "head") as corpus:
        assert all(len(document) <= 35 and document[-1] == corpus.eos_id for document in corpus)
    assert learned(tmp_path / "head")[0][0] == "one<|im_end|>"


def test_the_last_answer_another_end_and_the_recipe(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", RECORDS)
    build(path, tokenizer, tmp_path / "out", loss="last", document_end="<pad>")
    assert learned(tmp_path / "out") == [LEARNED[0][1:], *LEARNED[1:]]
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.manifest.tokenizer.eos == "<pad>"
        assert corpus.manifest.build.chat.loss == "last"
    other = tmp_path / "other.jinja"
    other.write_text(CHATML + "{# another #}")
    with pytest.raises(ConfigurationChangedError, match="the chat template has changed"):
        build(path, tokenizer, tmp_path / "out", loss="last", document_end="<pad>", chat=str(other))


def test_weights_of_messages_are_those_of_their_targets(tmp_path, tokenizer):
    records = [said("q", "one", "r", "two"), said("x", "three"), said("x", "four")]
    records[0]["messages"][1]["weight"], records[2]["messages"][1]["weight"] = 0.25, 3
    path = write(tmp_path / "a.jsonl", records)
    build(path, tokenizer, tmp_path / "out", loss="weighted")
    with open_corpus(tmp_path / "out") as corpus:
        assert list(corpus.manifest.columns) == ["loss", "loss_weights"]
        documents = [corpus.document(index) for index in range(3)]
        spans = [corpus.loss_spans(index).reshape(-1, 2).tolist() for index in range(3)]
    expected: Counter[float] = Counter()
    for found, weights in zip(spans, ([0.25, 1], [1], [3]), strict=True):
        for (start, stop), weight in zip(found, weights, strict=True):
            expected[weight] += stop - start
    plan = StreamPlan({"chat": tmp_path / "out"}, seq_len=64, epochs=1, seed=1)
    with NumpyLoader(plan, global_batch_size=2) as loader:
        read = Counter(weight for batch in loader for weight in batch["loss_weights"].ravel().tolist() if weight)
    assert read == expected
    assert len(documents[0]) == spans[0][-1][1] + 2
    build(path, tokenizer, tmp_path / "skipped", on_bad_record="skip")
    assert learned(tmp_path / "skipped") == [["three<|im_end|>"]]


def test_a_template_that_does_not_teach_the_end_of_a_turn_is_noted(tmp_path, tokenizer):
    (tmp_path / "bare.jinja").write_text(BARE)
    path = write(tmp_path / "a.jsonl", RECORDS)
    assert _notes(build(path, tokenizer, tmp_path / "a", chat=str(tmp_path / "bare.jinja")), "where to stop")
    assert not _notes(build(path, tokenizer, tmp_path / "b"), "where to stop")


def _notes(result: Any, words: str) -> bool:
    return any(words in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"chat": None, "loss": "last"}, "--loss needs --chat"),
        ({"eos": "</s>"}, "--eos does not go with --chat"),
        ({"overlong": "head"}, "--overlong needs --max-tokens"),
        ({"chat": "nothing.jinja"}, "there is no chat template"),
        ({"document_end": "<|im_end|>"}, "document_end is"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, tokenizer, options, named):
    with pytest.raises(UsageError, match=named):
        build(write(tmp_path / "a.jsonl", RECORDS), tokenizer, tmp_path / "out", **options)


def test_texts_are_refused(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="which hold texts"):
        build(tmp_path / "a.txt", tokenizer, tmp_path / "out")
    with pytest.raises(UsageError, match="does not end in"):
        build(tmp_path / "a.txt", tokenizer, tmp_path / "out", chat=str(tmp_path / "a.txt"))


def test_a_copy_keeps_the_spans(tmp_path, tokenizer):
    build(write(tmp_path / "a.jsonl", RECORDS), tokenizer, tmp_path / "out")
    copy_corpus(str(tmp_path / "out"), out=str(tmp_path / "copy"), shuffle=1, workers=1)
    assert sorted(learned(tmp_path / "copy")) == sorted(LEARNED)


def test_a_copy_keeps_the_template_the_loss_and_the_id_field_on_which_its_corpora_agree(tmp_path, tokenizer):
    for name, loss in (("a", "last"), ("b", "last"), ("c", "all")):
        path = write(tmp_path / f"{name}.jsonl", [{**said(name, name), "id": name}])
        build(path, tokenizer, tmp_path / name, loss=loss, id_field="id")
    for others, chat in (("ab", True), ("ac", False)):
        copy_corpus([str(tmp_path / other) for other in others], out=str(tmp_path / others), workers=1)
        with open_corpus(tmp_path / others) as corpus, open_corpus(tmp_path / "a") as first:
            assert corpus.manifest.build.chat == (first.manifest.build.chat if chat else None)
            assert corpus.manifest.build.id_field == "id"
            assert ("loss on last" in " ".join(summary_text(corpus.manifest).split())) is chat


def test_an_append_keeps_the_template_and_the_loss(tmp_path, tokenizer):
    first, second = (
        write(tmp_path / name, records) for name, records in (("a.jsonl", RECORDS[:2]), ("b.jsonl", RECORDS[2:]))
    )
    build(first, tokenizer, tmp_path / "out")
    with pytest.raises(ConfigurationChangedError, match="an append keeps: --loss was assistant, now last"):
        build(second, tokenizer, tmp_path / "out", append=True, loss="last")
    write(tmp_path / "text.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigurationChangedError, match="an append keeps"):
        build(tmp_path / "text.jsonl", tokenizer, tmp_path / "out", append=True, chat=None, eos="</s>")
    build(second, tokenizer, tmp_path / "out", append=True)
    assert learned(tmp_path / "out") == LEARNED


# who runs it


PLACES = ("two workers", "an array", "a store")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "duplicates": {"dedup": "exact"},
    "a split": {"validation_fraction": 0.3},
    "an append": {"append": True},
    "heads": {"max_tokens": 40, "overlong": "head", "min_tokens": 25},
    "a limit": {"max_documents": 45},
    "the last answers": {"loss": "last"},
    "weights": {"loss": "weighted", "max_tokens": 40, "overlong": "head"},
}


def many(count: int) -> list[dict[str, Any]]:
    """Conversations of which some are equal, some bad, and some have nothing to learn."""
    found = [said("q" * (n % 5), "one 🧪 " * (n % 7), f"{n % 13}", "<|im_end|> two") for n in range(count)]
    for n in range(0, count, 9):
        found[n]["messages"][3]["weight"] = 0
        found[n]["messages"][1]["weight"] = 1
    for n in range(0, count, 11):
        found[n]["messages"].pop(n % 4)["role"] = "nobody"
    for n in range(1, count, 4):
        found[n]["messages"][1]["thinking"] = "never written"
    return [{"messages": []} if n % 10 == 3 else record for n, record in enumerate(found)]


@pytest.mark.slow
@crossed("place, name", PLACES, OPTIONS)
def test_whoever_runs_a_build_of_conversations_its_bytes_are_those_of_one_process(
    place, name, tmp_path, tokenizer, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    if place == "two workers":  # which know nothing of smaller chunks
        sizes = {"task_bytes": 1 << 20}
        records = [{**record, "pad": "x" * 30_000} for record in many(40)]
        sources = {f"in/{n}.jsonl": jsonl(records[n:]) for n in range(3)}
    else:
        sizes = {"task_bytes": 512}
        small.shrink(monkeypatch.setattr, chunk_bytes=512)
        sources = {"in/a.jsonl": jsonl(many(40)), "in/b.jsonl.zst": zstd(jsonl(many(25))), "in/c.jsonl": jsonl(many(7))}
    roots = {"alone": str(tmp_path), "other": f"{SCHEME}:/{tmp_path}" if place == "a store" else str(tmp_path)}
    for root in set(roots.values()):
        for path, content in sources.items():
            open_store(root).put(path, content)
        open_store(root).put("base.jsonl", jsonl(RECORDS))
        for path in tokenizer.iterdir():
            open_store(root).put(f"tok/{path.name}", path.read_bytes())
    given = {"workers": 1, "chat": "own", "on_bad_record": "skip", **sizes, **OPTIONS[name]}
    for kind, root in roots.items():
        here = {"tokenizer": f"{root}/tok", "out": f"{root}/{kind}"}
        if name == "an append":
            build_corpus(f"{root}/base.jsonl", **here, chat="own", workers=1, **sizes)
        if place == "an array" and kind == "other":
            for index in (2, 0, 1):
                run_job(f"{root}/in", job_index=index, num_jobs=3, **here, **given)
            commit_corpus(here["out"])
        else:
            workers = 2 if place == "two workers" and kind == "other" else 1
            build_corpus(f"{root}/in", **here, **{**given, "workers": workers})
    alone, other = (_files(f"{root}/{kind}") for kind, root in roots.items())
    assert other == alone
    assert sum(names.is_shard_name(Path(path).name) for path in alone) > 1


def _files(location: str) -> dict[str, bytes]:
    store = open_store(location)
    return {path: store.get(path) for path in files_below(store, "") if Path(path).name != names.REPORT}


def test_a_kept_field_cannot_take_the_column_of_the_spans(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{**RECORDS[0], "loss": 0.5}])
    with pytest.raises(UsageError, match="cannot be called 'loss' here"):
        build(source, tokenizer, tmp_path / "out", keep_field=["loss:float64"])


def test_a_template_and_a_tokenizer_that_do_not_fit_are_refused_or_noted(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "t.jinja").write_text(CHATML.replace("<|im_end|>", "<|stop|>"))
    with pytest.raises(TokenizerError, match=r"ends answers by '<\|stop\|>'.* it would be 8 tokens of text"):
        build(source, tokenizer, tmp_path / "out", chat=str(tmp_path / "t.jinja"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "t.jinja").write_text(CHATML.replace("<|im_start|>", "<|go|>"))
    found = build(source, tokenizer, tmp_path / "out", chat=str(tmp_path / "t.jinja"))
    note = "the chat template writes '<|go|>', which the tokenizer does not have: it becomes 6 tokens of text"
    assert note in found.notes


def test_conversations_that_spell_an_added_token_which_is_not_special_are_counted_by_token(tmp_path, tokenizer):
    records = [said("what is <think>?", "a thought"), said("x", "three"), said("<think> <|im_end|>", "y")]
    found = build(write(tmp_path / "a.jsonl", records), tokenizer, tmp_path / "out")
    spelled = [note for note in found.notes if "spell" in note]
    assert spelled == ["2 texts spell '<think>', an added token that is not special: it is that token there"]
