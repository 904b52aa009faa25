from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle_decoder

from muser_decode.verify import compute
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny
from muser_wire.numerics import budget
from muser_wire.verification import VerifyJob

WINDOW = 16


def test_the_evidence_is_the_oracle_s(tmp_path: Path) -> None:
    """Keys and values are not rounded: f16 would be seen in the planes."""
    write_tiny("gemma3", tmp_path, window=WINDOW)
    checkpoint, ids = open_checkpoint(tmp_path), tuple(range(10, 60))
    evidence = compute(VerifyJob(tmp_path, ids, logits_from=41, chunk_tokens=17, greedy_tokens=2))
    weights = lambda name: checkpoint.weight(name).f32()  # noqa: E731
    planes, logits = oracle_decoder.forward(weights, checkpoint.spec, ids)
    assert np.abs(evidence.logits - logits[41:]).max() <= budget("logits_f32")
    assert len(evidence.planes[0][0]) == WINDOW - 1
    for got, expected in zip(evidence.planes, planes, strict=True):
        for ours, theirs in zip(got, expected, strict=True):
            assert np.abs(ours - theirs[-len(ours) :]).max() <= budget("planes_f32")
    first = int(logits[-1].argmax())
    second = int(oracle_decoder.forward(weights, checkpoint.spec, [*ids, first])[1][-1].argmax())
    assert evidence.greedy.tokens == (first, second)
