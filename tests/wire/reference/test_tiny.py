"""Random models: the same on every platform, and with everything that a family may have."""

from __future__ import annotations

import hashlib

import numpy as np

from muser_wire.reference.conformance import MODEL_SEEDS
from muser_wire.reference.tiny import RandomWeights, random_bytes, random_ids, random_spec, uniform


def test_bytes_are_those_of_the_hash() -> None:
    assert random_bytes(7, "a", 5).tobytes() == hashlib.shake_256(b"7/a").digest(5)
    first = int.from_bytes(hashlib.shake_256(b"7/a").digest(2), "little")
    assert uniform(7, "a", (3,))[0] == first / 65536


def test_the_models_of_conformance_have_every_feature() -> None:
    specs = [random_spec(seed) for seed in MODEL_SEEDS]
    layers = [layer for spec in specs for layer in spec.layers]
    for present in (
        {spec.qk_norm is None or spec.qk_norm.weighted for spec in specs},
        {spec.attention_gate for spec in specs},
        {spec.post_norm_eps is None for spec in specs},
        {spec.tied_embeddings for spec in specs},
        {spec.embedding_norm for spec in specs},
        {spec.logit_scale == 1.0 for spec in specs},
        {spec.embedding_scale == 1.0 for spec in specs},
        {spec.activation.value == "silu" for spec in specs},
        {layer.window is None for layer in layers},
        {layer.rope is None for layer in layers},
    ):
        assert present == {True, False}
    assert any(spec.logit_softcap for spec in specs)
    assert any(spec.heads > spec.kv_heads for spec in specs)


def test_all_kinds_of_matrices_come_up_and_slices_are_slices() -> None:
    spec = random_spec(2)
    weights = RandomWeights(spec, 2)
    matrices = [weights.linear(name) for name in weights.names() if len(weights.shape(name)) == 2]
    assert {(matrix.group, matrix.m is None) for matrix in matrices} == {(32, True), (32, False), (16, True)}
    whole, part = weights.linear("layers.0.attn.q.weight"), weights.linear("layers.0.attn.q.weight", 3, 9)
    assert (whole.q[3:9] == part.q).all()
    ids = random_ids(spec, 2, 11)
    assert len(ids) == 11
    assert max(ids) < spec.vocab_size
    assert (weights.rows(ids) == weights.linear("embed.weight").values()[np.array(ids)]).all()
