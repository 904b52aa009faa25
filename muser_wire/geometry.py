"""Geometry of the KV cache on the wire: element types, planes, layer groups, sizes [3].

A plane is the keys or the values of one layer for a range of tokens, row-major
`[tokens, kv_heads, head_dim]`, little-endian, unpadded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from muser_wire.errors import GeometryError
from muser_wire.model.spec import ModelSpec

KV_LAYOUT_VERSION = 1


class ElementType(Enum):
    """How one number of a plane is stored. Both kinds take two bytes."""

    F16 = "f16"
    BF16 = "bf16"

    @property
    def nbytes(self) -> int:
        """The size of one element, in bytes."""
        return 2


COMPUTE_ELEMENTS = {"bf16": ElementType.BF16, "f16": ElementType.F16, "f32": ElementType.BF16}
"""Default element type for each compute type: the one that it holds exactly, and for f32 the one that a producer
that computes in bf16 has, so that two nodes started without flags fit together."""


def kv_layout(element: ElementType) -> str:
    """Return the identity of the KV layout: version, element type, order of planes and of axes [3.2]."""
    return f"kv{KV_LAYOUT_VERSION}/{element.value}/k,v/token,head,dim"


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same plane shape, in ascending order."""

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    itemsize: int

    @property
    def token_nbytes(self) -> int:
        """Bytes of one position: keys and values of every layer of the group."""
        return len(self.layers) * 2 * self.heads * self.head_dim * self.itemsize


def segment_nbytes(group: LayerGroup, tokens: int) -> int:
    """Return the payload size, in bytes, of a segment: `tokens` positions of one group.

    Planes follow one another by layer, keys before values, each row-major
    `[tokens, heads, head_dim]`, little-endian, unpadded [3.2]. The tag that
    framing adds is not counted.

    Raises:
        GeometryError: `tokens` is below 1.

    Example:
        The 13 full-attention layers of Muse Glimmer, 2 heads of 128, one position:

        >>> full = LayerGroup(layers=tuple(range(3, 52, 4)), heads=2, head_dim=128, itemsize=2)
        >>> segment_nbytes(full, tokens=1)
        13312
    """
    if tokens < 1:
        raise GeometryError(f"a segment holds at least one token, not {tokens}")
    return group.token_nbytes * tokens


@dataclass(frozen=True)
class Geometry:
    """The part of a model spec that shapes KV bytes."""

    windows: tuple[int | None, ...]
    kv_heads: int
    head_dim: int
    element: ElementType

    @classmethod
    def of(cls, spec: ModelSpec, element: ElementType) -> Geometry:
        """Return the geometry of a model whose planes are stored as `element`."""
        return cls(
            windows=tuple(layer.window for layer in spec.layers),
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            element=element,
        )

    @property
    def layer_token_nbytes(self) -> int:
        """Bytes of one position in one layer: a key row and a value row."""
        return 2 * self.plane_token_nbytes

    @property
    def plane_token_nbytes(self) -> int:
        """Bytes of one position in one plane."""
        return self.kv_heads * self.head_dim * self.element.nbytes

    def group(self, layers: tuple[int, ...]) -> LayerGroup:
        """Return `layers` as a group; they all have this geometry's plane shape."""
        return LayerGroup(layers, self.kv_heads, self.head_dim, self.element.nbytes)
