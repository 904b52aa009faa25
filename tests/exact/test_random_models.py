"""Random small models and shapes: equal bytes from numpy, torch and MLX, in whatever chunks.

`make test` takes 400 models and 600 shapes, always the same; `make fuzz` 8,000 and 12,000, from a fresh place.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch
from exact_runs import CPU, Chunks, Digests, decode_run, mlx_run, plain_run, sha, torch_run, whole

from muser_decode.reference.mlx_arithmetic import MlxArithmetic
from muser_prefill.kernels.exact.reference import plain_kernels
from muser_prefill.reference.torch_arithmetic import TorchArithmetic
from muser_wire.model.spec import Activation
from muser_wire.reference.arithmetic import Arithmetic
from muser_wire.reference.attention import View, attention, score_scale
from muser_wire.reference.exp2 import activated
from muser_wire.reference.linear import IntegerWeight, linear, linear_arrays, quantised_input
from muser_wire.reference.norm import rms_norm
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.planes import key_integers, plane, value_integers
from muser_wire.reference.tiny import Choices, RandomWeights, random_bytes, random_ids, random_spec

FUZZ = os.environ.get("MUSER_HYPOTHESIS") == "fuzz"
TIMES = 20 if FUZZ else 1
MODELS, SHAPES = 400 * TIMES, 600 * TIMES
FIRST = time.time_ns() % 2**40 if FUZZ else 0
BATCH = 25
"""Models of one test, and a quarter of its shapes, so that a failure names a few and a run can be spread."""


def cut(seed: int, ids: list[int]) -> Chunks:
    """Cut a prompt in chunks of 1 to 40 tokens."""
    chunks, at = [], 0
    for size in random_bytes(seed, "cut", len(ids)):
        chunks.append(ids[at : at + 1 + int(size) % 40])
        at += len(chunks[-1])
        if at == len(ids):
            break
    return chunks


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def runs_of(seed: int) -> dict[str, Digests]:
    """Run one model; seeds take turns in which libraries see the prompt whole."""
    spec = random_spec(seed, head_dims=(16, 16, 32, 32, 64, 80, 96))
    weights = RandomWeights(spec, seed)
    ids = random_ids(spec, seed, 3 + int(random_bytes(seed, "tokens", 1)[0]) % 75)
    pieces = cut(seed, ids)
    found = {
        "numpy, whole": plain_run(NumpyArithmetic(np.float64), weights, whole(ids)),
        "torch, chunks": torch_run(weights, pieces),
        "mlx": mlx_run(weights, pieces if seed % 2 else whole(ids)),
        "decode": decode_run(weights, whole(ids) if seed % 2 else pieces),
    }
    if seed % 4 == 0:
        found["torch, plain, whole"] = torch_run(weights, whole(ids), plain_kernels(CPU))
    return found


def shapes_of(seed: int, ar: Arithmetic) -> str:
    """Run single stages of random shapes over one library; return a digest of what they gave."""
    choose = Choices(seed)
    tokens, rows, groups = (choose.pick(name, range(1, most)) for name, most in (("T", 40), ("N", 200), ("K", 12)))
    group = choose.pick("group", (16, 32))
    x = ar.array(spread(seed, "x", (tokens, 32 * groups), -30, 20))
    q = random_bytes(seed, "q", rows * 32 * groups).view(np.int8).reshape(rows, -1, group) // np.int8(2)
    s, m = (spread(seed, part, (rows, 32 * groups // group), -12, 0) for part in "sm")
    weight = IntegerWeight(q, s, m if choose.pick("offset", (True, False)) else None)
    product = linear(ar, quantised_input(ar, rms_norm(ar, x, None, 1e-6)), linear_arrays(ar, weight))
    heads, repeats, width = (choose.pick(name, range(1, 4)) for name in ("heads", "repeats", "width"))
    width, held = 16 * width * choose.pick("wider", (1, 4)), tokens + choose.pick("held", range(150))
    k, v = (plane(ar, ar.array(spread(seed, part, (held, heads, width), -16, 4))) for part in "kv")
    queries = ar.array(spread(seed, "queries", (tokens, heads * repeats, width), -6, 3))
    view = View(held - tokens, 0, choose.pick("window", (None, 1, 33, 64, 100)), score_scale(0.25))
    attended = attention(ar, queries, key_integers(ar, k), value_integers(ar, v), view)
    acted = activated(ar, product, product * 0.5, choose.pick("activation", tuple(Activation)))
    return sha(*(ar.host(array) for array in (product, acted, k, v, attended)))


def spread(seed: int, name: str, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Return float32 of both signs, with exponents from `low` up to `high`."""
    count = int(np.prod(shape))
    raw = random_bytes(seed, name, 4 * count).view("<u4")
    exponents = (raw >> np.uint32(23) & np.uint32(255)) % np.uint32(high - low) + np.uint32(127 + low)
    return (raw & np.uint32(0x807FFFFF) | exponents << np.uint32(23)).astype(np.uint32).view(np.float32).reshape(shape)


@pytest.mark.parametrize("batch", range(SHAPES // (4 * BATCH)))
def test_random_shapes_are_equal_byte_for_byte(batch: int) -> None:
    libraries = (TorchArithmetic(CPU), MlxArithmetic())
    for seed in range(FIRST + batch * 4 * BATCH, FIRST + (batch + 1) * 4 * BATCH):
        wanted = shapes_of(seed, NumpyArithmetic())
        assert {library.name: shapes_of(seed, library) for library in libraries} == dict.fromkeys(
            ("torch", "mlx"), wanted
        ), seed


@pytest.mark.parametrize("batch", range(MODELS // BATCH))
def test_random_models_are_equal_byte_for_byte(batch: int) -> None:
    for seed in range(FIRST + batch * BATCH, FIRST + (batch + 1) * BATCH):
        found = runs_of(seed)
        wrong = [name for name, digests in found.items() if digests != found["numpy, whole"]]
        assert not wrong, (seed, wrong, found)
