"""Writes the small text of the guides into a directory: `sample_text.py DIR FIRST LAST`.

File N, from FIRST to LAST, is `part-N.jsonl`: 500 documents with the fields `id`, `lang` and `text`. The same numbers
give the same text everywhere.
"""

import json
import random
import sys
from pathlib import Path

TEXT = "a data order can be exact when each step of long runs reads known text and no token is lost or read twice"
WORDS = TEXT.split()


if __name__ == "__main__":
    directory, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(first, last + 1):
        draw = random.Random(number).random  # noqa: S311 - not a secret
        with open(directory / f"part-{number}.jsonl", "w", encoding="utf-8") as file:
            for document in range(500):
                words = (WORDS[int(draw() * len(WORDS))] for _ in range(20 + int(draw() * 400)))
                record = {"id": f"{number}-{document}", "lang": "en" if document % 5 else "de", "text": " ".join(words)}
                file.write(json.dumps(record) + "\n")
