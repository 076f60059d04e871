"""The floor: `encode_batch` of `tokenizers` over texts in memory, with either major version, ids included."""

import time

from tests.benchmark.peers.programs.common import Settings, batches, encoder, files, main, texts


def floor(settings: Settings) -> dict[str, float]:
    """Encode all texts, 4 MB a call; reading them and loading the tokenizer are not in the time."""
    encode = encoder(settings["tokenizer"])
    work = list(batches(texts(files(settings["texts"]))))
    encode(["first call"])  # sets up threads and caches
    started, cpu_started = time.perf_counter(), time.process_time()
    tokens = sum(len(ids) for batch in work for ids in encode(batch))
    return {
        "work_seconds": time.perf_counter() - started,
        "work_cpu_seconds": time.process_time() - cpu_started,
        "tokens": tokens,
        "documents": sum(map(len, work)),
    }


if __name__ == "__main__":
    main({"floor": floor}, ["tokenizers"])
