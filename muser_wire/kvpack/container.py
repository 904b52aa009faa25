"""A block as a file: safetensors, with its tokens, its planes by layer, and a digest over all of it.

The header is canonical: it is a function of the head, the geometry and the digest. A reader rebuilds it and
compares, so no byte of a file escapes a check: the header by comparison, the rest by the digest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.block import ID_NBYTES, Block, BlockHead, block_layout, make_block
from muser_wire.kvpack.errors import BlockInvalid

FORMAT = "muser kvpack 1"
LENGTH_NBYTES = 8
ALIGNMENT = 8
MAX_HEADER_NBYTES = 1 << 20
"""A header of a thousand layers takes 300 kB."""


def encode(geometry: Geometry, state: Digest, block: Block) -> tuple[bytes, memoryview]:
    """Return a block's file in two parts: header with token ids, and payload, which is not copied."""
    return _prefix(geometry, state, block.head, block.payload), block.payload


def decode(geometry: Geometry, state: Digest, head: BlockHead, data: bytes) -> Block:
    """Return the block in a file's bytes, after checking every one of them.

    Raises:
        BlockInvalid: it is not this block of this state, or a byte is wrong.
    """
    start = LENGTH_NBYTES + header_nbytes(data) + len(head.ids)
    payload = memoryview(data)[start:]
    if data[:start] != _prefix(geometry, state, head, payload):
        raise BlockInvalid(f"block {head.name.hex()[:16]} differs from its digest")
    return make_block(geometry, head, payload)


def check_file(data: bytes) -> Digest:
    """Check every byte of a file without knowing its model; return the name of the block in it.

    Raises:
        BlockInvalid: a byte is wrong.
    """
    start = LENGTH_NBYTES + header_nbytes(data)
    header = data[LENGTH_NBYTES:start]
    head, _, _ = decode_head(header)
    entries = json.loads(header)
    stated = entries["__metadata__"].get("digest")
    entries["__metadata__"]["digest"] = ""
    digest = _digest(_framed(entries), memoryview(data)[start:])
    entries["__metadata__"]["digest"] = digest
    if stated != digest or data[:start] != _framed(entries):
        raise BlockInvalid(f"block {head.name.hex()[:16]} differs from its digest")
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
        head = BlockHead(name, parent, int(meta["start"]), b"", {"yes": True, "no": False}[meta["decoded"]])
        return head, state, int(tokens)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BlockInvalid("the header is not that of a block") from error


def drops_rows(header: bytes) -> bool:
    """Say whether a layer holds fewer tokens than the block, by its header."""
    parsed: dict[str, Any] = json.loads(header)
    (tokens,) = parsed["token_ids"]["shape"]
    return any(entry["shape"][0] != tokens for name, entry in parsed.items() if name.startswith("layers."))


def _prefix(geometry: Geometry, state: Digest, head: BlockHead, payload: memoryview) -> bytes:
    """Return what comes before a block's payload."""
    entries = _entries(geometry, state, head)
    entries["__metadata__"]["digest"] = _digest(_framed(entries) + head.ids, payload)
    return _framed(entries) + head.ids


def _digest(before: bytes, rest: memoryview) -> str:
    """Return SHA-256 over a whole file in whose header the digest's own place is empty."""
    h = hashlib.sha256(b"muser kvpack block 1")
    h.update(before)
    h.update(rest)
    return h.hexdigest()


def _entries(geometry: Geometry, state: Digest, head: BlockHead) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "__metadata__": {
            "decoded": "yes" if head.decoded else "no",
            "digest": "",
            "format": FORMAT,
            "name": head.name.hex(),
            "parent": head.parent.hex(),
            "start": str(head.start),
            "state": state.hex(),
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
