"""Every message of the wire as a frozen type, and the one function that turns its bytes into it.

proto3 reads empty or cut-off bytes as a valid message of zeros, keeps unknown fields silently and
lets a repeated singular field win silently. So each decoder here checks that the bytes are the
canonical encoding of what was understood [5.3], then presence and range of every field.

Over 400 lines, so that all messages stand in one place beside their schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from muser_wire.errors import RemoteProtocolError
from muser_wire.fields import blob, checked_text, number, parse, present, text
from muser_wire.identities import Digest, Identities
from muser_wire.schedule import MAX_CHUNK_TOKENS, MAX_PROMPT_TOKENS, WindowPolicy
from muser_wire.stubs import producer_pb2 as pb

PROTOCOL_VERSION = 2
DIGEST_NBYTES = 32
ID_NBYTES = 16
SECRET_NBYTES = 32
TICKET_NBYTES = 32
NODE_KEY_NBYTES = 32
SIGNATURE_NBYTES = 64
MAX_SPEC_NBYTES = 1 << 20
"""A spec is a few KiB of JSON; 1 MiB leaves room for thousands of layers."""
MAX_KERNELS = 64
MAX_CODE_CHARS = 64
MAX_LABEL_CHARS = 128
MAX_MESSAGE_CHARS = 1024
MAX_SEGMENTS = 1 << 32
MAX_PAYLOAD_NBYTES = 1 << 50
MAX_DURATION_NS = 10**13
"""Nearly three hours: longer than any chunk or prefill that a user waits for."""
MAX_CONTROL_NBYTES = 4 * MAX_PROMPT_TOKENS + 4096
"""The largest control message: a prompt of four bytes a token, and its headers."""

TokenIds = npt.NDArray[np.uint32]

_POLICY_STUBS = {
    WindowPolicy.FINAL: pb.WINDOW_POLICY_FINAL,
    WindowPolicy.ROLLING: pb.WINDOW_POLICY_ROLLING,
}
_POLICIES = {int(stub): policy for policy, stub in _POLICY_STUBS.items()}


class FrameKind(Enum):
    """What a frame is. The numbers are those of the schema."""

    BEGIN = pb.FRAME_KIND_BEGIN
    SEGMENT = pb.FRAME_KIND_SEGMENT
    SEAL = pb.FRAME_KIND_SEAL
    ABORT = pb.FRAME_KIND_ABORT


@dataclass(frozen=True)
class Description:
    """What a producer says of itself: what it is, and what a handoff that is opened now may expect [5.11]."""

    identities: Identities
    spec_json: bytes
    incarnation: bytes
    node_key: bytes
    data_port: int
    max_prompt_tokens: int
    kernels: tuple[str, ...]
    predicted_wait_ns: int = 0
    predicted_chunk_ns: int = 1
    cache_nbytes: int = 0


@dataclass(frozen=True)
class HandoffRequest:
    """What a consumer asks for. `token_ids` holds the whole prompt, uint32 `[prompt_tokens]`."""

    handoff_id: bytes
    expected: Identities
    incarnation: bytes
    token_ids: TokenIds
    held_tokens: int
    policy: WindowPolicy
    secret: bytes
    allow_unqualified: bool

    def __repr__(self) -> str:
        """Return ids and sizes only: a prompt or a secret never reaches a log by way of a repr."""
        return f"HandoffRequest(handoff_id={self.handoff_id.hex()}, tokens={len(self.token_ids)})"


@dataclass(frozen=True)
class Acceptance:
    """The producer's yes: it expects to begin after `predicted_wait_ns`, a whole chunk to take `predicted_chunk_ns`."""

    ticket: bytes
    schedule_digest: Digest
    predicted_chunk_ns: int
    predicted_wait_ns: int


@dataclass(frozen=True)
class Refusal:
    """The producer's no, before any work."""

    code: str
    message: str


@dataclass(frozen=True)
class Begin:
    """The first frame's plaintext: what the producer is about to send."""

    handoff_id: bytes
    identities: Identities
    incarnation: bytes
    schedule_digest: Digest
    segments: int
    payload_nbytes: int


@dataclass(frozen=True)
class Seal:
    """The last frame's plaintext: what was sent, signed. `reused_tokens` leading ones were not computed for it."""

    transcript_digest: Digest
    segments: int
    payload_nbytes: int
    prefill_ns: int
    reused_tokens: int
    signature: bytes


@dataclass(frozen=True)
class Abort:
    """The plaintext of the frame that ends a handoff without success."""

    code: str
    message: str


def encode_describe_request() -> bytes:
    """Return the bytes of a describe request."""
    return pb.DescribeRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()


def decode_describe_request(raw: bytes) -> None:
    """Check a describe request; it carries nothing but the version."""
    check_version(parse(pb.DescribeRequest, raw))


def encode_description(value: Description) -> bytes:
    """Return the bytes of a describe response."""
    return pb.DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        identities=_identities_stub(value.identities),
        spec_json=value.spec_json,
        incarnation=value.incarnation,
        node_key=value.node_key,
        data_port=value.data_port,
        max_prompt_tokens=value.max_prompt_tokens,
        kernels=value.kernels,
        predicted_wait_ns=value.predicted_wait_ns,
        predicted_chunk_ns=value.predicted_chunk_ns,
        cache_nbytes=value.cache_nbytes,
    ).SerializeToString()


def decode_description(raw: bytes) -> Description:
    """Return the describe response in `raw`.

    Raises:
        RemoteProtocolError: a field is absent, unknown or out of range.
    """
    stub = parse(pb.DescribeResponse, raw)
    check_version(stub)
    if len(stub.kernels) > MAX_KERNELS:
        raise RemoteProtocolError(f"DescribeResponse.kernels has {len(stub.kernels)} entries, at most {MAX_KERNELS}")
    return Description(
        identities=_identities(stub, "identities"),
        spec_json=blob(stub, "spec_json", 1, MAX_SPEC_NBYTES),
        incarnation=blob(stub, "incarnation", ID_NBYTES),
        node_key=blob(stub, "node_key", NODE_KEY_NBYTES),
        data_port=number(stub, "data_port", 1, 65535),
        max_prompt_tokens=number(stub, "max_prompt_tokens", 2, MAX_PROMPT_TOKENS),
        kernels=tuple(checked_text(name, "DescribeResponse.kernels", 1, MAX_CODE_CHARS) for name in stub.kernels),
        predicted_wait_ns=number(stub, "predicted_wait_ns", 0, MAX_DURATION_NS),
        predicted_chunk_ns=number(stub, "predicted_chunk_ns", 1, MAX_DURATION_NS),
        cache_nbytes=number(stub, "cache_nbytes", 0, MAX_PAYLOAD_NBYTES),
    )


def encode_handoff_request(value: HandoffRequest) -> bytes:
    """Return the bytes of an open request."""
    return pb.OpenRequest(
        protocol_version=PROTOCOL_VERSION,
        handoff_id=value.handoff_id,
        expected=_identities_stub(value.expected),
        incarnation=value.incarnation,
        token_ids=value.token_ids.astype("<u4").tobytes(),
        held_tokens=value.held_tokens,
        window_policy=_POLICY_STUBS[value.policy],
        secret=value.secret,
        allow_unqualified=value.allow_unqualified,
    ).SerializeToString()


def decode_handoff_request(raw: bytes) -> HandoffRequest:
    """Return the open request in `raw`. Token ids are not compared with a vocabulary here.

    Raises:
        RemoteProtocolError: a field is absent, unknown or out of range.
    """
    stub = parse(pb.OpenRequest, raw)
    check_version(stub)
    ids = blob(stub, "token_ids", 8, 4 * MAX_PROMPT_TOKENS)
    if len(ids) % 4:
        raise RemoteProtocolError(f"OpenRequest.token_ids has {len(ids)} bytes, not a multiple of 4")
    tokens = len(ids) // 4
    policy = _POLICIES[number(stub, "window_policy", min(_POLICIES), max(_POLICIES))]
    return HandoffRequest(
        handoff_id=blob(stub, "handoff_id", ID_NBYTES),
        expected=_identities(stub, "expected"),
        incarnation=blob(stub, "incarnation", ID_NBYTES),
        token_ids=np.frombuffer(ids, dtype="<u4"),
        held_tokens=number(stub, "held_tokens", 0, tokens - 2),
        policy=policy,
        secret=blob(stub, "secret", SECRET_NBYTES),
        allow_unqualified=bool(present(stub, "allow_unqualified")),
    )


def encode_open_answer(value: Acceptance | Refusal) -> bytes:
    """Return the bytes of an open response."""
    if isinstance(value, Acceptance):
        accepted = pb.Accepted(
            ticket=value.ticket,
            schedule_digest=value.schedule_digest,
            predicted_chunk_ns=value.predicted_chunk_ns,
            predicted_wait_ns=value.predicted_wait_ns,
        )
        return pb.OpenResponse(accepted=accepted).SerializeToString()
    refusal = pb.Refusal(code=value.code, message=value.message[:MAX_MESSAGE_CHARS])
    return pb.OpenResponse(refusal=refusal).SerializeToString()


def decode_open_answer(raw: bytes) -> Acceptance | Refusal:
    """Return the producer's yes or no.

    Raises:
        RemoteProtocolError: neither is there, or a field is absent, unknown or out of range.
    """
    stub = parse(pb.OpenResponse, raw)
    match stub.WhichOneof("answer"):
        case "accepted":
            return Acceptance(
                ticket=blob(stub.accepted, "ticket", TICKET_NBYTES),
                schedule_digest=Digest(blob(stub.accepted, "schedule_digest", DIGEST_NBYTES)),
                predicted_chunk_ns=number(stub.accepted, "predicted_chunk_ns", 1, MAX_DURATION_NS),
                predicted_wait_ns=number(stub.accepted, "predicted_wait_ns", 0, MAX_DURATION_NS),
            )
        case "refusal":
            return Refusal(
                code=text(stub.refusal, "code", 1, MAX_CODE_CHARS),
                message=text(stub.refusal, "message", 0, MAX_MESSAGE_CHARS),
            )
        case _:
            raise RemoteProtocolError("OpenResponse has no answer")


def encode_stream_request(ticket: bytes) -> bytes:
    """Return the bytes of a stream request."""
    return pb.StreamRequest(ticket=ticket).SerializeToString()


def decode_stream_request(raw: bytes) -> bytes:
    """Return the ticket in a stream request.

    Raises:
        RemoteProtocolError: the ticket is absent or has another size.
    """
    return blob(parse(pb.StreamRequest, raw), "ticket", TICKET_NBYTES)


def encode_begin(value: Begin) -> bytes:
    """Return the plaintext of a begin frame."""
    return pb.Begin(
        handoff_id=value.handoff_id,
        identities=_identities_stub(value.identities),
        incarnation=value.incarnation,
        schedule_digest=value.schedule_digest,
        segments=value.segments,
        payload_nbytes=value.payload_nbytes,
    ).SerializeToString()


def decode_begin(raw: bytes) -> Begin:
    """Return a begin frame's content.

    Raises:
        RemoteProtocolError: a field is absent, unknown or out of range.
    """
    stub = parse(pb.Begin, raw)
    return Begin(
        handoff_id=blob(stub, "handoff_id", ID_NBYTES),
        identities=_identities(stub, "identities"),
        incarnation=blob(stub, "incarnation", ID_NBYTES),
        schedule_digest=Digest(blob(stub, "schedule_digest", DIGEST_NBYTES)),
        segments=number(stub, "segments", 1, MAX_SEGMENTS),
        payload_nbytes=number(stub, "payload_nbytes", 1, MAX_PAYLOAD_NBYTES),
    )


def encode_seal(value: Seal) -> bytes:
    """Return the plaintext of a seal frame."""
    return pb.Seal(
        transcript_digest=value.transcript_digest,
        segments=value.segments,
        payload_nbytes=value.payload_nbytes,
        prefill_ns=value.prefill_ns,
        reused_tokens=value.reused_tokens,
        signature=value.signature,
    ).SerializeToString()


def decode_seal(raw: bytes) -> Seal:
    """Return a seal frame's content; the signature is not verified here.

    Raises:
        RemoteProtocolError: a field is absent, unknown or out of range.
    """
    stub = parse(pb.Seal, raw)
    return Seal(
        transcript_digest=Digest(blob(stub, "transcript_digest", DIGEST_NBYTES)),
        segments=number(stub, "segments", 1, MAX_SEGMENTS),
        payload_nbytes=number(stub, "payload_nbytes", 1, MAX_PAYLOAD_NBYTES),
        prefill_ns=number(stub, "prefill_ns", 0, MAX_DURATION_NS),
        reused_tokens=number(stub, "reused_tokens", 0, MAX_PROMPT_TOKENS),
        signature=blob(stub, "signature", SIGNATURE_NBYTES),
    )


def encode_abort(value: Abort) -> bytes:
    """Return the plaintext of an abort frame."""
    return pb.Abort(code=value.code, message=value.message[:MAX_MESSAGE_CHARS]).SerializeToString()


def decode_abort(raw: bytes) -> Abort:
    """Return an abort frame's content.

    Raises:
        RemoteProtocolError: a field is absent, unknown or out of range.
    """
    stub = parse(pb.Abort, raw)
    return Abort(text(stub, "code", 1, MAX_CODE_CHARS), text(stub, "message", 0, MAX_MESSAGE_CHARS))


def encode_frame_header(kind: FrameKind, position: int) -> bytes:
    """Return the canonical bytes of a frame header."""
    return pb.FrameHeader(kind=kind.value, position=position).SerializeToString()


def decode_frame_header(raw: bytes) -> tuple[FrameKind, int]:
    """Return (kind, position) of a frame header.

    Raises:
        RemoteProtocolError: a field is absent or unknown, or the kind is.
    """
    stub = parse(pb.FrameHeader, raw)
    kind = number(stub, "kind", pb.FRAME_KIND_BEGIN, pb.FRAME_KIND_ABORT)
    return FrameKind(kind), number(stub, "position", 0, MAX_SEGMENTS + 1)


def _identities_stub(value: Identities) -> pb.Identities:
    return pb.Identities(
        spec_digest=value.spec_digest,
        tokenizer_digest=value.tokenizer_digest,
        kv_layout=value.kv_layout,
        lane=value.lane,
        numerics_digest=value.numerics_digest,
        chunk_tokens=value.chunk_tokens,
        weights_digest=value.weights_digest,
    )


def _identities(parent: Message, field: str) -> Identities:
    stub = present(parent, field)
    if not isinstance(stub, pb.Identities):
        raise RemoteProtocolError(f"{parent.DESCRIPTOR.name}.{field} is no Identities")
    return Identities(
        spec_digest=Digest(blob(stub, "spec_digest", DIGEST_NBYTES)),
        tokenizer_digest=Digest(blob(stub, "tokenizer_digest", DIGEST_NBYTES)),
        kv_layout=text(stub, "kv_layout", 1, MAX_LABEL_CHARS),
        lane=text(stub, "lane", 1, MAX_CODE_CHARS),
        numerics_digest=Digest(blob(stub, "numerics_digest", DIGEST_NBYTES)),
        chunk_tokens=number(stub, "chunk_tokens", 1, MAX_CHUNK_TOKENS),
        weights_digest=Digest(blob(stub, "weights_digest", DIGEST_NBYTES)),
    )


def check_version(stub: Message) -> None:
    """Refuse a message of another protocol version [1.1]."""
    version = present(stub, "protocol_version")
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(f"protocol_version differs: {PROTOCOL_VERSION} here, {version} at the peer")
