"""Likelihoods of tokens in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from muser_decode.api.answer import TokenRecord
from muser_decode.tokenizer import TokenBytes

IMPOSSIBLE = -9999.0
"""What OpenAI writes for a likelihood of zero, whose logarithm is not JSON."""


class Spelling:
    """How tokens are written in answers: their text, and their bytes where it is not whole characters."""

    def __init__(self, tokenizer: TokenBytes, special_ids: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._specials = {token_id: spelling for spelling, token_id in special_ids.items()}

    def data(self, token_id: int) -> bytes:
        """Return the bytes of a token; a control token's are those of its spelling."""
        special = self._specials.get(token_id)
        return self._tokenizer.token_bytes(token_id) if special is None else special.encode()

    def chat(self, records: Sequence[TokenRecord]) -> dict[str, object]:
        """Return a chat choice's `logprobs`."""
        return {"content": [self._entry(record) for record in records], "refusal": None}

    def legacy(self, records: Sequence[TokenRecord], offset: int) -> dict[str, object]:
        """Return a text completion's `logprobs`; `offset` counts the characters before the first token."""
        offsets = []
        for record in records:
            offsets.append(offset)
            offset += record.chars
        return {
            "tokens": [self._text(record.token_id) for record in records],
            "token_logprobs": [_finite(record.likelihood.chosen) for record in records],
            "top_logprobs": [self._top(record) for record in records],
            "text_offset": offsets,
        }

    def _top(self, record: TokenRecord) -> dict[str, float]:
        """Return the likeliest tokens, and the one that was taken if it is not among them, as OpenAI does."""
        told = record.likelihood
        pairs = (*told.alternatives, (record.token_id, told.chosen))
        return {self._text(token_id): _finite(value) for token_id, value in pairs}

    def _entry(self, record: TokenRecord) -> dict[str, object]:
        top = [self._one(token_id, value) for token_id, value in record.likelihood.alternatives]
        return {**self._one(record.token_id, record.likelihood.chosen), "top_logprobs": top}

    def _one(self, token_id: int, value: float) -> dict[str, object]:
        data = self.data(token_id)
        return {"token": self._text(token_id), "logprob": _finite(value), "bytes": list(data)}

    def _text(self, token_id: int) -> str:
        return self.data(token_id).decode("utf-8", "replace")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else IMPOSSIBLE
