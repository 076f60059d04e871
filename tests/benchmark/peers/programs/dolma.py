"""dolma: what ``dolma tokens`` calls, a writer for each process."""

import csv
import gzip
import sys
from pathlib import Path
from types import ModuleType

from tests.benchmark.peers.programs.common import Settings, end_id, files, folder_bytes, main

# its taggers of languages import it; tokens do without
sys.modules["fasttext"] = ModuleType("fasttext")
sys.modules["fasttext.FastText"] = ModuleType("fasttext.FastText")
sys.modules["fasttext"].train_supervised = None  # type: ignore[attr-defined]
sys.modules["fasttext.FastText"]._FastText = None  # type: ignore[attr-defined]


def build(settings: Settings) -> dict[str, int]:
    """A special token that a text spells stays text, as with the others that can."""
    from dolma.tokenizer import tokenize_in_parallel

    end = end_id(settings["tokenizer"])
    tokenize_in_parallel(
        sources=files(settings["texts"]),
        destination=f"{settings['out']}/tokens",
        metadata_dir=f"{settings['out']}/metadata",
        num_writers=settings["processes"],
        tokenizer_name_or_path=f"{settings['tokenizer']}/tokenizer.json",
        eos_token_id=end,
        pad_token_id=end,
        encode_special_tokens=True,
    )
    return {}


def count(settings: Settings) -> dict[str, int]:
    """Documents that the tables next to the arrays name."""
    documents = tokens = 0
    for path in Path(settings["out"], "tokens").glob("*.csv.gz"):
        try:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                for start, stop, *_ in csv.reader(lines):
                    documents, tokens = documents + 1, tokens + int(stop) - int(start)
        except EOFError:  # a table that was cut off by a kill
            continue
    return {"documents": documents, "tokens": tokens, "output_bytes": folder_bytes(f"{settings['out']}/tokens")}


if __name__ == "__main__":
    main({"build": build, "count": count}, ["dolma", "tokenizers"])
