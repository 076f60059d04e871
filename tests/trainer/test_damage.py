"""What is said of damaged checkpoints, and of damaged weights of Hugging Face; nothing of them is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.damage import Change, Damage, check, cut, damaged, flipped, grown
from tests.trainer.checkpoints import FIRST, alone, latest, load, save, seal, trained, unchanged
from tokshard.errors import LoaderError, TrainerError
from tokshard.run_files.checkpoint_directory import COMPLETE, STATE_FILE, check_hashes
from tokshard.trainer.hugging_face import CONFIG, INDEX, load_weights, name_of, write_config

IS_DAMAGED = f"DIR/{FIRST} is damaged or not a complete checkpoint: "


def load_all(directory: Path) -> None:
    load(directory / FIRST)


def hash_all(directory: Path) -> None:
    check_hashes(str(directory / FIRST))


def load_sealed(directory: Path) -> None:
    """Whoever changed a file has made its hash right again."""
    seal(directory / FIRST)
    load(directory / FIRST)


def of_checkpoint(name: str, what: str, change: Change | None, problem: str, **others: Any) -> Damage:
    given = {"read": load_all, "error": TrainerError, "message": IS_DAMAGED + problem} | others
    return Damage(f"{name}: {what}", lambda directory: save(directory, 1) / name, change, **given)


def of_weights(name: str, what: str, change: Change | None, message: str) -> Damage:
    """Weights of Hugging Face in two files."""

    def write(directory: Path) -> Path:
        save_file = pytest.importorskip("safetensors.torch").save_file
        model, _ = trained(seed=1)
        write_config(str(directory), model.shape, seq_len=8, dtype="fp32", special={})
        tensors = [(name_of(of), value.detach()) for of, value in model.named_parameters()]
        parts = {"a.safetensors": dict(tensors[::2]), "b.safetensors": dict(tensors[1::2])}
        for file, part in parts.items():
            save_file(part, directory / file)
        places = {key: file for file, part in parts.items() for key in part}
        (directory / INDEX).write_text(json.dumps({"weight_map": places}))
        (directory / "pytorch_model.bin").write_bytes(b"a pickle, which is not read")
        return directory / name

    def read(directory: Path) -> None:
        model, _ = trained(seed=9)
        with unchanged(model):
            load_weights(str(directory), model, num_ids=20)

    return Damage(f"{name} of Hugging Face: {what}", write, change, read, TrainerError, message)


def to(content: bytes) -> Change:
    return lambda _: content


def another_norm(content: bytes) -> bytes:
    """Weights of Hugging Face in which a norm has another size."""
    safetensors = pytest.importorskip("safetensors.torch")
    found: bytes = safetensors.save(safetensors.load(content) | {"model.norm.weight": torch.ones(15)})
    return found


def listing(name: str, entry: Any) -> Change:
    """COMPLETE with another entry, or without one."""

    def change(content: bytes) -> bytes:
        return json.dumps({key: of for key, of in {**json.loads(content), name: entry}.items() if of}).encode()

    return change


GARBAGE = {
    "empty": (b"", "Input data was truncated", "EOFError"),
    "a list": (b"[" * 100_000, "Expected `object`, got `array`", "91"),
    "bytes": (b"\xff" * 9, "JSON is malformed: invalid character (byte 0)", "255"),
    "None": (b"N.", "JSON is malformed: invalid character (byte 0)", "it has a NoneType in place of a Metadata"),
}
"""Content that a file never had, and what is said of it in place of JSON, and of a pickle."""
NOT_UTF_8 = "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
ELSEWHERE = f"../{FIRST}/{STATE_FILE}"

DAMAGE = [
    *(
        of_checkpoint(COMPLETE, what, to(of), f"COMPLETE: {said}", read=latest)
        for what, (of, said, _) in GARBAGE.items()
    ),
    of_checkpoint(COMPLETE, "without files", to(b"{}"), "COMPLETE does not list 'state.json'"),
    of_checkpoint(COMPLETE, "not UTF-8", to(b'{"\xff": 1}'), f"COMPLETE: {NOT_UTF_8}"),
    of_checkpoint(COMPLETE, "a number", listing("x", 17), "COMPLETE: Expected `object`, got `int` - at `$[...]`"),
    of_checkpoint(COMPLETE, "another file", listing("x", {"bytes": 1, "sha256": ""}), "'x' is missing"),
    of_checkpoint(COMPLETE, "without tensors", listing("__0_0.distcp", None), "COMPLETE does not list '__0_0.distcp'"),
    of_checkpoint(COMPLETE, "elsewhere", listing(ELSEWHERE, {"bytes": 44, "sha256": ""}), f"'{ELSEWHERE}' is missing"),
    *(
        of_checkpoint(name, what, change, problem.format(name), read=read)
        for name in (".metadata", "__0_0.distcp", STATE_FILE)
        for what, change, problem, read in (
            ("a flipped bit", flipped(0.5), "{} has SHA-256 *, expected *", load_all),
            ("a flipped bit, for an export", flipped(0.5), "{} has SHA-256 *, expected *", hash_all),
            ("cut", cut, "{} has * bytes, expected *", load_all),
            ("grown", grown, "{} has * bytes, expected *", load_all),
            ("gone", None, "'{}' is missing", load_all),
        )
    ),
    *(
        of_checkpoint(name, f"{what}, with a true hash", to(content), "", read=load_sealed, error=error, message=said)
        for what, (content, in_json, in_pickle) in GARBAGE.items()
        for name, error, said in (
            (".metadata", LoaderError, f"FILE is not the index of a checkpoint: {in_pickle}"),
            (STATE_FILE, TrainerError, f"{IS_DAMAGED}state.json: {in_json}"),
        )
    ),
    of_weights("a.safetensors", "cut", cut, "DIR is damaged: *incomplete metadata, file not fully covered"),
    of_weights("a.safetensors", "gone", None, "DIR cannot be read: No such file or directory: FILE"),
    of_weights(INDEX, "elsewhere", to(b'{"weight_map": {"x": "../x"}}'), "FILE names '../x', a file elsewhere"),
    of_weights("a.safetensors", "another norm", another_norm, "DIR: model.norm.weight is (15,), expected (16,)*"),
    of_weights(CONFIG, "a list", to(b"[1]"), "DIR is damaged: cannot convert dictionary *"),
]


@damaged(DAMAGE)
def test_damage(damage: Damage, tmp_path: Path) -> None:
    with alone():
        check(damage, tmp_path)
