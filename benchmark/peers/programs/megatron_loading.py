"""megatron-core: an IndexedDataset read by GPTDataset, in the order of Megatron-LM's sampler."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from benchmark.peers.programs.common import Settings
from benchmark.peers.programs.reading import Opened, documents, run, source


def make(settings: Settings) -> None:
    ids, _ = source(settings)
    folder = Path(settings["data"])
    folder.mkdir(parents=True)
    builder = IndexedDatasetBuilder(str(folder / "text_document.bin"), dtype=ids.dtype.type)
    for document in documents(settings):
        builder.add_document(torch.from_numpy(document.copy()), [len(document)])
    builder.finalize(str(folder / "text_document.idx"))


class Sampler:
    """Batches of consecutive samples, of which a rank takes its rows.

    Megatron-LM has this as MegatronPretrainingSampler, outside of megatron-core; the data set has the shuffled order.
    """

    def __init__(self, num_samples: int, consumed: int, settings: Settings) -> None:
        self.num_samples, self.consumed, self.rows = num_samples, consumed, settings["rows"]
        each = settings["rows"] // settings["world"]
        self.start, self.stop = settings["rank"] * each, (settings["rank"] + 1) * each

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.consumed, self.num_samples - self.rows + 1, self.rows):
            yield list(range(first + self.start, first + self.stop))


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    data = settings["data"]
    # the data set asks its tokenizer for no more than this
    tokenizer = SimpleNamespace(eod=0, vocab_size=settings["vocab_size"], unique_identifiers={"class": "ids"}, pad=-1)
    config = GPTDatasetConfig(
        random_seed=17,
        sequence_length=settings["seq_len"],
        blend=([f"{data}/text_document"], None),
        split="1",
        path_to_cache=settings["cache"],
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()
    consumed = states[0]["consumed_samples"] if states else 0
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=Sampler(len(dataset), consumed, settings), num_workers=settings["workers"]
    )
    taken = [consumed]

    def batches() -> Iterator[Any]:
        for batch in loader:
            taken[0] += settings["rows"]
            yield batch

    return Opened(batches=batches(), ids=lambda batch: batch["tokens"], state=lambda: {"consumed_samples": taken[0]})


if __name__ == "__main__":
    run(make, opened, ("megatron-core", "torch"))
