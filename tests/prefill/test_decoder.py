from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracle_decoder
import pytest
import torch

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.cache import KVCache
from muser_prefill.engine.runner import prefill
from muser_prefill.errors import CacheFull, CacheRangeError, TokenOutOfRange
from muser_prefill.kernels import attention
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.spec import Activation, LayerSpec, Llama3Scaling, QKNorm, RopeSpec
from muser_wire.numerics import budget

CPU = torch.device("cpu")
ROPE = RopeSpec(theta=10000.0, rotary_dim=16)
FULL = LayerSpec(window=None, rope=ROPE)
WINDOW = 33
SLIDING = LayerSpec(window=WINDOW, rope=RopeSpec(theta=500.0, rotary_dim=16))
SHAPES = {
    "gqa-1": {"heads": 3, "kv_heads": 3},
    "gqa-3": {"heads": 6, "kv_heads": 2},
    "gqa-4": {"heads": 4, "kv_heads": 1},
    "windows": {"layers": (LayerSpec(20, ROPE), FULL, LayerSpec(130, ROPE), FULL)},
    "no-positions": {"layers": (FULL, LayerSpec(None, None), FULL)},
    "scale": {"attention_scale": 0.4},
    "stretched": {"layers": (FULL, LayerSpec(None, RopeSpec(500.0, 16, Llama3Scaling(8.0, 1.0, 4.0, 64))), FULL)},
    "two-ropes": {"layers": (FULL, LayerSpec(None, RopeSpec(500.0, 8)), FULL)},
    "qk-norm": {"qk_norm": QKNorm(weighted=True, eps=1e-3), "attention_scale": 0.4},
    "gate": {"attention_gate": True, "heads": 6},
    "post-norms": {"post_norm_eps": 1e-2},
    "gelu": {"activation": Activation.GELU_TANH},
    "embedding": {"embedding_scale": 8.0},
    "embedding-norm": {"embedding_norm": True},
    "gemma3": {
        "layers": (SLIDING, SLIDING, FULL, SLIDING),
        "kv_heads": 1,
        "qk_norm": QKNorm(weighted=True, eps=1e-6),
        "post_norm_eps": 1e-6,
        "activation": Activation.GELU_TANH,
        "embedding_scale": 8.0,
    },
    "muse_glimmer": {
        "layers": (SLIDING, SLIDING, SLIDING, LayerSpec(None, None)),
        "heads": 8,
        "tied_embeddings": False,
        "attention_scale": 3.87 / 4,
        "qk_norm": QKNorm(weighted=False, eps=1e-5),
        "attention_gate": True,
        "post_norm_eps": 1e-8,
        "embedding_norm": True,
        "logit_scale": 0.196,
        "logit_softcap": 0.8,
    },
}


def make_decoder(
    checkpoint: object, dtype: torch.dtype = torch.float32, element: ElementType | None = ElementType.F16
) -> TorchDecoder:
    return TorchDecoder(checkpoint, dtype=dtype, kv_element=element, device=CPU)


def ignore(chunk: int, layer: int) -> None:
    pass


def expected_planes(checkpoint, ids: list[int], round_kv=None) -> oracle_decoder.Planes:
    return oracle_decoder.forward(lambda name: checkpoint.weight(name).f32(), checkpoint.spec, ids, round_kv)[0]


def max_error(cache: KVCache, planes: oracle_decoder.Planes) -> float:
    return max(
        float(np.abs(got.double().numpy() - expected).max())
        for layer, pair in enumerate(planes)
        for got, expected in zip(cache.planes(layer, 0, cache.length), pair, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk_tokens", [300, 64, 7])
def test_planes_in_f32(shape: str, chunk_tokens: int, make_model: Callable, token_ids: Callable) -> None:
    checkpoint, ids = make_model(**SHAPES[shape]), token_ids(170)
    decoder = make_decoder(checkpoint, element=None)
    cache = decoder.new_cache(170)
    prefill(decoder, ids, cache, chunk_tokens, ignore)
    assert max_error(cache, expected_planes(checkpoint, ids)) <= budget("planes_f32")


@pytest.mark.parametrize("shape", ["gemma3", "muse_glimmer"])
@pytest.mark.parametrize("tokens", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, WINDOW - 5, WINDOW + 5, WINDOW + 40])
@pytest.mark.parametrize("chunk_tokens", [300, WINDOW, WINDOW - 1, WINDOW + 1, 5, 40])
def test_lengths_and_chunks_around_the_window(
    shape: str, tokens: int, chunk_tokens: int, make_model: Callable, token_ids: Callable
) -> None:
    checkpoint, ids = make_model(**SHAPES[shape]), token_ids(tokens)
    decoder = make_decoder(checkpoint, element=None)
    cache = decoder.new_cache(tokens)
    prefill(decoder, ids, cache, chunk_tokens, ignore)
    assert max_error(cache, expected_planes(checkpoint, ids)) <= budget("planes_f32")


def test_attention_of_a_sliding_layer_gets_no_key_that_nobody_sees(
    make_model: Callable, token_ids: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, ids = make_decoder(make_model(**SHAPES["gemma3"])), token_ids(130)
    cache, keys = decoder.new_cache(130), []
    attend = decoder._attention

    def recorded(q: torch.Tensor, k: torch.Tensor, *rest: object) -> torch.Tensor:
        keys.append(len(k))
        return attend(q, k, *rest)

    monkeypatch.setattr(decoder, "_attention", recorded)
    prefill(decoder, ids, cache, 65, ignore)
    # 65 queries and the 32 positions before the first of them; the third layer sees everything.
    assert keys == [65, 65, 65, 97, 97, 130]


@pytest.mark.parametrize("shape", ["gqa-3", "windows", "gemma3", "muse_glimmer"])
@pytest.mark.parametrize("chunk_tokens", [300, 50])
def test_planes_in_bf16(shape: str, chunk_tokens: int, make_model: Callable, token_ids: Callable) -> None:
    """Scores are rounded to 8 bits too, so sharp ones would show as much of that as the budget allows for the rest."""
    checkpoint, ids = make_model(**{**SHAPES[shape], "attention_scale": 0.25}), token_ids(170)
    decoder = make_decoder(checkpoint, torch.bfloat16, ElementType.BF16)
    cache = decoder.new_cache(170)
    prefill(decoder, ids, cache, chunk_tokens, ignore)
    assert cache.planes(0, 0, 1)[0].dtype == torch.bfloat16
    assert max_error(cache, expected_planes(checkpoint, ids)) <= budget("planes_bf16")


def test_planes_of_a_checkpoint_file(tiny_llama: Path) -> None:
    """The first layers only: this model is made sharp, and multiplies an f32 rounding fivefold by its last layer."""
    checkpoint = open_checkpoint(tiny_llama)
    ids = list(range(3, 90))
    decoder = make_decoder(checkpoint, element=None)
    cache = decoder.new_cache(len(ids))
    prefill(decoder, ids, cache, 2048, ignore)
    assert max_error(cache, expected_planes(checkpoint, ids)[:2]) <= budget("planes_f32")


def test_planes_with_f16_elements(make_model: Callable, token_ids: Callable) -> None:
    checkpoint, ids = make_model(), token_ids(100)
    decoder = make_decoder(checkpoint)
    cache = decoder.new_cache(100)
    prefill(decoder, ids, cache, 2048, ignore)
    planes = expected_planes(checkpoint, ids, lambda x: x.astype(np.float16).astype(np.float64))
    assert cache.planes(0, 0, 1)[0].dtype == torch.float16
    assert max_error(cache, planes) <= budget("planes_f16_kv")


@pytest.mark.parametrize("chunk_tokens", [300, 16])
def test_attention_reads_what_the_wire_carries(
    chunk_tokens: int, make_model: Callable, token_ids: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halving stands in for rounding: a path around it, for this chunk or an earlier one, would be seen by layer 1."""
    monkeypatch.setattr("muser_prefill.engine.cache.round_into", lambda plane, values: plane.copy_(values * 0.5))
    checkpoint, ids = make_model(), token_ids(60)
    decoder = make_decoder(checkpoint, element=None)
    cache = decoder.new_cache(60)
    prefill(decoder, ids, cache, chunk_tokens, ignore)
    assert max_error(cache, expected_planes(checkpoint, ids, lambda x: x * 0.5)) <= budget("planes_f32")


def test_a_poisoned_cache_does_not_leak(make_model: Callable, token_ids: Callable) -> None:
    decoder, ids = make_decoder(make_model(**SHAPES["windows"])), token_ids(150)
    clean, poisoned = decoder.new_cache(150), decoder.new_cache(400)
    for plane in (poisoned._keys, poisoned._values):
        plane.fill_(float("nan"))
    for cache in (clean, poisoned):
        prefill(decoder, ids, cache, 40, ignore)
    for layer in range(4):
        for expected, got in zip(clean.planes(layer, 0, 150), poisoned.planes(layer, 0, 150), strict=True):
            assert torch.equal(expected, got)


def test_a_layer_is_announced_when_final_and_before_its_attention(
    make_model: Callable, token_ids: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, ids = make_decoder(make_model()), token_ids(20)
    cache, events, seen = decoder.new_cache(20), [], {}
    attend = decoder._attention

    def recorded(*args: object) -> torch.Tensor:
        events.append("attention")
        return attend(*args)

    def on_layer(layer: int) -> None:
        events.append(layer)
        seen[layer] = [plane.clone() for plane in cache.planes(layer, 0, 20)]
        assert cache.length == 0

    monkeypatch.setattr(decoder, "_attention", recorded)
    decoder.prefill_chunk(ids, cache, on_layer)
    # Nobody needs the last layer's attention.
    assert events == [0, "attention", 1, "attention", 2]
    for layer in range(3):
        assert all(torch.equal(*pair) for pair in zip(seen[layer], cache.planes(layer, 0, 20), strict=True))


class Cancelled(Exception):
    """What a handoff raises to abandon a chunk."""


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_abandoned_chunk_leaves_no_trace(at: int, make_model: Callable, token_ids: Callable) -> None:
    decoder, ids = make_decoder(make_model()), token_ids(50)
    cache, straight = decoder.new_cache(50), decoder.new_cache(50)
    prefill(decoder, ids, straight, 30, ignore)
    decoder.prefill_chunk(ids[:30], cache, lambda layer: None)

    def cancel(layer: int) -> None:
        if layer == at:
            raise Cancelled

    with pytest.raises(Cancelled):
        decoder.prefill_chunk(token_ids(20), cache, cancel)
    assert cache.length == 30
    decoder.prefill_chunk(ids[30:], cache, lambda layer: None)
    for layer in range(3):
        pairs = zip(cache.planes(layer, 0, 50), straight.planes(layer, 0, 50), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(("shape", "norms"), [("gqa-3", ()), ("muse_glimmer", ()), ("gemma3", ("attn.k_norm",))])
def test_nothing_is_loaded_that_no_key_depends_on(shape: str, norms: tuple[str, ...], make_model: Callable) -> None:
    checkpoint = make_model(**SHAPES[shape])
    make_decoder(checkpoint)
    last = f"layers.{len(checkpoint.spec.layers) - 1}."
    needed = {f"{last}{name}.weight" for name in ("attn_norm", "attn.k", "attn.v", *norms)}
    assert {name for name in checkpoint.read if name.startswith(last)} == needed
    assert not {"final_norm.weight", "head.weight"} & set(checkpoint.read)


@pytest.mark.parametrize("bad", [-1, 131])
def test_a_token_outside_the_vocabulary_is_refused(bad: int, make_model: Callable) -> None:
    decoder = make_decoder(make_model())
    cache = decoder.new_cache(4)
    with pytest.raises(TokenOutOfRange, match=rf"token {bad} .* 131"):
        decoder.prefill_chunk([1, bad, 2], cache, lambda layer: pytest.fail("nothing may be computed"))
    assert cache.length == 0


def test_a_chunk_longer_than_the_cache_is_refused(make_model: Callable, token_ids: Callable) -> None:
    decoder = make_decoder(make_model())
    cache = decoder.new_cache(9)
    with pytest.raises(CacheFull):
        decoder.prefill_chunk(token_ids(10), cache, lambda layer: pytest.fail("nothing may be computed"))
    with pytest.raises(CacheRangeError):
        cache.planes(0, 0, 1)


def test_a_cache_longer_than_the_model_is_refused(make_model: Callable) -> None:
    with pytest.raises(CacheFull, match=r"513 .* 512"):
        make_decoder(make_model()).new_cache(513)


def test_admitted_kernels_are_named(make_model: Callable) -> None:
    assert make_decoder(make_model()).admitted == ("attention.chunked", "linear.packed")


def test_a_kernel_that_misses_is_named_in_the_log_and_not_used(
    make_model: Callable, token_ids: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "ChunkedAttention", lambda: lambda q, k, v, start, window: q * 0)
    checkpoint, ids = make_model(), token_ids(60)
    with caplog.at_level(logging.WARNING):
        decoder = make_decoder(checkpoint, element=None)
    assert decoder.admitted == ("linear.packed",)
    assert "kernel_refused name=attention.chunked" in caplog.text
    cache = decoder.new_cache(60)
    prefill(decoder, ids, cache, 2048, ignore)
    assert max_error(cache, expected_planes(checkpoint, ids)) <= budget("planes_f32")


@pytest.mark.cuda
def test_planes_on_cuda(make_model: Callable, token_ids: Callable) -> None:
    checkpoint, ids = make_model(**SHAPES["windows"]), token_ids(170)
    decoder = TorchDecoder(checkpoint, dtype=torch.bfloat16, kv_element=ElementType.BF16, device=torch.device("cuda"))
    cache = decoder.new_cache(170)
    prefill(decoder, ids, cache, 64, ignore)
    for layer, pair in enumerate(expected_planes(checkpoint, ids)):
        for got, expected in zip(cache.planes(layer, 0, 170), pair, strict=True):
            assert np.abs(got.double().cpu().numpy() - expected).max() <= budget("planes_bf16")
