"""llama.cpp over a GGUF file, going on from the longest common prefix with what its context holds."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import llama_cpp
from lines import serve
from llamacpp_model import opened_fast


class Contestant:
    """Holds the model and its one context between requests."""

    def load(self, model: str, context: int, threads: int, *, swa_full: bool) -> dict[str, Any]:
        """Load a GGUF file for prompts of up to `context` tokens, with flash attention.

        `swa_full` False keeps of sliding layers what their window needs, as llama-server does, but no checkpoints.
        """
        self._llama = opened_fast(model, context, threads, swa_full=swa_full)
        self._evaluate = self._llama.eval
        return {"llama_cpp_python": llama_cpp.__version__}

    def ask(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Time the first token of a greedy answer; say how many tokens of the prompt were cached."""
        self._forget_what_windows_lack(ids)
        evaluated: list[int] = []
        evaluate = self._evaluate

        def count(tokens: list[int]) -> None:
            evaluated.append(len(tokens))
            evaluate(tokens)

        # What it evaluates of a prompt, and not what is equal: of a window it may have to run everything again.
        self._llama.eval = count
        started = time.perf_counter()
        answer, first_s = [], 0.0
        for token in islice(self._llama.generate(ids, temp=0.0, reset=True), tokens):
            first_s = first_s or time.perf_counter() - started
            answer.append(token)
        return {"first_s": first_s, "tokens": answer, "cached": len(ids) - evaluated[0]}

    def _forget_what_windows_lack(self, ids: list[int]) -> None:
        """Begin anew where sliding layers have not the rows before the common prefix's end.

        So does llama-server without a checkpoint to go back to; the library would go on without them.
        """
        held = self._llama.input_ids[: self._llama.n_tokens].tolist()
        common = 0
        while common < min(len(held), len(ids) - 1) and held[common] == ids[common]:
            common += 1
        window = llama_cpp.llama_model_n_swa(self._llama.model)
        first = llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(self._llama.ctx), 0)
        if window and first > max(0, common - window):
            self._llama.reset()
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._llama.ctx), True)


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "ask": contestant.ask})
