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

    def f32(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.values[start:stop].copy()


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
    tied_embeddings: bool = True,
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
        tied_embeddings=tied_embeddings,
        attention_scale=attention_scale,
        **beyond,
    )


def make_checkpoint(spec: ModelSpec, seed: int = 0) -> MemoryCheckpoint:
    """Weights that keep every activation, key and value near unit scale; norm weights are not all one."""
    rng = np.random.default_rng(seed)
    tensors = {"embed.weight": rng.normal(size=(spec.vocab_size, spec.hidden_size)) / spec.embedding_scale}
    for i in range(len(spec.layers)):
        for name, shape in layer_shapes(spec).items():
            tensors[f"layers.{i}.{name}.weight"] = random_tensor(rng, shape)
    tensors["final_norm.weight"] = random_tensor(rng, (spec.hidden_size,))
    if not spec.tied_embeddings:
        tensors["head.weight"] = random_tensor(rng, (spec.vocab_size, spec.hidden_size))
    return MemoryCheckpoint(spec, {name: values.astype(np.float32) for name, values in tensors.items()})


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.5, 1.5, size=shape) if len(shape) == 1 else rng.normal(size=shape) / np.sqrt(shape[1])


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, attention, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "mlp_norm": (hidden,),
        "attn.q": (attention, hidden),
        "attn.k": (kv, hidden),
        "attn.v": (kv, hidden),
        "attn.o": (hidden, attention),
        "mlp.gate": (spec.ffn_size, hidden),
        "mlp.up": (spec.ffn_size, hidden),
        "mlp.down": (hidden, spec.ffn_size),
    }
    if spec.attention_gate:
        shapes["attn.gate"] = (attention, hidden)
    if spec.qk_norm is not None and spec.qk_norm.weighted:
        shapes |= {"attn.q_norm": (spec.head_dim,), "attn.k_norm": (spec.head_dim,)}
    if spec.post_norm_eps is not None:
        shapes |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    return shapes


@pytest.fixture
def make_model() -> Callable[..., MemoryCheckpoint]:
    """`make_model(layers=..., heads=..., ...)`: whatever `make_spec` takes."""
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
