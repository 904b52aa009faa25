from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from muser_decode import attention, linear, pointwise
from muser_decode.attention import RopeKernel, RopeTable
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.cache import KVCache
from muser_decode.errors import CacheError
from muser_decode.runs import ChunkRun, StepRun
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.spec import RopeSpec
from muser_wire.model.tiny import write_tiny
from muser_wire.numerics import budget

LENGTHS = (1, 30, 7, 64)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(10, 500, tokens).tolist() for tokens in LENGTHS]


def filled(decoder: MlxDecoder) -> list[KVCache]:
    caches = []
    for prompt in PROMPTS:
        caches.append(decoder.new_cache())
        decoder.prefill_chunk(prompt, caches[-1])
    return caches


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3", "gemma3", "muse_glimmer"])
def test_rows_of_a_step_are_what_they_are_alone(tmp_path: Path, family: str) -> None:
    write_tiny(family, tmp_path / family, layers=6, window=24)
    decoder = MlxDecoder(open_checkpoint(tmp_path / family), dtype=mx.float32, kv_element=ElementType.F16, packed=False)
    together, alone = filled(decoder), filled(decoder)
    for turn in range(150):
        tokens = [(turn * 7 + index) % 500 for index in range(4)]
        rows = np.array(decoder.steps(mx.array(tokens), together))
        for index, cache in enumerate(alone):
            np.testing.assert_array_equal(rows[index], np.array(decoder.step(mx.array(tokens[index]), cache)))
    assert [cache.length for cache in together] == [tokens + 150 for tokens in LENGTHS]


def test_a_gpu_s_choices_keep_the_budget_for_several_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels on the CPU, without the groups that would need a compiler; rows at positions of their own."""
    for module in (attention, linear):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    write_tiny("qwen3", tmp_path / "q", layers=3)
    decoder = MlxDecoder(open_checkpoint(tmp_path / "q"), dtype=mx.float32, kv_element=ElementType.F16, packed=False)
    assert not pointwise.on_gpu()
    together, alone = filled(decoder), filled(decoder)
    for turn in range(5):
        rows = np.array(decoder.steps(mx.array([turn + 3] * 4), together))
        singles = [np.array(decoder.step(mx.array(turn + 3), cache)) for cache in alone]
        assert np.abs(rows - np.stack(singles)).max() <= budget("logits_f16_kv")


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dims", [16, 8])
def test_each_row_is_turned_to_its_own_position(kernel: bool, dims: int) -> None:
    spec = RopeSpec(10_000.0, dims)
    rope = RopeKernel(spec) if kernel else RopeTable(spec, 100)
    x = mx.array(RNG.standard_normal((3, 4, 16)).astype(np.float32))
    positions = [0, 99, 5, 5]
    turned = rope.each(x, mx.array(positions))
    assert turned.shape == x.shape
    for row, position in enumerate(positions):
        assert mx.array_equal(turned[:, row : row + 1], rope(x[:, row : row + 1], position))


def test_the_end_of_one_sequence_is_named_before_anything_is_written(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "short", layers=1, max_positions=32)
    decoder = MlxDecoder(
        open_checkpoint(tmp_path / "short"), dtype=mx.float32, kv_element=ElementType.F16, packed=False
    )
    caches = [decoder.new_cache(), decoder.new_cache()]
    decoder.prefill_chunk([1] * 32, caches[1])
    with pytest.raises(CacheError, match="33 positions asked"):
        StepRun(decoder.spec, caches)
    with pytest.raises(CacheError, match="33 positions asked"):
        ChunkRun(decoder.spec, caches[0], 33)
    assert [cache.length for cache in caches] == [0, 32]
