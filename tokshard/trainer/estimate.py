"""The step of a big job by arithmetic: ``python -m tokshard.trainer.estimate RECIPE ranks=64 section.key=value``.

The sizes of the model and of a batch give the communication of a rank in a step, and its approximate memory. Corpora
are needed only if the recipe does not give model.vocab_size.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from tokshard.errors import UsageError
from tokshard.numbers import ceil_div
from tokshard.run_files.model_shape import Shape, model_shape
from tokshard.run_files.recipe import Config, check_ranks, errors_in_keys, load_config, vocabulary_of
from tokshard.runtime.plan import StreamPlan
from tokshard.trainer.launcher import exit_code_of, show
from tokshard.trainer.model import Transformer, num_parameters
from tokshard.trainer.optimizer import decay_groups
from tokshard.trainer.parallel import DTYPES, check_replicas
from tokshard.wording import counted

_FP32 = 4
_LOGIT_BYTES = 12
"""The bytes of a logit and its gradient: each in bf16 and in fp32."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The communication and memory of one rank in one optimizer step.

    Args:
        ranks, replicas, parameters: of the job.
        rows, micro_batches: of this rank, in a step.
        collectives: name to how often; to the bytes of the whole tensors; and to those that this rank sends, in a ring.
            All-gather, reduce-scatter and Muon's all-to-all run among the ranks that share a copy of the model,
            all-reduce between the copies.
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
    """The step with the largest batch of the recipe.

    Raises:
        UsageError: the sizes do not fit, or the vocabulary is not known.
    """
    check_ranks(settings, ranks)
    check_replicas(settings.parallel, ranks)
    needed = 1 if settings.model.vocab_size else vocabulary_of(StreamPlan(**settings.data.arguments()))
    with torch.device("meta"):
        model = Transformer(model_shape(settings.model, needed))
    replicas, rows = settings.parallel.replicas, max(settings.data.rows_of_rank(ranks))
    shards, num_rows = ranks // replicas, settings.train.micro_batch_size or rows
    micro_batches, tokens = rows // num_rows, num_rows * settings.data.seq_len
    return Estimate(
        ranks=ranks,
        replicas=replicas,
        parameters=num_parameters(model),
        rows=rows,
        micro_batches=micro_batches,
        collectives=dict(_collectives(settings, model, shards, micro_batches)),
        peak_bytes=_peak_bytes(settings, model, shards, tokens, is_accumulated=micro_batches > 1),
    )


def _collectives(
    settings: Config, model: Transformer, shards: int, micro_batches: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """See `Estimate.collectives`. Blocks are gathered for each pass, embedding and head once for both.

    Args:
        shards: the ranks that share a copy of the model.
    """
    replicas, (precision, reduce) = settings.parallel.replicas, _itemsizes(settings)
    layers, ends = len(model.layers), 1 if model.shape.tied_embeddings else 2
    blocks, whole = (_padded(module.parameters(), shards) for module in (model.layers, model))
    if shards > 1:
        gathered = (2 * blocks + whole - blocks) * precision
        yield "all-gather", _ring(micro_batches, 2 * layers + ends, gathered, shards)
        yield "reduce-scatter", _ring(micro_batches, layers + ends, whole * reduce, shards)
    if replicas > 1:
        found = _ring(1, layers + ends, whole // shards * reduce, replicas)
        yield "all-reduce", found | {"sent": 2 * found["sent"]}
    matrices = _matrices(settings, model)
    if matrices and shards > 1:
        # as many matrices of one shape as there are ranks go to their owners at a time, in bf16, and come back
        shapes = [tuple(matrix.shape) for matrix in matrices]
        turns = sum(ceil_div(shapes.count(shape), shards) for shape in set(shapes))
        moved = 2 * 2 * sum(matrix.numel() for matrix in matrices)
        sent = moved // shards * (shards - 1) // shards
        yield "all-to-all", {"count": 2 * turns, "bytes": moved, "sent": sent}


def _ring(times: int, count: int, num_bytes: int, ranks: int) -> dict[str, int]:
    return {"count": times * count, "bytes": times * num_bytes, "sent": times * num_bytes * (ranks - 1) // ranks}


def _peak_bytes(
    settings: Config, model: Transformer, shards: int, tokens: int, *, is_accumulated: bool
) -> dict[str, int]:
    """See `Estimate.peak_bytes`.

    Args:
        shards: the ranks that share a copy of the model.
        tokens: of a micro-batch.
        is_accumulated: whether a backward pass has left gradients before the last one begins.
    """
    shape, compute, (precision, reduce) = model.shape, settings.compute, _itemsizes(settings)
    tied = [model.embedding] if shape.tied_embeddings else []
    last = sum(_padded(module.parameters(), shards) for module in (model.norm, model.head, *tied))
    first = last if tied else _padded(model.embedding.parameters(), shards)
    numbers = _padded(model.layers[0].parameters(), shards)
    own, block = _padded(model.parameters(), shards) // shards, numbers * precision
    of_matrices = _padded(_matrices(settings, model), shards) // shards
    states = {"parameters": own * _FP32, "optimizer": 2 * own * _FP32 - of_matrices * _FP32}
    before = states | ({"gradients": own * _FP32} if is_accumulated else {})
    kept = shape.num_layers * tokens * kept_bytes(shape, compute.recompute, precision)
    chunk = compute.loss_chunk
    is_chunked = 0 < chunk < tokens
    loss = before | {
        "activations": kept,
        "gathered parameters": last * precision + block,
        "logits": _LOGIT_BYTES * (chunk if is_chunked else tokens) * shape.vocab_size
        + is_chunked * shape.vocab_size * shape.dim * _FP32,
    }
    repeated = 0 if compute.recompute == "none" else kept_bytes(shape, "none", precision)
    passing = 2 * (shape.hidden_dim + shape.dim) * precision
    first_block = before | {
        "activations": kept + tokens * (repeated + passing),
        "gathered parameters": 2 * block,
        "gradients on their way": block + 2 * numbers * reduce,
    }
    end = states | {
        "gradients": own * _FP32,
        "gathered parameters": block,
        "gradients on their way": first * (precision + reduce),
    }
    return max((loss, first_block, end), key=lambda moment: sum(moment.values()))


def _padded(parameters: Iterable[nn.Parameter], shards: int) -> int:
    """The numbers of parameters, each padded with rows to a multiple of the ranks."""
    return sum(ceil_div(one.shape[0], shards) * shards * (one.numel() // one.shape[0]) for one in parameters)


def _matrices(settings: Config, model: Transformer) -> list[nn.Parameter]:
    """Those that Muon updates."""
    return list(decay_groups(model.layers)[0].values()) if settings.optimizer.name == "muon" else []


def _itemsizes(settings: Config) -> tuple[int, int]:
    """Bytes of a gathered number, and of one of a gradient on its way."""
    return DTYPES[settings.parallel.precision].itemsize, DTYPES[settings.parallel.reduce].itemsize


def kept_bytes(shape: Shape, recompute: str, precision: int) -> int:
    """Bytes that the forward pass of a block keeps for each token, with kernels that keep no copy in fp32.

    Args:
        precision: bytes of a number.
    """
    if recompute == "full":
        return precision * shape.dim
    queries, keys, hidden = shape.query_dim, shape.kv_dim, shape.hidden_dim
    of_attention = 2 * queries + 2 * keys  # queries, keys, values, and the result
    statistics = _FP32 * shape.num_heads
    if recompute == "selective":  # results of matrix products, and the block's input
        return precision * (of_attention + 3 * shape.dim + 2 * hidden) + statistics
    normed = (queries + keys) * shape.qk_norm
    # both norms keep their input, and products their inputs; SwiGLU keeps the gate before and after, and both factors
    return precision * (4 * shape.dim + of_attention + normed + 4 * hidden) + statistics


def report(found: Estimate) -> Iterator[str]:
    """Lines for people."""
    job = counted(found.ranks, "rank") + (f", {found.replicas} copies" if found.replicas > 1 else "")
    rows = f"{counted(found.rows, 'row')} in {counted(found.micro_batches, 'micro-batch', 'micro-batches')}"
    yield f"{found.parameters:,} parameters on {job}; a step of a rank is {rows}"
    for name, of in found.collectives.items():
        sizes = f"{of['bytes'] / 2**30:>9.2f} GiB, a rank sends {of['sent'] / 2**30:.2f} GiB"
        yield f"{name:<48} {of['count']:>6,} times {sizes}"
    for kind, size in sorted(found.peak_bytes.items(), key=lambda item: -item[1]):
        yield f"{kind:<48} {size / 2**30:>22.2f} GiB"
    yield f"{'peak memory of a rank':<48} {sum(found.peak_bytes.values()) / 2**30:>22.2f} GiB"


def main(arguments: list[str]) -> int:
    """Print an estimate. Exit codes: 0; 1 a corpus is damaged; 2 a wrong recipe."""
    given = [argument for argument in arguments if argument != "--json"]
    if not given or given[0] in ("-h", "--help"):
        (sys.stdout if given else sys.stderr).write(
            "usage: python -m tokshard.trainer.estimate RECIPE.toml [ranks=N] [section.key=value ...] [--json]\n"
        )
        return 0 if given else 2
    sizes = [argument.removeprefix("ranks=") for argument in given if argument.startswith("ranks=")] or ["1"]

    def run() -> int:
        if not sizes[-1].isdecimal() or len(sizes[-1]) > 18 or int(sizes[-1]) < 1:
            raise UsageError(f"ranks is {sizes[-1]!r:.60}, expected a number", hint="write ranks=64")
        settings = load_config(given[0], [argument for argument in given[1:] if not argument.startswith("ranks=")])
        with errors_in_keys():
            found = estimate(settings, ranks=int(sizes[-1]))
        return show([json.dumps(dataclasses.asdict(found))] if "--json" in arguments else report(found))

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
