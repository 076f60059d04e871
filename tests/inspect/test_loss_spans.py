"""Loss spans as people see them: what `inspect`, its report, `plan` and `diff` say of what is trained."""

import json
import random

import pytest

from tests.corpora import TINY_TOKENIZER, Source, write_corpus
from tokshard.cli.main import run as run_command
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.runtime import StreamPlan

DOCUMENTS = [[1, 2, 3, 0], [0], [3, 3, 1, 2, 2, 0], [2, 0]]
SPANS = [[1, 3], [], [1, 2, 4, 6], [1, 2]]
WEIGHT_LISTS = [[0.5], [], [2.0, 0.25], [1.0]]


def corpus_at(path, *, spans=SPANS, weights=None, documents=DOCUMENTS, **options):
    columns = LOSS_COLUMNS if weights else {LOSS: "spans"}
    metadata = {LOSS: spans, "url": list("abcd")[: len(documents)], **({WEIGHTS: weights} if weights else {})}
    columns = {**columns, "url": "string"}
    sources = [Source(documents=documents, metadata=metadata)]
    return write_corpus(path, sources=sources, columns=columns, tokenizer=TINY_TOKENIZER, **options)


@pytest.fixture
def run(capsys):
    """Runs a command line in this process: exit code, and what it prints."""

    def run(*words):
        code = run_command([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out or captured.err

    return run


@pytest.mark.parametrize("pack", ["whole", "cut"])
def test_a_trace_counts_the_labels_that_are_trained(run, tmp_path, pack):
    draw = random.Random(17)
    documents = [[draw.randint(1, 3) for _ in range(draw.randint(1, 20))] + [0] for _ in range(200)]
    spans = []
    for document in documents:
        marks = [0, *(draw.randint(0, 1) for _ in document[1:]), 0]
        spans.append([place for place in range(1, len(marks)) if marks[place] != marks[place - 1]])
    corpus = write_corpus(
        tmp_path / "corpus",
        sources=[Source(documents=documents, metadata={LOSS: spans})],
        columns={LOSS: "spans"},
        tokenizer=TINY_TOKENIZER,
    )
    sizes = {"seq_len": 16, "seed": 17, "block_tokens": 2_048, "window_blocks": 2}
    plan = StreamPlan({"a": corpus}, **sizes, pack=pack)
    (tmp_path / "mix.toml").write_text(
        "\n".join(f"{key} = {value}" for key, value in sizes.items())
        + f'\nglobal_batch_size = 4\ncorpora = {{ a = "corpus" }}\npack = "{pack}"\n'
    )
    code, out = run("trace", tmp_path / "mix.toml", "--sample", "0:40", "--no-text", "--json")
    found = dict.fromkeys(range(40), 0)
    for row in map(json.loads, out.splitlines()):
        found[row["sample"]] += row["num_targets"]
    assert (code, found) == (0, {g: int((plan.sample(g)["labels"] != -100).sum()) for g in range(40)})


def test_diff_says_which_document_is_trained_in_another_way_and_where(run, tmp_path):
    first = corpus_at(tmp_path / "first")
    other = corpus_at(tmp_path / "other", spans=[[1, 3], [], [1, 2, 5, 6], [1, 2]])
    code, text = run("diff", first, other)
    assert code == 1
    assert "different: the loss spans differ" in text
    assert "the first document that differs is 2, from token 4 on (weight in the loss: 1 and 0)" in text


def test_diff_compares_weights(run, tmp_path):
    first = corpus_at(tmp_path / "first", weights=WEIGHT_LISTS)
    other = corpus_at(tmp_path / "other", weights=[[0.5], [], [2.0, 0.5], [1.0]])
    code, text = run("diff", first, other)
    assert code == 1
    assert "the first document that differs is 2, from token 4 on (weight in the loss: 0.25 and 0.5)" in text


def test_diff_of_text_and_chat_with_the_same_tokens_names_the_first_token_that_only_one_trains(run, tmp_path):
    text = write_corpus(tmp_path / "text", DOCUMENTS, tokenizer=TINY_TOKENIZER)
    chat = corpus_at(tmp_path / "chat")
    for first, second, weights in ((chat, text, "0 and 1"), (text, chat, "1 and 0")):
        code, output = run("diff", first, second)
        assert code == 1
        assert f"the first document that differs is 0, from token 3 on (weight in the loss: {weights})" in output


def test_corpora_of_the_same_targets_in_other_shards_are_equal(run, tmp_path):
    first = corpus_at(tmp_path / "first")
    code, output = run("diff", first, corpus_at(tmp_path / "other", shard_tokens=6))
    assert (code, "the same documents in other shards" in output) == (0, True)


@pytest.mark.parametrize("weights", [None, WEIGHT_LISTS])
def test_inspect_counts_what_is_trained(run, tmp_path, weights):
    corpus = corpus_at(tmp_path / "corpus", weights=weights, shard_tokens=6)
    _, text = run("inspect", corpus)
    assert "trained     6 of the tokens (46.2%), in 4 loss spans" in text
    found = json.loads(run("inspect", corpus, "--json")[1])
    assert (found["targets"], found["loss_spans"], found["columns"]) == (6, 4, {"url": "string"})
    sampled = {view["document"]: view["loss_spans"] for view in found["samples"]}
    assert sampled[2] == [[1, 2], [4, 6]]


def test_inspect_of_a_document_marks_what_is_trained(run, tmp_path):
    corpus = corpus_at(tmp_path / "corpus")
    _, text = run("inspect", corpus, "--document", "2")
    assert "loss: 3 trained tokens in 2 spans, between ⟦ and ⟧" in text
    shown = text.splitlines()[-1]
    assert shown.replace("⟦", "").replace("⟧", "").count("│") == 6
    found = json.loads(run("inspect", corpus, "--document", "2", "--json")[1])
    assert [piece["is_trained"] for piece in found["pieces"]] == [False, True, False, False, True, True]
    parts = [piece["text"] + "│" for piece in found["pieces"]]
    assert shown == f"{parts[0]}⟦{parts[1]}⟧{parts[2]}{parts[3]}⟦{parts[4]}{parts[5]}⟧"
    _, text = run("inspect", corpus, "--document", "1")
    assert "loss: 0 trained tokens in 0 spans\n" in text


def test_inspect_of_text_says_nothing_about_loss(run, tmp_path):
    text = write_corpus(tmp_path / "text", DOCUMENTS, tokenizer=TINY_TOKENIZER)
    assert "trained" not in run("inspect", text, "--document", "0")[1] + run("inspect", text)[1]
    found = json.loads(run("inspect", text, "--json")[1])
    assert (found["targets"], found["loss_spans"]) == (None, None)


def test_conditions_are_about_kept_columns_only(run, tmp_path):
    corpus = corpus_at(tmp_path / "corpus")
    code, text = run("inspect", corpus, "--grep", "a", "--where", "loss=1")
    assert code != 0
    assert "loss" in text


def test_plan_says_which_share_of_a_corpus_is_trained(run, tmp_path):
    corpus = corpus_at(tmp_path / "corpus")
    mix = tmp_path / "mix.toml"
    mix.write_text(f'seq_len = 2\nseed = 1\nblock_tokens = 256\n[corpora]\nchat = "{corpus}"\n')
    code, text = run("plan", mix, "--global-batch-size", "1")
    assert (code, "13 tokens (46.2% trained)" in text) == (0, True), text


def test_the_report_marks_trained_tokens(run, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    code, _ = run("report", corpus_at(tmp_path / "corpus"), "--out", page)
    text = page.read_text()
    assert code == 0
    assert '"6 of the tokens (46.2%), in 4 loss spans"' in text
    assert "Tokens that are trained are underlined." in text
    assert '"trained":[1,4,5]' in text.replace(", ", ",").replace(": ", ":")
