"""The reference lane with one rule broken at a time: what must be caught, and how far it would have gone unseen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from muser_wire.reference import attention, decoder, linear, norm
from muser_wire.reference.canonical import Weights
from muser_wire.reference.decoder import ReferenceDecoder
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.quantise import power_of_two


class ApproximateDivision(NumpyArithmetic):
    """1 / x by an estimate of 8 bits and two steps of Newton's method, as a fast-math library does."""

    def reciprocal(self, x: Any) -> Any:
        r = ((np.float32(1) / x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        for _ in range(2):
            r = r * (np.float32(2) - x * r)
        return r


def sum_by_library(ar: Any, x: Any) -> Any:
    """The sum of squares as numpy adds it up."""
    return np.sum(x, axis=-1, keepdims=True, dtype=np.float32)


def fused_linear(ar: Any, x: Any, weight: Any) -> Any:
    """Linear layers whose last step, a + s * D, is one fused multiply-add."""
    groups, group, rows = weight.q.shape
    values = ar.reshape(x.values, (x.values.shape[0], groups, group))
    scales = power_of_two(ar, x.exponents)
    a = ar.zeros((x.values.shape[0], rows))
    for g in range(groups):
        scale = scales[:, g * group // 32]
        dots = ar.integer_dot(values[:, g], weight.q[g]) * scale
        if weight.m is not None:
            a = a + weight.m[g] * (ar.integer_sum(values[:, g]) * scale)
        # Exact in float64, and rounded once.
        a = (a.astype(np.float64) + weight.s[g].astype(np.float64) * dots.astype(np.float64)).astype(np.float32)
    return a


@dataclass(frozen=True)
class Broken:
    """One rule broken: a patch of the algorithm's text, or an arithmetic that does not keep its word."""

    what: str
    patches: tuple[tuple[Any, str, Any], ...] = ()
    arithmetic: type[NumpyArithmetic] = NumpyArithmetic

    @contextmanager
    def applied(self) -> Iterator[NumpyArithmetic]:
        """Yield the arithmetic to use while the rule is broken."""
        patched = [mock.patch.object(module, name, other) for module, name, other in self.patches]
        for patch in patched:
            patch.start()
        try:
            yield self.arithmetic()
        finally:
            for patch in patched:
                patch.stop()


BROKEN = (
    Broken("a norm that adds in another order", ((norm, "lane_sum", sum_by_library),)),
    Broken("a fused multiply-add", ((decoder, "linear", fused_linear), (linear, "linear", fused_linear))),
    Broken("an approximate division", arithmetic=ApproximateDivision),
    Broken("a library's exp", ((attention, "exp2", lambda ar, x: np.exp2(np.maximum(x, np.float32(-120)))),)),
)


def logits_of(ar: NumpyArithmetic, weights: Weights, ids: list[int], stepped: int | None = None) -> Any:
    """Return the logits `[T / 2, vocab]` of a prompt's second half.

    `stepped` names a layer in which one value of the first half's last token, its largest, is one float16 step away.
    (A step of a much smaller one can be less than the last of the 12 bits that attention takes of it.)
    """
    model = ReferenceDecoder(ar, weights)
    half = len(ids) // 2
    cache = model.new_cache()
    model.forward(ids[:half], cache)
    if stepped is not None:
        other = model.new_cache()
        for layer in range(len(weights.spec.layers)):
            keys, values = (plane.copy() for plane in cache.planes(layer))
            if layer == stepped:
                at = (half - 1, 0, int(np.abs(values[half - 1, 0]).argmax()))
                values[at] = np.nextafter(values[at], np.float16(65504))
            other.append(layer, keys, values)
        other.length, cache = half, other
    return model.logits(model.forward(ids[half:], cache))


def moved(one: Any, other: Any) -> int:
    """Return how many logits differ in any bit."""
    return int((one.view(np.uint32) != other.view(np.uint32)).sum())
