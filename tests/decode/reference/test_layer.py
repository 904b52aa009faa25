from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.reference.layer import FIRST_POSITIONS, LayerLoader, Rope, rotated
from muser_wire.model.spec import LinearScaling, RopeSpec
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.rope import rope_table
from muser_wire.reference.rope import rotated as plain_rotated
from muser_wire.reference.tiny import RandomWeights, random_spec

SPEC = RopeSpec(10_000.0, 16, LinearScaling(8.0))


@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize(
    "positions", [range(3, 8), [5, 0, 900, 5, 77], range(1_020, 1_025), [4 * FIRST_POSITIONS, 1, 2, 3, 4]]
)
def test_heads_turn_as_the_rules_say(dim: int, positions: range | list[int]) -> None:
    x = np.random.default_rng(dim).standard_normal((3, 5, dim)).astype(np.float32)
    got = np.array(rotated(mx.array(x), Rope(SPEC).at(positions)))
    table = rope_table(SPEC, 0, max(positions) + 1)
    cos, sin = table.cos[list(positions)][:, None], table.sin[list(positions)][:, None]
    expected = plain_rotated(NumpyArithmetic(), x.swapaxes(0, 1), cos, sin)
    np.testing.assert_array_equal(got, expected.swapaxes(0, 1))


def test_a_layer_has_what_its_model_has() -> None:
    base = random_spec(0)
    rich = replace(base, attention_gate=True, post_norm_eps=1e-6, qk_norm=None)
    poor = replace(base, attention_gate=False, post_norm_eps=None, qk_norm=None)
    gated, plain = (LayerLoader(RandomWeights(spec, 0)).layer(0) for spec in (rich, poor))
    assert gated.attn_post_norm is not None
    assert (plain.attn_post_norm, plain.mlp_post_norm, plain.qk_norm) == (None, None, None)
    assert gated.window == base.layers[0].window


def test_layers_with_equal_positions_share_a_table() -> None:
    rope = RopeSpec(10_000.0, 16)
    layers = tuple(replace(layer, rope=rope) for layer in random_spec(0).layers)
    loader = LayerLoader(RandomWeights(replace(random_spec(0), layers=layers, head_dim=16, heads=2, kv_heads=1), 0))
    assert loader.layer(0).rope is loader.layer(1).rope is not None
