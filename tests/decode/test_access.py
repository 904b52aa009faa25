from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from muser_decode.access import AccessConfig, AccessError, add_arguments, from_arguments


def access(*flags: str, host: str = "192.168.1.5") -> AccessConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    add_arguments(parser.add_argument_group("access"))
    return from_arguments(parser.parse_args(["--host", host, *flags]))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert access(host=host).api_key_file is None
    assert access("--api-key-file", "k", host=host).api_key_file == Path("k")


@pytest.mark.parametrize("host", ["192.168.1.5", "0.0.0.0", "::", "mac.local", ""])
def test_an_open_address_without_a_key_is_refused_by_name(host: str) -> None:
    with pytest.raises(AccessError, match=f"--host {host} is not a loopback address: it needs --api-key-file"):
        access("--tls-self-signed", host=host)


def test_an_open_address_without_tls_is_refused_unless_told_otherwise() -> None:
    with pytest.raises(AccessError, match="it needs TLS, by --tls-cert and --tls-key or by --tls-self-signed"):
        access("--api-key-file", "k")
    for flags in (["--tls-self-signed"], ["--tls-cert", "c", "--tls-key", "k"]):
        assert access("--api-key-file", "k", *flags).has_tls
    assert not access("--api-key-file", "k", "--http-plaintext").has_tls


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tls-cert", "c"], "--tls-cert and --tls-key belong together"),
        (["--tls-key", "c"], "--tls-cert and --tls-key belong together"),
        (["--tls-cert", "c", "--tls-key", "k", "--tls-self-signed"], "give one of them"),
        (["--http-plaintext", "--tls-self-signed"], "--http-plaintext says no TLS"),
    ],
)
def test_flags_that_do_not_fit_together_are_named(flags: list[str], problem: str) -> None:
    with pytest.raises(AccessError, match=problem):
        access(*flags, host="127.0.0.1")
