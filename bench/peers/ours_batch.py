"""The product's contestant for batches: the decoder and the batch that the engine runs, so many answers at once.

Runs in the product's environment.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from muser_decode.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402, after the BLAS
from lines import serve  # noqa: E402

from muser_decode.decoder import MlxDecoder  # noqa: E402
from muser_decode.engine.batch import Batch  # noqa: E402
from muser_decode.engine.decoding import Decoding  # noqa: E402
from muser_decode.engine.request import SamplingParams  # noqa: E402
from muser_decode.engine.sampling import Sampler  # noqa: E402
from muser_wire.geometry import ElementType  # noqa: E402
from muser_wire.model.checkpoint import open_checkpoint  # noqa: E402


class Contestant:
    """Holds the decoder between requests."""

    decoder: MlxDecoder

    def load(self, model: str) -> dict[str, Any]:
        """Load a model in f32."""
        checkpoint = open_checkpoint(Path(model))
        self.decoder = MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False)
        return {"mlx": mx.__version__, "blas": BLAS}

    def decode(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Time greedy answers to all prompts at once, from their first tokens to their last."""
        batch, answers = Batch(self.decoder), dict[Decoding, list[int]]()
        for ids in prompts:
            cache = self.decoder.new_cache()
            self.decoder.prefill_chunk(ids[:-1], cache)
            row = Decoding(cache, Sampler(SamplingParams()), ids[-1], tokens)
            answers[row] = []
            batch.join(row)
        began = used = 0.0
        while any(len(answer) < tokens for answer in answers.values()):
            for outcome in batch.advance():
                answers[outcome.decoding].append(outcome.token)
            if not began and all(answers.values()):
                began, used = time.perf_counter(), time.process_time()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - used
        return {"tokens": list(answers.values()), "seconds": wall_s, "cpu_seconds": cpu_s}


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "decode": contestant.decode})
