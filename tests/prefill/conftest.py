"""Random models of any shape the spec can say, held in memory, for the tests of the producer's decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec

ROPE = RopeSpec(theta=10000.0, rotary_dim=16)


@dataclass(frozen=True)
class MemoryWeight:
    """One tensor, as a checkpoint gives it."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def f32(self) -> np.ndarray:
        return self.values.copy()


@dataclass
class MemoryCheckpoint:
    """A checkpoint without a file. `read` lists the names asked for, in order."""

    spec: ModelSpec
    tensors: dict[str, np.ndarray]
    read: list[str] = field(default_factory=list)

    def weight(self, name: str) -> MemoryWeight:
        self.read.append(name)
        return MemoryWeight(self.tensors[name])


def make_spec(
    layers: tuple[LayerSpec, ...] = (LayerSpec(None, ROPE),) * 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    attention_scale: float = 0.25,
    **beyond: object,
) -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=layers,
        hidden_size=64,
        ffn_size=96,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=131,
        max_positions=512,
        norm_eps=1e-5,
        tied_embeddings=True,
        attention_scale=attention_scale,
        **beyond,
    )


def make_checkpoint(spec: ModelSpec, seed: int = 0) -> MemoryCheckpoint:
    """Weights that keep every activation, key and value near unit scale; norm weights are not all one."""
    rng = np.random.default_rng(seed)
    hidden, attention, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matrices = {
        "attn.q": (attention, hidden),
        "attn.k": (kv, hidden),
        "attn.v": (kv, hidden),
        "attn.o": (hidden, attention),
        "mlp.gate": (spec.ffn_size, hidden),
        "mlp.up": (spec.ffn_size, hidden),
        "mlp.down": (hidden, spec.ffn_size),
    }
    tensors = {"embed.weight": rng.normal(size=(spec.vocab_size, hidden))}
    for i in range(len(spec.layers)):
        for name in ("attn_norm", "mlp_norm"):
            tensors[f"layers.{i}.{name}.weight"] = rng.uniform(0.5, 1.5, size=hidden)
        for name, shape in matrices.items():
            tensors[f"layers.{i}.{name}.weight"] = rng.normal(size=shape) / np.sqrt(shape[1])
    return MemoryCheckpoint(spec, {name: values.astype(np.float32) for name, values in tensors.items()})


@pytest.fixture
def make_model() -> Callable[..., MemoryCheckpoint]:
    """`make_model(layers=..., heads=..., kv_heads=..., head_dim=...)`."""
    return lambda **shape: make_checkpoint(make_spec(**shape))


@pytest.fixture
def token_ids() -> Callable[[int], list[int]]:
    """`token_ids(n)`: a prompt of the models above."""
    return lambda n: np.random.default_rng(n).integers(0, 131, n).tolist()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Other tests run beside these; two spinning pools on a small machine would stop each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
