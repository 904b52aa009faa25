"""From a checkpoint's tensors to the decoder's matrices, a few MiB at a time: the peak stays near what remains.

Norm weights are folded into the columns of the product that follows, the softmax scale into the rows of the queries or
the weights of their norm, scale and norm of the embedding into its rows, the scale of the logits into the head: in f32,
before the one rounding to the compute type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from muser_prefill.kernels.norm import HeadNorm, PostNorm, rms_norm
from muser_wire.model.checkpoint import Checkpoint

BLOCK_NBYTES = 8 << 20
"""How much of a matrix is in f32 at a time."""

Part = tuple[str, torch.Tensor | None]
"""A matrix by name, and the factor of each of its columns."""


class Loader:
    """Reads one checkpoint for one device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._spec = checkpoint.spec
        self._dtype = dtype
        self._device = device
        # Copies to a GPU from memory that is not pinned are several times slower, and from mapped pages that nothing
        # has touched yet tens of times; decoding to f32 touches them here.
        self._pinned = torch.empty(BLOCK_NBYTES, dtype=torch.uint8, pin_memory=True) if device.type == "cuda" else None

    def embedding(self) -> torch.Tensor:
        """Return what each token enters the first layer as, `[vocab, hidden]`."""
        spec = self._spec
        rows = self._empty(spec.vocab_size)
        for start, block in self._blocks("embed.weight"):
            block.mul_(spec.embedding_scale)
            self._put(rows, start, rms_norm(block, spec.norm_eps) if spec.embedding_norm else block)
        return rows

    def head(self) -> torch.Tensor:
        """Return the head with the final norm and the scale of the logits in it, `[vocab, hidden]`."""
        name = "embed.weight" if self._spec.tied_embeddings else "head.weight"
        return self.stacked([(name, self.vector("final_norm.weight") * self._spec.logit_scale)])

    def qkv(self, layer: int, *, queries: bool) -> torch.Tensor:
        """Return the rows of queries, keys, values and attention gate, in this order; without `queries` those of keys
        and values, which are all that the last layer needs.
        """
        norm = self.vector(f"layers.{layer}.attn_norm.weight")
        parts: list[Part] = [("k", norm), ("v", norm)]
        if queries:
            # A norm of the queries would take the scale out again.
            scale = self._spec.attention_scale if self._spec.qk_norm is None else 1.0
            parts = [("q", norm * scale), *parts, *([("gate", norm)] if self._spec.attention_gate else [])]
        return self.stacked([(f"layers.{layer}.attn.{name}.weight", factor) for name, factor in parts])

    def head_norm(self, layer: int, *, queries: bool) -> HeadNorm | None:
        """Return the norm of queries, unless `queries` is false, and keys before positions, where the model has one."""
        spec, norm = self._spec, self._spec.qk_norm
        if norm is None:
            return None
        factors = [("q", spec.heads, spec.attention_scale)] if queries else []
        parts = [
            (self._head_weight(layer, part) * factor).expand(heads, -1)
            for part, heads, factor in (*factors, ("k", spec.kv_heads, 1.0))
        ]
        weight = torch.cat(parts)
        return HeadNorm(weight.to(self._device), norm.eps)

    def _head_weight(self, layer: int, part: str) -> torch.Tensor:
        """Return the weight of the norm of "q" or "k", `[head_dim]`: ones where it has none."""
        weighted = self._spec.qk_norm is not None and self._spec.qk_norm.weighted
        name = f"layers.{layer}.attn.{part}_norm.weight"
        return self.vector(name) if weighted else torch.ones(self._spec.head_dim)

    def post_norm(self, layer: int, half: str) -> PostNorm | None:
        """Return the norm on the output of "attn" or "mlp", where the model has one."""
        eps = self._spec.post_norm_eps
        if eps is None:
            return None
        return PostNorm(self.vector(f"layers.{layer}.{half}_post_norm.weight").to(self._device), eps)

    def attention_out(self, layer: int) -> torch.Tensor:
        """Return the matrix from attention's result to the residual stream."""
        return self.stacked([(f"layers.{layer}.attn.o.weight", None)])

    def gate_up(self, layer: int) -> torch.Tensor:
        """Return the rows of the MLP's gate, then those of up."""
        norm = self.vector(f"layers.{layer}.mlp_norm.weight")
        return self.stacked([(f"layers.{layer}.mlp.{name}.weight", norm) for name in ("gate", "up")])

    def down(self, layer: int) -> torch.Tensor:
        """Return the matrix from the MLP's middle to the residual stream."""
        return self.stacked([(f"layers.{layer}.mlp.down.weight", None)])

    def vector(self, name: str) -> torch.Tensor:
        """Return a vector in f32, on the host."""
        return torch.from_numpy(self._checkpoint.weight(name).f32())

    def stacked(self, parts: Sequence[Part]) -> torch.Tensor:
        """Return matrices as one, row after row in the compute type."""
        shapes = [self._checkpoint.weight(name).shape for name, _ in parts]
        stacked = self._empty(sum(rows for rows, _ in shapes), shapes[0][1])
        first = 0
        for (name, factor), (rows, _) in zip(parts, shapes, strict=True):
            for start, block in self._blocks(name):
                self._put(stacked, first + start, block if factor is None else block.mul_(factor))
            first += rows
        return stacked

    def _empty(self, rows: int, columns: int | None = None) -> torch.Tensor:
        return torch.empty(rows, columns or self._spec.hidden_size, dtype=self._dtype, device=self._device)

    def _blocks(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a matrix in f32, some rows at a time, each block with the index of its first row."""
        weight = self._checkpoint.weight(name)
        rows, columns = weight.shape
        step = max(1, BLOCK_NBYTES // (4 * columns))
        for start in range(0, rows, step):
            yield start, torch.from_numpy(weight.f32(start, min(start + step, rows)))

    def _put(self, target: torch.Tensor, start: int, block: torch.Tensor) -> None:
        """Round a block into the rows of `target` from `start`, through pinned memory where the device needs it."""
        rows = target[start : start + len(block)]
        if self._pinned is None:
            rows.copy_(block)
            return
        nbytes = math.prod(block.shape) * target.itemsize
        if nbytes > len(self._pinned):
            rows.copy_(block.to(self._dtype))
            return
        staged = self._pinned[:nbytes].view(self._dtype).view(block.shape)
        rows.copy_(staged.copy_(block))
