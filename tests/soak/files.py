"""Trials that change what a job is given besides corpora: states, plans, recipes, checkpoints, lists; and sources."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.contract import conversations
from tests.contract.builds import text
from tests.pipeline import foreign
from tests.runtime.states import sealed, values_of
from tests.soak.corpora import check_command, outcome
from tests.soak.mutations import other_bytes, other_content, other_json
from tests.trainer.runs import SMALL, configuration, toml
from tokshard.errors import TokshardError
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.run_files import checkpoint_directory
from tokshard.run_files.recipe import load_config
from tokshard.run_files.saved_state import read_state
from tokshard.runtime import NumpyLoader, StreamPlan

Attempt = Callable[[random.Random, Path], None]
"""Changes a file in an empty folder, and reads it."""

SIZES: dict[str, Any] = {"seed": 5, "block_tokens": 2048, "window_blocks": 1, "allow_small_blocks": True}
WEIGHTS = {"text": 0.5, "chat": 0.5}


def prepare(folder: Path, stack: ExitStack) -> Callable[[int], None]:
    """Build two corpora, and save what jobs save."""
    here, rng = folder / "whole", random.Random(7)
    conversations.write_tokenizer(here / "tokenizer")
    texts = [{"text": text(rng, rng.randint(1, 40)), "id": f"n{number}"} for number in range(120)]
    options = ("--eos", "</s>", "--id-field", "id", "--shard-tokens", "5K")
    conversations.build(texts, here, "text", *options)
    conversations.build(conversations.conversations(60, seed=3), here, "chat", "--chat", "--shard-tokens", "5K")
    attempts: list[Attempt] = [
        *[states(here, seed) for seed in range(4)],
        *[toml_files(here, kind) for kind in ("mix", "recipe", "build")],
        *[checkpoints(here)] * 2,
        lists(here),
        chats(here),
    ]

    def try_(seed: int) -> None:
        place = folder / "changed"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        attempts[seed % len(attempts)](random.Random(f"files {seed}"), place)

    return try_


def corpora_of(here: Path) -> dict[str, str]:
    return {name: str(here / name) for name in WEIGHTS}


def plan_of(here: Path, seq_len: int = 16, **options: Any) -> StreamPlan:
    return StreamPlan(corpora_of(here), weights=WEIGHTS, seq_len=seq_len, **SIZES, **options)


def states(here: Path, number: int) -> Attempt:  # noqa: C901 - a case for each act
    """States of a job with all that a state may have."""
    rng, seq_len = random.Random(number), 16
    masked = here / f"masked-{number}.txt"

    def load(state: Any = None, **choices: Any) -> NumpyLoader:
        plan = plan_of(here, seq_len, num_streams=1 + number % 2)
        loader = NumpyLoader(plan, global_batch_size=4, uneven="pad")
        if state is not None:
            loader.load_state_dict(state, **choices)
        return loader

    loader = load()
    for step in range(60):
        list(islice(loader, rng.randint(1, 2)))
        act = rng.randrange(6)
        if act == 0:
            loader.set_weights({"text": rng.random() + 0.1, "chat": 0.5})
        elif act == 1:
            loader.skip(rng.randint(1, 5))
        elif act == 2 or (number == 3 and step < 40):
            with masked.open("a") as lines:
                lines.write(f"{rng.randrange(100)}\n")
            loader.mask("text", masked)
        elif act == 3 and number > 0:
            seq_len = rng.choice([8, 16, 4])
            loader = load(loader.state_dict(), seq_len="plan")
    whole: Any = loader.state_dict()

    def attempt(rng: random.Random, place: Path) -> None:
        is_sealed = rng.random() < 0.7
        if is_sealed:
            values = other_json(rng, values_of(whole))
            state = sealed(values) if isinstance(values, dict) else {"cursor": json.dumps(values)}
        elif rng.random() < 0.8:
            state = {"cursor": other_bytes(rng, whole["cursor"].encode()).decode("utf-8", "surrogateescape")}
        else:
            state = other_json(rng, whole)
        choices = {key: "plan" for key in ("weights", "corpora", "seq_len") if rng.random() < 0.4}
        loader = outcome(lambda: load(state, **choices))
        if isinstance(loader, TokshardError):
            return
        assert is_sealed or state["cursor"] == whole["cursor"], "a line that was changed is loaded"
        if isinstance(outcome(lambda: list(islice(loader, 3))), TokshardError):
            return
        saved = loader.state_dict()
        assert load(saved).state_dict() == saved, "what was loaded is saved, and is another"
        loader.stats()

    return attempt


def write_toml(path: Path, fields: Any) -> Path:
    lines = [f"{json.dumps(key)} = {toml(item)}" for key, item in fields.items()] if isinstance(fields, dict) else []
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))
    return path


def mix_of(here: Path) -> dict[str, Any]:
    """A mix that says all that a mix may say."""
    (here / "out.txt").write_text("1\n5\n")
    return {
        "corpora": corpora_of(here),
        "weights": WEIGHTS,
        "seq_len": 16,
        "global_batch_size": 8,
        "num_streams": 2,
        "generations": {"text": 0},
        "take": {"text": 0.5},
        "pack": {"chat": "whole", "text": "cut"},
        **SIZES,
        "max_epochs": {"text": 2.5},
        "on_max_epochs": "warn",
        "start_epoch": {"chat": 1},
        "uneven": "pad",
        "mask": {"text": [str(here / "out.txt")]},
        "schedule": [[100, {"text": 0.25, "chat": 0.75}]],
        "memory_bytes": "1GiB",
        "cache_bytes": "1GiB",
    }


def recipe_of(here: Path) -> dict[str, Any]:
    recipe = configuration(corpora_of(here), here / "run") | {"model": SMALL}
    recipe["data"] |= {"batch_ramp": [[4, 18]], "weights": {"text": 1, "chat": 2}}
    return recipe | {"evaluate": {"corpora": corpora_of(here), "every": 5}}


def build_of(here: Path) -> dict[str, Any]:
    sources = {name: [str(here / f"{name}.jsonl")] for name in WEIGHTS}
    return {
        "defaults": {"tokenizer": str(here / "tokenizer"), "workers": 1},
        "corpora": {
            "chat": {"sources": sources["chat"], "out": "OUT/a", "chat": "own", "loss": "last"},
            "text": {"sources": sources["text"], "out": "OUT/b", "eos": "</s>", "keep_field": ["id"]},
        },
    }


def toml_files(here: Path, kind: str) -> Attempt:
    """Files of TOML that say all that they may say."""
    whole = {"mix": mix_of, "recipe": recipe_of, "build": build_of}[kind](here)

    def attempt(rng: random.Random, place: Path) -> None:
        fields: Any = whole
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            fields = other_json(rng, fields)
        path = write_toml(place / f"{kind}.toml", fields)
        if fields is whole:
            path.write_bytes(other_bytes(rng, path.read_bytes()))
        if kind == "build":
            path.write_bytes(path.read_bytes().replace(b"OUT", str(place / "out").encode()))
            check_command(["build", str(path), "--dry-run"])
            return
        if kind == "recipe":
            outcome(lambda: load_config(str(path)))
        plan = outcome(lambda: StreamPlan.load(path))
        check_command(rng.choice([["plan", str(path)], ["trace", str(path), "--step", "2"]]))
        if not isinstance(plan, TokshardError) and plan.shape.seq_len < 10_000:
            loader = outcome(lambda: NumpyLoader(plan, global_batch_size=plan.num_streams, uneven="pad"))
            if not isinstance(loader, TokshardError):
                outcome(lambda: next(iter(loader), None))

    return attempt


def checkpoints(here: Path) -> Attempt:
    """The state in checkpoints of the trainer, of torch.distributed.checkpoint and of torch.save."""
    import torch
    import torch.distributed.checkpoint as dcp

    loader = NumpyLoader(plan_of(here), global_batch_size=4)
    list(islice(loader, 3))
    state = loader.state_dict()
    tensors = {"model.weight": torch.arange(40, dtype=torch.float32).reshape(5, 8), "step": torch.tensor(3)}
    folder = here / "checkpoints"
    folder.mkdir(exist_ok=True)
    dcp.save({**tensors, "loader": state}, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save({"loader": state, "step": 3, "model": tensors}, folder / "saved.pt")
    (folder / "state.json").write_text(json.dumps(state))
    fields = {"corpora": corpora_of(here), "weights": WEIGHTS, "seq_len": 16, "global_batch_size": 4, **SIZES}
    partial = checkpoint_directory.partial_of(str(folder), 3)
    checkpoint_directory.begin(partial)
    dcp.save(tensors, checkpoint_id=partial, no_dist=True)
    files = {path.name: checkpoint_directory.synced(str(path)) for path in Path(partial).iterdir()}
    saved = checkpoint_directory.State(step=3, loader=dict(state), config={"data": fields})
    whole = Path(checkpoint_directory.commit(partial, saved, files, needed=files))

    def attempt(rng: random.Random, place: Path) -> None:
        source = rng.choice([whole, *folder.iterdir()])
        path = place / source.name
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
        file = rng.choice(sorted(path.iterdir()) if path.is_dir() else [path])
        before = file.read_bytes()
        file.write_bytes(other_content(rng, before))
        if source == whole and file.name != checkpoint_directory.COMPLETE:
            found = outcome(lambda: checkpoint_directory.check_hashes(str(path)))
            assert file.read_bytes() == before or isinstance(found, TokshardError), "not noticed"
        outcome(lambda: read_state(str(path)), names=path)
        mix = write_toml(place / "mix.toml", fields)
        check_command(["trace", str(mix), "--checkpoint", str(path)])

    return attempt


def lists(here: Path) -> Attempt:
    """Lists of documents, by number and by id."""
    contents = {
        "numbers.txt": b"1\n5\n17\n",
        "numbers.npy": foreign.npy([1, 5, 17], "i8"),
        "ids.jsonl": b'{"id": "n3"}\n{"id": "n5", "note": "x"}\n',
        "ids.csv": b"id,note\nn3,x\nn7,y\n",
        "ids.txt": b"n3\nn9\n",
    }
    pq.write_table(pa.table({"id": ["n3", "n8"]}), here / "ids.parquet")
    contents["ids.parquet"] = (here / "ids.parquet").read_bytes()

    def attempt(rng: random.Random, place: Path) -> None:
        name = rng.choice(sorted(contents))
        path = place / name
        path.write_bytes(other_bytes(rng, contents[name]))
        if not name.startswith("numbers"):
            check_command(
                ["select", corpora_of(here)["text"], "--drop-ids", str(path), "--out", str(place / "view"), "--quiet"]
            )
            return
        loader = NumpyLoader(plan_of(here), global_batch_size=4)
        outcome(lambda: loader.mask("text", path), names=path)
        next(iter(loader))

    return attempt


# sources


OPTIONS = "", "--loss last", "--loss all", "--max-tokens 30 --overlong head", "--dedup exact"
OPTIONS += "--validation-fraction 0.3", "--document-end <pad>", "--keep-field messages.0.role"


def chats(here: Path) -> Attempt:
    """Conversations, their template and their tokenizer: they are refused, or what is built passes `verify`."""
    records: Any = conversations.conversations(12, seed=9)
    records[3] |= {"tools": [{"name": "f", "parameters": {"x": 1}}], "chat_template_kwargs": {"a": True}}

    def attempt(rng: random.Random, place: Path) -> None:
        shutil.copytree(here / "tokenizer", place / "tokenizer")
        source, act = place / "chats.jsonl", rng.randrange(5)
        found = other_json(rng, records) if act < 2 else records
        source.write_text("".join(json.dumps(each) + "\n" for each in (found if isinstance(found, list) else [found])))
        file = place / "tokenizer" / ("tokenizer.json" if act == 3 else "tokenizer_config.json")
        if act > 1:
            path = source if act == 2 else file
            path.write_bytes(other_content(rng, path.read_bytes()))
        words = ["build", str(source), "--chat", "--tokenizer", str(place / "tokenizer")]
        words += ["--out", str(place / "out"), "--workers", "1", "--quiet", "--shard-tokens", "300"]
        if rng.random() < 0.3:
            words += ["--on-bad-record", "skip"]
        if check_command([*words, *rng.choice(OPTIONS).split()]) == 0:
            for corpus in {manifest.parent for manifest in (place / "out").rglob("manifest.json")}:
                assert verify_corpus(corpus).problems == ()

    return attempt
