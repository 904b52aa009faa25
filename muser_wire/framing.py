"""Frames: wire-compatible with `muser.v1.Frame`, written and read by hand around the payload [5.2].

A frame is two length-delimited fields, header then body, each once and in this order. The body is
sealed straight into the bytes object that the transport sends, and opened straight into the
caller's buffer: no copy besides. Encryption reads the cache's planes where they lie and writes the
message that grpc takes (from a GPU there is one copy before it, into host memory); decryption writes the
memory that the engine reads.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

from muser_wire.auth import TAG_NBYTES, Buffer, FrameCipher
from muser_wire.errors import FrameError, RemoteProtocolError
from muser_wire.identities import Digest
from muser_wire.messages import FrameKind, decode_frame_header, encode_frame_header

HEADER_FIELD = b"\x0a"
BODY_FIELD = b"\x12"
MAX_HEADER_NBYTES = 16
"""Two varint fields: kind (2 bytes) and position (at most 11)."""
MAX_FRAME_NBYTES = 4 << 20
"""The largest frame on the data port, in bytes: gRPC's own default limit on a message."""
_MAX_VARINT_NBYTES = 5
_REUSED_BUFFERS = 4
"""Frames whose memory a writer uses again. grpc's server lets go of a frame when it has the one after the next."""


class _Transcript:
    """SHA-256 over header and tag of each frame before the seal [6.4]."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"muser v1 transcript")

    def add(self, header: bytes, tag: Buffer) -> None:
        self._hash.update(len(header).to_bytes(1, "big"))
        self._hash.update(header)
        self._hash.update(tag)

    def digest(self) -> Digest:
        return Digest(self._hash.digest())


class FrameWriter:
    """Seals the frames of one handoff, each at the next position, so that no nonce is used twice."""

    def __init__(self, key: bytes, handoff_id: bytes) -> None:
        self._cipher = FrameCipher(key)
        self._handoff_id = handoff_id
        self._position = 0
        self._transcript = _Transcript()
        self._buffers = [io.BytesIO() for _ in range(_REUSED_BUFFERS)]

    def write(self, kind: FrameKind, *parts: Buffer) -> bytes:
        """Return the wire bytes of the next frame, whose payload is the joined `parts`. They are read, not kept."""
        header = encode_frame_header(kind, self._position)
        size = sum(map(len, parts)) + TAG_NBYTES
        prefix = b"".join((HEADER_FIELD, varint(len(header)), header, BODY_FIELD, varint(size)))
        buffer = self._buffer(len(prefix) + size)
        with buffer.getbuffer() as out:
            out[: len(prefix)] = prefix
            with out[len(prefix) :] as body:
                self._cipher.encrypt_into(self._position, parts, self._handoff_id + header, body)
                self._transcript.add(header, bytes(body[-TAG_NBYTES:]))
        self._position += 1
        return buffer.getvalue()

    def transcript_digest(self) -> Digest:
        """Return the digest over every frame written so far."""
        return self._transcript.digest()

    def _buffer(self, nbytes: int) -> io.BytesIO:
        """Return a buffer of exactly `nbytes` bytes, of any content, for the next frame.

        BytesIO hands out the memory of the very object that getvalue() returns, without a copy. When
        somebody still holds that object, getbuffer() leaves it alone and moves to fresh memory: reuse saves
        an allocation and its zeros, and cannot change a frame that is still to be sent.
        """
        index = self._position % len(self._buffers)
        if self._buffers[index].seek(0, io.SEEK_END) != nbytes:
            self._buffers[index] = io.BytesIO(bytes(nbytes))
        return self._buffers[index]


@dataclass(frozen=True)
class SealedFrame:
    """A frame whose form is right and whose content is not yet verified."""

    kind: FrameKind
    position: int
    header: bytes
    body: memoryview

    @property
    def payload_nbytes(self) -> int:
        """Size of the plaintext, in bytes."""
        return len(self.body) - TAG_NBYTES


class FrameReader:
    """Opens the frames of one handoff, each at the next position."""

    def __init__(self, key: bytes, handoff_id: bytes) -> None:
        self._cipher = FrameCipher(key)
        self._handoff_id = handoff_id
        self._position = 0
        self._transcript = _Transcript()

    def parse(self, raw: bytes) -> SealedFrame:
        """Return the frame in `raw` without opening it.

        Raises:
            FrameError: the form is wrong, or the position is not the next one.
        """
        frame = parse_frame(raw)
        if frame.position != self._position:
            raise FrameError(f"frame {self._position} was due, the peer sent {frame.position}")
        return frame

    def open(self, frame: SealedFrame, out: memoryview) -> None:
        """Write the verified plaintext to `out`, which has exactly its size.

        Raises:
            FrameError: the frame is not authentic; `out` then holds nothing of use.
        """
        if len(out) != frame.payload_nbytes:
            raise FrameError(f"frame {frame.position} carries {frame.payload_nbytes} bytes, {len(out)} were due")
        self._cipher.decrypt_into(frame.position, frame.body, self._handoff_id + frame.header, out)
        self._transcript.add(frame.header, frame.body[-TAG_NBYTES:])
        self._position += 1

    def transcript_digest(self) -> Digest:
        """Return the digest over every frame opened so far."""
        return self._transcript.digest()


def parse_frame(raw: bytes) -> SealedFrame:
    """Return the two fields of a frame, the body as a view into `raw`.

    Raises:
        FrameError: anything but header then body, each once, minimal lengths, nothing after.
    """
    if len(raw) > MAX_FRAME_NBYTES:
        raise FrameError(f"a frame of {len(raw)} bytes exceeds {MAX_FRAME_NBYTES}")
    view = memoryview(raw)
    header, at = _field(view, 0, HEADER_FIELD)
    body, at = _field(view, at, BODY_FIELD)
    if at != len(raw):
        raise FrameError(f"{len(raw) - at} bytes follow the frame")
    if len(header) > MAX_HEADER_NBYTES or len(body) < TAG_NBYTES:
        raise FrameError(f"a frame with a header of {len(header)} and a body of {len(body)} bytes cannot be")
    header_bytes = bytes(header)
    try:
        kind, position = decode_frame_header(header_bytes)
    except RemoteProtocolError as error:
        raise FrameError(str(error)) from error
    return SealedFrame(kind, position, header_bytes, body)


def _field(view: memoryview, at: int, tag: bytes) -> tuple[memoryview, int]:
    if view[at : at + 1] != tag:
        raise FrameError(f"field {tag.hex()} was due at byte {at} of the frame")
    size, at = _read_varint(view, at + 1)
    if size > len(view) - at:
        raise FrameError(f"a field of {size} bytes does not fit the frame's {len(view)}")
    return view[at : at + size], at + size


def varint(value: int) -> bytes:
    """Return a length as protobuf writes it, in as few bytes as it takes."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(view[at : at + _MAX_VARINT_NBYTES]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            if byte == 0 and index:
                break
            return value, at + index + 1
    raise FrameError(f"no minimal length at byte {at} of the frame")
