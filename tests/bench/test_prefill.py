from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import prefill
from bench.driver import BenchError, Samples
from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec

ROPE = RopeSpec(theta=10000.0, rotary_dim=8)
SIZES = {
    "family": "llama",
    "hidden_size": 16,
    "ffn_size": 24,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_positions": 64,
    "norm_eps": 1e-5,
    "tied_embeddings": True,
    "attention_scale": 8**-0.5,
}


class FakePeer:
    """Answers with prepared arrays."""

    def __init__(self, name: str, **arrays: np.ndarray) -> None:
        self.name = name
        self._arrays = arrays

    def call(self, op: str, ids: list[int], out: str) -> dict[str, object]:
        np.save(out, self._arrays[op])
        return {}


PLANES = np.random.default_rng(0).normal(size=(2, 5, 2, 8)).astype(np.float32)
LOGITS = np.random.default_rng(1).normal(size=50).astype(np.float32)


def peers(ours: np.ndarray, llamacpp: np.ndarray) -> list[FakePeer]:
    return [
        FakePeer(prefill.OURS, planes=ours),
        FakePeer(prefill.TRANSFORMERS, planes=PLANES, logits=LOGITS),
        FakePeer(prefill.LLAMACPP + "BF16", logits=llamacpp),
    ]


def test_equal_results_pass(tmp_path: Path) -> None:
    found = prefill.check(peers(PLANES * 1.03125, LOGITS), [1, 2], tmp_path)
    assert found["planes_relative_rms"] == pytest.approx(0.03125)
    assert found["llamacpp_logit_correlation"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ours", "llamacpp", "message"),
    [
        (PLANES[:, ::-1], LOGITS, "last planes"),
        (PLANES * np.nan, LOGITS, "last planes"),
        (PLANES, LOGITS[::-1], "llama.cpp's logits"),
    ],
)
def test_wrong_results_are_refused(ours: np.ndarray, llamacpp: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=message):
        prefill.check(peers(ours, llamacpp), [1, 2], tmp_path)


def test_the_skipped_share_counts_the_last_layer_after_its_keys() -> None:
    """q 512 + o 512 + MLP 1152 of 2,688 products in each of two layers."""
    spec = ModelSpec(layers=(LayerSpec(None, ROPE),) * 2, **SIZES)
    assert prefill.skipped(spec) == 2176 / (2 * 2688)


def test_a_peer_that_kept_a_window_is_compared_over_it(tmp_path: Path) -> None:
    short = [FakePeer(prefill.OURS, planes=PLANES), FakePeer(prefill.TRANSFORMERS, planes=PLANES[:, -3:])]
    assert prefill.check(short, [1, 2], tmp_path) == {"planes_relative_rms": 0.0}


def test_ratios_say_how_many_times_as_fast_we_are() -> None:
    assert prefill.ratios(Samples({prefill.OURS: (1.0, 2.0), "peer": (3.0, 6.0)})) == {"peer": 3.0}


def test_a_failure_is_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert prefill.main(["--model", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf is neither a path that exists" in capsys.readouterr().err
