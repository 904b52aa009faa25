from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import qwen3
from muser_wire.model.fields import Fields
from muser_wire.model.spec import LinearScaling, QKNorm, RopeSpec, as_f32

CONFIG = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
METADATA = {
    "general.architecture": "qwen3",
    "qwen3.attention.head_count": 16,
    "qwen3.attention.head_count_kv": 8,
    "qwen3.attention.key_length": 128,
    "qwen3.attention.value_length": 128,
    "qwen3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "qwen3.block_count": 28,
    "qwen3.context_length": 40960,
    "qwen3.embedding_length": 1024,
    "qwen3.feed_forward_length": 3072,
    "qwen3.rope.freq_base": 1000000.0,
    "qwen3.vocab_size": 151936,
}


def folder(**changes: Any) -> Container:
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    return Container(Path("m"), ContainerKind.SAFETENSORS, Fields(Path("m/config.json"), values), {})


def file(**changes: Any) -> Container:
    values = {**METADATA, **{f"qwen3.{key.replace('__', '.')}": value for key, value in changes.items()}}
    return Container(Path("m.gguf"), ContainerKind.GGUF, Fields(Path("m.gguf"), values), {})


def test_a_published_config_and_its_file_give_one_spec() -> None:
    spec = qwen3.spec(folder())
    assert spec == qwen3.spec(file())
    assert spec.qk_norm == QKNorm(weighted=True, eps=as_f32(1e-6))
    assert {layer.window for layer in spec.layers} == {None}
    assert spec.layers[0].rope == RopeSpec(1000000.0, 128)
    assert (spec.heads * spec.head_dim, spec.hidden_size, spec.attention_scale) == (2048, 1024, as_f32(128**-0.5))


def test_names_in_both_containers() -> None:
    spec = qwen3.spec(folder())
    for container, q_norm in (
        (folder(), "model.layers.3.self_attn.q_norm.weight"),
        (file(), "blk.3.attn_q_norm.weight"),
    ):
        entries = {entry.name: entry for entry in qwen3.entries(spec, container)}
        assert entries["layers.3.attn.q_norm.weight"].source == q_norm
        assert entries["layers.3.attn.k_norm.weight"].shape == (128,)
        assert len(entries) == 2 + 28 * 11
        # Neither container permutes rows or holds norms less one.
        assert not any(entry.interleaved_heads or entry.centred for entry in entries.values())


def test_windows_of_the_upper_layers() -> None:
    spec = qwen3.spec(folder(use_sliding_window=True, sliding_window=4096, max_window_layers=20))
    assert [layer.window for layer in spec.layers] == [None] * 20 + [4096] * 8
    kinds = ["sliding_attention"] + ["full_attention"] * 27
    spec = qwen3.spec(folder(use_sliding_window=True, sliding_window=64, layer_types=kinds))
    assert [layer.window for layer in spec.layers] == [64] + [None] * 27


def test_stretched_positions() -> None:
    spec = qwen3.spec(file(rope__scaling__type="linear", rope__scaling__factor=4.0))
    assert spec.layers[0].rope == RopeSpec(1000000.0, 128, LinearScaling(4.0))
    parameters = {"rope_type": "linear", "rope_theta": 1000000, "factor": 4.0}
    assert spec == qwen3.spec(folder(rope_theta=..., rope_parameters=parameters))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": True}, "attention_bias is True: biases"),
        ({"layer_types": ["sliding_attention"] * 28}, "layer_types names sliding_attention, and use_sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types does not name a kind for each of 28 layers"),
        ({"layer_types": ["linear_attention"] * 28}, "layer_types names 'linear_attention'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^m/config\.json: {problem}"):
        qwen3.spec(folder(**changes))


def test_a_field_that_nobody_reads_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"qwen3\.rope\.scaling\.type is 'yarn'"):
        qwen3.spec(file(rope__scaling__type="yarn"))
    with pytest.raises(CheckpointError, match=r"qwen3\.attention\.sliding_window is 64"):
        qwen3.spec(file(attention__sliding_window=64))
