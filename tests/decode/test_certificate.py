from __future__ import annotations

import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from muser_decode.certificate import Certificate, CertificateError, issue, own_certificate
from muser_wire.private_files import KeyFileError

NAMES = ["127.0.0.1", "::1", "localhost", "mac.local"]
DAY_S = 86_400
NOW_S = time.time()


def pair(folder: Path, name: str = "http", now_s: float = NOW_S) -> tuple[Path, Path]:
    key_pem, certificate_pem = issue(NAMES, now_s)
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    cert.write_bytes(certificate_pem)
    key.write_bytes(key_pem)
    key.chmod(0o600)
    return cert, key


def shown(certificate: Certificate, trusted: Path, name: str, strict: bool = True) -> bytes:
    """Shake hands as a client that trusts one file and wants one name; return the certificate that was shown."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certificate.cert_file, certificate.key_file)
    certificate.serve_latest(server_context)
    client_context = ssl.create_default_context(cafile=trusted)
    if strict:
        client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server_context.wrap_socket(theirs, server_side=True) as connection:
                connection.recv(1)
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_context.wrap_socket(ours, server_hostname=name) as connection:
            der = connection.getpeercert(binary_form=True)
            assert der is not None
            return der
    finally:
        ours.close()
        thread.join(10)


def der_of(path: Path) -> bytes:
    return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize("name", NAMES)
def test_an_own_certificate_is_taken_by_a_strict_client_that_trusts_it(tmp_path: Path, name: str) -> None:
    certificate = own_certificate(tmp_path, NAMES, NOW_S)
    assert shown(certificate, tmp_path / "http.crt", name) == der_of(tmp_path / "http.crt")


def test_another_name_is_refused_by_the_client(tmp_path: Path) -> None:
    certificate = own_certificate(tmp_path, NAMES, NOW_S)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        shown(certificate, tmp_path / "http.crt", "other.local")


def test_an_own_certificate_can_sign_no_other(tmp_path: Path) -> None:
    own_certificate(tmp_path, NAMES, NOW_S)
    made = x509.load_pem_x509_certificate((tmp_path / "http.crt").read_bytes())
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    # Apple's systems take none that is valid for longer.
    assert (made.not_valid_after_utc - made.not_valid_before_utc).days <= 825


def test_an_own_certificate_is_kept_until_its_names_or_its_time_change(tmp_path: Path) -> None:
    own_certificate(tmp_path, NAMES, NOW_S)
    key_file = tmp_path / "keys" / "http.pem"
    assert key_file.stat().st_mode & 0o777 == 0o600
    first = key_file.read_bytes()
    own_certificate(tmp_path, NAMES, NOW_S + 700 * DAY_S)
    assert key_file.read_bytes() == first
    own_certificate(tmp_path, NAMES, NOW_S + 750 * DAY_S)
    second = key_file.read_bytes()
    assert second != first
    own_certificate(tmp_path, [*NAMES, "another"], NOW_S + 750 * DAY_S)
    assert key_file.read_bytes() != second


def test_a_damaged_own_certificate_is_made_anew_and_a_readable_one_is_refused(tmp_path: Path) -> None:
    own_certificate(tmp_path, NAMES, NOW_S)
    key_file = tmp_path / "keys" / "http.pem"
    key_file.write_bytes(key_file.read_bytes()[:300])
    own_certificate(tmp_path, NAMES, NOW_S)
    key_file.chmod(0o644)
    with pytest.raises(KeyFileError, match=r"http\.pem has mode 0644"):
        own_certificate(tmp_path, NAMES, NOW_S)


def test_the_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    cert, _ = pair(tmp_path, "a")
    _, key = pair(tmp_path, "b")
    with pytest.raises(CertificateError, match=r"the key in .*b\.key is not that of the certificate in .*a\.crt"):
        Certificate(cert, key, NOW_S)


def test_a_world_readable_key_of_the_port_is_refused(tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    key.chmod(0o640)
    with pytest.raises(KeyFileError, match=r"http\.key has mode 0640"):
        Certificate(cert, key, NOW_S)


@pytest.mark.parametrize(("later_s", "what"), [(801 * DAY_S, "is valid from"), (-3 * DAY_S, "is valid from")])
def test_a_certificate_that_is_not_valid_now_is_refused_with_both_dates(
    tmp_path: Path, later_s: int, what: str
) -> None:
    cert, key = pair(tmp_path)
    with pytest.raises(CertificateError, match=what):
        Certificate(cert, key, NOW_S + later_s)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    with pytest.raises(CertificateError, match=r"gone\.crt cannot be read: No such file"):
        Certificate(tmp_path / "gone.crt", key, NOW_S)
    (tmp_path / "text.crt").write_text("nothing")
    with pytest.raises(CertificateError, match=r"text\.crt holds no certificate in PEM"):
        Certificate(tmp_path / "text.crt", key, NOW_S)
    with pytest.raises(KeyFileError, match=r"gone\.key cannot be read"):
        Certificate(cert, tmp_path / "gone.key", NOW_S)


def test_an_encrypted_key_asks_nobody_and_is_refused(tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = loaded.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    key.write_bytes(locked)
    with pytest.raises(CertificateError, match=r"the key in .*http\.key"):
        Certificate(cert, key, NOW_S)


def test_a_renewed_certificate_is_shown_to_the_next_client_and_a_bad_one_is_not(tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    certificate = Certificate(cert, key, NOW_S)
    first = der_of(cert)
    assert shown(certificate, cert, "localhost") == first
    pair(tmp_path)
    second = der_of(cert)
    assert second != first
    certificate.reload(NOW_S)
    assert shown(certificate, cert, "localhost") == second
    trusted = tmp_path / "second.crt"
    trusted.write_bytes(cert.read_bytes())
    stored = key.read_bytes()
    key.write_bytes(b"")
    with pytest.raises(CertificateError):
        certificate.reload(NOW_S)
    # A server that starts needs its files; here it has them again, and it still shows what was read last.
    key.write_bytes(stored)
    assert shown(certificate, trusted, "localhost") == second
