from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from decoded_lane import compiled_operations

from muser_decode.engine.layered import GROWTH_TOKENS, ROLLBACK_TOKENS
from muser_decode.errors import CacheError
from muser_decode.reference import cache as mlx_cache
from muser_decode.reference.cache import ReferenceCache, most_rows
from muser_decode.reference.compiled import cache as compiled_cache
from muser_decode.reference.compiled.cache import CompiledCache
from muser_decode.reference.planes import Derivation, PlaneShape
from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec
from muser_wire.reference.tiny import random_spec

KV_HEADS, DIM, MAX = 2, 16, 1_300
DERIVE = Derivation(PlaneShape(KV_HEADS, DIM))


def spec(*windows: int | None) -> ModelSpec:
    layers = tuple(LayerSpec(window, RopeSpec(10_000.0, DIM)) for window in windows)
    return replace(random_spec(0), layers=layers, kv_heads=KV_HEADS, head_dim=DIM, max_positions=MAX)


Made = ReferenceCache | CompiledCache
NewCache = Callable[..., Made]


def mlx_new_cache(*windows: int | None) -> ReferenceCache:
    return ReferenceCache(spec(*windows), DERIVE)


def compiled_new_cache(*windows: int | None) -> CompiledCache:
    return CompiledCache(spec(*windows), compiled_operations())


def row_nbytes(cache: Made) -> int:
    """Bytes of a position: keys and values as they travel, then what they are computed with."""
    derived = 2 * 4 * DIM + 2 * 4 * DIM + 4 if isinstance(cache, ReferenceCache) else 2 * 2 * DIM + 2 * 4
    return KV_HEADS * (2 * 2 * DIM + derived)


@pytest.fixture(params=[mlx_new_cache, compiled_new_cache], ids=["mlx", "compiled"])
def new_cache(request: pytest.FixtureRequest) -> NewCache:
    """How a cache with layers of these windows is made: of MLX's arrays, or for compiled kernels."""
    made: NewCache = request.param
    return made


def plane(start: int, stop: int, seed: int) -> np.ndarray:
    """Rows of positions [start, stop) of an endless plane."""
    return np.random.default_rng(seed).standard_normal((stop, KV_HEADS, DIM)).astype(np.float16)[start:]


def install(cache: Made, start: int, stop: int, layers: int = 1) -> None:
    for layer in range(layers):
        cache.install(layer, start, *(mx.array(plane(start, stop, 2 * layer + part)) for part in (0, 1)))
    cache.commit(stop)


def check(cache: Made, start: int, stop: int, layer: int = 0) -> None:
    for part, got in enumerate(cache.planes(layer, start, stop)):
        np.testing.assert_array_equal(np.array(got), plane(start, stop, 2 * layer + part))


def test_installed_planes_come_back_exactly_and_rooms_grow(new_cache: NewCache) -> None:
    cache = new_cache(None, None)
    install(cache, 0, 7, layers=2)
    install(cache, 7, GROWTH_TOKENS + 3, layers=2)
    assert (cache.length, cache.capacity) == (GROWTH_TOKENS + 3, 2 * GROWTH_TOKENS)
    for layer in (0, 1):
        check(cache, 0, GROWTH_TOKENS + 3, layer)
    cache.reserve(MAX)
    assert cache.capacity == MAX
    # 1,300 positions are 21 blocks of 64.
    assert cache.nbytes == 2 * 1_344 * row_nbytes(cache)
    of = mlx_cache if isinstance(cache, ReferenceCache) else compiled_cache
    assert of.cache_nbytes(spec(None, None), MAX) == cache.nbytes
    with pytest.raises(CacheError, match="1301 positions asked, the model has 1300"):
        cache.reserve(MAX + 1)


def test_what_is_seen_begins_and_ends_with_whole_blocks() -> None:
    cache = mlx_new_cache(None, 100)
    install(cache, 0, 200, layers=2)
    new = DERIVE.rows(mx.array(plane(200, 203, 9).swapaxes(0, 1).repeat(2, axis=0)))
    # The first of the three sees all, or from 200 - 100 + 1 = 101 on, which is in the block at 64.
    assert cache.append(0, new).powers.shape == (KV_HEADS, 256, 1)
    assert cache.append(1, new).powers.shape == (KV_HEADS, 192, 1)


@pytest.mark.parametrize(("step", "tokens"), [(1, 460), (40, 1_200), (300, 1_200)])
def test_a_window_keeps_what_is_needed_in_a_bounded_room(step: int, tokens: int, new_cache: NewCache) -> None:
    window = 100
    cache = new_cache(window)
    for start in range(0, tokens, step):
        install(cache, start, min(tokens, start + step))
        check(cache, max(0, cache.length - window), cache.length)
    # 100 and the slack are rounded up to blocks of 64, beside one.
    assert most_rows(window, MAX) == 320
    assert cache.nbytes == 320 * row_nbytes(cache)
    with pytest.raises(CacheError, match="asked of a layer that has"):
        cache.planes(0, 0, 10)


def test_a_gap_before_a_window_is_allowed_and_a_rollback_behind_it_is_not(new_cache: NewCache) -> None:
    cache = new_cache(20)
    install(cache, 500 - 20, 500)
    check(cache, 480, 500)
    cache.rollback(499)
    with pytest.raises(CacheError, match="cannot roll back to 490: layer 0 starts at 480"):
        cache.rollback(490)


def test_rollback_has_a_bound_and_lets_go_on(new_cache: NewCache) -> None:
    cache = new_cache(None)
    install(cache, 0, 100)
    cache.rollback(100 - ROLLBACK_TOKENS)
    install(cache, 100 - ROLLBACK_TOKENS, 101)
    check(cache, 0, 101)
    with pytest.raises(CacheError, match="cannot roll back from 101 to 84"):
        cache.rollback(84)
    with pytest.raises(CacheError, match="cannot commit 90 positions after 101"):
        cache.commit(90)


@pytest.mark.parametrize(
    "k",
    [
        np.zeros((3, KV_HEADS, DIM), np.float32),
        np.zeros((3, KV_HEADS, DIM + 1), np.float16),
        np.zeros((2, KV_HEADS, DIM), np.float16),
    ],
)
def test_planes_of_another_kind_are_refused(k: np.ndarray, new_cache: NewCache) -> None:
    v = np.zeros((3, KV_HEADS, DIM), np.float16)
    with pytest.raises(CacheError, match=r"expected \(\d, 2, 16\) in f16"):
        new_cache(None).install(0, 0, mx.array(k), mx.array(v))


def test_installed_memory_may_be_written_again_at_once() -> None:
    k, v = (mx.array(plane(0, 5, part)) for part in (0, 1))
    cache = compiled_new_cache(None)
    cache.install(0, 0, k, v)
    k[:] = 0
    mx.eval(k)
    cache.commit(5)
    check(cache, 0, 5)
