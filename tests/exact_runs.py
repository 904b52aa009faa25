"""Runs of models in the reference lane, each way that planes and logits can come about, as digests to compare.

Shared by `make exact`, the short form of it in `make test`, and the property tests.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from decoded_lane import compiled_operations

from muser_decode.engine.contract import Decoder
from muser_decode.reference.compiled.decoder import CompiledDecoder
from muser_decode.reference.decoder import ReferenceDecoder as MlxReferenceDecoder
from muser_prefill.kernels.exact import ExactKernels
from muser_prefill.kernels.exact.choice import choose_exact
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.quantize import quantize_model
from muser_wire.model.spec import ModelSpec
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.reference.arithmetic import Arithmetic
from muser_wire.reference.canonical import CanonicalWeights, Weights
from muser_wire.reference.decoder import ReferenceDecoder

TEXTS = Path(__file__).resolve().parent.parent / "bench" / "texts"
TOKENS = 2048
CPU = torch.device("cpu")
CHUNK_SEED = 20261130
Chunks = list[list[int]]


@dataclass(frozen=True)
class Digests:
    """SHA-256, as 16 hex digits, of each layer's keys and values and of the last token's logits.

    A sliding layer counts with the last positions that its window spans: those that decoding needs.
    """

    planes: tuple[str, ...]
    logits: str

    @classmethod
    def of(cls, spec: ModelSpec, tokens: int, planes: Callable[[int, int, int], Any], logits: Any) -> Digests:
        """Digest what a run left: `planes(layer, start, stop)` gives keys and values."""
        found = []
        for layer, kind in enumerate(spec.layers):
            start = 0 if kind.window is None else max(0, tokens - kind.window)
            keys, values = planes(layer, start, tokens)
            found.append(sha(keys, values))
        return cls(tuple(found), sha(logits))

    def plain(self) -> dict[str, Any]:
        return {"planes": list(self.planes), "logits": self.logits}


def sha(*arrays: Any) -> str:
    """Return 16 hex digits over the little-endian bytes of arrays."""
    h = hashlib.sha256()
    for x in arrays:
        h.update(np.ascontiguousarray(np.asarray(x)).tobytes())
    return h.hexdigest()[:16]


@dataclass(frozen=True)
class Fixture:
    """A model and its pinned prompt."""

    name: str
    path: Path
    ids: tuple[int, ...]

    def weights(self) -> CanonicalWeights:
        return CanonicalWeights(open_checkpoint(self.path))


def text_fixture(name: str, path: Path) -> Fixture:
    """Return a model with a quarter of the prompt from each pinned text."""
    tokenizer = load_tokenizer(path)
    ids = [] if tokenizer.bos_id is None or not tokenizer.adds_bos else [tokenizer.bos_id]
    for text in sorted(TEXTS.glob("*.txt")):
        ids += tokenizer.encode(text.read_text(encoding="utf-8"))[: TOKENS // 4]
    return Fixture(name, path, tuple(ids[:TOKENS]))


def tiny_muse(folder: Path) -> Fixture:
    """Write a small Muse Glimmer with integer weights; its prompt are the pinned texts in its own vocabulary."""
    source, path = folder / "muse", folder / "muse.gguf"
    write_tiny("muse_glimmer", source, layers=8, hidden=128, ffn=192, head_dim=32, max_positions=4096, window=200)
    quantize_model(source, path, "q4_0")
    return text_fixture("tiny-muse", path)


def whole(ids: Sequence[int]) -> Chunks:
    return [list(ids)]


def one_by_one(ids: Sequence[int]) -> Chunks:
    return [[i] for i in ids]


def random_chunks(ids: Sequence[int]) -> Chunks:
    """Return chunks of 1 to 700 tokens."""
    rng, chunks, at = np.random.default_rng(CHUNK_SEED), [], 0
    while at < len(ids):
        size = int(np.exp(rng.uniform(0, np.log(700))))
        chunks.append(list(ids[at : at + size]))
        at += size
    return chunks


def plain_run(ar: Arithmetic, weights: Weights, chunks: Iterable[Sequence[int]]) -> Digests:
    """Run the oracle's text over an array library."""
    decoder = ReferenceDecoder(ar, weights)
    cache = decoder.new_cache()
    for chunk in chunks:
        x = decoder.forward(chunk, cache)
    planes = {layer: cache.planes(layer) for layer in range(len(weights.spec.layers))}
    return Digests.of(
        weights.spec,
        cache.length,
        lambda layer, start, stop: tuple(plane[start:stop] for plane in planes[layer]),
        decoder.logits(x[-1:])[0],
    )


@functools.cache
def admitted(head_dim: int) -> ExactKernels:
    """Return the kernels that a producer uses here; they are checked once."""
    return choose_exact(head_dim, CPU)


def torch_run(weights: Weights, chunks: Chunks, kernels: ExactKernels | None = None) -> Digests:
    """Run the producer's decoder."""
    kernels = admitted(weights.spec.head_dim) if kernels is None else kernels
    decoder = TorchReferenceDecoder(weights, device=CPU, whole=True, kernels=kernels)
    tokens = sum(map(len, chunks))
    cache = decoder.new_cache(tokens)
    # The head is computed for the last token alone: a large vocabulary over a long chunk would take gigabytes.
    *before, last = chunks
    for chunk in [*before, last[:-1]]:
        if chunk:
            decoder.prefill_chunk(chunk, cache, lambda layer: None)
    logits = decoder.logits(last[-1:], cache)[-1]
    return Digests.of(weights.spec, tokens, cache.planes, logits)


@dataclass(frozen=True)
class FirstLayers:
    """The beginning of a model: its planes are those of the whole one's first layers."""

    all: Weights
    layers: int

    @property
    def spec(self) -> ModelSpec:
        return replace(self.all.spec, layers=self.all.spec.layers[: self.layers])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.all, name)


def torch_planes_run(weights: Any, chunks: Chunks, kernels: ExactKernels) -> Digests:
    """Run the producer's decoder as a producer does, without logits."""
    decoder = TorchReferenceDecoder(weights, device=CPU, kernels=kernels)
    tokens = sum(map(len, chunks))
    cache = decoder.new_cache(tokens)
    for chunk in chunks:
        decoder.prefill_chunk(chunk, cache, lambda layer: None)
    return Digests.of(weights.spec, tokens, cache.planes, np.zeros(0))


def mlx_run(weights: Weights, chunks: Chunks) -> Digests:
    """Run the decode node's decoder in MLX's operations; the last token, and each chunk of one, is decoded."""
    return decoded_run(MlxReferenceDecoder(weights), weights, chunks)


def decode_run(weights: Weights, chunks: Chunks) -> Digests:
    """Run the decode node's decoder by compiled kernels in the same way."""
    return decoded_run(CompiledDecoder(weights, compiled_operations()), weights, chunks)


def decoded_run(decoder: Decoder, weights: Weights, chunks: Chunks) -> Digests:
    cache = decoder.new_cache()
    *before, last = chunks
    for chunk in [*before, last[:-1], last[-1:]]:
        if len(chunk) == 1:
            logits = np.array(decoder.step(mx.array(chunk), cache))
        elif chunk:
            decoder.prefill_chunk(chunk, cache)
    return Digests.of(weights.spec, cache.length, cache.planes, logits)
