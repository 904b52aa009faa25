from __future__ import annotations

from muser_wire.model.sentencepieces import BYTES, implied_merges, piece_bytes


def test_pieces_spell_spaces_and_bytes() -> None:
    assert piece_bytes("\u2581\u2581a\u2581") == b"  a "
    assert piece_bytes("\u00e9") == b"\xc3\xa9"
    assert [piece_bytes(spelling) for spelling in BYTES] == [bytes([byte]) for byte in range(256)]
    # Only the exact spelling is a byte.
    assert piece_bytes("<0x0a>") == b"<0x0a>"
    assert piece_bytes("a<0x0A>") == b"a<0x0A>"


def test_merges_follow_the_ids_of_whole_left_and_right() -> None:
    ids = {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4, "abc": 5, "xy": 6}
    assert implied_merges(ids) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
