"""The tokenizer in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers

from muser_wire.errors import CheckpointError
from muser_wire.model.fields import Fields
from muser_wire.model.gguf import read_gguf_fields
from muser_wire.model.vocabulary import Vocabulary, build_backend, piece_table


class TokenType(IntEnum):
    """What a GGUF file says about each token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Rules:
    """What `tokenizer.ggml.pre` stands for: how text is cut into words, and the defaults that go with it."""

    pre_tokenizer: Mapping[str, Any]
    ignore_merges: bool = False
    adds_bos: bool = False


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


# How Llama 3's tokenizer.json cuts words.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

RULES = {
    "gpt-2": _Rules(_byte_level(use_regex=True)),
    "smollm": _Rules(_sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))),
    "llama-bpe": _Rules(
        _sequence(
            {"type": "Split", "pattern": {"Regex": _LLAMA3_WORDS}, "behavior": "Isolated", "invert": False},
            _byte_level(use_regex=False),
        ),
        ignore_merges=True,
        adds_bos=True,
    ),
}


def read_gguf(path: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """Return the tokenizer of a GGUF file.

    Raises:
        CheckpointError: it has none, or one of a kind that is not known here.
    """
    fields = read_gguf_fields(path)
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise fields.refusal("tokenizer.ggml.model", f"is {model!r}, which is not known here (known: gpt2)")
    pre = fields.text("tokenizer.ggml.pre")
    if pre not in RULES:
        raise fields.refusal("tokenizer.ggml.pre", f"is {pre!r}, which is not known here (known: {', '.join(RULES)})")
    rules = RULES[pre]
    groups = _groups(fields)
    plain = groups[TokenType.USER_DEFINED]
    bpe = {
        "vocab": {**groups[TokenType.NORMAL], **plain},
        "merges": _merges(fields),
        "ignore_merges": rules.ignore_merges,
    }
    added = [{"id": i, "content": spelling, **_PLAIN} for spelling, i in plain.items()]
    backend = build_backend(path, bpe, pre_tokenizer=rules.pre_tokenizer, added_tokens=added)
    return backend, _vocabulary(fields, groups, rules)


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def _groups(fields: Fields) -> dict[TokenType, dict[str, int]]:
    """Return the ids by spelling, for each type of token."""
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise fields.refusal("tokenizer.ggml.token_type", f"does not give a type for each of {len(tokens)} tokens")
    groups: dict[TokenType, dict[str, int]] = {kind: {} for kind in TokenType}
    for i, (spelling, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in groups:
            raise fields.refusal("tokenizer.ggml.token_type", f"gives token {i} the unknown type {fields.shown(kind)}")
        if spelling in groups[kind]:
            raise fields.refusal("tokenizer.ggml.tokens", f"has {spelling!r} twice")
        groups[kind][spelling] = i
    if groups[TokenType.BYTE]:
        raise fields.refusal("tokenizer.ggml.token_type", "has byte tokens, which byte-level BPE does not use")
    return groups


def _vocabulary(fields: Fields, groups: Mapping[TokenType, dict[str, int]], rules: _Rules) -> Vocabulary:
    specials = {**groups[TokenType.CONTROL], **groups[TokenType.UNKNOWN]}
    # Unused entries are left out: they fill the vocabulary up to a round size and stand for nothing.
    pieces = piece_table(fields.path, groups[TokenType.NORMAL], groups[TokenType.USER_DEFINED], specials)
    ends = {fields.token_id("tokenizer.ggml.eos_token_id"), fields.token_id("tokenizer.ggml.eot_token_id")}
    template = fields.get("tokenizer.chat_template")
    return Vocabulary(
        pieces=pieces,
        special_ids=specials,
        bos_id=fields.token_id("tokenizer.ggml.bos_token_id"),
        adds_bos=fields.flag("tokenizer.ggml.add_bos_token", default=rules.adds_bos),
        eos_ids=frozenset(i for i in ends if i is not None),
        chat_template=template if isinstance(template, str) else None,
    )


def _merges(fields: Fields) -> list[list[str]]:
    """Return the merges as pairs. A file writes each as two spellings with a space between."""
    merges = [merge.split(" ") for merge in _texts(fields, "tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2:
            raise fields.refusal("tokenizer.ggml.merges", f"has {' '.join(merge)!r}, which is not a pair")
    return merges


def _texts(fields: Fields, name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{fields.path}: {name} is missing or not a list of texts")
    return value
