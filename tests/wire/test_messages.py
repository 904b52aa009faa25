from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muser_wire import messages as m
from muser_wire.errors import RemoteProtocolError
from muser_wire.framing import varint
from muser_wire.identities import Digest, Identities
from muser_wire.schedule import WindowPolicy
from muser_wire.stubs import producer_pb2 as pb

IDENTITIES = Identities(
    spec_digest=Digest(b"s" * 32),
    tokenizer_digest=Digest(b"t" * 32),
    kv_layout="kv1/f16",
    lane="native",
    numerics_digest=Digest(b"n" * 32),
    chunk_tokens=2048,
    weights_digest=Digest(b"w" * 32),
)
DESCRIPTION = m.Description(IDENTITIES, b"{}", b"i" * 16, b"k" * 32, 4951, 8192, (), 0, 1_000_000, 1 << 30)
REQUEST = m.HandoffRequest(
    handoff_id=b"h" * 16,
    expected=IDENTITIES,
    incarnation=b"i" * 16,
    token_ids=np.array([5, 6, 7], dtype=np.uint32),
    held_tokens=1,
    policy=WindowPolicy.ROLLING,
    secret=b"s" * 32,
    allow_unqualified=False,
)
ACCEPTANCE = m.Acceptance(b"t" * 32, Digest(b"d" * 32), 1_000_000, 0)
BEGIN = m.Begin(b"h" * 16, IDENTITIES, b"i" * 16, Digest(b"d" * 32), 3, 4096)
SEAL = m.Seal(Digest(b"d" * 32), 3, 4096, 0, 2, b"g" * 64)

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any], Any, type]
CODECS: dict[str, Codec] = {
    "description": (m.encode_description, m.decode_description, DESCRIPTION, pb.DescribeResponse),
    "handoff_request": (m.encode_handoff_request, m.decode_handoff_request, REQUEST, pb.OpenRequest),
    "acceptance": (m.encode_open_answer, m.decode_open_answer, ACCEPTANCE, pb.OpenResponse),
    "refusal": (m.encode_open_answer, m.decode_open_answer, m.Refusal("busy", "later"), pb.OpenResponse),
    "begin": (m.encode_begin, m.decode_begin, BEGIN, pb.Begin),
    "seal": (m.encode_seal, m.decode_seal, SEAL, pb.Seal),
    "abort": (m.encode_abort, m.decode_abort, m.Abort("prefill_failed", ""), pb.Abort),
    "stream_request": (m.encode_stream_request, m.decode_stream_request, b"t" * 32, pb.StreamRequest),
}
codecs = pytest.mark.parametrize("name", CODECS)


def same(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


@codecs
def test_a_message_comes_back_as_it_was(name: str) -> None:
    encode, decode, value, _ = CODECS[name]
    assert same(decode(encode(value)), value)


@codecs
def test_every_truncation_is_refused(name: str) -> None:
    encode, decode, value, _ = CODECS[name]
    raw = encode(value)
    for stop in range(len(raw)):
        with pytest.raises(RemoteProtocolError):
            decode(raw[:stop])


@codecs
def test_an_unknown_field_is_refused(name: str) -> None:
    encode, decode, value, _ = CODECS[name]
    with pytest.raises(RemoteProtocolError, match="canonical form or has unknown fields"):
        decode(encode(value) + b"\xf8\x07\x01")


@codecs
def test_a_repeated_field_is_refused(name: str) -> None:
    encode, decode, value, _ = CODECS[name]
    raw = encode(value)
    with pytest.raises(RemoteProtocolError):
        decode(raw + raw)


@codecs
def test_every_absent_field_is_refused_by_name(name: str) -> None:
    encode, decode, value, stub_type = CODECS[name]
    whole = stub_type.FromString(encode(value))
    parent = getattr(whole, whole.WhichOneof("answer")) if stub_type is pb.OpenResponse else whole
    optional = {"kernels"}
    for field in parent.DESCRIPTOR.fields:
        if field.name in optional:
            continue
        stub = stub_type.FromString(encode(value))
        target = getattr(stub, stub.WhichOneof("answer")) if stub_type is pb.OpenResponse else stub
        target.ClearField(field.name)
        with pytest.raises(RemoteProtocolError, match=field.name):
            decode(stub.SerializeToString())


def changed(stub: Any, **fields: Any) -> bytes:
    for name, value in fields.items():
        setattr(stub, name, value)
    return bytes(stub.SerializeToString())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", 1),
        ("handoff_id", b"short"),
        ("incarnation", b"x" * 17),
        ("token_ids", b""),
        ("token_ids", b"\x01\x00\x00\x00"),
        ("token_ids", b"123456789"),
        ("held_tokens", 2),
        ("window_policy", 0),
        ("window_policy", 3),
        ("secret", b"x" * 31),
    ],
)
def test_an_open_request_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    stub = pb.OpenRequest.FromString(m.encode_handoff_request(REQUEST))
    with pytest.raises(RemoteProtocolError, match=field):
        m.decode_handoff_request(changed(stub, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_port", 0),
        ("data_port", 65536),
        ("max_prompt_tokens", 1),
        ("node_key", b""),
        ("spec_json", b""),
        ("predicted_wait_ns", 10**13 + 1),
        ("predicted_chunk_ns", 0),
        ("cache_nbytes", (1 << 50) + 1),
    ],
)
def test_a_description_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    stub = pb.DescribeResponse.FromString(m.encode_description(DESCRIPTION))
    with pytest.raises(RemoteProtocolError, match=field):
        m.decode_description(changed(stub, **{field: value}))


def test_over_long_repeated_fields_are_refused() -> None:
    stub = pb.DescribeResponse.FromString(m.encode_description(DESCRIPTION))
    stub.kernels.extend(["k"] * 64)
    assert m.decode_description(stub.SerializeToString()).kernels == ("k",) * 64
    stub.kernels.append("k")
    with pytest.raises(RemoteProtocolError, match="kernels has 65 entries"):
        m.decode_description(stub.SerializeToString())


def test_an_empty_answer_is_neither_yes_nor_no() -> None:
    with pytest.raises(RemoteProtocolError, match="no answer"):
        m.decode_open_answer(b"")


def test_a_request_never_shows_its_prompt_or_secret() -> None:
    shown = repr(dataclasses.replace(REQUEST, secret=b"very secret, 32 bytes long......"))
    assert "secret" not in shown
    assert "5, 6, 7" not in shown


def test_messages_for_people_are_cut_to_their_bound() -> None:
    assert len(m.decode_abort(m.encode_abort(m.Abort("code", "x" * 5000))).message) == m.MAX_MESSAGE_CHARS


def encode_header(value: tuple[m.FrameKind, int]) -> bytes:
    return m.encode_frame_header(*value)


FUZZED: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any], bytes]] = {
    **{name: (encode, decode, encode(value)) for name, (encode, decode, value, _) in CODECS.items()},
    "frame_header": (encode_header, m.decode_frame_header, encode_header((m.FrameKind.SEGMENT, 300))),
}
fuzzed = pytest.mark.parametrize("name", FUZZED)


def understood(name: str, raw: bytes) -> bool:
    """Decode what a peer might send: it is refused as the peer's fault, or it means exactly these bytes."""
    encode, decode, _ = FUZZED[name]
    try:
        value = decode(raw)
    except RemoteProtocolError:
        return False
    assert encode(value) == raw
    return True


@dataclasses.dataclass(frozen=True)
class RawField:
    """One field as it lies on the wire; `content` is without the length before it."""

    number: int
    wire_type: int
    content: bytes

    def encode(self) -> bytes:
        length = varint(len(self.content)) if self.wire_type == 2 else b""
        return varint(self.number << 3 | self.wire_type) + length + self.content


def split_varint(raw: bytes) -> tuple[int, bytes]:
    size = next(index for index, byte in enumerate(raw) if byte < 128) + 1
    return sum((byte & 127) << 7 * index for index, byte in enumerate(raw[:size])), raw[size:]


def split(raw: bytes) -> list[RawField]:
    """Take a valid message apart; the schema has varint and length-delimited fields only."""
    fields = []
    while raw:
        key, raw = split_varint(raw)
        if key & 7 == 2:
            size, raw = split_varint(raw)
        else:
            assert key & 7 == 0
            size = len(raw) - len(split_varint(raw)[1])
        fields.append(RawField(key >> 3, key & 7, raw[:size]))
        raw = raw[size:]
    return fields


def join(fields: list[RawField]) -> bytes:
    return b"".join(field.encode() for field in fields)


NESTED = {"description": 1, "handoff_request": 2, "begin": 1, "acceptance": 0, "refusal": 0}
"""The place of each message's inner message."""


def altered(draw: st.DrawFn, fields: list[RawField]) -> bytes:
    """Change one field of a message, or where it stands."""
    at = draw(st.integers(0, len(fields) - 1))
    field, others = fields[at], [*fields[:at], *fields[at + 1 :]]
    match draw(
        st.sampled_from(["resize", "duplicate", "move", "drop", "wire_type", "number", "length", "long_varint"])
    ):
        case "resize":
            content = (field.content * 2 + b"\x01" * 8)[: draw(st.integers(0, 2 * len(field.content) + 8))]
            return join([*fields[:at], dataclasses.replace(field, content=content), *fields[at + 1 :]])
        case "duplicate":
            place = draw(st.integers(0, len(fields)))
            return join([*fields[:place], field, *fields[place:]])
        case "move":
            place = draw(st.integers(0, len(others)))
            return join([*others[:place], field, *others[place:]])
        case "drop":
            return join(others)
        case "wire_type":
            changed_field = dataclasses.replace(field, wire_type=draw(st.integers(0, 7)))
        case "number":
            changed_field = dataclasses.replace(field, number=draw(st.integers(0, 16) | st.integers(0, 1 << 29)))
        case "length":
            claimed = varint(draw(st.integers(0, 1 << 32)))
            wrong = varint(field.number << 3 | 2) + claimed + field.content
            return join(fields[:at]) + wrong + join(fields[at + 1 :])
        case _:
            # The same number in more bytes than it takes.
            padded = field.content[:-1] + bytes([field.content[-1] | 128, 0]) if field.content else b"\x80\x00"
            changed_field = dataclasses.replace(field, content=padded)
    return join([*fields[:at], changed_field, *fields[at + 1 :]])


@st.composite
def mutants(draw: st.DrawFn, name: str) -> bytes:
    """A valid encoding with one to three changes, inside its inner message too."""
    raw = FUZZED[name][2]
    if draw(st.booleans()):
        fields = split(raw)
        if name in NESTED and draw(st.booleans()):
            at = NESTED[name]
            inner = dataclasses.replace(fields[at], content=altered(draw, split(fields[at].content)))
            raw = join([*fields[:at], inner, *fields[at + 1 :]])
        else:
            raw = altered(draw, fields)
    for change in draw(st.lists(st.sampled_from(["flip", "cut", "splice", "insert"]), max_size=2)):
        at = draw(st.integers(0, len(raw)))
        match change:
            case "flip":
                raw = raw[:at] + bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in raw[at : at + 1]) + raw[at + 1 :]
            case "cut":
                raw = raw[:at] + raw[at + draw(st.integers(1, 40)) :]
            case "splice":
                other = FUZZED[draw(st.sampled_from(sorted(FUZZED)))][2]
                raw = raw[:at] + other[draw(st.integers(0, len(other))) :]
            case _:
                raw = raw[:at] + draw(st.binary(max_size=20)) + raw[at:]
    return raw


@fuzzed
def test_the_fuzz_takes_messages_apart_as_they_are(name: str) -> None:
    raw = FUZZED[name][2]
    assert join(split(raw)) == raw
    if name in NESTED:
        inner = split(raw)[NESTED[name]].content
        assert len(split(inner)) > 1
        assert join(split(inner)) == inner
    assert understood(name, raw)


@fuzzed
def test_every_flipped_bit_is_refused_or_means_what_it_says(name: str) -> None:
    raw = FUZZED[name][2]
    kept = 0
    for bit in range(8 * len(raw)):
        mutant = bytearray(raw)
        mutant[bit // 8] ^= 1 << bit % 8
        kept += understood(name, bytes(mutant))
    # Digests, keys and counts take other values; tags, lengths and versions do not.
    assert 0 < kept < 8 * len(raw)


@fuzzed
@given(st.data())
def test_a_mutant_is_refused_or_means_what_it_says(name: str, data: st.DataObject) -> None:
    understood(name, data.draw(mutants(name)))


@fuzzed
@given(raw=st.binary(max_size=120))
def test_no_bytes_raise_anything_but_a_protocol_error(name: str, raw: bytes) -> None:
    understood(name, raw)


@given(st.binary(max_size=40) | st.just(m.encode_describe_request()) | st.just(m.encode_describe_request() + b"\x00"))
def test_a_describe_request_has_one_encoding(raw: bytes) -> None:
    if raw == m.encode_describe_request():
        m.decode_describe_request(raw)
        return
    with pytest.raises(RemoteProtocolError):
        m.decode_describe_request(raw)
