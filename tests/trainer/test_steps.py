"""What each step does: waits for nothing, reads what the recipe plans, survives what is not finite, reports it once."""

from __future__ import annotations

import gc
import json
import re
import resource
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.mix_from_losses import follow
from tests.examples import some
from tests.runtime.sources import ListSource
from tests.trainer.runs import ROOT, Runs, as_toml, evaluations_of, lines_of, steps_of
from tokshard.errors import PlanMismatchError
from tokshard.inspect.plan.run import open_run
from tokshard.run_files.model_shape import PRESETS, Shape, peak_tflops, training_flops
from tokshard.run_files.recipe import Parallel
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import Batch, StreamingLoader
from tokshard.trainer import loop, metrics
from tokshard.trainer.loop import gradient_scale, squared_norm
from tokshard.trainer.metrics import Report
from tokshard.trainer.model import Transformer
from tokshard.trainer.parallel import process_group
from tokshard.trainer.profiling import Profiler


def assert_equal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == others.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])] == []


@pytest.mark.slow
def test_a_step_has_one_collective_of_its_own_and_is_read_when_the_next_is_under_way(
    run: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, reads, added = [Counter()], [], []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(function)
            to_host = "aten._to_copy" in name and str((kwargs or {}).get("device")) == "cpu"
            if "c10d" in name or "_local_scalar_dense" in name or "is_nonzero" in name or to_host:
                steps[-1][name] += 1
            return function(*args, **(kwargs or {}))

    end, add, tolist = Report.end_step, Report.add_up, torch.Tensor.tolist

    def listed(tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.float64:
            reads.append(len(added))
        return tolist(tensor)

    monkeypatch.setattr(Report, "add_up", lambda *given, **by_name: added.append(1) or add(*given, **by_name))
    monkeypatch.setattr(Report, "end_step", lambda *given: steps.append(Counter()) or end(*given))
    monkeypatch.setattr(torch.Tensor, "tolist", listed)
    for name in ("item", "cpu", "__float__", "__bool__", "__int__"):
        waits = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda tensor, of=waits, name=name: steps[-1].update([name]) or of(tensor)
        )
    with Count():
        run(train__steps=6)
    assert steps[1:6] == [{"c10d.allreduce_.default": 1}] * 5
    assert reads == [2, 3, 4, 5, 6, 6]


@pytest.mark.slow
def test_batch_sizes_weights_and_left_out_steps_are_exact_wherever_a_run_is_stopped(run: Runs, tmp_path: Path) -> None:
    plan = {
        "train__steps": 7,
        "train__skip": [[2, 3], [5, 7]],
        "data__batch_ramp": [[3, 2], [4, 6]],
        "data__schedule": [[10, {"code": 0.0, "prose": 1.0}]],
    }
    straight = run(**plan)
    for stop in (1, 2, 3, 5):  # before and after a left-out step, at a new batch size and new weights, between two
        run("stopped", **plan, train__stop_after=stop)
    assert [{**of, "corpora": 0} for of in run("stopped", **plan)] == [{**of, "corpora": 0} for of in straight]
    assert_equal(run.tensors(7), run.tensors(7, "stopped"))
    assert [of["samples"] for of in straight] == [[0, 4], [4, 8], [8, 10], [10, 16], [16, 22], [22, 28], [28, 34]]
    assert [of.get("num_samples") for of in straight] == [4, None, 2, 6, None, None, 6]
    assert straight[1] == {"step": 2, "skipped": "train.skip", "samples": [4, 8]}
    by_corpus = [of["loss_by_corpus"] for of in straight if "loss_by_corpus" in of]
    assert [losses["code"] is None for losses in by_corpus] == [False, False, True, True]
    state = json.loads((tmp_path / "out" / "checkpoints" / "step-00000007" / "state.json").read_text())
    assert json.loads(state["loader"]["cursor"])["skipped"] == [[4, 8], [16, 28]]
    nothing_left_out = run("whole", **plan | {"train__skip": []})
    assert [of["digest"] for of in nothing_left_out if of["step"] in (1, 3, 4, 7)] == [
        of["digest"] for of in straight if "digest" in of
    ]
    assert nothing_left_out[2]["loss"] != straight[2]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_job_that_dies_between_saves_leaves_each_step_once_and_is_exact(
    run: Runs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, calls = loop._Run.forward_backward, iter(range(1, 1_000))

    def die_in_step_5(of: loop._Run, batch: Batch) -> torch.Tensor:
        if next(calls) == 5:
            raise MemoryError
        return make(of, batch)

    plan = {"train__steps": 6, "checkpoint__every": 2, "optimizer__name": name, "optimizer__lr": 0.01}
    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "forward_backward", die_in_step_5)
        with pytest.raises(MemoryError):
            run(**plan)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "initialise", None)  # no values are drawn for tensors that are loaded
        found = run(**plan)
    assert found == run("straight", **plan)
    assert_equal(run.tensors(6), run.tensors(6, "straight"))
    assert found[-1]["loss"] < found[0]["loss"]


def test_an_edited_recipe_holds_from_the_resume_on_and_a_line_says_what_it_changes(
    run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(train__steps=2)
    edited = {"data__weights": {"code": 0.0, "prose": 1.0}, "data__global_batch_size": 6, "optimizer__eps": 1e-7}
    read = run(**edited, train__steps=3)
    assert [of["samples"] for of in read] == [[0, 4], [4, 8], [8, 14]]
    assert read[2]["loss_by_corpus"]["code"] is None
    said = capsys.readouterr().out
    assert "differs from that checkpoint: weights code 0.7 -> 0, prose 0.3 -> 1 from sample 8 on" in said
    assert "global_batch_size and batch_ramp [4, []] -> [6, []] from step 3 on" in said
    assert "that checkpoint: train.steps 2 -> 3\n" in said
    assert "that checkpoint: optimizer.eps 1e-08 -> 1e-07\n" in said
    assert said.count("differs from that checkpoint") == 4
    edited["data__schedule"] = [[14, {"code": 1.0, "prose": 0.0}]]  # begins where the run is
    assert run(**edited, train__steps=4)[3]["loss_by_corpus"]["prose"] is None
    assert "weights code 0 -> 1, prose 1 -> 0 from sample 14 on" in capsys.readouterr().out
    with pytest.raises(PlanMismatchError, match="seq_len differs") as caught:
        run(**edited, train__steps=5, data__seq_len=32)
    assert 'data.on_resume = ["seq_len"]' in caught.value.hint
    for steps in (5, 6):  # the keys may stay
        run(**edited, train__steps=steps, train__skip=[[2, 4]], data__seq_len=32, data__on_resume=["seq_len"])
    said = capsys.readouterr().out
    assert said.count("differs from that checkpoint: train.skip [[2, 4]] is too late for steps up to 4") == 1
    assert said.count("differs from that checkpoint: seq_len") == said.count("seq_len 16 -> 32 from sample 20 on") == 1
    run(**edited, train__steps=2, data__seq_len=32, evaluation__corpora={"held_out": run.paths["code"]})
    assert "step 6: nothing is left to do, train.steps or train.stop_after is 2" in capsys.readouterr().out
    assert not evaluations_of(tmp_path / "out")


def test_a_corpus_that_the_recipe_leaves_out_is_told_at_the_resume_that_removes_it_and_not_again(
    run: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run(train__steps=2)
    fewer = {"data__corpora": {"prose": run.paths["prose"]}, "data__weights": {}, "data__on_resume": ["corpora"]}
    for steps, schedule in ((3, []), (4, [[100, {"prose": 2}]])):  # a change that changes nothing
        run(**fewer, train__steps=steps, data__schedule=schedule)
    said = capsys.readouterr().out
    assert said.count("corpus code removed") == said.count("corpus code removed from sample 8 on") == 1


def test_weights_are_told_also_of_corpora_in_another_order_and_of_new_ones(
    run: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run(train__steps=1)
    prose, code = run.paths["prose"], run.paths["code"]
    turned = {"data__corpora": {"prose": prose, "code": code}, "data__on_resume": ["corpora"]}
    run(**turned, data__weights={"prose": 0.3, "code": 0.7}, train__steps=2)
    run(**turned, data__weights={"prose": 0.6, "code": 0.7}, train__steps=3)
    more = turned | {"data__corpora": {"more": code, "prose": prose}, "data__start_epoch": {"more": 1}}
    run(**more, data__weights={"prose": 0.6, "more": 0.2}, train__steps=4)
    said = re.findall("that checkpoint: weights (.*)", capsys.readouterr().out)
    assert said == ["prose 0.3 -> 0.6 from sample 8 on", "more 0 -> 0.2 from sample 12 on"]


def test_a_trace_of_a_run_reads_its_newest_checkpoint_and_that_of_a_recipe_says_how_its_run_differs(
    run: Runs, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    listed = tmp_path / "masked.txt"
    listed.write_text("3\n")
    corpora_text = ", ".join(f'{name} = "{path}"' for name, path in run.paths.items())

    def write(weights: str, more: str = "") -> None:
        recipe.write_text(
            f"[data]\ncorpora = {{ {corpora_text} }}\nweights = {weights}\n{more}\n"
            'seq_len = 16\nglobal_batch_size = 4\nseed = 7\nuneven = "pad"\nmask = { code = ["masked.txt"] }\n'
            '[train]\nout = "out"\nsteps = 2\n'
        )

    write("{ code = 0.7, prose = 0.3 }")
    run(train__steps=2, data__mask={"code": [str(listed)]})
    assert open_run(str(recipe), {}).other_run == ""
    write("{ code = 0.0, prose = 1.0 }", "schedule = [[100, { code = 1.0, prose = 1.0 }]]")
    assert open_run(str(recipe), {}).other_run == f"{tmp_path / 'out'}, by data.weights, data.schedule"
    traced = open_run(str(tmp_path / "out"), {})
    assert (traced.step, traced.cursor.sample) == (2, 8)
    moved = listed.rename(tmp_path / "elsewhere.txt")
    with pytest.raises(PlanMismatchError, match=r"listed in .*masked\.txt"):
        open_run(str(tmp_path / "out"), {})
    assert open_run(str(tmp_path / "out"), {}, mask_files=[str(moved)]).cursor.masks[0].file == str(moved)
    (tmp_path / "again").mkdir()
    listed = moved.rename(tmp_path / "again" / "masked.txt")  # with the recipe
    recipe = recipe.rename(tmp_path / "again" / "recipe.toml")
    continued = open_run(str(recipe), {}, checkpoint=str(tmp_path / "out"))
    assert [one.weights for one in continued.cursor.segments] == [(0.7, 0.3), (0.0, 1.0), (1.0, 1.0)]
    assert len(run(train__steps=3, data__mask={"code": [str(listed)]})) == 3


def test_weights_that_a_program_has_set_stay_if_the_recipe_did_not_change(run: Runs) -> None:
    run(train__log_every=1, train__steps=2, on_record=lambda _: {"code": 0.0, "prose": 1.0})
    assert run(train__steps=3)[2]["loss_by_corpus"]["code"] is None
    other = run(train__steps=4, data__weights={"code": 1.0, "prose": 0.0})
    assert other[3]["loss_by_corpus"]["prose"] is None


def test_a_mix_that_follows_losses_leaves_a_paused_corpus_out() -> None:
    weights = {"code": 0.97, "prose": 0.03, "paused": 0.0}
    corpora = {name: {"weight": weight} for name, weight in weights.items()}
    record = {"loss": 2.0, "loss_by_corpus": dict.fromkeys(weights), "corpora": corpora}
    assert follow(record) == {"code": 0.97, "prose": 0.05, "paused": 0.0}


@pytest.mark.slow
@some("log_every, stop_after", [(3, 5), (1, 5), (3, 0)], default=2)
def test_other_weights_are_in_force_after_logged_steps_alone_whatever_stops_a_run(
    run: Runs, tmp_path: Path, log_every: int, stop_after: int
) -> None:
    seen: list[dict[str, Any]] = []

    def follow(record: Mapping[str, Any]) -> dict[str, float]:
        seen.append(json.loads(json.dumps(record)))
        return {"code": 1.0, "prose": float(record["step"])}

    plan: dict[str, Any] = {"train__steps": 10, "train__log_every": log_every, "train__skip": [[6, 7]]}
    plan |= {"data__schedule": [[90, {"code": 0.5, "prose": 0.5}]]}
    for end in (stop_after, 0) if stop_after else (0,):
        run(**plan, train__stop_after=end, evaluation__corpora={"held out": run.paths["code"]}, on_record=follow)
    weights = [step["corpora"]["prose"]["weight"] for step in steps_of(tmp_path / "out") if "skipped" not in step]
    assert weights == [(step - 1) // log_every * log_every or 0.3 for step in range(1, 11) if step != 6]
    last = 10 // log_every * log_every
    state = json.loads((tmp_path / "out" / "checkpoints" / "step-00000010" / "state.json").read_text())["loader"]
    assert json.loads(state["cursor"])["weights"][-1] == [4 * last, [1.0, last]]
    assert seen == lines_of(tmp_path / "out"), "a program gets every line"


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing_and_is_on_record(run: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run(train__steps=5, train__stop_after=2)
    with_an_infinite_gradient(monkeypatch, at=1)
    run(train__steps=5, train__stop_after=3, train__on_non_finite="skip")
    assert_equal(run.tensors(2), run.tensors(3))
    step = run(train__steps=5)[2]
    assert step["skipped"].endswith("gradient norm inf")
    assert (step["loss"], step["grad_norm"], step["num_samples"]) == (None, None, 4)
    assert run.tensors(5)["optimizer.step.norm.weight"] == 4


def with_an_infinite_gradient(monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    make, calls = loop._Run.forward_backward, iter(range(1, 1_000))

    def infinite(run: loop._Run, batch: Batch) -> torch.Tensor:
        losses = make(run, batch)
        if next(calls) == at:
            next(run.model.parameters()).grad.fill_(torch.inf)
        return losses

    monkeypatch.setattr(loop._Run, "forward_backward", infinite)


@pytest.mark.slow
def test_documents_of_the_recipe_are_out_of_the_loss_and_a_new_list_from_where_the_run_continues(
    run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(tmp_path / f"{name}.txt") for name in ("code", "prose")}
    for file in files.values():
        Path(file).write_text("".join(f"{document}\n" for document in range(300)))  # all of them
    run(train__steps=6, train__stop_after=2, data__mask={"prose": [files["prose"]]})
    assert "300 documents are out of the loss" in capsys.readouterr().out
    masks = {"code": [files["code"]], "prose": [files["prose"]]}
    run(train__steps=6, train__stop_after=4, data__mask=masks)
    steps = run(train__steps=6, data__mask=masks)
    assert all(of["loss_by_corpus"]["prose"] is None for of in steps)
    for of in ({"loss": of["loss"], **of["loss_by_corpus"]} for of in steps[2:]):
        assert set(of.values()) == {None}  # the mean of nothing
    assert None not in {steps[step][loss] for step in (0, 1) for loss in ("loss", "grad_norm")}
    assert "step 6/6  no targets  grad 0.00" in capsys.readouterr().out
    for step in (2, 6):  # the recipe adds to the first what the second has
        traced = open_run(str(tmp_path / "out" / "checkpoints" / f"step-0000000{step}"), {"mask": masks}).cursor.masks
        assert [(mask.calls[0][0], mask.name, len(mask.documents)) for mask in traced] == [
            (0, "prose", 300),
            (8, "code", 300),
        ]


def test_flops_are_six_per_weight_and_token_and_twelve_per_layer_width_and_attended_pair() -> None:
    shape = Shape(dim=16, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=24, vocab_size=40)
    model = Transformer(shape)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    weights += model.head.weight.numel()
    assert training_flops(shape, 10, 0) == 6 * weights * 10
    assert training_flops(shape, 10, 7) == 6 * weights * 10 + 12 * 3 * 16 * 7
    # 7B: 6 x 6.6B weights, and at 4,096 tokens 12 x 32 x 4096 x 4096
    assert training_flops(PRESETS["7B"], 1, 4096) == pytest.approx(46.1e9, rel=0.01)


def test_mfu_counts_pieces_and_full_rows_and_padding_counts_for_nothing(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[float, float]] = []
    monkeypatch.setattr(metrics, "training_flops", lambda shape, tokens, pairs: counted.append((tokens, pairs)) or 1e12)
    given: list[Batch] = []
    make = loop._Run.forward_backward
    monkeypatch.setattr(loop._Run, "forward_backward", lambda run, batch: given.append(batch) or make(run, batch))
    run(train__steps=1, train__peak_tflops=2.0)
    lengths = given[0]["cu_seqlens"].diff().tolist()
    assert counted == [(64, sum(n * (n + 1) // 2 for n in lengths)), (64, 64 * 16)]
    (step,) = steps_of(tmp_path / "out")
    assert step["mfu"] == pytest.approx(step["tokens_per_second"] / 64 / 2.0)
    assert [*map(peak_tflops, ("", "H100 PCIe", "NVIDIA H100 80GB HBM3", "H200"))] == [None, 756, 989, 989]


@pytest.mark.parametrize("deal", ["order", "cost"])
def test_attended_pairs_are_those_of_the_rows_wherever_padding_is(deal: Any) -> None:
    plan = StreamPlan(ListSource([9, 4, 30, 1, 12, 3]), epochs=1, seq_len=6, allow_small_blocks=True)  # 10 samples
    with StreamingLoader(plan, global_batch_size=4, dp_rank=0, dp_world_size=1, compact=True, deal=deal) as loader:
        *_, batch = loader
    rows = [plan.trace(sample) for sample in batch["sample_index"].tolist() if sample >= 0]
    lengths = [[piece.stop - piece.start for piece in pieces] for pieces in rows]
    lengths = [n for row in lengths for n in (*row, 6 - sum(row))]  # the padded end of a row is a piece, too
    figures = metrics.figures_of(batch, 1)
    assert (len(rows), figures["pairs"]) == (2, [sum(n * (n + 1) // 2 for n in lengths)])
    assert max(figures["digest"]) < 1 << 16, "sums of them over ranks are exact as fp64"


def test_the_norm_of_a_gradient_does_not_depend_on_how_many_ranks_hold_it() -> None:
    gradient = torch.randn(16_384, 128, generator=torch.Generator().manual_seed(17)) * 1e-4
    expected = gradient.double().square().sum().item()
    for ranks in (1, 2, 3):
        parts = [squared_norm([part]) for part in gradient.chunk(ranks)]
        assert sum(parts).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.0, 5.0), (1.0, 1.0), (7.0, 5.0)])
def test_a_gradient_is_clipped_to_the_largest_norm_and_0_means_no_limit(clip_norm: float, expected: float) -> None:
    gradient, targets = torch.tensor([30.0, 40.0]), torch.tensor(10.0, dtype=torch.float64)
    scale = gradient_scale(targets, gradient.double().norm() / targets, clip_norm)
    assert (gradient / scale).norm().item() == pytest.approx(expected, rel=1e-4)


def test_bf16_follows_fp32_and_keeps_its_parameters_in_fp32(run: Runs) -> None:
    fp32, bf16 = (
        [of["loss"] for of in run(name, train__steps=5, parallel__precision=name)] for name in ("fp32", "bf16")
    )
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.01)
    assert run.tensors(5, "bf16")["model.head.weight"].dtype == torch.float32


def test_a_window_of_the_profiler_is_a_trace_in_out_or_a_warning_if_the_disk_is_full(
    run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "trace-step-2-rank-0.json"
    run(train__steps=3, train__profile_steps=[2, 3])
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events) == 1
    assert f"wrote {path}" in capsys.readouterr().out
    with process_group(Parallel(device="cpu")):
        profiler = Profiler(run.recipe("full", train__profile_steps=[2, 3]).train, torch.device("cpu"))
        (tmp_path / "full").mkdir()
        profiler.before(2)
        for _ in range(500):
            torch.ones(1)
        _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            profiler.before(3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "full/trace-step-2-rank-0.json could not be written" in capsys.readouterr().out
    assert not list((tmp_path / "full").iterdir())


def test_garbage_is_collected_every_few_steps_and_by_python_again_afterwards(
    run: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collected.append(gc.isenabled()))
    monkeypatch.setattr(loop, "GARBAGE_STEPS", 2)
    run(train__steps=5)
    assert collected == [False] * 2  # after steps 2 and 4
    assert gc.isenabled()


@pytest.mark.interop
def test_tensorboard_shows_what_the_metrics_say_as_the_page_has_it(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    page = (ROOT / "tokshard" / "trainer" / "README.md").read_text(encoding="utf-8")
    (program,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "SummaryWriter" in block)
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(as_toml(run.fields("run", train__steps=3)))
    exec(program, {})
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    steps = steps_of(tmp_path / "run")
    assert [(of.step, of.value) for of in board.Scalars("loss")] == [
        (of["step"], pytest.approx(of["loss"])) for of in steps
    ]
    assert "loss_by_corpus/code" in board.Tags()["scalars"]
