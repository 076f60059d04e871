"""How corpora are named where several are shown."""

import pytest

from tokshard.inspect.corpus.places import short_names


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a/code/train", "a/docs/train"], ["code/train", "docs/train"]),
        (["a/code/train"], ["code/train"]),
        (["x/a/code", "y/a/code", "y/b"], ["x/a/code", "y/a/code", "b"]),
        (["s3://b/code", "code"], ["b/code", "code"]),
        (["a/code", "a/code"], ["code", "code"]),
        (["train"], ["train"]),
    ],
)
def test_the_shortest_name_that_no_other_corpus_has(given: list[str], expected: list[str]) -> None:
    assert short_names(given) == expected
