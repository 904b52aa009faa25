"""The decoder with its head: what `muser model verify` compares. Producing planes needs none of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.cache import KVCache
from muser_prefill.kernels.norm import rms_norm
from muser_prefill.loading import Loader
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import Checkpoint


class DecoderWithHead(TorchDecoder):
    """A `TorchDecoder` that also computes the last layer's rest, the final norm and the head."""

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kv_element: ElementType | None, device: torch.device
    ) -> None:
        super().__init__(checkpoint, dtype=dtype, kv_element=kv_element, device=device, whole=True)
        self._head = self._kernels.linear(Loader(checkpoint, dtype, device).head())

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], cache: KVCache | None = None) -> torch.Tensor:
        """Return the logits after each token, f32 `[T, vocab]`; the tokens go into `cache` after what it holds.

        Raises:
            PrefillError: as `prefill_chunk`.
        """
        cache = self.new_cache(len(token_ids)) if cache is None else cache
        x = self._run(token_ids, cache, _ignore)
        logits = self._head(rms_norm(x, self.spec.norm_eps)).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _ignore(layer: int) -> None:
    """Nobody waits for a layer's planes."""
