from __future__ import annotations

import mlx.core as mx
import numpy as np
import oracle_llama as oracle
import pytest

from muser_decode.attention import (
    BLOCK_ROWS,
    RopeKernel,
    RopeTable,
    attend_blocks,
    attend_kernel,
    attend_one,
    query_blocks,
)
from muser_wire.model.spec import RopeSpec
from muser_wire.numerics import budget

HEADS, KV_HEADS, DIM = 6, 2, 16
SPEC = RopeSpec(theta=100_000.0, rotary_dim=DIM)


def qkv(tokens: int) -> list[np.ndarray]:
    random = np.random.default_rng(tokens)
    return [random.standard_normal((tokens, heads, DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def as_heads(x: np.ndarray) -> mx.array:
    return mx.array(x).transpose(1, 0, 2)


def rotated(x: np.ndarray, position: int) -> np.ndarray:
    """The oracle's rotation of one row at a far position, without computing all the ones before it."""
    angles = position * SPEC.theta ** (-2.0 * np.arange(DIM // 2) / DIM)
    a, b = x[..., : DIM // 2].astype(np.float64), x[..., DIM // 2 :].astype(np.float64)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1)


@pytest.mark.parametrize("make", [lambda: RopeTable(SPEC, 64), lambda: RopeKernel(SPEC)])
@pytest.mark.parametrize(("offset", "tokens"), [(0, 1), (0, 64), (13, 40), (63, 1)])
def test_rope_rotates_halves_by_position(make, offset: int, tokens: int) -> None:
    x = qkv(64)[0]
    expected = oracle.rotate(x.astype(np.float64), SPEC)[offset : offset + tokens]
    y = make()(as_heads(x)[:, offset : offset + tokens], offset).transpose(1, 0, 2)
    assert np.abs(np.array(y) - expected).max() <= budget("planes_f32")


@pytest.mark.parametrize("position", [8_000, 8_191])
def test_rope_by_table_is_exact_to_rounding_far_out(position: int) -> None:
    x = qkv(1)[0]
    y = RopeTable(SPEC, 8_192)(as_heads(x), position).transpose(1, 0, 2)
    assert np.abs(np.array(y) - rotated(x, position)).max() <= budget("planes_f32")


def test_rope_by_kernel_stays_below_the_rounding_of_planes_far_out() -> None:
    x = qkv(1)[0]
    y = RopeKernel(SPEC)(as_heads(x), 8_000).transpose(1, 0, 2)
    assert np.abs(np.array(y) - rotated(x, 8_000)).max() <= budget("planes_f16_kv")


def test_rope_keeps_the_type() -> None:
    x = as_heads(qkv(2)[0]).astype(mx.bfloat16)
    assert RopeTable(SPEC, 8)(x, 0).dtype == RopeKernel(SPEC)(x, 0).dtype == mx.bfloat16


@pytest.mark.parametrize(
    ("offset", "tokens"), [(0, 1), (0, 2), (0, BLOCK_ROWS), (5, BLOCK_ROWS + 1), (130, 260), (200, 1)]
)
@pytest.mark.parametrize("way", ["blocks", "kernel"])
def test_chunk_attention_sees_prefix_and_chunk_causally(way: str, offset: int, tokens: int) -> None:
    q, k, v = qkv(offset + tokens)
    expected = oracle.attend(*(x.astype(np.float64) for x in (q, k, v)), window=None)[offset:]
    args = (as_heads(q)[:, offset:], as_heads(k), as_heads(v))
    out = attend_kernel(*args) if way == "kernel" else attend_blocks(*args, query_blocks(offset, tokens))
    assert out.shape == (tokens, HEADS * DIM)
    assert np.abs(np.array(out) - expected).max() <= budget("attention_f32")


@pytest.mark.parametrize("keys", [1, 2, 257])
def test_attention_of_one_token_reads_every_key(keys: int) -> None:
    q, k, v = qkv(keys)
    expected = oracle.attend(*(x.astype(np.float64) for x in (q, k, v)), window=None)[-1:]
    out = attend_one(as_heads(q)[:, -1:], as_heads(k), as_heads(v))
    assert np.abs(np.array(out) - expected).max() <= budget("attention_f32")


def test_attention_does_not_read_beyond_the_keys_it_is_given() -> None:
    q, k, v = qkv(40)
    padded = [np.concatenate([x, np.full((24, KV_HEADS, DIM), np.nan, np.float32)]) for x in (k, v)]
    views = [as_heads(x)[:, :40] for x in padded]
    out = attend_blocks(as_heads(q), *views, query_blocks(0, 40))
    assert np.isfinite(np.array(out)).all()
