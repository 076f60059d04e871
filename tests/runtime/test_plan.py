"""What a plan says of itself."""

from __future__ import annotations

from typing import Any

from tests.runtime.sources import ListSource
from tokshard.runtime.plan import StreamPlan


def plan_of(sources: Any, **options: Any) -> StreamPlan:
    return StreamPlan(sources, **{"seq_len": 4, "seed": 8, "allow_small_blocks": True, **options})


def test_a_plan_prints_its_arguments_in_a_few_lines() -> None:
    a, b = ListSource([5] * 4_000), ListSource([30], name="b")
    plan = plan_of({"a": a, "b\n": b}, weights={"a": 0.7, "b\n": 0.3}, block_tokens=16, window_blocks=1_000)
    assert str(plan) == (
        f"plan {plan.fingerprint[:12]}: seed 8, seq_len 4, block_tokens 16, window_blocks 1,000, num_streams 1\n"
        "  a: weight 0.7, 20,000 tokens, pack cut\n"
        "  b\\n: weight 0.3, 30 tokens, pack cut"
    )
    options: Any = {"take": {"a": 0.5}, "start_epoch": {"a": 2}, "max_epochs": {"a": 1.5}, "pack": {"b": "whole"}}
    schedule = [(1_000, {"a": 1, "b": 0}), (2_000, {"a": 0, "b": 1})]
    plan = plan_of({"a": a, "b": b}, schedule=schedule, block_tokens=512, window_blocks=1, transforms=[len], **options)
    assert str(plan).splitlines()[1:] == [
        "  a: weight 10,240, 10,240 tokens, pack cut, take 0.5, start_epoch 2, max_epochs 1.5",
        "  b: weight 30, 30 tokens, pack whole",
        "  schedule: other weights from 1,000 and 2,000 on",
        "  transforms: <built-in function len>",
    ]
    assert str(plan_of(b, epochs=2)).splitlines()[2:] == ["  epochs 2: 15 samples"]


def test_a_part_may_be_said_in_several_ways() -> None:
    corpora = {"a": ListSource([5] * 100), "b": ListSource([30] * 9, name="b")}
    ways: Any
    for ways in ([1, 1.0, {"a": 1}, {}], [0.5, {"b": 0.5, "a": 0.5}]):
        assert len({plan_of(corpora, take=take, block_tokens=16).fingerprint for take in ways}) == 1
