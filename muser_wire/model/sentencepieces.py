"""Pieces of a SentencePiece-like BPE: how they spell spaces and bytes, and the merges that a vocabulary implies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SPACE = "\u2581"
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def piece_bytes(spelling: str) -> bytes:
    """Return the bytes that a vocabulary entry stands for: U+2581 is a space, <0x41> a single byte.

    >>> piece_bytes("\u2581the"), piece_bytes("<0x41>")
    (b' the', b'A')
    """
    byte = _BYTE.fullmatch(spelling)
    return bytes([int(byte[1], 16)]) if byte else spelling.replace(SPACE, " ").encode()


def implied_merges(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary whose file does not list them, first to last.

    Every way to cut a piece into two pieces is a merge. Pieces with lower ids were learned earlier, so
    theirs come first; among those of one piece the ids of the left half, then of the right half decide.
    """
    found: list[tuple[str, str]] = []
    # A real vocabulary has millions of cuts: each looks its left half up first, and most end there.
    for piece in sorted((piece for piece in ids if len(piece) > 1), key=ids.__getitem__):
        cuts = [
            (ids[left], ids[right], left, right)
            for cut in range(1, len(piece))
            if (left := piece[:cut]) in ids and (right := piece[cut:]) in ids
        ]
        cuts.sort()
        found.extend((left, right) for _, _, left, right in cuts)
    return found


def normalizer(*, space_prefix: bool) -> Mapping[str, Any]:
    """Return the normaliser, in the form of tokenizer.json, that writes spaces as pieces do.

    `space_prefix` puts one before the text, as vocabularies with words as they follow a space want it.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not space_prefix:
        return replace
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}
