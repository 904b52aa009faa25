"""Announcing and hearing over multicast on the loopback interface."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from muser_wire.errors import TransportError
from muser_wire.transport.discovery import Kind, Seen, announced, available, look, own_addresses, printable, read_seen

LOOPBACK = ["127.0.0.1"]
FINGERPRINT = "ab" * 16


def test_what_is_announced_is_heard_until_it_ends() -> None:
    assert available()
    with (
        announced(Kind.PRODUCER, "box one", ("127.0.0.1", 4950), FINGERPRINT, LOOPBACK),
        announced(Kind.PAIRING, "box one", ("127.0.0.1", 4952), "", LOOPBACK),
    ):
        heard = look(1.5, LOOPBACK)
    assert heard == [
        Seen(Kind.PAIRING, "box-one", ("127.0.0.1",), 4952, ""),
        Seen(Kind.PRODUCER, "box-one", ("127.0.0.1",), 4950, FINGERPRINT),
    ]
    assert look(1.0, LOOPBACK) == []


@pytest.mark.parametrize("claimed", [b"\x1b[2J", b"AB" * 16, b"ab" * 40, b"\xff", None])
def test_a_strangers_words_are_made_harmless(claimed: bytes | None) -> None:
    info = SimpleNamespace(properties={b"fp": claimed}, port=1, parsed_addresses=lambda: ["192.0.2.1"])
    seen = read_seen(Kind.PRODUCER, f"\x1b[31mred\r\n.{Kind.PRODUCER.value}", info)
    assert seen == Seen(Kind.PRODUCER, "31mred", ("192.0.2.1",), 1, "")
    assert len(printable("x" * 500)) == 63


def test_without_the_package_nothing_is_heard_and_announcing_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    assert not available()
    assert look(0.1) == []
    with (
        pytest.raises(TransportError, match=r"muser\[discovery\]"),
        announced(Kind.PRODUCER, "box", ("127.0.0.1", 1), ""),
    ):
        pass


def test_the_addresses_of_a_machine() -> None:
    assert own_addresses("192.0.2.9") == ["192.0.2.9"]
    assert own_addresses("localhost")
    assert own_addresses("no.such.host.invalid") == []
