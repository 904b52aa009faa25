"""Checks of the machines that this one is paired with, and of the producers that its decode node is to use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from muser_wire.doctor.finding import Finding, bad, ok, unknown, warn
from muser_wire.errors import HandoffRefused, WireError
from muser_wire.identities import Identities
from muser_wire.messages import Description, decode_description, encode_describe_request
from muser_wire.pairing.certificates import BoundCertificate, check_time
from muser_wire.pairing.credentials import existing_roles, load_credentials
from muser_wire.pairing.errors import ClockError
from muser_wire.pairing.store import Peer, PeerStore
from muser_wire.pairing.trust import consumer_trust
from muser_wire.private_files import KeyFileError
from muser_wire.probe import encode_probe
from muser_wire.transport.grpc import LOOPBACK_HOSTS, GrpcChannel

CALL_TIMEOUT_S = 5.0
SOON_S = 30 * 86_400
"""A certificate that ends sooner is named."""

CLOCK_WARN_S = 5.0
"""Logs of both nodes are hard to read together beyond it."""

CLOCK_BAD_S = 300.0
"""Certificates and their replacement are judged by clocks."""

SHOWN_DIGITS = 16


def check_pairing(home: Path, now_s: float) -> Iterator[Finding]:
    """Yield one finding for each paired machine and each damaged entry."""
    try:
        contents = PeerStore(home).read()
    except WireError as error:
        yield bad("pairing", str(error), f"give {home} back to this user")
        return
    for reason in contents.damaged:
        yield bad("pairing", reason, "remove that file and pair again: muser pair")
    for peer in contents.peers:
        yield _peer(peer, now_s)
    if not contents.peers and not contents.damaged:
        yield ok("pairing", "no machine is paired: both nodes on this one, or local prefill alone")


def check_own_keys(home: Path, now_s: float) -> Iterator[Finding]:
    """Yield one finding for each role in which this machine has a certificate to show to its peers."""
    try:
        roles = existing_roles(home)
    except WireError as error:
        yield bad("own keys", str(error), f"give {home} back to this user")
        return
    for role in roles:
        name = f"own keys, {role.value}"
        try:
            own = load_credentials(home, role)
            check_time(own.presented(now_s).certificate, now_s, "this node's")
        except WireError as error:
            yield bad(name, str(error), _advice(error))
        else:
            left_s = _ends_s(own.credentials[-1].certificate) - now_s
            value = f"{own.name}, {own.card().fingerprint}, certificate for {left_s / 86_400:.0f} days"
            advice = "muser pair rotate, and carry muser pair export to every peer"
            yield warn(name, value, advice) if left_s < SOON_S else ok(name, value)


def _advice(error: WireError) -> str:
    """Return what to do about keys, certificates and peers that cannot be used."""
    if isinstance(error, ClockError):
        return (
            "set the clock that is wrong; if both are right: muser pair rotate on the machine whose certificate it is"
        )
    if isinstance(error, KeyFileError):
        return "mend that file's mode; if somebody may have read a private key, remove keys and peers and pair again"
    return "pair the two machines: muser pair says how"


def _ends_s(certificate: BoundCertificate) -> float:
    return certificate.x509.not_valid_after_utc.timestamp()


def _peer(peer: Peer, now_s: float) -> Finding:
    name = f"peer {peer.card.name}"
    who = f"{peer.card.role.value}, {peer.fingerprint}" + (f", met at {peer.host}" if peer.host else "")
    if peer.revoked_at_s is not None:
        return ok(name, f"{who}: revoked")
    newest = peer.card.certificates[-1].certificate
    try:
        check_time(newest, now_s, "its")
    except ClockError as error:
        return bad(name, f"{who}: {error}", _advice(error))
    ends = _ends_s(newest)
    left_days = (ends - now_s) / 86_400
    if ends < now_s + SOON_S:
        return warn(name, f"{who}: its certificate ends in {left_days:.0f} days", "muser pair rotate on that machine")
    return ok(name, f"{who}, certificate for {left_days:.0f} days")


def check_producer(
    home: Path, host: str, port: int, ours: Mapping[str, str] | None, *, unqualified: bool
) -> list[Finding]:
    """Return what is found about one producer: whether it answers, its clock, and each identity beside `ours`."""
    name = f"producer {host}:{port}"
    try:
        trust = None if host in LOOPBACK_HOSTS else consumer_trust(home, host, time.time)
        channel = GrpcChannel(host, port, trust)
    except WireError as error:
        return [bad(name, str(error), _advice(error))]
    try:
        started = time.perf_counter()
        description = decode_description(channel.describe(encode_describe_request(), CALL_TIMEOUT_S))
        answered = ok(name, f"answers in {(time.perf_counter() - started) * 1e3:.0f} ms")
        clock = _clock(name, channel.clock_offset_s(encode_probe(b""), CALL_TIMEOUT_S))
    except HandoffRefused as error:
        return [bad(name, str(error), "muser pair list on that machine says whom it trusts; pair again: muser pair")]
    except WireError as error:
        advice = f"is muser-prefill started there, is port {port} open, is the cable in? prompts stay local until then"
        return [bad(name, str(error), advice)]
    finally:
        channel.close()
    return [
        answered,
        clock,
        *_kernels(name, description),
        *_identities(name, ours, description, unqualified=unqualified),
    ]


def _clock(name: str, measured: tuple[float, float] | None) -> Finding:
    if measured is None:
        return unknown(f"{name}: clock", "it does not tell its time")
    offset_s, doubt_s = measured
    value = f"{offset_s:+.3f} s from ours, give or take {doubt_s * 1e3:.0f} ms"
    advice = "let both machines set their clocks by NTP"
    if abs(offset_s) - doubt_s > CLOCK_BAD_S:
        return bad(f"{name}: clock", value, advice, offset_s=offset_s)
    if abs(offset_s) - doubt_s > CLOCK_WARN_S:
        return warn(f"{name}: clock", value, advice, offset_s=offset_s)
    return ok(f"{name}: clock", value, offset_s=offset_s)


def _kernels(name: str, description: Description) -> Iterator[Finding]:
    admitted = ", ".join(description.kernels) or "none, plain operations"
    yield ok(f"{name}: kernels", admitted)


def _identities(
    name: str, ours: Mapping[str, str] | None, description: Description, *, unqualified: bool
) -> Iterator[Finding]:
    if ours is None:
        yield unknown(f"{name}: identities", "this node's own are not known, see its model above")
        return
    for field in fields(Identities):
        value: Any = getattr(description.identities, field.name)
        theirs = value.hex() if isinstance(value, bytes) else str(value)
        yield _identity(f"{name}: {field.name}", field.name, ours[field.name], theirs, unqualified=unqualified)


def _identity(title: str, field: str, ours: str, theirs: str, *, unqualified: bool) -> Finding:
    shown = SHOWN_DIGITS if field.endswith("_digest") else None
    if ours == theirs:
        return ok(title, f"{ours[:shown]} on both")
    value = f"{ours[:shown]} here, {theirs[:shown]} there"
    if field == "weights_digest" and unqualified:
        return warn(title, value, "accepted by allow_unqualified: answers may depend on the way they came")
    return bad(title, value, ADVICE.get(field, "give both nodes the same model and the same version of muser"))


ADVICE = {
    "weights_digest": "give both nodes the same checkpoint, or accept other weights with --allow-unqualified",
    "kv_layout": "give both nodes the same --kv",
    "lane": "give both nodes the same --lane",
    "chunk_tokens": "give both nodes the same --chunk-tokens",
    "numerics_digest": "install the same version of muser on both machines",
}
