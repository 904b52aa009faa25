from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from muser_wire.model.encodings import block_size, decode_affine, decode_f32

READABLE = sorted(name for name in Kind.__members__ if block_size(name) is not None)
AFFINE_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}
ROWS, COLS = 6, 512


def stored(encoding: str, seed: int = 0) -> np.ndarray:
    """Random bytes of the right length: every pattern of codes, with scales that are finite."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[Kind[encoding]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, ROWS * COLS // weights * nbytes, dtype=np.uint8)
    if encoding in AFFINE_BITS:
        blocks = data.reshape(-1, nbytes)
        blocks[:, :4] = (
            rng.normal(0, 3, (len(blocks), 2)).astype("<f2").view(np.uint8) if nbytes % 4 == 0 else blocks[:, :4]
        )
        blocks[:, :2] = rng.normal(0, 0.1, len(blocks)).astype("<f2").reshape(-1, 1).view(np.uint8)
    return data


def test_the_common_encodings_are_readable() -> None:
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "NVFP4"} <= set(
        READABLE
    )


@pytest.mark.parametrize("encoding", ["I8", "I32", "Q8_K", "NO_SUCH"])
def test_what_is_no_weight_has_no_block_size(encoding: str) -> None:
    assert block_size(encoding) is None


@pytest.mark.parametrize("encoding", READABLE)
def test_f32_equals_the_package_s_dequantisation_bit_for_bit(encoding: str) -> None:
    data = stored(encoding)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data.reshape(ROWS, -1), Kind[encoding]).reshape(ROWS, COLS).astype(np.float32)
    found = decode_f32(encoding, data, (ROWS, COLS))
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert not np.shares_memory(found, data)


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    data = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], "<u2").view(np.uint8)
    np.testing.assert_array_equal(decode_f32("BF16", data, (4,)), np.array([1, -2, np.inf, 2.0**-133], np.float32))


@pytest.mark.parametrize("encoding", AFFINE_BITS)
def test_affine_equals_dequantisation_exactly(encoding: str) -> None:
    data = stored(encoding, seed=1)
    packed = decode_affine(encoding, data, (ROWS, COLS))
    assert packed is not None
    assert (packed.bits, packed.group_size) == (AFFINE_BITS[encoding], 32)
    assert packed.q.shape == (ROWS, COLS)
    assert packed.q.dtype == np.uint8
    assert packed.q.max() == 2**packed.bits - 1
    assert packed.scales.shape == packed.offsets.shape == (ROWS, COLS // 32)
    scales, offsets = (np.repeat(part, 32, axis=1) for part in (packed.scales, packed.offsets))
    values = packed.q.astype(np.float32) * scales + offsets
    expected = gguf.dequantize(data.reshape(ROWS, -1), Kind[encoding])
    # Equal as numbers: 0.0 and -0.0 are, and a zero's sign is all that may differ.
    np.testing.assert_array_equal(values, expected)


def test_affine_of_a_block_written_out_by_hand() -> None:
    # d = 0.5, m = -1; byte j holds weight j in its low and weight j + 16 in its high nibble.
    head = np.array([0.5, -1.0], "<f2").tobytes()
    data = np.frombuffer(head + bytes(range(16)), np.uint8)
    packed = decode_affine("Q4_1", data, (1, 32))
    assert packed is not None
    assert packed.q.tolist() == [[*range(16), *[0] * 16]]
    assert packed.scales.tolist() == [[0.5]]
    assert packed.offsets.tolist() == [[-1.0]]


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q4_K", "Q6_K"])
def test_other_encodings_have_no_affine_form(encoding: str) -> None:
    assert decode_affine(encoding, stored(encoding), (ROWS, COLS)) is None


def test_a_vector_has_no_affine_form() -> None:
    assert decode_affine("Q8_0", stored("Q8_0"), (ROWS * COLS,)) is None


def test_damaged_scales_give_numbers_and_no_warning() -> None:
    block = np.concatenate((np.array([np.inf], "<f2").view(np.uint8), np.zeros(32, np.uint8)))
    assert np.isnan(decode_f32("Q8_0", block, (1, 32))).all()
