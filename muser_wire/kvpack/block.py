"""A block: the planes of one chunk of one prompt, as a rolling handoff would carry them.

A block covers tokens [start, stop) of its chain. Layers without a window hold every token. Sliding layers
hold the tokens within the window before `stop`, as far as they lie in the block; where a window is longer
than a block, the block's ancestors hold the rest. So a chain of blocks from position 0 is all that a decoder
needs to go on at its end.

A *tail* ends between two boundaries of the grid: it is where a request ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.errors import BlockInvalid

ID_NBYTES = 4
"""Token ids are stored as unsigned 32-bit little-endian words."""


@dataclass(frozen=True)
class PlanePair:
    """Keys, then values, of one layer for tokens [start, stop), at `offset` bytes in a block's payload.

    Each plane is `nbytes / 2` long, row-major `[tokens, kv_heads, head_dim]`, little-endian [3.2].
    """

    layer: int
    start: int
    stop: int
    offset: int
    nbytes: int


def first_held(window: int | None, start: int, stop: int) -> int:
    """Return the first token of a block [start, stop) that a layer with this window keeps.

    >>> first_held(None, 8, 16), first_held(4, 8, 16), first_held(100, 8, 16)
    (8, 12, 8)
    """
    return start if window is None else max(start, stop - window)


def block_layout(geometry: Geometry, start: int, stop: int) -> tuple[PlanePair, ...]:
    """Return where each layer's planes lie in the payload of a block [start, stop), in layer order, unpadded."""
    pairs, offset = [], 0
    for layer, window in enumerate(geometry.windows):
        first = first_held(window, start, stop)
        nbytes = (stop - first) * geometry.layer_token_nbytes
        pairs.append(PlanePair(layer, first, stop, offset, nbytes))
        offset += nbytes
    return tuple(pairs)


def payload_nbytes(geometry: Geometry, start: int, stop: int) -> int:
    """Return the size of a block's payload, in bytes.

    Example:
        Muse Glimmer's chunk of 2,048 tokens: 52 layers of 1,024 bytes a token, windows of 2,048 included:

        >>> from muser_wire.geometry import ElementType
        >>> windows = tuple(None if layer % 4 == 3 else 2048 for layer in range(52))
        >>> payload_nbytes(Geometry(windows, 2, 128, ElementType.F16), 0, 2048)
        109051904
    """
    last = block_layout(geometry, start, stop)[-1]
    return last.offset + last.nbytes


def resumes_inside(geometry: Geometry, start: int, stop: int) -> bool:
    """Say whether a decoder can go on at any token of a block [start, stop), not only at its end.

    It can when no layer dropped a row of the block; then what a window needs before it is in the ancestors.
    """
    return all(first_held(window, start, stop) == start for window in geometry.windows)


def pack_ids(token_ids: npt.ArrayLike) -> bytes:
    """Return token ids as they are named and stored."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


@dataclass(frozen=True)
class BlockHead:
    """What a block is, without its planes. `ids` are its own tokens, packed.

    `decoded_from` is the first position that decode produced, or that was computed on top of such a one; None
    when prefill produced all of it.
    """

    name: Digest
    parent: Digest
    start: int
    ids: bytes
    decoded_from: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens it covers."""
        return len(self.ids) // ID_NBYTES

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + self.tokens

    @property
    def prefilled_stop(self) -> int:
        """The position after the last token that prefill alone produced; `start` when there is none."""
        return self.stop if self.decoded_from is None else max(self.start, self.decoded_from)

    @cached_property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """Its tokens' ids."""
        return np.frombuffer(self.ids, dtype="<u4")


@dataclass(frozen=True)
class Block:
    """A block with its planes; `payload` is read-only and laid out by `block_layout`."""

    head: BlockHead
    payload: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of its planes."""
        return self.payload.nbytes


def make_block(geometry: Geometry, head: BlockHead, payload: bytes | bytearray | memoryview) -> Block:
    """Return a block whose payload has the size that the geometry gives it. The payload is not copied.

    Raises:
        BlockInvalid: it has not, or the block is empty.
    """
    if head.tokens < 1 or len(head.ids) % ID_NBYTES:
        raise BlockInvalid("a block holds at least one token")
    expected = payload_nbytes(geometry, head.start, head.stop)
    view = memoryview(payload).toreadonly().cast("B")
    if view.nbytes != expected:
        raise BlockInvalid(f"tokens {head.start} to {head.stop} have {expected} bytes, not {view.nbytes}")
    return Block(head, view)
