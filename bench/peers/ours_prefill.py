"""The product's contestant for prefill: what the producer does for a handoff, without the wire.

Runs in the product's environment.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lines import serve

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.cache import KVCache
from muser_prefill.engine.runner import Decoder, prefill
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.numerics import Lane
from muser_wire.reference.canonical import CanonicalWeights
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS


class Contestant:
    """Holds the decoder between requests."""

    decoder: Decoder

    def load(self, model: str, threads: int, lane: str = "native") -> dict[str, Any]:
        """Load a checkpoint: in bf16, or in the reference lane."""
        torch.set_num_threads(threads)
        started = time.perf_counter()
        checkpoint, cpu = open_checkpoint(Path(model)), torch.device("cpu")
        if Lane(lane) is Lane.REFERENCE:
            self.decoder = TorchReferenceDecoder(CanonicalWeights(checkpoint), device=cpu)
        else:
            self.decoder = TorchDecoder(checkpoint, dtype=torch.bfloat16, kv_element=ElementType.BF16, device=cpu)
        return {"load_s": time.perf_counter() - started, "kernels": self.decoder.admitted, "torch": torch.__version__}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Compute every plane of a prompt; the time includes making the cache."""
        return {"seconds": self._timed(ids)[0]}

    def planes(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write the last layer's planes as f32, `[2, T, kv_heads, head_dim]`."""
        _, cache = self._timed(ids)
        last = len(self.decoder.spec.layers) - 1
        np.save(out, torch.stack(cache.planes(last, 0, len(ids))).float().numpy())
        return {}

    def _timed(self, ids: list[int]) -> tuple[float, KVCache]:
        started = time.perf_counter()
        cache = self.decoder.new_cache(len(ids))
        prefill(self.decoder, ids, cache, DEFAULT_CHUNK_TOKENS, _ignore)
        return time.perf_counter() - started, cache


def _ignore(chunk: int, layer: int) -> None:
    """Stand in for the export of a finished layer."""


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "prefill": contestant.prefill, "planes": contestant.planes})
