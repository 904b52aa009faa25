"""What `muser model inspect` says about a model, as plain values."""

from __future__ import annotations

from collections import Counter
from typing import Any

from muser_wire.errors import CheckpointError
from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.digest import weights_digest
from muser_wire.model.tokenizer import load_tokenizer


def report(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return architecture, geometry, sizes and digests. Reads every weight once, for the digest."""
    spec = checkpoint.spec
    weights = [checkpoint.weight(name) for name in checkpoint.names()]
    return {
        "path": str(checkpoint.path),
        "family": spec.family,
        "layers": len(spec.layers),
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "ffn_size": spec.ffn_size,
        "vocab_size": spec.vocab_size,
        "max_positions": spec.max_positions,
        "windows": windows(checkpoint),
        "tied_embeddings": spec.tied_embeddings,
        "parameters": sum(weight.count for weight in weights),
        "encoding": checkpoint.encoding,
        "encodings": dict(Counter(weight.encoding for weight in weights).most_common()),
        "weights_nbytes": sum(weight.nbytes for weight in weights),
        "kv_token_nbytes": kv_token_nbytes(checkpoint),
        "decode_token_nbytes": decode_token_nbytes(checkpoint),
        "spec_digest": spec.digest().hex(),
        "tokenizer_digest": _tokenizer_digest(checkpoint),
        "weights_digest": weights_digest(checkpoint).hex(),
        "asides": checkpoint.asides,
    }


def windows(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how many layers see how much: "full", or the window in tokens."""
    return dict(Counter(str(layer.window or "full") for layer in checkpoint.spec.layers))


def kv_token_nbytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of keys and values of one token in float16. Sliding layers forget it after their window."""
    return Geometry.of(checkpoint.spec, ElementType.F16).layer_token_nbytes * len(checkpoint.spec.layers)


def decode_token_nbytes(checkpoint: Checkpoint) -> int:
    """Return the stored bytes of weights that one decoded token reads.

    That is every tensor, but only one row of an embedding that is not also the head.
    """
    total = sum(checkpoint.weight(name).nbytes for name in checkpoint.names())
    if checkpoint.spec.tied_embeddings:
        return total
    embed = checkpoint.weight("embed.weight")
    return total - embed.nbytes + embed.nbytes // embed.shape[0]


def _tokenizer_digest(checkpoint: Checkpoint) -> str:
    """Return the digest, or in brackets why there is none: weights can be looked at without a tokenizer."""
    try:
        return load_tokenizer(checkpoint.path).digest().hex()
    except CheckpointError as error:
        return f"(none: {error})"
