"""Both sides of the exchange joined in memory, with somebody in between and without."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paired_homes import NOW_S, YEAR_S, own

from muser_wire.pairing.card import Role
from muser_wire.pairing.credentials import OwnCredentials, rotate
from muser_wire.pairing.errors import ClockError, ExchangeError, PairingError
from muser_wire.pairing.exchange import (
    MAX_MESSAGE_NBYTES,
    TRANSITIONS,
    Agreed,
    Exchange,
    Kind,
    Side,
    State,
    parse_message,
)

NONCES = {Side.LISTENER: b"l" * 32, Side.CALLER: b"c" * 32}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OwnCredentials]:
    """Producer, consumer, and somebody else who has keys for both roles."""
    folder: Path = tmp_path_factory.mktemp("machines")
    return {
        "producer": own(folder / "p", Role.PREFILL, NOW_S),
        "consumer": own(folder / "c", Role.DECODE, NOW_S),
        "prefill-thief": own(folder / "t", Role.PREFILL, NOW_S),
        "decode-thief": own(folder / "t", Role.DECODE, NOW_S),
    }


def side_of(machine: OwnCredentials, side: Side, *, now_s: int = NOW_S, nonce: bytes | None = None) -> Exchange:
    return Exchange(side, machine.node_key, machine.card(), nonce or NONCES[side], now_s)


def show(one: Exchange, other: Exchange) -> None:
    """Carry commitments both ways, then reveals: the caller's first, and the listener's is the answer to it."""
    answers = {id(other): other.receive(one.begin()), id(one): one.receive(other.begin())}
    listener, caller = (one, other) if one._side is Side.LISTENER else (other, one)
    assert answers[id(listener)] == b""
    assert caller.receive(listener.receive(answers[id(caller)])) == b""


def both(machines: dict[str, OwnCredentials]) -> tuple[Exchange, Exchange]:
    listener, caller = side_of(machines["producer"], Side.LISTENER), side_of(machines["consumer"], Side.CALLER)
    show(listener, caller)
    return listener, caller


def test_both_sides_see_one_code_and_each_others_cards_and_pair(machines: dict[str, OwnCredentials]) -> None:
    listener, caller = both(machines)
    assert listener.code == caller.code
    assert listener.peer == machines["consumer"].card()
    assert caller.peer == machines["producer"].card()
    confirmation = listener.agree()
    caller.receive(confirmation)
    assert (listener.state, caller.state) == (State.AGREED_HERE, State.AGREED_THERE)
    listener.receive(caller.agree())
    assert (listener.state, caller.state) == (State.PAIRED, State.PAIRED)


def test_the_code_is_hkdf_over_both_nonces_salted_with_both_commitments(machines: dict[str, OwnCredentials]) -> None:
    listener, caller = both(machines)

    def commitment(side: bytes, nonce: bytes, machine: str) -> bytes:
        shown = nonce + NOW_S.to_bytes(8, "big") + machines[machine].card().encode()
        return hashlib.sha256(b"muser v1 pairing commitment" + side + shown).digest()

    listens = commitment(b"listener", NONCES[Side.LISTENER], "producer")
    calls = commitment(b"caller", NONCES[Side.CALLER], "consumer")
    assert (listener.begin()[1:], caller.begin()[1:]) == (listens, calls)
    transcript = hashlib.sha256(b"muser v1 pairing transcript" + listens + calls).digest()
    extracted = hmac.digest(transcript, b"l" * 32 + b"c" * 32, "sha256")
    derived = hmac.digest(extracted, b"muser v1 pairing code\x01", "sha256")[:8]
    digits = f"{int.from_bytes(derived, 'big') % 1_000_000:06}"
    assert listener.code == f"{digits[:3]} {digits[3:]}"


def test_a_man_in_the_middle_changes_the_code(machines: dict[str, OwnCredentials]) -> None:
    """He runs an exchange with each side, and copies whatever nonce he has learned where he still can."""
    for _ in range(20):
        listener = side_of(machines["producer"], Side.LISTENER, nonce=os.urandom(32))
        caller = side_of(machines["consumer"], Side.CALLER, nonce=os.urandom(32))
        to_listener = side_of(machines["decode-thief"], Side.CALLER, nonce=os.urandom(32))
        show(listener, to_listener)
        # Now he knows the listener's nonce and its code, and may still choose what he commits to towards the caller.
        to_caller = side_of(machines["prefill-thief"], Side.LISTENER, nonce=listener._ours.nonce)
        show(to_caller, caller)
        assert listener.code == to_listener.code
        assert caller.code == to_caller.code
        assert listener.code != caller.code


def test_who_shows_something_else_than_he_committed_to_is_refused(machines: dict[str, OwnCredentials]) -> None:
    """What a man in the middle would need: see the other's nonce first, then choose his own."""
    listener = side_of(machines["producer"], Side.LISTENER)
    thief = side_of(machines["decode-thief"], Side.CALLER)
    listener.receive(thief.begin())
    other = side_of(machines["decode-thief"], Side.CALLER, nonce=b"x" * 32)
    with pytest.raises(ExchangeError, match="something else than it committed to"):
        listener.receive(bytes([2]) + other._ours.encode())
    assert listener.state is State.FAILED


def test_a_commitment_sent_back_to_its_maker_is_refused(machines: dict[str, OwnCredentials]) -> None:
    listener = side_of(machines["producer"], Side.LISTENER)
    assert listener.receive(listener.begin()) == b""
    with pytest.raises(ExchangeError, match="something else than it committed to"):
        listener.receive(bytes([2]) + listener._ours.encode())
    caller = side_of(machines["consumer"], Side.CALLER)
    with pytest.raises(ExchangeError, match="something else than it committed to"):
        caller.receive(caller.receive(caller.begin()))


def test_nothing_is_shown_before_the_other_side_has_committed(machines: dict[str, OwnCredentials]) -> None:
    listener = side_of(machines["producer"], Side.LISTENER)
    assert len(listener.begin()) == 33
    with pytest.raises(PairingError, match="no code before"):
        _ = listener.code
    with pytest.raises(PairingError, match="not shown its card"):
        _ = listener.peer


def test_a_listener_shows_nothing_to_a_caller_whose_card_does_not_count(machines: dict[str, OwnCredentials]) -> None:
    """Else a caller could learn a code, end there, and try the next one."""
    for machine, now_s, said in (
        ("consumer", NOW_S + YEAR_S, "the clocks of the two machines differ"),
        ("prefill-thief", NOW_S, "cannot take this machine's card"),
    ):
        listener = side_of(machines["producer"], Side.LISTENER)
        caller = side_of(machines[machine], Side.CALLER, now_s=now_s)
        listener.receive(caller.begin())
        reveal = caller.receive(listener.begin())
        assert (listener.has_revealed, caller.has_revealed) == (False, True)
        with pytest.raises(PairingError) as refused:
            listener.receive(reveal)
        assert not listener.has_revealed
        with pytest.raises(ExchangeError, match=f"declined: .*{said}"):
            caller.receive(listener.decline(refused.value))
    listener, caller = both(machines)
    assert (listener.has_revealed, caller.has_revealed) == (True, True)


def test_a_reason_that_nobody_knows_is_a_decline_and_no_words_of_the_other_side(
    machines: dict[str, OwnCredentials],
) -> None:
    with pytest.raises(ExchangeError, match=r"^the other side declined$"):
        side_of(machines["producer"], Side.LISTENER).receive(b"\x04\xff")


def test_a_confirmation_counts_only_with_the_signature_of_the_card_s_node_key(
    machines: dict[str, OwnCredentials],
) -> None:
    listener, caller = both(machines)
    listener.agree()
    forged = bytes([3]) + machines["decode-thief"].node_key.sign(caller._confirmation(Side.CALLER))
    with pytest.raises(ExchangeError, match="not signed with the other side's node key"):
        listener.receive(forged)
    assert listener.state is State.FAILED


def test_an_own_confirmation_sent_back_is_refused(machines: dict[str, OwnCredentials]) -> None:
    listener, _ = both(machines)
    with pytest.raises(ExchangeError, match="not signed"):
        listener.receive(listener.agree())


def test_a_decline_ends_the_exchange_on_both_sides(machines: dict[str, OwnCredentials]) -> None:
    listener, caller = both(machines)
    listener.agree()
    with pytest.raises(ExchangeError, match="the other side declined"):
        listener.receive(caller.decline())
    assert (listener.state, caller.state) == (State.FAILED, State.FAILED)
    with pytest.raises(ExchangeError):
        listener.agree()


def test_clocks_a_year_apart_are_named(machines: dict[str, OwnCredentials]) -> None:
    listener = side_of(machines["producer"], Side.LISTENER)
    caller = side_of(machines["consumer"], Side.CALLER, now_s=NOW_S + YEAR_S)
    with pytest.raises(ClockError, match="clocks of the two machines differ"):
        show(listener, caller)


def test_an_expired_certificate_is_refused(machines: dict[str, OwnCredentials]) -> None:
    late = NOW_S + 6 * YEAR_S
    listener = side_of(machines["producer"], Side.LISTENER, now_s=late)
    caller = side_of(machines["consumer"], Side.CALLER, now_s=late)
    with pytest.raises(ClockError, match="the peer's certificate expired"):
        show(listener, caller)


def test_a_certificate_that_ended_after_it_was_replaced_is_no_obstacle(tmp_path: Path) -> None:
    own(tmp_path / "p", Role.PREFILL, NOW_S)
    producer = rotate(tmp_path / "p", Role.PREFILL, NOW_S + 4 * YEAR_S)
    consumer = own(tmp_path / "c", Role.DECODE, NOW_S + 4 * YEAR_S)
    assert len(producer.card().certificates) == 2
    late = NOW_S + 6 * YEAR_S
    listener, caller = side_of(producer, Side.LISTENER, now_s=late), side_of(consumer, Side.CALLER, now_s=late)
    show(listener, caller)
    assert listener.code == caller.code


@pytest.mark.parametrize(
    ("machine", "reason"), [("prefill-thief", "both machines say prefill"), ("producer", "both machines say prefill")]
)
def test_two_nodes_of_one_role_do_not_pair(machines: dict[str, OwnCredentials], machine: str, reason: str) -> None:
    with pytest.raises(PairingError, match=reason):
        show(side_of(machines["producer"], Side.LISTENER), side_of(machines[machine], Side.CALLER))


def at(state: State, machines: dict[str, OwnCredentials]) -> Exchange:
    """A listener in a given state."""
    listener, caller = side_of(machines["producer"], Side.LISTENER), side_of(machines["consumer"], Side.CALLER)
    if state is State.COMMITTED:
        return listener
    reveal = caller.receive(listener.begin())
    listener.receive(caller.begin())
    if state is State.BOUND:
        return listener
    caller.receive(listener.receive(reveal))
    if state in {State.AGREED_HERE, State.PAIRED}:
        listener.agree()
    if state in {State.AGREED_THERE, State.PAIRED}:
        listener.receive(caller.agree())
    if state is State.FAILED:
        listener.decline()
    return listener


@pytest.mark.parametrize("state", State)
def test_a_step_that_the_table_does_not_have_fails_closed(machines: dict[str, OwnCredentials], state: State) -> None:
    steps: dict[Kind | type[Agreed], Callable[[Exchange], bytes]] = {
        Agreed: lambda one: one.agree(),
        Kind.COMMIT: lambda one: one.receive(bytes([1]) + bytes(32)),
        Kind.REVEAL: lambda one: one.receive(bytes([2]) + bytes(100)),
        Kind.CONFIRM: lambda one: one.receive(bytes([3]) + bytes(64)),
        Kind.DECLINE: lambda one: one.receive(bytes([4, 0])),
    }
    for event, step in steps.items():
        if (state, event) in TRANSITIONS:
            continue
        listener = at(state, machines)
        assert listener.state is state
        with pytest.raises(ExchangeError):
            step(listener)
        assert listener.state is State.FAILED


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00",
        b"\x05",
        b"\x01" + bytes(31),
        b"\x01" + bytes(33),
        b"\x02" + bytes(40),
        b"\x03" + bytes(63),
        b"\x04",
        b"\x04\x00\x00",
    ],
)
def test_messages_of_another_size_or_kind_are_refused(raw: bytes) -> None:
    with pytest.raises(ExchangeError):
        parse_message(raw)
    with pytest.raises(ExchangeError):
        parse_message(b"\x02" + bytes(MAX_MESSAGE_NBYTES))


@given(st.binary(max_size=200))
def test_nothing_but_a_named_error_comes_of_any_bytes(raw: bytes) -> None:
    try:
        parse_message(raw)
    except ExchangeError:
        return
    assert raw[0] in {1, 2, 3, 4}
