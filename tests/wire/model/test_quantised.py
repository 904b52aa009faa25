from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.digest import weights_digest
from muser_wire.model.safetensors import read_safetensors
from muser_wire.model.tiny import write_tiny

Arrays = dict[str, tuple[str, np.ndarray]]
DTYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "U8": "u1", "U32": "<u4", "F8_E4M3": "u1"}
MODULE = "model.layers.1.mlp.up_proj"
NAME = "layers.1.mlp.up.weight"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(code: np.ndarray) -> np.ndarray:
    """The value of e4m3 codes below 0x7f."""
    exponent, mantissa = code.astype(int) >> 3, code & 7
    return np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7)).astype(np.float32)


def write(path: Path, arrays: Arrays) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, array) in arrays.items():
        content = array.astype(DTYPES[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """`model(config, arrays)`: a tiny llama in which arrays replace the weights of the modules that they belong to."""

    def model(config: dict[str, Any], arrays: Arrays, drop: tuple[str, ...] = (f"{MODULE}.weight",)) -> Path:
        write_tiny("llama", tmp_path, layers=2)
        plain: Arrays = {
            name: ("F32", tensor.f32(0, tensor.shape[0]))
            for name, tensor in read_safetensors(tmp_path / "model.safetensors").items()
            if name not in drop
        }
        write(tmp_path / "model.safetensors", {**plain, **arrays})
        values = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**values, **config}))
        return tmp_path

    return model


def codes(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Random codes `[96, 64]` and the words that hold them, lowest bits first."""
    q = np.random.default_rng(bits).integers(0, 2**bits, (96, 64))
    shifted = q.reshape(96, -1, 32 // bits).astype(np.uint64) << (
        np.arange(32 // bits, dtype=np.uint64) * np.uint64(bits)
    )
    return q, shifted.sum(-1).astype("<u4")


def affine(bits: int, group: int) -> tuple[Arrays, np.ndarray]:
    q, words = codes(bits)
    rng = np.random.default_rng(1)
    scales, biases = (rng.normal(size=(96, 64 // group)).astype(np.float16) for _ in range(2))
    values = q * np.repeat(scales.astype(np.float32), group, 1) + np.repeat(biases.astype(np.float32), group, 1)
    parts: Arrays = {"weight": ("U32", words), "scales": ("F16", scales), "biases": ("F16", biases)}
    return {f"{MODULE}.{part}": array for part, array in parts.items()}, values.astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_mlx_affine(model: Callable[..., Path], bits: int, group: int) -> None:
    arrays, values = affine(bits, group)
    weight = open_checkpoint(model({"quantization": {"bits": bits, "group_size": group}}, arrays)).weight(NAME)
    np.testing.assert_array_equal(weight.f32(), values)
    np.testing.assert_array_equal(weight.f32(5, 9), values[5:9])
    packed = weight.affine()
    assert packed is not None
    assert (packed.bits, packed.group_size, packed.q.dtype) == (bits, group, np.uint8)
    np.testing.assert_array_equal(packed.q, codes(bits)[0])
    assert packed.scales.shape == packed.offsets.shape == (96, 64 // group)
    assert weight.encoding == f"AFFINE{bits}/{group}"
    assert weight.nbytes == 96 * 64 * bits // 8 + 2 * 2 * 96 * 64 // group
    assert (weight.tensor_scale, weight.block_scaled()) == (None, None)


def test_a_module_may_have_settings_of_its_own(model: Callable[..., Path]) -> None:
    arrays, values = affine(8, 32)
    other, other_values = affine(4, 64)
    gate = {name.replace("up_proj", "gate_proj"): array for name, array in other.items()}
    config = {"bits": 4, "group_size": 64, MODULE: {"bits": 8, "group_size": 32}, "model.embed_tokens": False}
    drop = (f"{MODULE}.weight", "model.layers.1.mlp.gate_proj.weight")
    checkpoint = open_checkpoint(model({"quantization": config}, {**arrays, **gate}, drop))
    np.testing.assert_array_equal(checkpoint.weight(NAME).f32(), values)
    np.testing.assert_array_equal(checkpoint.weight("layers.1.mlp.gate.weight").f32(), other_values)


def block_scaled(group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of packed codes `[96, 32]`, scale codes `[96, 64 / group]` and unscaled values `[96, 64]`."""
    q = codes(4)[0]
    packed = (q[:, 0::2] | q[:, 1::2] << 4).astype(np.uint8)
    scales = np.random.default_rng(2).integers(0x20, 0x50, (96, 64 // group)).astype(np.uint8)
    return packed, scales, E2M1[q]


@pytest.mark.parametrize(("mode", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_mlx_block_scaled(model: Callable[..., Path], mode: str, group: int) -> None:
    packed, scales, plain = block_scaled(group)
    arrays = {f"{MODULE}.weight": ("U32", packed.view("<u4")), f"{MODULE}.scales": ("U8", scales)}
    config = {"quantization": {"bits": 4, "group_size": group, "mode": mode}}
    weight = open_checkpoint(model(config, arrays)).weight(NAME)
    factors = e4m3(scales) if mode == "nvfp4" else 2.0 ** (scales.astype(np.float32) - 127)
    np.testing.assert_array_equal(weight.f32(), plain * np.repeat(factors, group, 1))
    form = weight.block_scaled()
    assert form is not None
    assert (form.mode.name, form.mode.bits, form.mode.group_size, form.tensor_scale) == (mode, 4, group, 1.0)
    np.testing.assert_array_equal(form.packed, packed.view("<u4"))
    np.testing.assert_array_equal(form.scales, scales)
    assert (weight.encoding, weight.affine(), weight.tensor_scale) == (mode.upper(), None, None)


COMPRESSED = {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def compressed(divisor: float = 700.0) -> Arrays:
    packed, scales, _ = block_scaled(16)
    one = np.full(1, divisor, np.float32)
    parts: Arrays = {
        "weight_packed": ("U8", packed),
        "weight_scale": ("F8_E4M3", scales),
        "weight_global_scale": ("F32", one),
        "input_global_scale": ("F32", one),
    }
    return {f"{MODULE}.{part}": array for part, array in parts.items()}


def modelopt(multiplier: float = 0.0014) -> Arrays:
    packed, scales, _ = block_scaled(16)
    parts: Arrays = {
        "weight": ("U8", packed),
        "weight_scale": ("F8_E4M3", scales),
        "weight_scale_2": ("F32", np.array(multiplier, np.float32)),
        "input_scale": ("F32", np.array(1.0, np.float32)),
    }
    cache: Arrays = {
        f"model.layers.1.self_attn.{part}": ("F32", np.array(1.0, np.float32))
        for part in ("k_proj.k_scale", "v_proj.v_scale")
    }
    return {**{f"{MODULE}.{part}": array for part, array in parts.items()}, **cache}


def block_values() -> np.ndarray:
    _, scales, plain = block_scaled(16)
    return (plain * np.repeat(e4m3(scales), 16, 1)).astype(np.float32)


def check_nvfp4(weight: Any, factor: float) -> None:
    packed, scales, _ = block_scaled(16)
    form = weight.block_scaled()
    np.testing.assert_array_equal(form.packed, packed.view("<u4"))
    np.testing.assert_array_equal(form.scales, scales)
    assert form.tensor_scale == weight.tensor_scale == factor
    # The factor on the product instead of on the weights is one rounding away.
    np.testing.assert_allclose(block_values() * np.float32(factor), weight.f32(), rtol=2.0**-22)


def test_nvfp4_of_compressed_tensors_is_divided_by_its_global_scale(model: Callable[..., Path]) -> None:
    weight = open_checkpoint(model(COMPRESSED, compressed())).weight(NAME)
    np.testing.assert_array_equal(weight.f32(), block_values() / np.float32(700))
    check_nvfp4(weight, float(np.float32(1) / np.float32(700)))


def test_nvfp4_of_modelopt_is_multiplied_by_its_second_scale(model: Callable[..., Path]) -> None:
    weight = open_checkpoint(model(MODELOPT, modelopt())).weight(NAME)
    np.testing.assert_array_equal(weight.f32(), block_values() * np.float32(0.0014))
    check_nvfp4(weight, float(np.float32(0.0014)))


def test_modelopt_s_settings_may_lie_in_a_file_of_their_own(model: Callable[..., Path]) -> None:
    folder = model({}, modelopt())
    with pytest.raises(CheckpointError, match="not part of this model"):
        open_checkpoint(folder)
    (folder / "hf_quant_config.json").write_text("{}")
    assert open_checkpoint(folder).weight(NAME).encoding == "NVFP4"


def test_fp8_of_modelopt(model: Callable[..., Path]) -> None:
    q = np.random.default_rng(3).integers(0, 0x7F, (96, 64)).astype(np.uint8)
    parts: Arrays = {
        f"{MODULE}.weight": ("F8_E4M3", q),
        f"{MODULE}.weight_scale": ("F32", np.array(0.01, np.float32)),
        f"{MODULE}.input_scale": ("F32", np.array(1.0, np.float32)),
    }
    weight = open_checkpoint(model(MODELOPT, parts)).weight(NAME)
    np.testing.assert_array_equal(weight.f32(), e4m3(q) * np.float32(0.01))
    assert (weight.encoding, weight.tensor_scale) == ("F8_E4M3", float(np.float32(0.01)))


def test_equal_labels_are_not_equal_weights(model: Callable[..., Path]) -> None:
    def opened(*arguments: Any) -> Checkpoint:
        return open_checkpoint(model(*arguments))

    first = weights_digest(opened(COMPRESSED, compressed()))
    assert first == weights_digest(opened(COMPRESSED, compressed()))
    assert first != weights_digest(opened(COMPRESSED, compressed(divisor=701.0)))
    # A power of two is exact either way, so both formats can hold the same weights.
    same = weights_digest(opened(COMPRESSED, compressed(divisor=512.0)))
    assert same == weights_digest(opened(MODELOPT, modelopt(multiplier=1 / 512)))


@pytest.mark.parametrize("part", ["weight_scale", "weight_global_scale"])
def test_a_missing_scale_of_compressed_tensors_is_named(model: Callable[..., Path], part: str) -> None:
    arrays = compressed()
    del arrays[f"{MODULE}.{part}"]
    with pytest.raises(
        CheckpointError, match=rf"{MODULE}\.weight_packed is quantised, and its {MODULE}\.{part} is mis"
    ):
        open_checkpoint(model(COMPRESSED, arrays))


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2"])
def test_a_missing_scale_of_modelopt_is_named(model: Callable[..., Path], part: str) -> None:
    arrays = modelopt()
    del arrays[f"{MODULE}.{part}"]
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.weight is quantised, and its {MODULE}\.{part} is missing"):
        open_checkpoint(model(MODELOPT, arrays))


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_a_missing_part_of_mlx_is_named(model: Callable[..., Path], part: str) -> None:
    arrays, _ = affine(4, 32)
    del arrays[f"{MODULE}.{part}"]
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.weight is quantised, and its {MODULE}\.{part} is missing"):
        open_checkpoint(model({"quantization": {"bits": 4, "group_size": 32}}, arrays))


@pytest.mark.parametrize("scheme", [COMPRESSED, MODELOPT, {"quantization": {"bits": 4, "group_size": 32}}, {}])
@pytest.mark.parametrize("part", ["scales", "weight_scale", "weight_zero_point", "bias"])
def test_an_array_that_no_weight_takes_is_named(model: Callable[..., Path], scheme: dict[str, Any], part: str) -> None:
    extra = {f"model.layers.0.mlp.up_proj.{part}": ("F32", np.zeros((96, 2), np.float32))}
    with pytest.raises(CheckpointError, match=rf"tensor model\.layers\.0\.mlp\.up_proj\.{part} not part of this model"):
        open_checkpoint(model(scheme, extra, ()))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_positive_number_is_named(model: Callable[..., Path], value: float) -> None:
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.weight_global_scale holds .*; expected a positive number"):
        open_checkpoint(model(COMPRESSED, compressed(divisor=value)))


def test_scales_of_another_shape_are_named(model: Callable[..., Path]) -> None:
    arrays = compressed()
    arrays[f"{MODULE}.weight_scale"] = ("F8_E4M3", np.zeros((96, 3), np.uint8))
    with pytest.raises(
        CheckpointError, match=r"weight_scale has shape \[96, 3\], which does not go with .* \[96, 32\]"
    ):
        open_checkpoint(model(COMPRESSED, arrays))
    wrong, _ = affine(4, 32)
    wrong[f"{MODULE}.biases"] = ("F16", np.zeros((96, 1), np.float16))
    with pytest.raises(CheckpointError, match=r"biases has shape \[96, 1\], which does not go with .*scales"):
        open_checkpoint(model({"quantization": {"bits": 4, "group_size": 32}}, wrong))


def test_a_matrix_of_the_wrong_width_is_named_by_its_values(model: Callable[..., Path]) -> None:
    arrays, _ = affine(8, 64)
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.scales has shape \[96, 1\], which does not go"):
        open_checkpoint(model({"quantization": {"bits": 4, "group_size": 64}}, arrays))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is .*gptq"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}, "pack-quantized"),
        ({"quantization": [4]}, r"quantization is \[4\]; expected an object"),
        ({"quantization": {"bits": 3, "group_size": 64}}, r"quantization\.bits is 3: known are \(4, 8\)"),
        ({"quantization": {"bits": 4, "group_size": 16}}, r"quantization\.group_size is 16: known"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "fp3"}}, r"quantization\.mode is 'fp3'"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, r"text_config\.quantization_config is"),
    ],
)
def test_a_scheme_that_is_not_known_is_named(model: Callable[..., Path], config: dict[str, Any], problem: str) -> None:
    arrays, _ = affine(4, 32)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{problem}"):
        open_checkpoint(model(config, arrays))


def test_codes_without_a_scheme_are_no_weights(model: Callable[..., Path]) -> None:
    packed = {f"{MODULE}.weight": ("U32", np.zeros((96, 64), np.uint32))}
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.weight is stored as U32, which cannot be read as weights"):
        open_checkpoint(model({}, packed))


def test_nvfp4_in_a_type_that_it_is_not_stored_in(model: Callable[..., Path]) -> None:
    arrays = compressed()
    arrays[f"{MODULE}.weight_scale"] = ("F16", np.ones((96, 4), np.float16))
    with pytest.raises(CheckpointError, match="are U8 and F16, which is not how nvfp4 is stored"):
        open_checkpoint(model(COMPRESSED, arrays))
