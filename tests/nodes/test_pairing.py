"""Two paired nodes on an address that needs pairing, as processes and in one; what is refused never reaches a model."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paired_homes import YEAR_S, Homes, own, paired, reissue, trust_card

from muser_decode.client import ProducerClient, ProducerState
from muser_decode.engine.request import Route
from muser_prefill.service import ProducerService
from muser_wire.cli.nodes import Pair, PairOptions
from muser_wire.messages import Acceptance, decode_open_answer
from muser_wire.pairing.card import Role
from muser_wire.pairing.store import PeerStore
from muser_wire.pairing.trust import consumer_trust, producer_trust
from muser_wire.transport.grpc import GrpcChannel, GrpcServer

HOST = "127.0.0.2"
START_S = 90.0


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    return paired(tmp_path)


class TwoMachines(Pair):
    """Both nodes as processes, each with its own MUSER_HOME, the producer on HOST."""

    def __init__(self, options: PairOptions, homes: Homes) -> None:
        super().__init__(options, piped=False)
        self.homes = homes

    def _prefill_command(self) -> list[str]:
        os.environ["MUSER_HOME"] = str(self.homes.producer)
        return self._command("muser_prefill", "--host", HOST, "--control-port", "0", "--data-port", "0")

    def _decode_command(self) -> list[str]:
        os.environ["MUSER_HOME"] = str(self.homes.consumer)
        producer = f"{HOST}:{self.prefill.ports['control_port']}"
        return self._command("muser_decode", "--port", "0", "--producer", producer, "--route", "remote")


def chat(port: int) -> tuple[str, str, str]:
    """Return route, text and reason of a greedy chat."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    messages = [{"role": "user", "content": "The reader works through the text and the writer answers. " * 12}]
    body = {"model": "muser", "messages": messages, "temperature": 0, "max_tokens": 8}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200
    return (
        str(answer["muser"]["route"]),
        str(answer["choices"][0]["message"]["content"]),
        str(answer["muser"]["reason"]),
    )


def test_paired_processes_answer_until_the_consumer_is_revoked(
    tiny_llama: Path, tmp_path: Path, homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSER_HOME", "")
    options = PairOptions(tiny_llama, tmp_path, start_timeout_s=START_S, route="remote", threads=1, cache_memory_mb=0)
    nodes = TwoMachines(options, homes)
    try:
        nodes.start(lambda node: None)
        port = nodes.decode.ports["port"]
        route, remote, _ = chat(port)
        assert route == "remote"
        fingerprint = homes.consumer_fingerprint()
        PeerStore(homes.producer).revoke(fingerprint, time.time())
        route, local, reason = chat(port)
        assert (route, local) == ("local", remote)
        assert fingerprint in reason
        assert "was revoked" in reason
        assert f"the node {fingerprint} (decode-box) was revoked" in nodes.prefill.log_tail()
        assert f"the node {fingerprint} (decode-box) was revoked" in nodes.decode.log_tail()
    finally:
        assert nodes.stop() == [0, 0]


def run_node(module: str, home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a node that is expected to refuse to start."""
    command = [sys.executable, "-m", module, "serve", *flags]
    environment = {**os.environ, "MUSER_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False, env=environment)


@pytest.mark.parametrize(
    ("module", "flags", "reason"),
    [
        ("muser_prefill", ["--host", HOST, "--control-port", "0"], f"--host {HOST} is not a loopback address"),
        ("muser_decode", ["--producer", f"{HOST}:4950", "--port", "0"], f"--producer {HOST} is not a loopback address"),
    ],
)
def test_without_a_pairing_another_address_is_refused_at_start(
    module: str, flags: list[str], reason: str, tiny_llama: Path, tmp_path: Path
) -> None:
    done = run_node(module, tmp_path / "home", "--model", str(tiny_llama), *flags)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "muser pair" in done.stderr
    assert "loaded" not in done.stderr


@pytest.mark.parametrize(("module", "role"), [("muser_prefill", Role.PREFILL), ("muser_decode", Role.DECODE)])
def test_a_clock_off_by_years_and_a_readable_key_are_refused_at_start_by_name(
    module: str, role: Role, tiny_llama: Path, homes: Homes
) -> None:
    home = homes.producer if role is Role.PREFILL else homes.consumer
    where = ["--host", HOST, "--control-port", "0"] if role is Role.PREFILL else ["--producer", HOST, "--port", "0"]
    flags = ["--model", str(tiny_llama), *where]
    reissue(home, role, time.time() + YEAR_S)
    done = run_node(module, home, *flags)
    assert done.returncode == 2
    assert "clock" in done.stderr
    assert "Traceback" not in done.stderr
    (home / "keys" / f"{role.value}.certificates.json").chmod(0o644)
    done = run_node(module, home, *flags)
    assert done.returncode == 2
    assert "mode 0644" in done.stderr


@dataclasses.dataclass
class Joined:
    """Both nodes in one process over mutual TLS."""

    pair: Any
    homes: Homes
    server: GrpcServer
    service: ProducerService

    def client(self, home: Path) -> ProducerClient:
        """A client of this producer with the keys of a home."""
        trust = consumer_trust(home, HOST, time.time)
        channel = GrpcChannel(HOST, self.server.control_port, trust)
        return ProducerClient(channel, self.pair.client._consumer, trust.node_key())


@pytest.fixture
def joined(tiny_llama: Path, producer: Any, started: Any, homes: Homes) -> Iterator[Joined]:
    new_pair, _ = started
    pair = new_pair(tiny_llama, producer)
    trust = producer_trust(homes.producer, HOST, time.time)
    server = GrpcServer(HOST, 0, 0, trust)
    facts = dataclasses.replace(producer.service._facts, data_port=server.data_port)
    node_key = own(homes.producer, Role.PREFILL).node_key
    service = ProducerService(facts, node_key, producer.scheduler, check_peer=trust.check_peer)
    server.start(service)
    joined = Joined(pair, homes, server, service)
    pair.client.stop()
    pair.use(joined.client(homes.consumer))
    yield joined
    server.stop(0)


def test_a_paired_node_gets_the_answer_of_a_local_run(joined: Joined, local_answer: Any) -> None:
    assert joined.pair.client.refresh().state is ProducerState.READY
    answer = joined.pair.ask()
    assert answer.report.route is Route.REMOTE
    assert answer.tokens == local_answer.tokens


def test_a_node_key_other_than_the_pinned_one_is_refused_by_name(joined: Joined, local_answer: Any) -> None:
    """The certificate is the paired one; the process behind it signs its seals with another key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from muser_wire.auth import NodeKey

    joined.service._node_key = NodeKey(Ed25519PrivateKey.generate())
    status = joined.pair.client.refresh()
    assert status.state is ProducerState.REFUSED
    assert "node_key differs" in status.reason
    answer = joined.pair.ask()
    assert answer.report.route is Route.LOCAL
    assert answer.tokens == local_answer.tokens


@pytest.mark.parametrize("fault", ["unlisted", "swapped", "revoked"])
def test_a_peer_that_is_not_let_in_reaches_no_ticket_and_is_told_why(
    joined: Joined, tmp_path: Path, fault: str, local_answer: Any
) -> None:
    home = joined.homes.consumer
    if fault == "unlisted":
        home = tmp_path / "unlisted"
        own(home, Role.DECODE)
        trust_card(home, own(joined.homes.producer, Role.PREFILL).card())
    elif fault == "swapped":
        reissue(home, Role.DECODE, time.time())
    else:
        PeerStore(joined.homes.producer).revoke(joined.homes.consumer_fingerprint(), time.time())
    joined.pair.client.stop()
    client = joined.client(home)
    joined.pair.use(client)
    status = client.refresh()
    assert status.state is ProducerState.REFUSED
    assert "unpaired" in status.reason
    answer = joined.pair.ask()
    assert (answer.report.route, answer.tokens) == (Route.LOCAL, local_answer.tokens)
    assert len(joined.service._tickets) == 0


def test_a_ticket_is_void_once_its_peer_is_revoked(joined: Joined, caplog: pytest.LogCaptureFixture) -> None:
    """Open was allowed; the revocation comes before the stream. The data port knows the peer by its ticket alone."""
    from muser_wire.errors import WireError
    from muser_wire.messages import encode_stream_request

    client = joined.pair.client
    assert client.refresh().state is ProducerState.READY
    channel = client._channel
    seen: list[bytes] = []
    original = channel.open

    def revoke_after_open(request: bytes, timeout_s: float) -> bytes:
        seen.append(original(request, timeout_s))
        PeerStore(joined.homes.producer).revoke(joined.homes.consumer_fingerprint(), time.time())
        return seen[-1]

    channel.open = revoke_after_open
    opened = client.open(tuple(range(5, 105)))
    with pytest.raises(WireError, match=r"\(decode-box\) was revoked"):
        list(opened.stream)
    acceptance = decode_open_answer(seen[0])
    assert isinstance(acceptance, Acceptance)
    with pytest.raises(WireError, match="already used"):
        list(channel.stream(encode_stream_request(acceptance.ticket), joined.server.data_port))
