"""Token ids to text, one token at a time.

A token may end inside a character. The decoder holds such bytes back, so that what it has returned
at any moment is a prefix of the whole text and never contains half a character.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that decoding needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token contributes to the text; none for a control token."""


class StreamDecoder:
    """Decodes one generation. The joined results equal the whole's `bytes.decode("utf-8", "replace")`."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, possibly empty."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return what is still held: a character cut short becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
