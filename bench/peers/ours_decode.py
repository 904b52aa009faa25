"""The product's contestant for decode: the decoder and the decode loop that the engine runs.

Runs in the product's environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muser_decode.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402, after the BLAS
from decode_side import OneNodeEach, count_operations, timed  # noqa: E402
from lines import serve  # noqa: E402

from muser_decode import attention, linear, pointwise  # noqa: E402
from muser_decode.decoder import MlxDecoder  # noqa: E402
from muser_decode.engine.batch import Batch  # noqa: E402
from muser_decode.engine.decoding import Decoding  # noqa: E402
from muser_decode.engine.request import SamplingParams  # noqa: E402
from muser_decode.engine.sampling import Sampler  # noqa: E402
from muser_decode.reference.compiled.choice import compiled_operations, reference_decoder  # noqa: E402
from muser_decode.reference.compiled.decoder import CompiledDecoder  # noqa: E402
from muser_decode.reference.decoder import ReferenceDecoder  # noqa: E402
from muser_wire.geometry import ElementType  # noqa: E402
from muser_wire.model.checkpoint import open_checkpoint  # noqa: E402
from muser_wire.numerics import Lane  # noqa: E402
from muser_wire.reference.canonical import CanonicalWeights  # noqa: E402


class Contestant:
    """Holds the decoder between requests."""

    decoder: MlxDecoder | ReferenceDecoder | CompiledDecoder

    def load(self, model: str, lane: str = "native") -> dict[str, Any]:
        """Load a model: in f32, or in the reference lane."""
        self._model = Path(model)
        if Lane(lane) is Lane.REFERENCE:
            weights = CanonicalWeights(open_checkpoint(self._model))
            self.decoder = reference_decoder(weights, compiled_operations(weights.spec))
        else:
            self.decoder = self._new()
        return {"mlx": mx.__version__, "blas": BLAS}

    def decode(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Time greedy decoding after a prompt."""
        return timed(self._stream(ids, tokens))

    def count(self, ids: list[int]) -> dict[str, Any]:
        """Count the operations of a step after a prompt, with the choices that the decoder makes on a GPU.

        The prompt is prefilled before, as on a CPU, which needs no compiler.
        """
        cache = self.decoder.new_cache()
        self.decoder.prefill_chunk(ids, cache)
        for module in (attention, linear, pointwise):
            module.on_gpu = lambda: True
        on_gpu = self._new()
        with OneNodeEach():
            return count_operations(on_gpu.step(mx.array(1), cache))

    def _new(self) -> MlxDecoder:
        return MlxDecoder(open_checkpoint(self._model), dtype=mx.float32, kv_element=ElementType.F16, packed=False)

    def _stream(self, ids: list[int], tokens: int) -> Iterator[int]:
        cache = self.decoder.new_cache()
        self.decoder.prefill_chunk(ids[:-1], cache)
        batch = Batch(self.decoder)
        batch.join(Decoding(cache, Sampler(SamplingParams()), ids[-1], tokens))
        for _ in range(tokens + 1):
            if batch.begins:
                yield from (outcome.token for outcome in batch.settle())
            yield from (outcome.token for outcome in batch.advance())


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "decode": contestant.decode, "count": contestant.count})
