from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import SPECIALS, safetensors_bytes, write_tiny_llama
from muser_wire.model.tokenizer import load_tokenizer


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_equal_arguments_give_equal_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny_llama(tmp_path / name, layers=1, seed=seed)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a")["model.safetensors"] != files(tmp_path / "c")["model.safetensors"]
    assert set(files(tmp_path / "a")) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_the_weights_file_has_the_published_layout(tiny_llama: Path) -> None:
    content = (tiny_llama / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert len(header) == 3 + 9 * 6
    assert header["model.layers.5.self_attn.k_proj.weight"]["shape"] == [2 * 16, 64]
    assert header["model.layers.0.mlp.down_proj.weight"]["shape"] == [64, 96]
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(content) - 8 - length
    assert length % 8 == 0


def test_every_argument_reaches_the_spec(tmp_path: Path) -> None:
    write_tiny_llama(
        tmp_path, layers=2, hidden=32, ffn=64, heads=6, kv_heads=3, head_dim=8, vocab=300, max_positions=77, tied=True
    )
    spec = open_checkpoint(tmp_path).spec
    assert (len(spec.layers), spec.hidden_size, spec.ffn_size) == (2, 32, 64)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (6, 3, 8)
    assert (spec.vocab_size, spec.max_positions, spec.tied_embeddings) == (300, 77, True)
    assert load_tokenizer(tmp_path).vocab_size == 300


@pytest.mark.parametrize(("dtype", "bits"), [("F32", 24), ("F16", 11), ("BF16", 8)])
def test_narrow_dtypes_round_to_nearest(tmp_path: Path, dtype: str, bits: int) -> None:
    write_tiny_llama(tmp_path / "wide", layers=1)
    write_tiny_llama(tmp_path / "narrow", layers=1, dtype=dtype)
    wide = open_checkpoint(tmp_path / "wide").weight("layers.0.mlp.up.weight").f32()
    stored = open_checkpoint(tmp_path / "narrow").weight("layers.0.mlp.up.weight")
    assert stored.encoding == dtype
    difference = np.abs(stored.f32().astype(np.float64) - wide)
    assert np.all(difference <= np.abs(wide) * 2.0**-bits + 2.0**-25)
    assert dtype == "F32" or difference.max() > 0


def test_bfloat16_ties_go_to_the_even_neighbour(tmp_path: Path) -> None:
    # 1 + 2^-8 lies between 1 (even) and 1 + 2^-7 (odd); 1 + 3 * 2^-8 between that and 1 + 2^-6 (even).
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8)], np.float32)
    data = safetensors_bytes({"x": values}, "BF16")
    assert data[-6:] == np.array([0x3F80, 0x3F82, 0xBF80], "<u2").tobytes()


@pytest.mark.parametrize("vocab", [258, 989])
def test_a_vocabulary_that_cannot_be_built_is_refused(tmp_path: Path, vocab: int) -> None:
    with pytest.raises(ValueError, match=f"259 to 988 tokens, not {vocab}"):
        write_tiny_llama(tmp_path, vocab=vocab)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype F8"):
        write_tiny_llama(tmp_path, dtype="F8")


def test_the_tokenizer_has_its_control_tokens_first_and_a_template(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    assert tokenizer.special_ids == {SPECIALS[0]: 0, SPECIALS[1]: 1, SPECIALS[2]: 2}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, {2}, False)
    assert "<|im_start|>" in (tokenizer.chat_template or "")
    assert json.loads((tiny_llama / "config.json").read_text())["eos_token_id"] == 2


def greedy(folder: Path, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Greedy ids after `prompt`, and the spread of the first logits, from the definition in float64."""
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    weights = {name: checkpoint.weight(name).f32().astype(np.float64) for name in checkpoint.names()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + spec.norm_eps) * weights[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        half = spec.head_dim // 2
        angles = np.arange(len(x))[:, None] * spec.layers[0].rope.theta ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate((turned.real, turned.imag), -1)

    def logits(ids: list[int]) -> np.ndarray:
        x = weights["embed.weight"][ids]
        count = len(ids)
        for i in range(len(spec.layers)):
            layer = f"layers.{i}"
            h = norm(x, f"{layer}.attn_norm.weight")
            q, k, v = (
                (h @ weights[f"{layer}.attn.{part}.weight"].T).reshape(count, -1, spec.head_dim) for part in "qkv"
            )
            q, k = rotate(q), rotate(k)
            k, v = (np.repeat(part, spec.heads // spec.kv_heads, 1) for part in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(spec.head_dim)
            scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(count, -1)
            x = x + mixed @ weights[f"{layer}.attn.o.weight"].T
            h = norm(x, f"{layer}.mlp_norm.weight")
            gate = h @ weights[f"{layer}.mlp.gate.weight"].T
            up = h @ weights[f"{layer}.mlp.up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down.weight"].T
        return norm(x[-1], "final_norm.weight") @ weights["head.weight"].T

    spread = float(logits(prompt).std())
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(logits(ids))))
    return ids[len(prompt) :], spread


def test_logits_have_unit_scale_and_greedy_text_wanders(tiny_llama: Path) -> None:
    tokens, spread = greedy(tiny_llama, [7, 91, 300, 12, 45], 40)
    assert 0.7 < spread < 1.5
    assert len(set(tokens)) >= 20
    assert not set(tokens) & {0, 1, 2}
