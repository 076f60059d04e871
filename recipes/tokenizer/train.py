"""Train the byte-level BPE tokenizer next to this file on the running Python's standard library.

    python recipes/tokenizer/train.py [DIR]

The same Python and `tokenizers` release give the same bytes, in about 4 s. It needs `tokenizers` 0.2x,
because 1.x only encodes.
"""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 16_384
END_OF_TEXT = "<|endoftext|>"

# Not every installation has the tests, tables of code pages are not text, and build settings name a machine.
LEFT_OUT = ("test", "tests", "idle_test", "encodings", "site-packages", "dist-packages")
LEFT_OUT_PREFIXES = ("_sysconfigdata", "config-")


def standard_library_sources() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if set(parts).isdisjoint(LEFT_OUT) and not parts[0].startswith(LEFT_OUT_PREFIXES):
            yield path.read_text(encoding="utf-8", errors="replace")


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: no text is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(standard_library_sources(), trainer)

    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": int(1e30),  # what transformers writes for "no limit"
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size():,} tokens -> {out / 'tokenizer.json'}")


if __name__ == "__main__":
    main()
