"""The manifest: its bytes, its checksum, its fingerprints."""

import hashlib
import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, documents_of, tokenizer_info, write_corpus
from tokshard.format.content import Content, TokenHash
from tokshard.format.manifest import (
    BuildConfig,
    canonical_json,
    content_fingerprint,
    decode_manifest,
    encode_manifest,
    recipe_fingerprint,
)
from tokshard.format.opening import open_corpus

CONFIG = BuildConfig(
    text_field="text",
    id_field=None,
    keep_field={},
    format=None,
    text_unit="file",
    shard_tokens=1000,
    task_bytes=2000,
    max_document_bytes=3000,
    max_documents=None,
)
CONTENT = Content(
    num_documents=2,
    tokens=TokenHash(7, (1, 2, 3, 4, 5, 6)),
    num_targets=3,
    loss=TokenHash(7, (7, 8, 9, 10, 11, 12)),
)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)


def test_a_manifest_comes_back_from_its_bytes(corpus):
    content = (corpus / "manifest.json").read_bytes()
    manifest = decode_manifest(content, file="manifest.json")
    assert encode_manifest(manifest) == content
    assert json.loads(content)["num_documents"] == 2


def test_the_last_line_of_a_manifest_is_the_hash_of_the_lines_before(corpus):
    lines = (corpus / "manifest.json").read_bytes().splitlines(keepends=True)
    digest = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
    assert lines[-1] == f'"manifest_sha256": "{digest}"}}\n'.encode()


def test_the_content_fingerprint_is_the_one_that_the_format_defines():
    # golden: a change breaks saved data, and needs another number in "tokshard content 1"
    found = content_fingerprint(CONTENT, tokenizer_info(TINY_TOKENIZER), {})
    by_hand = b'tokshard content 1\n{"bos_id":null,"eos_id":0,"num_documents":2,"num_tokens":7}'
    by_hand += b"".join(bytes([residue, 0, 0, 0]) for residue in (1, 2, 3, 4, 5, 6))
    assert found == hashlib.sha256(by_hand).hexdigest()
    assert found == "1a4142bb5a600a4c7e1c9025d2077e3ca163e92e0c43ef4ca4fddb6c111fc75d"


def test_loss_spans_are_part_of_the_content_fingerprint():
    found = content_fingerprint(CONTENT, tokenizer_info(TINY_TOKENIZER), {"loss": "spans"})
    by_hand = b'tokshard content 1\n{"bos_id":null,"eos_id":0,"num_documents":2,"num_targets":3,"num_tokens":7}'
    by_hand += b"".join(bytes([residue, 0, 0, 0]) for residue in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))
    assert found == hashlib.sha256(by_hand).hexdigest()


def test_the_recipe_fingerprint_is_the_one_that_the_format_defines():
    # golden: a change breaks saved data, and needs another number in "tokshard recipe 1"
    tokenizer = tokenizer_info(TINY_TOKENIZER)
    found = recipe_fingerprint(CONFIG, tokenizer, [(0, "a/b.jsonl", 10), (1, "", 20)])
    by_hand = (
        b"tokshard recipe 1\n"
        b'{"format":null,"id_field":null,"keep_field":{},"max_document_bytes":3000,"max_documents":null,'
        b'"shard_tokens":1000,"task_bytes":2000,"text_field":"text","text_unit":"file"}'
        b'["' + tokenizer.canonical_sha256.encode() + b'",0,null][0,"a/b.jsonl",10][1,"",20]'
    )
    assert found == hashlib.sha256(by_hand).hexdigest()
    assert found == "d9ef64dd9e919c0756a68ec88105b17885e81f044fa0f7d3bcecedaccc3c6022"


@pytest.mark.parametrize(
    "other",
    [
        {"content": replace(CONTENT, tokens=TokenHash(7, (1, 2, 3, 4, 5, 7)))},
        {"content": replace(CONTENT, tokens=TokenHash(8, (1, 2, 3, 4, 5, 6)))},
        {"content": replace(CONTENT, num_documents=3)},
        {"content": replace(CONTENT, num_targets=4)},
        {"content": replace(CONTENT, loss=TokenHash(7, (7, 8, 9, 10, 11, 13)))},
        {"tokenizer": msgspec.structs.replace(tokenizer_info(TINY_TOKENIZER), eos_id=1)},
        {"tokenizer": msgspec.structs.replace(tokenizer_info(TINY_TOKENIZER), bos_id=0)},
        {"columns": {}},
    ],
)
def test_content_that_differs_has_another_fingerprint(other):
    facts = {"content": CONTENT, "tokenizer": tokenizer_info(TINY_TOKENIZER), "columns": {"loss": "spans"}}
    assert content_fingerprint(**{**facts, **other}) != content_fingerprint(**facts)


def test_the_content_fingerprint_does_not_depend_on_name_or_place_of_the_corpus(tmp_path):
    first = write_corpus(tmp_path / "first", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    second = write_corpus(tmp_path / "else" / "where", documents_of([3, 4]), tokenizer=TINY_TOKENIZER)
    assert open_corpus(first).fingerprint == open_corpus(second).fingerprint


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(value=st.dictionaries(st.text(), json_values))
def test_canonical_json_is_the_same_for_equal_values(value):
    content = canonical_json(value)
    assert json.loads(content.decode("utf-8", "surrogatepass")) == value
    assert canonical_json(dict(reversed(value.items()))) == content


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_canonical_json_is_what_the_standard_library_writes(value):
    """`canonical_sha256` of a tokenizer must not depend on the library that was quicker."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert canonical_json(value) == text.encode("utf-8", "surrogatepass")


def test_canonical_json_of_every_character_is_what_the_standard_library_writes():
    every = [chr(code) for code in range(0x110000)]
    whole = [character for character in every if not character.isspace() and character < "\ud800"]
    for value in (every, whole, dict.fromkeys(whole, 0)):
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert canonical_json(value) == text.encode("utf-8", "surrogatepass")
