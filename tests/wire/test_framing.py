from __future__ import annotations

import contextlib
import tracemalloc

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from muser_wire.errors import FrameError
from muser_wire.framing import MAX_FRAME_NBYTES, FrameReader, FrameWriter, parse_frame
from muser_wire.messages import FrameKind
from muser_wire.stubs import producer_pb2 as pb

KEY, HANDOFF = bytes(range(32)), bytes(range(16))


def pair() -> tuple[FrameWriter, FrameReader]:
    return FrameWriter(KEY, HANDOFF), FrameReader(KEY, HANDOFF)


def opened(reader: FrameReader, raw: bytes) -> bytes:
    frame = reader.parse(raw)
    out = bytearray(frame.payload_nbytes)
    reader.open(frame, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 20])
def test_a_frame_comes_back_as_it_was_written(size: int) -> None:
    writer, reader = pair()
    payload = bytes(index % 251 for index in range(size))
    assert opened(reader, writer.write(FrameKind.SEGMENT, payload)) == payload


def test_a_frame_is_a_protobuf_message_with_aes_gcm_inside() -> None:
    writer, _ = pair()
    writer.write(FrameKind.BEGIN, b"first")
    message = pb.Frame.FromString(writer.write(FrameKind.SEGMENT, b"second"))
    header = pb.FrameHeader.FromString(message.header)
    assert (header.kind, header.position) == (pb.FRAME_KIND_SEGMENT, 1)
    nonce = (1).to_bytes(12, "big")
    assert AESGCM(KEY).decrypt(nonce, message.body, HANDOFF + message.header) == b"second"


def test_a_payload_is_not_copied_beside_sealing_and_opening() -> None:
    """Memory of a payload's size is neither taken to write a frame, once its buffers exist, nor to open one."""
    writer, reader = pair()
    payload, out = bytes(1 << 20), memoryview(bytearray(1 << 20))
    for _ in range(8):
        reader.open(reader.parse(writer.write(FrameKind.SEGMENT, payload)), out)
    tracemalloc.start()
    try:
        for _ in range(8):
            reader.open(reader.parse(writer.write(FrameKind.SEGMENT, payload)), out)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 64 << 10


@pytest.mark.parametrize("sizes", [(), (0,), (5, 0, 7), (1, 15, 16, 17), (1 << 19, 1 << 19)])
def test_a_payload_in_parts_gives_the_frame_of_the_whole(sizes: tuple[int, ...]) -> None:
    parts = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    whole, joined = (FrameWriter(KEY, HANDOFF) for _ in range(2))
    assert joined.write(FrameKind.SEGMENT, *parts) == whole.write(FrameKind.SEGMENT, b"".join(parts))
    assert joined.transcript_digest() == whole.transcript_digest()


def test_a_frame_that_somebody_holds_is_never_written_again() -> None:
    writer, reader = pair()
    payloads = [bytes([index]) * 1000 for index in range(20)]
    frames = [writer.write(FrameKind.SEGMENT, payload) for payload in payloads]
    opened = []
    for raw in frames:
        out = bytearray(1000)
        reader.open(reader.parse(raw), memoryview(out))
        opened.append(bytes(out))
    assert opened == payloads


def test_both_sides_reach_the_same_transcript() -> None:
    writer, reader = pair()
    before = writer.transcript_digest()
    for payload in (b"a", b"b"):
        opened(reader, writer.write(FrameKind.SEGMENT, payload))
    assert writer.transcript_digest() == reader.transcript_digest() != before


@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    writer, reader = pair()
    raw = bytearray(writer.write(FrameKind.SEGMENT, b"payload"))
    position = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[position // 8] ^= 1 << position % 8
    with pytest.raises(FrameError):
        opened(reader, bytes(raw))


def test_every_truncation_and_extension_is_refused() -> None:
    writer, reader = pair()
    raw = writer.write(FrameKind.SEGMENT, b"payload")
    for stop in range(len(raw)):
        with pytest.raises(FrameError):
            opened(reader, raw[:stop])
    with pytest.raises(FrameError, match="follow the frame"):
        opened(reader, raw + b"\x00")


def test_a_repeated_skipped_or_swapped_frame_is_out_of_place() -> None:
    writer, reader = pair()
    first, second, third = (writer.write(FrameKind.SEGMENT, bytes([index])) for index in range(3))
    with pytest.raises(FrameError, match="frame 0 was due, the peer sent 1"):
        reader.parse(second)
    opened(reader, first)
    with pytest.raises(FrameError, match="frame 1 was due, the peer sent 0"):
        reader.parse(first)
    with pytest.raises(FrameError, match="frame 1 was due, the peer sent 2"):
        reader.parse(third)


def test_a_frame_of_another_handoff_or_key_is_not_authentic() -> None:
    raw = FrameWriter(KEY, b"another handoff!").write(FrameKind.SEGMENT, b"x")
    with pytest.raises(FrameError, match="not authentic"):
        opened(FrameReader(KEY, HANDOFF), raw)
    raw = FrameWriter(bytes(32), HANDOFF).write(FrameKind.SEGMENT, b"x")
    with pytest.raises(FrameError, match="not authentic"):
        opened(FrameReader(KEY, HANDOFF), raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x0a",
        b"\x12\x10" + bytes(16),
        b"\x0a\x04\x08\x02\x10\x00" + b"\x12\x0f" + bytes(15),
        b"\x0a\x04\x08\x09\x10\x00" + b"\x12\x10" + bytes(16),
        b"\x0a\x00" + b"\x12\x10" + bytes(16),
        b"\x0a\x84\x00\x08\x02\x10\x00" + b"\x12\x10" + bytes(16),
        b"\x0a\x04\x08\x02\x10\x00" + b"\x12\xff\xff\xff\xff\x7f" + bytes(16),
        b"\x0a\x06\x08\x02\x10\x00\x18\x01" + b"\x12\x10" + bytes(16),
    ],
    ids=["empty", "cut", "no_header", "no_tag", "kind", "absent", "long_varint", "huge_claim", "unknown_field"],
)
def test_malformed_frames_are_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        parse_frame(raw)


def test_a_well_formed_frame_of_the_same_shape_is_accepted() -> None:
    frame = parse_frame(b"\x0a\x04\x08\x02\x10\x00" + b"\x12\x10" + bytes(16))
    assert (frame.kind, frame.position, frame.payload_nbytes) == (FrameKind.SEGMENT, 0, 0)


def test_a_frame_beyond_the_bound_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="exceeds"):
        parse_frame(bytes(MAX_FRAME_NBYTES + 1))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_frame_error(raw: bytes) -> None:
    with contextlib.suppress(FrameError):
        parse_frame(raw)
