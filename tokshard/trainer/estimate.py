"""The step of a big job on a small machine: ``python -m tokshard.trainer.estimate RECIPE ranks=64 section.key=value``.

Runs a step of the real model and optimizer on tensors without content, as rank 0 of a process group without other
ranks. It counts what the step communicates and keeps in memory; corpora are needed only if the recipe does not give
model.vocab_size. Compiled code keeps less in memory than this.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tokshard.errors import UsageError
from tokshard.run_files.model_shape import model_shape
from tokshard.run_files.recipe import Config, check_ranks, load_config, vocabulary_of
from tokshard.runtime.plan import StreamPlan
from tokshard.trainer.batches import padding
from tokshard.trainer.launcher import exit_code_of
from tokshard.trainer.loop import num_parameters
from tokshard.trainer.losses import backward, micro_batches
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import make_mesh, sharded_model
from tokshard.trainer.step_ledger import StepLedger, fake_group


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one rank does in one optimizer step.

    Args:
        ranks, replicas, parameters: of the job.
        rows, micro_batches: of this rank, in a step.
        collectives: name to how often, and to the bytes of the whole tensors: all-gather and reduce-scatter run among
            the ranks that share a copy of the model, all-reduce between the copies. A ring of n ranks sends (n - 1) / n
            of them from each rank, and an all-reduce twice that.
        peak_bytes: by kind, at the moment when their sum is largest.
    """

    ranks: int
    replicas: int
    parameters: int
    rows: int
    micro_batches: int
    collectives: dict[str, dict[str, int]]
    peak_bytes: dict[str, int]


def estimate(settings: Config, *, ranks: int) -> Estimate:
    """Run one step without content, with the largest batch of the recipe.

    Raises:
        UsageError: the sizes do not fit, or the vocabulary is not known.
    """
    check_ranks(settings, ranks)
    needed = 1 if settings.model.vocab_size else vocabulary_of(StreamPlan(**settings.data.arguments()))
    shape, device = model_shape(settings.model, needed), torch.device("cpu")
    batch = padding(max(settings.data.rows_of_rank(ranks)), settings.data.seq_len)
    parts = list(micro_batches(batch, settings.train.micro_batch_size, device))
    with fake_group(ranks):
        mesh = make_mesh(settings.parallel, device)
        with FakeTensorMode(allow_non_fake_inputs=True):
            compute = dataclasses.replace(settings.compute, compile="off")
            model = sharded_model(shape, mesh, settings.parallel, compute)
            optimizer = make_optimizer(model, settings.optimizer)
            states = [tensor for state in optimizer.state.values() for tensor in state.values()]
            ledger = StepLedger(shape.vocab_size)
            ledger.watch("parameters", model.parameters())
            ledger.watch("optimizer", states)
            with ledger:
                for _ in backward(model, parts):
                    pass
                ledger.is_update = True
                optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())  # type: ignore[attr-defined]
                optimizer.step()
        return Estimate(
            ranks=ranks,
            replicas=settings.parallel.replicas,
            parameters=num_parameters(model),
            rows=len(batch["input_ids"]),
            micro_batches=len(parts),
            collectives={
                name: {"count": number, "bytes": ledger.bytes_of[name]} for name, number in ledger.counts.items()
            },
            peak_bytes={kind: size for kind, size in ledger.peak.items() if size},
        )


def report(found: Estimate) -> Iterator[str]:
    """Lines for people."""
    job = f"{found.ranks} ranks, {found.replicas} copies" if found.replicas > 1 else f"{found.ranks} ranks"
    rows = f"{found.rows} rows in {found.micro_batches} micro-batches"
    yield f"{found.parameters:,} parameters on {job}; a step of a rank is {rows}"
    for name, of in found.collectives.items():
        yield f"{name:<48} {of['count']:>6,} times {of['bytes'] / 2**30:>9.2f} GiB"
    for kind, size in sorted(found.peak_bytes.items(), key=lambda item: -item[1]):
        yield f"{kind:<48} {size / 2**30:>22.2f} GiB"
    yield f"{'peak memory of a rank':<48} {sum(found.peak_bytes.values()) / 2**30:>22.2f} GiB"


def main(arguments: list[str]) -> int:
    """Print an estimate. Exit codes: 0; 1 a corpus is damaged; 2 a wrong recipe."""
    given = [argument for argument in arguments if argument != "--json"]
    if not given or given[0] in ("-h", "--help"):
        sys.stderr.write(
            "usage: python -m tokshard.trainer.estimate RECIPE.toml [ranks=N] [section.key=value ...] [--json]\n"
        )
        return 0 if given else 2
    sizes = [argument.removeprefix("ranks=") for argument in given if argument.startswith("ranks=")] or ["1"]

    def run() -> int:
        if not sizes[-1].isdecimal() or int(sizes[-1]) < 1:
            raise UsageError(f"ranks is {sizes[-1]!r}, expected a number", hint="write ranks=64")
        settings = load_config(given[0], [argument for argument in given[1:] if not argument.startswith("ranks=")])
        found = estimate(settings, ranks=int(sizes[-1]))
        lines = [json.dumps(dataclasses.asdict(found))] if "--json" in arguments else report(found)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return 0

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
