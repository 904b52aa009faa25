"""The kernels of attention [N8]: integers of queries, keys and values, and the blocks of keys.

All products are of int8 limbs in int32: 2 ** 12 * 2 ** 12 * 64 is 2 ** 30. Keys and values lie in slots, the first of
which is at a multiple of 64, so a block of slots is one of the rules' blocks; slots that hold nothing are zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muser_prefill.kernels.exact.triton.steps import (
    LIMB,
    SMALLEST,
    exp2,
    largest_exponent,
    limbs,
    power_of_two,
    reciprocal,
    rint,
)
from muser_wire.reference import constants

BLOCK = tl.constexpr(constants.KEY_BLOCK)
HIDDEN = tl.constexpr(constants.HIDDEN_SCORE)
RESCALE_LIMIT = tl.constexpr(constants.RESCALE_LIMIT)
DENOMINATOR = tl.constexpr(2.0**constants.DENOMINATOR_BITS)
DENOMINATOR_SHARE = tl.constexpr(2.0**-constants.DENOMINATOR_BITS)
SMALLEST_PRODUCT = tl.constexpr(constants.SMALLEST_PRODUCT_EXPONENT)


@triton.jit
def _quantised(x):
    """Return a group in each row as int8 limbs, and its power of two."""
    exponents = largest_exponent(tl.max(tl.abs(x), 1), SMALLEST)
    high, low = limbs(rint(x * power_of_two(0 - exponents)[:, None]))
    return high, low, power_of_two(exponents)


@triton.jit(do_not_specialize=["empty", "count", "slots"])
def head_integers_kernel(x_p, to, empty, count, slots, heads, head_dim, group: tl.constexpr, rows: tl.constexpr):
    """Quantise `[count, heads, head_dim]` in groups of `group` into slots after `empty` ones that become zero.

    `to` is high and low int8 `[heads, slots, head_dim]` and powers of two `[heads, head_dim / group, slots]`. A
    program has `rows` slots of a head's group.
    """
    high_p, low_p, scales_p = to
    slot, head, g = tl.program_id(0) * rows + tl.arange(0, rows), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, at = slot - empty, g * group + tl.arange(0, group)
    held = (row >= 0) & (row < count)
    x_at = (row.to(tl.int64) * heads + head)[:, None] * head_dim + at[None, :]
    high, low, scales = _quantised(tl.load(x_p + x_at, mask=held[:, None], other=0.0).to(tl.float32))
    to_at = (head * slots + slot)[:, None] * head_dim + at[None, :]
    tl.store(high_p + to_at, high, mask=(slot < slots)[:, None])
    tl.store(low_p + to_at, low, mask=(slot < slots)[:, None])
    tl.store(scales_p + (head * (head_dim // group) + g) * slots + slot, scales, mask=slot < slots)


@triton.jit(do_not_specialize=["empty", "count"])
def value_integers_kernel(
    x_p, to, empty, count, slots, heads, head_dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr
):
    """As `head_integers_kernel` with a head as one group, high and low `[heads, head_dim, slots]`: a product over
    slots reads them along a row. `slots` is a multiple of `rows`; `width` is head_dim, or the next power of two.
    """
    high_p, low_p, scales_p = to
    slot, head = tl.program_id(0) * rows + tl.arange(0, rows), tl.program_id(1).to(tl.int64)
    row, at = slot - empty, tl.arange(0, width)
    seen = ((row >= 0) & (row < count))[:, None] & (at < head_dim)[None, :]
    x_at = (row.to(tl.int64) * heads + head)[:, None] * head_dim + at[None, :]
    high, low, scales = _quantised(tl.load(x_p + x_at, mask=seen, other=0.0).to(tl.float32))
    to_at = (head * head_dim + at)[None, :] * slots + slot[:, None]
    tl.store(high_p + to_at, high, mask=(at < head_dim)[None, :])
    tl.store(low_p + to_at, low, mask=(at < head_dim)[None, :])
    tl.store(scales_p + head * slots + slot, scales)


@triton.jit
def _product(a_high, a_low, b_high, b_low):
    """Return the exact product of integers in limbs, rounded once to float32."""
    t = tl.dot(a_high, b_high, out_dtype=tl.int32) * LIMB
    t = tl.dot(a_high, b_low, t, out_dtype=tl.int32)
    t = tl.dot(a_low, b_high, t, out_dtype=tl.int32) * LIMB
    return tl.dot(a_low, b_low, t, out_dtype=tl.int32).to(tl.float32)


@triton.jit
def _scores(q, keys, row, here, slot, count, slots, head_dim: tl.constexpr, group: tl.constexpr, padded: tl.constexpr):
    """Return unscaled scores `[rows, 64]`: the head's groups ascending, from +0."""
    q_high, q_low, q_scales = q
    k_high, k_low, k_scales = keys
    k = tl.arange(0, padded)
    total = tl.zeros([row.shape[0], BLOCK], tl.float32)
    for g in tl.static_range(head_dim // group):
        q_at, k_at = row.to(tl.int64)[:, None] * head_dim + (g * group + k)[None, :], g * group + k
        k_at = slot.to(tl.int64)[None, :] * head_dim + k_at[:, None]
        q_seen, k_seen = here[:, None] & (k < group)[None, :], (k < group)[:, None]
        t = _product(
            tl.load(q_high + q_at, mask=q_seen, other=0),
            tl.load(q_low + q_at, mask=q_seen, other=0),
            tl.load(k_high + k_at, mask=k_seen, other=0),
            tl.load(k_low + k_at, mask=k_seen, other=0),
        )
        t = t * tl.load(q_scales + g * count + row, mask=here, other=0.0)[:, None]
        total = total + t * tl.load(k_scales + g * slots + slot)[None, :]
    return total


@triton.jit
def _weighted(p, values, slot, slots, head_dim: tl.constexpr, width: tl.constexpr):
    """Return p times the values of a block `[rows, width]`, zeros past head_dim."""
    v_high, v_low, v_scales = values
    at = tl.arange(0, width)
    seen = (at < head_dim)[None, :]
    v_at = at.to(tl.int64)[None, :] * slots + slot[:, None]
    a = p * tl.load(v_scales + slot)[None, :]
    exponents = largest_exponent(tl.max(a, 1), SMALLEST_PRODUCT)
    high, low = limbs(rint(a * power_of_two(0 - exponents)[:, None]))
    v_high = tl.load(v_high + v_at, mask=seen, other=0)
    v_low = tl.load(v_low + v_at, mask=seen, other=0)
    return _product(high, low, v_high, v_low) * power_of_two(exponents)[:, None]


@triton.jit
def _factor(x):
    """Return 2 ** x for whole x <= 0, exactly 0 below -120."""
    power = power_of_two(tl.maximum(x, RESCALE_LIMIT).to(tl.int32))
    return tl.where(x < RESCALE_LIMIT, 0.0, power)


@triton.jit
def _block(m, acc, total, scores, values, slot, slots, head_dim: tl.constexpr, width: tl.constexpr):
    """Return maximum, weighted values and denominator of the blocks so far with one more."""
    # The next whole number above the maximum: rescaling is then by powers of two.
    top = tl.floor(tl.max(scores, 1)) + 1.0
    p = exp2(scores - top[:, None])
    # Whole numbers, at most 2 ** 21: exact in any order.
    share = tl.sum(rint(p * DENOMINATOR), 1) * DENOMINATOR_SHARE
    largest = tl.maximum(m, top)
    old, new = _factor(m - largest), _factor(top - largest)
    acc = acc * old[:, None] + _weighted(p, values, slot, slots, head_dim, width) * new[:, None]
    return largest, acc, total * old + share * new


@triton.jit
def _of_head(tensors, head, of_limbs, of_scales):
    """Return where high, low and powers of two of a head begin."""
    high, low, scales = tensors
    return high + head * of_limbs, low + head * of_limbs, scales + head * of_scales


@triton.jit(do_not_specialize=["count", "start", "base", "first", "window"])
def attention_kernel(
    queries,
    keys,
    values,
    to_p,
    count,
    slots,
    start,
    base,
    first,
    window,
    scale,
    repeats,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    rows: tl.constexpr,
):
    """Store attention `[count, heads, head_dim]`; a program has `rows` queries of one head.

    `base`, `first` and `start` are the positions of slot 0, of the first held key and of the first query. A query at
    p sees the held keys after p - `window` up to p. `padded` is `group`, or 32 where that is less.
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    here, position = row < count, start + row
    groups: tl.constexpr = head_dim // group
    q = _of_head(queries, head, count.to(tl.int64) * head_dim, count * groups)
    k = _of_head(keys, head // repeats, slots.to(tl.int64) * head_dim, slots * groups)
    v = _of_head(values, head // repeats, slots.to(tl.int64) * head_dim, slots)
    m = tl.full([rows], HIDDEN, tl.float32)
    acc, total = tl.zeros([rows, width], tl.float32), tl.zeros([rows], tl.float32)
    lowest = tl.maximum(position - window + 1, first)
    begin = (tl.maximum(start + tl.program_id(0) * rows - window + 1, first) - base) // BLOCK * BLOCK
    end = tl.minimum(start + tl.program_id(0) * rows + rows, start + count) - base
    for block in range(begin, end, BLOCK):
        slot = block + tl.arange(0, BLOCK)
        scores = _scores(q, k, row, here, slot, count, slots, head_dim, group, padded) * scale
        key = (base + slot)[None, :]
        scores = tl.where((key <= position[:, None]) & (key >= lowest[:, None]), scores, HIDDEN)
        m, acc, total = _block(m, acc, total, scores, v, slot, slots, head_dim, width)
    at = tl.arange(0, width)
    to = to_p + (row * tl.num_programs(1) + head)[:, None] * head_dim + at[None, :]
    tl.store(to, acc * reciprocal(total)[:, None], mask=here[:, None] & (at < head_dim)[None, :])
