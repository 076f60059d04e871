"""Trials that change what a job is given besides corpora: states, plans, recipes, checkpoints, lists; and sources."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.contract import conversations
from tests.contract.builds import text
from tests.pipeline import foreign
from tests.runtime.states import sealed, values_of
from tests.soak.corpora import check_words, outcome, run
from tests.soak.kinds import Try
from tests.soak.mutations import other_array, other_bytes, other_json
from tests.trainer.runs import SMALL, configuration
from tokshard.errors import TokshardError
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.run_files import checkpoint_directory
from tokshard.run_files.recipe import load_config
from tokshard.run_files.saved_state import read_state
from tokshard.runtime import NumpyLoader, StreamPlan

Attempt = Callable[[random.Random, Path], str]
SIZES: dict[str, Any] = {"seed": 5, "block_tokens": 2048, "window_blocks": 1, "allow_small_blocks": True}


def prepare(folder: Path, stack: ExitStack) -> Try:
    """Build two corpora, and save what jobs save."""
    warnings.simplefilter("ignore")
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # nothing is killed here
    here = folder / "whole"
    conversations.write_tokenizer(here / "tokenizer")
    rng = random.Random(7)
    texts = [{"text": text(rng, rng.randint(1, 40)), "id": f"n{number}"} for number in range(120)]
    options = ("--eos", "</s>", "--id-field", "id", "--shard-tokens", "5K")
    conversations.build(texts, here, "text", *options)
    conversations.build(conversations.conversations(60, seed=3), here, "chat", "--chat", "--shard-tokens", "5K")
    attempts: list[Attempt] = [
        *[States(here, seed).attempt for seed in range(4)],
        *[Toml(here, kind).attempt for kind in ("mix", "recipe", "build")],
        *[Checkpoints(here).attempt] * 2,
        Lists(here).attempt,
        *[Sources(here).attempt] * 3,
    ]

    def try_(seed: int) -> str:
        rng = random.Random(f"files {seed}")
        place = folder / "changed"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return attempts[seed % len(attempts)](rng, place)

    return try_


def plan_of(here: Path, seq_len: int, **options: Any) -> StreamPlan:
    corpora = {name: here / name for name in ("text", "chat")}
    return StreamPlan(corpora, weights={"text": 0.5, "chat": 0.5}, seq_len=seq_len, **SIZES, **options)


def check_command(words: list[str]) -> str:
    """Run a command: it may refuse, in words."""
    exit_code, errors = run(words)
    assert exit_code in (0, 1, 2), (words, exit_code, errors)
    assert "internal: " not in errors, f"{words} says {errors}"
    if exit_code:
        check_words(errors, None)
    return "done" if exit_code == 0 else "refused"


class States:
    """States of a job, with all that a state may have."""

    def __init__(self, here: Path, seed: int) -> None:
        rng = random.Random(seed)
        self.here, self.streams, self.seq_len = here, 1 + seed % 2, 16
        self.lists = here / f"lists-{seed}"
        self.lists.mkdir()
        loader = self.loader()
        for step in range(60):
            for _ in islice(loader, rng.randint(1, 2)):
                pass
            act = rng.randrange(6)
            if act == 0:
                loader.set_weights({"text": rng.random() + 0.1, "chat": 0.5})
            elif act == 1:
                loader.skip(rng.randint(1, 5))
            elif act == 2 or (seed == 3 and step < 40):
                with (self.lists / "text.txt").open("a") as lines:
                    lines.write(f"{rng.randrange(100)}\n")
                loader.mask("text", self.lists / "text.txt")
            elif act == 3 and seed > 0:
                self.seq_len = rng.choice([8, 16, 4])
                state = loader.state_dict()
                loader = self.loader()
                loader.load_state_dict(state, seq_len="plan")
        self.state = loader.state_dict()

    def loader(self, **options: Any) -> NumpyLoader:
        plan = plan_of(self.here, self.seq_len, num_streams=self.streams, **options)
        return NumpyLoader(plan, global_batch_size=4, uneven="pad")

    def attempt(self, rng: random.Random, place: Path) -> str:
        is_sealed = rng.random() < 0.7
        state: Any
        if is_sealed:
            values = other_json(rng, values_of(self.state))
            state = sealed(values) if isinstance(values, dict) else {"cursor": json.dumps(values)}
        elif rng.random() < 0.8:
            line = other_bytes(rng, self.state["cursor"].encode())
            state = {"cursor": line.decode("utf-8", "surrogateescape")}
        else:
            state = other_json(rng, self.state)
        choices = {key: "plan" for key in ("weights", "corpora", "seq_len") if rng.random() < 0.4}
        loader = self.loader()
        found = outcome(lambda: loader.load_state_dict(state, **choices))
        if isinstance(found, TokshardError):
            check_words(found.problem, None)
            return "refused"
        assert is_sealed or state["cursor"] == self.state["cursor"], "a line that was changed is loaded"
        read = outcome(lambda: [batch["input_ids"].tolist() for batch in islice(loader, 3)])
        if isinstance(read, TokshardError):
            check_words(read.problem, None)
            return "refused when it is read"
        saved = loader.state_dict()
        again = self.loader()
        again.load_state_dict(saved)
        assert again.state_dict() == saved, "what was loaded is saved, and is another"
        loader.stats()
        return "loaded"


def toml(value: Any) -> str:
    """A value as TOML, where it has one."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "") if isinstance(value, str) else str(value)


def write_toml(path: Path, fields: Any) -> None:
    lines = [f"{json.dumps(key)} = {toml(item)}" for key, item in fields.items()] if isinstance(fields, dict) else []
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))


class Toml:
    """Files of TOML."""

    def __init__(self, here: Path, kind: str) -> None:
        self.here, self.kind = here, kind
        paths = {name: str(here / name) for name in ("text", "chat")}
        (here / "out.txt").write_text("1\n5\n")
        (here / "ids.jsonl").write_text('{"id": "n3"}\n')
        mix = {
            "corpora": paths,
            "weights": {"text": 0.5, "chat": 0.5},
            "seq_len": 16,
            "global_batch_size": 8,
            "seed": 3,
            "generations": {"text": 0},
            "block_tokens": 2048,
            "window_blocks": 1,
            "num_streams": 2,
            "take": {"text": 0.5},
            "pack": {"chat": "whole", "text": "cut"},
            "max_epochs": {"text": 2.5},
            "on_max_epochs": "warn",
            "start_epoch": {"chat": 1},
            "schedule": [[100, {"text": 0.25, "chat": 0.75}]],
            "uneven": "pad",
            "mask": {"text": [str(here / "out.txt")]},
            "mask_ids": {"text": [str(here / "ids.jsonl")]},
            "allow_small_blocks": True,
            "memory_bytes": "1GiB",
            "cache_bytes": "1GiB",
        }
        recipe = configuration(paths, here / "run") | {"model": SMALL}
        recipe["data"] |= {"batch_ramp": [[4, 18]]} | {"weights": {"text": 1, "chat": 2}}
        recipe["evaluate"] = {"corpora": paths, "every": 5}
        build = {
            "defaults": {"tokenizer": str(here / "tokenizer"), "workers": 1},
            "corpora": {
                "chat": {"sources": [str(here / "chat.jsonl")], "out": "OUT", "chat": True, "loss": "last"},
                "text": {"sources": [str(here / "text.jsonl")], "out": "OUT/b", "eos": "</s>", "keep_field": ["id"]},
            },
        }
        self.fields = {"mix": mix, "recipe": recipe, "build": build}[kind]

    def attempt(self, rng: random.Random, place: Path) -> str:
        path = place / f"{self.kind}.toml"
        fields = self.fields
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            fields = other_json(rng, fields)
        write_toml(path, fields)
        if fields is self.fields:
            path.write_bytes(other_bytes(rng, path.read_bytes()))
        if self.kind == "build":
            path.write_bytes(path.read_bytes().replace(b"OUT", str(place / "out").encode()))
            return check_command(["build", str(path), "--dry-run"])
        if self.kind == "recipe":
            found = outcome(lambda: load_config(str(path)))
            if isinstance(found, TokshardError):
                check_words(found.problem, None)
        found = outcome(lambda: StreamPlan.load(path))
        if isinstance(found, TokshardError):
            check_words(found.problem, None)
        words = ["plan", str(path)] if rng.random() < 0.5 else ["trace", str(path), "--step", "2"]
        done = check_command(words)
        if not isinstance(found, TokshardError) and found.shape.seq_len < 10_000:
            loader = outcome(lambda: NumpyLoader(found, global_batch_size=found.num_streams, uneven="pad"))
            if not isinstance(loader, TokshardError):
                outcome(lambda: next(iter(loader), None))
        return done


class Checkpoints:
    """Checkpoints of the trainer, of torch.distributed.checkpoint and of torch.save."""

    def __init__(self, here: Path) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        self.here = here
        loader = NumpyLoader(plan_of(here, 16), global_batch_size=4)
        for _ in islice(loader, 3):
            pass
        self.cursor = loader.state_dict()["cursor"]
        self.tensors = {"model.weight": torch.arange(40, dtype=torch.float32).reshape(5, 8), "step": torch.tensor(3)}
        folder = here / "checkpoints"
        folder.mkdir(exist_ok=True)
        dcp.save({**self.tensors, "loader": {"cursor": self.cursor}}, checkpoint_id=folder / "dcp", no_dist=True)
        torch.save({"loader": loader.state_dict(), "step": 3, "model": self.tensors}, folder / "saved.pt")
        (folder / "state.json").write_text(json.dumps(loader.state_dict()))
        partial = checkpoint_directory.partial_of(str(folder), 3)
        checkpoint_directory.begin(partial)
        dcp.save(self.tensors, checkpoint_id=partial, no_dist=True)
        files = {name: checkpoint_directory.synced(os.path.join(partial, name)) for name in os.listdir(partial)}
        paths = {name: str(here / name) for name in ("text", "chat")}
        data = {"corpora": paths, "weights": {"text": 0.5, "chat": 0.5}, "seq_len": 16, "global_batch_size": 4} | SIZES
        state = checkpoint_directory.State(step=3, loader=dict(loader.state_dict()), config={"data": data})
        self.whole = Path(checkpoint_directory.commit(partial, state, files, needed=files))

    def attempt(self, rng: random.Random, place: Path) -> str:
        source = rng.choice([self.whole, self.whole, *sorted(self.whole.parent.glob("[ds]*[!0-9]"))])
        path = place / source.name
        if source.is_dir():
            shutil.copytree(source, path)
        else:
            shutil.copy(source, path)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        file = rng.choice(files)
        before = file.read_bytes()
        if before[:1] == b"{" and rng.random() < 0.6:
            file.write_text(json.dumps(other_json(rng, json.loads(before))))
        elif path.is_dir() and rng.random() < 0.1:
            file.unlink()
        else:
            file.write_bytes(other_bytes(rng, before))
        is_trainers = source == self.whole
        is_signed = is_trainers and file.name != "COMPLETE" and rng.random() < 0.5
        if is_signed:
            self.sign(path)
        if is_trainers:
            found = outcome(lambda: checkpoint_directory.check_hashes(str(path)))
            is_damaged = file.name != "COMPLETE" and not (file.exists() and file.read_bytes() == before)
            assert not is_damaged or is_signed or isinstance(found, TokshardError), "not noticed"
            if isinstance(found, TokshardError):
                assert any(name in found.problem for name in (file.name, "COMPLETE")) or not is_damaged, found.problem
                check_words(found.problem, None)
        self.load(path)
        found = outcome(lambda: read_state(str(path)))
        done = check_command(["trace", str(self.mix(place)), "--checkpoint", str(path)])
        if isinstance(found, TokshardError):
            check_words(found.problem, None)
            assert str(path) in found.problem, found.problem
            return "refused"
        return "read" if found.cursor == self.cursor else f"another line, {done}"

    def load(self, path: Path) -> None:
        """Read its tensors, as a resume does after it has checked the hashes."""
        from tokshard.run_files.torch_checkpoints import load_checkpoint, read_metadata

        if not path.is_dir():
            return

        def load() -> None:
            read_metadata(str(path))
            load_checkpoint({name: value.clone() for name, value in self.tensors.items()}, str(path), no_dist=True)

        with contextlib.suppress(OSError):  # of the index, as it says
            found = outcome(load)
            if isinstance(found, TokshardError):
                assert str(path) in found.problem, found.problem
                check_words(found.problem, None)

    def sign(self, path: Path) -> None:
        """Make COMPLETE list the files as they are."""
        files = {
            name: checkpoint_directory.synced(os.path.join(path, name))
            for name in os.listdir(path)
            if name != checkpoint_directory.COMPLETE
        }
        checkpoint_directory._write(os.path.join(path, checkpoint_directory.COMPLETE), files)

    def mix(self, place: Path) -> Path:
        path = place / "mix.toml"
        fields = {"corpora": {name: str(self.here / name) for name in ("text", "chat")}, "seq_len": 16}
        write_toml(path, fields | {"global_batch_size": 4, "weights": {"text": 0.5, "chat": 0.5}} | SIZES)
        return path


class Lists:
    """Lists of documents, by number and by id."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.contents = {
            "numbers.txt": b"1\n5\n17\n",
            "numbers.npy": foreign.npy([1, 5, 17], "i8"),
            "ids.jsonl": b'{"id": "n3"}\n{"id": "n5", "note": "x"}\n',
            "ids.csv": b"id,note\nn3,x\nn7,y\n",
            "ids.txt": b"n3\nn9\n",
        }
        pq.write_table(pa.table({"id": ["n3", "n8"]}), here / "ids.parquet")
        self.contents["ids.parquet"] = (here / "ids.parquet").read_bytes()

    def attempt(self, rng: random.Random, place: Path) -> str:
        name = rng.choice(sorted(self.contents))
        path = place / name
        path.write_bytes(other_bytes(rng, self.contents[name]))
        loader = NumpyLoader(plan_of(self.here, 16), global_batch_size=4)
        argument = "file" if name.startswith("numbers") else "ids_file"
        found = outcome(lambda: loader.mask("text", **{argument: path}))
        if isinstance(found, TokshardError):
            check_words(found.problem, None)
            assert str(path) in found.problem, found.problem
        else:
            next(iter(loader))
        if argument == "ids_file":
            words = ["copy", str(self.here / "text"), "--out", str(place / "out"), "--drop-ids", str(path)]
            check_command([*words, "--workers", "1"])
        return "refused" if isinstance(found, TokshardError) else "taken"


class Sources:
    """Conversations and their template and tokenizer, and tokens of other tools with labels and masks."""

    def __init__(self, here: Path) -> None:
        self.here, rng = here, random.Random(5)
        documents = [[rng.randint(1, 250) for _ in range(rng.randint(1, 20))] + [262] for _ in range(30)]
        masks = [[rng.random() < 0.5 for _ in document] for document in documents]
        labels = [[t if m else -100 for t, m in zip(*pair, strict=True)] for pair in zip(documents, masks, strict=True)]
        self.tables = [
            pa.table({"input_ids": documents, "labels": labels}),
            pa.table({"input_ids": documents, "loss_mask": [[float(m) / 2 for m in mask] for mask in masks]}),
            pa.table({"tokens": documents, "loss_mask": [[int(m) for m in mask] for mask in masks], "url": ["x"] * 30}),
        ]
        self.records = conversations.conversations(12, seed=9)
        self.records[3] |= {"tools": [{"name": "f", "parameters": {"x": 1}}], "chat_template_kwargs": {"a": True}}
        self.documents, self.masks = documents, masks

    def attempt(self, rng: random.Random, place: Path) -> str:
        words = rng.choice([self.chat, self.table, self.flat])(rng, place)
        words += ["--out", str(place / "out"), "--workers", "1", "--quiet", "--shard-tokens", "300"]
        if rng.random() < 0.3:
            words += ["--on-bad-record", "skip", "--on-bad-source", "skip"]
        done = check_command(words)
        if done == "done":
            for corpus in {manifest.parent for manifest in (place / "out").rglob("manifest.json")}:
                problems = verify_corpus(corpus).problems
                assert problems == (), problems
        return f"{words[0]} {done}"

    def chat(self, rng: random.Random, place: Path) -> list[str]:
        tokenizer = place / "tokenizer"
        shutil.copytree(self.here / "tokenizer", tokenizer)
        source = place / "chats.jsonl"
        records: Any = self.records
        act = rng.randrange(5)
        if act < 2:
            records = other_json(rng, records)
        records = records if isinstance(records, list) else [records]
        source.write_bytes("".join(json.dumps(record) + "\n" for record in records).encode())
        if act == 2:
            source.write_bytes(other_bytes(rng, source.read_bytes()))
        if act > 2:
            path = tokenizer / ("tokenizer.json" if act == 3 else "tokenizer_config.json")
            if rng.random() < 0.7:
                path.write_text(json.dumps(other_json(rng, json.loads(path.read_bytes()))))
            else:
                path.write_bytes(other_bytes(rng, path.read_bytes()))
        options = [
            [],
            ["--loss", "last"],
            ["--loss", "all"],
            ["--max-tokens", "30", "--overlong", "head"],
            ["--dedup", "exact"],
            ["--validation-fraction", "0.3"],
            ["--document-end", "<pad>"],
            ["--keep-field", "messages.0.role"],
        ]
        return ["build", str(source), "--chat", "--tokenizer", str(tokenizer), *rng.choice(options)]

    def table(self, rng: random.Random, place: Path) -> list[str]:
        found = rng.choice(self.tables)
        is_arrow = rng.random() < 0.5
        path = place / ("labels.arrow" if is_arrow else "labels.parquet")
        act = rng.randrange(3)
        if act < 2:
            column = rng.randrange(2)
            kind = pa.large_list(found.column(column).type.value_type)
            changed = other_array(rng, found.column(column).combine_chunks().cast(kind))
            found = found.set_column(column, found.column_names[column], changed)
        if is_arrow:
            with pa.ipc.new_file(str(path), found.schema) as writer:
                writer.write_table(found, 7)
        else:
            pq.write_table(found, path, row_group_size=7)
        if act == 2:
            path.write_bytes(other_bytes(rng, path.read_bytes()))
        return ["import", str(path), *self.of_imports()]

    def flat(self, rng: random.Random, place: Path) -> list[str]:
        if rng.random() < 0.5:
            foreign.datatrove(place / "a.ds", self.documents)
            (place / "a.ds.loss").write_bytes(bytes(m for mask in self.masks for m in mask))
            words = ["import", str(place / "a.ds")]
        else:
            (place / "olmo").mkdir()
            (place / "olmo" / "token_ids_part_0000.npy").write_bytes(foreign.flat(self.documents, "u2"))
            flags = np.array([m for mask in self.masks for m in mask], np.bool_)
            (place / "olmo" / "labels_mask_part_0000.npy").write_bytes(flags.tobytes())
            words = ["import", str(place / "olmo"), "--format", "flat", "--dtype", "uint16"]
        path = rng.choice(sorted(file for file in place.rglob("*") if file.is_file()))
        path.write_bytes(other_bytes(rng, path.read_bytes()))
        return [*words, *self.of_imports()]

    def of_imports(self) -> list[str]:
        return ["--tokenizer", str(self.here / "tokenizer"), "--eos", "</s>"]
