"""mlx-lm in f32 with the prompt cache of its server, used as the server does for one request at a time.

It multiplies with the same BLAS as the product; by itself it would take the slow one of mlx's wheel.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from muser_decode.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402, after the BLAS
import mlx_lm  # noqa: E402
from lines import serve  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

KEY = "model"


class Contestant:
    """Holds model and prompt cache between requests."""

    def load(self, folder: str) -> dict[str, Any]:
        """Load a folder with config.json and model.safetensors."""
        self._model, _ = load_model(Path(folder))
        self._kept = LRUPromptCache()
        return {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__, "blas": BLAS}

    def ask(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Time the first token of a greedy answer; say how many tokens of the prompt were cached."""
        started = time.perf_counter()
        cache, rest = self._kept.fetch_nearest_cache(KEY, ids)
        cache = make_prompt_cache(self._model) if cache is None else cache
        answer, times = [], []
        for token, _ in generate_step(mx.array(rest), self._model, max_tokens=tokens, prompt_cache=cache):
            answer.append(int(token))
            times.append(time.perf_counter() - started)
        self._kept.insert_cache(KEY, [*ids, *answer], cache)
        return {"first_s": times[0], "tokens": answer, "cached": len(ids) - len(rest)}


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "ask": contestant.ask})
