"""Does a device compute as the rules say? Golden hashes of single steps, of stages and of tiny models [N11].

`observe` runs the set over any `Arithmetic`; what it finds is digested into the identity of the lane, so that a device
which rounds otherwise refuses a handoff instead of answering wrongly. The quick set runs at every start; the thorough
one tries every reciprocal and square root of a mantissa, and a seventh of all arguments of 2 ** x.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from muser_wire.errors import NumericsMismatch
from muser_wire.identities import Digest, digest_of
from muser_wire.model.spec import Activation
from muser_wire.reference.arithmetic import Arithmetic, Array
from muser_wire.reference.attention import View, attention, score_scale
from muser_wire.reference.canonical import Weights
from muser_wire.reference.decoder import Planes, ReferenceDecoder
from muser_wire.reference.exp2 import activated, exp2, sigmoid, tanh
from muser_wire.reference.golden import GOLDEN
from muser_wire.reference.linear import IntegerWeight, linear, linear_arrays, quantised_input
from muser_wire.reference.norm import lane_sum, rms_norm
from muser_wire.reference.planes import key_integers, plane, value_integers
from muser_wire.reference.quantise import limbs, quantise
from muser_wire.reference.rope import rotated
from muser_wire.reference.tiny import RandomWeights, random_bytes, random_ids, random_spec

LABEL = b"muser conformance 1"
HASH_CHARS = 16
SAMPLE = 1 << 15
MODEL_SEEDS = (2, 4, 5, 8)
"""Of `random_spec`: small heads; between them every feature that a family may have."""
MODEL_TOKENS = 90
MODEL_CHUNKS = (41, 1, 1, 30, 17)
DOT_SHAPES = ((1, 32, 300), (2, 64, 64), (7, 16, 129), (16, 64, 96), (33, 32, 257), (130, 64, 65))
HEADS = ((64, 2, 3, None), (128, 1, 2, 64), (80, 2, 1, 40), (32, 2, 2, 7))
"""Head size, key heads, queries a key head, window."""

Observed = dict[str, str]


@dataclass(frozen=True, eq=False)
class ModelRun:
    """What a decoder gave for a prompt: every layer's planes, and the last token's logits where it has a head."""

    planes: Sequence[Planes]
    logits: npt.NDArray[np.float32] | None


Runner = Callable[[Weights, Sequence[Sequence[int]]], ModelRun]
"""Runs a prompt, given as chunks, through a decoder with these weights."""


def plain_runner(ar: Arithmetic) -> Runner:
    """Return the runner of the plain decoder over an array library."""

    def run(weights: Weights, chunks: Sequence[Sequence[int]]) -> ModelRun:
        decoder = ReferenceDecoder(ar, weights)
        cache = decoder.new_cache()
        for chunk in chunks:
            x = decoder.forward(chunk, cache)
        planes = [cache.planes(layer) for layer in range(len(weights.spec.layers))]
        return ModelRun(planes, decoder.logits(x[-1:])[0])

    return run


def observe(ar: Arithmetic, run: Runner | None = None, *, thorough: bool = False) -> Observed:
    """Return a hash of what a device gave for each check, by name; `run` is the node's own decoder."""
    observed = {name: hash_of(ar.host(x) for x in check(ar)) for name, check in QUICK.items()}
    if thorough:
        observed |= {name: hash_of(ar.host(x) for x in check(ar)) for name, check in THOROUGH.items()}
    return observed | _observe_models(plain_runner(ar) if run is None else run)


def _observe_models(run: Runner) -> Observed:
    observed = {}
    for seed in MODEL_SEEDS:
        spec = random_spec(seed)
        ids = random_ids(spec, seed, MODEL_TOKENS)
        for name, sizes in (("whole", (MODEL_TOKENS,)), ("chunks", MODEL_CHUNKS)):
            result = run(RandomWeights(spec, seed), cut(ids, sizes))
            observed[f"model {seed}, {name}: planes"] = hash_of(x for pair in result.planes for x in pair)
            if result.logits is not None:
                observed[f"model {seed}, {name}: logits"] = hash_of([result.logits])
    return observed


def differing(observed: Mapping[str, str]) -> list[str]:
    """Return the names of the checks that did not give what the rules give."""
    return [name for name, value in observed.items() if GOLDEN.get(name) != value]


def require(observed: Mapping[str, str], device: str) -> Digest:
    """Return the digest of a device that conforms.

    Raises:
        NumericsMismatch: it does not; the message names the checks.
    """
    wrong = differing(observed)
    if wrong:
        raise NumericsMismatch(
            f"{device} does not compute as the reference lane's rules say, in {len(wrong)} of {len(observed)} checks: "
            f"{', '.join(wrong)}; use --lane native, and see `muser exact conformance`"
        )
    return conformance_digest(observed)


def conformance_digest(observed: Mapping[str, str]) -> Digest:
    """Return the digest over what both kinds of node can observe: the quick set, and the planes of the tiny models."""
    shared = {name: value for name, value in observed.items() if name not in THOROUGH and not name.endswith("logits")}
    return digest_of(LABEL, *(f"{name}={shared[name]}".encode() for name in sorted(shared)))


def golden_digest() -> Digest:
    """Return the digest of a device that conforms."""
    return conformance_digest(GOLDEN)


def cut(ids: Sequence[int], sizes: Iterable[int]) -> list[Sequence[int]]:
    """Return ids in chunks of these sizes; the last holds what is left."""
    chunks, at = [], 0
    for size in sizes:
        chunks.append(ids[at : at + size])
        at += size
    return [*chunks, ids[at:]] if at < len(ids) else chunks


def hash_of(arrays: Iterable[npt.NDArray[Any]]) -> str:
    """Return 16 hex digits of SHA-256 over arrays' bytes. Both zeros count as one."""
    h = hashlib.sha256()
    for x in arrays:
        h.update(np.ascontiguousarray(x + x.dtype.type(0)).tobytes())
    return h.hexdigest()[:HASH_CHARS]


def numbers(name: str, count: int, low: int = -30, high: int = 30) -> npt.NDArray[np.float32]:
    """Return float32 of both signs with random mantissas and exponents from `low` up to `high`."""
    raw = random_bytes(0, name, 4 * count).view("<u4")
    exponents = (raw >> np.uint32(23) & np.uint32(255)) % np.uint32(high - low) + np.uint32(127 + low)
    bits = raw & np.uint32(0x807FFFFF) | exponents << np.uint32(23)
    return bits.astype(np.uint32).view(np.float32)


def every(low: float, high: float, step: int) -> npt.NDArray[np.float32]:
    """Return each `step`-th positive float32 from `low` up to `high`."""
    first, last = (int(np.float32(value).view(np.uint32)) for value in (low, high))
    return np.arange(first, last, step, dtype=np.uint32).view(np.float32)


def _products(ar: Arithmetic) -> Iterator[Array]:
    a, b, c = (numbers(name, SAMPLE) for name in "abc")
    # A fused step finds what the product's rounding left.
    undone = ar.array(np.float32(0) - a * b)
    x, y, z = ar.array(a), ar.array(b), ar.array(c)
    yield from (x * y, x + y, x - y, x * y + z, x * y - z * x, x * y + undone, x * 0.25, x + 1.0, 1.0 - x)


def _rounding(ar: Arithmetic) -> Iterator[Array]:
    halves = random_bytes(0, "halves", 4 * SAMPLE).view("<i4") % (1 << 23)
    x = ar.array(halves.astype(np.float32) * np.float32(0.5))
    yield from (ar.rint(x), ar.floor(x), ar.to_int32(ar.rint(x)), ar.absolute(x), ar.maximum(x, 1.0), ar.minimum(x, x))
    yield ar.to_float32(ar.array(random_bytes(0, "i32", 4 * SAMPLE).view("<i4").astype(np.int32)))
    halfs = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halfs = halfs[np.isfinite(halfs) & ((np.abs(halfs) >= np.float16(2.0**-14)) | (halfs == 0))]
    yield ar.to_float32(ar.array(halfs))
    steps = numbers("planes", SAMPLE, -18, 18)
    yield plane(ar, ar.array(np.concatenate([steps, every(2.0**-15, 2.0**-13, 257), every(65000.0, 66000.0, 61)])))


def _bits(ar: Arithmetic) -> Iterator[Array]:
    x = ar.array(numbers("bits", SAMPLE, -100, 100))
    yield from (ar.bits(x), (ar.bits(x) >> 23) & 255, ar.from_bits(ar.bits(x)), ar.select(x < 0.5, x, x * 2.0))
    yield ar.from_bits((ar.arange(-120, 120) + 127) << 23)
    yield ar.largest(ar.reshape(x, (-1, 64)))


def _roots(ar: Arithmetic, step: int) -> Iterator[Array]:
    yield ar.reciprocal(ar.array(every(1.0, 2.0, step)))
    yield ar.sqrt(ar.array(every(1.0, 4.0, step)))
    far = np.abs(numbers("roots", SAMPLE, -100, 100))
    yield from (ar.reciprocal(ar.array(far)), ar.sqrt(ar.array(far)))


def _powers(ar: Arithmetic, step: int) -> Iterator[Array]:
    # Some octaves at a time, so that the thorough set needs little memory.
    for octave in range(-30, 8, 4):
        x = every(2.0**octave, 2.0 ** (octave + 4), step)
        yield from (exp2(ar, ar.array(-x)), exp2(ar, ar.array(x)))


def _functions(ar: Arithmetic) -> Iterator[Array]:
    x, up = ar.array(numbers("x", SAMPLE, -12, 7)), ar.array(numbers("up", SAMPLE, -6, 3))
    yield from (sigmoid(ar, x), tanh(ar, x))
    yield from (activated(ar, x, up, kind) for kind in Activation)


def _dots(ar: Arithmetic) -> Iterator[Array]:
    """Dot products whose sums of absolute products come up to 2 ** 24."""
    for rows, inner, columns in DOT_SHAPES:
        largest = (1 << 24) // inner >> 12
        a = _extremes(f"a{rows}", (3, rows, inner), 1 << 12)
        b = _extremes(f"b{rows}", (3, inner, columns), min(largest, 128))
        yield ar.integer_dot(ar.array(a), ar.array(b))
        yield ar.integer_sum(ar.array(a))


def _extremes(name: str, shape: tuple[int, ...], largest: int) -> npt.NDArray[np.float32]:
    choice = np.array([largest, largest, -largest, largest - 1, 1 - largest, 1, 0, -3], np.float32)
    return choice[random_bytes(0, name, int(np.prod(shape))) % 8].reshape(shape)


def _quantisers(ar: Arithmetic) -> Iterator[Array]:
    rows = numbers("rows", 1 << 14, -44, 20).reshape(16, -1)
    rows[3] = 0
    rows[4] = np.float32(2.0) - np.float32(2.0**-23)
    for group in (16, 32, 64):
        result = quantise(ar, ar.array(rows), group)
        yield from (result.values, result.exponents, *limbs(ar, result.values))


def _norms(ar: Arithmetic) -> Iterator[Array]:
    for size in (16, 64, 80, 576, 640, 4096):
        x = ar.array(numbers(f"norm{size}", 5 * size, -9, 4).reshape(5, size))
        w = ar.array(np.abs(numbers(f"weight{size}", size, -2, 2)))
        yield from (lane_sum(ar, x), rms_norm(ar, x, w, 2.0**-17), rms_norm(ar, x, None, 2.0**-20))


def _linears(ar: Arithmetic) -> Iterator[Array]:
    x = numbers("activations", 17 * 288, -8, 5).reshape(17, 288)
    for group, low, high, offset in ((32, -128, 127, False), (32, 0, 15, True), (16, -32, 31, False)):
        count = 288 // group
        codes = random_bytes(0, f"q{group}{low}", 100 * 288).astype(np.int16) % (high - low + 1) + low
        s, m = (numbers(f"{part}{group}{low}", 100 * count, -9, -3).reshape(100, count) for part in "sm")
        weight = IntegerWeight(codes.astype(np.int8).reshape(100, count, group), s, m if offset else None)
        for rows in (1, 3, 17):
            yield linear(ar, quantised_input(ar, ar.array(x[:rows])), linear_arrays(ar, weight))


def _attentions(ar: Arithmetic) -> Iterator[Array]:
    keys, queries = 150, 70
    for head_dim, kv_heads, repeats, window in HEADS:
        k, v = (
            plane(
                ar,
                ar.array(numbers(f"{part}{head_dim}", keys * kv_heads * head_dim, -6, 2).reshape(keys, kv_heads, -1)),
            )
            for part in "kv"
        )
        q = numbers(f"q{head_dim}", queries * kv_heads * repeats * head_dim, -4, 2)
        angles = numbers(f"cos{head_dim}", queries * head_dim, -3, 0).reshape(2, queries, 1, -1)
        turned = rotated(ar, ar.array(q.reshape(queries, kv_heads * repeats, head_dim)), *map(ar.array, angles))
        view = View(keys - queries, 0, window, score_scale(0.25))
        out = attention(ar, turned, key_integers(ar, k), value_integers(ar, v), view)
        yield from (k, v, turned, out)


Check = Callable[[Arithmetic], Iterable[Array]]

QUICK: dict[str, Check] = {
    "products and sums": _products,
    "rounding": _rounding,
    "bits": _bits,
    "reciprocals and roots": lambda ar: _roots(ar, 251),
    "powers": lambda ar: _powers(ar, 9973),
    "functions": _functions,
    "dots at the bound": _dots,
    "quantisers": _quantisers,
    "norms": _norms,
    "linear layers": _linears,
    "attention": _attentions,
}
THOROUGH: dict[str, Check] = {
    "every reciprocal and root": lambda ar: _roots(ar, 1),
    "powers, a seventh of all": lambda ar: _powers(ar, 7),
}
