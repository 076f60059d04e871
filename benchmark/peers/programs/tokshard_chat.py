"""tokshard: a build of conversations, and one epoch of rows that are packed whole."""

from pathlib import Path
from typing import Any

import numpy as np

import tokshard
from benchmark.peers.programs import common
from benchmark.peers.programs.rows import Stage, figures, save
from tokshard.runtime import NumpyLoader, StreamPlan


def chat(settings: common.Settings) -> dict[str, Any]:
    """Packing is the delivery of all rows here, as nothing is packed in advance."""
    prepare, pack = Stage(), Stage()
    out = Path(settings["folder"]) / "corpus"
    with prepare:
        tokshard.build_corpus(
            settings["chats"], tokenizer=settings["tokenizer"], out=out, chat="own", workers=settings["workers"]
        )
    keys = ("sample_index", "input_ids", "labels")
    with pack:
        plan = StreamPlan(out, seq_len=settings["seq_len"], seed=17, epochs=1)
        with NumpyLoader(plan, global_batch_size=8) as loader:
            delivered = [{key: batch[key].copy() for key in keys} for batch in loader]
    with tokshard.open_corpus(out) as corpus:
        documents = [corpus.document(index).astype(np.int64) for index in range(corpus.num_documents)]
    targets = [np.zeros(len(tokens), bool) for tokens in documents]
    parts: list[tuple[int, int, int]] = []
    num_rows = 0
    for batch in delivered:
        for sample, inputs, labels in zip(batch["sample_index"], batch["input_ids"], batch["labels"], strict=True):
            if sample < 0:
                continue
            num_rows += 1
            place = 0
            for piece in plan.trace(int(sample)):
                length = piece.stop - piece.start
                here, of = slice(place, place + length), documents[piece.document]
                if not np.array_equal(inputs[here], of[piece.start : piece.stop]):
                    raise ValueError(f"row {sample} does not have the tokens that its trace says")
                marked = piece.start + 1 + np.flatnonzero(labels[here] != -100)
                if not np.array_equal(labels[here][labels[here] != -100], of[marked]):
                    raise ValueError(f"row {sample} has labels that are not the next tokens")
                targets[piece.document][marked] = True
                parts.append((piece.document, piece.start, piece.stop))
                place += length
    pieces = []
    for document, start, stop in parts:
        last = min(stop, len(documents[document]) - 1)  # the end of a document is no text
        if start < last:
            pieces.append((documents[document][start:last], targets[document][start:last]))
    save(settings["out"], pieces)
    return figures(prepare, pack) | {"rows": num_rows, "used": sum(len(ids) for ids, _ in pieces)}


if __name__ == "__main__":
    common.main({"chat": chat}, ("tokshard", "tokenizers"))
