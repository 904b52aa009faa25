from __future__ import annotations

import time
from pathlib import Path

import pytest

from muser_decode.access import AccessConfig
from muser_decode.entrance import allowed_names, open_entrance
from muser_wire.private_files import KeyFileError

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def config(host: str, *allowed: str, key_file: Path | None = None, self_signed: bool = False) -> AccessConfig:
    return AccessConfig(host, key_file, None, None, self_signed, http_plaintext=False, allowed_hosts=allowed)


def test_on_loopback_only_its_names_and_those_that_were_named_are_taken() -> None:
    assert allowed_names(config("127.0.0.1"), "mac") == LOOPBACK
    assert allowed_names(config("::1", "proxy.example"), "mac") == LOOPBACK | {"proxy.example"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_on_every_address_the_machine_s_names_are_taken(host: str) -> None:
    assert allowed_names(config(host, "x"), "Mac.lan") == LOOPBACK | {"mac.lan", "mac.local", "x"}


def test_on_one_address_it_is_a_name_too() -> None:
    assert allowed_names(config("192.168.1.5"), "mac") == LOOPBACK | {"192.168.1.5", "mac", "mac.local"}


def test_without_flags_there_is_neither_key_nor_certificate(tmp_path: Path) -> None:
    entrance = open_entrance(config("127.0.0.1"), tmp_path, time.time())
    assert (entrance.keys, entrance.certificate) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_what_the_flags_name_is_read(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.txt"
    key_file.write_text("abcdefghij0123456789")
    key_file.chmod(0o644)
    with pytest.raises(KeyFileError, match="mode 0644"):
        open_entrance(config("127.0.0.1", key_file=key_file), tmp_path, time.time())
    key_file.chmod(0o600)
    entrance = open_entrance(config("127.0.0.1", key_file=key_file, self_signed=True), tmp_path, time.time())
    assert entrance.keys is not None
    assert entrance.keys.admit("abcdefghij0123456789")
    assert entrance.certificate is not None
    assert (tmp_path / "http.crt").exists()
