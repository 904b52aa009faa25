"""The golden handoff: bytes that another implementation made must be ours, and ours theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_wire.auth import NodeKey, SealStatement, derive_frame_key, verify_seal
from muser_wire.errors import WireError
from muser_wire.framing import FrameReader, FrameWriter
from muser_wire.identities import Digest
from muser_wire.messages import FrameKind, decode_begin, decode_seal, encode_begin, encode_seal

PATH = Path(__file__).parent.parent / "vectors" / "handoff.json"


@pytest.fixture
def vector() -> dict[str, Any]:
    raw = json.loads(PATH.read_text())
    return {
        name: bytes.fromhex(value) if isinstance(value, str) else value
        for name, value in raw.items()
        if name not in {"frames", "payloads"}
    } | {name: [bytes.fromhex(item) for item in raw[name]] for name in ("frames", "payloads")}


def opened(reader: FrameReader, raw: bytes) -> tuple[FrameKind, bytes]:
    frame = reader.parse(raw)
    out = bytearray(frame.payload_nbytes)
    reader.open(frame, memoryview(out))
    return frame.kind, bytes(out)


def test_the_frame_key(vector: dict[str, Any]) -> None:
    assert derive_frame_key(vector["secret"], vector["handoff_id"]) == vector["frame_key"]


def test_golden_frames_are_read_and_verified(vector: dict[str, Any]) -> None:
    reader = FrameReader(vector["frame_key"], vector["handoff_id"])
    first, *segments, last = vector["frames"]
    kind, plaintext = opened(reader, first)
    begin = decode_begin(plaintext)
    assert kind is FrameKind.BEGIN
    assert (begin.handoff_id, begin.incarnation) == (vector["handoff_id"], vector["incarnation"])
    assert begin.schedule_digest == vector["schedule_digest"]
    assert [opened(reader, raw) for raw in segments] == [(FrameKind.SEGMENT, p) for p in vector["payloads"]]
    transcript = reader.transcript_digest()
    assert transcript == vector["transcript_digest"]
    kind, plaintext = opened(reader, last)
    seal = decode_seal(plaintext)
    assert kind is FrameKind.SEAL
    statement = SealStatement(
        vector["handoff_id"],
        Digest(vector["schedule_digest"]),
        transcript,
        len(vector["payloads"]),
        sum(map(len, vector["payloads"])),
        vector["prefill_ns"],
        vector["reused_tokens"],
    )
    verify_seal(statement, seal.signature, vector["node_key"])


def test_the_same_frames_are_written(vector: dict[str, Any]) -> None:
    reader = FrameReader(vector["frame_key"], vector["handoff_id"])
    plaintexts = [opened(reader, raw) for raw in vector["frames"]]
    begin, seal = decode_begin(plaintexts[0][1]), decode_seal(plaintexts[-1][1])
    writer = FrameWriter(vector["frame_key"], vector["handoff_id"])
    written = [writer.write(FrameKind.BEGIN, encode_begin(begin))]
    written += [writer.write(FrameKind.SEGMENT, payload) for payload in vector["payloads"]]
    key = NodeKey(Ed25519PrivateKey.from_private_bytes(vector["node_seed"]))
    statement = SealStatement(
        vector["handoff_id"],
        Digest(vector["schedule_digest"]),
        writer.transcript_digest(),
        seal.segments,
        seal.payload_nbytes,
        vector["prefill_ns"],
        vector["reused_tokens"],
    )
    assert key.public_bytes == vector["node_key"]
    assert key.sign(statement.encode()) == seal.signature
    written.append(writer.write(FrameKind.SEAL, encode_seal(seal)))
    assert written == vector["frames"]


@pytest.mark.parametrize("index", range(5))
def test_every_golden_frame_with_one_byte_changed_is_refused(vector: dict[str, Any], index: int) -> None:
    raw = vector["frames"][index]
    for place in range(len(raw)):
        reader = FrameReader(vector["frame_key"], vector["handoff_id"])
        for before in vector["frames"][:index]:
            opened(reader, before)
        with pytest.raises(WireError):
            opened(reader, raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
