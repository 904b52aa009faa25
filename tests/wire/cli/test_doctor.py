"""`muser doctor link` against a real server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from muser_wire.cli.__main__ import main
from muser_wire.cli.doctor import examine_producer
from muser_wire.cli.interface import Interface
from muser_wire.cli.link import LinkProbe
from muser_wire.doctor.finding import Verdict
from muser_wire.errors import HandoffRefused, TransportError
from muser_wire.identities import Digest, Identities
from muser_wire.messages import Description, encode_description, encode_stream_request
from muser_wire.probe import encode_piece
from muser_wire.transport.base import StreamCall
from muser_wire.transport.grpc import GrpcChannel, GrpcServer

IDENTITIES = Identities(Digest(bytes(32)), Digest(bytes(32)), "kv", "native", Digest(bytes(32)), 64, Digest(bytes(32)))


class Described:
    """A producer that can only say what it is."""

    data_port = 0

    def describe(self, request: bytes) -> bytes:
        return encode_description(Description(IDENTITIES, b"{}", bytes(16), bytes(32), self.data_port, 8, ()))

    def open(self, request: bytes, peer: str) -> bytes:
        raise AssertionError("a probe opens no handoff")

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        raise AssertionError("a probe opens no handoff")


@pytest.fixture(scope="module")
def server() -> Iterator[GrpcServer]:
    server, service = GrpcServer("127.0.0.1", 0, 0), Described()
    service.data_port = server.data_port
    server.start(service)
    yield server
    server.stop(0)


def run(server: GrpcServer, *flags: str) -> int:
    return main(["doctor", "link", "--producer", f"127.0.0.1:{server.control_port}", "--mib", "8", *flags])


def test_every_measurement_is_made_with_a_verdict(server: GrpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(server, "--idle-s", "0.05", "--json")
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["findings"]}
    assert set(found) == {"route", "mtu", "energy saving", "round trip", "throughput", "after idle"}
    assert {row["verdict"] for row in found.values()} <= {"ok", "warn", "bad", "unknown"}
    assert status == any(row["verdict"] == "bad" for row in found.values())
    assert found["throughput"]["nbytes"] == 8 << 20
    assert found["throughput"]["bytes_per_s"] > 1e6
    assert 0 < found["round trip"]["median_s"] <= found["round trip"]["p99_s"]
    assert found["after idle"]["idle_s"] == 0.05
    assert found["after idle"]["after_idle_s"] > 0


def test_for_people_each_line_has_verdict_and_name(server: GrpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    run(server, "--idle-s", "0")
    lines = [line for line in capsys.readouterr().out.splitlines() if "->" not in line]
    assert [line.split()[0] in {"ok", "warn", "bad", "unknown"} for line in lines] == [True] * 5
    assert not any("after idle" in line for line in lines)


def test_something_bad_is_exit_1(server: GrpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    too_fast = Interface("eth0", speed_bits=10**15)
    monkeypatch.setattr("muser_wire.cli.doctor.interface_to", lambda address: too_fast)
    assert run(server, "--idle-s", "0") == 1


def test_a_producer_that_is_not_there_is_exit_2(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "link", "--producer", f"127.0.0.1:{free_port}"]) == 2
    assert capsys.readouterr().err.startswith("muser: unavailable")


def test_a_data_port_that_nobody_answers_is_a_finding_and_ends_nothing(free_port: int, tmp_path: Path) -> None:
    """What a firewall that passes the control port alone looks like."""
    server, service = GrpcServer("127.0.0.1", 0, 0), Described()
    service.data_port = free_port
    server.start(service)
    facts = {"configuration": {"allow_unqualified": False}, "model": {}}
    try:
        found = list(examine_producer(tmp_path, "127.0.0.1", server.control_port, facts))
    finally:
        server.stop(0)
    assert found[0].verdict is Verdict.OK
    assert (found[-1].name, found[-1].verdict) == ("link 127.0.0.1", Verdict.BAD)
    assert "4951" in found[-1].advice


@pytest.mark.parametrize("producer", ["nonsense", "127.0.0.1:", ":4950", "127.0.0.1:x"])
def test_an_address_that_is_none_is_named(producer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "link", "--producer", producer]) == 2
    assert repr(producer) in capsys.readouterr().err


@pytest.mark.parametrize("mib", ["0", "1025", "x"])
def test_a_stream_beyond_the_cap_is_refused_here_already(mib: str) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "link", "--mib", mib])


def test_a_stream_that_is_too_short_is_an_error(server: GrpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muser_wire.probe._pieces", lambda nbytes: iter([encode_piece(bytes(nbytes - 1))]))
    channel = GrpcChannel("127.0.0.1", server.control_port)
    with pytest.raises(TransportError, match="after 4 of 5 bytes"):
        LinkProbe(channel, server.data_port).stream_s(5)
    channel.close()


def test_an_unknown_ticket_is_refused_by_the_server(server: GrpcServer) -> None:
    channel = GrpcChannel("127.0.0.1", server.control_port)
    with pytest.raises(HandoffRefused, match="ticket is unknown"):
        list(channel.stream_probe(encode_stream_request(bytes(32)), server.data_port))
    channel.close()
