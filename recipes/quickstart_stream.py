"""Stream batches from two corpora, stop, continue with another world size, and compare with the plan.

    python recipes/quickstart_stream.py CODE_CORPUS PROSE_CORPUS

Ranks are loaders side by side here, so that one process shows what a cluster does; in a job, each rank makes one loader
and gives no dp_rank: it comes from torch.distributed.
"""

from __future__ import annotations

import sys
import time

from tokshard.runtime import StreamingLoader, StreamPlan

SEQ_LEN = 1024
GLOBAL_BATCH = 12


def stream(plan: StreamPlan, world_size: int, steps: int, state: dict | None) -> tuple[list[dict], dict]:
    """Run so many steps on so many ranks, from a state on. Returns the rows of all ranks by sample, and the state."""
    loaders = [
        StreamingLoader(plan, global_batch_size=GLOBAL_BATCH, dp_rank=rank, dp_world_size=world_size)
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    rows = []
    for batches in zip(*loaders, strict=True):
        for batch in batches:
            keys = ("sample_index", "corpus_index", "input_ids", "labels", "position_ids")
            rows += [{key: batch[key][row] for key in keys} for row in range(len(batch["sample_index"]))]
        if len(rows) == steps * GLOBAL_BATCH:
            break
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states), "every rank saves the same state"
    for loader in loaders:
        loader.close()
    return sorted(rows, key=lambda row: int(row["sample_index"])), states[0]  # ranks take turns


def main() -> None:
    """Print what is read, and whether it is what the plan says."""
    code, prose = sys.argv[1:]
    started = time.perf_counter()
    plan = StreamPlan({"code": code, "prose": prose}, weights={"code": 0.7, "prose": 0.3}, seq_len=SEQ_LEN, seed=17)
    print(f"plan {plan.fingerprint[:16]}: 70% code, 30% prose, samples of {SEQ_LEN} tokens, {GLOBAL_BATCH} a step")
    rows, state = stream(plan, world_size=2, steps=3, state=None)
    print(f"2 ranks read samples 0 to {len(rows) - 1}, from scratch in {time.perf_counter() - started:.2f} s, and stop")
    print(f"  state, the same on both ranks: {len(state['cursor'])} bytes of JSON")
    for number, ranks in enumerate((3, 4), 1):
        more, state = stream(plan, world_size=ranks, steps=2, state=state)
        print(
            f"{ranks} ranks continue with samples {len(rows)} to {len(rows) + len(more) - 1}"
            + ", and stop" * (number == 1)
        )
        rows += more
    for index, row in enumerate(rows):
        sample = plan.sample(index)
        for key in ("sample_index", "corpus_index", "input_ids", "labels", "position_ids"):
            assert row[key].tolist() == sample[key].squeeze().tolist(), f"sample {index} differs in {key}"
    print(f"all {len(rows)} samples match the plan: same order, no gap, no repeat")
    print(f"sample {len(rows) - 1} is made of")
    for piece in plan.trace(len(rows) - 1)[:4]:
        print(f"  {piece.corpus}, document {piece.document:,}, tokens {piece.start:,} to {piece.stop:,}")
    started = time.perf_counter()
    plan.sample(10**12)
    print(
        f"sample 1,000,000,000,000 was made in {1000 * (time.perf_counter() - started):.0f} ms, without those before it"
    )


if __name__ == "__main__":
    main()
