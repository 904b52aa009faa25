"""Rotary positions in the rotate-half layout."""

from __future__ import annotations

import torch

from muser_wire.model.spec import RopeSpec

FIRST_POSITIONS = 2048
"""Rows that a table begins with; it doubles when a prompt needs more. Whole, a long context's would outweigh a small
model."""


class RotaryTable:
    """Cosines and sines of positions, `[positions, 1, ...]` f32, computed in float64 and rounded once.

    One thread at a time: the table grows with the prompts.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._half = rope.rotary_dim // 2
        self._still = head_dim - rope.rotary_dim
        self._frequencies = torch.tensor(rope.inverse_frequencies(), dtype=torch.float64)
        self._device = device
        self._cos, self._sin = self._rows(0, FIRST_POSITIONS)

    def _rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None, None] * self._frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        # Components beyond rotary_dim keep their value: times 1.
        still = torch.ones(stop - start, 1, self._still)
        return torch.cat([cos, cos, still], dim=-1).to(self._device), sin.to(self._device)

    def _reach(self, positions: int) -> None:
        """Have rows for `positions`, at least."""
        while len(self._cos) < positions:
            more = self._rows(len(self._cos), 2 * len(self._cos))
            self._cos, self._sin = (torch.cat(pair) for pair in zip((self._cos, self._sin), more, strict=True))

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Return `[T, heads, head_dim]` of positions from `start`, rotated: a new f32 tensor.

        Component i becomes a cos - b sin and component i + rotary_dim / 2 becomes b cos + a sin.
        """
        self._reach(start + len(x))
        positions = slice(start, start + len(x))
        values, sin, half = x.float(), self._sin[positions], self._half
        first, second = values[..., :half], values[..., half : 2 * half]
        rotated = values * self._cos[positions]
        rotated[..., :half].addcmul_(second, sin, value=-1)
        rotated[..., half : 2 * half].addcmul_(first, sin)
        return rotated
