"""Whom a node's control port trusts, read from the store at each use: a revocation acts at the next call [9.5].

A handshake admits the pinned certificates only; then each call asks here again who the peer is.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from muser_wire.pairing.card import CardCertificate, Role
from muser_wire.pairing.certificates import FINGERPRINT_DIGITS, check_time, day
from muser_wire.pairing.credentials import load_credentials
from muser_wire.pairing.errors import ClockError, PairingError, PeerRefused
from muser_wire.pairing.store import Peer, PeerStore
from muser_wire.transport.tls import TlsMaterial

_log = logging.getLogger(__name__)

Clock = Callable[[], float]
HOW = "run `muser pair`, which says how"


class Trust:
    """See `muser_wire.transport.tls.Security`. `only` narrows it to the peer with one fingerprint.

    `now` gives seconds since 1970.
    """

    def __init__(self, home: Path, role: Role, now: Clock, only: str | None = None) -> None:
        self._home = home
        self._role = role
        self._now = now
        self._only = only
        self._store = PeerStore(home)

    def material(self) -> TlsMaterial:
        """Return this node's key and certificate, and the certificates that may be at the other end.

        Raises:
            PairingError: no peer is left, or this node's own credentials cannot be used.
            ClockError: by this machine's clock this node's certificate, or every peer's, is not valid.
        """
        now_s = self._now()
        credential = load_credentials(self._home, self._role).presented(now_s)
        check_time(credential.certificate, now_s, "this node's")
        trusted = self._trusted(now_s)
        return TlsMaterial(
            credential.key_pem, credential.certificate.pem, tuple(one.certificate.pem for one in trusted)
        )

    def peer_of(self, certificate_pem: bytes) -> str:
        """Return the fingerprint of the peer that shows a certificate; the peer has proved that it has its key.

        Raises:
            PeerRefused: it is not, or no longer, a peer's; the message says which.
        """
        digest = hashlib.sha256(x509.load_pem_x509_certificate(certificate_pem).public_bytes(Encoding.DER)).digest()
        now_s = self._now()
        for peer in self._peers():
            for one in peer.card.certificates:
                if one.certificate.digest == digest:
                    self._check(peer, one, now_s)
                    return peer.fingerprint
        raise PeerRefused(f"the certificate {digest.hex()[:FINGERPRINT_DIGITS]} is not of a paired node")

    def check_peer(self, fingerprint: str) -> None:
        """Check that a peer that was let in is still one.

        Raises:
            PeerRefused: it is not.
        """
        peer = next((peer for peer in self._peers() if peer.fingerprint == fingerprint), None)
        if peer is None:
            raise PeerRefused(f"the node {fingerprint} is not paired")
        _check_not_revoked(peer)

    def node_key(self) -> bytes:
        """Return the node key of the only peer, which must sign its seals [9.6].

        Raises:
            PairingError: the trust is in several peers, or the peer is not there.
        """
        peers = [peer for peer in self._peers() if self._only is not None]
        if len(peers) != 1:
            raise PairingError("no single peer is named")
        return peers[0].card.node_key

    def _peers(self) -> tuple[Peer, ...]:
        """Every peer of the other role, revoked ones too."""
        peers = (peer for peer in self._store.read().peers if peer.card.role is self._role.other)
        return tuple(peer for peer in peers if self._only in (None, peer.fingerprint))

    def _trusted(self, now_s: float) -> list[CardCertificate]:
        trusted: list[CardCertificate] = []
        reasons: list[PairingError | PeerRefused] = []
        for peer in self._peers():
            for one in peer.card.certificates:
                try:
                    self._check(peer, one, now_s)
                    trusted.append(one)
                except (PeerRefused, ClockError) as error:
                    reasons.append(error)
        if not trusted and reasons:
            raise type(reasons[-1])(str(reasons[-1]))
        if not trusted:
            raise PairingError(f"no {self._role.other.value} node is paired with this machine: {HOW}")
        return trusted

    def _check(self, peer: Peer, one: CardCertificate, now_s: float) -> None:
        _check_not_revoked(peer)
        until_s = one.accepted_until_s
        if until_s is not None and now_s > until_s:
            raise PeerRefused(f"{_named(peer)} shows a certificate that it replaced, taken until {day(until_s)}")
        check_time(one.certificate, now_s, f"{_named(peer)}: the peer's")


def _check_not_revoked(peer: Peer) -> None:
    if peer.revoked_at_s is not None:
        raise PeerRefused(f"{_named(peer)} was revoked on {day(peer.revoked_at_s)}")


def _named(peer: Peer) -> str:
    return f"the node {peer.fingerprint} ({peer.card.name})"


def producer_trust(home: Path, host: str, now: Clock) -> Trust:
    """Return what a producer that serves other machines trusts: every paired decode node. `host` is what it binds.

    Raises:
        PairingError: none is paired; the message names the host.
        WireError: none can be let in now; the message says why.
    """
    if not _peers_as(home, Role.DECODE):
        raise PairingError(
            f"--host {host} is not a loopback address, and no decode node is paired with this machine: {HOW}"
        )
    trust = Trust(home, Role.PREFILL, now)
    trust.material()
    return trust


def consumer_trust(home: Path, host: str, now: Clock) -> Trust:
    """Return the trust in one producer: the only one that is paired, else the one that was met at `host`.

    Raises:
        PairingError: no paired producer fits; the message names the host.
        WireError: the producer cannot be used now; the message says why.
    """
    producers = _peers_as(home, Role.PREFILL)
    # Without one in use a revoked one is taken, to be refused by name.
    producers = [peer for peer in producers if peer.revoked_at_s is None] or producers
    if len(producers) > 1:
        met = ", ".join(f"{peer.card.name} at {peer.host or 'no known host'}" for peer in producers)
        producers = [peer for peer in producers if peer.host == host]
        if not producers:
            raise PairingError(
                f"--producer {host}: several producers are paired, and none was met there, but {met}: name it as it "
                f"was met, or import its card with `muser pair import FILE --host {host}`"
            )
    if not producers:
        raise PairingError(
            f"--producer {host} is not a loopback address, and no producer there is paired with this machine: {HOW}"
        )
    if len(producers) > 1:
        raise PairingError(f"--producer {host}: several paired producers were met there: revoke those that are gone")
    trust = Trust(home, Role.DECODE, now, only=producers[0].fingerprint)
    trust.material()
    return trust


def _peers_as(home: Path, role: Role) -> list[Peer]:
    return [peer for peer in PeerStore(home).read().peers if peer.card.role is role]
