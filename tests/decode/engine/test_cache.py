from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.engine.cache import GROWTH_TOKENS, KVCache
from muser_decode.errors import CacheError
from muser_wire.geometry import ElementType
from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec

KV_HEADS, DIM, LAYERS, MAX = 2, 8, 3, 1_300
SPEC = ModelSpec(
    family="llama",
    layers=(LayerSpec(None, RopeSpec(10_000.0, DIM)),) * LAYERS,
    hidden_size=32,
    ffn_size=32,
    heads=4,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    vocab_size=64,
    max_positions=MAX,
    norm_eps=1e-5,
    tied_embeddings=False,
    attention_scale=0.25,
)


def new_cache(dtype: mx.Dtype = mx.float32) -> KVCache:
    return KVCache(SPEC, dtype, ElementType.F16)


def plane(tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, KV_HEADS, DIM)).astype(np.float16)


def install(cache: KVCache, start: int, tokens: int) -> None:
    for layer in range(LAYERS):
        k, v = plane(tokens, 10 * start + layer), plane(tokens, 10 * start + layer + 5)
        cache.install(layer, start, mx.array(k), mx.array(v))
    cache.commit(start + tokens)


def check(cache: KVCache, start: int, tokens: int) -> None:
    for layer in range(LAYERS):
        k, v = cache.planes(layer, start, start + tokens)
        np.testing.assert_array_equal(np.array(k), plane(tokens, 10 * start + layer))
        np.testing.assert_array_equal(np.array(v), plane(tokens, 10 * start + layer + 5))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_installed_planes_come_back_exactly(dtype: mx.Dtype) -> None:
    cache = new_cache(dtype)
    install(cache, 0, 7)
    install(cache, 7, 1)
    assert cache.length == 8
    check(cache, 0, 7)
    check(cache, 7, 1)


def test_growth_keeps_what_is_there_and_ends_at_the_model() -> None:
    cache = new_cache()
    assert cache.capacity == 0
    install(cache, 0, GROWTH_TOKENS)
    assert cache.capacity == GROWTH_TOKENS
    install(cache, GROWTH_TOKENS, 1)
    assert cache.capacity == 2 * GROWTH_TOKENS
    cache.reserve(MAX)
    assert cache.capacity == MAX < 3 * GROWTH_TOKENS
    check(cache, 0, GROWTH_TOKENS)
    check(cache, GROWTH_TOKENS, 1)
    with pytest.raises(CacheError, match="1301 positions asked, the model has 1300"):
        cache.reserve(MAX + 1)


def test_append_gives_everything_up_to_the_new_rows() -> None:
    cache = new_cache()
    install(cache, 0, 5)
    rows = np.arange(2 * KV_HEADS * 2 * DIM, dtype=np.float32).reshape(2 * KV_HEADS, 2, DIM)
    keys, values = cache.append(1, mx.array(rows))
    assert keys.shape == values.shape == (KV_HEADS, 7, DIM)
    np.testing.assert_array_equal(np.array(keys[:, 5:]), rows[:KV_HEADS])
    np.testing.assert_array_equal(np.array(values[:, 5:]), rows[KV_HEADS:])
    np.testing.assert_array_equal(np.array(keys[:, :5]), plane(5, 1).transpose(1, 0, 2).astype(np.float32))
    assert cache.length == 5


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (plane(3, 0)[:, :1], plane(3, 0)),
        (plane(3, 0), plane(2, 0)),
        (plane(3, 0).astype(np.float32), plane(3, 0)),
        (plane(3, 0).view(np.uint16), plane(3, 0).view(np.uint16)),
    ],
)
def test_planes_of_another_kind_are_refused(k: np.ndarray, v: np.ndarray) -> None:
    with pytest.raises(CacheError, match="expected"):
        new_cache().install(0, 0, mx.array(k), mx.array(v))


def test_commit_never_goes_back_or_beyond_memory() -> None:
    cache = new_cache()
    install(cache, 0, 4)
    for length in (3, cache.capacity + 1):
        with pytest.raises(CacheError, match="cannot commit"):
            cache.commit(length)
    with pytest.raises(CacheError, match="4 are there"):
        cache.planes(0, 0, 5)


def test_updates_happen_in_place() -> None:
    """A step must not copy the whole cache: one more row costs the same however large the cache is."""
    cache = new_cache()
    cache.reserve(MAX)
    row = mx.ones((2 * KV_HEADS, 1, DIM))
    mx.eval(cache.arrays, row)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(4):
        keys, _ = cache.append(0, row)
        cache.commit(cache.length + 1)
        mx.eval(keys.sum())
        del keys
    assert mx.get_peak_memory() - before < cache.arrays[0].nbytes
