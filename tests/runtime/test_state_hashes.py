"""The hashes of a state are made as STATE.md says, computed here from the page alone."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from tests.runtime.loaders import two_corpora
from tokshard.runtime import NumpyLoader


def state_of(loader: NumpyLoader) -> dict[str, Any]:
    line = loader.state_dict()["cursor"]
    assert " " not in line
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_the_plan_hash_is_that_of_its_fields_and_corpora() -> None:
    state = state_of(NumpyLoader(two_corpora(), global_batch_size=4))
    names = ("order_version", "seed", "seq_len", "block_tokens", "window_blocks", "num_streams")
    content = b"tokshard plan 1\n" + b"".join(state[name].to_bytes(8, "little") for name in names)
    for corpus in state["corpora"]:
        content += bytes.fromhex(corpus["fingerprint"]) + corpus["start_epoch"].to_bytes(8, "little")
        content += struct.pack("<d", corpus["take"])
    assert hashlib.sha256(content).hexdigest() == state["plan"]


def test_the_planned_changes_are_hashed_from_the_last_to_the_first() -> None:
    plan = two_corpora(schedule=[(10, {"a": 0.25, "b": 0.5}), (15, {"a": 1, "b": 0})])
    expected = b""
    for start, weights in [(15, (1.0, 0.0)), (10, (0.25, 0.5))]:
        content = b"tokshard schedule 1\n" + expected + struct.pack("<q2d", start, *weights)
        expected = hashlib.sha256(content).digest()
    loader = NumpyLoader(plan, global_batch_size=4)
    assert state_of(loader)["schedule"] == expected.hex()
    loader.skip(3)
    in_force = b"tokshard schedule 1\n" + expected + struct.pack("<q2d", 3, 0.7, 0.3)  # as if they started there
    assert state_of(loader)["planned"] == hashlib.sha256(in_force).hexdigest()
    loader.set_weights({"a": 1, "b": 1})
    assert state_of(loader)["schedule"] is None
    assert state_of(loader)["planned"] == hashlib.sha256(in_force).hexdigest()
    loader.load_state_dict(NumpyLoader(plan, global_batch_size=4).state_dict())
    loader.skip(15)
    assert state_of(loader)["schedule"] == ""


def test_the_last_key_is_the_hash_of_the_line_before_it() -> None:
    line = NumpyLoader(two_corpora(), global_batch_size=4).state_dict()["cursor"]
    before, _, end = line.rpartition(",")
    assert end == f'"check":"{hashlib.sha256(before.encode()).hexdigest()[:16]}"}}'


def numbers_of(text: str) -> list[tuple[int, int]]:
    """The differences in a text of pairs."""
    content = zlib.decompress(base64.b64decode(text))
    count = len(content) // 8
    numbers = [
        int.from_bytes(bytes(content[place * count + at] for place in range(8)), "little", signed=True)
        for at in range(count)
    ]
    return list(zip(numbers[: count // 2], numbers[count // 2 :], strict=True))


def test_more_than_32_skips_and_calls_are_texts_of_their_differences(tmp_path: Path) -> None:
    lists, skips, calls = tmp_path / "list", [], []
    loader = NumpyLoader(two_corpora(), global_batch_size=4)
    for number in range(40):
        state = state_of(loader)
        for saved in (state["skipped"], *(mask["calls"] for mask in state.get("masks", []))):
            assert isinstance(saved, str) == (number > 32)
        next(iter(loader))
        with lists.open("a") as file:
            file.write(f"{number % 5}\n")
        loader.mask("a", lists)
        calls.append((loader.cursor.sample, lists.stat().st_size))
        skips.append((loader.cursor.sample, loader.cursor.sample + 4 * number + 4))
        loader.skip(4 * number + 4)
    state = state_of(loader)
    bounds = [0, *itertools.chain(*skips)]
    steps = [after - before for before, after in itertools.pairwise(bounds)]
    assert numbers_of(state["skipped"]) == list(zip(steps[::2], steps[1::2], strict=True))
    (mask,) = state["masks"]
    assert numbers_of(mask["calls"]) == [
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise([(0, 0), *calls])
    ]
    assert mask["sha256"] == hashlib.sha256(lists.read_bytes()).hexdigest()
    loader.close()


def test_keys_stand_in_the_order_of_the_page() -> None:
    state = state_of(NumpyLoader(two_corpora(), global_batch_size=4))
    assert list(state) == [
        *(
            "tokshard_cursor",
            "plan",
            "order_version",
            "seed",
            "seq_len",
            "block_tokens",
            "window_blocks",
            "num_streams",
        ),
        *("corpora", "sample", "weights", "schedule", "planned", "counts", "remainders", "skipped", "changes", "check"),
    ]
    assert state["counts"] == state["remainders"] == []
