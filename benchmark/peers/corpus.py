"""The text that all peers get: files of source code of this machine, in some JSON Lines files of about the same size.

    python -m benchmark.peers.corpus OUT MEGABYTES FILES

Each document goes to the file that is the smallest by then. No text is repeated. The same machine gives the same bytes.
Prints one line of JSON.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from benchmark.texts import documents


def write(out: Path, num_bytes: float, num_files: int) -> dict[str, int]:
    """Write ``OUT/part-I.jsonl`` and say what is in them."""
    out.mkdir(parents=True, exist_ok=True)
    parts = [(out / f"part-{index}.jsonl").open("w", encoding="utf-8") for index in range(num_files)]
    sizes = [0] * num_files
    num_documents = 0
    for number, (_, path, text) in enumerate(documents(Counter())):
        part = sizes.index(min(sizes))
        json.dump({"id": str(number), "path": path, "text": text}, parts[part], ensure_ascii=False)
        parts[part].write("\n")
        sizes[part] += len(text.encode())
        num_documents += 1
        if sum(sizes) >= num_bytes:
            break
    for file in parts:
        file.close()
    return {"documents": num_documents, "text_bytes": sum(sizes)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(write(Path(sys.argv[1]), float(sys.argv[2]) * 1e6, int(sys.argv[3]))))
