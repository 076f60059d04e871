"""Promise 13: a plan over a view reads the documents that a plan over a copy of it reads, and what the view says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.builds import select
from tests.contract.conversations import Hand, built, targets_of
from tests.contract.small import shrink
from tests.contract.test_promise_12_loss import plan_of, read
from tests.corpora import TINY_TOKENIZER, Source, append_generation, write_corpus
from tests.examples import crossed, examples
from tests.format.edits import table_says
from tests.refusals import tokshard
from tests.runtime.sources import ListSource
from tokshard import TokshardError, copy_corpus, open_corpus, select_corpus
from tokshard.errors import CorpusError, DamagedCorpusError, PlanError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.runtime import CorpusSource, NumpyLoader, StreamPlan
from tokshard.testing import assert_exact_resume, assert_token_source

WIDE = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 99999')


@pytest.fixture(scope="module", autouse=True)
def _small_tables():
    """Tables are read in several parts, and what has two ways goes both."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch.setattr, view_rows=7, view_joined=3, view_masked=40)
        yield


@settings(max_examples=examples(30))
@given(
    documents=st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=2, max_size=40).filter(
        lambda found: any(is_kept for _, is_kept in found)
    ),
    shard_tokens=st.integers(1, 300),
    sizes=st.fixed_dictionaries(
        {"seq_len": st.sampled_from([1, 3, 8]), "window_blocks": st.integers(1, 4), "seed": st.integers(0, 9)}
    ),
    pack=st.sampled_from(["cut", "whole"]),
    access=st.sampled_from(["mmap", "pread"]),
    is_grown=st.booleans(),
)
def test_an_epoch_of_a_view_has_the_tokens_of_its_documents_once_as_has_one_of_its_copy(
    documents, shard_tokens, sizes, pack, access, is_grown, tmp_path_factory
):
    place = tmp_path_factory.mktemp("viewed")
    memory = ListSource([length for length, _ in documents])
    contents = memory.documents()
    first = contents[: len(contents) // 2] if is_grown else contents
    corpus = write_corpus(place / "corpus", first, shard_tokens=shard_tokens, tokenizer=WIDE)
    if is_grown:
        append_generation(corpus, contents[len(first) :], tokenizer=WIDE, shard_tokens=shard_tokens)
    kept = [number for number, (_, is_kept) in enumerate(documents) if is_kept]
    view = select(corpus, place / "view", kept)
    copy_corpus(view, out=place / "copy", workers=1)
    block_tokens = 128 * sizes["seq_len"] if pack == "whole" else 40  # packed whole, a block has 128 sections
    sizes |= {"block_tokens": block_tokens, "pack": pack, "allow_small_blocks": True}
    expected = Counter(token for number in kept for token in contents[number])
    for location in (view, place / "copy"):
        plan = StreamPlan({"web": CorpusSource(location, access=access)}, epochs=1, **sizes)
        samples = [plan.sample(number)["input_ids"] for number in range(plan.num_samples or 0)]
        found = Counter(np.concatenate(samples).tolist())
        del found[0]  # of padding, and of the delimiters
        assert found == Counter({token: count for token, count in expected.items() if token})
    # a trace names the document of the view, and its record is that of the base
    plan = StreamPlan({"web": view}, epochs=1, **sizes)
    with open_corpus(corpus) as base, open_corpus(view) as opened:
        for pieces in plan.traces(np.arange(plan.num_samples or 0)):
            for piece in pieces:
                assert opened.in_base(piece.document) == kept[piece.document]
                assert opened.provenance(piece.document) == base.provenance(kept[piece.document])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], StreamPlan]:
    """A plan over two views of one corpus, and another corpus."""
    place = tmp_path_factory.mktemp("mixed")
    base = write_corpus(place / "base", ListSource([9, 4, 30, 1] * 40).documents(), shard_tokens=200, tokenizer=WIDE)
    other = write_corpus(place / "other", ListSource([5, 17, 2] * 9).documents(), tokenizer=WIDE)
    corpora = {
        "even": select(base, place / "even", list(range(0, 160, 2))),
        "some": select(base, place / "some", list(range(1, 160, 6))),
        "other": other,
    }
    sizes = {"seq_len": 4, "block_tokens": 64, "window_blocks": 2, "seed": 5, "allow_small_blocks": True}
    return lambda: StreamPlan(corpora, repeats={"some": 3}, **sizes)


@pytest.mark.filterwarnings("ignore:the pass")
def test_a_mix_of_views_is_the_same_for_every_world_and_history(mixed):
    assert_exact_resume(mixed())


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_a_view_says_where_documents_end_as_its_copy_does(share, tmp_path):
    rng = np.random.default_rng(7)
    base = write_corpus(
        tmp_path / "base", ListSource(rng.integers(1, 9, 9_000).tolist()).documents(), shard_tokens=9_000
    )
    view = select(base, tmp_path / "view", np.flatnonzero(rng.random(9_000) < share).tolist())
    copy_corpus(view, out=tmp_path / "copy", workers=1)
    copied = CorpusSource(tmp_path / "copy")
    starts = rng.permutation(copied.num_tokens - 1)[:300]
    stops = starts + rng.integers(1, copied.num_tokens - starts, endpoint=True)
    stops[::2] = np.minimum(stops, starts + 12)[::2]
    expected = copied.ends(starts, stops)
    for access in ("mmap", "pread"):
        found = CorpusSource(view, access=access)
        assert all(map(np.array_equal, found.ends(starts, stops), expected))
        assert_token_source(found)
        for documents in ([-1, 0], [0, found.corpus.num_documents]):
            with pytest.raises(IndexError):
                found.spans_of(np.array(documents))


def test_views_that_share_documents_are_refused_in_a_mix_unless_it_allows_them(mixed, tmp_path):
    sources = dict(zip(mixed().names, mixed().sources, strict=True))
    base, even, some = sources["even"].base.location, sources["even"], sources["some"]
    view = select(Path(base), tmp_path / "third", [1, 4, 6, 7])
    for corpora, first in (
        ({"even": even, "third": view}, 4),
        ({"some": some, "even": even, "third": view}, 1),
        ({"third": view, "base": base}, 1),
    ):
        with pytest.raises(PlanError, match=f"share documents, such as number {first} of their base"):
            StreamPlan(corpora, seq_len=8)
        assert StreamPlan(corpora, seq_len=8, allow_overlap=True).names
    select_corpus(base, out=tmp_path / "cells", hash_range=(0, 0.5), workers=1)
    select_corpus(base, out=tmp_path / "others", hash_range=(0.5, 1), workers=1)
    assert StreamPlan({"low": tmp_path / "cells", "high": tmp_path / "others"}, seq_len=8).names


def test_cells_of_one_division_share_no_documents_unless_one_of_them_is_there_twice(tmp_path):
    source = Source(documents=ListSource([9, 4, 30, 1] * 20).documents(), metadata={"kind": ["a", "b"] * 40})
    base = write_corpus(tmp_path / "base", sources=[source], columns={"kind": "string"}, tokenizer=WIDE)
    select_corpus(base, out=tmp_path / "cells", by=["kind"], workers=1)
    cells = {kind: tmp_path / f"cells/kind={kind}" for kind in "ab"}
    assert StreamPlan(cells, seq_len=8).names
    with pytest.raises(PlanError, match="share documents, such as number 0 of their base"):
        StreamPlan(cells | {"again": cells["a"]}, start_epoch={"again": 9}, seq_len=8)


def test_damage_of_the_base_is_named_and_never_read(tmp_path):
    base = write_corpus(tmp_path / "base", ListSource([9, 4, 30, 1] * 40).documents(), shard_tokens=900, tokenizer=WIDE)
    view = select(base, tmp_path / "view", list(range(0, 160, 2)))
    shard = sorted(base.glob("shard-*"))[1]
    content = bytearray(shard.read_bytes())
    with open_corpus(base) as corpus:
        place = corpus.shards.batch_places(1)[0]
        content[place.values_position + 2 * 31] ^= 1  # a token of the first kept document
    shard.write_bytes(content)
    assert tokshard("verify", view, "--base").exit_code == 1
    assert next(problem.file for problem in verify_corpus(base).problems) == shard.name
    plan = StreamPlan({"web": CorpusSource(view, access="pread")}, seq_len=4, epochs=1)
    with pytest.raises(DamagedCorpusError, match=shard.name):
        list(NumpyLoader(plan, global_batch_size=8))
    shard.unlink()
    with pytest.raises(CorpusError, match=f"is a view of .*{shard.name} is missing"):
        open_corpus(view)


@pytest.mark.parametrize(
    ("column", "row", "value", "named"),
    [
        ("document", 9, 3, 9),
        ("document", 7, 12, 7),
        ("number", 8, 7, 7),
        ("token", 21, 20, 20),
        ("document", 40, 81, 39),
        ("position", 40, 0, 39),
    ],
)
def test_a_table_whose_stretches_are_not_in_order_is_refused_with_the_row(column, row, value, named, tmp_path):
    base = write_corpus(tmp_path / "base", ListSource([1] * 90).documents(), tokenizer=TINY_TOKENIZER)
    view = select(base, tmp_path / "view", list(range(0, 80, 2)))
    assert verify_corpus(view).is_ok
    table_says(column, value, row=row).make(view / names.KEPT)
    (problem,) = verify_corpus(view).problems
    assert (problem.file, f"in row {named} " in str(problem)) == (names.KEPT, True), problem


@crossed("access, number", ["mmap", "pread"], [1, 2])
def test_a_changed_table_gives_rows_or_an_error_of_ours(access, number, tmp_path, mixed):
    views = dict(list(zip(mixed().names, mixed().sources, strict=True))[:2])
    table = Path(views["even"].location, names.KEPT)
    content, said = table.read_bytes(), set[str]()
    sizes = {"seq_len": 4, "block_tokens": 64, "window_blocks": 2, "allow_small_blocks": True}
    try:
        for place in range(0, len(content), 13):
            table.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            sources = {name: source.location for name, source in list(views.items())[:number]}
            try:
                plan = StreamPlan({name: CorpusSource(at, access=access) for name, at in sources.items()}, **sizes)
                with NumpyLoader(plan, global_batch_size=8, prefetch_factor=0) as loader:
                    for _, _batch in zip(range(9), loader, strict=False):
                        pass
            except TokshardError as error:
                said.add(error.problem.split(": ")[-1])
    finally:
        table.write_bytes(content)
    assert "the table was changed" in said


def test_weights_by_temperature_and_repeats_follow_the_tokens_of_each_corpus(mixed):
    corpora = dict(zip(mixed().names, mixed().sources, strict=True))
    tokens = np.array([source.num_tokens for source in corpora.values()])
    for weights, expected in (
        ({"weights": {"temperature": 0.5}}, tokens**0.5),
        ({"weights": {"temperature": 0}}, tokens**0.0),
        ({"weights": {"temperature": 1}}, tokens),
        ({"repeats": {"some": 4, "other": 0}}, tokens * [1, 4, 0]),
        ({}, tokens),
    ):
        plan = StreamPlan(corpora, seq_len=8, schedule=[(9, {"temperature": 0.5})], **weights)
        first, later = (np.array(segment.weights) for segment in plan.schedule.segments)
        assert first / first.sum() == pytest.approx(expected / expected.sum())
        assert later / later.sum() == pytest.approx(tokens**0.5 / (tokens**0.5).sum())
    with pytest.raises(PlanError, match="both weights and repeats are given"):
        StreamPlan(corpora, seq_len=8, weights={"temperature": 1}, repeats={"some": 2})
    with pytest.raises(PlanError, match="the temperature is 2"):
        StreamPlan(corpora, seq_len=8, weights={"temperature": 2})


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Hand]]:
    """A view of every third conversation but one in a row."""
    corpus, documents = built(tmp_path_factory.mktemp("built"), 30)
    kept = [number for number in range(30) if number % 3]
    return select(corpus, corpus.with_name("view"), kept), [documents[number] for number in kept]


@crossed("pack, form, ranks", ["whole", "cut"], ["numpy", "full", "compact"], [3, 1])
def test_the_targets_of_an_epoch_of_a_view_are_the_answers_of_its_conversations(chats, pack, form, ranks):
    view, documents = chats
    assert read(plan_of(view, pack), form, documents, ranks=ranks) == targets_of(documents)
    with open_corpus(view) as corpus:
        assert corpus.manifest.num_targets == targets_of(documents).total()
        by_batch = [  # as exports read them
            shard.targets(batch).of_tokens(0, int(shard.batch(batch)[0][-1]))
            for shard in map(corpus.shard, range(len(corpus.shards)))
            for batch in range(shard.num_batches)
        ]
        by_document = [corpus.target_weights(number) for number in range(len(corpus))]
        assert np.array_equal(np.concatenate(by_batch), np.concatenate(by_document))


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("reads", ["base", "even"])
def test_a_run_that_masks_what_a_view_leaves_out_learns_from_the_others_alone_also_after_a_resume(
    reads, access, tmp_path
):
    documents, columns = ListSource([9, 4, 30, 1] * 20).documents(), {"id": "string"}
    names = [f"d{number}" for number in range(80)]
    old, new = (
        [Source(documents=documents[part], metadata={"id": names[part]})] for part in (slice(60), slice(60, None))
    )
    base = write_corpus(tmp_path / "base", sources=old, columns=columns, shard_tokens=200, tokenizer=WIDE)
    select(base, tmp_path / "even", list(range(0, 60, 2)))
    given = base
    for view, listed in (("some", "d2\nnobody\nd9\n"), ("clean", "d32\n")):  # a view of a view is one of the base
        (tmp_path / "ids.txt").write_text(listed)
        given = select_corpus(given, out=tmp_path / view, drop_ids=tmp_path / "ids.txt", workers=1).directory
    append_generation(base, sources=new, columns=columns, tokenizer=WIDE)  # which no view leaves out
    corpus, numbers = tmp_path / reads, tmp_path / "left-out.txt"
    assert tokshard("diff", corpus, given, "--numbers", numbers).exit_code == 0
    assert "give the corpus first" in tokshard("diff", given, base, "--numbers", numbers).hint
    assert numbers.read_text() == {"base": "2\n9\n32\n", "even": "1\n16\n"}[reads]

    def loader() -> NumpyLoader:
        plan = StreamPlan({"web": CorpusSource(corpus, access=access)}, epochs=1, seq_len=8, allow_small_blocks=True)
        return NumpyLoader(plan, global_batch_size=4)

    plain, before, after = (loader() for _ in range(3))
    before.mask("web", numbers)
    left_out = np.setdiff1d(np.concatenate([documents[number] for number in (2, 9, 32)]), [0])
    found = 0
    for step, batch in enumerate(plain):
        if step == 2:
            after.load_state_dict(before.state_dict())
        of_them = np.isin(batch["input_ids"], left_out)
        found += int(of_them.sum())
        labels = next(iter(before if step < 2 else after))["labels"]
        assert np.array_equal(labels, np.where(of_them, -100, batch["labels"]))
    assert found == sum(len(documents[number]) - 1 for number in ((2, 9, 32) if reads == "base" else (2, 32)))
