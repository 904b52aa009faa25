from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from muser_wire.cli.ask import AskFailed, Endpoint
from muser_wire.cli.endpoint import add_arguments, endpoint
from muser_wire.private_files import KeyFileError


def made(*flags: str) -> Endpoint:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return endpoint(parser.parse_args(flags))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSER_API_KEY_FILE", raising=False)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# mine\n\n first-key \nsecond-key\n")
    path.chmod(0o600)
    return path


def test_without_flags_it_is_this_machine_s_node() -> None:
    assert (made().url, made().key) == ("http://127.0.0.1:4949", None)
    assert made("--port", "80").url == "http://127.0.0.1:80"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://mac.local", "http://mac.local:4949"),
        ("https://mac.local:80/", "https://mac.local:80"),
        ("https://[fd00::1]:1", "https://[fd00::1]:1"),
    ],
)
def test_an_address_is_scheme_host_and_port(url: str, shown: str) -> None:
    assert made("--url", url).url == shown


@pytest.mark.parametrize("url", ["mac.local", "ftp://x", "http://", "http://x/v1", "http://x:99999", "http://[x"])
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(AskFailed, match="--url"):
        made("--url", url)


def test_the_first_key_of_a_private_file_is_shown(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made("--api-key-file", str(key_file)).key == "first-key"
    monkeypatch.setenv("MUSER_API_KEY_FILE", str(key_file))
    assert made().key == "first-key"
    assert "first-key" not in repr(made())


def test_a_key_file_that_others_can_read_or_that_is_empty_is_refused(key_file: Path) -> None:
    key_file.chmod(0o644)
    with pytest.raises(KeyFileError, match="mode 0644"):
        made("--api-key-file", str(key_file))
    key_file.chmod(0o600)
    key_file.write_text("# nothing\n")
    with pytest.raises(AskFailed, match="has no key"):
        made("--api-key-file", str(key_file))


def test_a_certificate_that_cannot_be_used_is_named(key_file: Path) -> None:
    for path in (key_file, key_file.with_name("gone")):
        with pytest.raises(AskFailed, match=f"--tls-cert {path} cannot be used"):
            made("--tls-cert", str(path))
    with pytest.raises(AskFailed, match="needs an address with https"):
        made("--url", "http://mac.local", "--tls-cert", str(key_file))
