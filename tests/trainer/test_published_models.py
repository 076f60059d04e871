"""The config.json of models that people continue from: which of them can be trained, and with which settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tokshard.errors import TokshardError, UsageError
from tokshard.run_files.model_shape import Shape, model_shape
from tokshard.run_files.recipe import Parallel, load_config
from tokshard.trainer.hugging_face import load_weights
from tokshard.trainer.loop import num_parameters
from tokshard.trainer.model import Transformer
from tokshard.trainer.parallel import process_group

pytest.importorskip("safetensors.torch", reason="pip install 'tokshard[safetensors]'")


def config(model_type: str, sizes: tuple[int, ...], theta: float, eps: float, **more: Any) -> dict[str, Any]:
    """The part of a published config.json that says what the weights are."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        "model_type": model_type,
        **dict(zip((*names, "vocab_size"), sizes, strict=True)),
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": theta,
        "rope_scaling": None,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        **more,
    }


def llama_3(sizes: tuple[int, ...], factor: float, **more: Any) -> dict[str, Any]:
    scaling = {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    scaling["original_max_position_embeddings"] = 8_192
    return config("llama", (*sizes, 128_256), 500_000.0, 1e-5, mlp_bias=False, rope_scaling=scaling, **more)


def qwen3(sizes: tuple[int, ...], *, tied: bool) -> dict[str, Any]:
    windows = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": sizes[2]}
    return config("qwen3", (*sizes, 151_936), 1_000_000, 1e-6, head_dim=128, tie_word_embeddings=tied, **windows)


def smollm2(sizes: tuple[int, ...], theta: int) -> dict[str, Any]:
    more = {"tie_word_embeddings": True, "rope_interleaved": False, "mlp_bias": False}
    return config("llama", (*sizes, 49_152), theta, 1e-5, **more)


LLAMA_ROPE = {"rope_theta": 500_000.0, "rope_factor": 8.0, "rope_original_length": 8_192, "norm_eps": 1e-5}
QWEN = {"qk_norm": True, "head_size": 128, "rope_theta": 1_000_000, "rope_factor": 1.0, "norm_eps": 1e-6}
SMOL = {"qk_norm": False, "tied_embeddings": True, "norm_eps": 1e-5, "rope_factor": 1.0}
TRAINED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Llama 3.1 8B": (llama_3((4096, 14336, 32, 32, 8), 8.0), 8_030_261_248, LLAMA_ROPE),
    "Llama 3.2 1B": (
        llama_3((2048, 8192, 16, 32, 8), 32.0, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
        LLAMA_ROPE | {"rope_factor": 32.0, "tied_embeddings": True, "head_size": 64},
    ),
    "Llama 3.3 70B": (llama_3((8192, 28672, 80, 64, 8), 8.0, head_dim=128), 70_553_706_496, LLAMA_ROPE),
    "Qwen3 0.6B": (qwen3((1024, 3072, 28, 16, 8), tied=True), 596_049_920, QWEN | {"tied_embeddings": True}),
    "Qwen3 1.7B": (qwen3((2048, 6144, 28, 16, 8), tied=True), 1_720_574_976, QWEN | {"tied_embeddings": True}),
    "Qwen3 8B": (qwen3((4096, 12288, 36, 32, 8), tied=False), 8_190_735_360, QWEN | {"tied_embeddings": False}),
    "Qwen3 32B": (qwen3((5120, 25600, 64, 64, 8), tied=False), 32_762_123_264, QWEN | {"tied_embeddings": False}),
    "SmolLM2 135M": (smollm2((576, 1536, 30, 9, 3), 100_000), 134_515_008, SMOL | {"rope_theta": 100_000}),
    "SmolLM2 1.7B": (smollm2((2048, 8192, 24, 32, 32), 130_000), 1_711_376_384, SMOL | {"rope_theta": 130_000}),
}
"""config.json, the number of parameters that is published with it, and some settings of the model."""

SMOLLM_3 = (2048, 11008, 36, 16, 4, 128_256)
NOT_TRAINED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "SmolLM3 3B": (
        config("smollm3", SMOLLM_3, 5_000_000.0, 1e-6, no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4),
        ['model_type is "smollm3" (supported: "llama" or "qwen3")', "no_rope_layers is [1, 1, 1, 0, 1, "],
    ),
    "OLMo 2 7B": (
        config("olmo2", (4096, 11008, 32, 32, 32, 100_352), 500_000, 1e-6),
        ['model_type is "olmo2" (supported: "llama" or "qwen3")'],
    ),
    "Mistral 7B": (
        config("mistral", (4096, 14336, 32, 32, 8, 32_000), 10_000.0, 1e-5, sliding_window=4096),
        ['model_type is "mistral" (supported: "llama" or "qwen3")', "sliding_window is 4096 (supported: null)"],
    ),
    "Qwen2.5 7B, with biases that its file does not name": (
        config("qwen2", (3584, 18944, 28, 28, 4, 152_064), 1_000_000.0, 1e-6, use_sliding_window=False),
        ['model_type is "qwen2" (supported: "llama" or "qwen3")'],
    ),
    "a Llama with biases": (
        config("llama", (4096, 11008, 32, 32, 32, 32_000), 10_000.0, 1e-5, attention_bias=True, mlp_bias=True),
        ["attention_bias is true (supported: false)", "mlp_bias is true (supported: false)"],
    ),
    "Qwen3 8B for long texts": (
        qwen3((4096, 12288, 36, 32, 8), tied=False) | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ['rope_type is "yarn" (supported: "default" or "llama3")'],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(Parallel(device="cpu")):
        yield


def without_values(shape: Shape) -> Transformer:
    with torch.device("meta"):
        return Transformer(shape)


def shape_of(settings: list[str], directory: Path) -> Shape:
    """The model of a recipe with additional settings."""
    recipe = directory / "recipe.toml"
    recipe.write_text(
        '[data]\nseq_len = 32\nglobal_batch_size = 4\ncorpora = { code = "code" }\n[train]\nout = "out"\nsteps = 1\n'
    )
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
    assert {key: getattr(shape, key) for key in expected} == expected
    with pytest.raises(TokshardError, match=r"model\.safetensors"):  # nothing but the weights is missing
        load_weights(str(tmp_path), found, num_ids=num_ids)


@pytest.mark.parametrize("name", NOT_TRAINED)
def test_a_model_that_cannot_be_trained_is_refused_by_what_it_has_and_what_is_supported(
    name: str, tmp_path: Path
) -> None:
    fields, problems = NOT_TRAINED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UsageError, match="has what the trainer cannot train") as refusal:
        load_weights(str(tmp_path), without_values(shape_of([], tmp_path)), num_ids=1)
    for problem in problems:
        assert problem in refusal.value.problem
