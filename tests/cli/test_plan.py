"""``tokshard plan``: the totals of a mix, and its warnings."""

from __future__ import annotations

import json

import pytest

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.cli.main import run
from tokshard.runtime import NumpyLoader, StreamPlan

MIX = 'corpora = { code = "code", prose = "prose" }\nweights = { code = 3, prose = 1 }\n'
SIZES = "seq_len = 64\nglobal_batch_size = 8\nseed = 5\nblock_tokens = 256\n"


@pytest.fixture
def shell(capsys, tmp_path, monkeypatch):
    """Runs ``tokshard plan`` in the directory of a mix: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name, lengths in (("code", [2_000] * 40), ("prose", [20, 7] * 400)):
        write_corpus(tmp_path / name, documents_of(lengths), tokenizer=TINY_TOKENIZER)
    (tmp_path / "mix.toml").write_text(MIX + SIZES)

    def shell(*arguments):
        exit_code = run(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return shell


def report_of(shell, *arguments):
    exit_code, out, err = shell(*arguments, "--json")
    assert (exit_code, err) == (0, "")
    return json.loads(out)


def test_a_plan_says_for_each_corpus_its_share_tokens_epochs_and_documents(shell, tmp_path):
    exit_code, out, err = shell("mix.toml", "--tokens", "100k")
    assert (exit_code, err) == (0, "")
    plan = StreamPlan.load("mix.toml")
    code, prose = (corpus.source.fingerprint[:12] for corpus in plan.corpora)
    assert out.splitlines()[:4] == [
        f"plan {plan.fingerprint}",
        "├─ order 1, seed 5: samples of 64 tokens, blocks of 256, windows of 262,144 blocks",
        f"├─ code   75.00%  {code}  80,000 tokens, 312 blocks in 1 window: {tmp_path}/code",
        f"└─ prose  25.00%  {prose}  10,800 tokens, 42 blocks in 1 window: {tmp_path}/prose",
    ]
    rows = [" ".join(line.split()) for line in out.splitlines() if line.startswith(("code ", "prose "))]
    # 100,000 tokens are 196 steps of 512
    assert rows[0] == "code 75.00% 75,264 0.94 ~38 of 40 151 kB one window"
    assert rows[1] == "prose 25.00% 25,088 2.32 800 of 800 50.2 kB one window"
    assert "reads       100,352 tokens in 196 steps of 512\n            201 kB of token ids, 2 bytes each" in out
    assert "warning" not in out


def test_on_a_narrow_terminal_columns_go_below_and_no_word_is_broken(shell, monkeypatch):
    wide = shell("mix.toml", "--tokens", "100k", "--simulate", "100")[1]
    monkeypatch.setenv("COLUMNS", "60")
    narrow = shell("mix.toml", "--tokens", "100k", "--simulate", "100")[1]
    assert all(len(line) <= 60 or len(line.split()) <= 2 for line in narrow.splitlines()), narrow  # a path or a hash
    assert set(narrow.split()) - {"│"} == set(wide.split())
    assert "\n│    1 window:\n│    /" in narrow
    assert "corpus   share  tokens  epochs   documents    bytes\n" in narrow
    assert "corpus  steps per window\ncode          one window\nprose         one window\n" in narrow


def test_json_holds_the_same_numbers_and_they_are_those_of_a_loader(shell):
    report = report_of(shell, "mix.toml", "--tokens", "20k")
    assert (report["num_steps"], report["num_samples"], report["num_tokens"]) == (40, 320, 20_480)
    loader = NumpyLoader(StreamPlan.load("mix.toml"), global_batch_size=8)
    batches = iter(loader)
    for _ in range(40):
        next(batches)
    stats = loader.stats()["corpora"]
    loader.close()
    for corpus in report["corpora"]:
        expected = stats[corpus["name"]]
        assert {key: corpus[key] for key in ("samples", "tokens")} == {
            key: expected[key] for key in ("samples", "tokens")
        }
        assert corpus["epochs"] == expected["epoch"]
        assert corpus["bytes"] == 2 * corpus["tokens"]
        assert corpus["share"] == corpus["samples"] / 320


def test_a_corpus_that_is_read_too_often_is_worth_a_warning(shell):
    assert report_of(shell, "mix.toml", "--tokens", "170k")["warnings"] == []
    (warning,) = report_of(shell, "mix.toml", "--tokens", "200k")["warnings"]
    assert warning.startswith("corpus 'prose' is read 4.6 times; more than 4 epochs")
    assert report_of(shell, "mix.toml", "--tokens", "200k", "--max-epochs-warn", "5")["warnings"] == []


def test_a_window_of_few_steps_is_worth_a_warning_that_says_how_many_blocks_are_enough(shell, tmp_path):
    (tmp_path / "mix.toml").write_text(MIX + SIZES + "window_blocks = 12\n")
    report = report_of(shell, "mix.toml", "--tokens", "10k")
    assert [corpus["steps_per_window"] for corpus in report["corpora"]] == [8.0, 24.0]
    (warning,) = report["warnings"]
    assert warning.startswith("a window of corpus 'code' lasts 8.0 steps")
    assert warning.endswith("window_blocks = 24 makes it 16")
    (tmp_path / "mix.toml").write_text(MIX + SIZES + "window_blocks = 24\n")
    assert report_of(shell, "mix.toml", "--tokens", "10k")["warnings"] == []


@pytest.mark.parametrize(("weights", "steps"), [("1e308, prose = 0.5", 6.0), ("1.5e308, prose = 0.5e308", 8.0)])
def test_windows_last_as_long_with_the_largest_weights(shell, tmp_path, weights, steps):
    mix = MIX.replace("3, prose = 1", weights)
    (tmp_path / "mix.toml").write_text(mix + SIZES + "window_blocks = 12\n")
    assert report_of(shell, "mix.toml", "--tokens", "10k")["corpora"][0]["steps_per_window"] == steps


def test_what_limits_and_changes_a_plan_is_shown(shell, tmp_path):
    more = "take = { code = 0.5 }\nmax_epochs = { prose = 2 }\nstart_epoch = { prose = 1 }\n"
    changes = "schedule = [[80, { code = 1, prose = 1 }]]\n"
    (tmp_path / "mix.toml").write_text(MIX + SIZES + more + changes)
    exit_code, out, _ = shell("mix.toml", "--tokens", "1M")
    assert exit_code == 0
    assert "weights     from sample 80 (step 11) on: code 50.0%, prose 50.0%" in out
    assert "39,936 tokens, 156 blocks in 1 window, the part 0.5 of it: " in out
    assert "10,800 tokens, 42 blocks in 1 window, from epoch 1 on, at most 2 epochs: " in out
    # prose has 338 samples in two epochs: 20 of the first 80, then every other one
    assert "warning     the pass ends after step 90 of 1,954: corpus 'prose' is used up" in out
    assert report_of(shell, "mix.toml", "--tokens", "1M")["num_steps"] == 90


def test_a_corpus_that_is_packed_whole_has_its_padding_and_what_is_cut_unless_one_window_has_all(shell, tmp_path):
    sizes = "seq_len = 16\nglobal_batch_size = 8\nblock_tokens = 2048\nwindow_blocks = 2\n"
    (tmp_path / "mix.toml").write_text(MIX + sizes + 'pack = { prose = "whole" }\n')
    _, out, _ = shell("mix.toml", "--tokens", "100k")
    code, prose = report_of(shell, "mix.toml", "--tokens", "100k")["corpora"]
    assert code["packing"] is None
    rows = 5 * (2048 + 16) // 16 + (560 + 16) // 16  # five blocks and a tail of 560 tokens
    found = prose["packing"]
    assert (found["rows"], found["padding"]) == (rows, 1 - 10_800 / (16 * rows))
    # of 20 and 7 tokens in turn: chunks of 16, 4 and 7, of which rows of 16 hold 14 or 15 tokens at most
    assert found["num_chunks"] == pytest.approx(2 * 2048 / 27 * 3, abs=4)
    assert (found["num_cut"], found["num_pieces"]) == (21, 88)
    assert "42 blocks" not in out
    assert "5 blocks in 3 windows, packed whole: " in out
    documents = f"its first window has {found['num_chunks']} documents or row-long parts of one"
    assert f"packed      corpus 'prose' has 681 rows an epoch, 0.88% padding; {documents}," in out
    assert "21 cut into 88 pieces" in out
    (tmp_path / "mix.toml").write_text(
        MIX + sizes.replace("window_blocks = 2", "window_blocks = 9") + 'pack = "whole"\n'
    )
    _, out, _ = shell("mix.toml", "--tokens", "100k")
    assert "none cut" in out


def test_without_tokens_a_plan_covers_what_the_corpora_hold(shell, tmp_path):
    assert report_of(shell, "mix.toml")["num_steps"] == -(-90_800 // 512)
    (tmp_path / "pass.toml").write_text('corpora = { prose = "prose" }\nepochs = 2\n' + SIZES)
    report = report_of(shell, "pass.toml")
    assert (report["num_samples"], report["num_steps"], report["warnings"]) == (338, 43, [])
    assert (
        "the pass ends after step 43 of 1,954: it is finite"
        in report_of(shell, "pass.toml", "--tokens", "1M")["warnings"]
    )


def test_a_recipe_whose_batches_grow_has_the_steps_of_all_their_sizes(shell, tmp_path):
    (tmp_path / "recipe.toml").write_text("[data]\n" + MIX + SIZES + "batch_ramp = [[3, 16], [4, 32]]\n")
    report = report_of(shell, "recipe.toml", "--tokens", "6k")
    # steps of 8, 8, 16 and twice 32 samples of 64 tokens are 6,144
    assert (report["num_steps"], report["num_samples"]) == (5, 96)
    _, out, _ = shell("recipe.toml", "--tokens", "6k")
    assert "6,144 tokens in 5 steps of 512\n            from step 3 on, a step has 16 samples" in out
    assert report_of(shell, "recipe.toml", "--tokens", "6k", "--global-batch-size", "8")["num_steps"] == 12


def test_one_corpus_needs_its_sizes_as_options(shell):
    report = report_of(shell, "prose", "--seq-len", "16", "--global-batch-size", "4", "--seed", "9")
    assert report["sizes"]["seq_len"] == 16
    assert report["sizes"]["seed"] == 9
    assert [corpus["name"] for corpus in report["corpora"]] == ["prose"]


def test_a_simulation_measures_the_next_samples(shell, tmp_path):
    exit_code, out, _ = shell("mix.toml", "--simulate", "1k")
    assert exit_code == 0
    assert "simulated   samples 0 to 999" in out
    assert "places      a step draws from" in out
    found = report_of(shell, "mix.toml", "--simulate", "1k")["simulation"]
    assert sum(corpus["num_samples"] for corpus in found["corpora"]) == 1000
    assert all(corpus["worst_error"] < 1 for corpus in found["corpora"])
    loader = NumpyLoader(StreamPlan.load("mix.toml"), global_batch_size=8)
    next(iter(loader))
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    loader.close()
    after = report_of(shell, "mix.toml", "--simulate", "100", "--checkpoint", "state.json")["simulation"]
    assert (after["first"], after["num_samples"]) == (8, 100)


def test_a_terminal_without_line_drawing_gets_ascii(shell):
    from tokshard.cli.plan_text import plan_tree
    from tokshard.inspect.plan.preview import report_plan
    from tokshard.inspect.plan.run import open_run

    report = report_plan(open_run("mix.toml", {}), num_tokens=1, max_epochs_warn=4)
    assert [line[:3] for line in plan_tree(report, encoding="ascii", width=200).splitlines()[1:]] == [
        "|- ",
        "|- ",
        "`- ",
    ]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error", "hint"),
    [
        (["mix.toml", "--tokens", "0"], 2, "invalid value for '--tokens': must be at least 1", "plan --help"),
        (["mix.toml", "--tokens", "many"], 2, "'many' is not a whole number", "k, M, B (or G) and T"),
        (["nowhere.toml"], 2, "nowhere.toml: No such file", "give a mix"),
        (["code"], 2, "code: no seq_len", "--seq-len"),
        (["mix.toml", "--token", "3"], 2, "no option --token", "did you mean --tokens?"),
        (
            ["no-corpus", "--seq-len", "4"],
            2,
            "no-corpus does not exist",
            "give a mix.toml, a corpus directory or a checkpoint",
        ),
    ],
)
def test_wrong_usage_is_refused_with_a_hint(shell, arguments, exit_code, error, hint):
    found, out, err = shell(*arguments)
    assert (found, out) == (exit_code, "")
    assert error in err
    assert hint in err


def test_nodes_recommend_as_many_streams_and_say_why(shell, tmp_path):
    sizes = "seq_len = 16\nglobal_batch_size = 16\nblock_tokens = 64\nwindow_blocks = 32\n"
    (tmp_path / "streams.toml").write_text(MIX + sizes)
    advice = report_of(shell, "streams.toml", "--nodes", "4")["streams"]
    assert (advice["num_nodes"], advice["num_streams"]) == (4, 4)
    assert advice["reads_without"] == advice["reads_now"] == 4
    assert advice["reads_with"] == 0.75 * 1 + 0.25 * 4  # prose has too few blocks, and a quarter of the samples
    assert advice["shared"] == {"prose": 4 * 4 * 32}
    exit_code, out, err = shell("streams.toml", "--nodes", "4")
    assert (exit_code, err) == (0, "")
    assert "num_streams = 4 for 4 nodes: 4 nodes would read" in out
    assert f"and without streams {advice['reads_without']:.1f}" in out
    assert "corpus 'prose' has fewer than 512 blocks, so it is shared" in out
    (tmp_path / "four.toml").write_text(MIX + sizes + "num_streams = 4\n")
    report = report_of(shell, "four.toml", "--nodes", "4")
    assert report["streams"]["reads_now"] == advice["reads_with"]
    assert [corpus["num_parts"] for corpus in report["corpora"]] == [4, 1]
    out = shell("four.toml")[1]
    assert "windows of 32 blocks, 4 streams" in out
    assert "dealt to 4 streams" in out


def test_one_node_needs_one_stream_and_more_nodes_than_samples_are_refused(shell):
    advice = report_of(shell, "mix.toml", "--nodes", "1")["streams"]
    assert (advice["num_streams"], advice["shared"]) == (1, {})
    assert "num_streams = 1 for 1 node: with one stream" in shell("mix.toml", "--nodes", "1")[1]
    exit_code, out, err = shell("mix.toml", "--nodes", "9")
    assert (exit_code, out) == (2, "")
    assert "9 nodes share steps of 8 samples" in err


def test_a_plan_of_a_folder_reads_its_corpora_without_those_for_validation(shell, tmp_path):
    for place, length in (("all/web/train", 300), ("all/web/validation", 200), ("all/chat", 250)):
        write_corpus(tmp_path / place, documents_of([length] * 40), tokenizer=TINY_TOKENIZER)
    sizes = ["--seq-len", "64", "--global-batch-size", "8"]
    assert [one["name"] for one in report_of(shell, "all", *sizes)["corpora"]] == ["chat", "web/train"]
    (split,) = report_of(shell, "all/web/", *sizes)["corpora"]
    assert (split["name"], split["directory"]) == ("web/train", f"{tmp_path}/all/web/train")
    for command in (["trace", "all", *sizes, "--document", "web/train:7"], ["trace", "all", *sizes, "--step", "2"]):
        assert run(command) == 0
