"""Probes: strict messages, bounded streams, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muser_wire import probe as p
from muser_wire.errors import LocalProtocolError, RemoteProtocolError
from muser_wire.messages import encode_stream_request
from muser_wire.stubs import producer_pb2 as pb

MIB = 1 << 20
TICKET = b"t" * 32

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any], Any, type, tuple[str, ...]]
CODECS: dict[str, Codec] = {
    "probe": (p.encode_probe, p.decode_probe, b"ping", pb.ProbeRequest, ("protocol_version", "payload")),
    "open": (p.encode_open_probe, p.decode_open_probe, 5, pb.OpenProbeRequest, ("protocol_version", "nbytes")),
    "ticket": (p.encode_probe_ticket, p.decode_probe_ticket, TICKET, pb.OpenProbeResponse, ("ticket",)),
}
codecs = pytest.mark.parametrize("name", CODECS)


@codecs
def test_a_message_comes_back_as_it_was(name: str) -> None:
    encode, decode, value, _, _ = CODECS[name]
    assert decode(encode(value)) == value


@codecs
def test_truncated_unknown_repeated_and_absent_fields_are_refused(name: str) -> None:
    encode, decode, value, stub_type, fields = CODECS[name]
    raw = encode(value)
    wrong = [raw[:stop] for stop in range(len(raw))]
    wrong += [raw + b"\xf8\x07\x01", raw + raw]
    for bad in wrong:
        with pytest.raises(RemoteProtocolError):
            decode(bad)
    for field in fields:
        stub = stub_type.FromString(raw)
        stub.ClearField(field)
        with pytest.raises(RemoteProtocolError, match=field):
            decode(stub.SerializeToString())


@codecs
@given(raw=st.binary(max_size=80))
def test_no_bytes_raise_anything_but_a_remote_error(name: str, raw: bytes) -> None:
    _, decode, *_ = CODECS[name]
    for reader in (decode, p.piece_nbytes):
        try:
            reader(raw)
        except RemoteProtocolError:
            continue


def test_another_version_is_refused_with_both() -> None:
    with pytest.raises(RemoteProtocolError, match="2 here, 1 at the peer"):
        p.decode_probe(pb.ProbeRequest(protocol_version=1, payload=b"").SerializeToString())


def test_ranges_are_those_of_the_schema() -> None:
    assert p.decode_probe(p.encode_probe(b"")) == b""
    assert len(p.decode_probe(p.encode_probe(bytes(65536)))) == 65536
    with pytest.raises(RemoteProtocolError, match="payload"):
        p.decode_probe(p.encode_probe(bytes(65537)))
    assert p.decode_open_probe(p.encode_open_probe(1 << 30)) == 1 << 30
    for nbytes in (0, (1 << 30) + 1):
        with pytest.raises(RemoteProtocolError, match="nbytes"):
            p.decode_open_probe(p.encode_open_probe(nbytes))


def test_an_echo_that_differs_is_refused() -> None:
    answer = pb.ProbeResponse(payload=b"a").SerializeToString()
    p.decode_probe_answer(answer, b"a")
    with pytest.raises(RemoteProtocolError, match="not what was sent"):
        p.decode_probe_answer(answer, b"b")


@pytest.mark.parametrize("nbytes", [1, 127, 128, 16383, 16384, MIB])
def test_a_piece_is_a_protobuf_message_of_its_size(nbytes: int) -> None:
    raw = p.encode_piece(bytes(nbytes))
    assert pb.ProbePiece.FromString(raw).payload == bytes(nbytes)
    assert p.piece_nbytes(raw) == nbytes


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x0a\x00",
        b"\x0a\x02x",
        b"\x0a\x81\x00x",  # a length of 1 in two bytes
        b"\x12\x01x",
        b"\x0a\x01xx",
        pb.ProbePiece(payload=bytes(MIB + 1)).SerializeToString(),
    ],
)
def test_what_is_no_piece_is_refused(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        p.piece_nbytes(raw)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ticket_for(responder: p.ProbeResponder, nbytes: int) -> bytes:
    return encode_stream_request(p.decode_probe_ticket(responder.open(p.encode_open_probe(nbytes))))


@pytest.mark.parametrize("nbytes", [1, MIB - 1, MIB, 3 * MIB + 5])
def test_a_stream_carries_exactly_what_was_asked_for(nbytes: int) -> None:
    responder = p.ProbeResponder(Clock())
    pieces = [p.piece_nbytes(raw) for raw in responder.stream(ticket_for(responder, nbytes))]
    assert sum(pieces) == nbytes
    assert max(pieces) <= MIB


def test_a_stream_of_the_largest_size_costs_one_piece_of_memory() -> None:
    responder = p.ProbeResponder(Clock())
    stream = responder.stream(ticket_for(responder, 1 << 30))
    assert next(stream) is next(stream)


def test_a_ticket_works_once_and_not_for_long() -> None:
    clock = Clock()
    responder = p.ProbeResponder(clock)
    ticket = ticket_for(responder, 1)
    list(responder.stream(ticket))
    with pytest.raises(RemoteProtocolError, match="ticket"):
        list(responder.stream(ticket))
    late = ticket_for(responder, 1)
    clock.now_s = 11.0
    with pytest.raises(RemoteProtocolError, match="ticket"):
        list(responder.stream(late))


def test_only_one_probe_streams_at_a_time() -> None:
    responder = p.ProbeResponder(Clock())
    first, second, third = (ticket_for(responder, 2 * MIB) for _ in range(3))
    running = responder.stream(first)
    next(running)
    with pytest.raises(LocalProtocolError, match="another probe"):
        next(responder.stream(second))
    running.close()
    assert len(list(responder.stream(third))) == 2
