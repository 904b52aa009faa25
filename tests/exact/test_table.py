"""The short form of `make exact`: a tiny model every way with the whole prompt, real ones with its beginning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from exact_nodes import broken_handoff, handoff
from exact_runs import (
    CPU,
    Digests,
    Fixture,
    decode_run,
    mlx_run,
    one_by_one,
    plain_run,
    random_chunks,
    text_fixture,
    tiny_muse,
    torch_run,
    whole,
)

from muser_decode.engine.request import Route
from muser_prefill.kernels.exact.reference import plain_kernels
from muser_wire.home import muser_home
from muser_wire.model.fetch import fetched_path
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic

VECTORS = json.loads((Path(__file__).resolve().parent.parent / "vectors" / "exact.json").read_text())
SHORT, MIDDLE, TOKENS = 64, 512, 2048


def vector(name: str, tokens: int) -> Digests:
    plain = VECTORS[name]["prompts"][str(tokens)]
    return Digests(tuple(plain["planes"]), plain["logits"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def muse(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return tiny_muse(tmp_path_factory.mktemp("muse"))


def test_the_vectors_are_of_these_weights(muse: Fixture) -> None:
    assert muse.weights().digest().hex() == VECTORS["tiny-muse"]["weights"]
    assert len(muse.ids) == TOKENS
    assert len(set(VECTORS["tiny-muse"]["prompts"][str(TOKENS)]["planes"])) == 8


def test_a_tiny_model_is_equal_in_numpy_torch_and_mlx(muse: Fixture) -> None:
    weights, ids = muse.weights(), muse.ids
    for ar in (NumpyArithmetic(np.int64), NumpyArithmetic(np.float64)):
        assert plain_run(ar, weights, random_chunks(ids[:MIDDLE])) == vector("tiny-muse", MIDDLE)
    for chunks in (whole(ids), random_chunks(ids)):
        assert torch_run(weights, chunks) == vector("tiny-muse", TOKENS)
        assert mlx_run(weights, chunks) == vector("tiny-muse", TOKENS)
        assert decode_run(weights, chunks) == vector("tiny-muse", TOKENS)
    assert torch_run(weights, whole(ids[:MIDDLE]), plain_kernels(CPU)) == vector("tiny-muse", MIDDLE)
    for run in (torch_run, mlx_run, decode_run):
        assert run(weights, one_by_one(ids[:SHORT])) == vector("tiny-muse", SHORT)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_real_handoff_and_a_broken_one_are_equal(muse: Fixture, compiled: bool) -> None:
    whole_one = handoff(muse, compiled=compiled)
    assert whole_one.digests == vector("tiny-muse", TOKENS)
    assert (whole_one.report.route, whole_one.report.remote_tokens) == (Route.REMOTE, TOKENS - 1)
    broken = broken_handoff(muse, whole_one.report.segments_verified, compiled=compiled)
    assert broken.digests == vector("tiny-muse", TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_beginning_of_a_real_prompt_is_equal(name: str) -> None:
    fixture = text_fixture(name, fetched_path(name, muser_home()))
    weights, ids = fixture.weights(), fixture.ids[:SHORT]
    assert weights.digest().hex() == VECTORS[name]["weights"]
    wanted = vector(name, SHORT)
    assert plain_run(NumpyArithmetic(np.float64), weights, whole(ids)) == wanted
    assert torch_run(weights, random_chunks(ids)) == wanted
    assert mlx_run(weights, random_chunks(ids)) == wanted
    assert decode_run(weights, random_chunks(ids)) == wanted
