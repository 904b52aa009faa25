"""Tiny random checkpoints in the Hugging Face format: what tests and dry runs load instead of a real model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from muser_wire.model.bytelevel import byte_letters
from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import family_of
from muser_wire.model.families.description import TensorEntry
from muser_wire.model.families.tensors import NESTED_PREFIXES
from muser_wire.model.fields import Fields
from muser_wire.model.spec import ModelSpec
from muser_wire.model.tiny_families import CHATML, TINY_FAMILIES, TinyFamily, TinySizes

__all__ = ["CHATML", "SPECIALS", "safetensors_bytes", "write_tiny", "write_tiny_llama"]

SPECIALS = TINY_FAMILIES["llama"].specials
CONTROL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
# Logits of the special tokens are this much smaller than the others, so that greedy text does not end by chance.
SPECIAL_SCALE = 0.01
NORM_SPREAD = 0.1


def write_tiny_llama(out: Path, **arguments: Any) -> None:
    """Write a random llama checkpoint: `write_tiny` of that family."""
    write_tiny("llama", out, **arguments)


def write_tiny(
    family: str,
    out: Path,
    *,
    layers: int = 6,
    hidden: int = 64,
    ffn: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 512,
    max_positions: int = 2048,
    window: int = 64,
    seed: int = 0,
    tied: bool | None = None,
    dtype: str = "F32",
) -> None:
    """Write a random checkpoint into the folder `out`: config, weights, tokenizer, chat template.

    `family` is a key of `TINY_FAMILIES`. `dtype` is how the weights are stored: F32, F16 or BF16.
    Equal arguments give equal bytes. Logits have about unit spread. The tokenizer is a byte-level BPE
    whose first ids are the family's control tokens.

    Raises:
        ValueError: the family or `dtype` is unknown, or the vocabulary too small or too large.
    """
    if family not in TINY_FAMILIES:
        raise ValueError(f"family {family} is not one of {', '.join(TINY_FAMILIES)}")
    tiny = TINY_FAMILIES[family]
    sizes = TinySizes(layers, hidden, ffn, heads, kv_heads, head_dim, vocab, max_positions, window)
    ends = [tiny.specials.index(end) for end in tiny.ends]
    shared = {
        "bos_token_id": tiny.specials.index(tiny.bos),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "tie_word_embeddings": tiny.tied if tied is None else tied,
    }
    config = {"architectures": [tiny.architecture], **shared, **tiny.config(sizes)}
    if "text_config" in config:
        config["text_config"].update(shared)
    tensors = _tensors(tiny, config, np.random.default_rng(seed))
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "tokenizer.json", _tokenizer(tiny.specials, vocab))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(tiny))
    _write_json(out / "config.json", config)
    (out / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))


def _tokenizer_config(tiny: TinyFamily) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tiny.adds_bos,
        "bos_token": tiny.bos,
        "eos_token": tiny.ends[0],
        "chat_template": tiny.template,
    }


def _tensors(tiny: TinyFamily, config: dict[str, Any], rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Return random weights under their names in a folder: first those outside the layers."""
    container = Container(Path("config.json"), ContainerKind.SAFETENSORS, Fields(Path("config.json"), config), {})
    family = family_of(container)
    spec = family.spec(container)
    # A head is drawn even where the embedding serves as one, so that the layers' weights do not depend on it.
    entries = family.entries(replace(spec, tied_embeddings=False), container)
    outer_first = sorted(entries, key=lambda entry: entry.name.startswith("layers."))
    values = {_source(entry, config): _values(rng, entry, spec, tiny) for entry in outer_first}
    if spec.tied_embeddings:
        del values["lm_head.weight"]
    return values


def _source(entry: TensorEntry, config: dict[str, Any]) -> str:
    """Return the name in a folder; a config that nests the decoder's fields has its tensors below a prefix."""
    if "text_config" in config and entry.source.startswith("model."):
        return NESTED_PREFIXES[0] + entry.source.removeprefix("model.")
    return entry.source


def _values(rng: np.random.Generator, entry: TensorEntry, spec: ModelSpec, tiny: TinyFamily) -> npt.NDArray[np.float32]:
    """Return random float32 weights that keep activations near unit scale."""
    noise = rng.standard_normal(entry.shape, dtype=np.float32)
    if entry.name == "final_norm.weight" and spec.tied_embeddings:
        # A token's own row would stand out in the logits that its row began, and greedy text repeat it.
        return noise - np.float32(entry.centred)
    if len(entry.shape) == 1:
        mean = tiny.norm_weight if "_norm" in entry.name and ".attn." in entry.name else 1.0
        return np.float32(mean - entry.centred) + np.float32(NORM_SPREAD) * noise
    scale = entry.shape[-1] ** -0.5
    if spec.qk_norm is None and entry.name.endswith((".attn.q.weight", ".attn.k.weight")):
        scale *= tiny.score_spread**0.5
    if entry.name == "head.weight":
        scale /= spec.logit_scale
    if not entry.name.startswith("layers."):
        noise[: len(tiny.specials)] *= np.float32(SPECIAL_SCALE)
    return np.float32(scale) * noise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def safetensors_bytes(tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]], dtype: str) -> bytes:
    """Return float32 tensors as the bytes of a safetensors file that stores them as F32, F16 or BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    for name, values in tensors.items():
        data = _stored(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data section starts on a multiple of 8, so that readers can map it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _stored(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    """Return little-endian bytes of `values`, rounded to nearest even where `dtype` is narrower."""
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4")
        # Adding half a unit, less one for an even last bit, makes the truncation below round to nearest even.
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype("<u2").tobytes()
    raise ValueError(f"dtype {dtype} is not one of F32, F16, BF16")


def _tokenizer(specials: tuple[str, ...], vocab_size: int) -> dict[str, Any]:
    """Return tokenizer.json of a byte-level BPE: specials, the 256 bytes, then merged pairs of letters."""
    letters = "\u0120etaoinshrdlucmfwypvbgkjqxz"
    base = [*specials, *byte_letters()]
    merges = [list(pair) for pair in islice(product(letters, repeat=2), max(0, vocab_size - len(base)))]
    if len(base) + len(merges) != vocab_size:
        raise ValueError(
            f"a tiny vocabulary has {len(base)} to {len(base) + len(letters) ** 2} tokens, not {vocab_size}"
        )
    tokens = [*base, *("".join(pair) for pair in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": spelling, **CONTROL} for i, spelling in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
