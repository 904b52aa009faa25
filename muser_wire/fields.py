"""Checked reads of one message stub's fields [5.3].

Every function names message and field in its error, and raises `RemoteProtocolError`: whoever wrote
the bytes is the peer.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from muser_wire.errors import RemoteProtocolError

M = TypeVar("M", bound=Message)


def parse(kind: type[M], raw: bytes) -> M:
    """Return the stub in `raw`, which must be its canonical encoding: no unknown, repeated or reordered field."""
    stub = kind()
    try:
        stub.ParseFromString(raw)
    except DecodeError as error:
        raise RemoteProtocolError(f"{kind.DESCRIPTOR.name} cannot be parsed: {error}") from error
    stub.DiscardUnknownFields()  # type: ignore[attr-defined, unused-ignore]
    if stub.SerializeToString(deterministic=True) != raw:
        raise RemoteProtocolError(f"{kind.DESCRIPTOR.name} is not in canonical form or has unknown fields")
    return stub


def present(stub: Message, field: str) -> object:
    """Return a field that must be there."""
    if not stub.HasField(field):
        raise RemoteProtocolError(f"{stub.DESCRIPTOR.name}.{field} is absent")
    return getattr(stub, field)


def number(stub: Message, field: str, least: int, most: int) -> int:
    """Return an integer field in least..most."""
    value = present(stub, field)
    if not isinstance(value, int) or not least <= value <= most:
        raise RemoteProtocolError(f"{stub.DESCRIPTOR.name}.{field} is {value}, not in {least}..{most}")
    return value


def blob(stub: Message, field: str, least: int, most: int | None = None) -> bytes:
    """Return a bytes field of least..most bytes; without `most`, of exactly `least`."""
    value = present(stub, field)
    most = least if most is None else most
    if not isinstance(value, bytes) or not least <= len(value) <= most:
        size = len(value) if isinstance(value, bytes) else 0
        raise RemoteProtocolError(f"{stub.DESCRIPTOR.name}.{field} has {size} bytes, not {least}..{most}")
    return value


def text(stub: Message, field: str, least: int, most: int) -> str:
    """Return a string field of least..most characters."""
    return checked_text(present(stub, field), f"{stub.DESCRIPTOR.name}.{field}", least, most)


def checked_text(value: object, name: str, least: int, most: int) -> str:
    """Return `value` as a string of least..most characters; `name` is its field, for the error."""
    if not isinstance(value, str) or not least <= len(value) <= most:
        size = len(value) if isinstance(value, str) else 0
        raise RemoteProtocolError(f"{name} has {size} characters, not {least}..{most}")
    return value
