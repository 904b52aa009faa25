from __future__ import annotations

import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.engine.cache import KVCache
from muser_decode.engine.source import Piece, StagedChunk, StagingSlot
from muser_decode.engine.staging import Staging, check_chunk
from muser_decode.errors import StagedChunkInvalid
from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.spec import LayerSpec, ModelSpec
from muser_wire.schedule import Chunk, ScheduleRequest, WindowPolicy, build_schedule

KV_HEADS, DIM, LAYERS = 2, 16, 3
SPEC = ModelSpec(
    family="llama",
    layers=(LayerSpec(None, None),) * LAYERS,
    hidden_size=32,
    ffn_size=32,
    heads=4,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    vocab_size=64,
    max_positions=4_096,
    norm_eps=1e-5,
    tied_embeddings=False,
    attention_scale=0.25,
)
TOKEN_NBYTES = KV_HEADS * DIM * 2
CHUNK = 32
SLOT_NBYTES = LAYERS * 2 * CHUNK * TOKEN_NBYTES
NUMPY = {ElementType.F16: np.float16, ElementType.BF16: np.uint16}


def pieces(start: int, stop: int) -> tuple[Piece, ...]:
    """Layer by layer, keys before values, each layer cut in two where it can be: as segments arrive."""
    cut = start + max(1, (stop - start) // 3)
    out, offset = [], 0
    for layer in range(LAYERS):
        for a, b in ((start, cut), (cut, stop)):
            if a < b:
                nbytes = (b - a) * TOKEN_NBYTES
                out.append(Piece(layer, a, b, offset, offset + nbytes))
                offset += 2 * nbytes
    return tuple(out)


def bits(random: np.random.Generator, tokens: int) -> np.ndarray:
    """Random finite numbers as their 16 bits."""
    values = random.integers(0, 1 << 16, (tokens, KV_HEADS, DIM), dtype=np.uint16)
    return values & np.uint16(0xBBFF) if tokens else values


def fill(slot: StagingSlot, layout: tuple[Piece, ...], planes: list[tuple[np.ndarray, np.ndarray]], base: int) -> None:
    for piece in layout:
        for plane, offset in zip(planes[piece.layer], (piece.k_offset_nbytes, piece.v_offset_nbytes), strict=True):
            data = plane[piece.start - base : piece.stop - base].tobytes()
            slot.memory[offset : offset + len(data)] = data


def as_bits(x: mx.array) -> np.ndarray:
    return np.array(mx.contiguous(x).view(mx.uint16))


@pytest.mark.parametrize("by_mlx", [False, True])
@pytest.mark.parametrize("element", list(ElementType))
def test_planes_written_by_another_thread_are_installed_exactly(element: ElementType, *, by_mlx: bool) -> None:
    """Slots are refilled with other bytes as soon as they are free; no installed plane may change afterwards."""
    chunks = 30
    staging = Staging(Geometry.of(SPEC, element), slots=2, slot_nbytes=SLOT_NBYTES, wake=lambda: None)
    staging.pool.direct = not by_mlx
    cache = KVCache(SPEC, mx.float32, element)
    random = np.random.default_rng(5)
    planes = [[(bits(random, CHUNK), bits(random, CHUNK)) for _ in range(LAYERS)] for _ in range(chunks)]
    staged: list[StagedChunk] = []
    ready = threading.Semaphore(0)

    def write() -> None:
        for index in range(chunks):
            slot = staging.pool.acquire(10.0)
            slot.memory[:] = b"\xee" * len(slot.memory)
            layout = pieces(index * CHUNK, (index + 1) * CHUNK)
            fill(slot, layout, planes[index], index * CHUNK)
            staged.append(StagedChunk(index * CHUNK, (index + 1) * CHUNK, slot, layout))
            ready.release()

    writer = threading.Thread(target=write)
    writer.start()
    for index in range(chunks):
        assert ready.acquire(timeout=10.0)
        staging.install(staged[index], cache, chunks * CHUNK)
        staging.pool.release(staged[index].slot)
    writer.join()
    for index, layers in enumerate(planes):
        for layer, (k, v) in enumerate(layers):
            ours = cache.planes(layer, index * CHUNK, (index + 1) * CHUNK)
            np.testing.assert_array_equal(as_bits(ours[0]), k)
            np.testing.assert_array_equal(as_bits(ours[1]), v)


def test_a_slot_is_flat_writable_bytes_of_at_least_the_size_asked() -> None:
    staging = Staging(Geometry.of(SPEC, ElementType.F16), slots=3, slot_nbytes=101, wake=lambda: None)
    memory = staging.pool.acquire(0.0).memory
    assert (memory.format, memory.ndim, memory.readonly, len(memory)) == ("B", 1, False, 102)


GEOMETRY = Geometry.of(SPEC, ElementType.F16)


def good_chunk(start: int = 64, stop: int = 80) -> StagedChunk:
    return StagedChunk(start, stop, StagingSlot(0, memoryview(bytearray(SLOT_NBYTES))), pieces(start, stop))


def with_piece(chunk: StagedChunk, index: int, **changes: int) -> StagedChunk:
    changed = list(chunk.pieces)
    changed[index] = replace(changed[index], **changes)
    return replace(chunk, pieces=tuple(changed))


def test_a_chunk_that_continues_the_cache_is_taken() -> None:
    check_chunk(good_chunk(), GEOMETRY, length=64, tokens=100)
    check_chunk(good_chunk(64, 65), GEOMETRY, length=64, tokens=65)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (good_chunk(32, 48), "starts at 32, the cache ends at 64"),
        (good_chunk(65, 80), "starts at 65, the cache ends at 64"),
        (good_chunk(64, 101), "ends at 101, the prompt at 100"),
        (replace(good_chunk(), stop=64), "ends at 64"),
        (replace(good_chunk(), pieces=good_chunk().pieces[:-1]), "layer 2 ends at 69, the chunk at 80"),
        (replace(good_chunk(), pieces=good_chunk().pieces[1:]), "layer 0 goes on at 69, expected 64"),
        (replace(good_chunk(), pieces=good_chunk().pieces + good_chunk().pieces[:1]), "layer 0 goes on at 64"),
        (replace(good_chunk(), pieces=()), "layer 0 ends at 64"),
        (with_piece(good_chunk(), 1, stop=81), "outside"),
        (with_piece(good_chunk(), 0, layer=3), "outside"),
        (with_piece(good_chunk(), 0, layer=-1), "outside"),
        (with_piece(good_chunk(), 0, stop=64), "outside"),
        (with_piece(good_chunk(), 0, k_offset_nbytes=-2), "outside"),
        (with_piece(good_chunk(), 0, k_offset_nbytes=1), "outside"),
        (with_piece(good_chunk(), 0, v_offset_nbytes=SLOT_NBYTES - 5 * TOKEN_NBYTES + 2), "outside"),
    ],
)
def test_a_chunk_that_does_not_is_refused_by_name(chunk: StagedChunk, message: str) -> None:
    with pytest.raises(StagedChunkInvalid, match=message):
        check_chunk(chunk, GEOMETRY, length=64, tokens=100)


def test_a_refused_chunk_leaves_the_cache_alone() -> None:
    staging = Staging(GEOMETRY, slots=1, slot_nbytes=SLOT_NBYTES, wake=lambda: None)
    cache = KVCache(SPEC, mx.float32, ElementType.F16)
    chunk = StagedChunk(0, 8, staging.pool.acquire(0.0), pieces(0, 8)[:-1])
    with pytest.raises(StagedChunkInvalid):
        staging.install(chunk, cache, 100)
    assert (cache.length, cache.capacity) == (0, 0)


def scheduled(windows: tuple[int | None, ...], held: int, grid: int) -> tuple[Geometry, tuple[Chunk, ...]]:
    """What travels for a prompt of 101 tokens."""
    geometry = Geometry(windows, KV_HEADS, DIM, ElementType.F16)
    return geometry, build_schedule(ScheduleRequest(geometry, 101, held, grid, WindowPolicy.ROLLING)).chunks


def as_staged(chunk: Chunk, shift: int = 0) -> StagedChunk:
    """A chunk as ingest stages it; sliding layers may begin `shift` tokens later."""
    laid, offset = [], 0
    for segment in chunk.segments:
        for part in segment.slices:
            half = part.nbytes // 2
            laid.append(Piece(part.layer, part.start, part.stop, offset, offset + half))
            offset += part.nbytes
    laid[0] = replace(laid[0], start=laid[0].start + shift)
    return StagedChunk(chunk.start, chunk.stop, StagingSlot(0, memoryview(bytearray(offset))), tuple(laid))


@pytest.mark.parametrize("held", [0, 5, 40])
@pytest.mark.parametrize("grid", [7, 16, 24, 33, 100])
@pytest.mark.parametrize("window", [1, 6, 16, 40, 200])
def test_what_the_schedule_sends_is_taken_and_nothing_less(window: int, grid: int, held: int) -> None:
    geometry, chunks = scheduled((window, None, window), held, grid)
    for chunk in chunks:
        check_chunk(as_staged(chunk), geometry, chunk.start, 100)
        with pytest.raises(StagedChunkInvalid, match=r"layer 0 goes on at|outside"):
            check_chunk(as_staged(chunk, shift=1), geometry, chunk.start, 100)


def test_planes_older_than_the_window_are_refused() -> None:
    geometry, chunks = scheduled((16, None, 16), held=0, grid=40)
    with pytest.raises(StagedChunkInvalid, match="layer 0 goes on at 23, expected 24"):
        check_chunk(as_staged(chunks[0], shift=-1), geometry, 0, 100)


@pytest.mark.parametrize("by_mlx", [False, True])
def test_planes_that_lie_beside_the_slot_are_installed_from_there(*, by_mlx: bool) -> None:
    staging = Staging(Geometry.of(SPEC, ElementType.F16), slots=1, slot_nbytes=SLOT_NBYTES, wake=lambda: None)
    staging.pool.direct = not by_mlx
    random = np.random.default_rng(3)
    planes = [(bits(random, CHUNK), bits(random, CHUNK)) for _ in range(LAYERS)]
    layout = pieces(0, CHUNK)
    memory = memoryview(bytearray(SLOT_NBYTES))
    fill(StagingSlot(9, memory), layout, planes, 0)
    slot = staging.pool.acquire(1.0)
    assert slot is not None
    cache = KVCache(SPEC, mx.float32, ElementType.F16)
    staging.install(StagedChunk(0, CHUNK, slot, layout, beside=memory.toreadonly()), cache, CHUNK)
    memory[:] = bytes(SLOT_NBYTES)
    for layer, (k, v) in enumerate(planes):
        for ours, theirs in zip(cache.planes(layer, 0, CHUNK), (k, v), strict=True):
            assert np.array_equal(as_bits(ours), theirs)


@pytest.mark.parametrize("by_mlx", [False, True])
def test_windows_are_installed_alike_by_either_way(*, by_mlx: bool) -> None:
    """Chunk after chunk into sliding layers, in pieces, with rows that are pushed out."""
    window, total = 40, 8 * CHUNK
    spec = replace(SPEC, layers=(LayerSpec(None, window), LayerSpec(None, None), LayerSpec(None, window)))
    staging = Staging(Geometry.of(spec, ElementType.F16), slots=1, slot_nbytes=SLOT_NBYTES, wake=lambda: None)
    staging.pool.direct = not by_mlx
    random = np.random.default_rng(4)
    planes = [(bits(random, total), bits(random, total)) for _ in range(LAYERS)]
    cache = KVCache(spec, mx.float32, ElementType.F16)
    for start in range(0, total, CHUNK):
        slot = staging.pool.acquire(1.0)
        assert slot is not None
        layout = pieces(start, start + CHUNK)
        fill(slot, layout, planes, 0)
        staging.install(StagedChunk(start, start + CHUNK, slot, layout), cache, total)
        staging.pool.release(slot)
        for layer, (k, v) in enumerate(planes):
            first = 0 if layer == 1 else max(0, start + CHUNK - window)
            for ours, theirs in zip(cache.planes(layer, first, start + CHUNK), (k, v), strict=True):
                assert np.array_equal(as_bits(ours), theirs[first : start + CHUNK])
