from __future__ import annotations

import json
from pathlib import Path

import pytest
from paired_homes import NOW_S, stranger, trust_card

from muser_wire import private_files as files
from muser_wire.pairing import store
from muser_wire.pairing.card import Role
from muser_wire.pairing.errors import PairingError
from muser_wire.pairing.store import PeerStore

CARD = stranger(Role.DECODE)


class Crash(BaseException):
    """The machine stops here."""


def test_a_peer_comes_back_as_it_was(tmp_path: Path) -> None:
    assert PeerStore(tmp_path).read().peers == ()
    peer = trust_card(tmp_path, CARD)
    assert PeerStore(tmp_path).read().peers == (peer,)
    assert (tmp_path / "peers").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "peers" / f"{CARD.fingerprint}.json").stat().st_mode & 0o777 == 0o600


def test_what_another_process_changes_is_seen_at_the_next_read(tmp_path: Path) -> None:
    here, there = PeerStore(tmp_path), PeerStore(tmp_path)
    assert here.read().peers == ()
    trust_card(tmp_path, CARD)
    assert here.read().peers[0].revoked_at_s is None
    there.revoke(CARD.fingerprint, NOW_S + 5)
    assert here.read().peers[0].revoked_at_s == NOW_S + 5
    (tmp_path / "peers" / f"{CARD.fingerprint}.json").chmod(0o644)
    assert here.read().peers == ()


@pytest.mark.parametrize("call", ["open", "fdopen", "fsync", "replace"])
def test_a_crash_while_a_peer_is_stored_leaves_it_unpaired_or_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def crash(*arguments: object, **options: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, crash)
        with pytest.raises(Crash):
            trust_card(tmp_path, CARD)
    contents = PeerStore(tmp_path).read()
    assert (contents.peers, contents.damaged) == ((), ())
    trust_card(tmp_path, CARD)
    assert len(PeerStore(tmp_path).read().peers) == 1


def test_a_half_written_file_is_no_peer_at_every_length_and_is_named(tmp_path: Path) -> None:
    trust_card(tmp_path, CARD)
    path = tmp_path / "peers" / f"{CARD.fingerprint}.json"
    whole = path.read_bytes().rstrip()
    for size in range(0, len(whole), 13):
        path.write_bytes(whole[:size])
        contents = PeerStore(tmp_path).read()
        assert contents.peers == ()
        assert path.name in contents.damaged[0]


def test_a_damaged_file_hides_no_other_peer_and_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trust_card(tmp_path, CARD)
    (tmp_path / "peers" / "deadbeef.json").write_text("{")
    (tmp_path / "peers" / "deadbeef.json").chmod(0o600)
    here = PeerStore(tmp_path)
    assert [peer.card for peer in here.read().peers] == [CARD]
    here.read()
    assert caplog.text.count("peer_damaged") == 1
    assert "deadbeef.json" in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version is 2"),
        ({"host": "a b"}, "peer.host"),
        ({"paired_at_s": None}, "paired_at_s is absent"),
        ({"more": 1}, "exactly the fields"),
        ({"card": stranger(Role.DECODE).to_json()}, "it is of the node"),
    ],
)
def test_a_changed_file_is_no_peer(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    trust_card(tmp_path, CARD)
    path = tmp_path / "peers" / f"{CARD.fingerprint}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    contents = PeerStore(tmp_path).read()
    assert contents.peers == ()
    assert reason in contents.damaged[0]


def test_a_world_readable_peer_file_is_no_peer(tmp_path: Path) -> None:
    trust_card(tmp_path, CARD)
    (tmp_path / "peers" / f"{CARD.fingerprint}.json").chmod(0o644)
    contents = PeerStore(tmp_path).read()
    assert contents.peers == ()
    assert "chmod 600" in contents.damaged[0]


def test_a_peer_is_named_by_the_start_of_its_fingerprint(tmp_path: Path) -> None:
    trust_card(tmp_path, CARD)
    here = PeerStore(tmp_path)
    spelled = f"{CARD.fingerprint[:4]} {CARD.fingerprint[4:8].upper()}"
    found = here.find(spelled)
    assert found is not None
    assert found.card == CARD
    assert here.find("0" * 32) is None
    with pytest.raises(PairingError, match="at least 8 digits"):
        here.find(CARD.fingerprint[:7])
    with pytest.raises(PairingError, match=r"no peer.*muser pair list"):
        here.revoke("0" * 32, NOW_S)


def test_revoking_twice_keeps_the_first_time(tmp_path: Path) -> None:
    trust_card(tmp_path, CARD)
    here = PeerStore(tmp_path)
    here.revoke(CARD.fingerprint, NOW_S + 1)
    assert here.revoke(CARD.fingerprint, NOW_S + 2).revoked_at_s == NOW_S + 1


def test_the_number_of_peers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_PEERS", 2)
    trust_card(tmp_path, CARD)
    trust_card(tmp_path, stranger(Role.DECODE))
    trust_card(tmp_path, CARD)
    with pytest.raises(PairingError, match="2 is the most"):
        trust_card(tmp_path, stranger(Role.DECODE))
