from __future__ import annotations

import pytest

from muser_wire.errors import GeometryError
from muser_wire.geometry import ElementType, Geometry, LayerGroup, kv_layout, segment_nbytes
from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec


def test_a_group_of_muse_glimmers_full_layers_takes_13312_bytes_a_token() -> None:
    full = LayerGroup(layers=tuple(range(3, 52, 4)), heads=2, head_dim=128, itemsize=2)
    assert segment_nbytes(full, tokens=1) == 13312
    assert segment_nbytes(full, tokens=7) == 7 * 13312


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_segment_without_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(GeometryError, match="at least one token"):
        segment_nbytes(LayerGroup((0,), 1, 1, 2), tokens)


def test_geometry_takes_windows_heads_and_element_from_the_spec() -> None:
    rope = RopeSpec(theta=10000.0, rotary_dim=8)
    spec = ModelSpec(
        family="llama",
        layers=(LayerSpec(window=64, rope=rope), LayerSpec(window=None, rope=None)),
        hidden_size=32,
        ffn_size=64,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocab_size=100,
        max_positions=512,
        norm_eps=1e-5,
        tied_embeddings=False,
        attention_scale=8**-0.5,
    )
    geometry = Geometry.of(spec, ElementType.BF16)
    assert geometry == Geometry(windows=(64, None), kv_heads=2, head_dim=8, element=ElementType.BF16)
    assert geometry.layer_token_nbytes == 2 * 2 * 8 * 2
    assert geometry.group((0, 1)).token_nbytes == 2 * geometry.layer_token_nbytes


def test_layouts_of_different_elements_have_different_names() -> None:
    assert kv_layout(ElementType.F16) != kv_layout(ElementType.BF16)
