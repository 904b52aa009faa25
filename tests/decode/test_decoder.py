from __future__ import annotations

import functools
import math
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import oracle_llama as oracle
import pytest

from muser_decode import attention, linear
from muser_decode import decoder as decoder_module
from muser_decode.decoder import MlxDecoder, check_spec, swiglu, swiglu_cpu
from muser_decode.engine.cache import KVCache
from muser_decode.errors import CacheError, ModelNotSupported
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec
from muser_wire.model.tiny import write_tiny_llama
from muser_wire.numerics import budget

IDS = np.random.default_rng(0).integers(0, 512, 300).tolist()


def as_f16(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)


@functools.cache
def expected(path: Path) -> tuple[oracle.Planes, np.ndarray]:
    checkpoint = open_checkpoint(path)
    return oracle.forward(lambda name: checkpoint.weight(name).f32(), checkpoint.spec, IDS, as_f16)


def decoder(checkpoint: Checkpoint, packed: bool = False) -> MlxDecoder:
    return MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=packed)


def plane_error(cache: KVCache, planes: oracle.Planes, tokens: int) -> float:
    """The largest difference from the oracle's planes, in parts of a plane's scale."""
    worst = 0.0
    for layer, pair in enumerate(planes):
        for ours, theirs in zip(cache.planes(layer, 0, tokens), pair, strict=True):
            difference = np.array(ours.astype(mx.float32)) - theirs[:tokens]
            worst = max(worst, float(np.abs(difference).max() / np.abs(theirs).max()))
    return worst


@pytest.mark.parametrize("chunks", [[299], [64, 128, 107], [1, 1, 130, 167]])
def test_prefill_then_step_equals_the_oracle(tiny_llama: Path, chunks: list[int]) -> None:
    ours = decoder(open_checkpoint(tiny_llama))
    planes, logits = expected(tiny_llama)
    cache = ours.new_cache()
    for tokens in chunks:
        ours.prefill_chunk(IDS[cache.length : cache.length + tokens], cache)
    assert cache.length == 299
    assert plane_error(cache, planes, 299) <= budget("planes_f16_kv")
    out = ours.step(mx.array(IDS[299]), cache)
    assert out.dtype == mx.float32
    assert out.shape == (512,)
    assert np.abs(np.array(out) - logits[299]).max() <= budget("logits_f16_kv")
    assert plane_error(cache, planes, 300) <= budget("planes_f16_kv")


def test_steps_alone_equal_the_oracle_at_every_position(tiny_llama: Path) -> None:
    ours = decoder(open_checkpoint(tiny_llama))
    _, logits = expected(tiny_llama)
    cache = ours.new_cache()
    for position, token in enumerate(IDS[:40]):
        out = np.array(ours.step(mx.array(token), cache))
        assert np.abs(out - logits[position]).max() <= budget("logits_f16_kv")


def test_tied_embeddings_serve_both_ends(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tied", tied=True, layers=2)
    checkpoint = open_checkpoint(tmp_path / "tied")
    _, logits = oracle.forward(lambda name: checkpoint.weight(name).f32(), checkpoint.spec, IDS[:20], as_f16)
    ours = decoder(checkpoint)
    cache = ours.new_cache()
    ours.prefill_chunk(IDS[:19], cache)
    out = np.array(ours.step(mx.array(IDS[19]), cache))
    assert np.abs(out - logits[19]).max() <= budget("logits_f16_kv")


def test_steps_can_be_launched_before_their_tokens_are_read(tiny_llama: Path) -> None:
    ours = decoder(open_checkpoint(tiny_llama))

    def greedy(pipelined: bool) -> list[int]:
        cache = ours.new_cache()
        ours.prefill_chunk(IDS[:50], cache)
        token, tokens = mx.array(IDS[50]), []
        for _ in range(12):
            token = mx.argmax(ours.step(token, cache))
            mx.async_eval(token)
            tokens.append(token if pipelined else int(token.item()))
        return [int(token.item()) if pipelined else token for token in tokens]

    assert greedy(pipelined=True) == greedy(pipelined=False)


def test_caches_are_independent(tiny_llama: Path) -> None:
    ours = decoder(open_checkpoint(tiny_llama))
    alone, first, second = ours.new_cache(), ours.new_cache(), ours.new_cache()
    ours.prefill_chunk(IDS[:30], alone)
    ours.prefill_chunk(IDS[:10], first)
    ours.prefill_chunk(IDS[100:140], second)
    ours.prefill_chunk(IDS[10:30], first)
    a, b = (np.array(ours.step(mx.array(1), cache)) for cache in (alone, first))
    assert np.abs(a - b).max() <= budget("logits_f16_kv")


def test_the_model_has_an_end(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "short", layers=1, max_positions=16)
    ours = decoder(open_checkpoint(tmp_path / "short"))
    cache = ours.new_cache()
    ours.prefill_chunk(IDS[:16], cache)
    with pytest.raises(CacheError, match="17 positions asked, the model has 16"):
        ours.step(mx.array(1), cache)


@pytest.mark.parametrize(("dtype", "element"), [(mx.float16, ElementType.F16), (mx.bfloat16, ElementType.BF16)])
def test_half_types_give_the_planes_roughly(tmp_path: Path, dtype: mx.Dtype, element: ElementType) -> None:
    write_tiny_llama(tmp_path / "half", layers=2)
    checkpoint = open_checkpoint(tmp_path / "half")
    planes, _ = oracle.forward(lambda name: checkpoint.weight(name).f32(), checkpoint.spec, IDS[:24], as_f16)
    ours = MlxDecoder(checkpoint, dtype=dtype, kv_element=element, packed=False)
    cache = ours.new_cache()
    ours.prefill_chunk(IDS[:24], cache)
    for layer, pair in enumerate(planes):
        for mine, theirs in zip(cache.planes(layer, 0, 24), pair, strict=True):
            assert np.abs(np.array(mine.astype(mx.float32)) - theirs).max() <= budget("planes_bf16")


@pytest.mark.parametrize("version", [swiglu, swiglu_cpu])
def test_swiglu_bends_the_gate(version) -> None:
    gate, up = np.array([-2.0, 0.5, -200.0, 90.0]), np.array([3.0, -4.0, 5.0, 0.25])
    expected = np.array([-2.0 / (1 + math.e**2) * 3.0, 0.5 / (1 + math.e**-0.5) * -4.0, 0.0, 22.5])
    out = version(mx.array(gate.astype(np.float32)), mx.array(up.astype(np.float32)))
    assert np.abs(np.array(out) - expected).max() <= budget("attention_f32")


@pytest.mark.skipif(shutil.which("c++") is None, reason="mlx compiles for a CPU with the C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "element", "planes_name"),
    [
        (mx.float32, ElementType.F16, "planes_f16_kv"),
        (mx.float16, ElementType.F16, "planes_bf16"),
        (mx.bfloat16, ElementType.BF16, "planes_bf16"),
    ],
)
def test_the_choices_for_a_gpu_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, element: ElementType, planes_name: str
) -> None:
    """Kernels, compiled groups and plain rows give the oracle's values on the CPU too."""
    for module in (attention, decoder_module, linear):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    write_tiny_llama(tmp_path / "gpu", layers=2)
    checkpoint = open_checkpoint(tmp_path / "gpu")
    planes, logits = oracle.forward(lambda name: checkpoint.weight(name).f32(), checkpoint.spec, IDS[:40], as_f16)
    ours = MlxDecoder(checkpoint, dtype=dtype, kv_element=element, packed=False)
    cache = ours.new_cache()
    ours.prefill_chunk(IDS[:16], cache)
    ours.prefill_chunk(IDS[16:39], cache)
    out = np.array(ours.step(mx.array(IDS[39]), cache))
    assert plane_error(cache, planes, 40) <= budget(planes_name)
    if dtype == mx.float32:
        assert np.abs(out - logits[39]).max() <= budget("logits_f16_kv")


def test_layer_kinds_that_are_missing_are_named(tiny_llama: Path) -> None:
    spec = open_checkpoint(tiny_llama).spec
    rope = RopeSpec(theta=10_000.0, rotary_dim=spec.head_dim)
    check_spec(spec)
    with pytest.raises(ModelNotSupported, match="layer 1 has a window of 64"):
        check_spec(replace(spec, layers=(LayerSpec(None, rope), LayerSpec(64, rope))))
    with pytest.raises(ModelNotSupported, match="layer 0 rotates 8 of 16"):
        check_spec(replace(spec, layers=(LayerSpec(None, RopeSpec(10_000.0, 8)),)))


def test_additions_to_the_plain_decoder_are_refused_by_name(tiny_llama: Path) -> None:
    """A spec that grows a field must not be decoded as if it had not."""

    @dataclass(frozen=True)
    class Grown(ModelSpec):
        new_cap: float | None = None

    spec = open_checkpoint(tiny_llama).spec
    plain = {field.name: getattr(spec, field.name) for field in fields(spec)}
    check_spec(Grown(**plain))
    with pytest.raises(ModelNotSupported, match=r"Grown.new_cap is 30.0"):
        check_spec(Grown(**plain, new_cap=30.0))


def test_packed_real_weights_give_the_dense_logits(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    ids = [1, 4093, 198, 2683, 359, 253, 5356]

    def logits(packed: bool) -> np.ndarray:
        ours = decoder(checkpoint, packed)
        cache = ours.new_cache()
        ours.prefill_chunk(ids[:-1], cache)
        return np.array(ours.step(mx.array(ids[-1]), cache))

    dense, packed = logits(False), logits(True)
    assert np.abs(dense - packed).max() / dense.std() <= budget("logits_packed")
