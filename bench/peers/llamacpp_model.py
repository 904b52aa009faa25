"""How each peer over llama.cpp opens a GGUF file."""

from __future__ import annotations

from typing import Any

import llama_cpp

UBATCH_TOKENS = 512
"""llama.cpp's own default; 128 was slower, and so was every size without flash attention."""


def opened(model: str, context: int, threads: int, **more: Any) -> llama_cpp.Llama:
    """Return a model for prompts of up to `context` tokens, each evaluated in one call; `more` is of `Llama`."""
    return llama_cpp.Llama(
        model, n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads, verbose=False, **more
    )


def opened_fast(model: str, context: int, threads: int, **more: Any) -> llama_cpp.Llama:
    """Return a model as `opened` does, with flash attention and the fastest batch."""
    return opened(model, context, threads, n_ubatch=min(UBATCH_TOKENS, context), flash_attn=True, **more)
