"""The disk is full while keys, pairings, units and ready files are written: named, and nothing half-written stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import full_disk
import pytest
from paired_homes import own

from muser_wire.cli.__main__ import main
from muser_wire.pairing.card import Role
from muser_wire.pairing.credentials import rotate
from muser_wire.pairing.store import PeerStore
from muser_wire.private_files import KeyFileError
from muser_wire.services.errors import ServiceError
from muser_wire.services.launchd import Launchd
from muser_wire.services.systemd import Systemd

NO_SPACE = "No space left on device"
START_S = 90.0

Muser = Callable[..., tuple[int, str]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with full_disk.mounted(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def muser(disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Muser:
    """`muser pair` of a machine whose MUSER_HOME is on that disk."""
    monkeypatch.setenv("MUSER_HOME", str(disk))

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["pair", *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_a_full_disk_while_keys_are_made(disk: Path, muser: Muser) -> None:
    full_disk.fill(disk)
    status, out = muser("export", "--role", "prefill")
    assert status == 2
    assert NO_SPACE in out
    assert full_disk.left_on(disk) == []
    full_disk.make_room(disk)
    assert muser("export", "--role", "prefill")[0] == 0


def test_a_full_disk_while_a_peer_is_stored_leaves_no_peer(disk: Path, tmp_path: Path, muser: Muser) -> None:
    own(disk, Role.DECODE)
    before = full_disk.left_on(disk)
    (tmp_path / "p.card").write_bytes(own(tmp_path / "p", Role.PREFILL).card().encode())
    full_disk.fill(disk)
    status, out = muser("import", str(tmp_path / "p.card"))
    assert status == 2
    assert NO_SPACE in out
    assert "Trusted" not in out
    assert full_disk.left_on(disk) == before
    assert PeerStore(disk).read().peers == ()
    full_disk.make_room(disk)
    assert muser("import", str(tmp_path / "p.card"))[0] == 0


def test_a_full_disk_while_a_peer_is_revoked_leaves_it_as_it_was_and_says_so(
    disk: Path, tmp_path: Path, muser: Muser
) -> None:
    card = own(tmp_path / "p", Role.PREFILL).card()
    (tmp_path / "p.card").write_bytes(card.encode())
    muser("import", str(tmp_path / "p.card"))
    full_disk.fill(disk)
    status, out = muser("revoke", card.fingerprint)
    assert status == 2
    assert NO_SPACE in out
    (peer,) = PeerStore(disk).read().peers
    assert peer.revoked_at_s is None


def test_a_full_disk_while_a_certificate_is_rotated_keeps_the_old_one(disk: Path) -> None:
    before = own(disk, Role.PREFILL).card()
    files = full_disk.left_on(disk)
    full_disk.fill(disk)
    with pytest.raises(KeyFileError, match=NO_SPACE):
        rotate(disk, Role.PREFILL, time.time())
    assert own(disk, Role.PREFILL).card() == before
    assert full_disk.left_on(disk) == files


def test_a_full_disk_while_a_card_is_exported_keeps_what_was_there(
    disk: Path, tmp_path: Path, muser: Muser, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "old.card").write_text("old")
    full_disk.fill(disk)
    monkeypatch.setenv("MUSER_HOME", str(tmp_path / "home"))
    for name in ("old.card", "new.card"):
        status, out = muser("export", str(disk / name), "--role", "decode")
        assert status == 2
        assert f"{name} cannot be written: {NO_SPACE}" in out
    assert full_disk.left_on(disk) == ["old.card"]
    assert (disk / "old.card").read_text() == "old"


def test_a_full_disk_while_a_service_is_installed(disk: Path) -> None:
    def tool(command: object) -> str:
        raise AssertionError(f"{command}: nothing is there to be enabled")

    full_disk.fill(disk)
    for service in (Systemd(disk, tool), Launchd(disk, 501, tool)):
        with pytest.raises(ServiceError, match=NO_SPACE):
            service.install("[Unit]\n", replace=False)
    assert full_disk.left_on(disk) == []


@pytest.mark.parametrize("module", ["muser_prefill", "muser_decode"])
def test_a_full_disk_while_the_ready_file_is_written_ends_the_node_by_name(
    module: str, disk: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    full_disk.fill(disk)
    ports = ["--control-port", "0", "--data-port", "0"] if module == "muser_prefill" else ["--port", "0"]
    ready = disk / "ready.json"
    command = [sys.executable, "-m", module, "serve", "--model", str(tiny_llama), *ports, "--ready-file", str(ready)]
    done = subprocess.run(
        [*command, "--config", "none", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
        env={**os.environ, "MUSER_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 2, done.stderr
    assert f"--ready-file {ready} cannot be written: {NO_SPACE}" in done.stderr
    assert "Traceback" not in done.stderr
    assert full_disk.left_on(disk) == []


def test_a_full_disk_while_an_http_certificate_is_made(disk: Path) -> None:
    from muser_decode.certificate import own_certificate
    from muser_wire.errors import WireError

    full_disk.fill(disk)
    with pytest.raises(WireError, match=NO_SPACE):
        own_certificate(disk, ["mac.local"], time.time())
    assert full_disk.left_on(disk) == []
    full_disk.make_room(disk)
    own_certificate(disk, ["mac.local"], time.time())
    full_disk.fill(disk)
    before = (disk / "http.crt").read_bytes()
    # A file that is there takes its new content beside it first: what clients read is never half of one.
    with pytest.raises(WireError, match=NO_SPACE):
        own_certificate(disk, ["mac.local"], time.time())
    assert (disk / "http.crt").read_bytes() == before
    assert full_disk.left_on(disk) == ["http.crt", "keys/http.pem"]
