"""Writes handoff.json beside this file: one small handoff, built from docs/protocol.md without the product's code.

Run by `make vectors` after a change of the wire, which also bumps the protocol's version. Protobuf is
written by hand here, keys and frames with `cryptography` alone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SECRET = bytes(range(32))
HANDOFF_ID = bytes(range(100, 116))
INCARNATION = bytes(range(200, 216))
SCHEDULE_DIGEST = hashlib.sha256(b"a schedule").digest()
NODE_SEED = bytes(range(32, 64))
PAYLOADS = [bytes([index]) * size for index, size in enumerate((16, 300, 5))]
PREFILL_NS = 123_456_789
REUSED_TOKENS = 77


def varint(value: int) -> bytes:
    out = b""
    while True:
        value, low = value >> 7, value & 127
        out += bytes([low | (128 if value else 0)])
        if not value:
            return out


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(*values: int | bytes) -> bytes:
    """A message whose fields 1, 2, ... have these values."""
    return b"".join(field(number, value) for number, value in enumerate(values, 1))


def digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


IDENTITIES = message(
    digest(b"spec"),
    digest(b"tokenizer"),
    b"kv1/f16/k,v/token,head,dim",
    b"native",
    digest(b"rules"),
    2048,
    digest(b"w"),
)


def frames() -> tuple[bytes, bytes, list[bytes], bytes]:
    """Return (key, transcript digest, frames, node's public key) [6]."""
    extracted = hmac.digest(HANDOFF_ID, SECRET, "sha256")
    key = hmac.digest(extracted, b"muser v1 frames producer to consumer\x01", "sha256")
    node = Ed25519PrivateKey.from_private_bytes(NODE_SEED)
    total = sum(map(len, PAYLOADS))
    begin = message(HANDOFF_ID, IDENTITIES, INCARNATION, SCHEDULE_DIGEST, len(PAYLOADS), total)
    transcript = hashlib.sha256(b"muser v1 transcript")
    sent: list[bytes] = []

    def frame(kind: int, plaintext: bytes) -> None:
        position = len(sent)
        header = message(kind, position)
        body = AESGCM(key).encrypt(position.to_bytes(12, "big"), plaintext, HANDOFF_ID + header)
        transcript.update(bytes([len(header)]) + header + body[-16:])
        sent.append(message(header, body))

    frame(1, begin)
    for payload in PAYLOADS:
        frame(2, payload)
    transcript_digest = transcript.digest()
    numbers = b"".join(value.to_bytes(8, "big") for value in (len(PAYLOADS), total, PREFILL_NS, REUSED_TOKENS))
    statement = b"muser v2 seal" + HANDOFF_ID + SCHEDULE_DIGEST + transcript_digest + numbers
    frame(3, message(transcript_digest, len(PAYLOADS), total, PREFILL_NS, node.sign(statement), REUSED_TOKENS))
    return key, transcript_digest, sent, node.public_key().public_bytes_raw()


def main() -> None:
    key, transcript_digest, sent, public = frames()
    vector = {
        "protocol_version": 2,
        "secret": SECRET.hex(),
        "handoff_id": HANDOFF_ID.hex(),
        "incarnation": INCARNATION.hex(),
        "schedule_digest": SCHEDULE_DIGEST.hex(),
        "identities": IDENTITIES.hex(),
        "node_seed": NODE_SEED.hex(),
        "node_key": public.hex(),
        "frame_key": key.hex(),
        "payloads": [payload.hex() for payload in PAYLOADS],
        "prefill_ns": PREFILL_NS,
        "reused_tokens": REUSED_TOKENS,
        "transcript_digest": transcript_digest.hex(),
        "frames": [raw.hex() for raw in sent],
    }
    Path(__file__).with_name("handoff.json").write_text(json.dumps(vector, indent=1) + "\n")


if __name__ == "__main__":
    main()
