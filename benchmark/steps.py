"""What the benchmark measures besides `tokshard build`, one step a process, so that none pays for another.

    python -m benchmark.steps encode TEXT TOKENIZER --way batch|pinned|tokshard
    python -m benchmark.steps hash BYTES
    python -m benchmark.steps datasets TEXT TOKENIZER OUT --processes N
    python -m benchmark.steps calibrate TOKENIZER
    python -m benchmark.steps train TEXT OUT --vocab N

Each prints one line of JSON. `encode` and `hash` time their loop alone: reading the text and loading the tokenizer
is over by then.
"""

import argparse
import functools
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH_BYTES = 4 << 20
END_OF_TEXT = "<|endoftext|>"


def read_texts(path: str) -> list[str]:
    import msgspec
    import zstandard

    class Record(msgspec.Struct):
        text: str

    with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        decode = msgspec.json.Decoder(Record).decode
        return [decode(line).text for line in io.BufferedReader(stream)]  # type: ignore[arg-type]


def batches(texts: list[str]) -> Iterator[list[str]]:
    """Consecutive texts, `BATCH_BYTES` at a time."""
    batch: list[str] = []
    num_bytes = 0
    for text in texts:
        batch.append(text)
        num_bytes += len(text)
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def timed(work: Callable[[Any], int], items: list[Any]) -> dict[str, float]:
    """Do the work for each item; sums what it returns."""
    total = 0
    started, cpu_before = time.perf_counter(), time.process_time()  # process time is that of all threads
    for item in items:
        total += work(item)
    return {
        "cpu_seconds": time.process_time() - cpu_before,
        "wall_seconds": time.perf_counter() - started,
        "total": total,
    }


def encode(arguments: argparse.Namespace) -> dict[str, float]:
    """Ids of texts in memory, special tokens as the text they are."""
    if arguments.way == "pinned":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before the library counts the CPUs for its threads
    work = list(batches(read_texts(arguments.text)))
    encode_batch = tokshard_way(arguments.tokenizer) if arguments.way == "tokshard" else bare(arguments.tokenizer)
    encode_batch(["first call"])  # in 1.x encode_batch sets up 40 to 80 ms worth, which are not encoding
    return timed(encode_batch, work)


def tokshard_way(tokenizer: str) -> Callable[[list[str]], int]:
    """The call that workers of a build make."""
    from tokshard.pipeline.encode.encoder import Encoder

    encoder = Encoder(Path(tokenizer).read_bytes())

    def work(batch: list[str]) -> int:
        return sum(map(len, encoder(batch)))

    return work


def bare(tokenizer: str) -> Callable[[list[str]], int]:
    """`encode_batch` of the installed `tokenizers`."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    if hasattr(loaded, "encode_batch_fast"):  # 0.2x
        loaded.encode_special_tokens = True

        def work(batch: list[str]) -> int:
            return sum(len(found.ids) for found in loaded.encode_batch(batch, add_special_tokens=False))

    else:

        def work(batch: list[str]) -> int:
            found = loaded.encode_batch(batch, add_special_tokens=False, encode_special_tokens=True)
            return sum(len(each.ids_array) for each in found)

    return work


def hash_bytes(arguments: argparse.Namespace) -> dict[str, float]:
    """SHA-256 over so many bytes, a MiB at a time, as a shard is hashed while it is written."""
    digest = hashlib.sha256()
    block = os.urandom(1 << 20)

    def work(length: int) -> int:
        digest.update(block[:length] if length < len(block) else block)
        return length

    whole, rest = divmod(arguments.bytes, len(block))
    return timed(work, [len(block)] * whole + [rest])


@functools.cache
def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def tokenize(batch: dict[str, list[str]], path: str, eos_id: int) -> dict[str, list[list[int]]]:
    found = _tokenizer(path).encode_batch(batch["text"], add_special_tokens=False)
    return {"tokens": [[*each.ids, eos_id] for each in found]}


def naive_pipeline(arguments: argparse.Namespace) -> dict[str, float]:
    """What most people write: load, map in batches, save."""
    import datasets

    # by its module's name, so that worker processes import it; this file runs as __main__
    from benchmark.steps import tokenize

    datasets.disable_progress_bars()
    num_proc = arguments.processes if arguments.processes > 1 else None
    data = datasets.load_dataset(
        "json", data_files=arguments.text, split="train", cache_dir=os.path.join(arguments.out, "cache")
    )
    tokenized = data.map(
        tokenize,
        batched=True,
        remove_columns=data.column_names,
        num_proc=num_proc,
        fn_kwargs={"path": arguments.tokenizer, "eos_id": arguments.eos_id},
    )
    tokenized.save_to_disk(os.path.join(arguments.out, "saved"), num_proc=num_proc)
    return {"total": len(tokenized)}


def calibrate(arguments: argparse.Namespace) -> dict[str, float]:
    """MB of source code per second that one CPU encodes here, roughly; takes a second or two."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    work = bare(arguments.tokenizer)
    started, encoded = time.perf_counter(), 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        work([text])
        encoded += len(text)
        if time.perf_counter() - started > 2:
            break
    return {"mb_per_second": encoded / 1e6 / (time.perf_counter() - started)}


def train(arguments: argparse.Namespace) -> dict[str, float]:
    """A byte-level BPE tokenizer of the given size; needs `tokenizers` 0.2x."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=arguments.vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_texts(arguments.text), trainer)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    (arguments.out / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}), encoding="utf-8")
    return {"total": tokenizer.get_vocab_size()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(required=True)
    step = steps.add_parser("encode")
    step.add_argument("text")
    step.add_argument("tokenizer")
    step.add_argument("--way", choices=["batch", "pinned", "tokshard"], required=True)
    step.set_defaults(run=encode)
    step = steps.add_parser("hash")
    step.add_argument("bytes", type=int)
    step.set_defaults(run=hash_bytes)
    step = steps.add_parser("datasets")
    step.add_argument("text")
    step.add_argument("tokenizer")
    step.add_argument("out")
    step.add_argument("--processes", type=int, required=True)
    step.add_argument("--eos-id", type=int, required=True)
    step.set_defaults(run=naive_pipeline)
    step = steps.add_parser("calibrate")
    step.add_argument("tokenizer")
    step.set_defaults(run=calibrate)
    step = steps.add_parser("train")
    step.add_argument("text")
    step.add_argument("out", type=Path)
    step.add_argument("--vocab", type=int, required=True)
    step.set_defaults(run=train)
    arguments = parser.parse_args()
    json.dump(arguments.run(arguments), sys.stdout)


if __name__ == "__main__":
    main()
