"""pandas costs a process a quarter of a second and 40 MB: nothing imports it, wherever it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PANDAS = """
import os, traceback
with open(os.environ["IMPORTS_OF_PANDAS"], "a") as file:
    traceback.print_stack(file=file)
raise ImportError("it is not here")
"""
COMMANDS = """
inspect a
inspect a --document 3
inspect a --grep 149
plan a --seq-len 32 --global-batch-size 2
trace a --seq-len 32 --step 2 --global-batch-size 2
diff a b/train
verify a c
report a --out a.html
export a --format megatron --out m
status a
build a.jsonl --tokenizer TOKENIZER --out e --keep-field lang --dry-run
"""
PROGRAM = """
if __name__ == "__main__":
    import itertools
    import numpy as np
    from tokshard import build_corpus, copy_corpus, import_corpus, open_corpus
    from tokshard.cli.main import run
    from tokshard.runtime import NumpyLoader, StreamPlan
    kept = {"keep_field": ["lang", "score:float64", "number:int64", "good:bool"], "id_field": "id"}
    build_corpus(["a.jsonl"], tokenizer=TOKENIZER, out="a", workers=2, dedup="exact", task_bytes=4_096, **kept)
    build_corpus(["a.jsonl"], tokenizer=TOKENIZER, out="b", workers=1, validation_fraction=0.3, min_tokens=3)
    build_corpus(iter(["a text", "another"]), tokenizer=TOKENIZER, out="s", workers=1)
    copy_corpus("a", out="c", shuffle=3, workers=1)
    import_corpus("tokens.jsonl", tokenizer=TOKENIZER, out="d", workers=1)
    plan = StreamPlan({"a": "a", "c": "c"}, seq_len=32, pack="whole", weights={"a": 1, "c": 2})
    with open("masked", "w") as file:
        file.write("1\\n2\\n")
    with NumpyLoader(plan, global_batch_size=2) as loader:
        for number, batch in enumerate(itertools.islice(loader, 3)):
            if number == 1:
                loader.mask("a", "masked")
    for command in COMMANDS.strip().splitlines():
        words = [TOKENIZER if word == "TOKENIZER" else word for word in command.split()]
        assert run(words) in (0, 1), command
"""


@pytest.mark.slow
def test_no_public_entry_point_imports_pandas(tmp_path: Path) -> None:
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text(PANDAS)
    line = '{"text": "some text %d of many", "lang": "en", "score": 0.5, "number": %d, "good": true, "id": "n%d"}\n'
    lines = [line % (number % 150, number, number) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join([*lines, '{"text": "without the others"}\n']))
    (tmp_path / "tokens.jsonl").write_text('{"tokens": [5, 6, 7, 0]}\n' * 9)
    program = tmp_path / "program.py"
    tokenizer = str(ROOT / "recipes" / "tokenizer")
    program.write_text(f"TOKENIZER, COMMANDS = {tokenizer!r}, {COMMANDS!r}\n{PROGRAM}")
    imports = tmp_path / "imports"
    environment = os.environ | {"IMPORTS_OF_PANDAS": str(imports), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run([sys.executable, str(program)], cwd=tmp_path, env=environment, timeout=200, check=True)
    assert not imports.exists(), imports.read_text()
