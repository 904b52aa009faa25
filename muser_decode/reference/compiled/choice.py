"""Whether a decode node uses the compiled kernels: on a CPU, where they give the bytes of the plain MLX operations.

They are tried on two small models that have every feature of the one that is served, with every form of matrix.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from muser_decode.engine.contract import Cache, Decoder
from muser_decode.numerics import on_gpu
from muser_decode.reference.compiled.decoder import CompiledDecoder
from muser_decode.reference.decoder import ReferenceDecoder
from muser_wire.errors import KernelUnavailable
from muser_wire.home import muser_home
from muser_wire.model.spec import LayerSpec, ModelSpec
from muser_wire.reference.canonical import Weights
from muser_wire.reference.compiled.build import shared_object
from muser_wire.reference.compiled.library import load
from muser_wire.reference.compiled.operations import Operations
from muser_wire.reference.constants import WEIGHT_GROUP
from muser_wire.reference.tiny import RandomWeights, random_ids

_log = logging.getLogger(__name__)

NAME = "exact.decoder.compiled"

# Odd sizes, more outputs than a panel. A model of either seed draws the forms of its matrices anew.
HIDDEN, FFN, VOCAB, MOST_REPEATS, MOST_LAYERS = 160, 224, 301, 4, 4
SEEDS = (1, 2)
CHUNKS = (75, 1, 22)
"""Of a prompt; attention over more keys than a block."""
WINDOW = 41
STEPS, BATCH = 6, 3


def reference_decoder(weights: Weights, operations: Operations | None) -> ReferenceDecoder | CompiledDecoder:
    """Return a decoder of the lane: by compiled kernels where there are some, else by plain MLX operations."""
    return ReferenceDecoder(weights) if operations is None else CompiledDecoder(weights, operations)


def compiled_operations(spec: ModelSpec) -> Operations | None:
    """Return the compiled kernels if this node may use them for a model; None, and a line in the log, if not."""
    if on_gpu():
        return None
    try:
        library = load(shared_object(muser_home() / "kernels"))
    except KernelUnavailable as error:
        _log.warning("kernel_refused name=%s cause=%s", NAME, error)
        return None
    threads: int = library.muser_threads()
    operations = Operations(library, lambda: threads)
    return operations if admitted(operations, spec) else None


def admitted(operations: Operations, spec: ModelSpec) -> bool:
    """Return whether the kernels give the plain operations' numbers for small models such as `spec`."""
    for seed in SEEDS:
        weights = RandomWeights(small(spec), seed)
        pair = results(CompiledDecoder(weights, operations)), results(ReferenceDecoder(weights))
        differing = sum(int((got != expected).sum()) for got, expected in zip(*pair, strict=True))
        if differing:
            _log.warning("kernel_refused name=%s differing_values=%d", NAME, differing)
            return False
    _log.info("kernel_admitted name=%s exact=%s", NAME, "true")
    return True


def small(spec: ModelSpec) -> ModelSpec:
    """Return a small model with the features of `spec`: its head size, norms, scales and kinds of layer."""
    repeats = min(spec.heads // spec.kv_heads, MOST_REPEATS)
    kv_heads = max(2, WEIGHT_GROUP // math.gcd(WEIGHT_GROUP, repeats * spec.head_dim))
    kinds = dict.fromkeys(LayerSpec(layer.window and WINDOW, layer.rope) for layer in spec.layers)
    layers = (*kinds, *kinds)[: max(2, min(len(kinds), MOST_LAYERS))]
    return replace(
        spec,
        layers=layers,
        hidden_size=HIDDEN,
        ffn_size=FFN,
        heads=kv_heads * repeats,
        kv_heads=kv_heads,
        vocab_size=VOCAB,
        max_positions=max(spec.max_positions, sum(CHUNKS) + STEPS + BATCH),
    )


def results(decoder: Decoder) -> list[npt.NDArray[np.floating[Any]]]:
    """Return the logits of some tokens, one after another and then as a batch, and the planes of all layers."""
    spec = decoder.spec
    ids = random_ids(spec, SEEDS[0], sum(CHUNKS) + STEPS)
    caches = [_prefilled(decoder, ids, CHUNKS[:count]) for count in range(len(CHUNKS), len(CHUNKS) - BATCH, -1)]
    logits = [decoder.step(mx.array(token), caches[0]) for token in ids[-STEPS:]]
    logits.append(decoder.steps(mx.array(ids[:BATCH]), caches))
    planes: list[mx.array] = []
    for layer, kind in enumerate(spec.layers):
        length = caches[0].length
        first = 0 if kind.window is None else max(0, length - kind.window)
        planes += caches[0].planes(layer, first, length)
    return [np.array(array) for array in (*logits, *planes)]


def _prefilled(decoder: Decoder, ids: Sequence[int], chunks: Sequence[int]) -> Cache:
    cache = decoder.new_cache()
    for size in chunks:
        decoder.prefill_chunk(ids[cache.length : cache.length + size], cache)
    return cache
