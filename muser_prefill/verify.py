"""The torch decoder's part of `muser model verify`: `python -m muser_prefill.verify JOB OUT`."""

from __future__ import annotations

import sys

import torch

from muser_prefill.engine.runner import prefill
from muser_prefill.head import DecoderWithHead
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.verification import Evidence, Greedy, VerifyJob, contestant


def compute(job: VerifyJob) -> Evidence:
    """Prefill as the producer does; the tokens from `logits_from` on are one chunk with logits."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = DecoderWithHead(open_checkpoint(job.model), dtype=torch.float32, kv_element=None, device=device)
    tokens = len(job.token_ids)
    cache = decoder.new_cache(tokens + job.greedy_tokens)
    prefill(decoder, job.token_ids[: job.logits_from], cache, job.chunk_tokens, _ignore)
    logits = decoder.logits(job.token_ids[job.logits_from :], cache).cpu().numpy()
    planes = tuple(
        tuple(plane.float().cpu().numpy() for plane in cache.planes(layer, 0, tokens))
        for layer in range(len(decoder.spec.layers))
    )
    greedy = Greedy.choose(logits[-1], lambda token: decoder.logits([token], cache)[0].cpu().numpy(), job.greedy_tokens)
    return Evidence(tuple((k, v) for k, v in planes), logits, greedy)


def _ignore(chunk: int, layer: int) -> None:
    """Nobody waits for a layer's planes."""


if __name__ == "__main__":
    sys.exit(contestant(None, compute))
