from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.batch import Batch
from muser_decode.engine.floor import Floor
from muser_decode.engine.generation import Generation
from muser_decode.engine.memory import CacheMemory
from muser_decode.engine.prefilling import Workshop
from muser_decode.engine.request import GenerationRequest
from muser_decode.engine.staging import Staging
from muser_decode.errors import RequestInvalid
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny

ROW_NBYTES = 2 * 2 * 16 * 4
"""Keys and values of 2 heads of 16 in float32."""


def floor_of(path: Path, total_nbytes: int) -> Floor:
    decoder = MlxDecoder(open_checkpoint(path), dtype=mx.float32, kv_element=ElementType.F16, packed=False)
    staging = Staging(decoder.geometry, slots=1, slot_nbytes=64, wake=lambda: None)
    return Floor(Workshop(decoder, staging, 16), Batch(decoder), CacheMemory(total_nbytes))


def generation(prompt: int, new: int, *, open_ended: bool = False) -> Generation:
    request = GenerationRequest("r", (1,) * prompt, new, open_ended=open_ended)
    return Generation(request, [].append, None, "", lambda: None)


def need(floor: Floor, prompt: int, new: int) -> int:
    request = generation(prompt, new).request
    return floor.need_nbytes(request, floor.first_tokens(request))


def test_a_request_takes_room_for_its_longest_answer(tiny_llama: Path) -> None:
    floor = floor_of(tiny_llama, 10**9)
    for prompt, new, rows in ((1, 1, 512), (500, 12, 512), (500, 13, 1_024), (2_000, 1_000_000, 2_048)):
        assert need(floor, prompt, new) == 6 * ROW_NBYTES * rows


def test_sliding_layers_need_their_window_and_its_slack(tmp_path: Path) -> None:
    write_tiny("gemma3", tmp_path / "g", layers=7, window=40)
    floor = floor_of(tmp_path / "g", 10**9)
    spec = floor.spec
    row = 2 * spec.kv_heads * spec.head_dim * 4
    full = sum(layer.window is None for layer in spec.layers)
    assert 0 < full < 7
    assert need(floor, 600, 1) == row * (full * 1_024 + (7 - full) * (40 + 128))


def test_memory_says_how_long_a_context_is(tiny_llama: Path) -> None:
    assert floor_of(tiny_llama, 10**9).context_tokens == 2_048
    assert floor_of(tiny_llama, 6 * ROW_NBYTES * 1_024).context_tokens == 1_024
    assert floor_of(tiny_llama, 6 * ROW_NBYTES * 1_024 - 1).context_tokens == 512
    assert floor_of(tiny_llama, 100).context_tokens == 0


def test_what_never_fits_is_refused_with_both_numbers(tiny_llama: Path) -> None:
    floor = floor_of(tiny_llama, 6 * ROW_NBYTES * 512)
    floor.check_memory(generation(500, 12).request)
    with pytest.raises(RequestInvalid, match=r"500 prompt tokens and 13 .* need 2 MB .* has 1 MB \(--memory-mb\)"):
        floor.check_memory(generation(500, 13).request)


def test_memory_is_given_back_once(tiny_llama: Path) -> None:
    floor = floor_of(tiny_llama, 6 * ROW_NBYTES * 1_024)
    one, other, third = generation(1, 1), generation(1, 1), generation(1, 1)
    assert floor.take_memory(one)
    assert floor.take_memory(other)
    assert not floor.take_memory(third)
    floor.give_memory_back(third)
    floor.give_memory_back(one)
    floor.give_memory_back(one)
    assert floor.memory.free_nbytes == 6 * ROW_NBYTES * 512
    assert floor.take_memory(third)


def test_an_answer_without_a_limit_takes_memory_as_it_grows(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "m", layers=6, max_positions=5_000)
    floor = floor_of(tmp_path / "m", 6 * ROW_NBYTES * (4_608 + 512))
    one, other = generation(100, 4_900, open_ended=True), generation(1, 511)
    assert floor.first_tokens(one.request) == 2_048
    assert floor.take_memory(one)
    # 100 + 2,048 tokens lie in 2,560 positions.
    assert floor.memory.free_nbytes == 6 * ROW_NBYTES * 2_560
    assert floor.more_tokens(one, 2_048) == 2_048
    assert floor.memory.free_nbytes == 6 * ROW_NBYTES * 512
    assert floor.take_memory(other)
    assert floor.more_tokens(one, 4_096) == 0
    floor.give_memory_back(other)
    # The model's end at 5,000 positions is 100 + 4,900 tokens.
    assert floor.more_tokens(one, 4_096) == 804
    assert floor.more_tokens(one, 4_900) == 0
    floor.give_memory_back(one)
    assert floor.memory.free_nbytes == 6 * ROW_NBYTES * (4_608 + 512)


def test_a_limit_that_was_asked_for_is_taken_whole_and_never_moved(tiny_llama: Path) -> None:
    floor = floor_of(tiny_llama, 10**9)
    one = generation(10, 100)
    assert floor.first_tokens(one.request) == 100
    assert floor.take_memory(one)
    assert floor.more_tokens(one, 100) == 0
