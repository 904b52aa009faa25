"""Which decode node a command talks to, what it shows, whom it trusts: flags, and the endpoint that they describe."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from muser_wire.cli.ask import AskFailed, Endpoint
from muser_wire.private_files import read_private

DEFAULT_PORT = 4949
KEY_VARIABLE = "MUSER_API_KEY_FILE"
MAX_KEYS_NBYTES = 64 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"HTTP port on loopback (default: {DEFAULT_PORT})"
    )
    where.add_argument("--url", help="where else the node is, such as https://mac.local:4949")
    parser.add_argument(
        "--api-key-file", type=Path, help=f"private file whose first key is shown (default: {KEY_VARIABLE}'s)"
    )
    parser.add_argument(
        "--tls-cert", type=Path, help="the node's own certificate, http.crt in its MUSER_HOME (default: the system's)"
    )


def endpoint(arguments: argparse.Namespace) -> Endpoint:
    """Return the endpoint that the flags describe; nothing is sent yet.

    Raises:
        AskFailed: the address is none, or the certificate cannot be read.
        KeyFileError: others can read the file of keys, or it cannot be read.
    """
    key_file = arguments.api_key_file or os.environ.get(KEY_VARIABLE)
    key = None if not key_file else first_key(Path(key_file))
    if arguments.url is None:
        tls = _trusting(arguments.tls_cert) if arguments.tls_cert else None
        return Endpoint(arguments.port, key=key, tls=tls)
    host, port, secure = _parts(arguments.url)
    if arguments.tls_cert and not secure:
        raise AskFailed(f"--tls-cert needs an address with https, not {arguments.url}")
    return Endpoint(port, host, key, _trusting(arguments.tls_cert) if secure else None)


def first_key(path: Path) -> str:
    """Return the first key of a private file of keys.

    Raises:
        AskFailed: it has none.
        KeyFileError: others can read it, or it cannot be read.
    """
    lines = read_private(path, MAX_KEYS_NBYTES).decode("ascii", "replace").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise AskFailed(f"{path} has no key")
    return keys[0]


def _parts(url: str) -> tuple[str, int, bool]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AskFailed(f"--url {url}: {error}") from error
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/"):
        raise AskFailed(f"--url {url} is no address such as https://mac.local:4949")
    return host, port or DEFAULT_PORT, parts.scheme == "https"


def _trusting(certificate: Path | None) -> ssl.SSLContext:
    """Return a context that trusts one certificate alone, or without one whom the system trusts."""
    try:
        return ssl.create_default_context(cafile=certificate)
    except (OSError, ssl.SSLError) as error:
        raise AskFailed(f"--tls-cert {certificate} cannot be used: {error}") from error
