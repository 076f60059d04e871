"""Promise 1, of corpora that grow: an append killed at any step leaves what was there, and its command completes it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.faults import Fault, Launcher, Outcome, kills
from tests.contract.test_promise_01_faults import Workshop, write_sources, write_tokenizer
from tokshard.format import names
from tokshard.format.opening import open_corpus
from tokshard.inspect.verify.verification import verify_corpus

pytestmark = pytest.mark.timeout(600)

OPTIONS = {
    "none": ("--append",),
    "dedup": ("--append", "--dedup", "exact"),
    "split": ("--append", "--validation-fraction", "0.3"),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Growing:
    """A workshop whose builds append to a corpus, which is put back before each."""

    def __init__(self, shop: Workshop, base: Path) -> None:
        self.shop, self.base = shop, base
        self.references: dict[tuple[str, ...], tuple[dict[str, str], list[str]]] = {}

    def start(self, options: tuple[str, ...]) -> None:
        """The corpus before the append."""
        self.shop.clear()
        kept = self.base / "-".join(options)
        if not kept.exists():
            later, self.shop.sources = self.shop.sources, self.shop.sources[:1]
            built = self.shop.build(*options[1:])
            assert built.exit_code == 0, built.errors
            shutil.copytree(self.shop.out, kept)
            self.shop.sources = later
            return
        shutil.copytree(kept, self.shop.out)

    def reference(self, options: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
        """What an append that nothing happens to makes, and its steps."""
        if options not in self.references:
            self.start(options)
            done = self.append(options)
            assert done.exit_code == 0, done.errors
            self.references[options] = (self.shop.state(), done.steps)
        return self.references[options]

    def append(self, options: tuple[str, ...], fault: Fault | None = None) -> Outcome:
        sources, self.shop.sources = self.shop.sources, self.shop.sources[1:]
        try:
            return self.shop.build(*options, fault=fault)
        finally:
            self.shop.sources = sources

    def corpora(self, options: tuple[str, ...]) -> list[Path]:
        is_split = "--validation-fraction" in options
        return [self.shop.out / split for split in ((names.TRAIN, names.VALIDATION) if is_split else ("",))]

    def check_killed(self, options: tuple[str, ...], fault: Fault) -> None:
        """Kill an append: what was there opens and verifies, and the same command gives the same bytes."""
        reference, _ = self.reference(options)
        self.start(options)
        before = self.shop.state()
        opened = [open_corpus(corpus) for corpus in self.corpora(options)]
        documents = [[document.tolist() for document in corpus] for corpus in opened]
        killed = self.append(options, fault)
        assert killed.exit_code == -9, killed.errors
        what = killed.steps[-1]
        for location, corpus, expected in zip(self.corpora(options), opened, documents, strict=True):
            assert [document.tolist() for document in corpus] == expected, what
            assert open_corpus(location, generation=0).fingerprint == corpus.fingerprint, what
            assert open_corpus(location).num_generations in (1, 2), what
            problems = verify_corpus(location).problems
            assert all(problem.file == f"{names.generation_folder(1)}/{names.MANIFEST}" for problem in problems), what
        now = self.shop.state()
        assert {name: now.get(name) for name in before} == before, what
        done = self.append(options)
        assert done.exit_code == 0, f"{done.errors}\n{what}"
        assert self.shop.state() == reference, what


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Growing]:
    directory = tmp_path_factory.mktemp("growing")
    # two or three tasks each: every kind of step is there, and a sweep takes minutes
    sources = [source for source in write_sources(directory / "sources", documents=24) if "footer" not in source]
    sources.sort(key=lambda source: "small" not in source)
    with Launcher(directory / "runs") as launcher:
        shop = Workshop(launcher, sources, write_tokenizer(directory), directory / "out", references={})
        yield Growing(shop, directory / "base")


@pytest.mark.slow
@every_option
def test_an_append_killed_at_some_steps_leaves_the_older_generation_and_is_completed(
    growing: Growing, options: tuple[str, ...]
) -> None:
    *others, last = kills(growing.reference(options)[1])
    nothing_asked_for = Fault(on=r"unlink .*/\.tokshard-build/build\.json", is_after=True)
    for fault in [*random.Random(len(options)).sample(others, 1), nothing_asked_for, last]:
        growing.check_killed(options, fault)


def test_an_append_killed_between_its_two_manifests_leaves_the_older_generation_of_both_corpora(
    growing: Growing,
) -> None:
    growing.check_killed(OPTIONS["split"], Fault(on=r"replace .*/manifest\.json", is_after=True))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@every_option
def test_an_append_killed_at_any_step_leaves_the_older_generation_and_is_completed(
    growing: Growing, options: tuple[str, ...]
) -> None:
    for fault in kills(growing.reference(options)[1]):
        growing.check_killed(options, fault)


def test_an_append_that_starts_over_and_is_killed_leaves_the_older_generation(growing: Growing) -> None:
    options = OPTIONS["none"]
    reference, _ = growing.reference(options)
    for fault in (Fault(on="unlink .*generation-01/", is_after=True), Fault(on="unlink .*generation-01/manifest")):
        growing.start(options)
        assert growing.append(options).exit_code == 0
        killed = growing.append((*options, "--force"), fault)
        assert killed.exit_code == -9
        assert open_corpus(growing.shop.out, generation=0).num_documents
        assert growing.append(options).exit_code == 0
        assert growing.shop.state() == reference
