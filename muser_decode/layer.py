"""One layer's weights as the decoder multiplies with them, read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from muser_decode.attention import Rope, rope_for
from muser_decode.linear import Linear, dense, packed
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.spec import RopeSpec


@dataclass(frozen=True)
class Layer:
    """One layer's weights and what it does to positions.

    `projections` gives queries, keys, values and, where attention has one, its gate; `qk_norm` is a
    multiplier of each query and key head, `[heads + kv_heads, 1, head_dim]`. None: the model has none.
    """

    attn_norm: mx.array
    projections: Linear
    qk_norm: mx.array | None
    rope: Rope | None
    o: Linear
    attn_post_norm: mx.array | None
    mlp_norm: mx.array
    gate_up: Linear
    down: Linear
    mlp_post_norm: mx.array | None


class LayerLoader:
    """Reads a checkpoint's tensors into the decoder's layouts, one layer at a time."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, keep_packed: bool) -> None:
        self._checkpoint, self._spec, self._dtype = checkpoint, checkpoint.spec, dtype
        self._build = packed if keep_packed else dense
        self._ropes: dict[RopeSpec, Rope] = {}

    def linear(self, *names: str) -> Linear:
        """Return these matrices, one below the other, as one projection."""
        return self._build([self._checkpoint.weight(name) for name in names], self._dtype)

    def vector(self, name: str) -> mx.array:
        """Return a norm's weight."""
        return self._evaluated(self._checkpoint.weight(name).f32())

    def _evaluated(self, values: np.ndarray) -> mx.array:
        array = mx.array(values).astype(self._dtype)
        # Left lazy, the conversion would be part of the first step.
        mx.eval(array)
        return array

    def layer(self, index: int) -> Layer:
        """Return one layer."""
        at = f"layers.{index}"
        gate = ("gate",) if self._spec.attention_gate else ()
        has_post = self._spec.post_norm_eps is not None
        return Layer(
            attn_norm=self.vector(f"{at}.attn_norm.weight"),
            projections=self.linear(*(f"{at}.attn.{part}.weight" for part in ("q", "k", "v", *gate))),
            qk_norm=self._qk_norm(at),
            rope=self._rope(self._spec.layers[index].rope),
            o=self.linear(f"{at}.attn.o.weight"),
            attn_post_norm=self.vector(f"{at}.attn_post_norm.weight") if has_post else None,
            mlp_norm=self.vector(f"{at}.mlp_norm.weight"),
            gate_up=self.linear(f"{at}.mlp.gate.weight", f"{at}.mlp.up.weight"),
            down=self.linear(f"{at}.mlp.down.weight"),
            mlp_post_norm=self.vector(f"{at}.mlp_post_norm.weight") if has_post else None,
        )

    def _qk_norm(self, at: str) -> mx.array | None:
        spec = self._spec
        if spec.qk_norm is None or not spec.qk_norm.weighted:
            return None
        q, k = (self._checkpoint.weight(f"{at}.attn.{part}_norm.weight").f32() for part in "qk")
        rows = np.concatenate([np.tile(q, (spec.heads, 1)), np.tile(k, (spec.kv_heads, 1))])
        return self._evaluated(rows[:, None])

    def _rope(self, spec: RopeSpec | None) -> Rope | None:
        if spec is None:
            return None
        if spec not in self._ropes:
            self._ropes[spec] = rope_for(spec, self._spec.max_positions)
        return self._ropes[spec]
