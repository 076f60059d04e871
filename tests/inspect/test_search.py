"""Documents found by their text, and differences between corpora and between plans."""

import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.corpora import TINY_TOKENIZER, TOKENIZER, Source, documents_of, write_corpus
from tests.pipeline.inputs import write_byte_tokenizer
from tokshard.cli.document_text import difference_text, match_text
from tokshard.cli.inspect import compile_pattern
from tokshard.cli.main import run
from tokshard.errors import UsageError
from tokshard.format import writer
from tokshard.format.opening import open_corpus
from tokshard.inspect.corpus.difference import compare_corpora, compare_mixes
from tokshard.inspect.corpus.documents import search
from tokshard.inspect.verify.verification import check_hashes
from tokshard.run_files.plan_file import load_mix

TEXTS = ["def main(): pass", "nothing here\x1b[2J", "a main and a main", "M\u00e4in \u6570\u636e", "(main"]


def encode(text):
    return [*(byte + 1 for byte in text.encode()), 0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One that is loaded in no time, which every search does for each batch."""
    return (write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    source = Source(documents=[encode(text) for text in TEXTS], records=[0, 2, 3, 5, 9], left_out={"empty": 5})
    place = tmp_path_factory.mktemp("search") / "corpus"
    return open_corpus(write_corpus(place, sources=[source], tokenizer=tokenizer, shard_tokens=40))


def found(corpus, pattern, *, is_regex=False):
    return [match.document for match in search(corpus, compile_pattern(pattern, is_regex=is_regex))]


def test_documents_that_hold_a_text_are_found_in_order(corpus):
    assert found(corpus, "main") == [0, 2, 4]
    assert found(corpus, "(main") == [4]
    assert found(corpus, "\u6570\u636e") == [3]
    assert found(corpus, "absent") == []


def test_a_pattern_is_a_regular_expression_only_on_request(corpus):
    assert found(corpus, "m.in", is_regex=True) == [0, 2, 4]
    assert found(corpus, "m.in") == []
    with pytest.raises(UsageError, match="is not a regular expression"):
        compile_pattern("(", is_regex=True)
    with pytest.raises(UsageError, match="is empty"):
        compile_pattern("", is_regex=False)


def test_a_match_says_where_it_is_in_its_context(corpus):
    first, second, _ = search(corpus, compile_pattern("main", is_regex=False))
    assert match_text(first) == "document 0: record 1 of source-0.jsonl\n    def \u00bbmain\u00ab(): pass"
    assert match_text(second).startswith("document 2: record 4 of source-0.jsonl, 2 places\n    a \u00bbmain\u00ab and")
    assert (second.offset, second.count) == (2, 2)
    (escape,) = search(corpus, compile_pattern("here", is_regex=False))
    assert "\x1b" not in match_text(escape)


def test_a_search_is_lazy_and_reports_progress(corpus):
    seen = []
    matches = search(
        corpus, compile_pattern("main", is_regex=False), on_progress=lambda done, total: seen.append((done, total))
    )
    next(matches)
    assert seen == []
    list(matches)
    assert seen[-1] == (corpus.num_tokens, corpus.num_tokens)


def test_searched_text_excludes_delimiters(tmp_path):
    """Its end is where ``$`` matches, its start where ``^`` does, and only text that spells a delimiter holds it."""
    texts = ["the end", "<|endoftext|> inside", "the end <|endoftext|>", ""]
    encoder = Tokenizer.from_file(str(TOKENIZER))
    # special tokens are spelt by ordinary ids, as a build has them
    parts = [[part for part in re.split("(<|\\|)", text) if part] for text in texts]
    encoded = [[encoder.encode(part, add_special_tokens=False).ids for part in found] for found in parts]
    documents = [[5, *(token for ids in found for token in ids), 0] for found in encoded]
    (bos,) = (token for token, index in json.loads(TOKENIZER.read_bytes())["model"]["vocab"].items() if index == 5)
    with open_corpus(write_corpus(tmp_path / "corpus", documents, bos=bos)) as corpus:
        assert found(corpus, "end$", is_regex=True) == [0]
        assert found(corpus, "^the", is_regex=True) == [0, 2]
        assert found(corpus, "<|endoftext|>") == [1, 2]
        assert found(corpus, "^$", is_regex=True) == [3]


@pytest.mark.parametrize(
    ("normalizer", "note"),
    [
        (None, ""),
        ({"type": "NFKC"}, "note: text was changed before it was encoded (NFKC): search for the changed text\n"),
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]}, ""),
    ],
)
def test_a_search_that_finds_nothing_says_so_and_what_may_have_hidden_it(tmp_path, capsys, normalizer, note):
    tokenizer = json.dumps({**json.loads(TINY_TOKENIZER), "normalizer": normalizer}).encode()
    corpus = write_corpus(tmp_path / "corpus", [[2, 0]], tokenizer=tokenizer)
    assert run(["inspect", str(corpus), str(corpus), "--grep", "four\x1b"]) == 0
    assert capsys.readouterr() == ("", f"no document contains four\\x1b\n{note}")
    assert run(["inspect", str(corpus), "--grep", "two"]) == 0
    assert capsys.readouterr().err == ""


@given(pattern=st.text(st.sampled_from("main() a\u6570"), min_size=1, max_size=4))
def test_what_is_found_is_what_python_finds_in_the_texts(corpus, pattern):
    assert found(corpus, pattern) == [index for index, text in enumerate(TEXTS) if pattern in text]


@pytest.fixture
def kept(tokenizer, tmp_path, monkeypatch):
    """A corpus of two shards of several record batches, with kept columns."""
    monkeypatch.setattr(writer, "MAX_BATCH_TOKENS", 40)
    texts = [f"main {number}" for number in range(60)]
    columns = {"id": "string", "lang": "string", "score": "float64"}
    rows = [{"id": f"d{n}", "lang": None if n % 7 == 0 else ["en", "de"][n % 2], "score": n / 60} for n in range(60)]
    source = Source(
        documents=[encode(text) for text in texts],
        metadata={name: [row[name] for row in rows] for name in columns},
    )
    place = write_corpus(tmp_path / "kept", sources=[source], columns=columns, tokenizer=tokenizer, shard_tokens=100)
    with open_corpus(place) as opened:
        assert len(opened.shards) > 1
        assert len(opened.shards.batch_places(0)) > 1
    return place


@pytest.mark.parametrize("workers", ["1", "3"])
def test_a_search_takes_the_conditions_of_a_copy_with_any_number_of_workers(kept, tmp_path, capsys, workers):
    for where in ([], ["lang!=en", "score>0.3"]):
        options = [part for text in where for part in ("--where", text)]
        grep = ["inspect", str(kept), "--grep", "MAIN", "-i", "--workers", workers, *options]
        assert run([*grep, "--json"]) == 0
        matches = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        copy = tmp_path / f"copy{len(options)}{where[-1:]}"
        assert run(["copy", str(kept), "--out", str(copy), *options, "--quiet"]) == 0
        capsys.readouterr()
        with open_corpus(copy) as copied, open_corpus(kept) as opened:
            assert [one["id"] for one in matches] == [copied.metadata(n)["id"] for n in range(copied.num_documents)]
            for one in matches:
                assert opened.metadata(one["document"])["id"] == one["id"]
        assert run([*grep, "--limit", "7"]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("document ")]
        assert [line.split()[1] for line in shown] == [f"{one['document']}" for one in matches[:7]]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--grep", "main", "--where", "language=en"], "no kept column 'language'"),
        (["--grep", "main", "--where", "score"], "'score' is not a condition"),
        (["--where", "lang=en"], "--where is for --grep"),
        (["--document", "3", "-i"], "--ignore-case is for --grep"),
        (["--workers", "2"], "--workers is for --grep"),
    ],
)
def test_a_search_that_cannot_be_is_wrong_usage(kept, capsys, options, problem):
    assert run(["inspect", str(kept), *options]) == 2
    assert problem in capsys.readouterr().err.splitlines()[0]


def corpora(tmp_path, first, second, **options):
    options = {"tokenizer": TINY_TOKENIZER, **options}
    return (
        open_corpus(write_corpus(tmp_path / "first", first, **options)),
        open_corpus(write_corpus(tmp_path / "second", second, **options)),
    )


def test_copies_are_equal(tmp_path):
    copies = corpora(tmp_path, documents_of([3, 4]), documents_of([3, 4]))
    difference = compare_corpora(*copies)
    assert difference.is_equal
    assert difference_text(difference, ("a", "b")) == (
        "equal: the same tokens by their manifests, built in the same way; the bytes were not read, --hash reads them"
    )
    check_hashes(copies)
    difference = compare_corpora(*copies, is_hashed=True)
    assert difference_text(difference, ("a", "b")) == "equal: the same tokens, byte for byte, built in the same way"


def test_damaged_corpora_are_not_reported_as_equal(tmp_path, capsys):
    """A shard that is cut is seen by its size, one with other bytes by its hash."""
    corpora(tmp_path, documents_of([3, 4]), documents_of([3, 4]))
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    shard = next((tmp_path / "second").glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert run(["diff", first, second]) == 0
    assert "the bytes were not read" in capsys.readouterr().out
    for pair in ([first, second], [second, first]):
        assert run(["diff", *pair, "--hash"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: {shard} has SHA-256 ")
        assert f"hint: 'tokshard verify {second}' lists everything that is damaged\n" in err
    os.truncate(shard, 100)
    for pair in ([first, second], [second, first]):
        assert run(["diff", *pair]) == 1
        assert f"error: {shard} has 100 bytes, expected {len(content)}" in capsys.readouterr().err


def test_a_full_comparison_says_that_the_bytes_were_compared(tmp_path, capsys):
    corpora(tmp_path, documents_of([3, 4]), documents_of([3, 4]))
    assert run(["diff", str(tmp_path / "first"), str(tmp_path / "second"), "--hash", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["hashed"]) == (True, True)


def test_the_first_document_that_differs_is_named_with_the_shards_that_differ(tmp_path):
    documents = documents_of([5] * 10)
    changed = [*documents[:7], [3, 3, 3, 3, 0], *documents[8:]]
    difference = compare_corpora(*corpora(tmp_path, documents, changed, shard_tokens=10))
    assert not difference.is_equal
    assert difference.notes[1:] == [
        "the first document that differs is 7, from token 0 on (tokens: 5 and 5)",
        "it is record 8 of source-0.jsonl in the first, record 8 of source-0.jsonl in the second",
    ]
    assert difference.notes[0] == (
        "shards: 4 with the same name and hash, 1 with another hash (shard-00-0000000-000000-0003.arrow)"
    )
    assert "fingerprints.content" in difference.fields


@pytest.mark.parametrize("document", [0, 1, 2, 9])
def test_a_document_that_differs_is_found_wherever_it_is(tmp_path, document):
    documents = documents_of([5] * 10)
    changed = [list(tokens) for tokens in documents]
    changed[document][1] = documents[document][1] % 3 + 1
    difference = compare_corpora(*corpora(tmp_path, documents, changed, shard_tokens=10))
    assert difference.notes[1].startswith(f"the first document that differs is {document}, from token 1 on")


def test_the_same_documents_in_other_shards_are_equal_and_the_settings_differ(tmp_path):
    documents = documents_of([5] * 10)
    first = open_corpus(write_corpus(tmp_path / "first", documents, tokenizer=TINY_TOKENIZER, shard_tokens=10))
    second = open_corpus(write_corpus(tmp_path / "second", documents, tokenizer=TINY_TOKENIZER))
    difference = compare_corpora(first, second)
    assert difference.is_equal
    assert difference.verdict == "the same documents in other shards"
    assert difference.fields["build.shard_tokens"] == (10, 1 << 28)


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        ({"id": ["a", "b"]}, {}, "columns: id is only in the first"),
        ({"id": ["a", "b"]}, {"id": ["a", "c"]}, "columns: id has other values"),
        ({"id": ["a", "b"]}, {"id": ["a", "b"]}, None),
    ],
)
@pytest.mark.parametrize("shard_tokens", [10, 5])
def test_corpora_of_the_same_documents_with_other_columns_are_not_equal(tmp_path, first, second, note, shard_tokens):
    documents = [[1, 1, 1, 1, 0], [2, 2, 2, 2, 0]]
    opened = [
        open_corpus(
            write_corpus(
                tmp_path / name,
                sources=[Source(documents=documents, metadata=columns)],
                columns=dict.fromkeys(columns, "string"),
                tokenizer=TINY_TOKENIZER,
                shard_tokens=size,
            )
        )
        for name, columns, size in (("first", first, 10), ("second", second, shard_tokens))
    ]
    difference = compare_corpora(*opened)
    assert difference.is_equal == (note is None)
    if note:
        assert (difference.verdict, difference.notes[-1]) == ("the same tokens, and other kept columns", note)


def test_a_corpus_and_its_longer_version_are_not_equal(tmp_path):
    difference = compare_corpora(*corpora(tmp_path, documents_of([5] * 3), documents_of([5] * 4)))
    assert not difference.is_equal
    assert difference.verdict == "one corpus starts with the other"


def test_equal_ids_under_other_tokenizers_are_not_equal(tmp_path):
    first = open_corpus(write_corpus(tmp_path / "first", documents_of([5]), tokenizer=TINY_TOKENIZER))
    other = TINY_TOKENIZER.replace(b'"three"', b'"drei"')
    second = open_corpus(write_corpus(tmp_path / "second", documents_of([5]), tokenizer=other))
    difference = compare_corpora(first, second)
    assert not difference.is_equal
    assert "tokenizers differ" in difference.verdict


@pytest.mark.parametrize(
    ("change", "is_equal", "verdict"),
    [
        ("", True, "the same samples in the same order"),
        ("seed = 4", False, "other orders"),
        ("weights = { a = 1.0 }\nschedule = [[9, { a = 2.0 }]]", False, "other weights"),
    ],
)
def test_plans_differ_by_their_order_or_by_their_weights(tmp_path, change, is_equal, verdict):
    directory = write_corpus(tmp_path / "corpus", documents_of([50] * 9), tokenizer=TINY_TOKENIZER)
    mix = f'corpora = {{ a = "{directory}" }}\nseq_len = 8\nglobal_batch_size = 2\n'
    (tmp_path / "a.toml").write_text(mix)
    (tmp_path / "b.toml").write_text(mix + change)
    difference = compare_mixes(*(load_mix(str(tmp_path / name)) for name in ("a.toml", "b.toml")))
    assert difference.is_equal == is_equal
    assert verdict in difference.verdict
