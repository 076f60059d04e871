"""tokshard's loaders: full and compact batches of the StreamingLoader, and the NumpyLoader."""

from typing import Any

from benchmark.peers.programs.common import Settings
from benchmark.peers.programs.reading import Opened, run
from tokshard import import_corpus
from tokshard.runtime import NumpyLoader, StreamingLoader, StreamPlan


def make(settings: Settings) -> None:
    import_corpus(settings["tokens"], tokenizer=settings["tokenizer"], out=settings["data"], workers=1)


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    """Modes: full, compact, numpy; each with ``prefetch`` batches made ahead by a thread."""
    plan = StreamPlan({"corpus": settings["data"]}, seq_len=settings["seq_len"], seed=17, epochs=1)
    ranks = {"dp_rank": settings["rank"], "dp_world_size": settings["world"], "global_batch_size": settings["rows"]}
    mode, prefetch = settings.get("mode", "full"), {"prefetch_factor": settings.get("prefetch", 4)}
    if mode == "numpy":
        loader: Any = NumpyLoader(plan, **ranks, **prefetch)
    else:
        loader = StreamingLoader(plan, **ranks, **prefetch, compact=mode == "compact", uneven="pad")
    if states is not None:
        loader.load_state_dict(states[0])
    return Opened(
        batches=iter(loader), ids=lambda batch: batch["input_ids"], state=loader.state_dict, close=loader.close
    )


if __name__ == "__main__":
    run(make, opened, ("tokshard", "torch"))
