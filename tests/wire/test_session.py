from __future__ import annotations

import pytest

from muser_wire.errors import ProgressTimeout, RemoteProtocolError
from muser_wire.session import MAX_TICKETS, ProgressWatch, TicketTable


def test_a_ticket_works_once() -> None:
    table: TicketTable[str] = TicketTable()
    ticket = table.issue("handoff", 0.0, b"t" * 32)
    assert ticket is not None
    assert table.redeem(ticket, 1.0) == "handoff"
    with pytest.raises(RemoteProtocolError, match="already used"):
        table.redeem(ticket, 1.0)


def test_a_ticket_works_for_ten_seconds() -> None:
    table: TicketTable[str] = TicketTable()
    ticket = table.issue("handoff", 0.0, b"t" * 32)
    assert ticket is not None
    with pytest.raises(RemoteProtocolError, match="expired"):
        table.redeem(ticket, 10.0)
    assert len(table) == 0


def test_an_unknown_ticket_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown"):
        TicketTable[str]().redeem(b"x" * 32, 0.0)


def test_waiting_tickets_are_bounded_and_expired_ones_make_room() -> None:
    table: TicketTable[int] = TicketTable()
    for index in range(MAX_TICKETS):
        assert table.issue(index, 0.0, index.to_bytes(32, "big")) is not None
    assert table.issue(-1, 5.0, b"x" * 32) is None
    assert table.issue(-1, 11.0, b"x" * 32) is not None
    assert len(table) == 1


def test_no_progress_for_three_chunk_times_and_two_seconds_is_an_error() -> None:
    watch = ProgressWatch(predicted_chunk_s=1.0, predicted_wait_s=0.0, now_s=100.0)
    watch.check(105.0)
    watch.progress(104.0)
    watch.check(109.0)
    with pytest.raises(ProgressTimeout, match=r"5\.0 s"):
        watch.check(109.1)


def test_the_predicted_wait_counts_until_the_first_segment() -> None:
    watch = ProgressWatch(predicted_chunk_s=1.0, predicted_wait_s=4.0, now_s=0.0)
    watch.check(17.0)
    watch.progress(17.0)
    watch.computing()
    watch.check(22.0)
    with pytest.raises(ProgressTimeout):
        watch.check(22.1)


def test_a_peers_prediction_cannot_make_the_wait_endless() -> None:
    watch = ProgressWatch(predicted_chunk_s=1e9, predicted_wait_s=1e9, now_s=0.0)
    with pytest.raises(ProgressTimeout):
        watch.check(900.1)


def test_what_an_expired_ticket_held_is_given_back() -> None:
    freed: list[str] = []
    table: TicketTable[str] = TicketTable(freed.append)
    table.issue("never used", 0.0, b"a" * 32)
    used = table.issue("used", 5.0, b"b" * 32)
    assert used is not None
    table.expire(10.0)
    assert freed == ["never used"]
    table.redeem(used, 11.0)
    table.expire(100.0)
    assert freed == ["never used"]
