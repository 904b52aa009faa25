from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.container import Container, ContainerKind, StoredTensor
from muser_wire.model.families import muse_glimmer
from muser_wire.model.fields import Fields
from muser_wire.model.safetensors import read_safetensors
from muser_wire.model.spec import Activation, ModelSpec, QKNorm, RopeSpec, as_f32
from muser_wire.model.tiny import safetensors_bytes, write_tiny
from muser_wire.model.tiny_gguf import write_tiny_gguf

TEXT = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
METADATA = {
    "general.architecture": "muse-glimmer",
    "muse-glimmer.attention.head_count": 32,
    "muse-glimmer.attention.head_count_kv": 2,
    "muse-glimmer.attention.key_length": 128,
    "muse-glimmer.attention.value_length": 128,
    "muse-glimmer.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "muse-glimmer.attention.sliding_window": 2048,
    "muse-glimmer.attention.sliding_window_pattern": [True, True, True, False] * 13,
    "muse-glimmer.block_count": 52,
    "muse-glimmer.context_length": 131072,
    "muse-glimmer.embedding_length": 6656,
    "muse-glimmer.feed_forward_length": 19968,
    "muse-glimmer.final_logit_softcapping": 20.0,
    "muse-glimmer.logit_scale": 0.19611613452434540,
    "muse-glimmer.rope.freq_base": 500000.0,
    "muse-glimmer.vocab_size": 202048,
}


def spec_of(text: dict[str, Any]) -> ModelSpec:
    fields = Fields(Path("m/config.json"), {"model_type": "muse_glimmer", "text_config": {**TEXT, **text}})
    return muse_glimmer.spec(Container(Path("m"), ContainerKind.SAFETENSORS, fields, {}))


def norms(layers: int = 52, query: float = 3.87, key: float = 1.0) -> dict[str, np.ndarray]:
    return {
        f"blk.{i}.attn_{part}_norm.weight": np.full(128, value, "<f4")
        for i in range(layers)
        for part, value in (("q", query), ("k", key))
    }


def file(tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Container:
    path = Path("m.gguf")
    renamed = {f"muse-glimmer.{key.replace('__', '.')}": value for key, value in changes.items()}
    values = {key: value for key, value in {**METADATA, **renamed}.items() if value is not ...}
    arrays = norms() if tensors is None else tensors
    stored = {
        name: StoredTensor(name, path, array.shape, "F32", array.reshape(-1).view(np.uint8))
        for name, array in arrays.items()
    }
    stored["output.weight"] = StoredTensor("output.weight", path, (202048, 6656), "F32", np.zeros(0, np.uint8))
    return Container(path, ContainerKind.GGUF, Fields(path, values), stored)


def test_the_published_shape() -> None:
    spec = spec_of({})
    assert [i for i, layer in enumerate(spec.layers) if layer.window is None] == list(range(3, 52, 4))
    assert {layer.rope for layer in spec.layers if layer.window is None} == {None}
    assert {(layer.window, layer.rope) for layer in spec.layers if layer.window} == {(2048, RopeSpec(500_000.0, 128))}
    assert spec.attention_scale == pytest.approx(3.87 / np.sqrt(128), rel=1e-7)
    assert spec.qk_norm == QKNorm(weighted=False, eps=as_f32(1e-5))
    assert (spec.attention_gate, spec.embedding_norm, spec.activation) == (True, True, Activation.SILU)
    assert (spec.post_norm_eps, spec.logit_softcap) == (as_f32(1e-8), 20.0)
    assert (spec.logit_scale, spec.embedding_scale) == (as_f32(26**-0.5), 1.0)
    assert not spec.tied_embeddings


def test_a_file_gives_the_same_spec_and_731_tensors() -> None:
    container = file()
    spec = muse_glimmer.spec(container)
    assert spec == spec_of({})
    # 14 in each of 52 blocks and 3 outside; two of the 14 are constants that the description takes in.
    assert len(muse_glimmer.entries(spec, container)) + len(norms()) == 14 * 52 + 3 == 731


def test_what_a_file_may_leave_out_or_write_otherwise() -> None:
    expected = spec_of({})
    for changes in (
        {"final_logit_softcapping": ...},
        {"attention__sliding_window_pattern": 4},
        {"attention__sliding_window_pattern": ...},
        {"rope__freq_base": 10_000.0, "rope__freq_base_swa": 500_000.0},
    ):
        assert muse_glimmer.spec(file(**changes)) == expected, changes


def test_the_pattern_counts_from_the_last_layer() -> None:
    spec = spec_of({"num_hidden_layers": 7})
    assert [layer.window for layer in spec.layers] == [2048, 2048, None, 2048, 2048, 2048, None]
    assert [layer.rope is None for layer in spec.layers] == [False, False, True, False, False, False, True]


def test_kinds_and_bases_of_layers_are_read_apart() -> None:
    kinds = ["full_attention", "sliding_attention"]
    spec = spec_of({"num_hidden_layers": 2, "layer_types": kinds, "layer_rope_theta": [500_000.0, 0]})
    assert [(layer.window, layer.rope) for layer in spec.layers] == [(None, RopeSpec(500_000.0, 128)), (2048, None)]


def test_kinds_alone_say_which_layers_have_no_positions_where_both_rules_agree() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention"] * 3
    assert spec_of({"num_hidden_layers": 7, "layer_types": [*kinds, "full_attention"]}) == spec_of(
        {"num_hidden_layers": 7}
    )


@pytest.mark.parametrize(
    ("count", "full"),
    # As a count from the first layer would have it; two full layers in place of one; none at all.
    [(7, (3,)), (4, (2, 3)), (4, ())],
)
def test_kinds_alone_are_refused_where_readers_would_disagree(count: int, full: tuple[int, ...]) -> None:
    kinds = ["full_attention" if i in full else "sliding_attention" for i in range(count)]
    text = {"num_hidden_layers": count, "layer_types": kinds}
    with pytest.raises(CheckpointError, match=r"^m/config\.json: layer_rope_theta is missing, and layer_types is not"):
        spec_of(text)
    given = spec_of({**text, "layer_rope_theta": [0 if i in full else 500_000.0 for i in range(count)]})
    assert [layer.rope is None for layer in given.layers] == [i in full for i in range(count)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"layer_rope_theta": [1.0]}, "layer_rope_theta does not give a base for each of 52 layers"),
        ({"layer_rope_theta": [1.0, 2.0] * 26}, "layer_rope_theta has the bases 1.0, 2.0; expected one"),
        ({"layer_rope_theta": ["x"] * 52}, r"layer_rope_theta\[0\] is 'x'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    ],
)
def test_a_config_that_cannot_be_served_names_its_field(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^m/config\.json: {problem}"):
        spec_of(changes)


def uneven() -> dict[str, np.ndarray]:
    found = norms()
    found["blk.7.attn_q_norm.weight"][5] = 3.5
    return found


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        (file(logit_scale=...), r"muse-glimmer\.logit_scale is missing"),
        (file(attention__sliding_window_pattern=3), "sliding_window_pattern is 3, which does not divide 52 layers"),
        (file(expert_count=8), r"muse-glimmer\.expert_count is 8"),
        (file(norms(query=-1.0)), "attn_k_norm are -1.0 and 1.0; expected a positive number and 1"),
        (file(norms(key=2.0)), "and 2.0; expected a positive number and 1"),
        (file(uneven()), r"attn_q_norm\.weight is not the same number everywhere"),
        (file(norms(layers=51)), r"blk\.51\.attn_q_norm\.weight is missing"),
    ],
)
def test_a_file_that_cannot_be_served_names_its_field(container: Container, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        muse_glimmer.spec(container)


def test_another_factor_of_queries_is_taken_in() -> None:
    spec = muse_glimmer.spec(file(norms(query=4.0)))
    assert spec == replace(spec_of({}), attention_scale=as_f32(4 / np.sqrt(128)))


def test_a_multimodal_folder_says_what_it_leaves_aside(tmp_path: Path) -> None:
    write_tiny("muse_glimmer", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.f32(0, tensor.shape[0]) for name, tensor in read_safetensors(path).items()}
    assert "model.language_model.layers.0.self_attn.gate_proj.weight" in tensors
    one = np.ones((2, 2), np.float32)
    vision = (
        "model.vision_tower.layers.0.norm1.bias",
        "model.vision_adapter.fc1.weight",
        "model.vision_projection.weight",
    )
    drafter = ("encoder.fc.weight", "encoder.output_norm_enc.weight", "layers.4.self_attn.q_norm.weight", "norm.weight")
    path.write_bytes(safetensors_bytes({**tensors, **dict.fromkeys((*vision, *drafter), one)}, "F32"))
    assert open_checkpoint(tmp_path).asides == {"vision": 3, "drafter": 4}
    path.write_bytes(safetensors_bytes({**tensors, "model.language_model.layers.0.x.weight": one}, "F32"))
    with pytest.raises(CheckpointError, match=r"tensor model\.language_model\.layers\.0\.x\.weight not part of this"):
        open_checkpoint(tmp_path)


def test_a_flat_config_and_plain_names_are_the_same_model(tmp_path: Path) -> None:
    for name in ("nested", "flat"):
        write_tiny("muse_glimmer", tmp_path / name)
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    flat = {**config["text_config"], "model_type": "muse_glimmer"}
    (tmp_path / "flat" / "config.json").write_text(json.dumps(flat))
    path = tmp_path / "flat" / "model.safetensors"
    tensors = {name: tensor.f32(0, tensor.shape[0]) for name, tensor in read_safetensors(path).items()}
    renamed = {name.replace("model.language_model.", "model."): values for name, values in tensors.items()}
    path.write_bytes(safetensors_bytes(renamed, "F32"))
    assert open_checkpoint(tmp_path / "flat").spec == open_checkpoint(tmp_path / "nested").spec


def test_conventions_of_both_containers(tmp_path: Path) -> None:
    write_tiny("muse_glimmer", tmp_path)
    write_tiny_gguf(tmp_path / "m.gguf", tmp_path)
    folder, file = open_checkpoint(tmp_path), open_checkpoint(tmp_path / "m.gguf")
    assert file.asides == {"constants, read into the description": 12}
    for name in folder.names():
        np.testing.assert_array_equal(folder.weight(name).f32(), file.weight(name).f32(), err_msg=name)
    # Block norms are 1 + w, the final one is w.
    centred = read_safetensors(tmp_path / "model.safetensors")
    block = centred["model.language_model.layers.1.post_feedforward_layernorm.weight"].data.view("<f4")
    np.testing.assert_array_equal(folder.weight("layers.1.mlp_post_norm.weight").f32(), np.float32(1) + block)
    final = centred["model.language_model.norm.weight"].data.view("<f4")
    np.testing.assert_array_equal(folder.weight("final_norm.weight").f32(), final)
    # Only queries and keys are interleaved in the file; the gate is not.
    assert {name.split(".", 2)[2] for name in file.names() if file.weight(name).entry.interleaved_heads} == {
        "attn.q.weight",
        "attn.k.weight",
    }
