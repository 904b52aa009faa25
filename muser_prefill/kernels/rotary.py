"""Rotary positions in the rotate-half layout."""

from __future__ import annotations

import torch

from muser_wire.model.spec import RopeSpec


class RotaryTable:
    """Cosines and sines of every position, `[positions, 1, ...]` f32, computed in float64 and rounded once."""

    def __init__(self, rope: RopeSpec, head_dim: int, positions: int, device: torch.device) -> None:
        self._half = rope.rotary_dim // 2
        frequencies = torch.tensor(rope.inverse_frequencies(), dtype=torch.float64)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
        # Components beyond rotary_dim keep their value: times 1.
        still = torch.ones(positions, head_dim - rope.rotary_dim, dtype=torch.float64)
        cos = torch.cat([angles.cos(), angles.cos(), still], dim=-1)
        self._cos = cos.float().unsqueeze(1).to(device)
        self._sin = angles.sin().float().unsqueeze(1).to(device)

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Return `[T, heads, head_dim]` of positions from `start`, rotated: a new f32 tensor.

        Component i becomes a cos - b sin and component i + rotary_dim / 2 becomes b cos + a sin.
        """
        positions = slice(start, start + len(x))
        values, sin, half = x.float(), self._sin[positions], self._half
        first, second = values[..., :half], values[..., half : 2 * half]
        rotated = values * self._cos[positions]
        rotated[..., :half].addcmul_(second, sin, value=-1)
        rotated[..., half : 2 * half].addcmul_(first, sin)
        return rotated
