"""What a decode node knows of its producer, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from muser_decode.client import Consumer, ProducerClient, ProducerState
from muser_wire.errors import HandoffRefused, TransportError
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Digest, digest_of
from muser_wire.messages import Description, encode_description
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.transport.base import FrameStream

WAIT_S = 10.0


class Channel:
    """Describes one producer after another; an exception in the list is raised."""

    def __init__(self) -> None:
        self.answers: list[bytes | Exception] = []
        self.asked = threading.Event()
        self.waited: list[float] = []
        self.second: bytes | None = None

    def describe(self, request: bytes, timeout_s: float, *, wait: bool = False) -> bytes:
        if wait:
            self.waited.append(timeout_s)
            if self.second is None:
                raise TransportError("not yet")
            return self.second
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.asked.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def open(self, request: bytes, timeout_s: float) -> bytes:
        raise TransportError("not used here")

    def stream(self, request: bytes, data_port: int) -> FrameStream:
        raise TransportError("not used here")

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def consumer(tiny_llama: Path) -> Consumer:
    checkpoint = open_checkpoint(tiny_llama)
    identities = node_identities(
        checkpoint, load_tokenizer(tiny_llama), element=ElementType.F16, lane=Lane.NATIVE, chunk_tokens=64
    )
    return Consumer(checkpoint.spec, identities, Geometry.of(checkpoint.spec, ElementType.F16))


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def client(channel: Channel, consumer: Consumer) -> Iterator[ProducerClient]:
    client = ProducerClient(channel, consumer)
    yield client
    client.stop()


def description(consumer: Consumer, *, node_key: bytes = b"k" * 32, spec_json: bytes | None = None) -> bytes:
    spec_json = consumer.spec.canonical_json() if spec_json is None else spec_json
    identities = consumer.identities
    if spec_json != consumer.spec.canonical_json():
        digest = digest_of(b"muser spec 1", spec_json)
        identities = type(identities)(**{**identities.__dict__, "spec_digest": Digest(digest)})
    return encode_description(Description(identities, spec_json, b"i" * 16, node_key, 4951, 2048, ()))


def test_a_producer_that_fits_is_ready(client: ProducerClient, channel: Channel, consumer: Consumer) -> None:
    channel.answers = [description(consumer)]
    assert client.status.state is ProducerState.UNKNOWN
    assert client.refresh().state is ProducerState.READY


def test_one_that_cannot_be_reached_and_comes_back(
    client: ProducerClient, channel: Channel, consumer: Consumer
) -> None:
    channel.answers = [TransportError("unavailable: refused"), description(consumer)]
    assert client.refresh().reason == "unavailable: refused"
    with pytest.raises(HandoffRefused, match="unavailable: refused"):
        client.open(range(100))
    assert client.refresh().state is ProducerState.READY


@pytest.mark.parametrize("again", [True, False])
def test_a_ready_producer_that_misses_one_answer_is_asked_once_more_before_it_counts_as_gone(
    client: ProducerClient, channel: Channel, consumer: Consumer, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    channel.answers = [description(consumer), TransportError("unavailable: ping timeout")]
    client.refresh()
    caplog.clear()
    channel.second = description(consumer) if again else None
    status = client.refresh()
    assert channel.waited == [1.0]
    assert status.state is (ProducerState.READY if again else ProducerState.UNREACHABLE)
    # What went wrong first is what is told: the second try says no more than that nobody came.
    assert status.reason == ("" if again else "unavailable: ping timeout")
    assert ("state=unreachable" in caplog.text) is not again
    # One that is gone has no second try at the next look.
    client.refresh()
    assert len(channel.waited) == (2 if again else 1)


def test_a_refusal_is_no_miss(client: ProducerClient, channel: Channel, consumer: Consumer) -> None:
    channel.answers = [description(consumer), HandoffRefused("unpaired", "revoked")]
    client.refresh()
    assert client.refresh().state is ProducerState.REFUSED
    assert channel.waited == []


def test_another_node_key_is_refused_by_name(client: ProducerClient, channel: Channel, consumer: Consumer) -> None:
    channel.answers = [description(consumer), description(consumer, node_key=b"x" * 32)]
    client.refresh()
    status = client.refresh()
    assert status.state is ProducerState.REFUSED
    assert status.reason == f"node_key differs: {(b'k' * 8).hex()} here, {(b'x' * 8).hex()} at the peer"


@pytest.mark.parametrize("text", [b"[" * 200_000, b"not json", b"[]", b'{"layers": 3}'])
def test_a_spec_that_is_none_is_refused(
    client: ProducerClient, channel: Channel, consumer: Consumer, text: bytes
) -> None:
    channel.answers = [description(consumer, spec_json=text)]
    assert client.refresh().state is ProducerState.REFUSED


def test_the_monitor_outlives_a_fault_of_its_own(
    client: ProducerClient, channel: Channel, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muser_decode.client.POLL_S", 0.01)
    channel.answers = [description(consumer), ValueError("a bug"), description(consumer)]
    client.start()
    for _ in range(500):
        if len(channel.answers) == 1 and client.status.state is ProducerState.READY:
            break
        threading.Event().wait(0.01)
    assert len(channel.answers) == 1
    assert client.status.state is ProducerState.READY


def test_a_producer_that_is_down_is_asked_less_and_less_often_until_it_is_back(
    client: ProducerClient, channel: Channel, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    class Wanted:
        """Takes no time; ends the watch after the last answer."""

        def wait(self, timeout_s: float) -> None:
            waited.append(timeout_s)
            if len(waited) == 9:
                client._stopped.set()

        def clear(self) -> None:
            pass

        def set(self) -> None:
            pass

    monkeypatch.setattr(client, "_wanted", Wanted())
    down = TransportError("unavailable: refused")
    channel.answers = [*[down] * 6, description(consumer), down, down]
    client._watch()
    assert waited == [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 1.0, 1.0]
    # One that was down is given the time to connect; the first look of all is not. One that was ready has a second.
    assert channel.waited == [2.0] * 6 + [1.0]


def test_a_failed_handoff_has_the_producer_asked_at_once(
    client: ProducerClient, channel: Channel, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muser_decode.client.POLL_S", 3600.0)
    channel.answers = [description(consumer)]
    client.start()
    channel.answers = [TransportError("unavailable: refused")]
    channel.asked.clear()
    client.look()
    assert channel.asked.wait(WAIT_S)
