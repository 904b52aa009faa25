from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.engine.cache import GROWTH_TOKENS, ROLLBACK_TOKENS
from muser_decode.errors import CacheError
from muser_decode.reference.compiled.cache import CompiledCache, cache_nbytes
from muser_wire.home import muser_home
from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec
from muser_wire.reference.compiled.build import shared_object
from muser_wire.reference.compiled.library import load
from muser_wire.reference.compiled.operations import Operations
from muser_wire.reference.tiny import random_spec

KV_HEADS, DIM, MAX = 2, 16, 1_300


def spec(*windows: int | None) -> ModelSpec:
    layers = tuple(LayerSpec(window, RopeSpec(10_000.0, DIM)) for window in windows)
    return replace(random_spec(0), layers=layers, kv_heads=KV_HEADS, head_dim=DIM, max_positions=MAX)


def new_cache(*windows: int | None) -> CompiledCache:
    return CompiledCache(spec(*windows), Operations(load(shared_object(muser_home() / "kernels")), lambda: 1))


def plane(start: int, stop: int, seed: int) -> np.ndarray:
    """Rows of positions [start, stop) of an endless plane."""
    return np.random.default_rng(seed).standard_normal((stop, KV_HEADS, DIM)).astype(np.float16)[start:]


def install(cache: CompiledCache, start: int, stop: int, layers: int = 1) -> None:
    for layer in range(layers):
        cache.install(layer, start, *(mx.array(plane(start, stop, 2 * layer + part)) for part in (0, 1)))
    cache.commit(stop)


def check(cache: CompiledCache, start: int, stop: int, layer: int = 0) -> None:
    for part, got in enumerate(cache.planes(layer, start, stop)):
        np.testing.assert_array_equal(np.array(got), plane(start, stop, 2 * layer + part))


def test_installed_planes_come_back_exactly_and_rooms_grow() -> None:
    cache = new_cache(None, None)
    install(cache, 0, 7, layers=2)
    install(cache, 7, GROWTH_TOKENS + 3, layers=2)
    assert (cache.length, cache.capacity) == (GROWTH_TOKENS + 3, 2 * GROWTH_TOKENS)
    for layer in (0, 1):
        check(cache, 0, GROWTH_TOKENS + 3, layer)
    cache.reserve(MAX)
    assert cache.capacity == MAX
    assert cache.nbytes == cache_nbytes(spec(None, None), MAX)
    with pytest.raises(CacheError, match="1301 positions asked, the model has 1300"):
        cache.reserve(MAX + 1)


def test_installed_memory_may_be_written_again_at_once() -> None:
    slot = plane(0, 5, 0)
    k, v = mx.array(slot), mx.array(plane(0, 5, 1))
    cache = new_cache(None)
    cache.install(0, 0, k, v)
    k[:] = 0
    mx.eval(k)
    cache.commit(5)
    check(cache, 0, 5)


@pytest.mark.parametrize(("step", "tokens"), [(1, 460), (40, 1_200), (300, 1_200)])
def test_a_window_keeps_what_is_needed_in_a_bounded_room(step: int, tokens: int) -> None:
    window = 100
    cache = new_cache(window)
    for start in range(0, tokens, step):
        install(cache, start, min(tokens, start + step))
        check(cache, max(0, cache.length - window), cache.length)
    # 100 and the slack are rounded up to blocks of 64, beside one; a row has two planes, integers and two scales.
    assert cache.nbytes == 320 * KV_HEADS * (2 * 2 * DIM + 2 * 2 * DIM + 2 * 4)
    with pytest.raises(CacheError, match="asked of a layer that has"):
        cache.planes(0, 0, 10)


def test_a_gap_before_a_window_is_allowed_and_a_rollback_behind_it_is_not() -> None:
    cache = new_cache(20)
    install(cache, 500 - 20, 500)
    check(cache, 480, 500)
    cache.rollback(499)
    with pytest.raises(CacheError, match="cannot roll back to 490: layer 0 starts at 480"):
        cache.rollback(490)


def test_rollback_has_a_bound_and_lets_go_on() -> None:
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
def test_planes_of_another_kind_are_refused(k: np.ndarray) -> None:
    v = np.zeros((3, KV_HEADS, DIM), np.float16)
    with pytest.raises(CacheError, match=r"expected \(\d, 2, 16\) in f16"):
        new_cache(None).install(0, 0, mx.array(k), mx.array(v))
