"""Calls that no peer of ours would make, in memory and over real gRPC: refused by name, and nobody is worse off."""

from __future__ import annotations

from typing import Any

import pytest

from muser_decode.client import ProducerState
from muser_decode.engine.request import Route
from muser_wire.errors import WireError
from muser_wire.stubs import producer_pb2 as pb

CALL_S = 10.0
MAX_PROMPT_TOKENS = 1 << 20
TWO_GIB_CLAIM = b"\xff\xff\xff\xff\x07"
UNKNOWN_FIELD = b"\xf8\x07\x01"


def open_request(pair: Any) -> pb.OpenRequest:
    """The last request that the decode node sent, with tokens that could be prefilled."""
    return pb.OpenRequest.FromString(pair.service.request)


def without(stub: Any, name: str) -> bytes:
    stub.ClearField(name)
    return bytes(stub.SerializeToString())


def over_long(stub: Any) -> bytes:
    stub.token_ids = bytes(4 * (MAX_PROMPT_TOKENS + 1))
    return bytes(stub.SerializeToString())


OPENS: dict[str, tuple[Any, str]] = {
    "zero-length": (lambda stub: b"", "protocol_version"),
    "unknown-field": (lambda stub: stub.SerializeToString() + UNKNOWN_FIELD, "unknown fields"),
    "absent-secret": (lambda stub: without(stub, "secret"), "secret"),
    "absent-tokens": (lambda stub: without(stub, "token_ids"), "token_ids"),
    "over-long-tokens": (over_long, "token_ids"),
    "two-gib-claim": (lambda stub: stub.SerializeToString() + b"\x2a" + TWO_GIB_CLAIM + bytes(64), "OpenRequest"),
}


@pytest.mark.parametrize(("build", "named"), OPENS.values(), ids=OPENS)
def test_a_malformed_open(pair: Any, local_answer: Any, build: Any, named: str) -> None:
    assert pair.ask().report.route is Route.REMOTE
    with pytest.raises(WireError, match=named):
        pair.client._channel.open(build(open_request(pair)), CALL_S)
    assert pair.producer.scheduler.load == 0
    answer = pair.ask()
    assert (answer.report.route, answer.tokens) == (Route.REMOTE, local_answer.tokens)


def kernels_over_long(raw: bytes) -> bytes:
    stub = pb.DescribeResponse.FromString(raw)
    del stub.kernels[:]
    stub.kernels.extend(["k"] * 65)
    return bytes(stub.SerializeToString())


DESCRIPTIONS: dict[str, tuple[Any, str]] = {
    "zero-length": (lambda raw: b"", "protocol_version"),
    "unknown-field": (lambda raw: raw + UNKNOWN_FIELD, "unknown fields"),
    "absent-incarnation": (lambda raw: without(pb.DescribeResponse.FromString(raw), "incarnation"), "incarnation"),
    "over-long-kernels": (kernels_over_long, "kernels has 65 entries"),
    "two-gib-claim": (lambda raw: raw + b"\x1a" + TWO_GIB_CLAIM + bytes(64), "DescribeResponse"),
}


@pytest.mark.parametrize(("build", "named"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_malformed_description(
    pair: Any, local_answer: Any, monkeypatch: pytest.MonkeyPatch, build: Any, named: str
) -> None:
    honest = pair.service.inner.describe
    with monkeypatch.context() as patch:
        patch.setattr(pair.service.inner, "describe", lambda request: build(honest(request)))
        status = pair.client.refresh()
        assert status.state is not ProducerState.READY
        assert named in status.reason
        answer = pair.ask()
        assert (answer.report.route, answer.tokens) == (Route.LOCAL, local_answer.tokens)
    assert pair.client.refresh().state is ProducerState.READY
    assert pair.ask().report.route is Route.REMOTE
