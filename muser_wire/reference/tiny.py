"""Small random models in canonical form: for conformance at a node's start, and for property tests.

Every number comes from SHAKE-256 over the seed and a name, by integer steps and exact float steps: the same model on
every platform and with every version of every library.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from muser_wire.model.spec import (
    Activation,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    QKNorm,
    RopeScaling,
    RopeSpec,
    as_f32,
    inverse_sqrt,
)
from muser_wire.reference.linear import IntegerWeight

T = TypeVar("T")

LOUD = 4.0
"""The head's rows are larger than others', so that logits differ by more than noise."""


def random_bytes(seed: int, name: str, count: int) -> npt.NDArray[np.uint8]:
    """Return bytes that depend on seed and name alone."""
    return np.frombuffer(hashlib.shake_256(f"{seed}/{name}".encode()).digest(count), np.uint8)


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return multiples of 2 ** -16 from 0 up to 1."""
    count = math.prod(shape)
    values = random_bytes(seed, name, 2 * count).view("<u2").astype(np.float32) * np.float32(2.0**-16)
    return values.reshape(shape)


@dataclass(frozen=True)
class RandomWeights:
    """Weights of any spec. Matrices come in three kinds: 4 bits with offsets, 8 bits, 6 bits in groups of 16."""

    spec: ModelSpec
    seed: int

    def names(self) -> tuple[str, ...]:
        """Return the tensor names in canonical order."""
        return tuple(_shapes(self.spec))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return _shapes(self.spec)[name]

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """Return a norm's multipliers, from 3/4 to 5/4."""
        return uniform(self.seed, name, self.shape(name)) * np.float32(0.5) + np.float32(0.75)

    def linear(self, name: str, start: int = 0, stop: int | None = None) -> IntegerWeight:
        """Return rows [start, stop) of a matrix."""
        rows, columns = self.shape(name)
        kind = int(random_bytes(self.seed, name + "/kind", 1)[0]) % 3
        group = 16 if kind == 2 else 32
        codes = random_bytes(self.seed, name + "/q", rows * columns).reshape(rows, columns // group, group)
        bits = (4, 8, 6)[kind]
        q = (codes >> np.uint8(8 - bits)).astype(np.int16) - (0 if kind == 0 else 1 << (bits - 1))
        # A uniform integer of b bits spreads by 2 ** b / sqrt(12).
        unit = as_f32(self._spread(name) * math.sqrt(12.0) / (1 << bits))
        s = (uniform(self.seed, name + "/s", q.shape[:2]) + np.float32(0.5)) * np.float32(unit)
        m = None
        if kind == 0:
            m = (uniform(self.seed, name + "/m", q.shape[:2]) - np.float32(8.0)) * s
        part = slice(start, stop)
        return IntegerWeight(q.astype(np.int8)[part], s[part], None if m is None else m[part])

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the embedding rows of tokens."""
        matrix = self.linear("embed.weight")
        at = np.asarray(ids, np.int64)
        return IntegerWeight(matrix.q[at], matrix.s[at], None if matrix.m is None else matrix.m[at]).values()

    def _spread(self, name: str) -> float:
        if name == "embed.weight":
            return 1.0
        spread = inverse_sqrt(float(self.shape(name)[1]))
        return LOUD * spread if name == "head.weight" else spread


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, ffn, width = spec.hidden_size, spec.ffn_size, spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, hidden)}
    for i in range(len(spec.layers)):
        at = f"layers.{i}"
        shapes[f"{at}.attn_norm.weight"] = shapes[f"{at}.mlp_norm.weight"] = (hidden,)
        shapes[f"{at}.attn.q.weight"] = (spec.heads * width, hidden)
        shapes[f"{at}.attn.k.weight"] = shapes[f"{at}.attn.v.weight"] = (spec.kv_heads * width, hidden)
        shapes[f"{at}.attn.o.weight"] = (hidden, spec.heads * width)
        shapes[f"{at}.mlp.gate.weight"] = shapes[f"{at}.mlp.up.weight"] = (ffn, hidden)
        shapes[f"{at}.mlp.down.weight"] = (hidden, ffn)
        if spec.attention_gate:
            shapes[f"{at}.attn.gate.weight"] = (spec.heads * width, hidden)
        if spec.qk_norm is not None and spec.qk_norm.weighted:
            shapes[f"{at}.attn.q_norm.weight"] = shapes[f"{at}.attn.k_norm.weight"] = (width,)
        if spec.post_norm_eps is not None:
            shapes[f"{at}.attn_post_norm.weight"] = shapes[f"{at}.mlp_post_norm.weight"] = (hidden,)
    shapes["final_norm.weight"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["head.weight"] = (spec.vocab_size, hidden)
    return shapes


class Choices:
    """Draws from lists, one name a draw, so that one seed always gives one model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def pick(self, name: str, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[int(random_bytes(self._seed, name, 1)[0]) % len(options)]


def random_spec(seed: int, *, layers: int = 2, head_dims: Sequence[int] = (16, 32, 64, 80, 96, 128)) -> ModelSpec:
    """Return a small spec with a random choice of everything that a family may have."""
    choices = Choices(seed)
    head_dim = choices.pick("head_dim", head_dims)
    kv_heads = choices.pick("kv_heads", (1, 2))
    heads = kv_heads * choices.pick("repeats", (1, 2, 3))
    while heads * head_dim % 32:
        heads += kv_heads
    weighted = choices.pick("qk_norm", (None, False, True))
    scale = choices.pick("scale", (1.0, 1.5, 0.75)) * (inverse_sqrt(float(head_dim)) if weighted is None else 0.25)
    hidden = choices.pick("hidden", (64, 96, 160))
    return ModelSpec(
        family="random",
        layers=tuple(_layer(choices, i, head_dim) for i in range(layers)),
        hidden_size=hidden,
        ffn_size=choices.pick("ffn", (64, 96, 288)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=choices.pick("vocab", (61, 128)),
        max_positions=4096,
        norm_eps=as_f32(choices.pick("eps", (1e-5, 1e-6))),
        tied_embeddings=choices.pick("tied", (True, False)),
        attention_scale=as_f32(scale),
        qk_norm=None if weighted is None else QKNorm(weighted, as_f32(1e-6)),
        attention_gate=choices.pick("gate", (True, False)),
        post_norm_eps=choices.pick("post", (None, as_f32(1e-6), as_f32(1e-8))),
        activation=choices.pick("activation", tuple(Activation)),
        embedding_scale=choices.pick("embedding_scale", (1.0, as_f32(math.sqrt(hidden)))),
        embedding_norm=choices.pick("embedding_norm", (True, False)),
        logit_scale=choices.pick("logit_scale", (1.0, as_f32(0.1961))),
        logit_softcap=choices.pick("softcap", (None, 20.0, 30.0)),
    )


def _layer(choices: Choices, index: int, head_dim: int) -> LayerSpec:
    scalings: tuple[RopeScaling | None, ...] = (None, LinearScaling(8.0), Llama3Scaling(8.0, 1.0, 4.0, 256))
    theta = choices.pick(f"{index}/theta", (10000.0, 500000.0, 1000000.0))
    rotary = head_dim // choices.pick(f"{index}/rotary", (1, 1, 2))
    rope = RopeSpec(theta, rotary, choices.pick(f"{index}/scaling", scalings))
    return LayerSpec(
        window=choices.pick(f"{index}/window", (None, None, 5, 64, 70)),
        rope=choices.pick(f"{index}/rope", (rope, rope, None)),
    )


def random_ids(spec: ModelSpec, seed: int, count: int) -> list[int]:
    """Return token ids of a prompt."""
    return [int(i) % spec.vocab_size for i in random_bytes(seed, "ids", 2 * count).view("<u2")]
