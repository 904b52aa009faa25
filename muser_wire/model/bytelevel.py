"""The alphabet of byte-level BPE: one printable letter for each byte."""

from __future__ import annotations


def byte_letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte, in byte order.

    Printable bytes stand for themselves; the others take the code points from 256 upward, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


_BYTE_OF = {letter: byte for byte, letter in enumerate(byte_letters())}


def piece_bytes(spelling: str) -> bytes:
    """Return the bytes that a vocabulary entry stands for.

    An entry with a letter outside the alphabet was written as plain text, and stands for its UTF-8.
    """
    try:
        return bytes(_BYTE_OF[letter] for letter in spelling)
    except KeyError:
        return spelling.encode()
