"""The HTTP port's certificate: one that the operator has, or one that the node makes and keeps.

Read again, it holds for the next connections; those under way keep theirs.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from muser_wire.errors import WireError
from muser_wire.private_files import publish, publish_private, read_private

MAX_PEM_NBYTES = 1 << 20
DAY = dt.timedelta(days=1)

LIFETIME = 800 * DAY
"""How long an own certificate is valid. Apple's systems take none over 825 days."""

RENEW_BEFORE = 60 * DAY
"""A start within so long of the end makes a new one."""

_log = logging.getLogger(__name__)


class CertificateError(WireError):
    """The HTTP port's certificate or its key cannot be used. The message names the file."""

    code = "http_certificate"


class Certificate:
    """A certificate and its key in two files, or in one that has both."""

    def __init__(self, cert_file: Path, key_file: Path, now_s: float) -> None:
        """Read both; `now_s` is in seconds since 1970.

        Raises:
            WireError: others can read the key, the two do not belong together, or the certificate is not valid now.
        """
        self.cert_file = cert_file
        self.key_file = key_file
        self._context = _load(cert_file, key_file, now_s)

    def reload(self, now_s: float) -> None:
        """Read both again for the connections to come; when they cannot be used, the old ones stay.

        Raises:
            WireError: as at the start.
        """
        self._context = _load(self.cert_file, self.key_file, now_s)

    def serve_latest(self, context: ssl.SSLContext) -> None:
        """Have a server's context show, at each handshake, what was read last."""

        def show(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, used: ssl.SSLContext) -> None:
            connection.context = self._context

        # Called for every handshake, with a server name or without one.
        context.sni_callback = show


def _load(cert_file: Path, key_file: Path, now_s: float) -> ssl.SSLContext:
    read_private(key_file, MAX_PEM_NBYTES)
    try:
        first = x509.load_pem_x509_certificate(cert_file.read_bytes())
    except OSError as error:
        raise CertificateError(f"{cert_file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CertificateError(f"{cert_file} holds no certificate in PEM") from error
    now = dt.datetime.fromtimestamp(now_s, dt.UTC)
    if not first.not_valid_before_utc <= now <= first.not_valid_after_utc:
        raise CertificateError(
            f"{cert_file} is valid from {first.not_valid_before_utc:%Y-%m-%d} to {first.not_valid_after_utc:%Y-%m-%d}, "
            f"and this machine's clock says {now:%Y-%m-%d}"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password given, an encrypted key would ask at the terminal.
        context.load_cert_chain(cert_file, key_file, password="")
    except (ssl.SSLError, ValueError) as error:
        raise CertificateError(f"the key in {key_file} is not that of the certificate in {cert_file}") from error
    return context


def own_certificate(home: Path, names: Sequence[str], now_s: float) -> Certificate:
    """Return the certificate that this node made for `names`, made now where there is none that still does.

    Key and certificate lie in one private file, so that the two are always of one making; a copy of the certificate
    alone, for clients, lies in `http.crt`.

    Raises:
        WireError: it cannot be written, or others could have read it.
    """
    path = home / "keys" / "http.pem"
    if not (path.exists() and _does(path, names, now_s)):
        key_pem, certificate_pem = issue(names, now_s)
        publish_private(path, key_pem + certificate_pem)
        _log.info("http_certificate_made names=%s", ",".join(names))
    certificate = x509.load_pem_x509_certificate(read_private(path, MAX_PEM_NBYTES))
    try:
        publish(home / "http.crt", certificate.public_bytes(serialization.Encoding.PEM))
    except OSError as error:
        raise CertificateError(f"{home / 'http.crt'} cannot be written: {error.strerror or error}") from error
    _log.info("http_certificate sha256=%s file=%s", certificate.fingerprint(hashes.SHA256()).hex(), home / "http.crt")
    return Certificate(path, path, now_s)


def _does(path: Path, names: Sequence[str], now_s: float) -> bool:
    """Say whether the certificate in a file has these names and time left."""
    try:
        certificate = x509.load_pem_x509_certificate(read_private(path, MAX_PEM_NBYTES))
        held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    now = dt.datetime.fromtimestamp(now_s, dt.UTC)
    in_time = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc - RENEW_BEFORE
    return in_time and set(held) == set(_general(names))


def issue(names: Sequence[str], now_s: float) -> tuple[bytes, bytes]:
    """Return a fresh P-256 key and a self-signed certificate for `names` and addresses, both in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    begins = dt.datetime.fromtimestamp(int(now_s), dt.UTC) - DAY
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Muser")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + LIFETIME)
        .add_extension(x509.SubjectAlternativeName(_general(names)), critical=False)
        # A client that trusts it trusts this name alone: nothing can be signed with its key.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem, certificate.public_bytes(serialization.Encoding.PEM)


def _general(names: Sequence[str]) -> list[x509.GeneralName]:
    """Return names as a certificate has them: addresses are not names."""
    general: list[x509.GeneralName] = []
    for name in names:
        try:
            general.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            general.append(x509.DNSName(name))
    return general
