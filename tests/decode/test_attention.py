from __future__ import annotations

import mlx.core as mx
import numpy as np
import oracle_decoder as oracle
import pytest

from muser_decode import attention
from muser_decode.attention import BLOCK_ROWS, RopeKernel, RopeTable, attention_of_chunk, attention_of_one, query_blocks
from muser_wire.model.spec import LinearScaling, Llama3Scaling, RopeSpec
from muser_wire.numerics import budget

HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = 0.4
"""Not the usual inverse root of the head size, so that one who takes that is found out."""
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


SPECS = {
    "part of a head": RopeSpec(theta=10_000.0, rotary_dim=DIM // 2),
    "stretched": RopeSpec(theta=10_000.0, rotary_dim=DIM, scaling=LinearScaling(8.0)),
    "blended": RopeSpec(theta=10_000.0, rotary_dim=DIM, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("way", ["table", "kernel"])
def test_rope_rotates_as_the_spec_says(way: str, spec: RopeSpec) -> None:
    x = qkv(64)[0]
    rope = RopeTable(spec, 64) if way == "table" else RopeKernel(spec)
    y = rope(as_heads(x), 0).transpose(1, 0, 2)
    assert np.abs(np.array(y) - oracle.rotate(x.astype(np.float64), spec)).max() <= budget("planes_f32")


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The choices for either device; both compute the same here."""
    monkeypatch.setattr(attention, "on_gpu", lambda: request.param == "gpu")
    monkeypatch.setattr(attention, "KERNEL_ROWS", 50)
    return str(request.param)


@pytest.mark.parametrize("window", [None, 1, 60, 130, 1000])
@pytest.mark.parametrize(
    ("offset", "tokens"), [(0, 1), (0, 2), (0, BLOCK_ROWS), (5, BLOCK_ROWS + 1), (130, 260), (200, 1), (129, 2)]
)
@pytest.mark.usefixtures("device")
def test_chunk_attention_sees_its_window_causally(offset: int, tokens: int, window: int | None) -> None:
    q, k, v = qkv(offset + tokens)
    expected = oracle.attend(*(x.astype(np.float64) for x in (q, k, v)), window=window, scale=SCALE)[offset:]
    seen = 0 if window is None else max(0, offset - window + 1)
    attend = attention_of_chunk(offset, tokens, window, SCALE)
    out = attend(as_heads(q)[:, offset:], as_heads(k)[:, seen:], as_heads(v)[:, seen:])
    assert out.shape == (tokens, HEADS * DIM)
    assert np.abs(np.array(out) - expected).max() <= budget("attention_f32")


@pytest.mark.parametrize("keys", [1, 2, 257])
@pytest.mark.usefixtures("device")
def test_attention_of_one_token_reads_every_key(keys: int) -> None:
    q, k, v = qkv(keys)
    expected = oracle.attend(*(x.astype(np.float64) for x in (q, k, v)), window=None, scale=SCALE)[-1:]
    out = attention_of_one(SCALE)(as_heads(q)[:, -1:], as_heads(k), as_heads(v))
    assert np.abs(np.array(out) - expected).max() <= budget("attention_f32")


@pytest.mark.usefixtures("device")
def test_attention_does_not_read_beyond_the_keys_it_is_given() -> None:
    q, k, v = qkv(40)
    padded = [np.concatenate([x, np.full((24, KV_HEADS, DIM), np.nan, np.float32)]) for x in (k, v)]
    views = [as_heads(x)[:, :40] for x in padded]
    assert np.isfinite(np.array(attention_of_chunk(0, 40, 16, SCALE)(as_heads(q), *views))).all()


def test_blocks_read_no_keys_outside_their_windows() -> None:
    blocks = query_blocks(offset=100, tokens=50, window=30, rows=20)
    # The first query, at 100, sees 71 to 100, and keys count from 71.
    assert [(b.start, b.stop, b.first, b.last) for b in blocks] == [(0, 20, 0, 49), (20, 40, 20, 69), (40, 50, 40, 79)]
