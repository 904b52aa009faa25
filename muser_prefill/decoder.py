"""The producer's decoder: a model spec and weights in torch, computing keys and values and nothing that nobody needs.

The last layer's attention and MLP, the final norm and the head have no influence on any key or value: they are
neither loaded nor computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from muser_prefill.engine.cache import KVCache
from muser_prefill.errors import CacheFull, ModelNotSupported, TokenOutOfRange
from muser_prefill.kernels.attention import choose_attention
from muser_prefill.kernels.linear import GatedLinear, Linear, LinearKernels, choose_linear
from muser_prefill.kernels.norm import rms_norm
from muser_prefill.kernels.rotary import RotaryTable
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.spec import Activation, ModelSpec


@dataclass(frozen=True)
class _AfterKV:
    """What a layer computes once its keys and values are known."""

    attention_out: Linear
    gate_up: GatedLinear
    down: Linear


@dataclass(frozen=True)
class _Layer:
    """One layer. `qkv` gives queries, keys and values of all heads, in this order; in the last layer, where `after`
    is None, keys and values only.
    """

    window: int | None
    rope: RotaryTable | None
    qkv: Linear
    after: _AfterKV | None


def check_spec(spec: ModelSpec) -> None:
    """Check that this decoder computes everything that a model's keys and values depend on.

    Raises:
        ModelNotSupported: it does not; the message names what is beyond it.
    """
    beyond = {
        "qk_norm": spec.qk_norm is not None,
        "attention_gate": spec.attention_gate,
        "post_norm_eps": spec.post_norm_eps is not None,
        "activation": spec.activation is not Activation.SILU,
        "embedding_scale": spec.embedding_scale != 1.0,
        "embedding_norm": spec.embedding_norm,
    }
    missing = [name for name, has in beyond.items() if has]
    if missing:
        raise ModelNotSupported(f"family {spec.family} needs {', '.join(missing)}, which this decoder does not compute")


class TorchDecoder:
    """Computes the KV planes of prompts. One thread at a time.

    `admitted` names the hand-written kernels that passed their check here; `spec` is the model's.

    Raises:
        ModelNotSupported: before anything is loaded.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kv_element: ElementType, device: torch.device
    ) -> None:
        check_spec(checkpoint.spec)
        self.spec = checkpoint.spec
        self._kv_element = kv_element
        self._dtype = dtype
        self._device = device
        self._attention, attention_kernels = choose_attention(self.spec.head_dim, dtype, device)
        linear_kernels, linear_names = choose_linear(dtype, device)
        self.admitted: tuple[str, ...] = attention_kernels + linear_names
        loader = _Loader(checkpoint, dtype, device, linear_kernels)
        self._embedding = loader.embedding()
        self._layers = loader.layers()

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
        self._check_tokens(token_ids)
        start, stop = cache.length, cache.begin(len(token_ids))
        x = self._embedding[torch.tensor(token_ids, dtype=torch.int64, device=self._device)]
        for i, layer in enumerate(self._layers):
            q = self._project(i, layer, x, cache, start)
            on_layer(i)
            if layer.after is not None:
                x = self._finish(layer.after, x, self._attend(i, layer, q, cache, start))
        cache.commit(stop)

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < self.spec.vocab_size:
                raise TokenOutOfRange(f"token {token} is not in a vocabulary of {self.spec.vocab_size}")

    def _project(self, index: int, layer: _Layer, x: torch.Tensor, cache: KVCache, start: int) -> torch.Tensor:
        """Write the layer's keys and values into the cache and return the queries, `[T, heads, head_dim]`.

        In the last layer nobody reads queries: there are none, `[T, 0, head_dim]`.
        """
        projected = layer.qkv(rms_norm(x, self.spec.norm_eps)).view(len(x), -1, self.spec.head_dim)
        values_at = projected.shape[1] - self.spec.kv_heads
        keys_at = values_at - self.spec.kv_heads
        queries_keys = projected[:, :values_at]
        if layer.rope is not None:
            queries_keys = layer.rope.rotate(queries_keys, start)
        cache.write(index, start, queries_keys[:, keys_at:], projected[:, values_at:])
        return queries_keys[:, :keys_at].to(self._dtype)

    def _attend(self, index: int, layer: _Layer, q: torch.Tensor, cache: KVCache, start: int) -> torch.Tensor:
        """Return attention over the rounded keys and values, `[T, heads * head_dim]`."""
        # Exact where the compute type holds the element type. bf16 compute over f16 planes rounds once more.
        k, v = (plane.to(self._dtype) for plane in cache.planes(index, 0, start + len(q)))
        return self._attention(q, k, v, start, layer.window).reshape(len(q), -1)

    def _finish(self, after: _AfterKV, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = after.attention_out.add(attended, x)
        return after.down.add(after.gate_up(rms_norm(x, self.spec.norm_eps)), x)


class _Loader:
    """Turns a checkpoint into layers, one tensor at a time, so that the peak stays near what remains.

    Norm weights are folded into the columns of the product that follows and the softmax scale into the rows of the
    queries, in f32, before the one rounding to the compute type.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: LinearKernels
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._kernels = kernels

    def embedding(self) -> torch.Tensor:
        """Return the embedding, `[vocab, hidden]`."""
        return self._f32("embed.weight").to(dtype=self._dtype, device=self._device)

    def layers(self) -> list[_Layer]:
        """Return every layer in order."""
        spec = self._checkpoint.spec
        ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
        tables = {rope: RotaryTable(rope, spec.head_dim, spec.max_positions, self._device) for rope in ropes}
        last = len(spec.layers) - 1
        return [
            _Layer(
                window=layer.window,
                rope=tables[layer.rope] if layer.rope is not None else None,
                qkv=self._qkv(i, with_queries=i < last),
                after=self._after(i) if i < last else None,
            )
            for i, layer in enumerate(spec.layers)
        ]

    def _qkv(self, layer: int, *, with_queries: bool) -> Linear:
        norm = self._f32(f"layers.{layer}.attn_norm.weight")
        parts = [("q", norm * self._checkpoint.spec.attention_scale)] if with_queries else []
        parts += [("k", norm), ("v", norm)]
        return self._kernels.linear(self._stacked([(f"layers.{layer}.attn.{name}.weight", f) for name, f in parts]))

    def _after(self, layer: int) -> _AfterKV:
        norm = self._f32(f"layers.{layer}.mlp_norm.weight")
        gate_up = [(f"layers.{layer}.mlp.{name}.weight", norm) for name in ("gate", "up")]
        return _AfterKV(
            attention_out=self._kernels.linear(self._stacked([(f"layers.{layer}.attn.o.weight", None)])),
            gate_up=self._kernels.gated(self._stacked(gate_up)),
            down=self._kernels.linear(self._stacked([(f"layers.{layer}.mlp.down.weight", None)])),
        )

    def _stacked(self, parts: Sequence[tuple[str, torch.Tensor | None]]) -> torch.Tensor:
        """Return matrices as one, row after row in the compute type, each with its columns scaled."""
        shapes = [self._checkpoint.weight(name).shape for name, _ in parts]
        stacked = torch.empty(sum(rows for rows, _ in shapes), shapes[0][1], dtype=self._dtype, device=self._device)
        row = 0
        for name, column_scale in parts:
            values = self._f32(name)
            if column_scale is not None:
                values.mul_(column_scale)
            stacked[row : row + len(values)] = values
            row += len(values)
        return stacked

    def _f32(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._checkpoint.weight(name).f32())
