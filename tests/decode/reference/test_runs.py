from __future__ import annotations

import mlx.core as mx
import numpy as np

from muser_decode.reference.cache import ReferenceCache
from muser_decode.reference.decoder import ReferenceDecoder
from muser_decode.reference.layer import Rope
from muser_decode.reference.planes import Derivation, PlaneShape, Rows
from muser_decode.reference.runs import ChunkRun, StepRun
from muser_wire.model.spec import RopeSpec
from muser_wire.reference.tiny import RandomWeights, random_spec

SEED = next(seed for seed in range(99) if all(layer.window is None for layer in random_spec(seed).layers))
WEIGHTS = RandomWeights(random_spec(SEED), SEED)
SHAPE = PlaneShape(WEIGHTS.spec.kv_heads, WEIGHTS.spec.head_dim)


def rows(tokens: int) -> Rows:
    planes = np.random.default_rng(tokens).standard_normal((2 * SHAPE.kv_heads, tokens, SHAPE.head_dim))
    return Derivation(SHAPE).rows(mx.array(planes.astype(np.float16)))


def cache_of(tokens: int) -> ReferenceCache:
    cache = ReferenceDecoder(WEIGHTS).new_cache()
    run = ChunkRun(cache, tokens)
    for layer in range(len(WEIGHTS.spec.layers)):
        run.write(layer, rows(tokens))
    run.commit()
    return cache


def test_a_step_writes_each_row_into_its_own_cache_at_its_own_position() -> None:
    caches = [cache_of(5), cache_of(64)]
    run, both = StepRun(caches), rows(2)
    seen = run.write(0, both)
    assert [one.powers.shape[1] for one in seen] == [64, 128]
    run.commit()
    assert [cache.length for cache in caches] == [6, 65]
    for at, cache in enumerate(caches):
        k, v = cache.planes(0, cache.length - 1, cache.length)
        got = np.concatenate([np.array(k[0]), np.array(v[0])])
        np.testing.assert_array_equal(got, np.array(both.planes)[:, at])


def test_tables_are_of_the_rows_positions() -> None:
    rope = Rope(RopeSpec(10_000.0, SHAPE.head_dim))
    whole = np.array(rope.at(range(100))[0])
    for run, positions in (
        (ChunkRun(cache_of(7), 3), [7, 8, 9]),
        (StepRun([cache_of(5)]), [5]),
        (StepRun([cache_of(5), cache_of(64)]), [5, 64]),
    ):
        np.testing.assert_array_equal(np.array(run.table(rope)[0]), whole[positions])
        assert run.table(rope) is run.table(rope)
