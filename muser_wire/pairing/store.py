"""The peers of this machine, one private file each under MUSER_HOME/peers [9.4].

A file is replaced as a whole: after a crash a peer is as it was, or not paired. A file that cannot be
read is no peer, and is named. What is kept of a revoked peer lets its calls be refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muser_wire.errors import WireError
from muser_wire.pairing.card import Card
from muser_wire.pairing.errors import PairingError
from muser_wire.pairing.reading import Fields, parse_object
from muser_wire.private_files import KeyFileError, publish_private, read_private

PEER_VERSION = 1
MAX_PEER_NBYTES = 16 << 10
MAX_PEERS = 64
"""More machines than one link joins; a bound on what every handshake may have to look through."""

LEAST_PREFIX = 8
"""Digits of a fingerprint that are enough to name a peer."""

HOST = re.compile(r"[A-Za-z0-9.:%_-]{0,255}")

_log = logging.getLogger(__name__)

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Peer:
    """A machine that a person on this one has agreed to. `host` is where it was met, empty if unknown."""

    card: Card
    host: str
    paired_at_s: int
    revoked_at_s: int | None = None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its node key."""
        return self.card.fingerprint


@dataclass(frozen=True)
class Contents:
    """What the folder holds: peers, the first paired first, and for each file that is none the reason."""

    peers: tuple[Peer, ...]
    damaged: tuple[str, ...]


class PeerStore:
    """The folder of peers. Methods may be called on any thread; another process may change the folder."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "peers"
        self._lock = threading.Lock()
        self._seen: tuple[Signature, Contents] | None = None

    def read(self) -> Contents:
        """Return what is stored now; files are read again only when one has changed.

        Raises:
            KeyFileError: the folder cannot be listed.
        """
        with self._lock:
            signature = self._signature()
            if self._seen is None or self._seen[0] != signature:
                contents = self._contents([name for name, *_ in signature])
                for reason in contents.damaged:
                    _log.warning("peer_damaged reason=%s", reason)
                self._seen = signature, contents
            return self._seen[1]

    def publish(self, peer: Peer) -> None:
        """Store a peer; an entry with its fingerprint is replaced.

        Raises:
            PairingError: there are too many peers.
            KeyFileError: the file cannot be written; what was there before stands.
        """
        others = [one for one in self.read().peers if one.fingerprint != peer.fingerprint]
        if len(others) >= MAX_PEERS:
            raise PairingError(f"{len(others)} peers are stored, and {MAX_PEERS} is the most")
        value = {
            "version": PEER_VERSION,
            "card": peer.card.to_json(),
            "host": peer.host,
            "paired_at_s": peer.paired_at_s,
            "revoked_at_s": peer.revoked_at_s,
        }
        path = self._folder / f"{peer.fingerprint}.json"
        publish_private(path, json.dumps(value, indent=1, sort_keys=True).encode("ascii") + b"\n")

    def find(self, text: str) -> Peer | None:
        """Return the peer that a fingerprint, or at least 8 digits of its start, names; spaces do not matter.

        Raises:
            PairingError: the text is too short, or several peers begin like it.
        """
        prefix = text.replace(" ", "").lower()
        if len(prefix) < LEAST_PREFIX:
            raise PairingError(f"{text!r} is too short: give at least {LEAST_PREFIX} digits of the fingerprint")
        found = [peer for peer in self.read().peers if peer.fingerprint.startswith(prefix)]
        if len(found) > 1:
            raise PairingError(f"{len(found)} peers begin with {text!r}: give more digits")
        return found[0] if found else None

    def revoke(self, text: str, now_s: float) -> Peer:
        """Refuse a peer from now on; return it. Revoking one twice keeps the first time.

        Raises:
            PairingError: no peer has that fingerprint.
            KeyFileError: the file cannot be written.
        """
        peer = self.find(text)
        if peer is None:
            raise PairingError(f"no peer has a fingerprint that begins with {text!r}: `muser pair list` shows them")
        if peer.revoked_at_s is None:
            peer = dataclasses.replace(peer, revoked_at_s=int(now_s))
            self.publish(peer)
        return peer

    def _signature(self) -> Signature:
        try:
            files = sorted(self._folder.glob("[!.]*.json"))
            stats = [(path.name, path.stat()) for path in files]
        except FileNotFoundError:
            # Before the first peer, or while a file was being replaced by nothing: read what is there.
            return ()
        except OSError as error:
            raise KeyFileError(f"{self._folder} cannot be read: {error.strerror or error}") from error
        # The change time and mode too: a file that was opened to others is looked at again.
        return tuple((name, stat.st_ctime_ns, stat.st_ino, stat.st_mode) for name, stat in stats)

    def _contents(self, names: list[str]) -> Contents:
        peers, damaged = [], []
        for name in names:
            try:
                peers.append(self._peer(self._folder / name))
            except WireError as error:
                damaged.append(str(error))
        return Contents(tuple(sorted(peers, key=lambda peer: peer.paired_at_s)), tuple(damaged))

    def _peer(self, path: Path) -> Peer:
        text = read_private(path, MAX_PEER_NBYTES)
        try:
            return _from_json(parse_object(text, "the file"), path.stem)
        except PairingError as error:
            raise PairingError(f"{path} cannot be used ({error}), so it is no peer: pair again") from error


def _from_json(value: Any, fingerprint: str) -> Peer:
    fields = Fields(value, "peer", {"version", "card", "host", "paired_at_s", "revoked_at_s"}, PEER_VERSION)
    card, paired_at_s = Card.from_json(fields["card"]), fields.time("paired_at_s")
    if card.fingerprint != fingerprint:
        raise PairingError(f"it is of the node {card.fingerprint}")
    if paired_at_s is None:
        raise PairingError("peer.paired_at_s is absent")
    return Peer(card, fields.text("host", HOST), paired_at_s, fields.time("revoked_at_s"))
