from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from paired_homes import DAY_S, NOW_S, YEAR_S, Homes, own, paired

from muser_wire.doctor.facts import identity_facts
from muser_wire.doctor.finding import Finding, Verdict
from muser_wire.doctor.peers import check_own_keys, check_pairing, check_producer
from muser_wire.identities import Digest, Identities
from muser_wire.messages import Description, encode_description
from muser_wire.pairing.card import Role
from muser_wire.pairing.store import PeerStore
from muser_wire.pairing.trust import producer_trust
from muser_wire.transport.base import StreamCall
from muser_wire.transport.grpc import GrpcServer

IDENTITIES = Identities(
    Digest(b"s" * 32), Digest(b"t" * 32), "kv f16", "native", Digest(b"n" * 32), 2048, Digest(b"w" * 32)
)
NAMES = ["spec_digest", "tokenizer_digest", "kv_layout", "lane", "numerics_digest", "chunk_tokens", "weights_digest"]


class Described:
    """A producer that can only say what it is."""

    def describe(self, request: bytes) -> bytes:
        return encode_description(Description(IDENTITIES, b"{}", bytes(16), bytes(32), 1, 8, ("attention",)))

    def open(self, request: bytes, peer: str) -> bytes:
        raise AssertionError("the doctor opens no handoff")

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        raise AssertionError("the doctor opens no handoff")


@pytest.fixture
def port() -> Iterator[int]:
    server = GrpcServer("127.0.0.1", 0, 0)
    server.start(Described())
    yield server.control_port
    server.stop(0)


def look(port: int, ours: dict[str, str] | None, *, unqualified: bool = False) -> dict[str, Finding]:
    found = check_producer(Path("nowhere"), "127.0.0.1", port, ours, unqualified=unqualified)
    return {one.name.removeprefix(f"producer 127.0.0.1:{port}").removeprefix(": "): one for one in found}


def test_a_producer_that_is_what_we_are(port: int) -> None:
    rows = look(port, identity_facts(IDENTITIES))
    assert {one.verdict for one in rows.values()} == {Verdict.OK}
    assert set(rows) == {"", "clock", "kernels", *NAMES}
    assert rows["kernels"].value == "attention"


def test_its_clock_is_this_machines_own(port: int) -> None:
    offset_s = look(port, None)["clock"].numbers["offset_s"]
    assert isinstance(offset_s, float)
    assert abs(offset_s) < 1.0


@pytest.mark.parametrize(("ahead_s", "verdict"), [(60, Verdict.WARN), (-YEAR_S, Verdict.BAD)])
def test_a_clock_that_is_wrong_is_told(
    ahead_s: int, verdict: Verdict, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns
    monkeypatch.setattr("muser_wire.transport.grpc.time.time_ns", lambda: real() + ahead_s * 10**9)
    clock = look(port, None)["clock"]
    assert clock.verdict is verdict
    assert clock.numbers["offset_s"] == pytest.approx(ahead_s, abs=2)


@pytest.mark.parametrize("name", NAMES)
def test_an_identity_that_differs_is_named_with_both_values(name: str, port: int) -> None:
    ours = identity_facts(dataclasses.replace(IDENTITIES, **{name: Digest(b"x" * 32) if "digest" in name else "other"}))
    rows = look(port, ours)
    assert [row for row, one in rows.items() if one.verdict is Verdict.BAD] == [name]
    assert rows[name].advice
    assert f"{ours[name][:16] if 'digest' in name else ours[name]} here, " in rows[name].value


def test_other_weights_that_the_operator_accepts_are_a_warning(port: int) -> None:
    ours = identity_facts(IDENTITIES) | {"weights_digest": "ff" * 32}
    assert look(port, ours, unqualified=True)["weights_digest"].verdict is Verdict.WARN


def test_without_our_own_identities_nothing_is_compared(port: int) -> None:
    assert look(port, None)["identities"].verdict is Verdict.UNKNOWN


def test_a_producer_that_is_not_there_or_not_paired(free_port: int, tmp_path: Path) -> None:
    (row,) = look(free_port, None).values()
    assert row.verdict is Verdict.BAD
    assert str(free_port) in row.advice
    (unpaired,) = check_producer(tmp_path, "127.0.0.2", free_port, None, unqualified=False)
    assert unpaired.verdict is Verdict.BAD
    assert "muser pair" in unpaired.advice


def test_a_paired_producer_is_reached_by_mutual_tls(tmp_path: Path) -> None:
    homes = paired(tmp_path)
    server = GrpcServer("127.0.0.2", 0, 0, producer_trust(homes.producer, "127.0.0.2", time.time))
    server.start(Described())
    try:
        found = check_producer(homes.consumer, "127.0.0.2", server.control_port, None, unqualified=False)
        assert [one.verdict for one in found[:2]] == [Verdict.OK, Verdict.OK]
    finally:
        server.stop(0)


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    return paired(tmp_path, NOW_S)


def pairing(home: Path, now_s: float) -> list[Finding]:
    return list(check_pairing(home, now_s))


def test_paired_machines_are_listed_with_what_is_left_of_their_certificate(homes: Homes) -> None:
    (row,) = pairing(homes.consumer, NOW_S)
    assert (row.name, row.verdict) == ("peer prefill-box", Verdict.OK)
    assert homes.producer_fingerprint() in row.value


def test_a_certificate_that_ends_soon_or_has_ended(homes: Homes) -> None:
    (peer,) = PeerStore(homes.consumer).read().peers
    der = peer.card.certificates[0].certificate.der
    ends_s = x509.load_der_x509_certificate(der).not_valid_after_utc.timestamp()
    (ended,) = pairing(homes.consumer, ends_s + 1)
    assert ended.verdict is Verdict.BAD
    (soon,) = pairing(homes.consumer, ends_s - 10 * DAY_S)
    assert soon.verdict is Verdict.WARN
    assert "muser pair rotate" in soon.advice


@pytest.mark.parametrize("off_s", [-YEAR_S, 6 * YEAR_S])
def test_a_clock_off_by_years_is_named_for_peers_and_for_own_keys(off_s: int, homes: Homes) -> None:
    for look in (check_pairing, check_own_keys):
        (row,) = look(homes.consumer, NOW_S + off_s)
        assert row.verdict is Verdict.BAD
        assert "clock" in row.value
        assert "set the clock" in row.advice


def test_own_keys_are_told_and_what_is_wrong_with_them(homes: Homes, tmp_path: Path) -> None:
    (row,) = check_own_keys(homes.consumer, NOW_S)
    assert (row.name, row.verdict) == ("own keys, decode", Verdict.OK)
    assert homes.consumer_fingerprint() in row.value
    file = homes.consumer / "keys" / "decode.certificates.json"
    file.chmod(0o644)
    (row,) = check_own_keys(homes.consumer, NOW_S)
    assert (row.verdict, "mode 0644" in row.value) == (Verdict.BAD, True)
    assert "pair again" in row.advice
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:90])
    (row,) = check_own_keys(homes.consumer, NOW_S)
    assert (row.verdict, "cannot be used" in row.value) == (Verdict.BAD, True)
    assert list(check_own_keys(tmp_path / "none", NOW_S)) == []


def test_own_keys_that_end_soon_or_cannot_be_looked_at(homes: Homes, tmp_path: Path) -> None:
    (row,) = check_own_keys(homes.consumer, NOW_S + 1820 * DAY_S)
    assert (row.verdict, "certificate for 4 days" in row.value) == (Verdict.WARN, True)
    assert "muser pair rotate" in row.advice
    (row,) = check_own_keys(tmp_path / ("x" * 300), NOW_S)
    assert (row.name, row.verdict, "cannot be read" in row.value) == ("own keys", Verdict.BAD, True)


def test_a_producer_that_has_revoked_this_node_is_no_cable_s_fault(tmp_path: Path) -> None:
    homes = paired(tmp_path)
    server = GrpcServer("127.0.0.2", 0, 0, producer_trust(homes.producer, "127.0.0.2", time.time))
    server.start(Described())
    try:
        PeerStore(homes.producer).revoke(homes.consumer_fingerprint(), time.time())
        (row,) = check_producer(homes.consumer, "127.0.0.2", server.control_port, None, unqualified=False)
    finally:
        server.stop(0)
    assert row.verdict is Verdict.BAD
    assert "muser pair list" in row.advice


def test_a_revoked_and_a_damaged_peer(homes: Homes) -> None:
    store = PeerStore(homes.consumer)
    (peer,) = store.read().peers
    store.publish(dataclasses.replace(peer, revoked_at_s=NOW_S))
    (row,) = pairing(homes.consumer, NOW_S)
    assert "revoked" in row.value
    (file,) = (homes.consumer / "peers").iterdir()
    file.write_bytes(file.read_bytes()[:40])
    assert [one.verdict for one in pairing(homes.consumer, NOW_S)] == [Verdict.BAD]


def test_nobody_is_paired(tmp_path: Path) -> None:
    assert [one.verdict for one in pairing(tmp_path, NOW_S)] == [Verdict.OK]
    own(tmp_path, Role.DECODE, NOW_S)
    assert [one.verdict for one in pairing(tmp_path, NOW_S)] == [Verdict.OK]
