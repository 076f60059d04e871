"""The fingerprints of a manifest, and the JSON that they are made of. Its bytes are in test_readme.py."""

import hashlib

import pytest

from tests.corpora import TINY_TOKENIZER, tokenizer_info
from tokshard.format.content import Content, TokenHash
from tokshard.format.manifest import (
    BuildConfig,
    canonical_json,
    content_fingerprint,
    recipe_fingerprint,
)

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
    num_documents=2, tokens=TokenHash(7, (1, 2, 3, 4, 5, 6)), num_targets=3, loss=TokenHash(7, (7, 8, 9, 10, 11, 12))
)


@pytest.mark.parametrize(
    ("columns", "targets", "residues", "golden"),
    [
        ({}, b"", range(1, 7), "1a4142bb5a600a4c7e1c9025d2077e3ca163e92e0c43ef4ca4fddb6c111fc75d"),
        ({"loss": "spans"}, b'"num_targets":3,', range(1, 13), None),
    ],
    ids=["text", "with loss spans"],
)
def test_the_content_fingerprint_is_the_one_that_the_format_defines(columns, targets, residues, golden):
    # golden: a change breaks saved data, and needs another number in "tokshard content 1"
    found = content_fingerprint(CONTENT, tokenizer_info(TINY_TOKENIZER), columns)
    by_hand = b'tokshard content 1\n{"bos_id":null,"eos_id":0,"num_documents":2,' + targets + b'"num_tokens":7}'
    by_hand += b"".join(bytes([residue, 0, 0, 0]) for residue in residues)
    assert found == hashlib.sha256(by_hand).hexdigest()
    assert golden in (None, found)


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


def test_canonical_json_sorts_keys_and_keeps_every_character_as_it_is():
    value = {"b": [1, None, True], "a": {"\u00e9": "\U0001f600", "\ud83d": 0.5}}  # vocabularies have lone surrogates
    expected = '{"a":{"\u00e9":"\U0001f600","\ud83d":0.5},"b":[1,null,true]}'
    assert canonical_json(value) == expected.encode("utf-8", "surrogatepass")
