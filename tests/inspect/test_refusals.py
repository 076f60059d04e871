"""What `inspect`, `scan`, `report`, `diff` and `verify` refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.corpora import TINY_TOKENIZER, Source, write_corpus
from tests.inspect.pages import write_metrics, write_mix
from tests.refusals import Refusal, Said, check, refused, tokshard


def a_command(words: str) -> Callable[[Path], Said]:
    """A command line about a corpus with an id and a score, a mix, and the metrics of a run."""

    def call(directory: Path) -> Said:
        metadata = {"id": ["a", "b"], "score": [0.5, None]}
        source = Source(documents=[[1, 2, 0], [3, 0]], metadata=metadata)
        columns = {"id": "string", "score": "float64"}
        write_corpus(Path("corpus"), sources=[source], columns=columns, tokenizer=TINY_TOKENIZER)
        write_mix(Path())
        write_metrics(Path("run"))
        one = f'corpora = {{ a = "{directory}/a" }}\nseq_len = 1\nglobal_batch_size = 1\n'
        Path("one.toml").write_text(one)
        Path("i.jsonl").write_text('{"question": "one"}\n')
        Path("empty.jsonl").touch()
        return tokshard(*words.split())

    return call


def a_run_of(content: str) -> Callable[[Path], Said]:
    """The page of a run whose metrics are this text."""

    def call(directory: Path) -> Said:
        (directory / "metrics.jsonl").write_text(content)
        said = tokshard("report", ".", "--out", "page.html")
        assert not Path("page.html").exists()
        return said

    return call


def checkpoints(make: Callable[[Path], object]) -> Callable[[Path], Said]:
    """The page of a run whose checkpoints are no folder."""

    def call(directory: Path) -> Said:
        write_metrics(directory)
        make(directory / "checkpoints")
        return tokshard("report", ".", "--out", "page.html")

    return call


def without_plotly(directory: Path) -> Said:
    with mock.patch.dict(sys.modules, {"plotly": None}):
        return a_command("report corpus --out x")(directory)


HELP = "see 'tokshard inspect --help'"
FILES = "give JSON lines, csv or parquet, and the fields of its texts with --text-field"
OTHER = "give another --out FILE"
WITHOUT = "give a mix.toml, or leave --tokens out"
COMMANDS = [
    ("inspect corpus --grep ( --regex", "'(' is not a regular expression: *", "leave out --regex *"),
    ("inspect corpus --grep a --where b=c", "the corpora have no kept column 'b'", "columns: id, score"),
    ("inspect corpus --grep main --where score", "'score' is not a condition", "give one such as lang=en, *"),
    ("inspect corpus --where id=a", "--where is for --grep", HELP),
    ("inspect corpus --workers 2", "--workers is for --grep", HELP),
    ("diff corpus corpus --numbers n", "corpus is not a view of corpus", "make one with tokshard select *"),
    ("diff corpus a --hash --numbers n", "--hash does nothing with --numbers", "leave it out; *"),
    ("scan corpus", "missing option '--against'", "see 'tokshard scan --help'"),
    ("scan corpus --against i.jsonl", "row 1 of i.jsonl has no text in text", "--text-field; fields: question"),
    ("scan corpus --against empty.jsonl", "empty.jsonl has no items", FILES),
    ("scan corpus --against missing.jsonl", "missing.jsonl cannot be read: No such file or directory", FILES),
    ("scan corpus --against i.jsonl --out i.jsonl", "--out i.jsonl is i.jsonl, which this command reads", OTHER),
    ("report one.toml --out x --tokens 4611686018427387905", "sample * is beyond 2**62, *", "ask for an earlier one"),
    ("report run --out x --tokens 5", "--tokens is for the page of a plan", WITHOUT),
    ("report run mix.toml --out x", "a page shows corpora, or one mix, or one run", "make a page of each"),
    ("report run --out run/metrics.jsonl", "--out * is run/metrics.jsonl, which this command reads", OTHER),
]
LINE_1 = "./metrics.jsonl: line 1 is not one of a training run: "
REMOVE = "give the metrics.jsonl of tokshard's trainer, or remove that line"
RUNS = [
    ("", "./metrics.jsonl has no step yet", "wait until the run has done one"),
    ('{"text": "a"}\n', LINE_1 + "Object missing required field `step`", REMOVE),
    ("]\n", LINE_1 + "JSON is malformed: invalid character (byte 0)", REMOVE),
    ('{"step": 9223372036854775808}\n', LINE_1 + "Expected `int` <= 9223372036854775807 - at `$.step`", REMOVE),
    ('{"step": -1}\n', LINE_1 + "Expected `int` >= 0 - at `$.step`", REMOVE),
]
PLOTLY = "an HTML report needs plotly, which is not installed"
CHECKPOINTS = "it has to be the directory of the checkpoints of a run: rename it, or allow reading it"
UNLISTED = "./checkpoints cannot be listed: "

REFUSALS = [
    *(Refusal(f"tokshard {words}", a_command(words), 2, problem, hint) for words, problem, hint in COMMANDS),
    *(
        Refusal(f"the page of a run whose metrics are {text!r}", a_run_of(text), 2, problem, hint)
        for text, problem, hint in RUNS
    ),
    Refusal("a page without plotly", without_plotly, 2, PLOTLY, "pip install 'tokshard[report]'"),
    *(
        Refusal(f"a folder of checkpoints that is {what}", checkpoints(make), 1, UNLISTED + why, CHECKPOINTS)
        for what, make, why in [
            ("a file", Path.touch, "Not a directory"),
            ("a link to itself", lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        ]
    ),
]


@refused(REFUSALS)
def test_refusals(refusal, tmp_path):
    check(refusal, tmp_path)
