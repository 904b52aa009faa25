from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import gemma3
from muser_wire.model.fields import Fields
from muser_wire.model.safetensors import read_safetensors
from muser_wire.model.spec import Activation, LinearScaling, ModelSpec, QKNorm, RopeSpec, as_f32
from muser_wire.model.tiny import safetensors_bytes, write_tiny

# What the 4B model's config says of its text decoder: everything else is the family's default.
SPARSE = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
METADATA = {
    "general.architecture": "gemma3",
    "gemma3.attention.head_count": 8,
    "gemma3.attention.head_count_kv": 4,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma3.attention.sliding_window": 1024,
    "gemma3.block_count": 34,
    "gemma3.context_length": 131072,
    "gemma3.embedding_length": 2560,
    "gemma3.feed_forward_length": 10240,
    "gemma3.rope.freq_base": 1000000.0,
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 8.0,
    "gemma3.vocab_size": 262208,
}


def spec_of(text: dict[str, Any]) -> ModelSpec:
    fields = Fields(Path("m/config.json"), {"model_type": "gemma3", "text_config": text})
    return gemma3.spec(Container(Path("m"), ContainerKind.SAFETENSORS, fields, {}))


def file_spec(**changes: Any) -> ModelSpec:
    values = {**METADATA, **{f"gemma3.{key.replace('__', '.')}": value for key, value in changes.items()}}
    return gemma3.spec(Container(Path("m.gguf"), ContainerKind.GGUF, Fields(Path("m.gguf"), values), {}))


def test_a_nested_sparse_config_takes_the_family_s_defaults() -> None:
    spec = spec_of(SPARSE)
    assert [i for i, layer in enumerate(spec.layers) if layer.window is None] == [5, 11, 17, 23, 29]
    assert spec.layers[0].window == 1024
    assert spec.layers[0].rope == RopeSpec(10_000.0, 256)
    assert spec.layers[5].rope == RopeSpec(1_000_000.0, 256, LinearScaling(8.0))
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert (spec.activation, spec.tied_embeddings, spec.logit_softcap) == (Activation.GELU_TANH, True, None)
    assert spec.qk_norm == QKNorm(weighted=True, eps=as_f32(1e-6))
    assert spec.post_norm_eps == as_f32(1e-6)
    assert (spec.attention_scale, spec.embedding_scale) == (1 / 16, as_f32(math.sqrt(2560)))


def test_a_file_gives_the_same_spec() -> None:
    assert file_spec() == spec_of(SPARSE)


def test_positions_in_the_newer_form() -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    newer = {key: value for key, value in SPARSE.items() if key != "rope_scaling"} | {"rope_parameters": parameters}
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(34)]
    assert spec_of({**newer, "layer_types": kinds}) == spec_of(SPARSE)


def test_the_scale_of_scores_is_its_own_number() -> None:
    wide = {"num_hidden_layers": 62, "num_attention_heads": 32, "hidden_size": 5376, "head_dim": 128}
    spec = spec_of({**SPARSE, **wide, "query_pre_attn_scalar": 168})
    assert spec.attention_scale == as_f32(168**-0.5)
    sizes = {"attention__head_count": 32, "attention__key_length": 128, "attention__value_length": 128}
    assert file_spec(block_count=62, embedding_length=5376, **sizes) == spec
    assert file_spec(attention__scale=0.5).attention_scale == 0.5


def test_a_pattern_in_the_file_is_read() -> None:
    assert file_spec(attention__sliding_window_pattern=6) == file_spec()
    pattern = [i % 2 == 0 for i in range(34)]
    spec = file_spec(attention__sliding_window_pattern=pattern)
    assert [layer.window is not None for layer in spec.layers] == pattern
    with pytest.raises(CheckpointError, match="does not give a truth value for each of 34 layers"):
        file_spec(attention__sliding_window_pattern=[True])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters is"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type is 'yarn'"),
        ({"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^m/config\.json: {problem}"):
        spec_of({**SPARSE, **changes})


def test_the_real_file(gemma3_270m: Path) -> None:
    checkpoint = open_checkpoint(gemma3_270m)
    spec = checkpoint.spec
    assert [layer.window for layer in spec.layers] == [*[512] * 5, None] * 3
    assert [layer.rope.theta for layer in spec.layers[4:6] if layer.rope] == [10_000.0, 1_000_000.0]
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (4, 1, 256, 262_144)
    assert len(checkpoint.names()) == 18 * 13 + 2
    assert checkpoint.weight("layers.0.attn.o.weight").encoding == "Q4_K"
    # 1 + w is in the file already: a typical multiplier of this model is far from 1.
    assert checkpoint.weight("layers.0.attn_norm.weight").f32().mean() > 2


def nest(folder: Path, prefix: str, head: str) -> None:
    """Rewrite a tiny text checkpoint as the multimodal one that it could be a part of."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    path = folder / "model.safetensors"
    tensors = {name: t.f32(0, t.shape[0]) for name, t in read_safetensors(path).items()}
    renamed = {
        head if name == "lm_head.weight" else prefix + name.removeprefix("model."): values
        for name, values in tensors.items()
    }
    vision = {f"{where}.x.weight": np.ones((2, 2), np.float32) for where in ("vision_tower", "multi_modal_projector")}
    path.write_bytes(safetensors_bytes({**renamed, **vision}, "F32"))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("language_model.model.", "language_model.lm_head.weight"), ("model.language_model.", "lm_head.weight")],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_nested_checkpoint_is_the_same_model_and_says_what_it_leaves_aside(
    tmp_path: Path, prefix: str, head: str, tied: bool
) -> None:
    for name in ("plain", "nested"):
        write_tiny("gemma3", tmp_path / name, tied=tied)
    nest(tmp_path / "nested", prefix, head)
    plain, nested = open_checkpoint(tmp_path / "plain"), open_checkpoint(tmp_path / "nested")
    assert plain.spec == nested.spec
    assert nested.asides == {"vision": 2}
    for name in plain.names():
        np.testing.assert_array_equal(plain.weight(name).f32(), nested.weight(name).f32(), err_msg=name)


def test_norms_get_their_one(tmp_path: Path) -> None:
    write_tiny("gemma3", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    stored = read_safetensors(tmp_path / "model.safetensors")
    pairs = {
        "layers.2.attn_norm": "model.layers.2.input_layernorm",
        "layers.2.attn.q_norm": "model.layers.2.self_attn.q_norm",
        "layers.2.attn.k_norm": "model.layers.2.self_attn.k_norm",
        "layers.2.attn_post_norm": "model.layers.2.post_attention_layernorm",
        "layers.2.mlp_norm": "model.layers.2.pre_feedforward_layernorm",
        "layers.2.mlp_post_norm": "model.layers.2.post_feedforward_layernorm",
        "final_norm": "model.norm",
    }
    for name, source in pairs.items():
        values = stored[f"{source}.weight"].data.view("<f4")
        np.testing.assert_array_equal(checkpoint.weight(f"{name}.weight").f32(), np.float32(1) + values)
