from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import oracle_decoder as oracle
import pytest

from muser_decode import attention, linear, pointwise
from muser_decode.decoder import MlxDecoder, check_spec
from muser_decode.engine.cache import KVCache
from muser_decode.errors import CacheError, ModelNotSupported
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec
from muser_wire.model.tiny import write_tiny, write_tiny_llama
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


@pytest.mark.skipif(shutil.which("c++") is None, reason="mlx compiles for a CPU with the C++ compiler")
@pytest.mark.parametrize(
    ("family", "dtype", "element", "planes_name"),
    [
        ("muse_glimmer", mx.float32, ElementType.F16, "planes_f16_kv"),
        ("llama", mx.float16, ElementType.F16, "planes_bf16"),
        ("qwen3", mx.bfloat16, ElementType.BF16, "planes_bf16"),
    ],
)
def test_the_choices_for_a_gpu_compute_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: mx.Dtype,
    element: ElementType,
    planes_name: str,
) -> None:
    """Kernels, compiled groups and plain rows give the oracle's values on the CPU too, before a window and past it."""
    for module in (attention, linear, pointwise):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    monkeypatch.setattr(attention, "KERNEL_ROWS", 9)
    write_tiny(family, tmp_path / "gpu", layers=2, window=40)
    checkpoint = open_checkpoint(tmp_path / "gpu")
    planes, logits = oracle.forward(lambda name: checkpoint.weight(name).f32(), checkpoint.spec, IDS[:60], as_f16)
    ours = MlxDecoder(checkpoint, dtype=dtype, kv_element=element, packed=False)
    cache = ours.new_cache()
    ours.prefill_chunk(IDS[:16], cache)
    ours.prefill_chunk(IDS[16:59], cache)
    out = np.array(ours.step(mx.array(IDS[59]), cache))
    assert plane_error(cache, planes, 60) <= budget(planes_name)
    if dtype == mx.float32:
        assert np.abs(out - logits[59]).max() <= budget("logits_f16_kv")


def test_additions_that_this_decoder_does_not_know_are_refused_by_name(tiny_llama: Path) -> None:
    """A spec that grows a field must not be decoded as if it had not."""

    @dataclass(frozen=True)
    class Grown(ModelSpec):
        new_cap: float | None = None

    @dataclass(frozen=True)
    class Turned(RopeSpec):
        reversed: bool = False

    spec = open_checkpoint(tiny_llama).spec
    plain = {field.name: getattr(spec, field.name) for field in fields(spec)}
    check_spec(Grown(**plain))
    with pytest.raises(ModelNotSupported, match=r"Grown.new_cap is 30.0"):
        check_spec(Grown(**plain, new_cap=30.0))
    with pytest.raises(ModelNotSupported, match=r"Turned.reversed is True"):
        check_spec(replace(spec, layers=(LayerSpec(8, None), LayerSpec(8, Turned(1e4, 16, reversed=True)))))


WINDOW = 24
FAMILIES = [
    *(("llama", 6), ("llama3", 6), ("mistral", 6), ("qwen3", 6)),
    *(("gemma3", 7), ("muse_glimmer", 6), ("muse_glimmer", 7), ("muse_glimmer", 8)),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda param: f"{param[0]}-{param[1]}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, layers = request.param
    path = tmp_path_factory.mktemp("families") / family
    write_tiny(family, path, layers=layers, window=WINDOW, vocab=300)
    return open_checkpoint(path)


def logits_of(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    """The oracle's logits, with keys and values as they are computed."""
    return oracle.forward(lambda name: checkpoint.weight(name).f32(), checkpoint.spec, ids)[1]


def test_every_family_decodes_greedily_as_the_oracle(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rounding of keys and values, which a tie can throw either way, f32 is close to float64.

    The prompt comes in chunks that divide nothing, and decoding goes on for 120 tokens past the window.
    """
    monkeypatch.setattr(pointwise, "round_kv", lambda x, element: x)
    ours = decoder(model)
    ids, cache, computed = IDS_300[: 3 * WINDOW], ours.new_cache(), []
    for tokens in (7, 1, 30, 33):
        ours.prefill_chunk(ids[cache.length : cache.length + tokens], cache)
    for _ in range(120):
        computed.append(np.array(ours.step(mx.array(ids[-1]), cache)))
        ids = [*ids, int(computed[-1].argmax())]
    expected = logits_of(model, ids[:-1])[3 * WINDOW - 1 :]
    assert np.abs(np.stack(computed) - expected).max() <= budget("logits_f32")
    assert ids[3 * WINDOW :] == expected.argmax(axis=-1).tolist()
    assert len(set(ids[3 * WINDOW :])) > 8


IDS_300 = np.random.default_rng(1).integers(10, 300, 3 * WINDOW + 1).tolist()


@functools.cache
def rounded(model: Checkpoint) -> tuple[oracle.Planes, np.ndarray]:
    return oracle.forward(lambda name: model.weight(name).f32(), model.spec, IDS_300, as_f16)


@pytest.mark.parametrize("chunk", [5, WINDOW, 40])
@pytest.mark.parametrize("prompt", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, WINDOW - 5, WINDOW + 5, WINDOW + 40])
def test_prompts_around_the_window_in_chunks_of_any_size(model: Checkpoint, prompt: int, chunk: int) -> None:
    ours = decoder(model)
    planes, logits = rounded(model)
    cache, held = ours.new_cache(), prompt - 1
    for start in range(0, held, chunk):
        ours.prefill_chunk(IDS_300[start : min(held, start + chunk)], cache)
    for layer, pair in enumerate(planes):
        first = 0 if model.spec.layers[layer].window is None else max(0, held - WINDOW)
        for mine, theirs in zip(cache.planes(layer, first, held), pair, strict=True):
            error = np.abs(np.array(mine.astype(mx.float32)) - theirs[first:held]).max()
            assert error <= budget("planes_f16_kv") * np.abs(theirs).max()
    for position in (prompt - 1, prompt):
        out = np.array(ours.step(mx.array(IDS_300[position]), cache))
        assert np.abs(out - logits[position]).max() <= budget("logits_f16_kv")


def test_positions_taken_back_leave_no_trace(model: Checkpoint) -> None:
    ours = decoder(model)

    def after(rejected: int) -> np.ndarray:
        cache = ours.new_cache()
        ours.prefill_chunk(IDS_300[:60], cache)
        if rejected:
            ours.prefill_chunk(IDS_300[5 : 5 + rejected], cache)
            cache.rollback(60)
        return np.array(ours.step(mx.array(IDS_300[60]), cache))

    expected = after(0)
    for rejected in (1, 15, 16):
        np.testing.assert_array_equal(after(rejected), expected)


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
