"""What a family module provides: how its checkpoints become a spec, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.spec import ModelSpec


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a model: its canonical name and shape, and where a container keeps it.

    `interleaved_heads` above 0 says that the stored rows of each of so many heads are in interleaved
    RoPE order (pairs 2i, 2i + 1); the canonical order is rotate-half (pairs i, i + head_dim / 2).
    """

    name: str
    shape: tuple[int, ...]
    source: str
    interleaved_heads: int = 0


@dataclass(frozen=True)
class Family:
    """A model family as data and two functions; `name` is also what specs carry.

    `spec` reads a container's fields; `entries` lists every tensor in canonical order.
    """

    name: str
    gguf_architecture: str
    model_type: str
    spec: Callable[[Container], ModelSpec]
    entries: Callable[[ModelSpec, ContainerKind], tuple[TensorEntry, ...]]
