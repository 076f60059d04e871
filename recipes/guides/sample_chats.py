"""Writes what the guide on conversations reads: `sample_chats.py`, run in a clone.

`chats.jsonl` has 600 conversations, and `chat-tokenizer` is the tokenizer of the recipes with two more special tokens.
"""

import json
import random
from pathlib import Path

TEXT = "a data order can be exact when each step of long runs reads known text"
WORDS = TEXT.split()
TOKENS = ("<|im_start|>", "<|im_end|>")


def conversation(number: int) -> dict[str, object]:
    """Turns of a user who says words, and an assistant who says them backwards."""
    draw = random.Random(number).random  # noqa: S311 - not a secret
    messages = [{"role": "system", "content": "Say it backwards."}]
    for _ in range(1 + int(draw() * 4)):
        words = [WORDS[int(draw() * len(WORDS))] for _ in range(3 + int(draw() * 20))]
        messages += [
            {"role": "user", "content": " ".join(words)},
            {"role": "assistant", "content": " ".join(reversed(words))},
        ]
    return {"id": f"chat-{number}", "messages": messages}


if __name__ == "__main__":
    with open("chats.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(conversation(number)) + "\n" for number in range(600))
    source, target = Path(__file__).parents[1] / "tokenizer", Path("chat-tokenizer")
    target.mkdir(exist_ok=True)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    first = len(tokenizer["model"]["vocab"])
    for place, token in enumerate(TOKENS):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": first + place, "content": token})
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (target / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}', encoding="utf-8")
