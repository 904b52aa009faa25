from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.container import Container, ContainerKind, StoredTensor
from muser_wire.model.families import llama
from muser_wire.model.fields import Fields
from muser_wire.model.spec import LayerSpec, LinearScaling, Llama3Scaling, RopeSpec

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
METADATA = {
    "general.architecture": "llama",
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.block_count": 2,
    "llama.vocab_size": 49152,
    "llama.context_length": 8192,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
}


def folder(**changes: Any) -> Container:
    path = Path("model")
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    return Container(path, ContainerKind.SAFETENSORS, Fields(path / "config.json", values), {})


def file(changes: dict[str, Any] | None = None, tensors: dict[str, tuple[int, ...]] | None = None) -> Container:
    path = Path("model.gguf")
    values = {key: value for key, value in {**METADATA, **(changes or {})}.items() if value is not ...}
    stored = {
        name: StoredTensor(name, path, shape, "F32", np.zeros(0, np.uint8)) for name, shape in (tensors or {}).items()
    }
    return Container(path, ContainerKind.GGUF, Fields(path, values), stored)


def test_a_config_becomes_a_spec() -> None:
    spec = llama.spec(folder())
    assert spec.family == "llama"
    assert spec.layers == (LayerSpec(window=None, rope=RopeSpec(100000.0, 64)),) * 2
    assert (spec.hidden_size, spec.ffn_size, spec.vocab_size, spec.max_positions) == (576, 1536, 49152, 8192)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.tied_embeddings) == (9, 3, 64, True)
    assert spec.norm_eps == struct.unpack("<f", struct.pack("<f", 1e-5))[0]


def test_both_containers_give_one_spec() -> None:
    assert llama.spec(file()) == llama.spec(folder())
    assert llama.spec(file()).digest() == llama.spec(folder()).digest()


def test_a_head_tensor_means_that_the_head_is_not_tied() -> None:
    assert not llama.spec(file(tensors={"output.weight": (49152, 576)})).tied_embeddings


def test_defaults_of_absent_fields() -> None:
    spec = llama.spec(folder(num_key_value_heads=..., rope_theta=..., tie_word_embeddings=...))
    assert (spec.kv_heads, spec.layers[0].rope, spec.tied_embeddings) == (9, RopeSpec(10000.0, 64), False)
    absent = dict.fromkeys(("llama.attention.head_count_kv", "llama.rope.freq_base", "llama.vocab_size"), ...)
    spec = llama.spec(file(absent, tensors={"token_embd.weight": (777, 576)}))
    assert (spec.kv_heads, spec.layers[0].rope, spec.vocab_size) == (9, RopeSpec(10000.0, 64), 777)


def test_an_explicit_head_size_need_not_divide_the_hidden_size() -> None:
    assert llama.spec(folder(head_dim=128)).head_dim == 128
    assert llama.spec(folder(head_dim=None)).head_dim == 64
    sizes = {"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32}
    assert llama.spec(file(sizes)).head_dim == 32


def test_theta_in_rope_parameters() -> None:
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    assert llama.spec(folder(rope_theta=..., rope_parameters=parameters)).layers[0].rope == RopeSpec(500000.0, 64)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": True}, "attention_bias is True: biases"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor is 4.0, not below"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, "rope_scaling holds x"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters holds partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": "576"}, "hidden_size is '576'"),
        ({"num_attention_heads": 7}, "head_dim is missing, and 7 heads do not divide a hidden size of 576"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, which does not divide 9"),
        ({"head_dim": 63}, "head_dim is 63; RoPE needs an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ],
)
def test_a_config_that_cannot_be_served_names_its_field(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^model/config\.json: {problem}"):
        llama.spec(folder(**changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.factor": 2.0}, "llama.rope.scaling.factor is 2.0"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.attention.sliding_window": 0}, "llama.attention.sliding_window is 0"),
        ({"llama.attention.head_count": [9, 9]}, r"llama.attention.head_count is \[9, 9\]"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length is 32"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count is 32"),
        ({"llama.vocab_size": ...}, "llama.vocab_size is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": ...}, "llama.attention.layer_norm_rms_epsilon is missing"),
    ],
)
def test_metadata_that_cannot_be_served_names_its_field(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^model\.gguf: {problem}"):
        llama.spec(file(changes))


def test_a_scaling_type_of_none_changes_nothing() -> None:
    assert llama.spec(file({"llama.rope.scaling.type": "none", "llama.expert_count": 0})) == llama.spec(file())


def test_the_two_containers_list_the_same_tensors() -> None:
    spec = llama.spec(folder(tie_word_embeddings=False))
    gguf, safetensors = (llama.entries(spec, container) for container in (file(), folder()))
    assert [(entry.name, entry.shape) for entry in gguf] == [(entry.name, entry.shape) for entry in safetensors]
    assert len(gguf) == 3 + 2 * 9
    assert {entry.name: entry.interleaved_heads for entry in gguf if entry.interleaved_heads} == {
        f"layers.{i}.attn.{part}.weight": heads for i in range(2) for part, heads in (("q", 9), ("k", 3))
    }
    assert not any(entry.interleaved_heads for entry in safetensors)
    assert not any(entry.centred for entry in gguf + safetensors)


def test_positions_stretched_evenly() -> None:
    spec = llama.spec(folder(rope_scaling={"type": "linear", "factor": 2.0}))
    assert spec.layers[0].rope == RopeSpec(100000.0, 64, LinearScaling(2.0))
    assert spec == llama.spec(file({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}))


def divisors(factor: float = 8.0, original: int = 8192, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """The divisors of Llama 3 as a converter writes them, from the wavelengths, for 32 pairs and a base of 1e5."""
    found = []
    for i in range(32):
        wavelength = 2 * np.pi * 100000.0 ** (i / 32)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, "<f4")


def stretched_file(values: np.ndarray, **changes: Any) -> Container:
    container = file(changes)
    stored = StoredTensor("rope_freqs.weight", container.path, values.shape, "F32", values.view(np.uint8))
    return replace(container, tensors={stored.name: stored})


def test_llama_3_s_stretching_is_the_same_from_numbers_and_from_divisors() -> None:
    spec = llama.spec(folder(rope_scaling=LLAMA3, tie_word_embeddings=True))
    rope = spec.layers[1].rope
    assert rope == RopeSpec(100000.0, 64, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert spec == llama.spec(stretched_file(divisors()))
    plain = 100000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(rope.inverse_frequencies(), plain / divisors(), rtol=1e-6)


def test_a_file_may_say_from_which_length_its_divisors_stretch() -> None:
    length = {"llama.rope.scaling.original_context_length": 256}
    spec = llama.spec(stretched_file(divisors(original=256), **length))
    assert spec == llama.spec(folder(rope_scaling={**LLAMA3, "original_max_position_embeddings": 256}))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        llama.spec(stretched_file(divisors(), **length))
    with pytest.raises(CheckpointError, match=r"original_context_length is there without rope_freqs\.weight"):
        llama.spec(file(length))


@pytest.mark.parametrize("wrong", [divisors(original=4096), divisors()[:16], divisors(low=2.0), -divisors()])
def test_other_divisors_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        llama.spec(stretched_file(wrong))


def test_a_mistral_config_slides_unless_it_says_null() -> None:
    assert llama.spec(folder(model_type="mistral", sliding_window=64)).layers[1].window == 64
    assert llama.spec(folder(model_type="mistral")).layers[1].window == 4096
    assert llama.spec(folder(model_type="mistral", sliding_window=None)).layers[1].window is None
    slides = llama.spec(file({"llama.attention.sliding_window": 64}))
    assert slides == llama.spec(folder(model_type="mistral", sliding_window=64))


def test_neutral_values_of_what_llama_has_not() -> None:
    spec = llama.spec(folder())
    assert (spec.attention_scale, spec.qk_norm, spec.attention_gate, spec.post_norm_eps) == (0.125, None, False, None)
    assert (spec.activation, spec.embedding_scale, spec.embedding_norm) == ("silu", 1.0, False)
    assert (spec.logit_scale, spec.logit_softcap) == (1.0, None)
