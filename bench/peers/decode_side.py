"""What both sides of the decode benchmark share: the clock, and the count of a step's operations.

mlx is imported in functions, after the side has chosen its BLAS.
"""

from __future__ import annotations

import collections
import io
import re
import time
from collections.abc import Iterator
from typing import Any

# Primitives that move no data: they change shape and strides.
VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze"),
    *("StopGradient", "Transpose", "Unflatten", "View"),
}

FAST = ("rms_norm", "rope", "scaled_dot_product_attention")
"""Functions of `mx.fast` that a GPU runs as one kernel and a CPU as many operations."""


def timed(stream: Iterator[int]) -> dict[str, Any]:
    """Return the tokens of a stream, the seconds to the first one, and from the first to the last."""
    began = time.perf_counter()
    tokens = [next(stream)]
    first = time.perf_counter()
    tokens += list(stream)
    return {"tokens": tokens, "prefill_s": first - began, "seconds": time.perf_counter() - first}


class OneNodeEach:
    """While active, each function of FAST leaves one node in the graph. What it computes is then of no use."""

    def __enter__(self) -> None:
        import mlx.core as mx

        self._kept = {name: getattr(mx.fast, name) for name in FAST}
        for name in FAST:
            setattr(mx.fast, name, self._stand_in)

    def __exit__(self, *_: object) -> None:
        import mlx.core as mx

        for name, function in self._kept.items():
            setattr(mx.fast, name, function)

    @staticmethod
    def _stand_in(x: Any, *inputs: Any, **more: Any) -> Any:
        import mlx.core as mx

        arrays = [value for value in (*inputs, *more.values()) if isinstance(value, mx.array)]
        return mx.depends([x], arrays or [x])[0]


def count_operations(output: Any) -> dict[str, int]:
    """Return how often each primitive that is not a view occurs in the graph of an unevaluated array.

    A compiled group counts as one, whatever it holds.
    """
    import mlx.core as mx

    text = io.StringIO()
    mx.export_to_dot(text, output)
    names = re.findall(r'label ?= ?"(\w+)", shape ?= ?rectangle', text.getvalue())
    kinds = ("Compiled" if name.startswith("Compiled") else name for name in names)
    counts = collections.Counter("Fast" if kind == "Depends" else kind for kind in kinds)
    return {name: count for name, count in counts.items() if name not in VIEWS}
