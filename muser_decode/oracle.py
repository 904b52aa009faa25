"""mlx-lm's part of `muser model verify`: `python -m muser_decode.oracle JOB OUT`.

The one module of the decode node that knows mlx-lm, which the product never needs. It reads a folder in the Hugging
Face format.
"""

from __future__ import annotations

import sys
from typing import Any

from muser_decode.blas import load_blas

# Before anything that imports mlx.
load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from muser_wire.model.checkpoint import open_checkpoint  # noqa: E402
from muser_wire.verification import Array, Evidence, Greedy, VerifyJob, contestant  # noqa: E402


def compute(job: VerifyJob) -> Evidence:
    """Run the prompt in one piece with a cache, then token by token."""
    # A multimodal checkpoint has tensors that its text-only port does not read.
    model, _ = load_model(job.model, strict=False)
    model.set_dtype(mx.float32)
    cache = _cache(model, job)
    logits = np.array(model(mx.array([job.token_ids]), cache=cache)[0, job.logits_from :])
    tokens = len(job.token_ids)
    # An array that grows in steps has rows to spare.
    planes = tuple((_plane(layer.keys[:, :, :tokens]), _plane(layer.values[:, :, :tokens])) for layer in cache)

    def step(token: int) -> Array:
        return np.array(model(mx.array([[token]]), cache=cache)[0, -1])

    return Evidence(planes, logits, Greedy.choose(logits[-1], step, job.greedy_tokens))


def _cache(model: Any, job: VerifyJob) -> list[Any]:
    """Return mlx-lm's choice of caches, but for Mistral, whose windows it does not read: there, rotating ones."""
    spec = open_checkpoint(job.model).spec
    windows = {layer.window for layer in spec.layers}
    if spec.family == "llama" and None not in windows:
        return [RotatingKVCache(max_size=layer.window) for layer in spec.layers]
    return list(make_prompt_cache(model))


def _plane(states: Any) -> Array:
    """Return `[1, kv_heads, tokens, head_dim]` as a plane."""
    return np.array(states[0].transpose(1, 0, 2))


if __name__ == "__main__":
    sys.exit(contestant(None, compute))
