"""Blocks as integers, beside the values that the `gguf` package gives for the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from muser_wire.reference.blocks import DECODERS

GROUPS = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}
RANGES = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q8_0": (-128, 127)}
RANGES |= {"Q4_K": (0, 15), "Q5_K": (0, 31), "Q6_K": (-32, 31)}


@pytest.mark.parametrize("encoding", sorted(GROUPS))
def test_random_bytes_mean_the_same(encoding: str) -> None:
    weights, nbytes, decode = DECODERS[encoding]
    kind = GGMLQuantizationType[encoding]
    assert (weights, nbytes) == GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(6).integers(0, 256, (7, 5, nbytes)).astype(np.uint8)
    with np.errstate(all="ignore"):
        wanted = dequantize(blocks.reshape(7, -1), kind)
        matrix = decode(blocks)
        got = matrix.values()
    finite = np.isfinite(wanted)
    assert finite.sum() > wanted.size // 2
    assert (got[finite] == wanted[finite]).all()
    assert matrix.q.shape == (7, 5 * weights // GROUPS[encoding], GROUPS[encoding])
    low, high = RANGES[encoding]
    assert low <= matrix.q.min() <= matrix.q.max() <= high
    assert (matrix.m is None) == (encoding in {"Q4_0", "Q5_0", "Q8_0", "Q6_K"})


def test_decoders_are_those_of_the_table() -> None:
    assert set(DECODERS) == set(GROUPS)
