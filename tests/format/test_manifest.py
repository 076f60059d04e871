"""The fingerprint of a corpus with loss spans, and the JSON of fingerprints. All the rest is in test_readme.py."""

import hashlib

from tests.corpora import TINY_TOKENIZER, tokenizer_info
from tokshard.format.content import Content, TokenHash
from tokshard.format.manifest import canonical_json, content_fingerprint

CONTENT = Content(
    num_documents=2, tokens=TokenHash(7, (1, 2, 3, 4, 5, 6)), num_targets=3, loss=TokenHash(7, (7, 8, 9, 10, 11, 12))
)


def test_the_content_fingerprint_with_loss_spans_is_the_one_that_the_format_defines():
    # golden: a change breaks saved data, and needs another number in "tokshard content 1"
    found = content_fingerprint(CONTENT, tokenizer_info(TINY_TOKENIZER), {"loss": "spans"})
    by_hand = b'tokshard content 1\n{"bos_id":null,"eos_id":0,"num_documents":2,"num_targets":3,"num_tokens":7}'
    by_hand += b"".join(bytes([residue, 0, 0, 0]) for residue in range(1, 13))
    assert found == hashlib.sha256(by_hand).hexdigest()


def test_canonical_json_sorts_keys_and_keeps_every_character_as_it_is():
    value = {"b": [1, None, True], "a": {"\u00e9": "\U0001f600", "\ud83d": 0.5}}  # vocabularies have lone surrogates
    expected = '{"a":{"\u00e9":"\U0001f600","\ud83d":0.5},"b":[1,null,true]}'
    assert canonical_json(value) == expected.encode("utf-8", "surrogatepass")
