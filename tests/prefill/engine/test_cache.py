from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from muser_prefill.engine.cache import KVCache
from muser_prefill.errors import CacheFull, CacheRangeError
from muser_wire.geometry import ElementType

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 16
CPU = torch.device("cpu")


@pytest.fixture
def cache(make_model: Callable) -> KVCache:
    return KVCache(make_model().spec, 8, ElementType.F16, CPU)


def rows(tokens: int, value: float) -> torch.Tensor:
    return torch.full((tokens, KV_HEADS, HEAD_DIM), value)


def fill(cache: KVCache, tokens: int, value: float) -> None:
    start, stop = cache.length, cache.begin(tokens)
    for layer in range(LAYERS):
        cache.write(layer, start, rows(tokens, value), rows(tokens, -value))
    cache.commit(stop)


def test_planes_are_contiguous_views_in_the_element_type(cache: KVCache) -> None:
    fill(cache, 3, 1.0)
    fill(cache, 2, 2.0)
    keys, values = cache.planes(1, 2, 5)
    assert keys.shape == values.shape == (3, KV_HEADS, HEAD_DIM)
    assert keys.dtype == values.dtype == torch.float16
    assert keys.is_contiguous()
    assert keys[:, 0, 0].tolist() == [1.0, 2.0, 2.0]
    assert values[:, 1, 15].tolist() == [-1.0, -2.0, -2.0]
    assert keys.data_ptr() == cache.planes(1, 2, 4)[0].data_ptr()


def test_a_layer_is_readable_before_the_chunk_is_committed(cache: KVCache) -> None:
    cache.begin(4)
    cache.write(0, 0, rows(4, 1.0), rows(4, 1.0))
    assert cache.length == 0
    assert len(cache.planes(0, 0, 4)[0]) == 4
    with pytest.raises(CacheRangeError, match="layer 1 holds 0 positions, asked for 0 to 4"):
        cache.planes(1, 0, 4)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (-1, 2), (2, 2), (3, 1)])
def test_ranges_that_are_not_there_are_refused(cache: KVCache, start: int, stop: int) -> None:
    fill(cache, 3, 1.0)
    with pytest.raises(CacheRangeError):
        cache.planes(0, start, stop)


def test_an_abandoned_chunk_is_not_readable(cache: KVCache) -> None:
    fill(cache, 2, 1.0)
    cache.begin(3)
    cache.write(0, 2, rows(3, 9.0), rows(3, 9.0))
    cache.begin(1)
    with pytest.raises(CacheRangeError):
        cache.planes(0, 2, 3)


def test_commit_needs_every_layer(cache: KVCache) -> None:
    stop = cache.begin(2)
    for layer in (0, 2):
        cache.write(layer, 0, rows(2, 1.0), rows(2, 1.0))
    with pytest.raises(CacheRangeError, match="layer 1"):
        cache.commit(stop)
    assert cache.length == 0


def test_a_chunk_that_does_not_fit_is_refused(cache: KVCache) -> None:
    fill(cache, 6, 1.0)
    with pytest.raises(CacheFull, match="9 positions do not fit a cache of 8"):
        cache.begin(3)
    assert cache.length == 6
