"""llama.cpp over a GGUF file: the logits after every token of a prompt."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
from lines import serve
from llamacpp_model import opened


class Contestant:
    """Holds the model between requests."""

    llama: llama_cpp.Llama

    def load(self, model: str, context: int, threads: int) -> dict[str, Any]:
        """Load a GGUF file for prompts of up to `context` tokens."""
        self.llama = opened(model, context, threads, logits_all=True)
        return {"llama_cpp_python": llama_cpp.__version__}

    def logits(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write the logits after each token as f32, `[T, vocab]`."""
        self.llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.llama.ctx), True)
        self.llama.eval(ids)
        np.save(out, np.array(self.llama.scores[: len(ids)], np.float32))
        return {}


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "logits": contestant.logits})
