from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.runner import prefill
from muser_wire.geometry import ElementType


@pytest.fixture
def decoder(make_model: Callable) -> TorchDecoder:
    return TorchDecoder(make_model(), dtype=torch.float32, kv_element=ElementType.F16, device=torch.device("cpu"))


class Stop(Exception):
    """What an abandoned handoff raises."""


def test_chunks_lie_on_the_grid_and_layers_come_in_order(decoder: TorchDecoder, token_ids: Callable) -> None:
    cache, calls = decoder.new_cache(40), []
    prefill(decoder, token_ids(21), cache, 8, lambda chunk, layer: calls.append((chunk, layer, cache.length)))
    assert calls == [(chunk, layer, 8 * chunk) for chunk in range(3) for layer in range(3)]
    assert cache.length == 21


def test_what_the_cache_holds_is_not_computed_again(decoder: TorchDecoder, token_ids: Callable) -> None:
    ids, cache, calls = token_ids(20), decoder.new_cache(20), []
    prefill(decoder, ids[:11], cache, 8, lambda chunk, layer: None)
    held = cache.planes(2, 0, 11)[0].clone()
    prefill(decoder, ids, cache, 8, lambda chunk, layer: calls.append((chunk, cache.length)))
    # The first one starts in the middle of its chunk, the next is on the grid again.
    assert calls == [(1, 11)] * 3 + [(2, 16)] * 3
    assert torch.equal(cache.planes(2, 0, 11)[0], held)
    prefill(decoder, ids, cache, 8, lambda chunk, layer: pytest.fail("nothing was missing"))


def test_an_abandoned_prompt_keeps_its_whole_chunks(decoder: TorchDecoder, token_ids: Callable) -> None:
    ids, cache = token_ids(30), decoder.new_cache(30)

    def stop_in_the_third(chunk: int, layer: int) -> None:
        if (chunk, layer) == (2, 1):
            raise Stop

    with pytest.raises(Stop):
        prefill(decoder, ids, cache, 8, stop_in_the_third)
    assert cache.length == 16
    prefill(decoder, ids, cache, 8, lambda chunk, layer: None)
    whole = decoder.new_cache(30)
    prefill(decoder, ids, whole, 8, lambda chunk, layer: None)
    for layer in range(3):
        for resumed, straight in zip(cache.planes(layer, 0, 30), whole.planes(layer, 0, 30), strict=True):
            assert torch.equal(resumed, straight)
