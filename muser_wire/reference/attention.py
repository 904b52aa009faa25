"""Attention [N8]: exact integer dot products, blocks of keys anchored at position 0, rescaling by powers of two.

A row's result depends on its own query and on the keys it sees, never on which other rows or how many keys were there:
so chunks and batches change no byte. A block that a row does not see changes nothing and may be left out. The running
maximum below may as well be the final one from the start: see docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from muser_wire.model.spec import as_f32
from muser_wire.reference.arithmetic import Arithmetic, Array
from muser_wire.reference.constants import (
    DENOMINATOR_BITS,
    HIDDEN_SCORE,
    KEY_BLOCK,
    LIMB_BITS,
    LOG2_E_F64,
    RESCALE_LIMIT,
    SMALLEST_PRODUCT_EXPONENT,
)
from muser_wire.reference.exp2 import exp2
from muser_wire.reference.planes import Integers, head_group
from muser_wire.reference.quantise import Quantised, largest_exponent, power_of_two, quantise


@dataclass(frozen=True)
class View:
    """Which keys queries see: the first query's position, the position of the first key given, and the window.

    A query at q sees the key at k when 0 <= q - k < `window`; None sees every k <= q, and then `first_key` is 0.
    `scale` is `score_scale` of the model's.
    """

    first_query: int
    first_key: int
    window: int | None
    scale: float


@dataclass(frozen=True, eq=False)
class _Running:
    """What the blocks so far come to, a row each: maximum `m`, weighted values `acc`, denominator `l`."""

    m: Array
    acc: Array
    l: Array  # noqa: E741  (the usual name)


def score_scale(attention_scale: float) -> float:
    """Return what scores are multiplied with so that 2 ** x takes the place of exp: rounded once to float32."""
    return as_f32(attention_scale * LOG2_E_F64)


def attention(ar: Arithmetic, q: Array, keys: Integers, values: Integers, view: View) -> Array:
    """Return the attended values `[T, heads, head_dim]` of queries of the same shape, positions applied.

    `keys` and `values` are of the tokens from `view.first_key` to the last query's, which is the last held.
    """
    tokens, heads, head_dim = q.shape
    held, kv_heads = keys.high.shape[:2]
    rows = heads // kv_heads * tokens
    queries = _by_kv_head(ar, quantise(ar, q, head_group(head_dim)), kv_heads)
    lowest = 0 if view.window is None else max(0, view.first_query - view.window + 1)
    running = _Running(
        ar.full((kv_heads, rows, 1), HIDDEN_SCORE), ar.zeros((kv_heads, rows, head_dim)), ar.zeros((kv_heads, rows, 1))
    )
    stop = view.first_key + held
    for block in range(lowest // KEY_BLOCK * KEY_BLOCK, stop, KEY_BLOCK):
        first, last = max(block, view.first_key), min(block + KEY_BLOCK, stop)
        part = slice(first - view.first_key, last - view.first_key)
        visible = _visible(ar, view, (first, last), (heads // kv_heads, tokens))
        scores = _scores(ar, queries, _heads_first(ar, keys, part), view.scale)
        running = _block(ar, running, scores, visible, _heads_first(ar, values, part))
        ar.evaluate(running.m, running.acc, running.l)
    out = running.acc * ar.reciprocal(running.l)
    return ar.swap(ar.reshape(out, (heads, tokens, head_dim)), 0, 1)


def _by_kv_head(ar: Arithmetic, q: Quantised, kv_heads: int) -> Quantised:
    """Return `[T, heads, ...]` as `[kv_heads, heads / kv_heads * T, ...]`."""
    tokens, heads, *rest = q.values.shape
    shape = (kv_heads, heads // kv_heads * tokens)
    return Quantised(
        ar.reshape(ar.swap(q.values, 0, 1), (*shape, *rest)),
        ar.reshape(ar.swap(q.exponents, 0, 1), (*shape, rest[0], 1)),
    )


def _heads_first(ar: Arithmetic, x: Integers, part: slice) -> Integers:
    """Return some tokens as `[kv_heads, tokens, groups, ...]`."""
    return Integers(*(ar.swap(array[part], 0, 1) for array in (x.high, x.low, x.exponents)))


def _visible(ar: Arithmetic, view: View, keys: tuple[int, int], shape: tuple[int, int]) -> Array:
    """Return which keys from keys[0] up to keys[1] each row sees, `[1, repeats * tokens, keys]`."""
    repeats, tokens = shape
    first, last = keys
    at = ar.reshape(ar.arange(view.first_query, view.first_query + tokens), (tokens, 1))
    key = ar.reshape(ar.arange(first, last), (1, last - first))
    seen = key <= at
    if view.window is not None:
        seen = seen & (key > at - view.window)
    seen = ar.broadcast(ar.reshape(seen, (1, tokens, last - first)), (repeats, tokens, last - first))
    return ar.reshape(seen, (1, repeats * tokens, last - first))


def _scores(ar: Arithmetic, q: Quantised, keys: Integers, scale: float) -> Array:
    """Return scaled scores `[kv_heads, rows, keys]`.

    A group of head components: the exact integer product, rounded once to float32, times both powers of two; groups
    ascending, beginning with +0. Then times `scale`.
    """
    kv_heads, rows, groups = q.values.shape[:3]
    total = ar.zeros((kv_heads, rows, keys.high.shape[1]))
    for g in range(groups):
        high, low = (ar.swap(limb[:, :, g], 1, 2) for limb in (keys.high, keys.low))
        t = ar.integer_dot(q.values[:, :, g], high) * 2.0**LIMB_BITS
        t = t + ar.integer_dot(q.values[:, :, g], low)
        t = t * power_of_two(ar, q.exponents[:, :, g])
        total = total + t * power_of_two(ar, ar.swap(keys.exponents[:, :, g], 1, 2))
    return total * scale


def _block(ar: Arithmetic, running: _Running, scores: Array, visible: Array, values: Integers) -> _Running:
    """Return what the blocks come to with one more.

    A hidden key's p is 2 ** -120, which both quantisers below make 0. Of a row that sees none of the block all p are 1:
    its maximum is then so low that the first block it sees takes all of that away.
    """
    scores = ar.select(visible, scores, ar.full(tuple(scores.shape), HIDDEN_SCORE))
    # The next whole number above the maximum: rescaling is then by powers of two.
    top = ar.floor(ar.largest(scores)) + 1.0
    p = exp2(ar, scores - top)
    share = ar.integer_sum(ar.rint(p * 2.0**DENOMINATOR_BITS)) * 2.0**-DENOMINATOR_BITS
    m = ar.maximum(running.m, top)
    old, new = _factor(ar, running.m - m), _factor(ar, top - m)
    return _Running(m, running.acc * old + _weighted(ar, p, values) * new, running.l * old + share * new)


def _weighted(ar: Arithmetic, p: Array, values: Integers) -> Array:
    """Return p times the values of a block, `[kv_heads, rows, head_dim]`.

    p times the values' powers of two is quantised over the block to 12 bits; its product with the values' integers is
    exact, rounded once to float32, then times a power of two.
    """
    a = p * power_of_two(ar, ar.swap(values.exponents[:, :, 0], 1, 2))
    exponents = largest_exponent(ar, a, SMALLEST_PRODUCT_EXPONENT)
    q = ar.rint(a * power_of_two(ar, 0 - exponents))
    product = ar.integer_dot(q, values.high[:, :, 0]) * 2.0**LIMB_BITS
    product = product + ar.integer_dot(q, values.low[:, :, 0])
    return product * power_of_two(ar, exponents)


def _factor(ar: Arithmetic, x: Array) -> Array:
    """Return 2 ** x for whole x <= 0, exactly 0 below -120."""
    power = power_of_two(ar, ar.to_int32(ar.maximum(x, RESCALE_LIMIT)))
    return ar.select(x < RESCALE_LIMIT, ar.zeros(tuple(x.shape)), power)
