"""tokshard compared with other builders and loaders: own environments, same text, same tokenizer, same cores, in turn.

    python -m benchmark.peers [--quick] [--only building loading store chat faults growth] [--peers PEER...]
        [--write] [--out FOLDER]

`make benchmark-peers` makes the environments first. README.md of the folder above says what is measured. All of it
writes the guide and the results; a quick run or a part prints its tables, and writes them if it is told to.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmark.peers.environments import ENVIRONMENTS, SECTIONS, Environments
from benchmark.peers.frame import Frame, Section, log
from benchmark.peers.report import GUIDE, RESULTS, Results, described, load, merged, rendered, save
from benchmark.processes import ROOT
from benchmark.report import machine


def main() -> None:
    arguments = _arguments()
    results = load(arguments.out)
    measured: Results = {}
    for name in arguments.only:
        here, started = machine(), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tokshard-peers-", dir=arguments.scratch) as work:
            frame = Frame(
                quick=arguments.quick,
                work=Path(work),
                repeats=arguments.repeats or (1 if arguments.quick else 3),
                environments=Environments(arguments.environments),
                megabytes=arguments.megabytes or (4.0 if arguments.quick else 512.0 if name == "building" else 64.0),
                limit=120.0 if arguments.quick else 600.0,
                peers=frozenset(arguments.peers) if arguments.peers else None,
            )
            made: Section | list[Section] = importlib.import_module(f"benchmark.peers.{name}").run(frame)
        sections = made if isinstance(made, list) else [made]
        seconds = time.monotonic() - started
        found = [described(section, quick=arguments.quick, seconds=seconds, here=here) for section in sections]
        told = json.dumps(found).replace(f"{work}/", "").replace(f"{arguments.environments}/", "")
        measured[name] = json.loads(told)  # errors of peers name their files
        if arguments.peers:
            measured[name] = merged(results.get(name, []), measured[name])
        if arguments.write:  # after each section, so that what was measured stays
            results[name] = measured[name]
            save(results, arguments.out, arguments.page)
        log(f"{name}: {seconds:.0f} s")
    if not arguments.write:
        sys.stdout.write(rendered(measured, None))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text and shorter runs, mostly start-up: prints")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections alone; prints")
    parser.add_argument(
        "--peers", nargs="+", choices=sorted(ENVIRONMENTS), help="rows of these alone, the others as they were; prints"
    )
    parser.add_argument("--write", action="store_true", help="write a part into the results and the guide")
    parser.add_argument("--repeats", type=int, help="of each measurement; default: 1 with --quick, else 3")
    parser.add_argument("--megabytes", type=float, help="of text; default: 512 to build, else 64; 4 with --quick")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results; other sections stay there")
    parser.add_argument("--page", type=Path, default=GUIDE, help="where the newest tables go")
    parser.add_argument("--environments", type=Path, default=ROOT, help="folder with the environments of the peers")
    parser.add_argument("--scratch", type=Path, help="folder for texts and corpora; default: the temporary one")
    arguments = parser.parse_args()
    if arguments.quick and arguments.write:
        parser.error("--write needs figures of the whole form: leave out --quick")
    arguments.write |= not (arguments.quick or arguments.only or arguments.peers)
    arguments.only = arguments.only or list(SECTIONS)
    return arguments


if __name__ == "__main__":
    main()
