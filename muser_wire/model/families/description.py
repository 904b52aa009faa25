"""What a family module provides: how its checkpoints become a spec, and where its tensors lie."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from muser_wire.model.container import Container
from muser_wire.model.spec import ModelSpec


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a model: its canonical name and shape, and where a container keeps it.

    `interleaved_heads` above 0 says that the stored rows of each of so many heads are in interleaved
    RoPE order (pairs 2i, 2i + 1); the canonical order is rotate-half (pairs i, i + head_dim / 2).
    `centred` says that the file holds w where the multiplier is 1 + w.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    interleaved_heads: int = 0
    centred: bool = False


@dataclass(frozen=True)
class Aside:
    """Tensors that a checkpoint of the family may hold beside the decoder's, and what they are."""

    pattern: re.Pattern[str]
    what: str


@dataclass(frozen=True)
class Family:
    """A model family as data and two functions; `name` is also what specs carry.

    `spec` reads a container's fields; `entries` lists every tensor in canonical order. `asides` are
    known and not read as weights; a tensor that is neither is refused.
    """

    name: str
    gguf_architecture: str
    model_types: tuple[str, ...]
    spec: Callable[[Container], ModelSpec]
    entries: Callable[[ModelSpec, Container], tuple[TensorEntry, ...]]
    asides: tuple[Aside, ...] = ()
