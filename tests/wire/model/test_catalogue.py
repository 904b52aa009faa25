from __future__ import annotations

from pathlib import Path

import pytest

from muser_wire.errors import FetchError
from muser_wire.model.catalogue import CATALOGUE, catalogue_spec
from muser_wire.model.checkpoint import open_checkpoint


def test_muse_glimmer_as_published() -> None:
    spec = catalogue_spec("muse-glimmer-30b")
    full = [i for i, layer in enumerate(spec.layers) if layer.window is None]
    assert (len(spec.layers), full) == (52, list(range(3, 52, 4)))
    assert all((layer.rope is None) == (layer.window is None) for layer in spec.layers)
    assert {(layer.window, layer.rope.theta) for layer in spec.layers if layer.rope} == {(2048, 500_000.0)}
    assert (spec.hidden_size, spec.ffn_size, spec.vocab_size) == (6656, 19_968, 202_048)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (32, 2, 128)


def test_the_description_is_that_of_the_real_weights(gemma3_270m: Path, smollm2: Path) -> None:
    assert catalogue_spec("gemma3-270m").digest() == open_checkpoint(gemma3_270m).spec.digest()
    assert catalogue_spec("smollm2").digest() == open_checkpoint(smollm2).spec.digest()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FetchError, match="muse is not one of the described models: " + ", ".join(CATALOGUE)):
        catalogue_spec("muse")
