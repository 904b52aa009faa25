"""The reference lane's steps in torch, on a CPU or a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from muser_wire.reference.arithmetic import Array


class TorchArithmetic:
    """See `muser_wire.reference.arithmetic.Arithmetic`.

    torch.compile, `addcmul` and `add` with a factor fuse multiplications into additions: none of them is used.
    """

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def array(self, values: npt.NDArray[Any]) -> Array:
        """Return a tensor on the device."""
        # A copy, because numpy's array may be read-only, which torch has no notion of.
        return torch.from_numpy(np.array(values)).to(self._device)

    def host(self, x: Array) -> npt.NDArray[Any]:
        """Return a C-contiguous host array."""
        values: npt.NDArray[Any] = x.detach().cpu().contiguous().numpy()
        return values

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return +0."""
        return torch.zeros(shape, device=self._device)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """Return one value everywhere."""
        return torch.full(shape, value, device=self._device)

    def arange(self, start: int, stop: int) -> Array:
        """Return int32 numbers."""
        return torch.arange(start, stop, dtype=torch.int32, device=self._device)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return another shape."""
        return x.reshape(shape)

    def swap(self, x: Array, a: int, b: int) -> Array:
        """Return two axes exchanged."""
        return x.transpose(a, b)

    def broadcast(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return a broadcast view."""
        return x.expand(shape)

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        """Return tensors joined."""
        return torch.cat(parts, axis)

    def absolute(self, x: Array) -> Array:
        """Return |x|."""
        return x.abs()

    def rint(self, x: Array) -> Array:
        """Return whole numbers; torch rounds halves to even."""
        return x.round()

    def floor(self, x: Array) -> Array:
        """Return whole numbers, downwards."""
        return x.floor()

    def sqrt(self, x: Array) -> Array:
        """Return the square root by way of float64, rounded once more: right, which the CPU's float32 one is not."""
        return x.double().sqrt().float()

    def reciprocal(self, x: Array) -> Array:
        """Return 1 / x by a division: `reciprocal` may be approximate."""
        return torch.ones_like(x) / x

    def maximum(self, a: Array, b: Array | float) -> Array:
        """Return the larger."""
        return torch.maximum(a, b) if torch.is_tensor(b) else a.clamp(min=b)

    def minimum(self, a: Array, b: Array | float) -> Array:
        """Return the smaller."""
        return torch.minimum(a, b) if torch.is_tensor(b) else a.clamp(max=b)

    def select(self, condition: Array, a: Array, b: Array) -> Array:
        """Return a where the condition holds, else b."""
        return torch.where(condition, a, b)

    def largest(self, x: Array) -> Array:
        """Return the largest along the last axis."""
        return x.amax(-1, keepdim=True)

    def bits(self, x: Array) -> Array:
        """Return float32 bits."""
        return x.contiguous().view(torch.int32)

    def from_bits(self, x: Array) -> Array:
        """Return float32 of bits."""
        return x.contiguous().view(torch.float32)

    def to_int32(self, x: Array) -> Array:
        """Return int32."""
        return x.to(torch.int32)

    def to_float32(self, x: Array) -> Array:
        """Return float32."""
        return x.to(torch.float32)

    def to_float16(self, x: Array) -> Array:
        """Return float16."""
        return x.to(torch.float16)

    def integer_sum(self, x: Array) -> Array:
        """Return sums, exact in float32."""
        return x.sum(-1, keepdim=True)

    def integer_dot(self, a: Array, b: Array) -> Array:
        """Return matrix products, exact in float32; they would not be in TF32, which torch takes only when told to."""
        return torch.matmul(a, b)

    def evaluate(self, *arrays: Array) -> None:
        """Do nothing: torch computes in the order of its calls."""
