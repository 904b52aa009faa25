"""`Heads` by a Triton kernel."""

from __future__ import annotations

import torch
import triton

from muser_prefill.kernels.exact import HeadNorm, Positions
from muser_prefill.kernels.exact.triton.head_kernel import heads_kernel
from muser_prefill.kernels.exact.triton.launch import cdiv, launch
from muser_wire.model.spec import as_f32

ROWS, WARPS = 4, 4


class TritonHeads:
    """Contract: `muser_prefill.kernels.exact.Heads`."""

    def turned(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        """Return heads after their norm and positions."""
        return _heads(x, norm, positions, torch.empty(x.shape, device=x.device))

    def plane(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        """Return the same rounded to float16."""
        return _heads(x, norm, positions, torch.empty(x.shape, dtype=torch.float16, device=x.device))


def _heads(x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None, to: torch.Tensor) -> torch.Tensor:
    tokens, heads, head_dim = x.shape
    launch(
        heads_kernel,
        (cdiv(tokens * heads, ROWS),),
        x,
        None if norm is None else norm.weight,
        (None, None) if positions is None else (positions.cos, positions.sin),
        to,
        tokens * heads,
        x.stride(0),
        as_f32(1.0 / head_dim),
        0.0 if norm is None else norm.eps,
        normed=norm is not None,
        plane=to.dtype == torch.float16,
        heads=heads,
        head_dim=head_dim,
        half=0 if positions is None else positions.cos.shape[1],
        rows=ROWS,
        width=triton.next_power_of_2(head_dim),
        warps=WARPS,
    )
    return to
