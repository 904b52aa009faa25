from __future__ import annotations

import numpy as np
import pytest

from muser_decode.engine import widening
from muser_decode.engine.widening import widen_rows
from muser_wire.geometry import ElementType

EVERY = np.arange(1 << 16, dtype=np.uint16)


def expected_bits(words: np.ndarray, element: ElementType) -> np.ndarray:
    """The float32 of each 16-bit word, by another way: numpy's own conversion, or a shift of unsigned words."""
    if element is ElementType.F16:
        return words.view(np.float16).astype(np.float32).view(np.uint32)
    return words.astype(np.uint32) << 16


@pytest.mark.parametrize("element", list(ElementType))
@pytest.mark.parametrize("elements", [1 << 18, 96, 1])
def test_every_value_is_exact_in_passes_of_any_size(
    element: ElementType, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widening, "PASS_ELEMENTS", elements)
    shape = (1 << 10, 4, 16) if elements > 1 else (16, 4, 4)
    words = EVERY[: shape[0] * shape[1] * shape[2]].reshape(shape)
    target = np.full((4, shape[0] + 3, shape[2]), np.float32(7))
    widen_rows(words.view(np.int16), target[:, 2:-1], element)
    expected = expected_bits(words, element).transpose(1, 0, 2)
    written = target[:, 2:-1].view(np.uint32)
    # Of a NaN only that it is one, and its sign, is the same everywhere.
    number = ~np.isnan(expected.view(np.float32))
    assert np.array_equal(written[number], expected[number])
    assert np.isnan(written.view(np.float32)[~number]).all()
    assert (target[:, :2] == 7).all()
    assert (target[:, -1] == 7).all()


@pytest.mark.parametrize("value", [0x7C00, 0xFC00, 0x7E01, 0x7BFF, 0x0001, 0x8000])
def test_one_special_value_among_others_is_written_as_it_is(value: int) -> None:
    words = np.full((5, 1, 4), 0x3C00, np.uint16)
    words[3, 0, 2] = value
    target = np.zeros((1, 5, 4), np.float32)
    widen_rows(words.view(np.int16), target, ElementType.F16)
    expected = np.ones((1, 5, 4), np.float32)
    expected[0, 3, 2] = np.array(value, np.uint16).view(np.float16)
    np.testing.assert_array_equal(target, expected)
