"""A node's TLS certificate: self-signed, P-256, bound to the node's Ed25519 key by a signature beside it [9.2].

TLS takes the certificate as it is (gRPC's handshake refuses Ed25519 ones); the binding lets a peer know
by one fingerprint, the node key's, whoever shows any of its certificates. Every function takes the time.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from muser_wire.auth import NodeKey
from muser_wire.pairing.errors import ClockError, PairingError

DAY_S = 86_400

LIFETIME_S = 5 * 365 * DAY_S
"""How long a certificate is valid: longer than most machines serve, short enough that a lost key ends."""

CLOCK_TOLERANCE_S = DAY_S
"""How far two clocks may be apart. Certificates begin this long before they are made."""

TLS_NAME = "muser-node"
"""The DNS name in every certificate. Peers are told apart by their keys, so it need not be the host's."""

MAX_DER_NBYTES = 2048
BINDING_NBYTES = 64
BINDING_LABEL = b"muser v1 certificate"
FINGERPRINT_DIGITS = 32
"""Hex digits shown of a SHA-256: 128 bits, more than anybody can search, few enough to compare by eye."""


@dataclass(frozen=True)
class BoundCertificate:
    """A certificate in DER, and the node key's signature over it."""

    der: bytes
    binding: bytes

    @property
    def x509(self) -> x509.Certificate:
        """The certificate, parsed."""
        return x509.load_der_x509_certificate(self.der)

    @property
    def pem(self) -> bytes:
        """The certificate as TLS libraries take it."""
        return self.x509.public_bytes(serialization.Encoding.PEM)

    @property
    def digest(self) -> bytes:
        """SHA-256 over the DER: what the certificate is told by on a connection."""
        return hashlib.sha256(self.der).digest()


@dataclass(frozen=True)
class Credential:
    """A certificate and its private key, PKCS #8 in PEM."""

    key_pem: bytes
    certificate: BoundCertificate


def fingerprint(node_key: bytes) -> str:
    """Return what names a node to people and in logs: the start of SHA-256 over its Ed25519 public key.

    >>> fingerprint(bytes(32))
    '66687aadf862bd776c8fc18b8e9f8e20'
    """
    return hashlib.sha256(node_key).hexdigest()[:FINGERPRINT_DIGITS]


def show_fingerprint(text: str) -> str:
    """Return a fingerprint in groups of four digits, as people compare it.

    >>> show_fingerprint("66687aadf862")
    '6668 7aad f862'
    """
    return " ".join(text[at : at + 4] for at in range(0, len(text), 4))


def issue(node_key: NodeKey, now_s: float) -> Credential:
    """Return a fresh key and its certificate, valid from a clock tolerance before `now_s` for LIFETIME_S."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject(key.public_key())
    begins = dt.datetime.fromtimestamp(int(now_s) - CLOCK_TOLERANCE_S, dt.UTC)
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + dt.timedelta(seconds=LIFETIME_S))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    return Credential(key_pem, BoundCertificate(der, node_key.sign(BINDING_LABEL + der)))


def _subject(key: ec.EllipticCurvePublicKey) -> x509.Name:
    """Return the subject for a key. TLS libraries look a pinned certificate up by it, so no two may share one."""
    point = key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    text = f"{TLS_NAME} {hashlib.sha256(point).hexdigest()[:FINGERPRINT_DIGITS]}"
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def verify(certificate: BoundCertificate, node_key: bytes) -> None:
    """Check that this is such a certificate and that the owner of `node_key` bound it. Time is not looked at.

    Raises:
        PairingError: it is not; the message says in what.
    """
    if len(certificate.der) > MAX_DER_NBYTES:
        raise PairingError(f"a certificate has at most {MAX_DER_NBYTES} bytes, this one {len(certificate.der)}")
    try:
        Ed25519PublicKey.from_public_bytes(node_key).verify(certificate.binding, BINDING_LABEL + certificate.der)
    except (InvalidSignature, ValueError) as error:
        raise PairingError("the certificate is not bound by the node key beside it") from error
    _verify_form(certificate)


def _verify_form(certificate: BoundCertificate) -> None:
    try:
        parsed = certificate.x509
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        parsed.verify_directly_issued_by(parsed)
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise PairingError("the certificate is damaged, or not a self-signed certificate of a node") from error
    key = parsed.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PairingError("the certificate's key is not of P-256")
    if parsed.subject != _subject(key):
        raise PairingError("the certificate's subject is not its key's")
    if names.get_values_for_type(x509.DNSName) != [TLS_NAME]:
        raise PairingError(f"the certificate is not for the name {TLS_NAME}")
    if _seconds(parsed.not_valid_after_utc) - _seconds(parsed.not_valid_before_utc) > LIFETIME_S:
        raise PairingError(f"the certificate is valid for more than {LIFETIME_S // DAY_S} days")


def check_time(certificate: BoundCertificate, now_s: float, whose: str) -> None:
    """Check that a certificate is valid now. `whose` begins the message: "this node's", "the peer's".

    Raises:
        ClockError: it is not valid yet, or no longer.
    """
    parsed = certificate.x509
    begins, ends = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    clock = f"this machine's clock says {day(now_s)}"
    if now_s < _seconds(begins):
        raise ClockError(
            f"{whose} certificate is valid from {begins:%Y-%m-%d}, but {clock}: one machine's clock is wrong"
        )
    if now_s > _seconds(ends):
        raise ClockError(
            f"{whose} certificate expired on {ends:%Y-%m-%d}; {clock}. If the clock is right: `muser pair rotate` on "
            f"that node, and import its new card here"
        )


def check_clocks(here_s: float, there_s: float) -> None:
    """Compare two machines' times, in seconds since 1970.

    Raises:
        ClockError: they differ by more than CLOCK_TOLERANCE_S.
    """
    if abs(here_s - there_s) > CLOCK_TOLERANCE_S:
        raise ClockError(
            f"the clocks of the two machines differ: {day(here_s)} here, {day(there_s)} at the peer. Set the wrong one"
        )


def day(moment_s: float) -> str:
    """Return a time as people read it, in UTC, to the minute."""
    return f"{dt.datetime.fromtimestamp(moment_s, dt.UTC):%Y-%m-%d %H:%M} UTC"


def _seconds(moment: dt.datetime) -> int:
    return int(moment.timestamp())
