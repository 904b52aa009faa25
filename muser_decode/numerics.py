"""The decode node's number types: what it computes in, what keys and values are rounded to.

Keys after rope, and values, are rounded to the KV element type before attention reads them, so that
what attention sees is what the wire carries. A cache may hold them widened, never narrowed.
"""

from __future__ import annotations

import mlx.core as mx

from muser_decode.errors import ModelNotSupported
from muser_wire.geometry import ElementType

F16_MAX = 65504.0
"""The largest finite float16."""

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
"""Compute types by the name that a configuration uses."""

KV_DTYPES = {ElementType.F16: mx.float16, ElementType.BF16: mx.bfloat16}


def on_gpu() -> bool:
    """Say whether mlx computes on a GPU here. On the CPU other layouts and operations are the fast ones."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def check_types(dtype: mx.Dtype, element: ElementType) -> None:
    """Check that every value of a KV element type is exact in the compute type.

    Raises:
        ModelNotSupported: it is not, so attention would see other values than the wire carries.
    """
    if dtype not in (mx.float32, KV_DTYPES[element]):
        raise ModelNotSupported(f"keys and values in {element.value} cannot be kept exactly in {name_of(dtype)}")


def name_of(dtype: mx.Dtype) -> str:
    """Return the name of a type as a configuration spells it, such as "float32"."""
    return str(dtype).removeprefix("mlx.core.")


def round_kv(x: mx.array, element: ElementType) -> mx.array:
    """Return `x` rounded to the nearest even value of the KV element type, in the type of `x`.

    float16 is clamped to +-65504 first: an infinite key would poison every later token.
    """
    if element is ElementType.F16:
        x = mx.clip(x, -F16_MAX, F16_MAX)
    return x.astype(KV_DTYPES[element]).astype(x.dtype)
