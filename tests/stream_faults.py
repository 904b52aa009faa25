"""What goes wrong with the frames of a handoff at one place, the same in every test that puts it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muser_wire.errors import TransportError


def flip(place: int, byte: int) -> Any:
    def fault(frames: Iterator[bytes]) -> Iterator[bytes]:
        for index, frame in enumerate(frames):
            altered = bytearray(frame)
            altered[byte] ^= index == place
            yield bytes(altered)

    return fault


def end(place: int) -> Any:
    def fault(frames: Iterator[bytes]) -> Iterator[bytes]:
        for index, frame in enumerate(frames):
            if index == place:
                return
            yield frame

    return fault


def die(place: int) -> Any:
    def fault(frames: Iterator[bytes]) -> Iterator[bytes]:
        for index, frame in enumerate(frames):
            if index == place:
                raise TransportError("unavailable: Socket closed")
            yield frame

    return fault
