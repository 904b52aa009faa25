"""The model as data: what a decoder must know beside the weights.

A family module reads a container's metadata into a `ModelSpec`; one decoder in torch and one in
MLX read the spec. Its digest is part of what two nodes agree on, so it holds meaning only: no file
names, no labels, no quantisation.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from dataclasses import dataclass
from enum import StrEnum
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


def inverse_sqrt(value: float) -> float:
    """Return 1 / sqrt(value), rounded to float32.

    Unlike a power, square root and division give the same bits on every platform, so digests agree.
    """
    return as_f32(1.0 / math.sqrt(value))


@dataclass(frozen=True)
class LinearScaling:
    """Positions stretched evenly: every angle is divided by `factor`."""

    factor: float

    def scaled(self, frequency: float) -> float:
        """Return the frequency, in radians per position, that takes the place of `frequency`."""
        return frequency / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretching: slow pairs are divided by `factor`, fast ones stay, those between are blended.

    A pair turns original_max_positions * frequency / 2 pi times in the original context; below
    `low_freq_factor` turns it is slow, above `high_freq_factor` fast.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def scaled(self, frequency: float) -> float:
        """Return the frequency, in radians per position, that takes the place of `frequency`."""
        turns = self.original_max_positions * frequency / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = min(1.0, max(0.0, share))
        return frequency * (share + (1.0 - share) / self.factor)


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions in the rotate-half layout: component i pairs with i + rotary_dim / 2.

    The angle of pair i at position p is p * theta ** (-2 i / rotary_dim), stretched by `scaling`.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Return the angle per position of each pair, in radians, computed in float64.

        >>> RopeSpec(theta=10000.0, rotary_dim=4, scaling=LinearScaling(factor=8.0)).inverse_frequencies()
        (0.125, 0.00125)
        """
        plain = [self.theta ** (-2.0 * i / self.rotary_dim) for i in range(self.rotary_dim // 2)]
        return tuple(plain if self.scaling is None else map(self.scaling.scaled, plain))


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. `rope` None: no positions.

    A query at position q sees the key at position k when 0 <= q - k < `window`; None sees every
    k <= q. So a window counts the current token.
    """

    window: int | None
    rope: RopeSpec | None


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm over head_dim on queries and keys, before positions.

    `weighted` ones have the tensors "layers.{i}.attn.q_norm.weight" and "...k_norm.weight", `[head_dim]`.
    """

    weighted: bool
    eps: float


class Activation(StrEnum):
    """What the MLP's gate goes through before it multiplies `up`."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True)
class ModelSpec:
    """A pre-norm decoder: RMSNorm, attention, residual; RMSNorm, gated MLP, residual; final RMSNorm, head.

    The fields with defaults are what a family may have beyond that; the defaults change nothing:

    - Attention is softmax(q k * `attention_scale`). `attention_gate` multiplies its result, before the
      output projection, by sigmoid of the tensor "layers.{i}.attn.gate.weight" `[heads * head_dim, hidden]`
      applied to the normalised input.
    - `post_norm_eps` is that of an RMSNorm on the output of attention and of the MLP, before each
      residual is added: "layers.{i}.attn_post_norm.weight" and "...mlp_post_norm.weight", `[hidden]`.
    - Embedding rows are multiplied by `embedding_scale`; with `embedding_norm` they go through an
      RMSNorm without a weight, of `norm_eps`.
    - Logits are multiplied by `logit_scale`, then c * tanh(x / c) with c = `logit_softcap`.

    Constants are rounded to float32. Norm weights in a checkpoint are multipliers: a 1 is already added.
    """

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
    attention_scale: float
    qk_norm: QKNorm | None = None
    attention_gate: bool = False
    post_norm_eps: float | None = None
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None

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
    except (ValueError, RecursionError) as error:
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
