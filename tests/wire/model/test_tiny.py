from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.tiny import SPECIALS, safetensors_bytes, write_tiny, write_tiny_llama
from muser_wire.model.tiny_families import TINY_FAMILIES
from muser_wire.model.tokenizer import load_tokenizer

Logits = Callable[[Checkpoint, Sequence[int]], np.ndarray]


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


LAYERS = {"llama": 9, "llama3": 9, "mistral": 9, "qwen3": 11, "gemma3": 13, "muse_glimmer": 12}
# Logits of layers=6 at five places and the best token at four, as transformers gives them in float32.
PROMPT = [(7 * i * i + 3 * i + 11) % 500 + 12 for i in range(150)]
PLACES = ((149, 100), (149, 300), (100, 200), (64, 20), (70, 500))
GOLDEN = {
    "llama": ([1.1315, -0.5036, -0.2804, 0.5462, 1.1319], [35, 167, 256, 330]),
    "llama3": ([1.128, 0.6379, -0.082, 0.0503, -0.1792], [35, 83, 351, 83]),
    "mistral": ([-0.3438, -1.4469, -0.4728, -0.7135, 0.9168], [35, 167, 392, 230]),
    "qwen3": ([0.9366, 0.2159, -0.0278, 2.8491, -0.421], [41, 144, 155, 44]),
    "gemma3": ([0.0563, 0.1319, 0.0203, 0.2364, 0.3228], [464, 308, 48, 74]),
    "muse_glimmer": ([-0.3004, 1.0584, 0.8332, 0.2483, -1.1331], [41, 306, 346, 359]),
}


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("layers", [6, 7, 8])
def test_every_family_and_layer_count_opens(tmp_path: Path, family: str, layers: int) -> None:
    write_tiny(family, tmp_path, layers=layers)
    checkpoint = open_checkpoint(tmp_path)
    heads = 0 if checkpoint.spec.tied_embeddings else 1
    assert len(checkpoint.names()) == layers * LAYERS[family] + 2 + heads
    assert checkpoint.asides == {}


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_reference_reads_the_same_model(tmp_path: Path, family: str, logits: Logits) -> None:
    write_tiny(family, tmp_path)
    found = logits(open_checkpoint(tmp_path), PROMPT)
    values, best = GOLDEN[family]
    np.testing.assert_allclose([found[place] for place in PLACES], values, atol=3e-4)
    assert [int(found[i].argmax()) for i in (0, 63, 64, 149)] == best


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_logits_have_unit_scale_and_greedy_text_wanders(tmp_path: Path, family: str, logits: Logits) -> None:
    write_tiny(family, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ids = [7, 91, 300, 12, 45]
    assert 0.7 < logits(checkpoint, ids).std() < 1.5
    for _ in range(40):
        ids.append(int(logits(checkpoint, ids)[-1].argmax()))
    assert len(set(ids[5:])) >= 12
    assert not set(ids[5:]) & set(range(len(TINY_FAMILIES[family].specials)))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_tokenizer_of_each_family_stops_where_its_template_ends_a_turn(tmp_path: Path, family: str) -> None:
    write_tiny(family, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tiny = TINY_FAMILIES[family]
    assert tokenizer.eos_ids == {tiny.specials.index(end) for end in tiny.ends}
    assert tokenizer.bos_id == tiny.specials.index(tiny.bos)
    assert tiny.ends[-1] in (tokenizer.chat_template or "")


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family mamba is not one of llama, "):
        write_tiny("mamba", tmp_path)
