"""One layer of the lane as the compiled kernels take it: its weights, and its positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from muser_wire.model.spec import ModelSpec, RopeSpec
from muser_wire.reference.canonical import Weights
from muser_wire.reference.compiled.operations import Floats, HeadNorm, Operations, Panels
from muser_wire.reference.rope import RopeTable, rope_table

FIRST_POSITIONS = 1024
"""Rows of a table of positions at first; it doubles when more are needed."""

Matrix = list[Panels]


class Rope:
    """Rotary positions by the lane's table [N5]."""

    def __init__(self, spec: RopeSpec) -> None:
        self._spec = spec
        self._table = rope_table(spec, 0, FIRST_POSITIONS)

    def at(self, positions: range | list[int]) -> RopeTable:
        """Return the table's rows of some positions."""
        rows = len(self._table.cos)
        if max(positions) >= rows:
            while max(positions) >= rows:
                rows *= 2
            self._table = rope_table(self._spec, 0, rows)
        at = slice(positions.start, positions.stop) if isinstance(positions, range) else positions
        return RopeTable(self._table.cos[at], self._table.sin[at])


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm of the residual stream."""

    weight: Floats
    eps: float


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer. `projections` gives queries, keys, values and, where attention has one, its gate."""

    window: int | None
    attn_norm: Norm
    projections: Matrix
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    rope: Rope | None
    o: Matrix
    attn_post_norm: Norm | None
    mlp_norm: Norm
    gate_up: Matrix
    down: Matrix
    mlp_post_norm: Norm | None


class LayerLoader:
    """Reads canonical weights into panels, one layer at a time."""

    def __init__(self, weights: Weights, operations: Operations) -> None:
        self._weights, self._operations = weights, operations
        self._spec: ModelSpec = weights.spec
        self._ropes: dict[RopeSpec, Rope] = {}

    def matrix(self, *names: str) -> Matrix:
        """Return matrices of one input as one."""
        return self._operations.matrix([self._weights.linear(name) for name in names])

    def norm(self, name: str, eps: float) -> Norm:
        """Return the norm whose multipliers have this name."""
        return Norm(self._vector(name), eps)

    def layer(self, index: int) -> Layer:
        """Return one layer."""
        at, spec = f"layers.{index}", self._spec
        gate = ("gate",) if spec.attention_gate else ()
        rope = spec.layers[index].rope
        return Layer(
            window=spec.layers[index].window,
            attn_norm=self.norm(f"{at}.attn_norm.weight", spec.norm_eps),
            projections=self.matrix(*(f"{at}.attn.{part}.weight" for part in ("q", "k", "v", *gate))),
            query_norm=self._head_norm(f"{at}.attn.q_norm.weight"),
            key_norm=self._head_norm(f"{at}.attn.k_norm.weight"),
            rope=None if rope is None else self._rope(rope),
            o=self.matrix(f"{at}.attn.o.weight"),
            attn_post_norm=self._post_norm(f"{at}.attn_post_norm.weight"),
            mlp_norm=self.norm(f"{at}.mlp_norm.weight", spec.norm_eps),
            gate_up=self.matrix(f"{at}.mlp.gate.weight", f"{at}.mlp.up.weight"),
            down=self.matrix(f"{at}.mlp.down.weight"),
            mlp_post_norm=self._post_norm(f"{at}.mlp_post_norm.weight"),
        )

    def _rope(self, rope: RopeSpec) -> Rope:
        if rope not in self._ropes:
            self._ropes[rope] = Rope(rope)
        return self._ropes[rope]

    def _vector(self, name: str) -> Floats:
        return np.ascontiguousarray(self._weights.vector(name), np.float32)

    def _post_norm(self, name: str) -> Norm | None:
        eps = self._spec.post_norm_eps
        return None if eps is None else self.norm(name, eps)

    def _head_norm(self, name: str) -> HeadNorm | None:
        norm = self._spec.qk_norm
        if norm is None:
            return None
        return HeadNorm(self._vector(name) if norm.weighted else None, norm.eps)
