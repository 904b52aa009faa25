"""Tensors that a checkpoint keeps as several arrays: codes, scales and offsets under names of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muser_wire.model.blockscaled import BlockMode, BlockScaledWeight, decode_block_scaled
from muser_wire.model.container import StoredTensor
from muser_wire.model.encodings import AffineWeight


@dataclass(frozen=True, eq=False)
class AffineTensor:
    """An MLX-quantised matrix: w = q * scale + offset. `codes` holds words of packed `bits`-wide integers.

    Values are the formula's in float32. MLX itself computes it in the type of the scales.
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    group_size: int
    codes: StoredTensor
    scales: StoredTensor
    offsets: StoredTensor

    @property
    def path(self) -> Path:
        """The file that holds the codes."""
        return self.codes.path

    @property
    def encoding(self) -> str:
        """Such as "AFFINE4/64": bits and group size."""
        return f"AFFINE{self.bits}/{self.group_size}"

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes

    @property
    def tensor_scale(self) -> float | None:
        """None: every factor is a group's."""
        return None

    def f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows [start, stop): a product and a sum in float32."""
        count, cols = stop - start, self.shape[1]
        values = self._q(start, stop).astype(np.float32).reshape(count, -1, self.group_size)
        values *= self.scales.f32(start, stop)[..., None]
        values += self.offsets.f32(start, stop)[..., None]
        return values.reshape(count, cols)

    def affine(self) -> AffineWeight:
        """Return the packed form."""
        rows = self.shape[0]
        scales, offsets = self.scales.f32(0, rows), self.offsets.f32(0, rows)
        return AffineWeight(self.bits, self._q(0, rows), scales, offsets, self.group_size)

    def block_scaled(self) -> BlockScaledWeight | None:
        """Return None: the codes are integers."""
        return None

    def _q(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return codes `[rows, cols]`. A word's lowest bits are its first code, and words are little-endian."""
        data = self.codes.rows(start, stop)
        if self.bits == 8:
            return data.copy()
        return np.stack((data & np.uint8(15), data >> np.uint8(4)), axis=-1).reshape(stop - start, -1)


@dataclass(frozen=True, eq=False)
class BlockScaledTensor:
    """A block-scaled matrix, and the factor of the whole tensor where its format has one.

    Formats differ in how they write the factor down: w = code * scale * `multiplier` / `divisor`, one
    of the two being 1. None of both: the format has no factor.
    """

    name: str
    shape: tuple[int, ...]
    mode: BlockMode
    codes: StoredTensor
    scales: StoredTensor
    multiplier: float | None = None
    divisor: float | None = None

    @property
    def path(self) -> Path:
        """The file that holds the codes."""
        return self.codes.path

    @property
    def encoding(self) -> str:
        """Such as "NVFP4"."""
        return self.mode.encoding

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def tensor_scale(self) -> float | None:
        """The factor as a multiplier, rounded to float32."""
        if self.divisor is not None:
            return float(np.float32(1) / np.float32(self.divisor))
        return self.multiplier

    def f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows [start, stop): code * scale is exact, so only the factor rounds, once."""
        values = decode_block_scaled(self.mode, self.codes.rows(start, stop), self.scales.rows(start, stop))
        if self.multiplier is not None:
            values *= np.float32(self.multiplier)
        if self.divisor is not None:
            values /= np.float32(self.divisor)
        return values

    def affine(self) -> AffineWeight | None:
        """Return None: the codes are floats."""
        return None

    def block_scaled(self) -> BlockScaledWeight:
        """Return the arrays as MLX takes them, copied out of the map."""
        rows = self.shape[0]
        packed, scales = self.codes.rows(0, rows).copy().view("<u4"), self.scales.rows(0, rows).copy()
        factor = self.tensor_scale
        return BlockScaledWeight(self.mode, packed, scales, 1.0 if factor is None else factor)


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """A tensor that one array holds but for a factor of the whole: FP8, or NVFP4 in a GGUF file."""

    name: str
    stored: StoredTensor
    factor: float

    @property
    def path(self) -> Path:
        """The file that holds the codes."""
        return self.stored.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.stored.shape

    @property
    def encoding(self) -> str:
        """The encoding of the codes."""
        return self.stored.encoding

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return self.stored.nbytes

    @property
    def tensor_scale(self) -> float | None:
        """The factor."""
        return self.factor

    def f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows [start, stop), multiplied by the factor in float32."""
        values = self.stored.f32(start, stop)
        values *= np.float32(self.factor)
        return values

    def affine(self) -> AffineWeight | None:
        """Return None: the codes are floats."""
        return None

    def block_scaled(self) -> BlockScaledWeight | None:
        """Return None: the layout is not MLX's."""
        return None
