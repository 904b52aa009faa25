"""The producer's decoder: a model spec and weights in torch, computing keys and values and nothing that nobody needs.

The last layer's attention and MLP, the final norm and the head have no influence on any key or value: they are
neither loaded nor computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from muser_prefill.engine.cache import KVCache
from muser_prefill.errors import CacheFull, TokenOutOfRange
from muser_prefill.kernels.attention import choose_attention
from muser_prefill.kernels.linear import GatedLinear, Linear, choose_linear
from muser_prefill.kernels.norm import HeadNorm, PostNorm, rms_norm
from muser_prefill.kernels.rotary import RotaryTable
from muser_prefill.loading import Loader
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class _AfterKV:
    """What a layer computes once its keys and values are known."""

    attention_out: Linear
    attention_norm: PostNorm | None
    gate_up: GatedLinear
    down: Linear
    mlp_norm: PostNorm | None


@dataclass(frozen=True)
class _Layer:
    """One layer. `qkv` gives queries, keys, values and attention gate of all heads, in this order; where `after` is
    None, keys and values only. `head_norm` is that of queries and keys.
    """

    window: int | None
    rope: RotaryTable | None
    head_norm: HeadNorm | None
    qkv: Linear
    after: _AfterKV | None


@dataclass(frozen=True)
class _Queries:
    """What attention needs beside the cache: scaled queries and the gate of its result, `[T, heads, head_dim]` each."""

    q: torch.Tensor
    gate: torch.Tensor | None


class TorchDecoder:
    """Computes the KV planes of prompts. One thread at a time.

    `admitted` names the hand-written kernels that passed their check here; `spec` is the model's. `kv_element` None
    leaves keys and values unrounded in f32, for verification. `whole` keeps what follows the last layer's keys and
    values, which only the logits need: see `muser_prefill.head`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        kv_element: ElementType | None,
        device: torch.device,
        whole: bool = False,
    ) -> None:
        self.spec = checkpoint.spec
        self._kv_element = kv_element
        self._dtype = dtype
        self._device = device
        self._attention, attention_kernels = choose_attention(self.spec.head_dim, dtype, device)
        self._kernels, linear_kernels = choose_linear(self.spec.activation, dtype, device)
        self.admitted: tuple[str, ...] = attention_kernels + linear_kernels
        loader = Loader(checkpoint, dtype, device)
        self._embedding = loader.embedding()
        ropes = {layer.rope for layer in self.spec.layers if layer.rope is not None}
        self._ropes = {rope: RotaryTable(rope, self.spec.head_dim, device) for rope in ropes}
        last = len(self.spec.layers) - 1
        self._layers = [self._layer(i, loader, complete=whole or i < last) for i in range(last + 1)]

    def _layer(self, index: int, loader: Loader, *, complete: bool) -> _Layer:
        layer = self.spec.layers[index]
        return _Layer(
            window=layer.window,
            rope=self._ropes[layer.rope] if layer.rope is not None else None,
            head_norm=loader.head_norm(index, queries=complete),
            qkv=self._kernels.linear(loader.qkv(index, queries=complete)),
            after=self._after(index, loader) if complete else None,
        )

    def _after(self, index: int, loader: Loader) -> _AfterKV:
        return _AfterKV(
            attention_out=self._kernels.linear(loader.attention_out(index)),
            attention_norm=loader.post_norm(index, "attn"),
            gate_up=self._kernels.gated(loader.gate_up(index), self.spec.activation),
            down=self._kernels.linear(loader.down(index)),
            mlp_norm=loader.post_norm(index, "mlp"),
        )

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for up to `capacity` positions.

        Raises:
            CacheFull: the model has fewer positions.
        """
        if capacity > self.spec.max_positions:
            raise CacheFull(f"{capacity} positions asked for, the model has {self.spec.max_positions}")
        return KVCache(self.spec, capacity, self._kv_element, self._device)

    @torch.inference_mode()
    def prefill_chunk(self, token_ids: Sequence[int], cache: KVCache, on_layer: Callable[[int], None]) -> None:
        """Compute the planes of positions `cache.length` up to `cache.length + len(token_ids)` and commit them.

        `on_layer(i)` is called as soon as layer i's planes of this chunk are final in the cache, before that layer's
        attention runs. It may block. What it raises abandons the chunk: `cache.length` stays.

        Raises:
            TokenOutOfRange: a token is not in the vocabulary; nothing was computed.
            CacheFull: the cache is too small; nothing was computed.
        """
        self._run(token_ids, cache, on_layer)

    def _run(self, token_ids: Sequence[int], cache: KVCache, on_layer: Callable[[int], None]) -> torch.Tensor:
        """Do `prefill_chunk` and return the residual stream after the last layer that is complete, `[T, hidden]`."""
        self._check_tokens(token_ids)
        start, stop = cache.length, cache.begin(len(token_ids))
        x = self._embedding[torch.tensor(token_ids, dtype=torch.int64, device=self._device)]
        for i, layer in enumerate(self._layers):
            queries = self._project(i, layer, x, cache, start)
            on_layer(i)
            if layer.after is not None:
                x = self._finish(layer.after, x, self._attend(i, layer, queries, cache, start))
        cache.commit(stop)
        return x

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < self.spec.vocab_size:
                raise TokenOutOfRange(f"token {token} is not in a vocabulary of {self.spec.vocab_size}")

    def _project(self, index: int, layer: _Layer, x: torch.Tensor, cache: KVCache, start: int) -> _Queries:
        """Write the layer's keys and values into the cache and return the rest.

        A layer that ends there has no queries: they are `[T, 0, head_dim]`.
        """
        projected = layer.qkv(rms_norm(x, self.spec.norm_eps)).view(len(x), -1, self.spec.head_dim)
        kv_heads = self.spec.kv_heads
        keys_at = self.spec.heads if layer.after is not None else 0
        values_at, gate_at = keys_at + kv_heads, keys_at + 2 * kv_heads
        queries_keys = projected[:, :values_at]
        if layer.head_norm is not None:
            queries_keys = layer.head_norm(queries_keys)
        if layer.rope is not None:
            queries_keys = layer.rope.rotate(queries_keys, start)
        cache.write(index, start, queries_keys[:, keys_at:], projected[:, values_at:gate_at])
        gate = projected[:, gate_at:] if self.spec.attention_gate else None
        return _Queries(queries_keys[:, :keys_at].to(self._dtype), gate)

    def _attend(self, index: int, layer: _Layer, queries: _Queries, cache: KVCache, start: int) -> torch.Tensor:
        """Return attention over the rounded keys and values that any query sees, `[T, heads * head_dim]`."""
        stop = start + len(queries.q)
        window = None if layer.window is None or layer.window >= stop else layer.window
        first = 0 if window is None else max(0, start - window + 1)
        # Exact where the compute type holds the element type. bf16 compute over f16 planes rounds once more.
        k, v = (plane.to(self._dtype) for plane in cache.planes(index, first, stop))
        out = self._attention(queries.q, k, v, start - first, window)
        if queries.gate is not None:
            out = out.mul_(queries.gate.sigmoid())
        return out.reshape(len(out), -1)

    def _finish(self, after: _AfterKV, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = _added(after.attention_out, attended, x, after.attention_norm)
        gated = after.gate_up(rms_norm(x, self.spec.norm_eps))
        return _added(after.down, gated, x, after.mlp_norm)


def _added(product: Linear, x: torch.Tensor, residual: torch.Tensor, norm: PostNorm | None) -> torch.Tensor:
    """Return `residual` plus a product of `x`, which passes `norm` first where there is one."""
    return product.add(x, residual) if norm is None else norm.add(residual, product(x))
