from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muser_decode.tokenizer import StreamDecoder


class Pieces:
    """A tokenizer whose token i is the i-th of the given pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def decoded(pieces: list[bytes]) -> list[str]:
    decoder = StreamDecoder(Pieces(pieces))
    return [*(decoder.feed(i) for i in range(len(pieces))), decoder.finish()]


# Bytes that begin, continue, overrun and break UTF-8 sequences, beside any others.
hard_bytes = st.lists(
    st.one_of(
        st.binary(max_size=4),
        st.sampled_from([b"\xe2\x82", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xed\xa0", b"\xc3", b"\x80", b"\xff", b"a", b""]),
        st.text(max_size=3).map(lambda text: text.encode("utf-8", "ignore")),
    ),
    max_size=12,
)


@given(hard_bytes)
def test_any_bytes_split_anywhere_give_the_text_of_the_whole(pieces: list[bytes]) -> None:
    assert "".join(decoded(pieces)) == b"".join(pieces).decode("utf-8", errors="replace")


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_valid_text_byte_by_byte_never_shows_a_replacement(text: str) -> None:
    pieces = [bytes([byte]) for byte in text.encode()]
    shown = ""
    for piece in decoded(pieces):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xf0\x9f", b"\x98", b"\x80!"], ["", "", "\U0001f600!", ""]),
        ([b"a\xe2\x82"], ["a", "\ufffd"]),
        ([b"\xe2\x82", b"b"], ["", "\ufffdb", ""]),
        ([b"\xff"], ["\ufffd", ""]),
        ([b"", b""], ["", "", ""]),
        ([b"\xef\xbb\xbfx"], ["\ufeffx", ""]),
    ],
)
def test_half_a_character_is_held_and_a_broken_one_replaced(pieces: list[bytes], expected: list[str]) -> None:
    assert decoded(pieces) == expected
