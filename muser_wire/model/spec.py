"""The model as data: what a decoder must know beside the weights.

A family module reads a container's metadata into a `ModelSpec`; one decoder in torch and one in
MLX read the spec. Its digest is part of what two nodes agree on, so it holds meaning only: no file
names, no labels, no quantisation.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Any

from muser_wire.errors import IdentityMismatch, RemoteProtocolError
from muser_wire.identities import Digest, digest_of

SPEC_LABEL = b"muser spec 1"
MAX_SHOWN_CHARS = 80
"""How much of a peer's value an error repeats."""


def as_f32(value: float) -> float:
    """Return `value` rounded to float32.

    Containers store the same constant at different widths (1e-5 in JSON, 9.999999747e-06 in a GGUF
    field); rounded they are one number and give one digest.
    """
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions in the rotate-half layout: component i pairs with i + rotary_dim / 2.

    The angle of pair i at position p is p * theta ** (-2 i / rotary_dim).
    """

    theta: float
    rotary_dim: int


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. `window` counts the current token; None sees everything. `rope` None: no positions."""

    window: int | None
    rope: RopeSpec | None


@dataclass(frozen=True)
class ModelSpec:
    """A pre-norm decoder: RMSNorm, attention, residual; RMSNorm, SwiGLU, residual; final RMSNorm, head."""

    family: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool

    def canonical(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; equal specs give equal values."""
        return dataclasses.asdict(self)

    def canonical_json(self) -> bytes:
        """Return the UTF-8 JSON text whose SHA-256 is the spec digest: sorted keys, no spaces."""
        return json.dumps(self.canonical(), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> Digest:
        """Return the identity of this spec."""
        return digest_of(SPEC_LABEL, self.canonical_json())


def spec_difference(here: ModelSpec, there_json: bytes, there_digest: Digest) -> IdentityMismatch:
    """Return the error that names the first field in which a peer's spec differs from ours [2.3].

    Raises:
        RemoteProtocolError: the peer's text is not the one that its digest names, or no spec.
    """
    if digest_of(SPEC_LABEL, there_json) != there_digest:
        raise RemoteProtocolError("the peer's spec text does not have the digest that it claims")
    try:
        there = json.loads(there_json)
    except ValueError as error:
        raise RemoteProtocolError("the peer's spec is not JSON") from error
    if not isinstance(there, dict):
        raise RemoteProtocolError("the peer's spec is not a JSON object")
    ours = json.loads(here.canonical_json())
    if _layer_count(ours) != _layer_count(there):
        return IdentityMismatch("layers", str(_layer_count(ours)), str(_layer_count(there)))
    for name in sorted({*ours, *there}):
        if ours.get(name) != there.get(name):
            return IdentityMismatch(name, _short(ours.get(name)), _short(there.get(name)))
    return IdentityMismatch("spec_digest", here.digest().hex()[:16], there_digest.hex()[:16])


def _layer_count(spec: dict[str, Any]) -> int:
    layers = spec.get("layers")
    return len(layers) if isinstance(layers, list) else 0


def _short(value: object) -> str:
    return str(value)[:MAX_SHOWN_CHARS]
