"""Documents found by their text, and differences between corpora and between plans."""

import contextlib
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.transcripts import json_of, shell
from tests.contract import small
from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.damage import cut, flipped
from tests.pipeline.inputs import write_byte_tokenizer
from tests.refusals import tokshard
from tests.store.memory import SCHEME, MemoryStore
from tests.store.servers import copied
from tokshard import select_corpus
from tokshard.format.opening import open_corpus
from tokshard.inspect.corpus.difference import compare_corpora
from tokshard.inspect.corpus.documents import document_numbers, search
from tokshard.store import STORES_BY_SCHEME

TEXTS = ["def main(): pass", "nothing here\x1b[2J", "a main and a main", "M\u00e4in \u6570\u636e", "(main"]


def encode(text):
    return [*(byte + 1 for byte in text.encode()), 0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One that is loaded in no time, which every search does for each batch."""
    return (write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module", params=["on this machine", "in a bucket"])
def corpus(request, tokenizer, tmp_path_factory):
    source = Source(documents=[encode(text) for text in TEXTS], records=[0, 2, 3, 5, 9], left_out={"empty": 5})
    place = tmp_path_factory.mktemp("search") / "corpus"
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, batch_tokens=20)  # several record batches in a shard
        write_corpus(place, sources=[source], tokenizer=tokenizer, shard_tokens=60)
        patch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
        return open_corpus(place if request.param == "on this machine" else copied(place, f"{SCHEME}://search"))


def found(corpus, pattern, *, is_regex=False):
    return [match.document for match in search(corpus, re.compile(pattern if is_regex else re.escape(pattern)))]


def test_a_search_is_lazy_and_reports_progress(corpus):
    seen = []
    matches = search(corpus, re.compile("main"), on_progress=lambda done, total: seen.append((done, total)))
    next(matches)
    assert seen == []
    list(matches)
    assert seen[-1] == (corpus.num_tokens, corpus.num_tokens)


@given(pattern=st.text(st.sampled_from("main() a\u6570"), min_size=1, max_size=4), text=st.sampled_from(["", ".", "$"]))
def test_what_is_found_is_what_python_finds_in_the_texts(corpus, pattern, text):
    assert found(corpus, pattern) == [index for index, text in enumerate(TEXTS) if pattern in text]
    regex = re.escape(pattern) + text
    assert found(corpus, regex, is_regex=True) == [n for n, one in enumerate(TEXTS) if re.search(regex, one)]


@pytest.fixture
def kept(tokenizer, tmp_path, monkeypatch):
    """A corpus of two shards of several record batches, with kept columns."""
    small.shrink(monkeypatch.setattr, batch_tokens=40)
    texts = [f"main {number}" for number in range(60)]
    columns = {"id": "string", "lang": "string", "score": "float64"}
    rows = [{"id": f"d{n}", "lang": None if n % 7 == 0 else ["en", "de"][n % 2], "score": n / 60} for n in range(60)]
    source = Source(
        documents=[encode(text) for text in texts], metadata={name: [row[name] for row in rows] for name in columns}
    )
    place = write_corpus(tmp_path / "kept", sources=[source], columns=columns, tokenizer=tokenizer, shard_tokens=100)
    with open_corpus(place) as opened:
        assert len(opened.shards) > 1
        assert len(opened.shards.batch_places(0)) > 1
    return place


def test_a_view_is_searched_by_its_own_numbers_and_progress_ends_at_its_tokens(kept, tmp_path):
    select_corpus(kept, out=tmp_path / "view", where="score>=0.25", workers=1)
    seen = []
    with open_corpus(tmp_path / "view") as view:
        matches = list(search(view, re.compile("main"), on_progress=lambda *numbers: seen.append(numbers)))
        assert [(match.document, match.id) for match in matches] == [(n, f"d{n + 15}") for n in range(45)]
        assert seen[-1] == (view.num_tokens, view.num_tokens) == max(seen)


@pytest.mark.parametrize("workers", ["1", "3"])
@pytest.mark.parametrize("where", [[], ["lang!=en", "score>0.3"]], ids=["all", "where"])
def test_a_search_takes_conditions_with_any_number_of_workers(kept, workers, where):
    options = [part for text in where for part in ("--where", text)]
    grep = ["inspect", str(kept), "--grep", "MAIN", "-i", "--workers", workers, *options]
    with open_corpus(kept) as opened:
        rows = [opened.metadata(number) for number in range(len(opened))]
    expected = [number for number, row in enumerate(rows) if not where or (row["lang"] != "en" and row["score"] > 0.3)]
    assert [(one["document"], one["id"]) for one in json_of(*grep)] == [
        (number, rows[number]["id"]) for number in expected
    ]
    code, out, _ = shell(*grep, "--limit", 7)
    shown = [line.split()[1] for line in out.splitlines() if line[:1] == "d"]
    assert (code, shown) == (0, [f"{number}" for number in expected[:7]])


def test_a_condition_has_the_type_of_its_column_in_each_corpus(kept, tokenizer, tmp_path):
    source = Source(documents=[encode("main")] * 2, metadata={"score": ["2", "x"]})
    texts = write_corpus(tmp_path / "texts", sources=[source], columns={"score": "string"}, tokenizer=tokenizer)
    for places in ((kept, texts), (texts, kept)):
        found = json_of("inspect", *places, "--grep", "main", "--where", "score<0.05", "--where", "score!=2")
        assert [one["id"] for one in found] == ["d0", "d1", "d2"]


def test_an_id_leads_to_its_document_in_whatever_shard_and_batch_it_is(kept):
    with open_corpus(kept) as opened:
        found = [document_numbers(opened, f"d{number}", corpus_name="kept", prefix="") for number in range(60)]
    assert found == [[number] for number in range(60)]


@given(
    change=st.sampled_from(["a token", "a length", "fewer documents"]),
    number=st.integers(0, 9),
    sizes=st.tuples(*[st.sampled_from([7, 10, 100])] * 2),
)
def test_the_first_document_that_differs_is_found_wherever_it_is_and_however_shards_are_cut(change, number, sizes):
    documents = documents_of([5] * 10)
    other = [list(tokens) for tokens in documents]
    if change == "a token":
        other[number][1] = documents[number][1] % 3 + 1
    elif change == "a length":
        other[number].insert(4, 1)
    else:
        other = other[: number + 1]
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            write_corpus(Path(folder) / name, each, tokenizer=TINY_TOKENIZER, shard_tokens=size)
            for name, each, size in zip("ab", (documents, other), sizes, strict=True)
        ]
        difference = compare_corpora(*map(open_corpus, paths))
    assert difference.is_equal == (documents == other)
    if change != "fewer documents":
        place = f"{number}, from token {1 if change == 'a token' else 4} on"
        assert difference.notes[1].startswith(f"the first document that differs is {place}")


def test_documents_are_compared_by_the_batch_and_not_one_by_one(tmp_path):
    for name, count in (("a", 9), ("b", 10)):
        write_corpus(tmp_path / name, documents_of([5] * count), tokenizer=TINY_TOKENIZER, shard_tokens=count)
    corpora = [open_corpus(tmp_path / name) for name in "ab"]
    for corpus in corpora:
        corpus.document = None
    found = compare_corpora(*corpora)
    assert found.notes[1] == "the first 9 documents are equal; one corpus continues"


def test_damaged_corpora_are_not_reported_as_equal(tmp_path):
    """A shard that is cut is seen by its size, one with other bytes by its hash."""
    for name in ("first", "second"):
        write_corpus(tmp_path / name, documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    pairs = [("first", "second"), ("second", "first")]
    (shard,) = (tmp_path / "second").glob("shard-*")
    content = shard.read_bytes()
    with contextlib.chdir(tmp_path):
        shard.write_bytes(flipped(0.999)(content))
        assert tokshard("diff", *pairs[0]).exit_code == 0
        for pair in pairs:
            said = tokshard("diff", *pair, "--hash")
            assert said.problem.startswith(f"second/{shard.name} has SHA-256 ")
            assert (said.exit_code, said.hint) == (1, "'tokshard verify second' lists everything that is damaged")
        shard.write_bytes(cut(content))
        for pair in pairs:
            said = tokshard("diff", *pair)
            assert said.problem == f"second/{shard.name} has {len(cut(content))} bytes, expected {len(content)}"
