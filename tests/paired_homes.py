"""MUSER_HOME folders of machines that are paired, or almost."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_wire.auth import NodeKey
from muser_wire.pairing.card import Card, CardCertificate, Role
from muser_wire.pairing.certificates import issue
from muser_wire.pairing.credentials import OwnCredentials, load_or_create_credentials, publish
from muser_wire.pairing.store import Peer, PeerStore

DAY_S = 86_400
YEAR_S = 365 * DAY_S
NOW_S = 1_800_000_000
"""A time for what takes time as an argument."""


def own(home: Path, role: Role, now_s: float | None = None) -> OwnCredentials:
    """The credentials of a machine, made on first use."""
    return load_or_create_credentials(home, role, role.value + "-box", time.time() if now_s is None else now_s)


def trust_card(home: Path, card: Card, host: str = "127.0.0.2", at_s: int = NOW_S) -> Peer:
    """Store a peer."""
    peer = Peer(card, host, at_s)
    PeerStore(home).publish(peer)
    return peer


@dataclasses.dataclass(frozen=True)
class Homes:
    """Two machines that trust each other."""

    producer: Path
    consumer: Path

    def producer_fingerprint(self) -> str:
        return own(self.producer, Role.PREFILL).card().fingerprint

    def consumer_fingerprint(self) -> str:
        return own(self.consumer, Role.DECODE).card().fingerprint


def paired(folder: Path, now_s: float | None = None) -> Homes:
    """Make both machines' keys, at `now_s` by their clocks, and pair them."""
    homes = Homes(folder / "producer", folder / "consumer")
    trust_card(homes.producer, own(homes.consumer, Role.DECODE, now_s).card())
    trust_card(homes.consumer, own(homes.producer, Role.PREFILL, now_s).card())
    return homes


def stranger(role: Role, now_s: float = NOW_S) -> Card:
    """The card of a machine that exists nowhere."""
    node_key = NodeKey(Ed25519PrivateKey.generate())
    return Card(role, "stranger", node_key.public_bytes, (CardCertificate(issue(node_key, now_s).certificate),))


def reissue(home: Path, role: Role, now_s: float) -> OwnCredentials:
    """Give a machine another certificate, made at `now_s`, that its peers have not seen."""
    before = own(home, role)
    after = dataclasses.replace(before, credentials=(issue(before.node_key, now_s),), switch_at_s=None)
    publish(home, after)
    return after
