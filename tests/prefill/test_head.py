from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle_decoder
import pytest
import torch

from muser_prefill.engine.runner import prefill
from muser_prefill.head import DecoderWithHead
from muser_wire.geometry import ElementType
from muser_wire.model.spec import Activation, LayerSpec, QKNorm, RopeSpec
from muser_wire.numerics import budget

CPU = torch.device("cpu")
SLIDING = LayerSpec(20, RopeSpec(500.0, 16))
SHAPES = {
    "tied": {},
    "own-head": {"tied_embeddings": False},
    "scaled": {"logit_scale": 0.3, "embedding_scale": 8.0},
    "capped": {"logit_scale": 2.0, "logit_softcap": 0.7},
    "everything": {
        "layers": (SLIDING, LayerSpec(None, None), SLIDING),
        "tied_embeddings": False,
        "qk_norm": QKNorm(weighted=True, eps=1e-6),
        "attention_gate": True,
        "post_norm_eps": 1e-8,
        "activation": Activation.GELU_TANH,
        "embedding_norm": True,
        "logit_scale": 0.196,
        "logit_softcap": 2.0,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_a_prompt_whole_and_in_pieces(shape: str, make_model: Callable, token_ids: Callable) -> None:
    checkpoint, ids = make_model(**SHAPES[shape]), token_ids(70)
    decoder = DecoderWithHead(checkpoint, dtype=torch.float32, kv_element=None, device=CPU)
    _, expected = oracle_decoder.forward(lambda name: checkpoint.weight(name).f32(), checkpoint.spec, ids)
    whole = decoder.logits(ids)
    cache = decoder.new_cache(70)
    prefill(decoder, ids[:30], cache, 16, lambda chunk, layer: None)
    pieces = torch.cat([decoder.logits(ids[30:69], cache), decoder.logits(ids[69:], cache)])
    assert whole.dtype == torch.float32
    assert np.abs(whole.numpy() - expected).max() <= budget("logits_f32")
    assert np.abs(pieces.numpy() - expected[30:]).max() <= budget("logits_f32")


def test_planes_are_those_of_the_producer(make_model: Callable, token_ids: Callable) -> None:
    checkpoint, ids = make_model(**SHAPES["everything"]), token_ids(40)
    decoder = DecoderWithHead(checkpoint, dtype=torch.float32, kv_element=ElementType.F16, device=CPU)
    cache = decoder.new_cache(40)
    decoder.logits(ids, cache)
    planes, _ = oracle_decoder.forward(
        lambda name: checkpoint.weight(name).f32(), checkpoint.spec, ids, lambda x: x.astype(np.float16).astype(float)
    )
    for layer, pair in enumerate(planes):
        for got, expected in zip(cache.planes(layer, 0, 40), pair, strict=True):
            assert got.dtype == torch.float16
            assert np.abs(got.double().numpy() - expected).max() <= budget("planes_f16_kv")
