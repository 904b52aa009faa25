"""llama.cpp over a GGUF file, going on from the longest common prefix with what its context holds."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import llama_cpp
from lines import serve

UBATCH_TOKENS = 512
"""llama.cpp's own default; 128 was slower, and so was every size without flash attention."""


class Contestant:
    """Holds the model and its one context between requests."""

    def load(self, model: str, context: int, threads: int) -> dict[str, Any]:
        """Load a GGUF file for prompts of up to `context` tokens, with flash attention."""
        self._llama = llama_cpp.Llama(
            model,
            n_ctx=context,
            n_batch=context,
            n_ubatch=min(UBATCH_TOKENS, context),
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            verbose=False,
        )
        return {"llama_cpp_python": llama_cpp.__version__}

    def ask(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Time the first token of a greedy answer; say how many tokens of the prompt were cached."""
        held = self._llama.input_ids[: self._llama.n_tokens].tolist()
        cached = 0
        while cached < min(len(held), len(ids) - 1) and held[cached] == ids[cached]:
            cached += 1
        started = time.perf_counter()
        answer, first_s = [], 0.0
        for token in islice(self._llama.generate(ids, temp=0.0, reset=True), tokens):
            first_s = first_s or time.perf_counter() - started
            answer.append(token)
        return {"first_s": first_s, "tokens": answer, "cached": cached}


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "ask": contestant.ask})
