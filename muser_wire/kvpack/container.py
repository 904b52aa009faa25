"""A block as a file: safetensors, with its tokens, its planes by layer, and a seal over all of it.

The header is canonical: it is a function of the head, the geometry and the seal. A reader rebuilds it and
compares, so no byte of a file escapes a check: the header by comparison, the rest by the seal.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.block import ID_NBYTES, Block, BlockHead, block_layout, make_block
from muser_wire.kvpack.errors import BlockInvalid
from muser_wire.kvpack.naming import Namer, seal_key

FORMAT = "muser kvpack 1"
LENGTH_NBYTES = 8
ALIGNMENT = 8
NONCE_NBYTES = 12
PIECE_NBYTES = 8 << 20
MAX_HEADER_NBYTES = 1 << 20
"""A header of a thousand layers takes 300 kB."""


def encode(geometry: Geometry, namer: Namer, block: Block) -> tuple[bytes, memoryview]:
    """Return a block's file in two parts: header with token ids, and payload, which is not copied."""
    seal = Seal(namer.seal_key, os.urandom(NONCE_NBYTES))
    return _prefix(geometry, namer, block.head, block.payload, seal), block.payload


def decode(geometry: Geometry, namer: Namer, head: BlockHead, data: bytes) -> Block:
    """Return the block in a file's bytes, after checking every one of them.

    Raises:
        BlockInvalid: it is not this block of this state, or a byte is wrong.
    """
    length = LENGTH_NBYTES + header_nbytes(data)
    payload = memoryview(data)[length + len(head.ids) :]
    seal = Seal(namer.seal_key, _nonce(data[LENGTH_NBYTES:length]))
    start = length + len(head.ids)
    if data[:start] != _prefix(geometry, namer, head, payload, seal):
        raise BlockInvalid(f"block {head.name.hex()[:16]} differs from its seal")
    return make_block(geometry, head, payload)


def check_file(key: bytes, data: bytes) -> Digest:
    """Check every byte of a file under a store's key, without knowing its model; return the name of the block in it.

    Raises:
        BlockInvalid: a byte is wrong.
    """
    start = LENGTH_NBYTES + header_nbytes(data)
    header = data[LENGTH_NBYTES:start]
    head, _, _ = decode_head(header)
    entries = json.loads(header)
    seal = Seal(seal_key(key), _nonce(header))
    if data[:start] != seal.close(entries, b"", memoryview(data)[start:]):
        raise BlockInvalid(f"block {head.name.hex()[:16]} differs from its seal")
    return head.name


def header_nbytes(data: bytes) -> int:
    """Return how long the JSON header is that a file begins with.

    Raises:
        BlockInvalid: no such file begins so.
    """
    length = int.from_bytes(data[:LENGTH_NBYTES], "little")
    if len(data) < LENGTH_NBYTES or not 2 <= length <= MAX_HEADER_NBYTES:
        raise BlockInvalid("the file has no safetensors header")
    return length


def decode_head(header: bytes) -> tuple[BlockHead, Digest, int]:
    """Return head (its ids empty), state and token count that a JSON header names. None of it is verified.

    Raises:
        BlockInvalid: it is not the header of a block in this format.
    """
    try:
        parsed: dict[str, Any] = json.loads(header)
        meta = parsed["__metadata__"]
        if meta["format"] != FORMAT:
            raise BlockInvalid(f"the format is {meta['format']!r}, not {FORMAT!r}")
        name, parent, state = (Digest(bytes.fromhex(meta[field])) for field in ("name", "parent", "state"))
        (tokens,) = parsed["token_ids"]["shape"]
        decoded_from = int(meta["decoded_from"]) if meta["decoded_from"] else None
        head = BlockHead(name, parent, int(meta["start"]), b"", decoded_from)
        return head, state, int(tokens)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BlockInvalid("the header is not that of a block") from error


@dataclass(frozen=True)
class Seal:
    """A keyed digest over a whole file: the tag of AES-GCM over data that is not encrypted.

    It runs at memory speed, where SHA-256 is slower than a good disk. `nonce` is fresh for each file.
    """

    key: bytes
    nonce: bytes

    def close(self, entries: dict[str, Any], ids: bytes, payload: memoryview) -> bytes:
        """Return length, header and ids of a file whose header has these entries, with nonce and tag filled in."""
        entries["__metadata__"] |= {"nonce": self.nonce.hex(), "tag": ""}
        sealer = Cipher(algorithms.AES(self.key), modes.GCM(self.nonce)).encryptor()
        sealer.authenticate_additional_data(_framed(entries) + ids)
        # In pieces, so that no other thread waits long for the interpreter.
        for at in range(0, len(payload), PIECE_NBYTES):
            sealer.authenticate_additional_data(payload[at : at + PIECE_NBYTES])
        sealer.finalize()
        entries["__metadata__"]["tag"] = sealer.tag.hex()
        return _framed(entries) + ids


def _nonce(header: bytes) -> bytes:
    try:
        nonce = bytes.fromhex(json.loads(header)["__metadata__"]["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BlockInvalid("the header names no nonce") from error
    if len(nonce) != NONCE_NBYTES:
        raise BlockInvalid("the header names no nonce")
    return nonce


def _prefix(geometry: Geometry, namer: Namer, head: BlockHead, payload: memoryview, seal: Seal) -> bytes:
    """Return what comes before a block's payload."""
    return seal.close(_entries(geometry, namer.state, head), head.ids, payload)


def _entries(geometry: Geometry, state: Digest, head: BlockHead) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "__metadata__": {
            "decoded_from": "" if head.decoded_from is None else str(head.decoded_from),
            "format": FORMAT,
            "name": head.name.hex(),
            "nonce": "",
            "parent": head.parent.hex(),
            "start": str(head.start),
            "state": state.hex(),
            "tag": "",
        },
        "token_ids": _entry("U32", [head.tokens], 0, head.tokens * ID_NBYTES),
    }
    for pair in block_layout(geometry, head.start, head.stop):
        shape = [pair.stop - pair.start, geometry.kv_heads, geometry.head_dim]
        for index, plane in enumerate("kv"):
            first = len(head.ids) + pair.offset + index * pair.nbytes // 2
            entries[f"layers.{pair.layer}.{plane}"] = _entry(
                geometry.element.name, shape, first, first + pair.nbytes // 2
            )
    return entries


def _framed(entries: dict[str, Any]) -> bytes:
    """Return header length and header, padded."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text


def _entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}
