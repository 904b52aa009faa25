from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from load_peak import fetched, linux_only, measure

from muser_decode.layer import Layer, LayerLoader
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.tiny import write_tiny

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 16, 64


def load(family: str, path: Path) -> tuple[Checkpoint, Layer, Layer]:
    write_tiny(family, path / family, layers=4)
    checkpoint = open_checkpoint(path / family)
    loader = LayerLoader(checkpoint, mx.float32, False)
    return checkpoint, loader.layer(0), loader.layer(3)


@pytest.mark.parametrize(("family", "parts"), [("llama", "qkv"), ("muse_glimmer", ["q", "k", "v", "gate"])])
def test_projections_of_one_input_are_one_matrix(family: str, parts: str | list[str], tmp_path: Path) -> None:
    checkpoint, layer, _ = load(family, tmp_path)
    stacked = np.concatenate([checkpoint.weight(f"layers.0.attn.{part}.weight").f32() for part in parts])
    np.testing.assert_array_equal(np.array(layer.projections.rows(mx.arange(len(stacked)))), stacked)


def test_norms_of_queries_and_keys_are_one_multiplier_by_head(tmp_path: Path) -> None:
    checkpoint, layer, _ = load("qwen3", tmp_path)
    q, k = (checkpoint.weight(f"layers.0.attn.{part}_norm.weight").f32() for part in "qk")
    assert layer.qk_norm is not None
    assert layer.qk_norm.shape == (HEADS + KV_HEADS, 1, DIM)
    for head in range(HEADS + KV_HEADS):
        np.testing.assert_array_equal(np.array(layer.qk_norm[head, 0]), q if head < HEADS else k)


def test_what_a_family_lacks_is_none(tmp_path: Path) -> None:
    _, plain, _ = load("llama", tmp_path)
    assert plain.qk_norm is plain.attn_post_norm is plain.mlp_post_norm is None
    _, sliding, full = load("muse_glimmer", tmp_path)
    assert sliding.qk_norm is None
    assert sliding.attn_post_norm is not None
    assert sliding.rope is not None
    assert full.rope is None


def test_layers_with_the_same_positions_share_their_tables(tmp_path: Path) -> None:
    write_tiny("gemma3", tmp_path / "shared", layers=7)
    loader = LayerLoader(open_checkpoint(tmp_path / "shared"), mx.float32, False)
    ropes = [loader.layer(index).rope for index in range(7)]
    assert ropes[0] is ropes[4] is ropes[6]
    assert ropes[5] is not ropes[0]


LOAD = """
from muser_decode.blas import load_blas
load_blas()
import mlx.core as mx
from muser_decode.decoder import MlxDecoder
from muser_wire.geometry import ElementType

def load(checkpoint):
    return MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=PACKED)
"""


PACKED_BITS = {"Q5_0": 5, "Q8_0": 8}
"""What stays packed of Gemma's encodings. A scale and an offset in f32 for each 32 weights come on top."""


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize("packed", [False, True])
def test_loading_peaks_near_what_remains(packed: bool, tiny_llama: Path) -> None:
    path = fetched("gemma3-270m")
    found = measure(LOAD.replace("PACKED", str(packed)), path, tiny_llama)
    checkpoint, nbytes = open_checkpoint(path), 0.0
    for name in checkpoint.names():
        weight = checkpoint.weight(name)
        kept = packed and weight.encoding in PACKED_BITS
        nbytes += weight.count * (PACKED_BITS[weight.encoding] + 2 * 32 / 32 if kept else 32) / 8
    if packed:
        # Beside weights this small, the CPU's two pairs of tables of positions count; a GPU has none.
        nbytes += 2 * 2 * checkpoint.spec.max_positions * checkpoint.spec.head_dim * 4
    assert found.remains >= 0.95 * nbytes
    assert found.peak <= 1.3 * nbytes
