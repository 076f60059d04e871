"""What tests of other projects share: a corpus of real text, what is imported of theirs, and their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokshard import build_corpus, import_corpus, open_corpus

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "recipes/tokenizer"


def build(directory: Path, **options: Any) -> tuple[Path, list[list[int]]]:
    """A corpus of several shards, with its documents; the paragraphs of one page are documents, too."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.md")) if ".venv" not in str(path)]
    texts = pages + max((page.split("\n\n") for page in pages), key=len)
    build_corpus(
        ({"text": text, "page": number} for number, text in enumerate(texts)),
        tokenizer=str(TOKENIZER),
        out=str(directory),
        keep_field=["page:int64"],
        workers=1,
        shard_tokens=5_000,
        **options,
    )
    with open_corpus(directory) as corpus:
        assert len(corpus.shards) > 1
        return directory, [document.tolist() for document in corpus]


def imported(source: Path, out: Path, **options: Any) -> tuple[Any, list[list[int]]]:
    """What an import of files of another tool says, and the documents that it gives."""
    result = import_corpus(source, tokenizer=str(TOKENIZER), out=str(out), workers=1, **options)
    with open_corpus(result.directory) as read:
        return result, [document.tolist() for document in read]


def environment(**more: str) -> dict[str, str]:
    """Of a process that trains on the CPU, and asks no hub."""
    kept = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return {**kept, **own, "ACCELERATE_USE_CPU": "1", **more}


def run(*words: object, seconds: int = 200, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments in such an environment, to a good end."""
    command, options = [sys.executable, *map(str, words)], {"env": environment(), **options}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def of_transformers(tokenizer: dict[str, Any], path: Path, **tokens: str) -> Callable[..., tuple[list[int], list[int]]]:
    """What `transformers` makes of a conversation with a tokenizer: ids, and for each whether it is of an answer."""
    from transformers import PreTrainedTokenizerFast

    path.write_text(json.dumps(tokenizer))
    # AutoTokenizer may build another tokenizer than the file has, as for Llama 2
    reference = PreTrainedTokenizerFast(tokenizer_file=str(path), **tokens)

    def apply(record: dict[str, Any], template: str) -> tuple[list[int], list[int]]:
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "tools": record.get("tools")}
        found = reference.apply_chat_template(record["messages"], chat_template=template, **options)
        return found["input_ids"], found["assistant_masks"]

    return apply
