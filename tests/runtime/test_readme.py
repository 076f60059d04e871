"""The worked example of ``tokshard/runtime/README.md`` is what the code does."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import numpy as np

from tests.runtime.sources import ListSource
from tokshard.runtime.order.permutation import ORDER_VERSION, Purpose
from tokshard.runtime.order.windows import Window
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.state import save_state

MODULES = ("loader", "plan", "state", "prefetch", "rows.narrow", "rows.expand", "rows.transforms", "order.windows")
README = Path(__file__).parents[2] / "tokshard" / "runtime" / "README.md"
SOURCE = ListSource([5, 6, 3, 7, 4])
PLAN = StreamPlan({"letters": SOURCE}, seq_len=4, block_tokens=8, window_blocks=2, seed=111, allow_small_blocks=True)
ORDER, READER = PLAN.corpora[0], PLAN.readers[0]
STOPS = SOURCE.stops.tolist()


def token(position: int) -> str:
    """A token by the letter of its document and its place there; the delimiter has a dot."""
    place = SOURCE.document_at(position)
    return "abcde"[place.document] + ("." if position == place.stop - 1 else str(position - place.start))


def tokens(start: int, stop: int) -> str:
    return " ".join(map(token, range(start, stop)))


def shuffled(purpose: Purpose, window: Window, length: int) -> list[int]:
    return ORDER._permutation(purpose, 0, window.epoch, window.index, length).all().tolist()


def blocks_example() -> str:
    spans = [(start, min(start + 8, SOURCE.num_tokens)) for start in range(0, SOURCE.num_tokens, 8)]
    return "\n".join(
        f"{f'block {number}' if stop - start == 8 else 'tail   '}  {tokens(start, stop)}"
        for number, (start, stop) in enumerate(spans)
    )


def blocks_of(epoch: int) -> list[int]:
    """The full blocks of an epoch, in order."""
    windows = (ORDER.window(0, epoch, index) for index in range(ORDER.num_windows))
    return [start // 8 for window in windows for start in ORDER.blocks(window)[0].tolist() if start < 24]


def windows_example() -> str:
    lines = [f"blocks of epoch {epoch}: {' '.join(map(str, blocks_of(epoch)))}" for epoch in range(2)]
    for index in range(ORDER.num_windows):
        window = ORDER.window(0, 0, index)
        table = READER.table(window)
        _, pieces = table.cut(np.array([0]), np.array([window.stop - window.start]))
        spans = list(zip(pieces.starts.tolist(), (pieces.starts + pieces.lengths).tolist(), strict=True))
        cut = [spans[entry] for entry in np.argsort(table.unshuffled_starts).tolist()]
        blocks = ["tail" if start == 24 else str(start // 8) for start in table.block_starts.tolist()]
        lines += [
            "",
            f"window {index}, blocks {' '.join(blocks)}, sequence {window.start} to {window.stop}",
            "  cut      " + " | ".join(f"{number}: {tokens(*span)}" for number, span in enumerate(cut)),
            f"  order    {' '.join(str(cut.index(span)) for span in spans)}",
            "  sequence " + " | ".join(tokens(*span) for span in spans),
        ]
    return "\n".join(lines)


def slices_example() -> str:
    lines = []
    for index in range(ORDER.num_windows):
        window = ORDER.window(0, 0, index)
        first, stop = -(-window.start // 4), -(-window.stop // 4)
        inside = window.stop // 4
        slices = [first + entry for entry in shuffled("samples", window, inside - first)] + list(range(inside, stop))
        read = ", ".join(f"{sample} reads {part}" for sample, part in zip(range(first, stop), slices, strict=True))
        lines.append(f"window {index}: sample {read}")
    return "\n".join(lines)


def rows_example() -> str:
    lines = []
    for sample in range(7):
        row = PLAN.sample(sample)
        starts = {
            number: stop - length for number, (stop, length) in enumerate(zip(STOPS, SOURCE.lengths, strict=True))
        }
        places = [
            starts[piece.document] + place for piece in PLAN.trace(sample) for place in range(piece.start, piece.stop)
        ]
        assert row["input_ids"].tolist() == SOURCE.tokens[places].tolist()
        labels = []
        for position, label in zip(places, row["labels"].tolist(), strict=True):
            assert label == (-100 if position + 1 in STOPS else SOURCE.tokens[position + 1])
            labels.append("-100" if label == -100 else token(position + 1))
        read, positions = map(token, places), map(str, row["position_ids"].tolist())
        cells = [" ".join(f"{cell:>4}" for cell in cells) for cells in (read, labels)]
        lines.append(f"{sample}    {'  |'.join([*cells, ' ' + ' '.join(positions)])}")
    return "\n".join(lines)


def state_example() -> str:
    """The state after six samples, one field a line."""
    state = save_state(PLAN, PLAN.cursor().advanced(6))["cursor"]
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in json.loads(state).items()]
    return "{" + ",\n ".join(fields) + "}"


def examples_in(page: Path) -> list[str]:
    """The blocks of code of the worked example in a page."""
    _, _, rest = page.read_text(encoding="utf-8").partition("<!-- example: ")
    section, _, _ = rest.partition("<!-- end of example -->")
    return re.findall(r"```\n(.*?)\n```", section, re.DOTALL)


def test_the_worked_example_is_what_the_code_does() -> None:
    # golden: other numbers are another order, so ORDER_VERSION goes up
    assert ORDER_VERSION == 1
    shown = [*examples_in(README), *examples_in(README.with_name("NOTES.md"))]
    assert shown == [blocks_example(), windows_example(), slices_example(), rows_example(), state_example()]


def test_the_types_of_the_page_exist() -> None:
    modules = [import_module(f"tokshard.runtime.{name}") for name in MODULES]
    known = {key: value for module in modules for key, value in vars(module).items()}
    text = README.read_text(encoding="utf-8").partition("looks for every name -->\n")[2].partition("\n\n")[0]
    names = re.findall("`([^`]+)`", text)
    assert len(names) > 20
    assert [line.partition(".")[0] for line in text.splitlines()] == [str(number) for number in range(1, 11)]
    for name in names:
        first, _, member = name.partition(".")
        assert hasattr(known[first], member or "__doc__"), name
