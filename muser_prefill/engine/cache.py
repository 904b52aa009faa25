"""The keys and values of one prompt on the producer: filled chunk by chunk, read by the sender while it grows."""

from __future__ import annotations

import torch

from muser_prefill.errors import CacheFull, CacheRangeError
from muser_prefill.numerics import TORCH_ELEMENTS, round_into
from muser_wire.geometry import ElementType
from muser_wire.model.spec import ModelSpec


class KVCache:
    """Planes `[layers, capacity, kv_heads, head_dim]` in the KV element type, or with `element` None unrounded, in f32:
    then verification sees the arithmetic alone.

    Sliding layers keep every position too: whichever of them a schedule sends, from whatever chunk, are there.
    Positions below `length` are complete in every layer. A chunk's positions above it become final layer by layer;
    they count only once the chunk is committed. Rows are never written again after that, so another thread may read
    the planes of a finished layer while later layers and chunks are computed.
    """

    def __init__(self, spec: ModelSpec, capacity: int, element: ElementType | None, device: torch.device) -> None:
        shape = (len(spec.layers), capacity, spec.kv_heads, spec.head_dim)
        dtype = torch.float32 if element is None else TORCH_ELEMENTS[element]
        self.capacity = capacity
        self.length = 0
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self._final = [0] * shape[0]

    def begin(self, tokens: int) -> int:
        """Make room for a chunk of `tokens` positions after `length` and return where it ends.

        What an abandoned chunk left there is no longer readable.

        Raises:
            CacheFull: the cache is too small.
        """
        stop = self.length + tokens
        if stop > self.capacity:
            raise CacheFull(f"{stop} positions do not fit a cache of {self.capacity}")
        self._final = [self.length] * len(self._final)
        return stop

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Round `[tokens, kv_heads, head_dim]` of one layer to the element type; they are final from here on."""
        stop = start + len(keys)
        round_into(self._keys[layer, start:stop], keys)
        round_into(self._values[layer, start:stop], values)
        self._final[layer] = stop

    def commit(self, length: int) -> None:
        """Count the positions below `length` as complete.

        Raises:
            CacheRangeError: a layer has not got that far.
        """
        if min(self._final) < length:
            raise CacheRangeError(f"{length} positions are not complete in layer {self._final.index(min(self._final))}")
        self.length = length

    def planes(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a layer's keys and values, `[stop - start, kv_heads, head_dim]` each, contiguous.

        On CUDA they are final in the order of the stream that computes, not yet for the host.

        Raises:
            CacheRangeError: the range is empty or not final in this layer.
        """
        if not 0 <= start < stop <= self._final[layer]:
            raise CacheRangeError(f"layer {layer} holds {self._final[layer]} positions, asked for {start} to {stop}")
        return self._keys[layer, start:stop], self._values[layer, start:stop]
