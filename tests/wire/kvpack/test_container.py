from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpack_support import FULL, KEY, SLIDING, blocks_of, expected_payload, identities

from muser_wire.identities import Digest
from muser_wire.kvpack.container import decode, decode_head, encode, header_nbytes
from muser_wire.kvpack.errors import BlockInvalid
from muser_wire.kvpack.naming import Namer
from muser_wire.model.safetensors import read_safetensors

IDS = list(range(40, 53))
NAMER = Namer(KEY, identities())
BLOCK = blocks_of(NAMER, SLIDING, IDS)[0]
FILE = b"".join(encode(SLIDING, NAMER, BLOCK))


def test_what_was_written_is_read_back() -> None:
    block = decode(SLIDING, NAMER, BLOCK.head, FILE)
    assert block == BLOCK
    assert bytes(block.payload) == expected_payload(SLIDING, IDS, 0, 8)


def test_a_file_is_a_safetensors_file_with_planes_by_layer(tmp_path: Path) -> None:
    (tmp_path / "block.safetensors").write_bytes(FILE)
    tensors = read_safetensors(tmp_path / "block.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "token_ids": (8,),
        "layers.0.k": (4, 1, 4),
        "layers.0.v": (4, 1, 4),
        "layers.1.k": (8, 1, 4),
        "layers.1.v": (8, 1, 4),
    }
    assert np.asarray(tensors["token_ids"].data).view("<u4").tolist() == IDS[:8]
    assert bytes(tensors["layers.0.k"].data) == expected_payload(SLIDING, IDS, 0, 8)[:32]


@given(st.integers(0, len(FILE) - 1), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(at: int, bit: int) -> None:
    data = bytearray(FILE)
    data[at] ^= 1 << bit
    with pytest.raises(BlockInvalid):
        decode(SLIDING, NAMER, BLOCK.head, bytes(data))


@given(st.integers(0, len(FILE) - 1))
def test_a_file_cut_short_is_noticed(length: int) -> None:
    with pytest.raises(BlockInvalid):
        decode(SLIDING, NAMER, BLOCK.head, FILE[:length])


def test_each_file_has_a_nonce_of_its_own_and_only_its_store_s_key_opens_it() -> None:
    again = b"".join(encode(SLIDING, NAMER, BLOCK))
    assert again != FILE
    assert decode(SLIDING, NAMER, BLOCK.head, again) == BLOCK
    with pytest.raises(BlockInvalid, match="differs from its seal"):
        decode(SLIDING, Namer(KEY[::-1], identities()), BLOCK.head, FILE)


@pytest.mark.parametrize("nonce", [b'"nonce":"00"', b'"nonce":"zz"', b'"nonce":1234', b'"once":"0000"'])
def test_a_header_without_a_nonce_is_refused(nonce: bytes) -> None:
    data = bytearray(FILE)
    at = data.index(b'"nonce":"')
    data[at : at + 9 + 24 + 1] = nonce.ljust(34)
    with pytest.raises(BlockInvalid):
        decode(SLIDING, NAMER, BLOCK.head, bytes(data))


def test_a_longer_file_another_block_s_file_or_state_is_refused() -> None:
    other = blocks_of(NAMER, SLIDING, IDS[::-1])[0]
    with pytest.raises(BlockInvalid):
        decode(SLIDING, NAMER, BLOCK.head, FILE + b"\x00")
    with pytest.raises(BlockInvalid, match="differs from its seal"):
        decode(SLIDING, NAMER, other.head, FILE)
    with pytest.raises(BlockInvalid):
        decode(SLIDING, Namer(KEY, identities(weights_digest=Digest(b"x" * 32))), BLOCK.head, FILE)
    with pytest.raises(BlockInvalid):
        decode(FULL, NAMER, BLOCK.head, FILE)


@given(st.binary(max_size=64))
def test_a_foreign_header_is_refused(data: bytes) -> None:
    with pytest.raises(BlockInvalid):
        decode_head(data)


def test_a_header_s_length_is_bounded() -> None:
    for data in (b"", b"\x00" * 7, (1 << 40).to_bytes(8, "little"), (1).to_bytes(8, "little")):
        with pytest.raises(BlockInvalid):
            header_nbytes(data)
