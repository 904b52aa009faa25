"""The decode node's decoders of the reference lane against the plain one over numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from decoded_lane import (
    compiled_operations,
    decoded,
    oracle,
    prefilled,
    prompt,
    ragged,
    random_weights,
    same_bits,
    same_planes,
)

from muser_decode.errors import CacheError
from muser_decode.reference import linear, vectors
from muser_decode.reference.compiled.decoder import CompiledDecoder
from muser_decode.reference.decoder import ReferenceDecoder
from muser_decode.reference.linear import Activations
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.spec import LayerSpec, RopeSpec
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_families import TINY_FAMILIES
from muser_wire.reference.canonical import Weights
from muser_wire.reference.tiny import RandomWeights, random_spec

SEEDS = range(24)
STEPS = 6
"""Tokens at the end of a prompt that are decoded, not prefilled."""

DecoderOf = Callable[[Weights], ReferenceDecoder | CompiledDecoder]


@pytest.fixture(params=["mlx", "compiled"])
def decoder_of(request: pytest.FixtureRequest) -> DecoderOf:
    """How one of the two is made: of MLX's operations, or of compiled kernels."""
    if request.param == "mlx":
        return ReferenceDecoder
    return lambda weights: CompiledDecoder(weights, compiled_operations())


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models_give_the_rules_bytes_however_a_prompt_is_cut(seed: int, decoder_of: DecoderOf) -> None:
    weights, tokens = random_weights(seed), 40 + 7 * seed
    decoder, ids = decoder_of(weights), prompt(weights, tokens)
    planes, logits = oracle(weights, tokens)
    for sizes in ([tokens - STEPS], ragged(tokens - STEPS, seed)):
        cache = prefilled(decoder, ids, sizes)
        same_bits(decoded(decoder, cache, ids[-STEPS:]), logits[-STEPS:])
        same_planes(cache, planes, weights)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_token_by_token(family: str, tmp_path: Path, decoder_of: DecoderOf) -> None:
    write_tiny(family, tmp_path, layers=6, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=32, vocab=64 + 300)
    weights = RandomWeights(open_checkpoint(tmp_path).spec, 1)
    planes, logits = oracle(weights, 70)
    decoder = decoder_of(weights)
    cache = decoder.new_cache()
    same_bits(decoded(decoder, cache, prompt(weights, 70)), logits)
    same_planes(cache, planes, weights)


@pytest.mark.parametrize("seed", range(6))
def test_a_row_of_a_batch_is_what_it_is_alone(seed: int, decoder_of: DecoderOf) -> None:
    weights = random_weights(seed)
    decoder = decoder_of(weights)
    lengths = (3, 64, 97, 1, 130)
    prompts = [prompt(weights, length) for length in lengths]
    alone = [prefilled(decoder, ids, [len(ids)]) for ids in prompts]
    together = [prefilled(decoder, ids, [len(ids)]) for ids in prompts]
    for step in range(3):
        tokens = [(7 * step + at) % weights.spec.vocab_size for at in range(len(lengths))]
        rows = np.array(decoder.steps(mx.array(tokens), together))
        for row, token, cache in zip(rows, tokens, alone, strict=True):
            same_bits(row, np.array(decoder.step(mx.array(token), cache)))
    for one, other in zip(alone, together, strict=True):
        same_planes(other, [tuple(map(np.array, one.planes(at, 0, one.length))) for at in (0, 1)], weights)


@pytest.mark.parametrize("seed", range(8))
def test_installed_planes_go_on_as_computed_ones_do(seed: int, decoder_of: DecoderOf) -> None:
    """A handoff brings whole chunks, of sliding layers their last window only; the rest is computed here."""
    weights, tokens, received = random_weights(seed), 150, 90
    planes, logits = oracle(weights, tokens)
    decoder, ids = decoder_of(weights), prompt(weights, tokens)
    cache = decoder.new_cache()
    for layer, kind in enumerate(weights.spec.layers):
        first = 0 if kind.window is None else max(0, received - kind.window)
        cache.install(layer, first, *(mx.array(plane[first:received]) for plane in planes[layer]))
    mx.eval(cache.arrays)
    cache.commit(received)
    decoder.prefill_chunk(ids[received:-STEPS], cache)
    same_bits(decoded(decoder, cache, ids[-STEPS:]), logits[-STEPS:])
    same_planes(cache, planes, weights)


@pytest.mark.parametrize("chunk", [1, 100, 350])
def test_windows_that_move_for_long_change_nothing(chunk: int, decoder_of: DecoderOf) -> None:
    weights = random_weights(1)
    rope = RopeSpec(10_000.0, weights.spec.head_dim)
    layers = (LayerSpec(70, rope), LayerSpec(None, None), LayerSpec(5, rope))
    long = RandomWeights(replace(weights.spec, layers=layers), 1)
    tokens = 750
    planes, logits = oracle(long, tokens)
    decoder, ids = decoder_of(long), prompt(long, tokens)
    # Single tokens move the window by decoding; the way there is prefilled.
    sizes = [chunk] * ((tokens - 50) // chunk) if chunk > 1 else [tokens - 450]
    cache = prefilled(decoder, ids, sizes)
    same_planes(cache, planes, long)
    start = cache.length
    same_bits(decoded(decoder, cache, ids[start:]), logits[start:])
    same_planes(cache, planes, long)


def test_taken_back_tokens_leave_no_trace(decoder_of: DecoderOf) -> None:
    weights, tokens = random_weights(3), 80
    planes, logits = oracle(weights, tokens)
    decoder, ids = decoder_of(weights), prompt(weights, tokens)
    cache = prefilled(decoder, ids, [60])
    other = [(token + 1) % weights.spec.vocab_size for token in ids[60:70]]
    assert not np.array_equal(decoded(decoder, cache, other), logits[60:70])
    cache.rollback(60)
    same_bits(decoded(decoder, cache, ids[60:]), logits[60:])
    same_planes(cache, planes, weights)


def test_a_chunk_stops_when_it_is_told_to(decoder_of: DecoderOf) -> None:
    weights = random_weights(2)
    decoder, asked = decoder_of(weights), []

    def go_on() -> bool:
        asked.append(None)
        return False

    cache = decoder.new_cache()
    assert not decoder.prefill_chunk(prompt(weights, 20), cache, go_on)
    assert (cache.length, len(asked)) == (0, 1)
    with pytest.raises(CacheError, match="0 are there"):
        cache.planes(0, 0, 1)


def test_a_cache_is_as_large_as_it_says(decoder_of: DecoderOf) -> None:
    weights = random_weights(5)
    decoder = decoder_of(weights)
    for positions in (1, 512, 513, 2000):
        cache = decoder.new_cache()
        cache.reserve(positions)
        assert cache.nbytes == decoder.cache_nbytes(positions)
    assert decoder.geometry.element is ElementType.F16


def root_one_unit_off(monkeypatch: pytest.MonkeyPatch) -> None:
    sqrt = mx.sqrt
    monkeypatch.setattr(mx, "sqrt", lambda x: sqrt(x) * (1 + 2.0**-23))


def products_added_unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fused multiply-add does: the product joins the sum before it is rounded."""

    def fused(x: Activations, q: mx.array, s: mx.array, m: mx.array | None) -> mx.array:
        dots, total = np.array(x.values @ q), np.float32(0)
        for group in range(dots.shape[0]):
            total = (total + dots[group].astype(np.float64) * np.array(s[group])).astype(np.float32)
            if m is not None:
                total = (total + np.array(x.sums[group], np.float64) * np.array(m[group])).astype(np.float32)
        return mx.array(total)[None]

    monkeypatch.setattr(linear, "_product", fused)


def lanes_added_descending(monkeypatch: pytest.MonkeyPatch) -> None:
    def descending(x: mx.array, axis: int) -> mx.array:
        return mx.sum(mx.take(x, mx.arange(x.shape[axis] - 1, -1, -1), axis=axis), axis=axis, keepdims=True)

    monkeypatch.setattr(vectors, "ordered_sum", descending)


@pytest.mark.parametrize("altered", [root_one_unit_off, products_added_unrounded, lanes_added_descending])
def test_an_altered_step_is_caught(
    altered: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rounding off by one unit moves a 12-bit integer once in some thousand, so it takes a prompt to show it."""
    spec, tokens = replace(random_spec(3), hidden_size=1024), 300
    weights = RandomWeights(spec, 3)
    planes, _ = oracle(weights, tokens)
    altered(monkeypatch)
    cache = prefilled(ReferenceDecoder(weights), prompt(weights, tokens), [tokens])
    moved = 0
    for layer, kind in enumerate(weights.spec.layers):
        first = 0 if kind.window is None else max(0, tokens - kind.window + 1)
        for got, expected in zip(cache.planes(layer, first, tokens), planes[layer], strict=True):
            moved += int((np.array(got) != expected[first:]).sum())
    assert moved > 0
