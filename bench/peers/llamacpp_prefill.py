"""llama.cpp over a GGUF file: one evaluation of the prompt from an empty cache."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np
from lines import serve
from llamacpp_model import opened_fast


class Contestant:
    """Holds the model between requests."""

    llama: llama_cpp.Llama

    def load(self, model: str, context: int, threads: int) -> dict[str, Any]:
        """Load a GGUF file for prompts of up to `context` tokens, with flash attention."""
        self.llama = opened_fast(model, context, threads)
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Time one evaluation."""
        self._clear()
        started = time.perf_counter()
        self.llama.eval(ids)
        llama_cpp.llama_synchronize(self.llama.ctx)
        return {"seconds": time.perf_counter() - started}

    def logits(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write the last position's logits as f32, `[vocab]`."""
        self.prefill(ids)
        values = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
        np.save(out, np.ctypeslib.as_array(values, shape=(self.llama.n_vocab(),)))
        return {}

    def _clear(self) -> None:
        """Forget every position, so that nothing of the last prompt is reused."""
        self.llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.llama.ctx), True)


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "prefill": contestant.prefill, "logits": contestant.logits})
