"""tokshard: the command, as a user gives it."""

import subprocess
import sys
from pathlib import Path

from benchmark.peers.programs.common import Settings, folder_bytes, main


def build(settings: Settings) -> dict[str, int]:
    """``tokshard build`` of the folder; its error message and exit status are passed on."""
    options = ["--tokenizer", settings["tokenizer"], "--out", settings["out"], "--workers", str(settings["processes"])]
    command = [sys.executable, "-m", "tokshard", "build", settings["texts"], *options, *settings.get("options", ())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(next((line for line in done.stderr.splitlines() if line.startswith("error:")), done.stderr))
        sys.exit(done.returncode)
    sys.stderr.write(done.stdout + done.stderr)
    return {}


def count(settings: Settings) -> dict[str, int]:
    """What a reader finds: nothing, unless the corpus is complete."""
    from tokshard import open_corpus
    from tokshard.errors import TokshardError

    size = folder_bytes(settings["out"])
    if not Path(settings["out"]).is_dir():
        return {"documents": 0, "tokens": 0, "output_bytes": 0}
    try:
        with open_corpus(settings["out"]) as corpus:
            return {"documents": corpus.num_documents, "tokens": corpus.num_tokens, "output_bytes": size}
    except TokshardError:
        return {"documents": 0, "tokens": 0, "output_bytes": size}


if __name__ == "__main__":
    main({"build": build, "count": count}, ["tokshard", "tokenizers"])
