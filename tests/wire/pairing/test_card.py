from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paired_homes import stranger

from muser_wire.pairing.card import MAX_CARD_NBYTES, Card, Role
from muser_wire.pairing.errors import PairingError

CARD = stranger(Role.DECODE)
VALUE: dict[str, Any] = CARD.to_json()


def changed(**changes: Any) -> bytes:
    return json.dumps({**VALUE, **changes}).encode()


def with_certificate(**changes: Any) -> bytes:
    return changed(certificates=[{**VALUE["certificates"][0], **changes}])


def test_a_card_comes_back_as_it_was() -> None:
    assert Card.decode(CARD.encode()) == CARD
    assert b"PRIVATE" not in CARD.encode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (changed(version=2), "card.version is 2; this Muser reads version 1"),
        (changed(extra=1), "exactly the fields"),
        (changed(role="both"), "card.role"),
        (changed(name="\x1b[2J"), "card.name"),
        (changed(name="n" * 65), "card.name"),
        (changed(name=5), "card.name"),
        (changed(node_key="00" * 31), "card.node_key"),
        (changed(node_key="00" * 32), "not bound by the node key"),
        (changed(node_key=stranger(Role.DECODE).node_key.hex()), "not bound by the node key"),
        (changed(certificates=[]), "1 to 2"),
        (changed(certificates=VALUE["certificates"] * 3), "1 to 2"),
        (with_certificate(der="====="), "base64"),
        (with_certificate(binding="00" * 64), "not bound"),
        (with_certificate(accepted_until_s=-1), "not a time"),
        (with_certificate(accepted_until_s=1.5), "not a time"),
        (with_certificate(accepted_until_s=True), "not a time"),
        (b"[" * 5000, "damaged"),
        (b'{"version":1,"version":1}', "twice"),
        (b"\xff", "damaged"),
        (b"[]", "not an object"),
        (b" " * (MAX_CARD_NBYTES + 1), "at most"),
    ],
)
def test_other_texts_are_refused_by_name(text: bytes, reason: str) -> None:
    with pytest.raises(PairingError, match=reason):
        Card.decode(text)


@given(
    st.binary(max_size=64)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_nothing_but_a_pairing_error_comes_of_any_bytes(text: bytes) -> None:
    with pytest.raises(PairingError):
        Card.decode(text)


def test_a_card_cut_short_anywhere_is_refused() -> None:
    text = CARD.encode().rstrip()
    for size in range(len(text)):
        with pytest.raises(PairingError):
            Card.decode(text[:size])
