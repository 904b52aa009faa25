"""Element types in torch's terms, and the rounding that makes keys and values what the wire carries."""

from __future__ import annotations

import torch

from muser_prefill.errors import UnknownComputeType
from muser_wire.geometry import ElementType

TORCH_ELEMENTS = {ElementType.F16: torch.float16, ElementType.BF16: torch.bfloat16}

COMPUTE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""The compute types, by the names that configuration and the table of budgets give them."""

F16_MAX = 65504.0
"""The largest finite f16. Beyond it a value becomes this and not infinity, which would end as NaN in attention."""


def compute_dtype(name: str) -> torch.dtype:
    """Return the compute type of a name.

    Raises:
        UnknownComputeType: there is none.
    """
    for dtype, known in COMPUTE_NAMES.items():
        if known == name:
            return dtype
    raise UnknownComputeType(f"no compute type is named {name!r}; known: {', '.join(COMPUTE_NAMES.values())}")


def round_into(plane: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` into `plane`, rounded to its element type to nearest even.

    f16 clamps to +-65504. NaN stays NaN.
    """
    if plane.dtype == torch.float16:
        values = values.clamp(-F16_MAX, F16_MAX)
    plane.copy_(values)
