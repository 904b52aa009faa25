from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from load_peak import fetched, linux_only, measure

from muser_prefill import loading
from muser_prefill.loading import Loader
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.spec import QKNorm

CPU = torch.device("cpu")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 3 rows of 64 columns: matrices of these tests take many, and end inside one."""
    monkeypatch.setattr(loading, "BLOCK_NBYTES", 3 * 64 * 4)


@pytest.mark.usefixtures("small_blocks")
def test_a_matrix_is_read_in_blocks_and_stacked_in_order(make_model: Callable) -> None:
    checkpoint = make_model()
    tensors = checkpoint.tensors
    got = Loader(checkpoint, torch.float32, CPU).qkv(1, queries=True).numpy()
    norm = tensors["layers.1.attn_norm.weight"]
    q, k, v = (tensors[f"layers.1.attn.{name}.weight"] * norm for name in "qkv")
    np.testing.assert_allclose(got, np.concatenate([q * 0.25, k, v]), rtol=1e-6)


@pytest.mark.usefixtures("small_blocks")
def test_the_embedding_is_scaled_and_normalised_before_it_is_rounded(make_model: Callable) -> None:
    checkpoint = make_model(embedding_scale=3.0, embedding_norm=True)
    rows = checkpoint.tensors["embed.weight"].astype(np.float64) * 3.0
    rows /= np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + 1e-5)
    got = Loader(checkpoint, torch.bfloat16, CPU).embedding()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.from_numpy(rows).float().bfloat16())


@pytest.mark.usefixtures("small_blocks")
def test_the_head_holds_final_norm_and_scale(make_model: Callable) -> None:
    checkpoint = make_model(tied_embeddings=False, logit_scale=0.5)
    got = Loader(checkpoint, torch.float32, CPU).head().numpy()
    expected = checkpoint.tensors["head.weight"] * checkpoint.tensors["final_norm.weight"] * 0.5
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_norm_of_queries_carries_the_softmax_scale(make_model: Callable) -> None:
    """Four heads of queries, two of keys; the matrix below them is left alone, for the norm would undo a factor."""
    checkpoint = make_model(qk_norm=QKNorm(weighted=False, eps=0.0), attention_scale=0.4)
    loader = Loader(checkpoint, torch.float32, CPU)
    ones = torch.ones(1, 6, 16)
    norm = loader.head_norm(0, queries=True)
    assert norm is not None
    assert norm(ones)[0, :, 0].tolist() == pytest.approx([0.4] * 4 + [1.0] * 2)
    expected = checkpoint.tensors["layers.0.attn.q.weight"] * checkpoint.tensors["layers.0.attn_norm.weight"]
    np.testing.assert_allclose(loader.qkv(0, queries=True)[:64].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("pinned_nbytes", [64 * 131 * 4, 100])
def test_a_block_goes_through_pinned_memory_where_there_is_some(pinned_nbytes: int, make_model: Callable) -> None:
    """Any memory will do here. A block that does not fit goes straight."""
    checkpoint = make_model()
    loader = Loader(checkpoint, torch.bfloat16, CPU)
    expected = loader.embedding()
    loader._pinned = torch.full((pinned_nbytes,), 255, dtype=torch.uint8)
    assert torch.equal(loader.embedding(), expected)


LOAD = """
import torch
from muser_prefill.decoder import TorchDecoder
from muser_wire.geometry import ElementType

def load(checkpoint):
    return TorchDecoder(checkpoint, dtype=torch.bfloat16, kv_element=ElementType.BF16, device=torch.device("cpu"))
"""


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_loading_peaks_near_what_remains(name: str, tiny_llama: Path) -> None:
    path = fetched(name)
    found = measure(LOAD, path, tiny_llama)
    weights = 2 * parameters(open_checkpoint(path))
    assert found.remains >= 0.95 * weights
    assert found.peak <= 1.3 * weights


def parameters(checkpoint: Checkpoint) -> int:
    """How many numbers the producer needs: nothing after the last layer's keys and values."""
    last = f"layers.{len(checkpoint.spec.layers) - 1}."
    after = (f"{last}attn.q", f"{last}attn.o", f"{last}mlp", "final_norm", "head")
    return sum(checkpoint.weight(name).count for name in checkpoint.names() if not name.startswith(after))
