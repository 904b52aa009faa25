"""Keys: the node key that signs seals, the key that only one handoff has, and the AEAD under it [6].

The consumer sends 32 fresh random bytes inside `Open`; HKDF turns them into one AES-256-GCM key for
the frames that flow from producer to consumer. The position of a frame is its nonce, so a key never
sees a nonce twice, and a frame cannot be replayed, moved or reordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from muser_wire.errors import FrameError, SealError
from muser_wire.identities import Digest
from muser_wire.private_files import KeyFileError, publish_private, read_private

TAG_NBYTES = 16
FRAME_KEY_INFO = b"muser v1 frames producer to consumer"
SEAL_LABEL = b"muser v2 seal"
NODE_KEY_FILE_NBYTES = 32

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class NodeKey:
    """A node's Ed25519 key pair."""

    private: Ed25519PrivateKey

    @property
    def public_bytes(self) -> bytes:
        """The public key, 32 bytes."""
        return self.private.public_key().public_bytes_raw()

    def sign(self, statement: bytes) -> bytes:
        """Return the 64-byte signature of `statement`."""
        return self.private.sign(statement)

    @classmethod
    def load_or_create(cls, path: Path) -> NodeKey:
        """Return the key in `path`, made there on first use with mode 0600.

        Raises:
            KeyFileError: the file is readable by others, has another size, or cannot be written.
        """
        if not path.exists():
            publish_private(path, Ed25519PrivateKey.generate().private_bytes_raw(), keep_existing=True)
        content = read_private(path, NODE_KEY_FILE_NBYTES)
        if len(content) != NODE_KEY_FILE_NBYTES:
            raise KeyFileError(f"{path} has {len(content)} bytes, not {NODE_KEY_FILE_NBYTES}")
        return cls(Ed25519PrivateKey.from_private_bytes(content))


def derive_frame_key(secret: bytes, handoff_id: bytes) -> bytes:
    """Return the 32-byte AES key of one handoff's frames: HKDF-SHA256, salt = handoff id [6.1]."""
    return HKDF(hashes.SHA256(), 32, salt=handoff_id, info=FRAME_KEY_INFO).derive(secret)


class FrameCipher:
    """AES-256-GCM under one handoff's key; the nonce is the frame's position, big-endian in 12 bytes [6.2]."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._algorithm = algorithms.AES(key)

    def encrypt_into(self, position: int, parts: Sequence[Buffer], associated: bytes, out: memoryview) -> None:
        """Write ciphertext and tag of the joined `parts` to `out`, which has TAG_NBYTES more.

        Parts are read where they lie: joining them first would cost as much again as encrypting them.
        """
        if len(parts) == 1:
            self._aead.encrypt_into(_nonce(position), parts[0], associated, out)
            return
        encryptor = Cipher(self._algorithm, modes.GCM(_nonce(position))).encryptor()
        encryptor.authenticate_additional_data(associated)
        offset = 0
        for part in parts:
            offset += encryptor.update_into(part, out[offset:])
        encryptor.finalize()
        out[offset:] = encryptor.tag

    def decrypt_into(self, position: int, body: Buffer, associated: bytes, out: memoryview) -> None:
        """Write the plaintext of `body` to `out`, whose content is meaningless unless this returns.

        Raises:
            FrameError: the body or its associated data is not what the key's owner sealed at this position.
        """
        try:
            self._aead.decrypt_into(_nonce(position), body, associated, out)
        except InvalidTag as error:
            raise FrameError(f"frame {position} is not authentic") from error


def _nonce(position: int) -> bytes:
    return position.to_bytes(12, "big")


@dataclass(frozen=True)
class SealStatement:
    """What a producer signs [6.4]."""

    handoff_id: bytes
    schedule_digest: Digest
    transcript_digest: Digest
    segments: int
    payload_nbytes: int
    prefill_ns: int
    reused_tokens: int

    def encode(self) -> bytes:
        """Return the signed bytes: a label, then fields of fixed width."""
        return b"".join(
            (
                SEAL_LABEL,
                self.handoff_id,
                self.schedule_digest,
                self.transcript_digest,
                self.segments.to_bytes(8, "big"),
                self.payload_nbytes.to_bytes(8, "big"),
                self.prefill_ns.to_bytes(8, "big"),
                self.reused_tokens.to_bytes(8, "big"),
            )
        )


def verify_seal(statement: SealStatement, signature: bytes, node_key: bytes) -> None:
    """Check the producer's signature.

    Raises:
        SealError: the signature is not `node_key`'s over this statement.
    """
    try:
        Ed25519PublicKey.from_public_bytes(node_key).verify(signature, statement.encode())
    except (InvalidSignature, ValueError) as error:
        raise SealError(f"the seal of handoff {statement.handoff_id.hex()} is not signed by its producer") from error
