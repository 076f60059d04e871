"""Weights to Hugging Face's format and back; with transformers itself in `make test-interop`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.trainer.runs import VOCABULARY, configuration, corpus
from tokshard.errors import CorpusError, TokshardError, TrainerError, UsageError
from tokshard.run_files.checkpoint_directory import State
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Parallel, resolve
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer import checkpoint, hugging_face
from tokshard.trainer.attention import Documents
from tokshard.trainer.hugging_face import export, load_weights, main
from tokshard.trainer.loop import train
from tokshard.trainer.model import Transformer, initialise
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import process_group

SIZES = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 48, "rope_theta": 5_000.0}
PADDED = Shape(**SIZES, vocab_size=128)

safetensors = pytest.importorskip("safetensors.torch", reason="pip install 'tokshard[safetensors]'")
# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(Parallel(device="cpu")):
        yield


def model(shape: Shape = PADDED, *, seed: int = 1) -> Transformer:
    made = Transformer(shape)
    initialise(made, seed=seed)
    with torch.no_grad():
        for value in made.parameters():
            value.mul_(10 if value.ndim == 2 else 1)  # attention that is far from uniform
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint of a model with a padded vocabulary, and its corpus."""
    directory = tmp_path_factory.mktemp("saved")
    path = corpus(directory / "corpus", step=3, seed=3, num_documents=20)
    fields = configuration({"code": path}, directory, data__weights={}) | {"model": {"preset": "10M", **SIZES}}
    net = model()
    tensors = checkpoint.tensors_of(net, make_optimizer(net, resolve(fields).optimizer))
    state = State(step=7, loader={}, config=fields)
    return checkpoint.save(str(directory / "checkpoints"), tensors, state), path


@pytest.fixture(scope="module")
def exported(saved: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert list(export(saved[0], str(out)))[-1] == f"wrote {out}: {VOCABULARY} of 128 ids, fp32"
    return out


def test_what_was_exported_is_imported_bit_for_bit_and_padding_becomes_zeros(exported: Path) -> None:
    expected, found = model().state_dict(), model(seed=2)
    assert load_weights(str(exported), found, num_ids=VOCABULARY) == [f"{exported}: weights alone"]
    for name, value in found.state_dict().items():
        rows = VOCABULARY if name in ("embedding.weight", "head.weight") else len(value)
        assert torch.equal(value[:rows], expected[name][:rows]), name
        assert not value[rows:].any()


def test_several_files_and_bf16_round_once(
    saved: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugging_face, "FILE_BYTES", 20_000)
    list(export(saved[0], str(tmp_path / "out"), dtype="bf16"))
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    found = model(seed=2)
    load_weights(str(tmp_path / "out"), found, num_ids=VOCABULARY)
    for name, value in model().state_dict().items():
        assert torch.equal(found.state_dict()[name][:VOCABULARY], value[:VOCABULARY].bfloat16().float()), name


def test_a_vocabulary_without_a_corpus_stays_padded_and_a_corpus_that_is_asked_for_has_to_be_there(
    saved: tuple[str, str], tmp_path: Path
) -> None:
    path, corpus_path = saved
    Path(corpus_path).rename(tmp_path / "moved")
    try:
        first, *_, last = export(path, str(tmp_path / "padded"))
        assert first.startswith("no tokenizer, and 128 ids, maybe padded: ")
        assert "128 of 128 ids" in last
        with pytest.raises(CorpusError):
            list(export(path, str(tmp_path / "out"), corpus=corpus_path))
        assert sorted(place.name for place in tmp_path.iterdir()) == ["moved", "padded"]
        assert "64 of 128 ids" in list(export(path, str(tmp_path / "cut"), corpus=str(tmp_path / "moved")))[-1]
    finally:
        (tmp_path / "moved").rename(corpus_path)


def test_weights_of_a_checkpoint_begin_a_run_at_step_0_and_it_continues_from_its_own(
    saved: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"checkpoint__load_weights": saved[0], "optimizer__lr": 0.0, "data__weights": {}}
    fields = configuration({"code": saved[1]}, tmp_path / "out", **changes, train__stop_after=1)
    fields["model"] = {"preset": "10M", **SIZES, "vocab_size": 128}
    assert train(resolve(fields)) == 0
    assert "weights alone" in capsys.readouterr().out
    path = tmp_path / "out" / "checkpoints" / "step-00000001"
    found = model(seed=2)
    load_weights(str(path), found, num_ids=VOCABULARY)
    for name, value in model().state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert train(resolve(fields | {"train": fields["train"] | {"stop_after": 2}})) == 0
    assert "continuing after step 1" in capsys.readouterr().out
    fields["checkpoint"]["load_weights"] = str(path)
    with pytest.raises(UsageError, match="was saved by a command without it"):
        train(resolve(fields))


def edit(directory: Path, out: Path, **changes: Any) -> str:
    out.mkdir()
    for file in directory.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    fields = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(fields))
    return str(out)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2' there, 'llama' here"),
        ({"hidden_size": 64}, "hidden_size is 64 there, 32 here"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06 there"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5_000.0}}, "rope_type is 'llama3' there"),
        ({"rope_parameters": None, "rope_theta": 10_000.0}, "rope_theta is 10000.0 there"),
        ({"head_dim": 16}, "head_dim is 16 there, 8 here"),
        ({"vocab_size": 63}, "has 63 ids, the corpora 64 and the model 128"),
        ({"vocab_size": 129}, "has 129 ids, the corpora 64 and the model 128"),
        ({"vocab_size": 65}, r"embed_tokens.weight is \(64, 32\), expected \(65, 32\)"),
    ],
)
def test_weights_of_another_model_are_refused(
    exported: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TrainerError, match=problem):
        load_weights(edit(exported, tmp_path / "other", **changes), model(), num_ids=VOCABULARY)


def test_a_head_that_is_tied_to_the_embedding_is_copied_from_it_with_a_word(exported: Path, tmp_path: Path) -> None:
    path = edit(exported, tmp_path / "tied", tie_word_embeddings=True)
    tensors = safetensors.load_file(exported / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.save_file(tensors, tmp_path / "tied" / "model.safetensors")
    found = model(seed=2)
    assert "are trained apart" in load_weights(path, found, num_ids=VOCABULARY)[1]
    assert torch.equal(found.head.weight, found.embedding.weight)
    assert torch.equal(found.head.weight[:VOCABULARY], model().embedding.weight[:VOCABULARY])


def test_files_that_are_cut_missing_pickled_or_elsewhere_are_refused(exported: Path, tmp_path: Path) -> None:
    path = Path(edit(exported, tmp_path / "damaged"))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TrainerError, match="damaged"):
        load_weights(str(path), model(), num_ids=VOCABULARY)
    file.rename(path / "pytorch_model.bin")
    with pytest.raises(TokshardError, match=r"damaged cannot be read: .*model\.safetensors"):
        load_weights(str(path), model(), num_ids=VOCABULARY)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../exported/model.safetensors"}}')
    with pytest.raises(TrainerError, match="a file elsewhere"):
        load_weights(str(path), model(), num_ids=VOCABULARY)
    (path / "config.json").write_text("[1]")
    with pytest.raises(TrainerError, match="damaged"):
        load_weights(str(path), model(), num_ids=VOCABULARY)


def test_the_command_exports_once_and_refuses_what_exists(
    saved: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [saved[0], "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "model.safetensors: 21 tensors" in capsys.readouterr().out
    assert main(command) == 2
    assert "out is not empty: it has config.json" in capsys.readouterr().err
    assert main([str(tmp_path), "--out", str(tmp_path / "other")]) == 1
    assert "not a complete checkpoint" in capsys.readouterr().err
    with patch("tokshard.trainer.hugging_face.check_hashes", side_effect=OSError(5, "Input/output error")):
        assert main([saved[0], "--out", str(tmp_path / "other")]) == 1
    assert "step-00000007 cannot be read: [Errno 5]" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["out"]


@pytest.mark.interop
def test_transformers_gives_the_same_logits_on_packed_documents(saved: tuple[str, str], exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plan = StreamPlan(saved[1], seq_len=96, epochs=1)
    with StreamingLoader(plan, global_batch_size=4, uneven="pad") as loader:
        batch = next(iter(loader))
    theirs = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="sdpa")
    assert theirs.config.vocab_size == VOCABULARY
    ids, positions = batch["input_ids"], batch["position_ids"]
    documents = (positions == 0).cumsum(1)
    mask = (documents[:, :, None] == documents[:, None]) & torch.ones(96, 96, dtype=torch.bool).tril()
    with torch.no_grad():
        logits = theirs(ids, position_ids=positions, attention_mask=mask[:, None]).logits
        ours = model()(ids, positions, Documents(cu_seqlens=batch["cu_seqlens"], max_seqlen=96))
    assert documents.max() > 2
    assert (logits - ours.view(4, 96, -1)[..., :VOCABULARY]).abs().max() < 1e-5
    assert ours.abs().max() > 1
    words = AutoTokenizer.from_pretrained(exported)
    assert words.eos_token_id == 0
    assert words("one word9")["input_ids"] == [1, 9]


@pytest.mark.interop
def test_a_llama_that_transformers_saved_is_imported(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        rms_norm_eps=1e-5,
        rope_theta=5_000.0,
        initializer_range=0.3,
    )
    theirs = LlamaForCausalLM(settings)
    theirs.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    ours = model(seed=2)
    load_weights(str(tmp_path / "llama"), ours, num_ids=100)
    ids = torch.randint(100, (1, 40), generator=torch.Generator().manual_seed(0))
    documents = Documents(cu_seqlens=torch.tensor([0, 40], dtype=torch.int32), max_seqlen=40)
    with torch.no_grad():
        difference = theirs(ids).logits[0] - ours(ids, torch.arange(40)[None], documents)[:, :100]
    assert difference.abs().max() < 1e-5
