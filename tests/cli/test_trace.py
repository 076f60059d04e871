"""``tokshard trace`` on corpora of ``tokshard build``: rows, occurrences of documents, checkpoints, and refusals."""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from tests.contract.builds import WORDS
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import PlanError
from tokshard.run_files.plan_file import load_mix
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader

TOKENIZER = Path(__file__).parents[2] / "recipes" / "tokenizer"
MIX = """
corpora = { code = "shards/code", prose = "shards/prose" }
weights = { code = 0.7, prose = 0.3 }
seq_len = 32
global_batch_size = 6
seed = 17
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Two corpora, one with ids and kept columns, and a mix of both."""
    path = tmp_path_factory.mktemp("trace")
    rng = random.Random(5)
    for name, count in (("code", 60), ("prose", 90)):
        records = [
            {"text": f"{name} {n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 90))), "at": f"{name}/{n // 2}"}
            for n in range(count)
        ]
        lines = [
            json.dumps({**record, "score": n / 3, "lang": None if n % 2 else "en"}) for n, record in enumerate(records)
        ]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        kept = ["--id-field", "at", "--keep-field", "score:float64", "--keep-field", "lang"] if name == "code" else []
        sizes = ["--shard-tokens", "2000", "--quiet"]
        arguments = [str(path / f"{name}.jsonl"), "--tokenizer", str(TOKENIZER), "--out", str(path / "shards" / name)]
        assert run(["build", *arguments, *kept, *sizes]) == 0
    (path / "mix.toml").write_text(MIX)
    return path


@pytest.fixture
def shell(capsys, directory, monkeypatch):
    """Runs ``tokshard trace`` in the directory of the mix: exit code, stdout, stderr."""
    monkeypatch.chdir(directory)

    def shell(*arguments):
        exit_code = run(["trace", *map(str, arguments)])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return shell


@pytest.fixture
def rows(shell):
    """The rows of a trace, from its JSON."""

    def rows(*arguments):
        exit_code, out, err = shell(*arguments, "--json")
        assert exit_code == 0
        assert not err or "does not say its step" in err
        return [json.loads(line) for line in out.splitlines()]

    return rows


def tokens_of(rows, rank, row):
    """What the documents of a row hold on disk."""
    found = []
    for one in rows:
        if (one["rank"], one["row"]) == (rank, row):
            with open_corpus(f"shards/{one['corpus']}") as corpus:
                found += corpus.document(one["document"])[one["start"] : one["stop"]].tolist()
    return found


def test_every_row_of_every_rank_is_what_the_loader_gives_to_that_rank(rows):
    plan = StreamPlan.load("mix.toml")
    for rank in range(3):
        loader = StreamingLoader(plan, global_batch_size=6, dp_rank=rank, dp_world_size=3)
        found = rows("mix.toml", "--step", "1:5", "--dp-world-size", "3", "--dp-rank", rank, "--no-text")
        assert {one["rank"] for one in found} == {rank}
        for step, batch in zip(range(1, 5), loader, strict=False):
            mine = [one for one in found if one["step"] == step]
            samples = {(one["row"], one["sample"], one["corpus"]) for one in mine}
            names = [plan.names[index] for index in batch["corpus_index"].tolist()]
            assert samples == set(zip(range(2), batch["sample_index"].tolist(), names, strict=True))
            for row in range(2):
                assert tokens_of(mine, rank, row) == batch["input_ids"][row].tolist()
        loader.close()


def test_ranks_that_do_not_divide_the_batch_have_the_rows_that_uneven_pad_gives_them(rows, shell):
    plan = StreamPlan.load("mix.toml")
    for rank in range(4):
        options = {"dp_rank": rank, "dp_world_size": 4, "uneven": "pad"}
        loader = StreamingLoader(plan, global_batch_size=6, **options)
        expected = [sample for sample in next(iter(loader))["sample_index"].tolist() if sample >= 0]
        loader.close()
        found = rows(
            "mix.toml", "--step", "1", "--dp-world-size", "4", "--uneven", "pad", "--dp-rank", rank, "--no-text"
        )
        assert sorted({one["sample"] for one in found}) == expected
    exit_code, out, _ = shell("mix.toml", "--step", "1", "--dp-world-size", "4", "--uneven", "pad", "--dp-rank", "3")
    assert exit_code == 0
    assert out.splitlines()[-1].startswith("step  rank")
    Path("padded.toml").write_text(MIX + 'uneven = "pad"\n')
    assert rows("padded.toml", "--step", "1", "--dp-world-size", "4", "--dp-rank", "3", "--no-text") == []


@pytest.mark.parametrize("asked", [("--step", "1"), ("--sample", "3"), ("--document", "prose:3")])
def test_ranks_that_do_not_divide_the_batch_are_refused_as_the_loader_refuses_them(shell, asked):
    with pytest.raises(PlanError) as refused:
        StreamingLoader(StreamPlan.load("mix.toml"), global_batch_size=6, dp_rank=0, dp_world_size=4)
    exit_code, out, err = shell("mix.toml", *asked, "--dp-world-size", "4")
    assert (exit_code, out) == (2, "")
    assert err.splitlines() == [
        f"error: {refused.value.problem}",
        "hint: give another --dp-world-size, or --uneven pad for a job that pads",
    ]


def test_a_row_says_where_its_document_comes_from_and_what_it_says(rows):
    found = rows("mix.toml", "--step", "2:40", "--text", "5000")
    for one in found:
        with open_corpus(f"shards/{one['corpus']}") as corpus:
            assert corpus.shards[corpus.shards.find(one["document"])[0]].name == one["shard"]
        number = one["record_number"] - 1
        assert one["source"] == f"{one['corpus']}.jsonl"
        record = json.loads(Path(f"{one['corpus']}.jsonl").read_text().splitlines()[number])
        if one["corpus"] == "code":
            assert one["id"] == record["at"]
            assert one["metadata"] == {"score": record["score"], "lang": record["lang"]}
        else:
            assert (one["id"], one["metadata"]) == (None, {})
        if one["stop"] - one["start"] == one["num_tokens"]:
            assert one["text"] == record["text"] + "<|endoftext|>"
    assert {one["corpus"] for one in found} == {"code", "prose"}
    assert len({one["shard"] for one in found}) > 2


def test_the_table_has_a_line_per_document_with_its_metadata_and_the_start_of_its_text(shell, rows, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    exit_code, out, err = shell("mix.toml", "--step", "3:5")
    assert (exit_code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("plan        32 tokens x 6 samples a step, seed 17: ")
    assert lines[2].split() == ["step", "rank", "row", "sample", "corpus", "document", "tokens", "shard", "record"]
    found = rows("mix.toml", "--step", "3:5")
    documents = [line for line in lines[3:] if ".arrow" in line]
    assert len(documents) == len(found)
    for line, one in zip(documents, found, strict=True):
        place = [str(one[key]) for key in ("step", "rank", "row", "sample", "corpus", "document")]
        assert line.split()[:6] == place
        assert f"{one['start']}-{one['stop']} of {one['num_tokens']}" in line
        assert line.endswith(f"{one['record_number']} of {one['source']}")
    details = [line for line in lines[3:] if ".arrow" not in line]
    assert all(line.startswith("      ") and len(line) <= 120 for line in details)
    with_id = [line for line in details if line.strip().startswith("id code/")]
    assert len(with_id) == sum(one["corpus"] == "code" for one in found)


def test_on_a_narrow_terminal_what_does_not_fit_the_table_is_below_its_line(shell, rows, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    exit_code, out, _ = shell("mix.toml", "--step", "3")
    assert exit_code == 0
    assert max(map(len, out.splitlines())) <= 60
    shown = " ".join(out.split())
    for one in rows("mix.toml", "--step", "3"):
        place = f"{one['start']}-{one['stop']} of {one['num_tokens']}"
        assert f"{place} shard {one['shard']}, record {one['record_number']} of {one['source']}" in shown
    exit_code, out, _ = shell("mix.toml", "--document", "prose:1")
    assert max(map(len, out.splitlines())) <= 60


def test_without_text_the_tokenizer_is_not_loaded(shell, tmp_path, directory):
    exit_code, out, _ = shell("mix.toml", "--step", "1", "--no-text", "--json")
    assert exit_code == 0
    assert all(json.loads(line)["text"] is None for line in out.splitlines())


def test_a_document_is_found_at_the_steps_whose_trace_shows_it_and_at_no_other(rows):
    traced = rows("mix.toml", "--sample", "0:400", "--no-text")
    for name, documents in (("code", range(0, 60, 21)), ("prose", range(0, 90, 31))):
        for document in documents:
            (found,) = rows("mix.toml", "--document", f"{name}:#{document}", "--epochs", "0:20")
            keys = ("sample", "step", "rank", "row", "start", "stop")
            places = sorted(tuple(one[key] for key in keys) for one in found["readings"] if one["sample"] < 400)
            assert places == sorted(
                tuple(one[key] for key in keys)
                for one in traced
                if (one["corpus"], one["document"]) == (name, document)
            )
            assert {one["when"] for one in found["readings"]} == {"to come"}


def test_an_id_leads_to_every_document_that_has_it(shell, rows):
    found = rows("mix.toml", "--document", "code:code/13")
    assert [one["document"] for one in found] == [26, 27]
    assert {one["id"] for one in found} == {"code/13"}
    assert found[0]["epochs"] == [0, 2]
    exit_code, out, _ = shell("mix.toml", "--document", "code:code/13")
    assert exit_code == 0
    assert out.count("\ndocument    code:2") == 2
    assert "metadata    id code/13, score 8.66" in out
    assert "epoch  step  rank  row  sample" in out


def loop(plan, events):
    """A loader that has taken steps, and skipped samples."""
    loader = StreamingLoader(plan, global_batch_size=6)
    seen = []
    batches = iter(loader)
    for event in events:
        if event:
            loader.skip(event)
            batches = iter(loader)
        else:
            seen.append(next(batches)["sample_index"].tolist())
    loader.close()
    return loader, seen


@pytest.fixture(
    params=[
        "trainer",
        "dcp",
        "json",
        *(pytest.param(n, marks=pytest.mark.soak) for n in ("trainer alone", "torch.save", "line")),
    ]
)
def saved(request, tmp_path, directory, monkeypatch):
    """The arguments for a checkpoint of each kind, and the samples of its steps."""
    monkeypatch.chdir(directory)
    loader, seen = loop(StreamPlan.load("mix.toml"), [0, 0, 0, 12, 0, 5, 0])
    state, path = loader.state_dict(), tmp_path / "saved"
    match request.param:
        case "trainer" | "trainer alone":
            path.mkdir()
            mix = load_mix("mix.toml")
            data = {key: getattr(mix, key) for key in ("corpora", "weights", "seq_len", "global_batch_size", "seed")}
            (path / "state.json").write_text(json.dumps({"step": 5, "loader": state, "config": {"data": data}}))
        case "torch.save":
            torch.save({"model": torch.zeros(9), "loader": state}, path)
        case "dcp":
            dcp.save({"model": torch.zeros(9), "loader": loader}, checkpoint_id=path, no_dist=True)
        case "json":
            path.write_text(json.dumps(state))
        case "line":
            path.write_text(state["cursor"])
    return ([path] if request.param == "trainer alone" else ["mix.toml", "--checkpoint", path]), seen


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_a_checkpoint_of_any_kind_says_which_samples_were_skipped_and_when_a_document_was_read(shell, rows, saved):
    arguments, seen = saved
    found = rows(*arguments, "--step", "1:8", "--no-text")
    by_step = {step: sorted({one["sample"] for one in found if one["step"] == step}) for step in range(1, 8)}
    assert [by_step[step] for step in range(1, 6)] == seen
    assert by_step[6] == list(range(47, 53))
    skipped = rows(*arguments, "--sample", "18:20", "--no-text")
    assert {(one["step"], one["rank"], one["row"]) for one in skipped} == {(None, None, None)}
    for sample, when in (
        (3, "read"),
        (18, "skipped"),
        (36, "skipped"),
        (41, "read"),
        (50, "to come"),
    ):
        (one, *_) = rows(*arguments, "--sample", sample, "--no-text")
        name = f"{one['corpus']}:{'#' if one['corpus'] == 'code' else ''}{one['document']}"
        (document,) = rows(*arguments, "--document", name)
        assert {place["when"] for place in document["readings"] if place["sample"] == sample} == {when}
    exit_code, out, _ = shell(*arguments, "--step", "4")
    assert exit_code == 0
    assert "samples up to 46 are read, without 18 to 29, 36 to 40," in " ".join(out.split())


def test_a_step_of_another_batch_size_is_shown_with_a_note(shell, tmp_path):
    loader, _ = loop(StreamPlan.load("mix.toml"), [0, 0, 0])
    tmp_path.joinpath("state.json").write_text(json.dumps({"step": 3, "loader": loader.state_dict()}))
    checkpoint = ["--checkpoint", tmp_path, "--global-batch-size", "9"]
    exit_code, out, err = shell("mix.toml", *checkpoint, "--step", "3", "--no-text", "--json")
    assert exit_code == 0
    assert {json.loads(line)["sample"] for line in out.splitlines()} == set(range(9, 18))
    assert "has read 18 samples in 3 steps, not 9 a step; earlier steps are counted back from it" in err
    assert shell("mix.toml", *checkpoint, "--step", "4", "--no-text", "--json")[2] == ""


def test_steps_that_were_counted_from_the_samples_of_a_checkpoint_are_shown_with_a_note(shell, tmp_path):
    """Three batches of 4 and then three of 8 are as many samples as six of the plan: only the job knows its steps."""
    plan = StreamPlan.load("mix.toml")
    loader = StreamingLoader(plan, global_batch_size=4)
    deque(itertools.islice(loader, 3), maxlen=0)
    resumed = StreamingLoader(plan, global_batch_size=8)
    resumed.load_state_dict(loader.state_dict())
    deque(itertools.islice(resumed, 3), maxlen=0)
    state = resumed.state_dict()
    for one in (loader, resumed):
        one.close()
    (tmp_path / "state.json").write_text(json.dumps({"loader": state}))
    for asked in (["--step", "5"], ["--document", "prose:3"]):
        exit_code, _, err = shell("mix.toml", "--checkpoint", tmp_path / "state.json", *asked, "--no-text")
        assert exit_code == 0
        assert err == (
            f"note: {tmp_path}/state.json does not say its step: steps are counted with 6 samples each, which is right "
            "if all batches had that size; --sample is right in any case\n"
        )
    (tmp_path / "state.json").write_text(json.dumps({"loader": state, "step": 6}))
    assert shell("mix.toml", "--checkpoint", tmp_path / "state.json", "--step", "7", "--no-text")[2] == ""
    (tmp_path / "state.json").write_text(json.dumps({"loader": state, "step": 5}))
    for asked in (["--step", "5"], ["--document", "prose:3"]):
        _, _, err = shell("mix.toml", "--checkpoint", tmp_path / "state.json", *asked, "--no-text")
        assert "has read 36 samples in 5 steps, not 6 a step; earlier steps are counted back" in err


def test_a_run_that_changed_its_seq_len_is_traced_on_both_sides_and_says_what_was_left_out(shell, directory, tmp_path):
    plan = StreamPlan.load(str(directory / "mix.toml"))
    loader = StreamingLoader(plan, global_batch_size=6)
    deque(itertools.islice(loader, 3), maxlen=0)
    longer = tmp_path / "longer.toml"
    mix = (directory / "mix.toml").read_text().replace("seq_len = 32", "seq_len = 48")
    longer.write_text(mix.replace("shards/", f"{directory}/shards/"))
    resumed = StreamingLoader(StreamPlan.load(str(longer)), global_batch_size=6)
    with pytest.warns(UserWarning, match="the change of seq_len from 32 to 48 leaves out"):
        resumed.load_state_dict(loader.state_dict(), seq_len="plan")
    deque(itertools.islice(resumed, 2), maxlen=0)
    (tmp_path / "state.json").write_text(json.dumps(resumed.state_dict()))
    arguments = [longer, "--checkpoint", tmp_path / "state.json", "--no-text"]
    exit_code, out, _ = shell(*arguments, "--step", "4")
    assert exit_code == 0
    left_out = [f"{facts['left_out']:,} of {name}" for name, facts in resumed.stats()["corpora"].items()]
    said = " ".join(out.split())
    assert f"seq_len 48 tokens from sample 18 on, 32 before; left out by then: {', '.join(left_out)}" in said
    for sample, tokens in ((17, 32), (18, 48)):
        found = [json.loads(line) for line in shell(*arguments, "--sample", str(sample), "--json")[1].splitlines()]
        assert sum(row["stop"] - row["start"] for row in found) == tokens


def test_a_sample_of_weights_that_a_checkpoint_does_not_keep_is_refused(shell, rows, tmp_path):
    loader = StreamingLoader(StreamPlan.load("mix.toml"), global_batch_size=6)
    for number in range(20):
        next(iter(loader))
        loader.set_weights({"code": 1 + number, "prose": 1})
    loader.close()
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    exit_code, _, err = shell("mix.toml", "--checkpoint", tmp_path / "state.json", "--step", "1")
    assert exit_code == 2
    assert "sample 0 was read under weights that" in err
    assert "give an earlier checkpoint" in err
    first = next(one["document"] for one in rows("mix.toml", "--step", "1:3") if one["corpus"] == "prose")
    (found,) = rows("mix.toml", "--checkpoint", tmp_path / "state.json", "--document", f"prose:{first}")
    assert "not kept" in {one["when"] for one in found["readings"]}


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--step", "1"], "no plan is given", "give a mix.toml"),
        (["mix.toml"], "give one of --step, --sample, --document", "trace --help"),
        (["mix.toml", "--step", "1", "--sample", "1"], "give one of --step, --sample, --document", "trace --help"),
        (
            ["mix.toml", "--step", "2", "--global-batch-size", "2G"],
            "step 2 has 2,000,000,000 rows, and at most 1,048,576",
            "--rank R",
        ),
        (["mix.toml", "--step", "0"], "there is no step 0: steps count from 1", "--step 1 is the first"),
        (["mix.toml", "--step", "5:5"], "'5:5' is an empty range", "trace --help"),
        (["mix.toml", "--step", "x"], "'x' is not a number such as 1000", "k, M, B (or G) and T"),
        (["mix.toml", "--step", "1", "--dp-rank", "2", "--dp-world-size", "2"], "rank 2 is not below", "--help"),
        (["mix.toml", "--document", "rust:1"], "'rust:1' names no document", "corpora are code, prose"),
        (
            ["mix.toml", "--document", "prose:90"],
            "has no document '90': it has 90, counted from 0",
            "without --id-field",
        ),
        (["mix.toml", "--document", "prose:-1"], "has no document '-1'", "give prose:0 to prose:89"),
        (["mix.toml", "--document", "code:60"], "no document with id '60'", "'code:#0' is its first document"),
        (["mix.toml", "--document", "code:#60"], "has no document '#60'", "give 'code:#0' to 'code:#59'"),
        (["mix.toml", "--step", "1", "--epochs", "1"], "--epochs goes with --document", "--help"),
        (
            ["mix.toml", "--document", "prose:1", "--epochs", "0:1e15"],
            "an epoch is 999999999999999, expected at most 4294967295",
            "give a smaller number",
        ),
        (["shards/code", "--step", "1"], "shards/code: no seq_len", "--seq-len"),
        (["mix.toml", "--checkpoint", "nowhere", "--step", "1"], "nowhere: no such checkpoint", "give a checkpoint"),
        (["mix.toml", "--checkpoint", "shards", "--step", "1"], "shards is not a checkpoint", "give a checkpoint"),
        (["mix.toml", "--checkpoint", "mix.toml", "--step", "1"], "mix.toml is not a checkpoint", "give a checkpoint"),
        (["mix.toml", "--checkpoint", "code.jsonl", "--step", "1"], "is not a checkpoint", "give a checkpoint"),
        (["pass.toml", "--step", "1:999"], "there is no step 998: it would start at sample", "ask for an earlier step"),
        (["mix.toml", "--step", "999999T"], "is beyond 2**62, where samples end", "ask for an earlier one"),
        (["mix.toml", "--sample", "9999999T"], "is beyond 2**62, where samples end", "ask for an earlier one"),
        (["pass.toml", "--sample", "9999"], "--sample 9999:10000 is not a range", "samples, counted from 0"),
        (
            ["mix.toml", "--seed", "3", "--checkpoint", "state.json", "--step", "1"],
            "seed differs (17, now 3)",
            "give the",
        ),
    ],
)
def test_wrong_usage_is_refused_with_a_hint(shell, arguments, error, hint):
    Path("pass.toml").write_text(
        'corpora = { code = "shards/code" }\nseq_len = 32\nglobal_batch_size = 6\nepochs = 1\n'
    )
    loader, _ = loop(StreamPlan.load("mix.toml"), [0])
    Path("state.json").write_text(json.dumps(loader.state_dict()))
    exit_code, out, err = shell(*arguments)
    assert (exit_code, out) == (2, "")
    assert error in err
    assert hint in err


def test_a_distant_step_costs_as_much_as_the_first(rows):
    (one, *_) = rows("mix.toml", "--step", "1G")
    assert one["step"] == 10**9
    assert one["sample"] == 6 * (10**9 - 1)


def test_the_last_sample_of_a_finite_plan_can_be_asked_for_alone(shell, rows):
    Path("one.toml").write_text(
        'corpora = { prose = "shards/prose" }\nseq_len = 32\nglobal_batch_size = 6\nepochs = 1\n'
    )
    count = StreamPlan.load("one.toml").num_samples
    assert {one["sample"] for one in rows("one.toml", "--sample", f"{count - 1}:{count}", "--no-text")} == {count - 1}
    assert shell("one.toml", "--sample", f"{count - 1}:{count + 1}")[0] == 2


def test_truncated_text_ends_in_dots_even_if_it_has_fewer_characters_than_tokens(shell, capsys):
    text = "\u0f00\u0f01\u0f02\u0f03"  # of three tokens each
    Path("rare.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert run(["build", "rare.jsonl", "--tokenizer", str(TOKENIZER), "--out", "shards/rare", "--quiet"]) == 0
    capsys.readouterr()
    sizes = ("--seq-len", "32", "--global-batch-size", "1", "--sample", "0", "--json")
    shown = {
        length: json.loads(shell("shards/rare", *sizes, "--text", length)[1].splitlines()[0]) for length in (6, 40)
    }
    assert shown[6]["num_tokens"] > 6
    assert shown[6]["text"] == text[:2] + "..."
    assert shown[40]["text"].startswith(text)
    assert not shown[40]["text"].endswith("...")


def test_a_trace_shows_masked_documents_from_the_sample_on_from_which_they_are(shell, rows, directory, tmp_path):
    (first,) = rows("mix.toml", "--sample", 40)[:1]
    plan = StreamPlan.load(str(directory / "mix.toml"))
    with StreamingLoader(plan, global_batch_size=6) as loader:
        loader.skip(30)
        (tmp_path / "masked.txt").write_text(f"{first['document']}\n")
        loader.mask(first["corpus"], tmp_path / "masked.txt")
        state = tmp_path / "state.json"
        state.write_text(json.dumps(loader.state_dict()))
        alone = plan.sample(40, loader.cursor)
    length = first["stop"] - first["start"]
    assert set(alone["labels"][:length].tolist()) == {-100}
    found = rows("mix.toml", "--checkpoint", state, "--sample", "0:80")
    of_document = [row for row in found if (row["corpus"], row["document"]) == (first["corpus"], first["document"])]
    assert {row["sample"] >= 30 for row in of_document} >= {True}
    for row in found:
        is_masked = row in of_document and row["sample"] >= 30
        assert row["masked"] == ("labels" if is_masked else None)
    _, out, _ = shell("mix.toml", "--checkpoint", state, "--sample", 40)
    assert "masked: labels" in out
    assert f"1 document of {first['corpus']}, from sample 30 on" in out
    assert "as the list grew" not in out
    name = f"{first['corpus']}:#{first['document']}"
    ((occurrences,),) = [rows("mix.toml", "--checkpoint", state, "--document", name, "--epochs", "0:3")]
    for reading in occurrences["readings"]:
        assert reading["masked"] == ("labels" if reading["sample"] >= 30 else None)
    _, out, _ = shell("mix.toml", "--checkpoint", state, "--document", name, "--epochs", "0:3")
    assert ", labels masked" in out
    with StreamingLoader(plan, global_batch_size=6) as loader:
        loader.load_state_dict(json.loads(state.read_text()))
        loader.skip(6)
        (tmp_path / "masked.txt").write_text(f"{first['document']}\n{(first['document'] + 1) % 60}\n")
        loader.mask(first["corpus"], tmp_path / "masked.txt")
        state.write_text(json.dumps(loader.state_dict()))
    _, out, _ = shell("mix.toml", "--checkpoint", state, "--sample", 40)
    said = f"2 documents of {first['corpus']}, from sample 30 on, more of them up to sample 36, as the list grew"
    assert said in " ".join(out.split())
