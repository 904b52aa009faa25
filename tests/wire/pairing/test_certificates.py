from __future__ import annotations

import datetime as dt
import hashlib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID
from paired_homes import NOW_S, YEAR_S

from muser_wire.auth import NodeKey
from muser_wire.pairing.certificates import (
    BoundCertificate,
    check_clocks,
    check_time,
    fingerprint,
    issue,
    verify,
)
from muser_wire.pairing.errors import ClockError, PairingError

KEY = NodeKey(Ed25519PrivateKey.generate())
DAY_S = 86_400


def foreign(
    *,
    curve: ec.EllipticCurve | None = None,
    name: str = "muser-node",
    years: int = 5,
    issuer: ec.EllipticCurvePrivateKey | None = None,
    subject: str = "",
) -> BoundCertificate:
    """A certificate that differs from a node's in one point, bound by KEY all the same."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    point = key.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    common = subject or "muser-node " + hashlib.sha256(point).hexdigest()[:32]
    names = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    begins = dt.datetime.fromtimestamp(NOW_S, dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(names)
        .issuer_name(names)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begins)
        .not_valid_after(begins + dt.timedelta(days=365 * years))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(issuer or key, hashes.SHA256())
    )
    return bound(certificate.public_bytes(serialization.Encoding.DER))


def bound(der: bytes) -> BoundCertificate:
    return BoundCertificate(der, KEY.sign(b"muser v1 certificate" + der))


def test_a_certificate_is_bound_to_its_node_key() -> None:
    certificate = issue(KEY, NOW_S).certificate
    verify(certificate, KEY.public_bytes)
    Ed25519PublicKey.from_public_bytes(KEY.public_bytes).verify(
        certificate.binding, b"muser v1 certificate" + certificate.der
    )
    with pytest.raises(PairingError, match="not bound by the node key"):
        verify(certificate, NodeKey(Ed25519PrivateKey.generate()).public_bytes)


def test_a_certificate_is_p256_self_signed_and_for_five_years_less_no_day() -> None:
    parsed = issue(KEY, NOW_S).certificate.x509
    key = parsed.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    parsed.verify_directly_issued_by(parsed)
    assert parsed.not_valid_before_utc.timestamp() == NOW_S - DAY_S
    assert (parsed.not_valid_after_utc - parsed.not_valid_before_utc).days == 5 * 365


@pytest.mark.parametrize(
    ("certificate", "reason"),
    [
        (foreign(curve=ec.SECP384R1()), "not of P-256"),
        (foreign(name="example.org"), "not for the name muser-node"),
        (foreign(subject="muser-node of another"), "subject is not its key's"),
        (foreign(years=6), "more than 1825 days"),
        (foreign(issuer=ec.generate_private_key(ec.SECP256R1())), "self-signed"),
        (bound(b"not DER"), "damaged"),
        (bound(b"0" * 2049), "at most 2048 bytes"),
    ],
)
def test_other_certificates_are_refused_although_bound(certificate: BoundCertificate, reason: str) -> None:
    with pytest.raises(PairingError, match=reason):
        verify(certificate, KEY.public_bytes)


def test_every_changed_byte_is_noticed() -> None:
    certificate = issue(KEY, NOW_S).certificate
    for at in range(0, len(certificate.der), 7):
        der = bytearray(certificate.der)
        der[at] ^= 1
        with pytest.raises(PairingError):
            verify(BoundCertificate(bytes(der), certificate.binding), KEY.public_bytes)


def test_a_clock_off_by_a_year_is_named_as_a_clock() -> None:
    certificate = issue(KEY, NOW_S).certificate
    with pytest.raises(ClockError, match=r"this node's certificate is valid from 2027-01-14, but .*clock says 2026-01"):
        check_time(certificate, NOW_S - YEAR_S, "this node's")
    check_time(certificate, NOW_S + YEAR_S, "this node's")


def test_an_expired_certificate_is_named_with_both_dates() -> None:
    certificate = issue(KEY, NOW_S).certificate
    with pytest.raises(
        ClockError, match=r"the peer's certificate expired on 2032-01-13; .*clock says 2033.*muser pair rotate"
    ):
        check_time(certificate, NOW_S + 6 * YEAR_S, "the peer's")


def test_clocks_may_differ_by_a_day() -> None:
    certificate = issue(KEY, NOW_S).certificate
    check_time(certificate, NOW_S - DAY_S, "the peer's")
    check_clocks(NOW_S, NOW_S + DAY_S)
    with pytest.raises(ClockError, match=r"clocks of the two machines differ: 2027-01-15 08:00 UTC here, 2028-01-15"):
        check_clocks(NOW_S, NOW_S + YEAR_S)


def test_a_fingerprint_is_the_start_of_sha256_over_the_node_key() -> None:
    assert fingerprint(KEY.public_bytes) == hashlib.sha256(KEY.public_bytes).hexdigest()[:32]
