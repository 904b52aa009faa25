from __future__ import annotations

from pathlib import Path

import pytest
from paired_homes import DAY_S, NOW_S, YEAR_S, own, paired, reissue, stranger, trust_card

from muser_wire.errors import WireError
from muser_wire.pairing.card import Role
from muser_wire.pairing.credentials import rotate, switch
from muser_wire.pairing.errors import ClockError, PairingError, PeerRefused
from muser_wire.pairing.store import PeerStore
from muser_wire.pairing.trust import Trust, consumer_trust, producer_trust

WEEK_S = 7 * DAY_S


class Clock:
    def __init__(self, now_s: float = NOW_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def shown(home: Path, role: Role, now_s: float = NOW_S) -> bytes:
    return own(home, role).presented(now_s).certificate.pem


def test_paired_nodes_trust_each_others_certificates_and_no_other(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    producer = producer_trust(homes.producer, "127.0.0.2", Clock())
    consumer = consumer_trust(homes.consumer, "127.0.0.2", Clock())
    assert producer.material().trusted_pem == (shown(homes.consumer, Role.DECODE),)
    assert producer.material().certificate_pem == shown(homes.producer, Role.PREFILL)
    assert consumer.material().trusted_pem == (shown(homes.producer, Role.PREFILL),)
    assert producer.peer_of(shown(homes.consumer, Role.DECODE)) == homes.consumer_fingerprint()
    assert consumer.node_key() == own(homes.producer, Role.PREFILL).node_key.public_bytes


def test_an_unlisted_certificate_is_refused_by_name(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    producer = producer_trust(homes.producer, "127.0.0.2", Clock())
    with pytest.raises(PeerRefused, match=r"certificate [0-9a-f]{32} is not of a paired node"):
        producer.peer_of(stranger(Role.DECODE).certificates[0].certificate.pem)


def test_another_certificate_of_a_paired_node_is_refused_until_it_is_imported(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    producer = producer_trust(homes.producer, "127.0.0.2", Clock())
    swapped = reissue(homes.consumer, Role.DECODE, NOW_S)
    with pytest.raises(PeerRefused, match="not of a paired node"):
        producer.peer_of(swapped.presented(NOW_S).certificate.pem)
    trust_card(homes.producer, swapped.card())
    assert producer.peer_of(swapped.presented(NOW_S).certificate.pem) == swapped.card().fingerprint


def test_a_peer_of_the_same_role_is_not_let_in(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    other = stranger(Role.PREFILL)
    trust_card(homes.producer, other)
    producer = producer_trust(homes.producer, "127.0.0.2", Clock())
    assert len(producer.material().trusted_pem) == 1
    with pytest.raises(PeerRefused, match="not of a paired node"):
        producer.peer_of(other.certificates[0].certificate.pem)


def test_a_revoked_peer_is_refused_at_the_next_question(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    producer = producer_trust(homes.producer, "127.0.0.2", Clock())
    fingerprint = homes.consumer_fingerprint()
    producer.check_peer(fingerprint)
    PeerStore(homes.producer).revoke(fingerprint, NOW_S)
    reason = rf"the node {fingerprint} \(decode-box\) was revoked on 2027-01-15"
    for refused in (lambda: producer.check_peer(fingerprint), producer.material):
        with pytest.raises(PeerRefused, match=reason):
            refused()
    with pytest.raises(PeerRefused, match=reason):
        producer.peer_of(shown(homes.consumer, Role.DECODE))


def test_a_revoked_peer_leaves_the_others_in(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    trust_card(homes.producer, stranger(Role.DECODE))
    PeerStore(homes.producer).revoke(homes.consumer_fingerprint(), NOW_S)
    assert len(producer_trust(homes.producer, "127.0.0.2", Clock()).material().trusted_pem) == 1


def test_a_peer_that_was_removed_is_not_paired(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    producer = producer_trust(homes.producer, "127.0.0.2", Clock())
    (homes.producer / "peers" / f"{homes.consumer_fingerprint()}.json").unlink()
    with pytest.raises(PeerRefused, match="is not paired"):
        producer.check_peer(homes.consumer_fingerprint())
    with pytest.raises(PairingError, match=r"no decode node is paired with this machine.*muser pair"):
        producer.material()


@pytest.mark.parametrize("off_s", [-YEAR_S, 6 * YEAR_S])
def test_a_clock_that_is_off_is_named_on_both_nodes(tmp_path: Path, off_s: int) -> None:
    homes = paired(tmp_path, NOW_S)
    for start in (
        lambda: producer_trust(homes.producer, "127.0.0.2", Clock(NOW_S + off_s)),
        lambda: consumer_trust(homes.consumer, "127.0.0.2", Clock(NOW_S + off_s)),
    ):
        with pytest.raises(ClockError, match=r"this node.s certificate .*clock"):
            start()


def test_an_expired_peer_is_refused_with_the_clock_in_the_message(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    clock = Clock()
    producer = producer_trust(homes.producer, "127.0.0.2", clock)
    reissue(homes.producer, Role.PREFILL, NOW_S + 4 * YEAR_S)
    clock.now_s = NOW_S + 6 * YEAR_S
    for refused in (producer.material, lambda: producer.peer_of(shown(homes.consumer, Role.DECODE))):
        with pytest.raises(ClockError, match=r"\(decode-box\): the peer's certificate expired .*clock"):
            refused()


def test_during_a_rotation_old_and_new_are_taken_and_after_it_the_new_alone(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    clock = Clock()
    producer = producer_trust(homes.producer, "127.0.0.2", clock)
    old = shown(homes.consumer, Role.DECODE)
    rotated = rotate(homes.consumer, Role.DECODE, NOW_S)
    new = rotated.presented(NOW_S + WEEK_S).certificate.pem
    with pytest.raises(PeerRefused):
        producer.peer_of(new)
    trust_card(homes.producer, rotated.card())
    for now_s in (NOW_S, NOW_S + WEEK_S + DAY_S):
        clock.now_s = now_s
        assert producer.peer_of(old) == producer.peer_of(new) == homes.consumer_fingerprint()
        assert producer.material().trusted_pem == (old, new)
    clock.now_s = NOW_S + WEEK_S + DAY_S + 1
    assert producer.peer_of(new) == homes.consumer_fingerprint()
    assert producer.material().trusted_pem == (new,)
    with pytest.raises(PeerRefused, match=r"a certificate that it replaced, taken until 2027-01-23"):
        producer.peer_of(old)


def test_a_switch_changes_what_is_shown_without_a_restart(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    producer = producer_trust(homes.producer, "127.0.0.2", Clock())
    before = producer.material()
    rotate(homes.producer, Role.PREFILL, NOW_S)
    assert producer.material() == before
    switch(homes.producer, Role.PREFILL, NOW_S)
    assert producer.material().certificate_pem != before.certificate_pem


def test_nobody_paired_is_named_at_start_with_the_host(tmp_path: Path) -> None:
    with pytest.raises(PairingError, match=r"--host 192.0.2.1 is not a loopback address.*muser pair"):
        producer_trust(tmp_path, "192.0.2.1", Clock())
    with pytest.raises(PairingError, match=r"--producer 192.0.2.1 .*no producer there is paired.*muser pair"):
        consumer_trust(tmp_path, "192.0.2.1", Clock())


def test_the_only_producer_is_taken_wherever_it_moved_and_of_several_the_one_met_there(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    moved = consumer_trust(homes.consumer, "127.0.0.9", Clock())
    assert moved.node_key() == own(homes.producer, Role.PREFILL).node_key.public_bytes
    second = stranger(Role.PREFILL)
    trust_card(homes.consumer, second, host="127.0.0.3", at_s=NOW_S + 1)
    assert consumer_trust(homes.consumer, "127.0.0.3", Clock()).node_key() == second.node_key
    assert consumer_trust(homes.consumer, "127.0.0.2", Clock()).node_key() == moved.node_key()
    with pytest.raises(
        PairingError, match=r"--producer 127.0.0.9: .*prefill-box at 127.0.0.2, stranger at 127.0.0.3.*--host 127.0.0.9"
    ):
        consumer_trust(homes.consumer, "127.0.0.9", Clock())
    trust_card(homes.consumer, stranger(Role.PREFILL), host="127.0.0.3")
    with pytest.raises(PairingError, match="several paired producers"):
        consumer_trust(homes.consumer, "127.0.0.3", Clock())


def test_a_revoked_producer_is_named_at_start(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    PeerStore(homes.consumer).revoke(homes.producer_fingerprint(), NOW_S)
    with pytest.raises(PeerRefused, match=r"\(prefill-box\) was revoked"):
        consumer_trust(homes.consumer, "127.0.0.2", Clock())


def test_a_trust_in_several_peers_has_no_one_node_key(tmp_path: Path) -> None:
    homes = paired(tmp_path, NOW_S)
    with pytest.raises(WireError, match="no single peer"):
        Trust(homes.producer, Role.PREFILL, Clock()).node_key()
