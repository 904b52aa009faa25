from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from paired_homes import DAY_S, NOW_S, YEAR_S, own

from muser_wire.pairing.card import Role
from muser_wire.pairing.certificates import check_time
from muser_wire.pairing.credentials import (
    OwnCredentials,
    credentials_path,
    existing_roles,
    load_credentials,
    load_or_create_credentials,
    node_key_path,
    rotate,
    switch,
)
from muser_wire.pairing.errors import PairingError
from muser_wire.private_files import KeyFileError

WEEK_S = 7 * DAY_S


def test_credentials_are_made_once_in_private_files(tmp_path: Path) -> None:
    made = own(tmp_path, Role.PREFILL, NOW_S)
    again = own(tmp_path, Role.PREFILL, NOW_S + 5)
    assert again.card() == made.card()
    assert existing_roles(tmp_path) == (Role.PREFILL,)
    files = sorted((tmp_path / "keys").iterdir())
    assert [path.name for path in files] == ["prefill.certificates.json", "prefill.ed25519"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_of_several_commands_that_make_them_at_once_all_have_the_same(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def make() -> OwnCredentials:
        together.wait(30)
        return own(tmp_path, Role.PREFILL, NOW_S)

    with ThreadPoolExecutor(4) as pool:
        made = [one.result(30).card() for one in [pool.submit(make) for _ in range(4)]]
    assert made == [load_credentials(tmp_path, Role.PREFILL).card()] * 4


def test_the_card_names_the_node_key_that_signs_seals(tmp_path: Path) -> None:
    made = own(tmp_path, Role.PREFILL, NOW_S)
    assert made.card().node_key == made.node_key.public_bytes
    assert (made.card().role, made.card().name) == (Role.PREFILL, "prefill-box")


def test_a_crash_between_node_key_and_certificate_is_read_as_not_paired(tmp_path: Path) -> None:
    own(tmp_path, Role.DECODE, NOW_S)
    credentials_path(tmp_path, Role.DECODE).unlink()
    with pytest.raises(PairingError, match=r"no certificate as a decode node.*muser pair"):
        load_credentials(tmp_path, Role.DECODE)
    assert own(tmp_path, Role.DECODE, NOW_S).role is Role.DECODE


@pytest.mark.parametrize("name", ["prefill.certificates.json", "prefill.ed25519"])
def test_a_world_readable_key_is_refused(tmp_path: Path, name: str) -> None:
    own(tmp_path, Role.PREFILL, NOW_S)
    (tmp_path / "keys" / name).chmod(0o644)
    with pytest.raises(KeyFileError, match="mode 0644"):
        load_credentials(tmp_path, Role.PREFILL)


def test_a_half_written_file_is_refused_at_every_length(tmp_path: Path) -> None:
    own(tmp_path, Role.PREFILL, NOW_S)
    path = credentials_path(tmp_path, Role.PREFILL)
    whole = path.read_bytes()
    for size in range(0, len(whole), 11):
        path.write_bytes(whole[:size])
        with pytest.raises(PairingError, match="move it away and pair again"):
            load_credentials(tmp_path, Role.PREFILL)


def test_certificates_of_another_node_key_are_refused(tmp_path: Path) -> None:
    own(tmp_path, Role.PREFILL, NOW_S)
    node_key_path(tmp_path, Role.PREFILL).unlink()
    with pytest.raises(PairingError, match="not bound by the node key"):
        load_credentials(tmp_path, Role.PREFILL)


def test_a_private_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    own(tmp_path / "a", Role.PREFILL, NOW_S)
    own(tmp_path / "b", Role.PREFILL, NOW_S)
    path = credentials_path(tmp_path / "a", Role.PREFILL)
    ours, theirs = (json.loads(credentials_path(tmp_path / name, Role.PREFILL).read_text()) for name in "ab")
    ours["credentials"][0]["key_pem"] = theirs["credentials"][0]["key_pem"]
    path.write_text(json.dumps(ours))
    with pytest.raises(PairingError, match="private key is not the certificate's"):
        load_credentials(tmp_path / "a", Role.PREFILL)


def test_a_name_that_a_terminal_would_act_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PairingError, match="is no name"):
        load_or_create_credentials(tmp_path, Role.PREFILL, "a\nb", NOW_S)


def test_a_rotation_shows_the_old_certificate_until_its_switch(tmp_path: Path) -> None:
    old = own(tmp_path, Role.PREFILL, NOW_S).presented(NOW_S)
    rotated = rotate(tmp_path, Role.PREFILL, NOW_S)
    assert load_credentials(tmp_path, Role.PREFILL).card() == rotated.card()
    assert rotated.presented(NOW_S + WEEK_S - 1) == old
    new = rotated.presented(NOW_S + WEEK_S)
    assert new not in (None, old)
    first, second = rotated.card().certificates
    # A day longer than it is shown: that is how far two clocks may be apart.
    assert (first.certificate, first.accepted_until_s) == (old.certificate, NOW_S + WEEK_S + DAY_S)
    assert (second.certificate, second.accepted_until_s) == (new.certificate, None)


def test_a_second_rotation_waits_for_the_first_and_drops_the_oldest(tmp_path: Path) -> None:
    own(tmp_path, Role.PREFILL, NOW_S)
    first = rotate(tmp_path, Role.PREFILL, NOW_S)
    with pytest.raises(PairingError, match=r"under way until 2027-01-22.*--switch"):
        rotate(tmp_path, Role.PREFILL, NOW_S + 1)
    second = rotate(tmp_path, Role.PREFILL, NOW_S + WEEK_S)
    assert second.credentials[0] == first.credentials[1]
    assert len(second.credentials) == 2


def test_an_expired_certificate_is_replaced_at_once_and_one_that_is_not_valid_yet_is_kept(tmp_path: Path) -> None:
    before = own(tmp_path, Role.PREFILL, NOW_S)
    late = NOW_S + 6 * YEAR_S
    rotated = rotate(tmp_path, Role.PREFILL, late)
    assert load_credentials(tmp_path, Role.PREFILL).credentials == rotated.credentials
    assert rotated.credentials != before.credentials
    check_time(rotated.presented(late).certificate, late, "its")
    assert (len(rotated.card().certificates), rotated.switch_at_s) == (1, None)
    # By a clock that lost its time nothing is thrown away.
    assert rotate(tmp_path, Role.PREFILL, NOW_S).credentials[0] == rotated.credentials[0]


def test_the_new_certificate_takes_over_before_the_old_one_ends(tmp_path: Path) -> None:
    own(tmp_path, Role.PREFILL, NOW_S)
    # Valid for 1,825 days from a day before it was made.
    ends_s = NOW_S + 1824 * DAY_S
    assert rotate(tmp_path, Role.PREFILL, ends_s - 2 * DAY_S).switch_at_s == ends_s


def test_a_folder_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    home = tmp_path / ("x" * 300)
    for look in (lambda: existing_roles(home), lambda: load_credentials(home, Role.PREFILL)):
        with pytest.raises(KeyFileError, match=r"prefill\.certificates\.json cannot be read: File name too long"):
            look()


def test_a_switch_ends_the_overlap(tmp_path: Path) -> None:
    own(tmp_path, Role.PREFILL, NOW_S)
    with pytest.raises(PairingError, match="no rotation is under way"):
        switch(tmp_path, Role.PREFILL, NOW_S)
    rotated = rotate(tmp_path, Role.PREFILL, NOW_S)
    assert switch(tmp_path, Role.PREFILL, NOW_S + 5).presented(NOW_S + 5) == rotated.credentials[1]
