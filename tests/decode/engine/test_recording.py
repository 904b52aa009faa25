from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.decoder import MlxDecoder
from muser_decode.engine import recording
from muser_decode.engine.cache import KVCache
from muser_decode.engine.recording import Recorder
from muser_decode.keeper import Slab
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny

GRID = 32
IDS = [5 + (index * 37) % 200 for index in range(300)]


class Slabs:
    """Takes what a recorder hands over."""

    def __init__(self) -> None:
        self.slabs: list[Slab] = []
        self.dropped = self.ended = False

    def add(self, slab: Slab) -> None:
        self.slabs.append(slab)

    def close(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> MlxDecoder:
    path = tmp_path_factory.mktemp("models") / "gemma3"
    write_tiny("gemma3", path, layers=6, window=20)
    return MlxDecoder(open_checkpoint(path), dtype=mx.float32, kv_element=ElementType.F16, packed=False)


Begin = Callable[..., tuple[Recorder, Slabs, KVCache, list[int]]]


@pytest.fixture
def begin(decoder: MlxDecoder) -> Begin:
    def start(at: int = 0) -> tuple[Recorder, Slabs, KVCache, list[int]]:
        cache, saving, ids = decoder.new_cache(), Slabs(), list(IDS)
        recorder = Recorder(
            cache,
            ids,
            at,
            saving,  # type: ignore[arg-type]
            geometry=decoder.geometry,
            chunk_tokens=GRID,
        )
        return recorder, saving, cache, ids

    return start


def test_slabs_are_cut_at_the_grid_and_at_their_size(
    begin: Begin, decoder: MlxDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MIN_SLAB_TOKENS", 12)
    monkeypatch.setattr(recording, "LARGE_SLAB_NBYTES", 1)
    recorder, saving, cache, _ = begin()
    decoder.prefill_chunk(IDS[:40], cache)
    recorder.catch_up()
    assert [(slab.start, slab.stop) for slab in saving.slabs] == [(0, 12), (12, 24), (24, 32), (32, 40)]


def test_while_others_get_tokens_a_turn_copies_one_small_slab(
    begin: Begin, decoder: MlxDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MIN_SLAB_TOKENS", 12)
    monkeypatch.setattr(recording, "SHARED_SLAB_NBYTES", 1)
    recorder, saving, cache, _ = begin()
    decoder.prefill_chunk(IDS[:40], cache)
    assert [recorder.catch_up(shared=True) for _ in range(5)] == [False, False, False, True, True]
    assert [(slab.start, slab.stop) for slab in saving.slabs] == [(0, 12), (12, 24), (24, 32), (32, 40)]


def test_rows_that_were_copied_elsewhere_are_not_copied_again(begin: Begin, decoder: MlxDecoder) -> None:
    recorder, saving, cache, _ = begin()
    decoder.prefill_chunk(IDS[:40], cache)
    copied = Slab(0, 32, b"", (), np.empty(0, np.uint16))
    recorder.take(Slab(8, 40, b"", (), np.empty(0, np.uint16)))
    assert saving.slabs == [], "they are not the next ones"
    recorder.take(copied)
    recorder.take(copied)
    recorder.catch_up()
    assert saving.slabs[0] is copied
    assert [(slab.start, slab.stop) for slab in saving.slabs] == [(0, 32), (32, 40)]


def test_a_slab_holds_the_bytes_of_the_cache_and_of_a_window_what_a_block_can_need(
    begin: Begin, decoder: MlxDecoder
) -> None:
    recorder, saving, cache, _ = begin()
    decoder.prefill_chunk(IDS[:GRID], cache)
    recorder.catch_up()
    (slab,) = saving.slabs
    windows = decoder.geometry.windows
    assert slab.firsts == tuple(0 if window is None else GRID - 20 for window in windows)
    expected = [
        np.array(mx.contiguous(plane).view(mx.uint16)).ravel()
        for layer, first in enumerate(slab.firsts)
        for plane in cache.planes(layer, first, GRID)
    ]
    np.testing.assert_array_equal(slab.words, np.concatenate(expected))


def test_between_tokens_rows_wait_until_there_are_enough_or_a_block_is_complete(
    begin: Begin, decoder: MlxDecoder
) -> None:
    recorder, saving, cache, _ = begin(32)
    decoder.prefill_chunk(IDS[:32], cache)
    for position in range(32, 100):
        decoder.step(mx.array(IDS[position]), cache)
        recorder.step()
    assert [(slab.start, slab.stop) for slab in saving.slabs] == [(32, 64), (64, 96)]
    while recorder.finish():
        pass
    assert (saving.slabs[-1].start, saving.slabs[-1].stop, saving.ended) == (96, 100, True)


def test_only_tokens_that_were_read_count(begin: Begin, decoder: MlxDecoder) -> None:
    """The engine is a step ahead: the cache may end beyond the last id that anyone knows."""
    recorder, saving, cache, ids = begin()
    del ids[20:]
    decoder.prefill_chunk(IDS[:22], cache)
    while recorder.finish():
        pass
    assert saving.slabs[-1].stop == 20


def test_rows_that_are_gone_end_the_recording_and_nothing_else(begin: Begin, decoder: MlxDecoder) -> None:
    recorder, saving, cache, _ = begin()
    for start in range(0, 288, 32):
        decoder.prefill_chunk(IDS[start : start + 32], cache)
    recorder.catch_up()
    assert saving.dropped
    assert not recorder.finish()
    assert saving.ended


@pytest.mark.parametrize("within", ["the prompt", "the answer", "the rest"])
def test_a_fault_ends_the_recording_and_nothing_else(
    begin: Begin, decoder: MlxDecoder, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError("secret")

    recorder, saving, cache, _ = begin()
    decoder.prefill_chunk(IDS[:GRID], cache)
    monkeypatch.setattr(cache, "planes", no_memory)
    if within == "the prompt":
        recorder.catch_up()
    elif within == "the answer":
        recorder.step()
    assert not recorder.finish()
    assert (saving.slabs, saving.dropped, saving.ended) == ([], True, True)


def test_an_abandoned_recording_adds_nothing(begin: Begin, decoder: MlxDecoder) -> None:
    recorder, saving, cache, _ = begin()
    decoder.prefill_chunk(IDS[:GRID], cache)
    recorder.abandon()
    recorder.catch_up()
    assert not recorder.finish()
    assert (saving.slabs, saving.ended) == ([], True)


def test_the_slab_s_size_follows_the_bytes_of_a_token(begin: Begin, tiny_llama: Path) -> None:
    recorder, *_ = begin()
    # 6 layers, keys and values of 2 heads of 16 in 2 bytes.
    assert recorder._slab_tokens == (1 << 20) // (6 * 2 * 2 * 16 * 2)
