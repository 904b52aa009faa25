"""mlx-lm in f32 over the same weights, decoding through `generate_step`, its public loop.

It multiplies with the same BLAS as the product; by itself it would take the slow one of mlx's wheel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muser_decode.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402, after the BLAS
import mlx_lm  # noqa: E402
from decode_side import OneNodeEach, count_operations, timed  # noqa: E402
from lines import serve  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402


class Contestant:
    """Holds the model between requests."""

    model: Any

    def load(self, folder: str) -> dict[str, Any]:
        """Load a folder with config.json and model.safetensors."""
        self.model, _ = load_model(Path(folder))
        return {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__, "blas": BLAS}

    def decode(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Time greedy decoding after a prompt."""
        return timed(self._stream(ids, tokens))

    def count(self, ids: list[int]) -> dict[str, Any]:
        """Count the operations of a step after a prompt."""
        cache = make_prompt_cache(self.model)
        mx.eval(self.model(mx.array([ids]), cache=cache), [layer.state for layer in cache])
        with OneNodeEach():
            return count_operations(self.model(mx.array([[1]]), cache=cache))

    def _stream(self, ids: list[int], tokens: int) -> Iterator[int]:
        for token, _ in generate_step(mx.array(ids), self.model, max_tokens=tokens):
            yield int(token)


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "decode": contestant.decode, "count": contestant.count})
