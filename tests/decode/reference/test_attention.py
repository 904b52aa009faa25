from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.reference import attention as module
from muser_decode.reference.attention import Attention, spans
from muser_decode.reference.planes import Derivation, PlaneShape, Seen
from muser_wire.reference.attention import View, attention, score_scale
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.planes import key_integers, plane, value_integers
from muser_wire.reference.tiny import random_spec

NUMPY = NumpyArithmetic(np.float64)
KV_HEADS = 2


def numbers(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(low, high, shape))).astype(np.float32)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(("dim", "loud"), [(64, 3), (128, 1), (80, 1), (16, 8)])
@pytest.mark.parametrize(
    ("offset", "tokens", "window"),
    [
        (0, 1, None),
        (63, 1, None),
        (200, 1, 70),
        (300, 1, 5),
        (0, 130, None),
        (50, 100, 64),
        (129, 33, 7),
        (640, 70, 600),
    ],
)
def test_the_bytes_of_the_rules(
    repeats: int, dim: int, loud: int, offset: int, tokens: int, window: int | None
) -> None:
    """Loud queries make scores that lie hundreds of powers of two apart, so that blocks stop to count."""
    spec = replace(random_spec(0), heads=KV_HEADS * repeats, kv_heads=KV_HEADS, head_dim=dim, attention_scale=0.25)
    held = offset + tokens
    planes = plane(NUMPY, numbers(held, -6, 3, 2 * KV_HEADS, held, dim))
    queries = numbers(tokens, -3, loud, KV_HEADS * repeats, tokens, dim)
    tokens_first = planes.swapaxes(0, 1)
    expected = attention(
        NUMPY,
        queries.swapaxes(0, 1),
        key_integers(NUMPY, tokens_first[:, :KV_HEADS]),
        value_integers(NUMPY, tokens_first[:, KV_HEADS:]),
        View(offset, 0, window, score_scale(0.25)),
    )
    derivation = Derivation(PlaneShape(KV_HEADS, dim))
    rows = derivation.rows(mx.array(planes))
    _, q = derivation.rows_and_queries(mx.array(planes[:, -tokens:]), mx.array(queries))
    base = 0 if window is None else max(0, offset - window + 1) // 64 * 64
    got = Attention(spec)(q, blocks(rows.seen, base, held), spans(offset, tokens, window))
    assert np.array(got).tobytes() == np.ascontiguousarray(expected).reshape(tokens, -1).tobytes()


def blocks(seen: Seen, base: int, held: int) -> Seen:
    """Return whole blocks from `base` on; what fills the last one is noise that nothing may see."""
    noise = mx.abs(mx.array(numbers(1, 0, 3, *(1, 1, -held % 64, 1))))
    filled = []
    for array in seen:
        shape = (*array.shape[:-2], -held % 64, array.shape[-1])
        filling = mx.broadcast_to(noise[0, 0] if array.ndim == 3 else noise[0], shape)
        filled.append(mx.concatenate([array, filling], axis=-2)[..., base:, :])
    return Seen(*filled)


def test_spans_cut_rows_at_whole_positions_and_hide_nothing_that_all_see() -> None:
    cut = spans(50, 100, None)
    assert [(span.start, span.stop) for span in cut] == [(0, 14), (14, 46), (46, 78), (78, 100)]
    assert [[(key.start, key.stop) for key in span.keys] for span in cut] == [
        [(0, 64)],
        [(0, 128)],
        [(0, 128)],
        [(0, 192)],
    ]
    far = spans(2_000, 1, 100)
    assert [(key.start, key.stop) for key in far[0].keys] == [(0, 192)]
    assert spans(1_023, 1, None)[0].keys[0].mask is None
    inner = spans(1_024, 32, None)[0].keys
    assert [(key.start, key.stop, key.mask is None) for key in inner] == [
        (0, 512, True),
        (512, 1_024, True),
        (1_024, 1_088, False),
    ]


def test_long_spans_are_as_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(random_spec(0), heads=2, kv_heads=KV_HEADS, head_dim=32, attention_scale=0.5)
    planes, queries = plane(NUMPY, numbers(5, -3, 3, 4, 256, 32)), numbers(6, -3, 3, 2, 256, 32)
    rows, q = Derivation(PlaneShape(KV_HEADS, 32)).rows_and_queries(mx.array(planes), mx.array(queries))
    whole = np.array(Attention(spec)(q, rows.seen, spans(0, 256, None)))
    monkeypatch.setattr(module, "SPAN_KEYS", 64)
    monkeypatch.setattr(module, "SPAN_ROWS", 16)
    np.testing.assert_array_equal(np.array(Attention(spec)(q, rows.seen, spans(0, 256, None))), whole)
