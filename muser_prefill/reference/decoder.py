"""The producer's decoder of the reference lane: the same bytes as `muser_wire.reference.decoder`, by fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muser_prefill.engine.cache import KVCache
from muser_prefill.errors import CacheFull, TokenOutOfRange
from muser_prefill.kernels.exact import ExactKernels, HeadNorm, Positions, Sight
from muser_prefill.kernels.exact.choice import choose_exact
from muser_prefill.reference.torch_arithmetic import TorchArithmetic
from muser_wire.geometry import ElementType
from muser_wire.model.spec import ModelSpec, RopeSpec
from muser_wire.reference.attention import score_scale
from muser_wire.reference.canonical import Weights
from muser_wire.reference.exp2 import softcapped
from muser_wire.reference.norm import rms_norm
from muser_wire.reference.rope import rope_table

FIRST_POSITIONS = 2048
"""Rows that a table of positions begins with; it doubles when a prompt needs more."""


@dataclass(frozen=True, eq=False)
class _Norm:
    """RMSNorm of the residual stream."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class _AfterKV:
    """What a layer computes once its keys and values are known. `*_norm` is that of the output, where it has one."""

    attention_out: Any
    attention_norm: _Norm | None
    mlp_norm_before: _Norm
    gate_up: Any
    down: Any
    mlp_norm: _Norm | None


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer. `qkv` gives queries, keys, values and attention gate of all heads, in this order; where `after` is
    None, keys and values only.
    """

    window: int | None
    rope: RopeSpec | None
    norm: _Norm
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    qkv: Any
    after: _AfterKV | None


class TorchReferenceDecoder:
    """Computes the KV planes of prompts in the reference lane. One thread at a time.

    `admitted` names the kernels that passed their check here; `kernels` given, those are used unchecked. `whole` keeps
    what follows the last layer's keys and values, and the head, which only the logits need.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        device: torch.device,
        whole: bool = False,
        kernels: ExactKernels | None = None,
    ) -> None:
        self.spec: ModelSpec = weights.spec
        self._weights = weights
        self._device = device
        self._ar = TorchArithmetic(device)
        self._kernels = choose_exact(self.spec.head_dim, device) if kernels is None else kernels
        self.admitted: tuple[str, ...] = self._kernels.admitted
        self._scale = score_scale(self.spec.attention_scale)
        self._ropes: dict[RopeSpec, Positions] = {}
        last = len(self.spec.layers) - 1
        self._layers = [self._layer(i, complete=whole or i < last) for i in range(last + 1)]
        self._last_part = self._read_last_part() if whole else None

    def _layer(self, index: int, *, complete: bool) -> _Layer:
        spec, layer, at = self.spec, self.spec.layers[index], f"layers.{index}"
        names = ["q", "k", "v", *(["gate"] if spec.attention_gate else [])] if complete else ["k", "v"]
        return _Layer(
            window=layer.window,
            rope=layer.rope,
            norm=_Norm(self._vector(f"{at}.attn_norm.weight"), spec.norm_eps),
            query_norm=self._head_norm(at, "q"),
            key_norm=self._head_norm(at, "k"),
            qkv=self._matrix(*(f"{at}.attn.{name}.weight" for name in names)),
            after=self._after(at) if complete else None,
        )

    def _after(self, at: str) -> _AfterKV:
        return _AfterKV(
            attention_out=self._matrix(f"{at}.attn.o.weight"),
            attention_norm=self._post_norm(f"{at}.attn_post_norm.weight"),
            mlp_norm_before=_Norm(self._vector(f"{at}.mlp_norm.weight"), self.spec.norm_eps),
            gate_up=self._matrix(f"{at}.mlp.gate.weight", f"{at}.mlp.up.weight"),
            down=self._matrix(f"{at}.mlp.down.weight"),
            mlp_norm=self._post_norm(f"{at}.mlp_post_norm.weight"),
        )

    def _read_last_part(self) -> tuple[_Norm, Any]:
        name = "embed.weight" if self.spec.tied_embeddings else "head.weight"
        return _Norm(self._vector("final_norm.weight"), self.spec.norm_eps), self._matrix(name)

    def _matrix(self, *names: str) -> Any:
        return self._kernels.products.matrix([self._weights.linear(name) for name in names])

    def _vector(self, name: str) -> torch.Tensor:
        vector: torch.Tensor = self._ar.array(self._weights.vector(name))
        return vector

    def _head_norm(self, at: str, part: str) -> HeadNorm | None:
        norm = self.spec.qk_norm
        if norm is None:
            return None
        return HeadNorm(self._vector(f"{at}.attn.{part}_norm.weight") if norm.weighted else None, norm.eps)

    def _post_norm(self, name: str) -> _Norm | None:
        eps = self.spec.post_norm_eps
        return None if eps is None else _Norm(self._vector(name), eps)

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for up to `capacity` positions.

        Raises:
            CacheFull: the model has fewer positions.
        """
        if capacity > self.spec.max_positions:
            raise CacheFull(f"{capacity} positions asked for, the model has {self.spec.max_positions}")
        return KVCache(self.spec, capacity, ElementType.F16, self._device)

    @torch.inference_mode()
    def prefill_chunk(self, token_ids: Sequence[int], cache: KVCache, on_layer: Callable[[int], None]) -> None:
        """Compute the planes of positions `cache.length` up to `cache.length + len(token_ids)` and commit them.

        As `muser_prefill.decoder.TorchDecoder.prefill_chunk`, with the same errors.
        """
        self._run(token_ids, cache, on_layer)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Return the logits after each token, f32 `[T, vocab]`; the tokens go into `cache`. Only of a `whole` decoder.

        Raises:
            PrefillError: as `prefill_chunk`.
        """
        x = self._run(token_ids, cache, _ignore)
        if self._last_part is None:
            raise ValueError("this decoder was made without a head")
        products, (norm, head) = self._kernels.products, self._last_part
        logits = products.product(products.normed(x, norm.weight, norm.eps), head)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else softcapped(self._ar, logits, cap)

    def _run(self, token_ids: Sequence[int], cache: KVCache, on_layer: Callable[[int], None]) -> torch.Tensor:
        """Do `prefill_chunk` and return the residual stream after the last layer that is complete, `[T, hidden]`."""
        self._check_tokens(token_ids)
        start, stop = cache.length, cache.begin(len(token_ids))
        x = self._embedded(token_ids)
        for i, layer in enumerate(self._layers):
            queries, gate = self._project(i, layer, x, cache, start)
            on_layer(i)
            if layer.after is not None:
                x = self._finish(layer.after, x, self._attend(i, layer, queries, gate, cache))
        cache.commit(stop)
        return x

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < self.spec.vocab_size:
                raise TokenOutOfRange(f"token {token} is not in a vocabulary of {self.spec.vocab_size}")

    def _embedded(self, token_ids: Sequence[int]) -> torch.Tensor:
        x: torch.Tensor = self._ar.array(self._weights.rows(token_ids))
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        return rms_norm(self._ar, x, None, self.spec.norm_eps) if self.spec.embedding_norm else x

    def _project(
        self, index: int, layer: _Layer, x: torch.Tensor, cache: KVCache, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the layer's keys and values into the cache; return queries and the gate, empty where there are none."""
        spec, products, heads = self.spec, self._kernels.products, self._kernels.heads
        projected = products.product(products.normed(x, layer.norm.weight, layer.norm.eps), layer.qkv)
        queries = spec.heads if layer.after is not None else 0
        keys, values = queries + spec.kv_heads, queries + 2 * spec.kv_heads
        by_head = projected.view(len(x), -1, spec.head_dim)
        positions = None if layer.rope is None else self._positions(layer.rope, start, start + len(x))
        k = heads.plane(by_head[:, queries:keys], layer.key_norm, positions)
        v = heads.plane(by_head[:, keys:values], None, None)
        cache.write(index, start, k, v)
        if layer.after is None:
            return by_head[:, :0], by_head[:, :0]
        return heads.turned(by_head[:, :queries], layer.query_norm, positions), projected[:, values * spec.head_dim :]

    def _positions(self, rope: RopeSpec, start: int, stop: int) -> Positions:
        table = self._ropes.get(rope)
        rows = FIRST_POSITIONS if table is None else len(table.cos)
        if table is None or rows < stop:
            while rows < stop:
                rows *= 2
            made = rope_table(rope, 0, rows)
            table = self._ropes[rope] = Positions(self._ar.array(made.cos), self._ar.array(made.sin))
        return Positions(table.cos[start:stop], table.sin[start:stop])

    def _attend(self, index: int, layer: _Layer, queries: torch.Tensor, gate: torch.Tensor, cache: KVCache) -> Any:
        """Return attention over the planes that any query sees, as activations."""
        start, stop = cache.length, cache.length + len(queries)
        first = 0 if layer.window is None else max(0, start - layer.window + 1)
        keys, values = cache.planes(index, first, stop)
        sight = Sight(start, first, layer.window)
        out = self._kernels.attention.attended(queries, keys, values, sight, self._scale)
        products = self._kernels.products
        return products.gated(out, gate) if self.spec.attention_gate else products.quantised(out)

    def _finish(self, after: _AfterKV, x: torch.Tensor, attended: Any) -> torch.Tensor:
        products = self._kernels.products
        x = self._added(x, attended, after.attention_out, after.attention_norm)
        before = after.mlp_norm_before
        gate_up = products.product(products.normed(x, before.weight, before.eps), after.gate_up)
        return self._added(x, products.activated(gate_up, self.spec.activation), after.down, after.mlp_norm)

    def _added(self, residual: torch.Tensor, x: Any, matrix: Any, norm: _Norm | None) -> torch.Tensor:
        """Return `residual` plus the product, which passes `norm` first where there is one."""
        products = self._kernels.products
        if norm is None:
            return products.product(x, matrix, residual)
        return products.added(residual, products.product(x, matrix), norm.weight, norm.eps)


def _ignore(layer: int) -> None:
    """Nobody waits for a layer's planes."""
