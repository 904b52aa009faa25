"""Attention by torch's own fused kernels: what CUDA uses."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, torch's own name for it

from muser_prefill.kernels.attention.reference import visible


def sdpa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """Return softmax(q k^T) v over the visible positions.

    Contract and shapes: `muser_prefill.kernels.attention`. A whole prompt without a window needs no mask and takes the
    flash kernels; the other cases build a mask `[T, start + T]`.
    """
    plain = start == 0 and window is None
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=None if plain else visible(len(q), start, window, q.device),
        is_causal=plain,
        scale=1.0,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
