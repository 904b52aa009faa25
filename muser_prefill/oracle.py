"""transformers' part of `muser model verify`: `python -m muser_prefill.oracle JOB OUT`.

The one module of the producer that knows transformers, which the product never needs. It reads a folder in the Hugging
Face format.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers

from muser_wire.verification import Array, Evidence, Greedy, VerifyJob, contestant


@torch.inference_mode()
def compute(job: VerifyJob) -> Evidence:
    """Run the prompt in one piece with a cache, then token by token."""
    model = _load(job)
    answer = model(torch.tensor([job.token_ids]), use_cache=True)
    cache, logits = answer.past_key_values, answer.logits[0, job.logits_from :].numpy()
    # The cache's arrays are replaced when it grows, but only their last tokens are kept in sliding layers.
    planes = tuple((_plane(layer.keys), _plane(layer.values)) for layer in cache.layers)

    def step(token: int) -> Array:
        row: Array = model(torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1].numpy()
        return row

    return Evidence(planes, logits, Greedy.choose(logits[-1], step, job.greedy_tokens))


def _load(job: VerifyJob) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = json.loads((job.model / "config.json").read_text(encoding="utf-8"))
    # A multimodal checkpoint's class is not the one that the automatic choice for text models gives.
    name = (config.get("architectures") or ["AutoModelForCausalLM"])[0]
    return (
        getattr(transformers, name).from_pretrained(job.model, dtype=torch.float32, attn_implementation="eager").eval()
    )


def _plane(states: torch.Tensor) -> Array:
    """Return `[1, kv_heads, tokens, head_dim]` as a plane."""
    plane: Array = states[0].transpose(0, 1).contiguous().numpy()
    return plane


if __name__ == "__main__":
    sys.exit(contestant(None, compute))
