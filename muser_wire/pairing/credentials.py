"""A node's own keys under MUSER_HOME/keys: the node key, and beside it the certificates that it presents [9.7].

One file holds all certificates of a role and is replaced as a whole, so a crash leaves what was there
before. While a rotation runs it holds two: the old one is presented until `switch_at_s`, the new one
after; peers that have imported the new card take both.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from muser_wire.auth import NodeKey
from muser_wire.pairing.card import NAME, Card, CardCertificate, Role, certificate_fields, read_certificate
from muser_wire.pairing.certificates import CLOCK_TOLERANCE_S, DAY_S, Credential, day, issue
from muser_wire.pairing.errors import PairingError
from muser_wire.pairing.reading import Fields, parse_object
from muser_wire.private_files import KeyFileError, publish_private, read_private

OVERLAP_S = 7 * DAY_S
"""How long after `muser pair rotate` both certificates are accepted: time to carry a card to every peer."""

CREDENTIALS_VERSION = 1
MAX_FILE_NBYTES = 32 << 10
KEY_PEM = re.compile(r"-----BEGIN PRIVATE KEY-----[A-Za-z0-9+/=\n]{1,1024}-----END PRIVATE KEY-----\n")


@dataclass(frozen=True)
class OwnCredentials:
    """What one role of this machine is to its peers. Credentials are the oldest first, at most two."""

    role: Role
    name: str
    node_key: NodeKey
    credentials: tuple[Credential, ...]
    switch_at_s: int | None = None

    def presented(self, now_s: float) -> Credential:
        """Return what to show on a connection now."""
        is_switched = self.switch_at_s is None or now_s >= self.switch_at_s
        return self.credentials[-1 if is_switched else 0]

    def card(self) -> Card:
        """Return what to give to peers. They take an old certificate a clock tolerance longer than it is shown."""
        *old, newest = (credential.certificate for credential in self.credentials)
        until_s = None if self.switch_at_s is None else self.switch_at_s + CLOCK_TOLERANCE_S
        certificates = (*(CardCertificate(one, until_s) for one in old), CardCertificate(newest))
        return Card(self.role, self.name, self.node_key.public_bytes, certificates)


def node_key_path(home: Path, role: Role) -> Path:
    """Return where a role's node key lies."""
    return home / "keys" / f"{role.value}.ed25519"


def credentials_path(home: Path, role: Role) -> Path:
    """Return where a role's certificates and their keys lie."""
    return home / "keys" / f"{role.value}.certificates.json"


def existing_roles(home: Path) -> tuple[Role, ...]:
    """Return the roles for which this machine has certificates.

    Raises:
        KeyFileError: this user may not look there.
    """
    return tuple(role for role in Role if _is_there(credentials_path(home, role)))


def load_credentials(home: Path, role: Role) -> OwnCredentials:
    """Return a role's credentials.

    Raises:
        PairingError: there are none, the file is damaged, or another node key made them.
        KeyFileError: others can read a file, or it cannot be read.
    """
    path = credentials_path(home, role)
    if not _is_there(path):
        raise PairingError(f"this machine has no certificate as a {role.value} node: run `muser pair`, which says how")
    node_key = NodeKey.load_or_create(node_key_path(home, role))
    try:
        return _from_json(parse_object(read_private(path, MAX_FILE_NBYTES), "the file"), role, node_key)
    except PairingError as error:
        raise PairingError(f"{path} cannot be used ({error}): move it away and pair again") from error


def load_or_create_credentials(home: Path, role: Role, name: str, now_s: float) -> OwnCredentials:
    """Return a role's credentials, made on first use.

    Raises:
        PairingError: what is there cannot be used, or `name` is no name.
        KeyFileError: a file cannot be read or written, or others can read it.
    """
    if _is_there(credentials_path(home, role)):
        return load_credentials(home, role)
    if not NAME.fullmatch(name):
        raise PairingError(f"{name!r} is no name: 1 to 64 letters, digits, '.', '-' and '_'; give another by --name")
    node_key = NodeKey.load_or_create(node_key_path(home, role))
    publish(home, OwnCredentials(role, name, node_key, (issue(node_key, now_s),)), keep_existing=True)
    # Another command may have been first; then its certificate is this node's.
    return load_credentials(home, role)


def rotate(home: Path, role: Role, now_s: float) -> OwnCredentials:
    """Add a certificate that takes over after OVERLAP_S; return both. One that has expired is replaced at once.

    Raises:
        PairingError: a rotation is under way.
    """
    own = load_credentials(home, role)
    ends_s = int(own.presented(now_s).certificate.x509.not_valid_after_utc.timestamp())
    if now_s > ends_s:
        replaced = OwnCredentials(role, own.name, own.node_key, (issue(own.node_key, now_s),))
        publish(home, replaced)
        return replaced
    if own.switch_at_s is not None and now_s < own.switch_at_s:
        raise PairingError(
            f"a rotation is under way until {day(own.switch_at_s)}; `muser pair rotate --switch` ends it now"
        )
    credentials = (own.presented(now_s), issue(own.node_key, now_s))
    switch_at_s = min(int(now_s) + OVERLAP_S, ends_s)
    rotated = OwnCredentials(role, own.name, own.node_key, credentials, switch_at_s)
    publish(home, rotated)
    return rotated


def switch(home: Path, role: Role, now_s: float) -> OwnCredentials:
    """Present the new certificate of a running rotation from now on.

    Raises:
        PairingError: no rotation is under way.
    """
    own = load_credentials(home, role)
    if own.switch_at_s is None or now_s >= own.switch_at_s:
        raise PairingError("no rotation is under way")
    switched = OwnCredentials(role, own.name, own.node_key, own.credentials, int(now_s))
    publish(home, switched)
    return switched


def publish(home: Path, own: OwnCredentials, *, keep_existing: bool = False) -> None:
    """Store credentials, whole or not at all; with `keep_existing`, those that are there by then stand.

    Raises:
        KeyFileError: they cannot be written.
    """
    entries = [
        {"key_pem": one.key_pem.decode("ascii"), **certificate_fields(one.certificate)} for one in own.credentials
    ]
    value = {
        "version": CREDENTIALS_VERSION,
        "name": own.name,
        "credentials": entries,
        "switch_at_s": own.switch_at_s,
    }
    text = json.dumps(value, indent=1, sort_keys=True).encode("ascii")
    publish_private(credentials_path(home, own.role), text, keep_existing=keep_existing)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror or error}") from error


def _from_json(value: Any, role: Role, node_key: NodeKey) -> OwnCredentials:
    fields = Fields(value, "credentials", {"version", "name", "credentials", "switch_at_s"}, CREDENTIALS_VERSION)
    entries = fields["credentials"]
    if not isinstance(entries, list) or not 1 <= len(entries) <= 2:
        raise PairingError("credentials is not a list of one or two")
    switch_at_s = fields.time("switch_at_s")
    if (len(entries) == 2) != (switch_at_s is not None):
        raise PairingError("two credentials, and only two, need the time of the switch")
    credentials = tuple(_credential(entry, node_key.public_bytes) for entry in entries)
    return OwnCredentials(role, fields.text("name", NAME), node_key, credentials, switch_at_s)


def _credential(value: Any, node_key: bytes) -> Credential:
    fields = Fields(value, "credential", {"key_pem", "der", "binding"})
    key_pem = fields.text("key_pem", KEY_PEM).encode("ascii")
    certificate = read_certificate(fields, node_key)
    key = _private_key(key_pem)
    if key.public_key() != certificate.x509.public_key():
        raise PairingError("the private key is not the certificate's")
    return Credential(key_pem, certificate)


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise PairingError("the private key is damaged") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PairingError("the private key is not of P-256")
    return key
