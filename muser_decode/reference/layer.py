"""One layer of the lane: its weights as the decoder multiplies with them, and its positions."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from muser_decode.reference.linear import Linear, linear_of
from muser_decode.reference.vectors import Norm
from muser_wire.model.spec import ModelSpec, RopeSpec
from muser_wire.reference.canonical import Weights
from muser_wire.reference.rope import rope_table

FIRST_POSITIONS = 1024
"""Rows of a table of positions at first; it doubles when more are needed."""


class Rope:
    """Rotary positions by the lane's table [N5]."""

    def __init__(self, spec: RopeSpec) -> None:
        self._spec = spec
        self._extend(FIRST_POSITIONS)

    def _extend(self, positions: int) -> None:
        table = rope_table(self._spec, 0, positions)
        self._positions = positions
        self._same = mx.array(np.concatenate([table.cos, table.cos], axis=1))
        self._crossed = mx.array(np.concatenate([-table.sin, table.sin], axis=1))
        mx.eval(self._same, self._crossed)

    def at(self, positions: range | list[int]) -> tuple[mx.array, mx.array]:
        """Return the table's rows of some positions: what multiplies a component, and what its partner."""
        highest = max(positions)
        while highest >= self._positions:
            self._extend(2 * self._positions)
        if isinstance(positions, range):
            return self._same[positions.start : positions.stop], self._crossed[positions.start : positions.stop]
        rows = mx.array(positions)
        return self._same[rows], self._crossed[rows]


def rotated(x: mx.array, table: tuple[mx.array, mx.array]) -> mx.array:
    """Return heads `[heads, tokens, head_dim]` turned to their positions.

    Products with -sin are added where the rule subtracts those with sin: the same number.
    """
    same, crossed = table
    dims = same.shape[-1]
    turned = x if dims == x.shape[-1] else x[..., :dims]
    partners = mx.concatenate([turned[..., dims // 2 :], turned[..., : dims // 2]], axis=-1)
    turned = turned * same + partners * crossed
    return turned if dims == x.shape[-1] else mx.concatenate([turned, x[..., dims:]], axis=-1)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer. `projections` gives queries, keys, values and, where attention has one, its gate.

    `qk_norm` works on query and key heads `[heads + kv_heads, tokens, head_dim]` together.
    """

    window: int | None
    attn_norm: Norm
    projections: Linear
    qk_norm: Norm | None
    rope: Rope | None
    o: Linear
    attn_post_norm: Norm | None
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    mlp_post_norm: Norm | None


class LayerLoader:
    """Reads canonical weights into the decoder's layouts, one layer at a time."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._spec: ModelSpec = weights.spec
        self._ropes: dict[RopeSpec, Rope] = {}

    def linear(self, *names: str) -> Linear:
        """Return matrices of one input as one layer."""
        return linear_of(self._weights, *names)

    def norm(self, name: str, eps: float) -> Norm:
        """Return the norm whose multipliers have this name."""
        vector = self._weights.vector(name)
        return Norm(mx.array(vector[None]), len(vector), eps)

    def layer(self, index: int) -> Layer:
        """Return one layer."""
        at, spec = f"layers.{index}", self._spec
        gate = ("gate",) if spec.attention_gate else ()
        post = spec.post_norm_eps
        return Layer(
            window=spec.layers[index].window,
            attn_norm=self.norm(f"{at}.attn_norm.weight", spec.norm_eps),
            projections=self.linear(*(f"{at}.attn.{part}.weight" for part in ("q", "k", "v", *gate))),
            qk_norm=self._qk_norm(at),
            rope=self._rope(spec.layers[index].rope),
            o=self.linear(f"{at}.attn.o.weight"),
            attn_post_norm=None if post is None else self.norm(f"{at}.attn_post_norm.weight", post),
            mlp_norm=self.norm(f"{at}.mlp_norm.weight", spec.norm_eps),
            gate_up=self.linear(f"{at}.mlp.gate.weight", f"{at}.mlp.up.weight"),
            down=self.linear(f"{at}.mlp.down.weight"),
            mlp_post_norm=None if post is None else self.norm(f"{at}.mlp_post_norm.weight", post),
        )

    def _qk_norm(self, at: str) -> Norm | None:
        spec = self._spec
        if spec.qk_norm is None:
            return None
        if not spec.qk_norm.weighted:
            return Norm(None, spec.head_dim, spec.qk_norm.eps)
        q, k = (self._weights.vector(f"{at}.attn.{part}_norm.weight") for part in "qk")
        rows = np.concatenate([np.tile(q, (spec.heads, 1)), np.tile(k, (spec.kv_heads, 1))])
        return Norm(mx.array(rows[:, None]), spec.head_dim, spec.qk_norm.eps)

    def _rope(self, rope: RopeSpec | None) -> Rope | None:
        if rope is not None and rope not in self._ropes:
            self._ropes[rope] = Rope(rope)
        return None if rope is None else self._ropes[rope]
