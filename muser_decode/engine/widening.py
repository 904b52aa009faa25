"""Writing planes into a cache that holds them in float32, from plain memory, on a CPU.

There mlx copies and converts an element at a time; these are passes of whole vectors over what a core's cache
holds. Every 16-bit value is written exactly, infinities and all kinds of NaN included.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from muser_wire.geometry import ElementType

PASS_ELEMENTS = 1 << 18
"""What is converted at once: 1 MiB of float32."""

SIGN_AND_MAGNITUDE = np.int32(-0x70002000)
"""0x8FFFE000: where the bits of a float16 lie in a word when they are shifted to begin below the sign."""

REBIAS = np.float32(2.0**112)
"""Exponents of float32 count from 112 further below than those of float16."""

LEAST_NOT_FINITE = 65536.0
"""What a float16 infinity would become by `REBIAS` alone: larger than any finite one."""

Halves = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float32]


def widen_rows(source: Halves, target: Floats, element: ElementType) -> None:
    """Write a plane `[tokens, kv_heads, head_dim]` of 16-bit words to rows `[kv_heads, tokens, head_dim]`."""
    tokens, heads, dim = source.shape
    step = max(1, PASS_ELEMENTS // (heads * dim))
    words = np.empty((min(step, tokens), heads, dim), np.int32)
    for start in range(0, tokens, step):
        part = source[start : start + step]
        widened = _widen(part, words[: len(part)], element)
        target[:, start : start + len(part)] = widened.transpose(1, 0, 2)


def _widen(source: Halves, words: npt.NDArray[np.int32], element: ElementType) -> Floats:
    """Return the values of `source`, in the memory of `words`."""
    floats = words.view(np.float32)
    np.copyto(words, source)
    if element is ElementType.BF16:
        np.left_shift(words, 16, out=words)
        return floats
    np.left_shift(words, 13, out=words)
    np.bitwise_and(words, SIGN_AND_MAGNITUDE, out=words)
    np.multiply(floats, REBIAS, out=floats)
    if not -LEAST_NOT_FINITE < floats.min() <= floats.max() < LEAST_NOT_FINITE:
        np.copyto(floats, source.view(np.float16))
    return floats
