from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.engine.cache import KVCache
from muser_decode.engine.layered import GROWTH_TOKENS, ROLLBACK_TOKENS, SLACK_TOKENS
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


WINDOW = 20
SLIDING = replace(SPEC, layers=(LayerSpec(WINDOW, None), LayerSpec(None, None), LayerSpec(WINDOW, None)))


def numbered(start: int, stop: int) -> mx.array:
    """Rows whose every number is their position."""
    positions = mx.arange(start, stop, dtype=mx.float32)[None, :, None]
    return mx.broadcast_to(positions, (2 * KV_HEADS, stop - start, DIM))


def append(cache: KVCache, tokens: int, shift: int = 0) -> list[list[int]]:
    """Append rows numbered from `shift` above their position; return the numbers that each layer's queries see."""
    start, stop = cache.length, cache.length + tokens
    seen = []
    for layer in range(LAYERS):
        keys, values = cache.append(layer, numbered(start + shift, stop + shift))
        assert mx.array_equal(keys, values)
        assert mx.array_equal(keys, mx.broadcast_to(keys[:1, :, :1], keys.shape))
        seen.append([int(number) for number in keys[0, :, 0].tolist()])
    cache.commit(stop)
    return seen


@pytest.mark.parametrize("tokens", [[1] * 400, [19, 1, 1, 60, 7, 200, 1, 1], [300, 1, 113, 112, 1, 100, 20], [7] * 60])
def test_queries_of_a_sliding_layer_see_their_windows_in_order(tokens: list[int]) -> None:
    cache = KVCache(SLIDING, mx.float32, ElementType.F16)
    for count in tokens:
        start = cache.length
        sliding, full, other = append(cache, count)
        assert full == list(range(start + count))
        assert sliding == other == list(range(max(0, start - WINDOW + 1), start + count))
        assert [array.shape[1] for array in cache.arrays[::2]] == [min(WINDOW + SLACK_TOKENS, cache.capacity)] * 2


@pytest.mark.parametrize("block", [1, 3, ROLLBACK_TOKENS])
def test_the_last_positions_can_be_taken_back_at_any_time(block: int) -> None:
    """As verifying drafts does: a block is appended, one of its positions stays, the others are written anew."""
    cache = KVCache(SLIDING, mx.float32, ElementType.F16)
    append(cache, 90)
    for _ in range(300):
        start = cache.length
        append(cache, block, shift=1000)
        cache.rollback(start)
        assert append(cache, 1)[0] == list(range(max(0, start - WINDOW + 1), start + 1))


def test_sixteen_positions_can_be_taken_back_after_chunks_of_any_size() -> None:
    assert ROLLBACK_TOKENS == 16
    for tokens in (16, 17, 40, 111, 112, 113, 150, 400):
        cache = KVCache(SLIDING, mx.float32, ElementType.F16)
        append(cache, 50)
        append(cache, tokens)
        cache.rollback(cache.length - 16)
        start = cache.length
        assert append(cache, 2)[0] == list(range(start - WINDOW + 1, start + 2))


def test_no_more_than_what_is_kept_can_be_taken_back() -> None:
    cache = KVCache(SLIDING, mx.float32, ElementType.F16)
    append(cache, 300)
    for length in (283, 301):
        with pytest.raises(CacheError, match=f"cannot roll back from 300 to {length}"):
            cache.rollback(length)
    cache.rollback(290)
    with pytest.raises(CacheError, match="cannot roll back from 290 to 283: 300 were reached"):
        cache.rollback(283)
    cache.rollback(284)
    assert cache.length == 284


def install_numbered(cache: KVCache, start: int, stop: int, cut: int = 1 << 20) -> None:
    """Install a chunk as it comes from the wire: of a sliding layer only the window before its end."""
    for layer, spec in enumerate(SLIDING.layers):
        first = start if spec.window is None else max(start, stop - spec.window)
        for a in range(first, stop, cut):
            plane = numbered(a, min(stop, a + cut))[:KV_HEADS].transpose(1, 0, 2).astype(mx.float16)
            cache.install(layer, a, plane, plane)
    cache.commit(stop)


@pytest.mark.parametrize("cut", [1 << 20, 3])
@pytest.mark.parametrize("chunk", [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 170])
def test_chunks_from_the_wire_are_gone_on_from(chunk: int, cut: int) -> None:
    cache = KVCache(SLIDING, mx.float32, ElementType.F16)
    for start in range(0, 350, chunk):
        install_numbered(cache, start, start + chunk, cut)
        stop = cache.length
        keys, values = cache.planes(0, max(0, stop - WINDOW), stop)
        assert keys[:, 0, 0].tolist() == values[:, 0, 0].tolist() == list(range(max(0, stop - WINDOW), stop))
    start = cache.length
    assert append(cache, 30)[0] == list(range(start - WINDOW + 1, start + 30))
    for _ in range(200):
        start = cache.length
        assert append(cache, 1)[2] == list(range(start - WINDOW + 1, start + 1))


def test_nothing_before_an_installed_window_can_be_had() -> None:
    cache = KVCache(SLIDING, mx.float32, ElementType.F16)
    install_numbered(cache, 0, 100)
    with pytest.raises(CacheError, match="positions 79 to 100 asked of a layer that has 80 to 100"):
        cache.planes(0, 79, 100)
    with pytest.raises(CacheError, match="cannot roll back to 98: layer 0 starts at 80"):
        cache.rollback(98)
    append(cache, 5)
    cache.rollback(100)
    assert append(cache, 1)[0] == list(range(81, 101))


def test_a_chunk_that_failed_half_way_is_not_built_upon() -> None:
    cache = KVCache(SLIDING, mx.float32, ElementType.F16)
    append(cache, 100)
    cache.append(0, numbered(100, 300))
    with pytest.raises(CacheError, match="positions 81 to 101 asked"):
        cache.append(0, numbered(100, 101))
