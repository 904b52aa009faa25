from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.reference.mlx_arithmetic import MlxArithmetic
from muser_wire.reference.decoder import ReferenceDecoder
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.tiny import RandomWeights, random_ids, random_spec

AR = MlxArithmetic()


@pytest.mark.parametrize("seed", [2, 5, 8, 11])
def test_the_plain_text_gives_the_same_bytes_over_mlx(seed: int) -> None:
    weights = RandomWeights(random_spec(seed), seed)
    ids = random_ids(weights.spec, seed, 70)
    runs = []
    for ar in (AR, NumpyArithmetic()):
        decoder = ReferenceDecoder(ar, weights)
        cache = decoder.new_cache()
        logits = decoder.logits(decoder.forward(ids, cache))
        planes = [plane.tobytes() for layer in (0, 1) for plane in cache.planes(layer)]
        runs.append((planes, logits.tobytes()))
    assert runs[0] == runs[1]


def test_roots_and_reciprocals_are_correctly_rounded() -> None:
    x = np.exp2(np.linspace(-60, 60, 20_001)).astype(np.float32)
    np.testing.assert_array_equal(AR.host(AR.sqrt(AR.array(x))), np.sqrt(x.astype(np.float64)).astype(np.float32))
    np.testing.assert_array_equal(AR.host(AR.reciprocal(AR.array(x))), (1 / x.astype(np.float64)).astype(np.float32))


def test_shapes_types_and_bits() -> None:
    x = AR.array(np.array([[0.5, 1.5, -2.5]], np.float32))
    assert AR.host(AR.rint(x)).tolist() == [[0.0, 2.0, -2.0]]
    assert AR.host(AR.floor(x)).tolist() == [[0.0, 1.0, -3.0]]
    assert AR.host(AR.to_int32(AR.rint(x))).dtype == np.int32
    assert AR.host(AR.bits(x)).tolist() == [[0x3F000000, 0x3FC00000, 0xC0200000 - (1 << 32)]]
    np.testing.assert_array_equal(AR.host(AR.from_bits(AR.bits(x))), AR.host(x))
    assert AR.host(AR.to_float16(x)).dtype == np.float16
    assert AR.host(AR.largest(AR.absolute(x))).tolist() == [[2.5]]
    assert AR.host(AR.select(x < 0.0, AR.zeros((1, 3)), x)).tolist() == [[0.5, 1.5, 0.0]]
    assert AR.host(AR.broadcast(AR.arange(2, 4), (2, 2))).tolist() == [[2, 3], [2, 3]]
    assert AR.full((2,), 0.1).dtype == mx.float32
