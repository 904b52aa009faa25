"""Causal attention of a chunk over the cache: which implementation a device uses.

Every implementation has this contract. `q` `[T, heads, head_dim]` holds queries of positions `start` to `start + T`,
already multiplied by the softmax scale; `k` and `v` `[start + T, kv_heads, head_dim]` hold every position up to there,
in the same type. Query head h reads key head h // (heads / kv_heads). The query at p sees position t iff
0 <= p - t < window. The result is `[T, heads, head_dim]` in the type of `q`. Shapes are the caller's duty.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from muser_prefill.kernels.admission import admit, fixed_vector
from muser_prefill.kernels.attention.chunked import ChunkedAttention
from muser_prefill.kernels.attention.reference import reference_attention
from muser_prefill.kernels.attention.sdpa import sdpa_attention
from muser_prefill.numerics import COMPUTE_NAMES
from muser_wire.numerics import budget

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int | None], torch.Tensor]
"""`(q, k, v, start, window) -> out`."""

CHUNKED = "attention.chunked"

# An odd number of queries after an odd prefix, more than one block of rows, three queries a key head, and windows that
# are shorter than a block, longer than one, and absent.
ADMISSION_START, ADMISSION_TOKENS, ADMISSION_KV_HEADS, ADMISSION_GROUP = 67, 203, 2, 3
ADMISSION_WINDOWS = (None, 41, 150)


def choose_attention(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Attention, tuple[str, ...]]:
    """Return the attention for this device and the names of the hand-written kernels that it uses."""
    if device.type == "cuda":
        return sdpa_attention, ()
    chunked = ChunkedAttention()
    if admit_attention(CHUNKED, chunked, head_dim, dtype, device):
        return chunked, (CHUNKED,)
    return reference_attention, ()


def admit_attention(name: str, kernel: Attention, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `kernel` agrees with the reference on the fixed vector, for every kind of window."""
    stop = ADMISSION_START + ADMISSION_TOKENS
    heads = ADMISSION_KV_HEADS * ADMISSION_GROUP
    q = fixed_vector((ADMISSION_TOKENS, heads, head_dim), 1, dtype, device) * head_dim**-0.5
    k, v = (fixed_vector((stop, ADMISSION_KV_HEADS, head_dim), seed, dtype, device) for seed in (2, 3))

    def outputs(attention: Attention) -> torch.Tensor:
        return torch.stack([attention(q, k, v, ADMISSION_START, window) for window in ADMISSION_WINDOWS])

    return admit(
        name,
        lambda: outputs(kernel),
        lambda: outputs(reference_attention),
        budget(f"attention_{COMPUTE_NAMES[dtype]}"),
    )
