"""transformers in bf16 over the same weights: a forward that keeps its cache and the last position's logits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transformers
from lines import serve


class Contestant:
    """Holds the model between requests."""

    model: transformers.PreTrainedModel

    def load(self, folder: str, threads: int) -> dict[str, Any]:
        """Load a folder in the Hugging Face format in bf16."""
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Time one forward."""
        return {"seconds": self._timed(ids)[0]}

    def planes(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write the last layer's planes as f32, `[2, T, kv_heads, head_dim]`."""
        layer = self._timed(ids)[1].past_key_values.layers[-1]
        np.save(out, torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2).float().numpy())
        return {}

    def logits(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write the last position's logits as f32, `[vocab]`."""
        np.save(out, self._timed(ids)[1].logits[0, -1].float().numpy())
        return {}

    @torch.inference_mode()
    def _timed(self, ids: list[int]) -> tuple[float, Any]:
        started = time.perf_counter()
        out = self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started, out


if __name__ == "__main__":
    contestant = Contestant()
    serve({name: getattr(contestant, name) for name in ("load", "prefill", "planes", "logits")})
