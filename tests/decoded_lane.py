"""Prompts through a decode node's decoder of the reference lane, and what the plain one over numpy gives."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from muser_decode.engine.contract import Cache, Decoder
from muser_wire.home import muser_home
from muser_wire.reference.canonical import Weights
from muser_wire.reference.compiled.build import shared_object
from muser_wire.reference.compiled.library import load
from muser_wire.reference.compiled.operations import Operations
from muser_wire.reference.decoder import ReferenceDecoder as PlainDecoder
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.tiny import RandomWeights, random_spec


def prompt(weights: Weights, tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(0, weights.spec.vocab_size, tokens).tolist()


@functools.cache
def compiled_operations(threads: int = 1) -> Operations:
    """The compiled kernels, without their admission, which is another test's; without a C++ compiler this fails."""
    return Operations(load(shared_object(muser_home() / "kernels")), lambda: threads)


@functools.cache
def random_weights(seed: int) -> RandomWeights:
    return RandomWeights(random_spec(seed), seed)


@functools.cache
def oracle(weights: Weights, tokens: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Every layer's planes and every token's logits, in one piece."""
    decoder = PlainDecoder(NumpyArithmetic(np.float64), weights)
    cache = decoder.new_cache()
    logits = decoder.logits(decoder.forward(prompt(weights, tokens), cache))
    return [cache.planes(layer) for layer in range(len(weights.spec.layers))], logits


def ragged(tokens: int, seed: int) -> list[int]:
    rng, sizes = np.random.default_rng(seed), []
    while sum(sizes) < tokens:
        sizes.append(min(int(rng.integers(1, tokens // 2 + 2)), tokens - sum(sizes)))
    return sizes


def prefilled(decoder: Decoder, ids: Sequence[int], sizes: Sequence[int]) -> Cache:
    cache = decoder.new_cache()
    for size in sizes:
        assert decoder.prefill_chunk(ids[cache.length : cache.length + size], cache)
    return cache


def decoded(decoder: Decoder, cache: Cache, ids: Sequence[int]) -> np.ndarray:
    return np.stack([np.array(decoder.step(mx.array(token), cache)) for token in ids])


def same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    assert got.tobytes() == np.ascontiguousarray(expected).tobytes()


def same_planes(cache: Cache, expected: Sequence[tuple[np.ndarray, np.ndarray]], weights: Weights) -> None:
    """Compare what a cache must still have: of a sliding layer, what the next token sees."""
    for layer, kind in enumerate(weights.spec.layers):
        first = 0 if kind.window is None else max(0, cache.length - kind.window + 1)
        for got, whole in zip(cache.planes(layer, first, cache.length), expected[layer], strict=True):
            same_bits(np.array(got), whole[first : cache.length])
