"""The oracle of the reference lane beside an independent float64 forward, and against itself in chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle_decoder
import pytest

from muser_wire.model.spec import ModelSpec
from muser_wire.numerics import budget
from muser_wire.reference.decoder import ReferenceDecoder
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.tiny import RandomWeights, random_ids, random_spec

SEEDS = range(24)


def dense(weights: RandomWeights, name: str) -> np.ndarray:
    return weights.vector(name) if len(weights.shape(name)) == 1 else weights.linear(name).values()


def rotating_whole_heads(spec: ModelSpec) -> ModelSpec:
    """The float64 forward knows no heads that are rotated in part."""
    layers = tuple(
        layer if layer.rope is None else replace(layer, rope=replace(layer.rope, rotary_dim=spec.head_dim))
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


@pytest.mark.parametrize("seed", SEEDS)
def test_planes_and_logits_are_those_of_float64_but_for_rounding(seed: int) -> None:
    spec = rotating_whole_heads(random_spec(seed))
    weights, ids = RandomWeights(spec, seed), random_ids(spec, seed, 50)
    planes, logits = oracle_decoder.forward(lambda name: dense(weights, name), spec, ids)
    decoder = ReferenceDecoder(NumpyArithmetic(np.float64), weights)
    cache = decoder.new_cache()
    got = decoder.logits(decoder.forward(ids, cache))
    scale = float(np.sqrt(np.mean(logits**2)))
    assert np.abs(got - logits).max() < budget("reference_logits") * scale
    for layer, pair in enumerate(planes):
        for mine, wanted in zip(cache.planes(layer), pair, strict=True):
            assert np.abs(mine - wanted).max() < budget("reference_planes") * np.sqrt(np.mean(wanted**2))


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_change_no_byte(seed: int) -> None:
    spec = random_spec(seed, layers=3)
    weights, ids = RandomWeights(spec, seed), random_ids(spec, seed, 90)
    decoder = ReferenceDecoder(NumpyArithmetic(np.float64), weights)
    whole, cut = decoder.new_cache(), decoder.new_cache()
    wanted = decoder.logits(decoder.forward(ids, whole))
    parts = [decoder.logits(decoder.forward(ids[a:b], cut)) for a, b in ((0, 1), (1, 64), (64, 71), (71, 72), (72, 90))]
    assert np.concatenate(parts).tobytes() == wanted.tobytes()
    for layer in range(3):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(whole.planes(layer), cut.planes(layer), strict=True))


def test_a_cache_made_of_another_s_planes_goes_on_as_that_one() -> None:
    spec = random_spec(3)
    weights, ids = RandomWeights(spec, 3), random_ids(spec, 3, 40)
    decoder = ReferenceDecoder(NumpyArithmetic(), weights)
    first = decoder.new_cache()
    decoder.forward(ids[:30], first)
    other = decoder.new_cache()
    for layer in range(len(spec.layers)):
        other.append(layer, *first.planes(layer))
    other.length = 30
    assert (decoder.forward(ids[30:], other) == decoder.forward(ids[30:], first)).all()
