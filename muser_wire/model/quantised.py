"""Quantised safetensors: which arrays make up one weight, as config.json says.

| scheme | arrays of X.weight | value |
|---|---|---|
| MLX, affine | X.weight U32, X.scales, X.biases | q * scale + bias |
| MLX, block-scaled | X.weight U32, X.scales U8 | code * scale |
| compressed-tensors, nvfp4 | X.weight_packed, X.weight_scale, X.weight_global_scale | code * scale / global |
| ModelOpt, NVFP4 | X.weight U8, X.weight_scale, X.weight_scale_2 | code * scale * scale_2 |
| ModelOpt, FP8 | X.weight F8_E4M3, X.weight_scale | code * scale |

The GPU formats also carry scales for activations and for an 8-bit KV cache. They change no weight
and are passed over by rule; any other array that no weight takes stays in the list, where the
checkpoint refuses it by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from muser_wire.errors import CheckpointError
from muser_wire.model.blockscaled import MODES, NVFP4, BlockMode
from muser_wire.model.composed import AffineTensor, BlockScaledTensor, ScaledTensor
from muser_wire.model.container import StoredTensor, Tensor
from muser_wire.model.fields import Fields

AFFINE_BITS = (4, 8)
AFFINE_GROUPS = (32, 64, 128)
# As some exporters of ModelOpt write what config.json should say.
MODELOPT_FILE = "hf_quant_config.json"
ACTIVATION_SCALES = re.compile(r".*\.(input_global_scale|input_scale|k_proj\.k_scale|v_proj\.v_scale)")

Scheme = Callable[["Arrays"], None]


class Arrays:
    """The arrays of a checkpoint while a scheme takes them apart and puts weights in their place."""

    def __init__(self, arrays: Mapping[str, StoredTensor]) -> None:
        self._left = dict(arrays)
        self._whole: dict[str, Tensor] = {}

    def ending(self, suffix: str) -> list[str]:
        """Return what comes before `suffix` in each name that ends so."""
        return [name.removesuffix(suffix) for name in self._left if name.endswith(suffix)]

    def find(self, name: str) -> StoredTensor | None:
        """Return an array that is still there."""
        return self._left.get(name)

    def take(self, name: str, *, of: str) -> StoredTensor:
        """Remove and return an array without which the weight `of` has no value."""
        if name not in self._left:
            raise CheckpointError(f"{self._left[of].path}: tensor {of} is quantised, and its {name} is missing")
        return self._left.pop(name)

    def put(self, tensor: Tensor) -> None:
        """Add a whole weight."""
        self._whole[tensor.name] = tensor

    def drop(self, pattern: re.Pattern[str]) -> None:
        """Remove what a rule says is no part of any weight."""
        self._left = {name: array for name, array in self._left.items() if not pattern.fullmatch(name)}

    def tensors(self) -> dict[str, Tensor]:
        """Return whole weights and what no scheme took."""
        return {**self._left, **self._whole}


def compose(fields: Fields, arrays: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint after joining the arrays that belong together.

    Raises:
        CheckpointError: the config names a scheme that is not known here, or a part of a weight is missing
            or contradicts the others.
    """
    whole = Arrays(arrays)
    scheme = _scheme(fields)
    if scheme is not None:
        scheme(whole)
    return whole.tensors()


def _scheme(fields: Fields) -> Scheme | None:
    for name in ("quantization", "quantization_config", "text_config.quantization_config"):
        config = _nested(fields, name)
        if config is None:
            continue
        inner = Fields(fields.path, {f"{name}.{key}": value for key, value in config.items()})
        method = config.get("quant_method")
        if method is None and "group_size" in config:
            return lambda arrays: _compose_mlx(arrays, inner, name)
        if method == "compressed-tensors":
            inner.require(f"{name}.format", "nvfp4-pack-quantized", why="only nvfp4-pack-quantized is known here")
            return _compose_compressed
        if method == "modelopt":
            return _compose_modelopt
        raise fields.refusal(name, f"is {fields.shown(config)}; known are MLX, compressed-tensors nvfp4 and modelopt")
    return _compose_modelopt if (fields.path.parent / MODELOPT_FILE).is_file() else None


def _nested(fields: Fields, name: str) -> dict[str, Any] | None:
    value: object = fields.values
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is not None and not isinstance(value, dict):
        raise fields.refusal(name, f"is {fields.shown(value)}; expected an object")
    return value


def _compose_mlx(arrays: Arrays, config: Fields, name: str) -> None:
    """Join what MLX wrote. A module named in the config has its own settings there, or false for none."""
    for module in arrays.ending(".weight"):
        codes = arrays.find(f"{module}.weight")
        if codes is None or codes.encoding != "U32":
            continue
        own = config.get(f"{name}.{module}")
        settings = {f"{module}.{key}": value for key, value in own.items()} if isinstance(own, dict) else None
        at, scope = (module, Fields(config.path, settings)) if settings is not None else (name, config)
        _join_mlx(arrays, module, scope, at)


def _join_mlx(arrays: Arrays, module: str, settings: Fields, at: str) -> None:
    name = f"{module}.weight"
    mode = settings.get(f"{at}.mode") or "affine"
    scales = arrays.take(f"{module}.scales", of=name)
    if mode == "affine":
        bits, group = settings.integer(f"{at}.bits"), settings.integer(f"{at}.group_size")
        settings.require(f"{at}.bits", *AFFINE_BITS, why=f"known are {AFFINE_BITS}")
        settings.require(f"{at}.group_size", *AFFINE_GROUPS, why=f"known are {AFFINE_GROUPS}")
        offsets = arrays.take(f"{module}.biases", of=name)
        codes = arrays.take(name, of=name)
        shape = _matrix(codes, scales, cols=codes.shape[-1] * 32 // bits, group=group)
        if offsets.shape != scales.shape:
            raise _mismatch(offsets, scales)
        arrays.put(AffineTensor(name, shape, bits, group, codes, scales, offsets))
        return
    if mode not in MODES:
        raise settings.refusal(f"{at}.mode", f"is {settings.shown(mode)}; known are affine, {', '.join(MODES)}")
    _put_block_scaled(arrays, name, MODES[mode], arrays.take(name, of=name), scales)


def _compose_compressed(arrays: Arrays) -> None:
    for module in arrays.ending(".weight_packed"):
        packed = f"{module}.weight_packed"
        scales = arrays.take(f"{module}.weight_scale", of=packed)
        divisor = _factor(arrays.take(f"{module}.weight_global_scale", of=packed))
        codes = arrays.take(packed, of=packed)
        _put_block_scaled(arrays, f"{module}.weight", NVFP4, codes, scales, divisor=divisor)
    arrays.drop(ACTIVATION_SCALES)


def _compose_modelopt(arrays: Arrays) -> None:
    for module in arrays.ending(".weight"):
        name = f"{module}.weight"
        codes = arrays.find(name)
        if codes is not None and codes.encoding in ("U8", "F8_E4M3"):
            scales = arrays.take(f"{module}.weight_scale", of=name)
            if codes.encoding == "U8":
                multiplier = _factor(arrays.take(f"{module}.weight_scale_2", of=name))
                arrays.take(name, of=name)
                _put_block_scaled(arrays, name, NVFP4, codes, scales, multiplier=multiplier)
            else:
                arrays.put(ScaledTensor(name, arrays.take(name, of=name), _factor(scales)))
    arrays.drop(ACTIVATION_SCALES)


def _put_block_scaled(
    arrays: Arrays, name: str, mode: BlockMode, codes: StoredTensor, scales: StoredTensor, **factor: float
) -> None:
    nbytes = codes.nbytes // codes.shape[0]
    shape = _matrix(codes, scales, cols=nbytes * 8 // mode.bits, group=mode.group_size)
    if codes.encoding not in ("U8", "U32") or scales.encoding not in ("U8", "F8_E4M3"):
        raise CheckpointError(
            f"{codes.path}: tensors {codes.name} and {scales.name} are {codes.encoding} and {scales.encoding}, "
            f"which is not how {mode.name} is stored"
        )
    arrays.put(BlockScaledTensor(name, shape, mode, codes, scales, **factor))


def _matrix(codes: StoredTensor, scales: StoredTensor, *, cols: int, group: int) -> tuple[int, int]:
    """Return the shape of the values, after checking that each group of `group` columns has one scale."""
    if len(codes.shape) != 2 or scales.shape != (codes.shape[0], cols // group) or cols % group:
        raise _mismatch(scales, codes)
    return codes.shape[0], cols


def _mismatch(scales: StoredTensor, codes: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{scales.path}: tensor {scales.name} has shape {list(scales.shape)}, "
        f"which does not go with {codes.name} {list(codes.shape)}"
    )


def _factor(array: StoredTensor) -> float:
    """Return the one number in an array, which must be positive."""
    if array.encoding != "F32" or math.prod(array.shape) != 1:
        raise CheckpointError(
            f"{array.path}: tensor {array.name} is {array.encoding} {list(array.shape)}; expected one F32"
        )
    value = float(array.data.view("<f4")[0])
    if not 0 < value < math.inf:
        raise CheckpointError(f"{array.path}: tensor {array.name} holds {value}; expected a positive number")
    return value
