"""A prompt, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from muser_prefill.engine.cache import KVCache
from muser_wire.model.spec import ModelSpec


class Decoder(Protocol):
    """What computes planes, in either lane: `muser_prefill.decoder.TorchDecoder` says what each method does."""

    spec: ModelSpec
    admitted: tuple[str, ...]

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache."""

    def prefill_chunk(self, token_ids: Sequence[int], cache: KVCache, on_layer: Callable[[int], None]) -> None:
        """Compute and commit the planes of the next positions."""


def prefill(
    decoder: Decoder,
    token_ids: Sequence[int],
    cache: KVCache,
    chunk_tokens: int,
    on_layer: Callable[[int, int], None],
) -> None:
    """Fill `cache` with the positions of `token_ids` that it does not hold yet.

    Chunk c covers positions c * chunk_tokens up to the next multiple, whatever the cache held at first, so the first
    one computed may start in the middle of its chunk. `on_layer(chunk, layer)` is called as soon as that layer's
    planes of the chunk are final; if it raises, whole chunks before this one stay in the cache.
    """
    while cache.length < len(token_ids):
        chunk = cache.length // chunk_tokens
        stop = min((chunk + 1) * chunk_tokens, len(token_ids))
        decoder.prefill_chunk(token_ids[cache.length : stop], cache, partial(on_layer, chunk))
