"""tokshard compared with other builders and loaders: own environments, same text, same tokenizer, same cores, in turn.

    python -m tests.benchmark.peers [--quick] [--only building loading store chat faults growth] [--out FOLDER]

`make benchmark-peers` makes the environments first. README.md of the folder above says what is measured.
"""

import argparse
import importlib
import importlib.util
import json
import tempfile
import time
from pathlib import Path

from tests.benchmark.peers.environments import Environments
from tests.benchmark.peers.frame import Frame, Section, log
from tests.benchmark.peers.report import GUIDE, RESULTS, described, load, save
from tests.benchmark.processes import ROOT
from tests.benchmark.report import machine

SECTIONS = ("building", "loading", "store", "chat", "faults", "growth")


def main() -> None:
    arguments = _arguments()
    results = load(arguments.out)
    for name in arguments.only:
        if importlib.util.find_spec(f"tests.benchmark.peers.{name}") is None:
            log(f"{name}: not there yet")
            continue
        here, started = machine(), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tokshard-peers-", dir=arguments.scratch) as work:
            frame = Frame(
                quick=arguments.quick,
                work=Path(work),
                repeats=arguments.repeats or (1 if arguments.quick else 3),
                environments=Environments(arguments.environments),
                megabytes=arguments.megabytes or (4.0 if arguments.quick else 64.0),
                limit=120.0 if arguments.quick else 600.0,
            )
            made: Section | list[Section] = importlib.import_module(f"tests.benchmark.peers.{name}").run(frame)
        sections = made if isinstance(made, list) else [made]
        seconds = time.monotonic() - started
        found = [described(section, quick=arguments.quick, seconds=seconds, here=here) for section in sections]
        told = json.dumps(found).replace(f"{work}/", "").replace(f"{arguments.environments}/", "")
        results[name] = json.loads(told)  # errors of peers name their files
        save(results, arguments.out, arguments.page)  # after each section, so that what was measured stays
        log(f"{name}: {seconds:.0f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text and shorter runs: fifteen minutes")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="these sections alone")
    parser.add_argument("--repeats", type=int, help="of each measurement; default: 1 with --quick, else 3")
    parser.add_argument("--megabytes", type=float, help="of text; default: 4 with --quick, else 64")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results; other sections stay there")
    parser.add_argument("--page", type=Path, default=GUIDE, help="where the newest tables go")
    parser.add_argument("--environments", type=Path, default=ROOT, help="folder with the environments of the peers")
    parser.add_argument("--scratch", type=Path, help="folder for texts and corpora; default: the temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
