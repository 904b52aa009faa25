"""The producer's decoder of the reference lane against the plain one over numpy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import exact_kernels
import numpy as np
import pytest
import torch
from exact_kernels import CPU

from muser_prefill.errors import CacheFull, TokenOutOfRange
from muser_prefill.kernels.exact import ExactKernels
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.spec import ModelSpec
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_families import TINY_FAMILIES
from muser_wire.reference.decoder import ReferenceDecoder
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.tiny import RandomWeights, random_spec

SEEDS = range(24)
KERNELS = {"compiled": exact_kernels.compiled, "plain": exact_kernels.plain}


@functools.cache
def oracle(weights: RandomWeights, tokens: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Every layer's planes and every token's logits, in one piece."""
    decoder = ReferenceDecoder(NumpyArithmetic(np.float64), weights)
    cache = decoder.new_cache()
    logits = decoder.logits(decoder.forward(prompt(weights.spec, tokens), cache))
    return [plane for layer in range(len(weights.spec.layers)) for plane in cache.planes(layer)], logits


def prompt(spec: ModelSpec, tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(0, spec.vocab_size, tokens).tolist()


def ragged(tokens: int, seed: int) -> list[int]:
    rng, sizes = np.random.default_rng(seed), []
    while sum(sizes) < tokens:
        sizes.append(min(int(rng.integers(1, tokens // 2 + 2)), tokens - sum(sizes)))
    return sizes


def run(weights: RandomWeights, sizes: Sequence[int], kernels: ExactKernels) -> tuple[list[np.ndarray], np.ndarray]:
    decoder = TorchReferenceDecoder(weights, device=CPU, whole=True, kernels=kernels)
    tokens = sum(sizes)
    ids, cache = prompt(weights.spec, tokens), decoder.new_cache(tokens)
    logits = [decoder.logits(ids[cache.length : cache.length + size], cache).numpy() for size in sizes]
    planes = [plane.numpy() for layer in range(len(weights.spec.layers)) for plane in cache.planes(layer, 0, tokens)]
    return planes, np.concatenate(logits)


def same(got: tuple[list[np.ndarray], np.ndarray], expected: tuple[list[np.ndarray], np.ndarray]) -> None:
    for ours, theirs in zip(got[0], expected[0], strict=True):
        assert ours.tobytes() == np.ascontiguousarray(theirs).tobytes()
    assert (got[1] + np.float32(0)).tobytes() == (expected[1] + np.float32(0)).tobytes()


@pytest.fixture(params=[False, True], ids=["subnormals", "flushed"])
def subnormals(request: pytest.FixtureRequest) -> Iterator[None]:
    assert torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models_in_ragged_chunks(seed: int) -> None:
    weights, tokens = RandomWeights(random_spec(seed), seed), 70 + seed
    for name, kernels in KERNELS.items():
        if name == "compiled" or seed % 6 == 0:
            same(run(weights, ragged(tokens, seed), kernels()), oracle(weights, tokens))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path, layers=6, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=32, vocab=64 + 300)
    weights = RandomWeights(open_checkpoint(tmp_path).spec, 1)
    same(run(weights, [90], exact_kernels.compiled()), oracle(weights, 90))
    same(run(weights, [63, 2, 25], exact_kernels.compiled()), oracle(weights, 90))


@pytest.mark.usefixtures("threads", "subnormals")
@pytest.mark.parametrize("name", KERNELS)
def test_threads_and_subnormals_change_nothing(name: str) -> None:
    weights = RandomWeights(random_spec(5), 5)
    same(run(weights, [40, 1, 29], KERNELS[name]()), oracle(weights, 70))


def test_token_by_token() -> None:
    weights = RandomWeights(random_spec(3), 3)
    same(run(weights, [1] * 70, exact_kernels.compiled()), oracle(weights, 70))


@pytest.fixture
def decoder() -> TorchReferenceDecoder:
    return TorchReferenceDecoder(RandomWeights(random_spec(2), 2), device=CPU, kernels=exact_kernels.compiled())


def _ignore(layer: int) -> None:
    """Nobody waits."""


def test_a_producer_needs_no_head_and_has_the_same_planes(decoder: TorchReferenceDecoder) -> None:
    cache = decoder.new_cache(70)
    decoder.prefill_chunk(prompt(decoder.spec, 70), cache, _ignore)
    expected, _ = oracle(RandomWeights(random_spec(2), 2), 70)
    got = [plane.numpy() for layer in range(len(decoder.spec.layers)) for plane in cache.planes(layer, 0, 70)]
    assert [plane.tobytes() for plane in got] == [np.ascontiguousarray(plane).tobytes() for plane in expected]
    with pytest.raises(ValueError, match="without a head"):
        decoder.logits([1], decoder.new_cache(1))


def test_layers_are_final_when_they_are_called(decoder: TorchReferenceDecoder) -> None:
    cache, seen = decoder.new_cache(9), []

    def on_layer(layer: int) -> None:
        seen.append((layer, cache.planes(layer, 0, 9)[0].clone()))

    decoder.prefill_chunk(prompt(decoder.spec, 9), cache, on_layer)
    assert [layer for layer, _ in seen] == list(range(len(decoder.spec.layers)))
    assert all(torch.equal(keys, cache.planes(layer, 0, 9)[0]) for layer, keys in seen)


def test_an_abandoned_chunk_leaves_the_length(decoder: TorchReferenceDecoder) -> None:
    cache = decoder.new_cache(20)
    decoder.prefill_chunk([1, 2, 3], cache, _ignore)

    def give_up(layer: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.prefill_chunk([4, 5], cache, give_up)
    assert cache.length == 3
    decoder.prefill_chunk([4, 5], cache, _ignore)
    whole = decoder.new_cache(20)
    decoder.prefill_chunk([1, 2, 3, 4, 5], whole, _ignore)
    last = len(decoder.spec.layers) - 1
    assert all(torch.equal(a, b) for a, b in zip(cache.planes(last, 0, 5), whole.planes(last, 0, 5), strict=True))


def test_what_left_a_window_may_be_anything() -> None:
    """Of a sliding layer, a cache that was loaded holds the last positions only."""
    spec = random_spec(2)
    spec = replace(spec, layers=tuple(replace(layer, window=20) for layer in spec.layers))
    for kernels in KERNELS.values():
        decoder = TorchReferenceDecoder(RandomWeights(spec, 2), device=CPU, kernels=kernels())
        ids, expected, spoiled = prompt(spec, 100), decoder.new_cache(100), decoder.new_cache(100)
        decoder.prefill_chunk(ids, expected, _ignore)
        decoder.prefill_chunk(ids[:80], spoiled, _ignore)
        for layer in range(len(spec.layers)):
            for plane in spoiled.planes(layer, 0, 61):
                plane.fill_(torch.nan)
        decoder.prefill_chunk(ids[80:], spoiled, _ignore)
        for layer in range(len(spec.layers)):
            for a, b in zip(expected.planes(layer, 80, 100), spoiled.planes(layer, 80, 100), strict=True):
                assert torch.equal(a, b)


def test_tokens_and_positions_are_bounded(decoder: TorchReferenceDecoder) -> None:
    cache = decoder.new_cache(4)
    for token in (-1, decoder.spec.vocab_size):
        with pytest.raises(TokenOutOfRange):
            decoder.prefill_chunk([0, token], cache, _ignore)
    with pytest.raises(CacheFull):
        decoder.prefill_chunk([0] * 5, cache, _ignore)
    with pytest.raises(CacheFull):
        decoder.new_cache(decoder.spec.max_positions + 1)
    assert cache.length == 0
