"""Weights to the format of Hugging Face and back, and published models; with transformers in `make test-interop`."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.trainer.checkpoints import alone, initialised
from tests.trainer.runs import VOCABULARY, as_toml, configuration, corpus
from tokshard.errors import CorpusError, TokshardError, UsageError
from tokshard.run_files.checkpoint_directory import State
from tokshard.run_files.model_shape import Shape, model_shape
from tokshard.run_files.recipe import load_config, resolve
from tokshard.trainer import checkpoint, hugging_face
from tokshard.trainer.attention import Documents
from tokshard.trainer.hugging_face import export, load_weights, main
from tokshard.trainer.loop import train
from tokshard.trainer.model import Transformer, num_parameters
from tokshard.trainer.optimizer import make_optimizer

SIZES = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 48, "rope_theta": 5_000.0}
PADDED = Shape(**SIZES, vocab_size=128)
SCALED = {"rope_factor": 8.0, "rope_original_length": 64}
"""The same, as the trainer has it."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 3.2": {"tied_embeddings": True, **SCALED},
    "Llama 3.1": SCALED,
    "Qwen3": {"qk_norm": True, "head_dim": 16, "norm_eps": 1e-6, "tied_embeddings": True},
    "Qwen3 8B": {"qk_norm": True, "head_dim": 16, "norm_eps": 1e-6},
    "SmolLM": {"dim": 36, "num_heads": 9, "num_kv_heads": 3, "tied_embeddings": True},
}
"""What differs from `SIZES`."""

safetensors = pytest.importorskip("safetensors.torch", reason="pip install 'tokshard[safetensors]'")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


def model(shape: Shape = PADDED, *, seed: int = 1) -> Transformer:
    made = initialised(shape, seed=seed)
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


@pytest.mark.parametrize(("file_bytes", "num_files"), [(20_000, 6), (60_000, 2)])
def test_several_files_and_bf16_round_once(
    saved: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int, num_files: int
) -> None:
    monkeypatch.setattr(hugging_face, "FILE_BYTES", file_bytes)
    list(export(saved[0], str(tmp_path / "out"), dtype="bf16"))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{num_files:05}.safetensors" for number in range(1, num_files + 1)]
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


def test_a_head_that_is_tied_to_the_embedding_is_copied_from_it_with_a_word(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "tied")
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = safetensors.load_file(exported / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.save_file(tensors, folder / "model.safetensors")
    found = model(seed=2)
    assert "are trained apart" in load_weights(str(folder), found, num_ids=VOCABULARY)[1]
    assert torch.equal(found.head.weight, found.embedding.weight)
    assert torch.equal(found.head.weight[:VOCABULARY], model().embedding.weight[:VOCABULARY])


def test_the_command_exports_and_says_when_a_disk_fails(
    saved: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [saved[0], "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "model.safetensors: 21 tensors" in capsys.readouterr().out
    with open("/dev/full", "w", encoding="utf-8") as full, contextlib.redirect_stdout(full):
        assert main([saved[0], "--out", str(tmp_path / "unsaid")]) == 1
    assert "standard output cannot be written: No space left" in capsys.readouterr().err
    with patch("tokshard.trainer.hugging_face.check_hashes", side_effect=OSError(5, "Input/output error")):
        assert main([saved[0], "--out", str(tmp_path / "other")]) == 1
    assert "step-00000007 cannot be read: [Errno 5]" in capsys.readouterr().err
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(tmp_path / "out" / "model.safetensors") - 1, hard))
    try:
        assert main([saved[0], "--out", str(tmp_path / "other")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "other cannot be written: " in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["out", "unsaid"]


@pytest.mark.interop
def test_transformers_reads_the_model_and_the_tokenizer_that_were_exported(exported: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    assert AutoConfig.from_pretrained(exported).vocab_size == VOCABULARY
    words = AutoTokenizer.from_pretrained(exported)
    assert (words.eos_token_id, words("one word9")["input_ids"]) == (0, [1, 9])


def test_the_gradient_of_a_tied_embedding_is_the_sum_of_those_of_both_its_uses() -> None:
    tied, apart = model(replace(PADDED, tied_embeddings=True)), model(PADDED)
    assert "head.weight" not in dict(tied.named_parameters())
    with torch.no_grad():
        apart.head.weight.copy_(apart.embedding.weight)
    ids = torch.randint(128, (1, 40), generator=torch.Generator().manual_seed(0))
    documents = Documents(cu_seqlens=torch.tensor([0, 40], dtype=torch.int32), max_seqlen=40)
    losses = []
    for net, chunk in ((tied, 16), (apart, 0)):
        net.head.loss_chunk = chunk
        losses.append(net(ids, torch.arange(40)[None], documents, ids.roll(-1)).sum())
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    expected = apart.embedding.weight.grad + apart.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, expected, atol=1e-4, rtol=1e-5)


def test_a_chat_template_and_settings_are_copied_with_the_tokenizer_that_they_are_of(
    saved: tuple[str, str], exported: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "tokenizer.json").write_bytes((exported / "tokenizer.json").read_bytes())
    lines = list(export(saved[0], str(tmp_path / "out"), tokenizer=str(folder)))
    assert lines[0] == f"tokenizer_config.json, chat_template.jinja of {folder}"
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    fields = json.loads((folder / "tokenizer.json").read_text()) | {"version": "2.0"}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(UsageError, match="does not have the tokenizer of the corpus"):
        list(export(saved[0], str(tmp_path / "other"), tokenizer=str(folder)))
    (folder / "tokenizer.json").write_text("[1")
    with pytest.raises(UsageError, match="does not have the tokenizer of the corpus"):
        list(export(saved[0], str(tmp_path / "other"), tokenizer=str(folder)))
    assert not (tmp_path / "other").exists()


@pytest.mark.interop
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_logits_of_transformers_on_packed_documents(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = Shape(**SIZES | {"vocab_size": 100} | FAMILIES[family])
    out = str(tmp_path / "config")
    os.mkdir(out)
    hugging_face.write_config(out, shape, seq_len=256, dtype="fp32", special={})
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if "Qwen" in family else "LlamaForCausalLM")
    for name, value in theirs.named_parameters():
        value.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours = model(shape, seed=2)
    assert load_weights(str(tmp_path / "theirs"), ours, num_ids=100) == [f"{tmp_path / 'theirs'}: weights alone"]
    ids = torch.randint(100, (1, 256), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, 90, 91, 256], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in bounds.diff()])[None]
    of = (positions == 0).cumsum(1)
    mask = (of[:, :, None] == of[:, None]) & torch.ones(256, 256, dtype=torch.bool).tril()
    packed = {"position_ids": positions, "attention_mask": mask[:, None]}
    with torch.no_grad():
        logits = theirs(ids, **packed).logits[0]
        found = ours(ids, positions, Documents(cu_seqlens=bounds, max_seqlen=256))
    assert (logits - found).abs().max() < 1e-5 * max(1, logits.abs().max())
    assert logits.abs().max() > 1

    fields = configuration({"code": str(tmp_path / "none")}, tmp_path, data__weights={})
    fields["model"] = {"preset": "10M", **SIZES, "vocab_size": 100, **FAMILIES[family]}
    tensors = checkpoint.tensors_of(ours, make_optimizer(ours, resolve(fields).optimizer))
    path = checkpoint.save(str(tmp_path / "saved"), tensors, State(step=1, loader={}, config=fields))
    list(export(path, str(tmp_path / "exported")))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(ids, **packed).logits[0], logits)


def config(model_type: str, sizes: tuple[int, ...], theta: float, eps: float, **more: Any) -> dict[str, Any]:
    """The part of a published config.json that says what the weights are."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        "model_type": model_type,
        **dict(zip((*names, "vocab_size"), sizes, strict=True)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": theta,
        "rope_scaling": None,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        **more,
    }


SCALING = {"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
SCALING |= {"original_max_position_embeddings": 8_192}
WINDOWS = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36}
TRAINED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Llama 3.2 1B": (
        config("llama", (2048, 8192, 16, 32, 8, 128_256), 5e5, 1e-5, rope_scaling=SCALING, tie_word_embeddings=True),
        1_235_814_400,
        {"rope_theta": 5e5, "rope_factor": 32.0, "rope_original_length": 8_192, "tied_embeddings": True},
    ),
    "Qwen3 8B": (
        config("qwen3", (4096, 12288, 36, 32, 8, 151_936), 1_000_000, 1e-6, **WINDOWS),  # head_dim is 128 by default
        8_190_735_360,
        {"qk_norm": True, "head_size": 128, "rope_theta": 1_000_000, "rope_factor": 1.0, "tied_embeddings": False},
    ),
    "SmolLM2 135M": (
        config("llama", (576, 1536, 30, 9, 3, 49_152), 100_000, 1e-5, rope_interleaved=False, tie_word_embeddings=True),
        134_515_008,
        {"qk_norm": False, "rope_theta": 100_000, "rope_factor": 1.0, "tied_embeddings": True},
    ),
}
"""config.json, the number of parameters that is published with it, and some settings of the model."""


def without_values(shape: Shape) -> Transformer:
    with torch.device("meta"):
        return Transformer(shape)


def shape_of(settings: list[str], directory: Path) -> Shape:
    """The model of a recipe with additional settings."""
    recipe = directory / "recipe.toml"
    recipe.write_text(as_toml(configuration({"code": "code"}, directory, data__weights={})))
    return model_shape(load_config(str(recipe), settings).model, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_the_settings_that_a_refusal_names_make_the_published_model(name: str, tmp_path: Path) -> None:
    fields, parameters, expected = TRAINED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    num_ids = fields["vocab_size"]
    vocabulary = f"model.vocab_size={num_ids}"
    with pytest.raises(UsageError, match="is of another model") as refusal:
        load_weights(str(tmp_path), without_values(shape_of([vocabulary], tmp_path)), num_ids=num_ids)
    settings = refusal.value.hint.removeprefix("train these weights with ").split()
    shape = shape_of([vocabulary, *settings], tmp_path)
    found = without_values(shape)
    assert num_parameters(found) == parameters
    expected = {**expected, "norm_eps": fields["rms_norm_eps"]}
    assert {key: getattr(shape, key) for key in expected} == expected
    with pytest.raises(TokshardError, match=r"model\.safetensors"):  # nothing but the weights is missing
        load_weights(str(tmp_path), found, num_ids=num_ids)
