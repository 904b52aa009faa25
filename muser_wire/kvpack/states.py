"""What the blocks of a directory were computed by: one small file for each state, so that people can tell them apart.

A state's digest says nothing. Its file names model, tokenizer, lane, weights and grid, and holds what is needed to
look for a prompt without the model. A file whose content does not give the digest is ignored.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Digest, Identities, show
from muser_wire.kvpack.files import Files
from muser_wire.kvpack.naming import state_digest

STATE_PREFIX = "state-"
STATE_SUFFIX = ".json"
STATE_CHARS = 16
"""Hex digits of a state by which files are told apart."""

DIGESTS = ("spec_digest", "tokenizer_digest", "numerics_digest", "weights_digest")


@dataclass(frozen=True)
class StateFacts:
    """What all blocks of one state share. `computed` is what a node's results depend on beside its identities."""

    identities: Identities
    geometry: Geometry
    computed: str

    @property
    def state(self) -> Digest:
        """The state's digest."""
        return state_digest(self.identities, self.computed)

    @property
    def file(self) -> str:
        """The name of the file that describes it."""
        return f"{STATE_PREFIX}{self.state.hex()[:STATE_CHARS]}{STATE_SUFFIX}"

    def named(self) -> dict[str, str]:
        """Return everything that must be equal, as a person reads it."""
        named = {field.name: show(getattr(self.identities, field.name)) for field in fields(Identities)}
        return {**named, "computed": self.computed}

    def differences(self, other: StateFacts) -> list[str]:
        """Return the names of what differs between two states."""
        ours, theirs = self.named(), other.named()
        return [name for name in ours if ours[name] != theirs[name]]


def write_state(files: Files, facts: StateFacts) -> None:
    """Describe a state beside its blocks. Only explanations suffer when that fails."""
    values = {field.name: getattr(facts.identities, field.name) for field in fields(Identities)}
    content = {
        "identities": {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()},
        "computed": facts.computed,
        "geometry": {
            "windows": facts.geometry.windows,
            "kv_heads": facts.geometry.kv_heads,
            "head_dim": facts.geometry.head_dim,
            "element": facts.geometry.element.value,
        },
    }
    with contextlib.suppress(OSError):
        files.write(facts.file, [json.dumps(content, indent=1).encode()])


def read_states(files: Files) -> Iterator[StateFacts]:
    """Yield the states that a directory describes.

    Raises:
        OSError: the directory cannot be read.
    """
    for found in sorted(files.list(), key=lambda found: found.name):
        if found.name.startswith(STATE_PREFIX) and found.name.endswith(STATE_SUFFIX):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                facts = _parsed(files.read(found.name))
                if facts.file == found.name:
                    yield facts


def _parsed(data: bytes) -> StateFacts:
    content = json.loads(data)
    values = content["identities"]
    named: dict[str, Any] = {
        name: Digest(bytes.fromhex(value)) if name in DIGESTS else value for name, value in values.items()
    }
    shape = content["geometry"]
    windows = tuple(None if window is None else int(window) for window in shape["windows"])
    geometry = Geometry(windows, int(shape["kv_heads"]), int(shape["head_dim"]), ElementType(shape["element"]))
    return StateFacts(Identities(**named), geometry, str(content["computed"]))
