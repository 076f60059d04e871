"""Trials that change a corpus, and read it in every way that there is."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc

from tests import corpora
from tests.contract import conversations, small
from tests.contract.builds import text
from tests.soak.mutations import other_array, other_bytes, other_json
from tokshard.cli import main
from tokshard.errors import TokshardError
from tokshard.format import names
from tokshard.format.opening import open_corpus
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.runtime import CorpusSource, NumpyLoader, StreamPlan

Rows = list[Any]
COMMANDS = """
inspect IN
inspect IN --document 3
inspect IN --shards --full
inspect IN --grep answer --workers 1
verify IN --json
plan IN --seq-len 16 --global-batch-size 4
trace IN --seq-len 16 --global-batch-size 4 --step 1
diff IN WHOLE
diff WHOLE IN --json
copy IN --out OUT --workers 1
copy IN WHOLE --out OUT --workers 1 --max-tokens 40
copy IN --out OUT --workers 1 --shuffle 3
export IN --out OUT --format hf
export IN --out OUT --format megatron --drop-loss
export IN --out OUT --format olmo
report IN --out OUT.html
status IN
diff IN WHOLE --hash
scan IN --against IDS --ngram 3 --workers 1
""".strip().split("\n")
"""What people do with a corpus: IN is the one that was changed, WHOLE is as it was."""


@dataclass(frozen=True)
class Subject:
    """A corpus, and what is read from it while it is whole."""

    path: Path
    contents: Rows
    rows: Rows
    fingerprint: str


def prepare(folder: Path, stack: ExitStack) -> Callable[[int], None]:
    """Build the corpora that are changed."""
    small.shrink(stack.enter_context(pytest.MonkeyPatch.context()).setattr, batch_tokens=400)
    subjects = [subject(path) for path in build_all(folder / "whole")]
    (folder / "ids").write_text('{"id": "3"}\n')

    return lambda seed: attempt(random.Random(f"corpora {seed}"), subjects, folder / "changed")


def run(words: list[str]) -> tuple[int, str]:
    """Run a command in this process."""
    output = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()) as errors:
        exit_code = main.run(words)
    return exit_code, errors.getvalue()


def build_all(folder: Path) -> list[Path]:
    """Text with kept fields, rejects and a generation; conversations with and without weights."""
    conversations.write_tokenizer(folder / "tokenizer")
    rng = random.Random(7)
    kept = [{"text": text(rng, rng.randint(1, 9)), "url": rng.choice(["a", "ü", None]), "score": n} for n in range(70)]
    kept[9]["text"] = kept[11]["text"] = ""
    options = ["--shard-tokens", "1500", "--dedup", "exact", "--on-bad-record", "skip", "--eos", "</s>"]
    options += ["--keep-field", "url", "--keep-field", "score:float64"]
    conversations.build(kept[:50], folder, "text", *options)
    shutil.copytree(folder / "text", folder / "grown")
    conversations.build(kept[50:], folder, "grown", "--append", *options)
    chats = conversations.conversations(40, seed=3)
    conversations.build(chats, folder, "chat", "--chat", "--shard-tokens", "1500")
    for record in chats:
        for message in record["messages"]:
            message["weight"] = rng.choice([0, 0.5, 1, 2.25]) if message["role"] == "assistant" else 0
    conversations.build(chats, folder, "weighted", "--chat", "--loss", "weighted", "--shard-tokens", "1500")
    return [folder / name for name in ("text", "grown", "chat", "weighted")]


def subject(path: Path) -> Subject:
    """A corpus that is whole."""
    assert verify_corpus(path).is_ok
    with open_corpus(path) as opened:
        assert len(opened.shards) > 1
        fingerprint = opened.content_fingerprints[-1]
    rows = rows_of(path, "mmap")
    assert rows == rows_of(path, "pread")
    return Subject(path, contents_of(path), rows, fingerprint)


def contents_of(path: Path) -> Rows:
    """All that a corpus says of its documents."""
    with open_corpus(path) as opened:
        return [
            [
                (
                    document.tolist(),
                    opened.loss_spans(index).tolist(),
                    opened.target_weights(index).tolist(),
                    repr(opened.metadata(index)),
                    opened.provenance(index),
                )
                for index, document in enumerate(opened.documents())
            ],
            [(source.path, source.documents) for source in opened.sources()],
        ]


def rows_of(path: Path, access: Any) -> Rows:
    """An epoch, as a loader reads it."""
    source = CorpusSource(path, access=access)
    plan = StreamPlan(source, seq_len=16, block_tokens=2048, window_blocks=1, epochs=1, allow_small_blocks=True)
    with NumpyLoader(plan, global_batch_size=64, uneven="pad") as loader:
        return [{key: value.tolist() for key, value in batch.items()} for batch in loader]


# what is changed


def attempt(rng: random.Random, subjects: list[Subject], place: Path) -> None:
    """Change a corpus, read it, and judge."""
    whole = rng.choice(subjects)
    shutil.rmtree(place, ignore_errors=True)
    changed = place / "corpus"
    shutil.copytree(whole.path, changed)
    what, name, is_signed = change(rng, changed)
    found = Found(
        verified=outcome(lambda: [problem.file for problem in verify_corpus(changed, workers=1).problems]),
        contents=outcome(lambda: contents_of(changed)),
        mapped=outcome(lambda: rows_of(changed, "mmap")),
        ranged=outcome(lambda: rows_of(changed, "pread")),
    )
    for error in found.errors:
        check_words(error.problem, changed)
    words = rng.choice(COMMANDS).split()
    places = {"IN": str(changed), "WHOLE": str(whole.path), "OUT": str(place / "out"), "IDS": str(place.parent / "ids")}
    words = [places.get(word, word.replace("OUT", places["OUT"])) for word in words]
    problem = f"{what} of {whole.path.name}/{name}; verify says {shown(found.verified)}"
    check_command(words)
    if found.is_vouched:
        check_vouched(found, whole, changed, problem)
    elif what == "bytes" and not is_signed:
        check_noticed(found, whole, name, problem)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of a corpus, or the error instead.

    Args:
        verified: the files that `verify` names.
        contents, mapped, ranged: what is read of documents, and an epoch by maps and by range.
    """

    verified: Any
    contents: Any
    mapped: Any
    ranged: Any

    @property
    def is_vouched(self) -> bool:
        return bool(self.verified == [])

    @property
    def errors(self) -> list[TokshardError]:
        every = (self.verified, self.contents, self.mapped, self.ranged)
        return [found for found in every if isinstance(found, TokshardError)]

    def is_other(self, whole: Subject) -> tuple[bool, bool]:
        """Whether rows by maps and rows by range were read, and are not those of the whole corpus."""
        mapped, ranged = (
            not isinstance(found, TokshardError) and found != whole.rows for found in (self.mapped, self.ranged)
        )
        return mapped, ranged


def check_vouched(found: Found, whole: Subject, changed: Path, problem: str) -> None:
    """What `verify` has nothing against is a corpus: every reader reads it, and the same."""
    for error in found.errors:
        raise AssertionError(f"{problem}, but a reader {shown(error)}")
    assert found.mapped == found.ranged, f"{problem}, but maps and ranges differ"
    with open_corpus(changed) as opened:
        if opened.content_fingerprints[-1] == whole.fingerprint:
            tokens = [[entry[:3] for entry in contents[0]] for contents in (found.contents, whole.contents)]
            assert tokens[0] == tokens[1], f"{problem}: other content with the same fingerprint"


def check_noticed(found: Found, whole: Subject, name: str, problem: str) -> None:
    """Bytes that no hash was made right for are named, and by range no row is another."""
    if not isinstance(found.verified, TokshardError):
        assert {name, names.MANIFEST, names.SHARD_TABLE} & set(found.verified), problem
    mapped, ranged = found.is_other(whole)
    assert not ranged, f"{problem}: other rows by range"
    if mapped:
        ids = [[batch["input_ids"] for batch in rows] for rows in (found.mapped, whole.rows)]
        assert ids[0] != ids[1], f"{problem}: other labels of the same tokens by maps"


def outcome(call: Callable[[], Any], *, names: Path | None = None) -> Any:
    """What a call returns, or the error that it raises: words, which name a path where one is given."""
    try:
        return call()
    except TokshardError as error:
        found = error
    check_words(found.problem, None)
    assert names is None or str(names) in found.problem, found.problem
    return found


def check_command(words: list[str]) -> int:
    """Run a command: it may refuse, in words. Its exit code."""
    exit_code, errors = run(words)
    assert exit_code in (0, 1, 2), (words, exit_code, errors)
    assert "internal: " not in errors, f"{words} says {errors}"
    if exit_code:
        check_words(errors, None)
    return exit_code


def shown(found: Any) -> str:
    return f"refuses it: {found.problem}" if isinstance(found, TokshardError) else str(found)[:300]


def check_words(problem: str, corpus: Path | None) -> None:
    """A message is a line of plain text, and names a file of the corpus."""
    assert "Traceback" not in problem, problem
    assert "<class" not in problem, problem
    assert " object at 0x" not in problem, problem
    if corpus is not None:
        files = [path.name for path in corpus.rglob("*") if path.is_file()]
        assert any(name in problem for name in [*files, str(corpus), "manifest.json", "shards.arrow"]), problem


def change(rng: random.Random, corpus: Path) -> tuple[str, str, bool]:
    """Change a file, and make some of the hashes right again.

    Returns:
        What was done, to which file, and whether any hash was made right.
    """
    files = sorted(path for path in corpus.rglob("*") if path.is_file() and path.name != names.REPORT)
    act = rng.choice(["bytes", "bytes", "manifest", "table", "table", "shard", "shard", "files", "tokenizer"])
    if act == "bytes":
        path = rng.choice(files)
        path.write_bytes(other_bytes(rng, path.read_bytes()))
    elif act == "files":
        path = rng.choice(files)
        other = rng.choice([file for file in files if file != path])
        content = path.read_bytes()
        if (kind := rng.randrange(3)) == 0:
            path.unlink()
        else:
            path.write_bytes(other.read_bytes())
            if kind == 2:
                other.write_bytes(content)
    elif act == "manifest":
        path = rng.choice([file for file in files if file.name == names.MANIFEST])
        corpora.rewrite_manifest(path.parent, lambda fields: replace_all(fields, other_json(rng, fields)))
        return "manifest", names.MANIFEST, True
    elif act == "tokenizer":
        path = rng.choice([file for file in files if file.name == names.TOKENIZER])
        path.write_text(json.dumps(other_json(rng, json.loads(path.read_bytes()))))
    elif act == "table":
        path = rng.choice([file for file in files if file.name in (names.SHARD_TABLE, names.SOURCE_TABLE)])
        change_column(rng, path)
    else:
        path = rng.choice([file for file in files if names.is_shard_name(file.name)])
        change_column(rng, path)
    level = rng.choice([0, 0, 1, 2, 2] if act == "bytes" else [0, 1, 2, 2])
    sign(path.parent, level)
    return act, str(path.relative_to(corpus)), level > 0


def replace_all(fields: dict[str, Any], found: Any) -> None:
    other = found if isinstance(found, dict) else {"fields": found}
    other.pop("manifest_sha256", None)
    fields.clear()
    fields.update(other)


def change_column(rng: random.Random, path: Path) -> None:
    """Rewrite a file of Arrow with another value in one column of one record batch."""
    reader = ipc.open_file(path.read_bytes())
    batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    number = rng.randrange(len(batches))
    columns = list(batches[number].columns)
    column = rng.randrange(len(columns))
    columns[column] = other_array(rng, columns[column])
    batches[number] = pa.record_batch(columns, schema=reader.schema)
    with ipc.new_file(str(path), reader.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def sign(folder: Path, level: int) -> None:
    """Make the hashes of a generation right, as far as its files can still be read.

    Args:
        level: 1: of the files that the manifest lists; 2: those of shards and of their tokens, and the content
            fingerprint.
    """
    with contextlib.suppress(pa.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        if level == 2:
            corpora.sign_shards(folder)
        if level >= 1:
            corpora.sign_files(folder)
