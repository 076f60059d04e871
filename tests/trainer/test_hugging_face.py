"""Weights to Hugging Face's format and back; with transformers itself in `make test-interop`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
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
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
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
        ({"model_type": "gpt2"}, "cannot train: model_type is .gpt2. .supported: .llama. or .qwen3.."),
        ({"attention_bias": True, "hidden_act": "gelu"}, "hidden_act is .gelu. .*; attention_bias is true"),
        ({"use_sliding_window": True}, "cannot train: use_sliding_window is true .supported: false."),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*sliding_attention.* .supported: "),
        ({"quantization_config": {"bits": 4}}, "cannot train: quantization_config is {.bits.: 4}"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5_000.0}}, "cannot train: rope_type is .yarn."),
        ({"hidden_size": 64}, "model.dim is 64 there, 32 here"),
        ({"rms_norm_eps": 1e-6}, "model.norm_eps is 1e-06 there"),
        ({"model_type": "qwen3"}, "model.qk_norm is True there, False here"),
        ({"rope_parameters": {"rope_theta": 5_000.0} | LLAMA_3}, "model.rope_factor is 8.0 there, 1.0 here"),
        ({"rope_parameters": None, "rope_theta": 10_000.0}, "model.rope_theta is 10000.0 there"),
        ({"head_dim": 16}, "model.head_dim is 16 there, 8 here"),
        ({"vocab_size": 63}, "has 63 ids, the corpora 64 and the model 128"),
        ({"vocab_size": 129}, "has 129 ids, the corpora 64 and the model 128"),
        ({"vocab_size": 65}, r"embed_tokens.weight is \(64, 32\), expected \(65, 32\)"),
    ],
)
def test_weights_of_another_model_are_refused(
    exported: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    kind = TrainerError if "expected" in problem else UsageError  # files that contradict each other are damage
    with pytest.raises(kind, match=problem):
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


def test_a_refusal_names_the_settings_that_fit(exported: Path, tmp_path: Path) -> None:
    path = edit(exported, tmp_path / "other", hidden_size=64, rms_norm_eps=1e-6)
    with pytest.raises(UsageError) as error:
        load_weights(path, model(), num_ids=VOCABULARY)
    assert error.value.hint == "train these weights with model.dim=64 model.norm_eps=1e-06"


def test_nothing_is_loaded_from_weights_that_are_refused(exported: Path, tmp_path: Path) -> None:
    path = edit(exported, tmp_path / "other")
    tensors = safetensors.load_file(exported / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    safetensors.save_file(tensors, tmp_path / "other" / "model.safetensors")
    found, before = model(seed=2), model(seed=2).state_dict()
    with pytest.raises(TrainerError, match=r"model.norm.weight is \(31,\), expected \(32,\)"):
        load_weights(path, found, num_ids=VOCABULARY)
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())


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
    assert not (tmp_path / "other").exists()


@pytest.mark.interop
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exported_and_imported_with_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
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
    theirs.save_pretrained(tmp_path / "theirs")
    ours = model(shape, seed=2)
    assert load_weights(str(tmp_path / "theirs"), ours, num_ids=100) == [f"{tmp_path / 'theirs'}: weights alone"]
    ids = torch.randint(100, (1, 256), generator=torch.Generator().manual_seed(0))
    documents = Documents(cu_seqlens=torch.tensor([0, 256], dtype=torch.int32), max_seqlen=256)
    with torch.no_grad():
        logits, found = theirs(ids).logits[0], ours(ids, torch.arange(256)[None], documents)
    assert (logits - found).abs().max() < 1e-5 * max(1, logits.abs().max())
    assert logits.abs().max() > 1

    fields = configuration({"code": str(tmp_path / "none")}, tmp_path, data__weights={})
    fields["model"] = {"preset": "10M", **SIZES, "vocab_size": 100, **FAMILIES[family]}
    tensors = checkpoint.tensors_of(ours, make_optimizer(ours, resolve(fields).optimizer))
    path = checkpoint.save(str(tmp_path / "saved"), tensors, State(step=1, loader={}, config=fields))
    list(export(path, str(tmp_path / "exported")))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(ids).logits[0], logits)


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
