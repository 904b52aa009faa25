from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from muser_wire.auth import NodeKey, SealStatement, derive_frame_key, verify_seal
from muser_wire.errors import SealError
from muser_wire.identities import Digest
from muser_wire.private_files import KeyFileError

STATEMENT = SealStatement(b"h" * 16, Digest(b"s" * 32), Digest(b"t" * 32), 3, 4096, 5, 6)


def test_the_frame_key_is_hkdf_sha256_of_secret_and_handoff_id() -> None:
    # RFC 5869 by hand: extract with the handoff id as salt, expand one block with the label.
    import hmac

    secret, handoff_id = bytes(range(32)), bytes(range(16))
    extracted = hmac.digest(handoff_id, secret, "sha256")
    expected = hmac.digest(extracted, b"muser v1 frames producer to consumer" + b"\x01", "sha256")
    assert derive_frame_key(secret, handoff_id) == expected


def test_a_node_key_is_made_once_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "node.ed25519"
    first = NodeKey.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert NodeKey.load_or_create(path).public_bytes == first.public_bytes
    assert list(path.parent.iterdir()) == [path]


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.ed25519"
    NodeKey.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match=r"0644.*chmod 600"):
        NodeKey.load_or_create(path)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_file_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "node.ed25519"
    path.write_bytes(b"k" * size)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="bytes"):
        NodeKey.load_or_create(path)


def test_a_key_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(KeyFileError, match=r"file/node\.ed25519"):
        NodeKey.load_or_create(blocked / "node.ed25519")


def test_a_seal_verifies_with_its_producers_key_only(tmp_path: Path) -> None:
    ours, other = NodeKey.load_or_create(tmp_path / "a"), NodeKey.load_or_create(tmp_path / "b")
    signature = ours.sign(STATEMENT.encode())
    verify_seal(STATEMENT, signature, ours.public_bytes)
    Ed25519PublicKey.from_public_bytes(ours.public_bytes).verify(signature, STATEMENT.encode())
    with pytest.raises(SealError, match="not signed by its producer"):
        verify_seal(STATEMENT, signature, other.public_bytes)


def test_a_seal_binds_every_number(tmp_path: Path) -> None:
    key = NodeKey.load_or_create(tmp_path / "key")
    signature = key.sign(STATEMENT.encode())
    for field, value in [
        ("handoff_id", os.urandom(16)),
        ("schedule_digest", os.urandom(32)),
        ("transcript_digest", os.urandom(32)),
        ("segments", 4),
        ("payload_nbytes", 4097),
        ("prefill_ns", 6),
        ("reused_tokens", 7),
    ]:
        changed = SealStatement(**{**STATEMENT.__dict__, field: value})
        with pytest.raises(SealError):
            verify_seal(changed, signature, key.public_bytes)
