"""The tokenizer in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers

from muser_wire.errors import CheckpointError
from muser_wire.model.fields import Fields
from muser_wire.model.gguf import read_gguf_fields
from muser_wire.model.sentencepieces import BYTES, SPACE, implied_merges, normalizer
from muser_wire.model.vocabulary import BYTE_LEVEL, SENTENCEPIECE, Vocabulary, build_backend, piece_table


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
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    """Return the rule of vocabularies that cut words by one pattern."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _sequence(split, _byte_level(use_regex=False))


# How each model's tokenizer.json cuts words. `?i:` and its list are English contractions.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# Words end where the case rises: capitals then small letters, or capitals alone.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _SPACES,
    )
)

RULES = {
    "gpt-2": _Rules(_byte_level(use_regex=True)),
    "smollm": _Rules(_sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))),
    "llama-bpe": _Rules(_split(_LLAMA3), ignore_merges=True, adds_bos=True),
    "qwen2": _Rules(_split(_QWEN2), normalizer={"type": "NFC"}),
    "gpt-4o": _Rules(_split(_O200K)),
    "llama4": _Rules(_split(_O200K), adds_bos=True),
}


def read_gguf(path: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """Return the tokenizer of a GGUF file.

    Raises:
        UnknownTokenizer: it names one of a kind that is not known here.
        CheckpointError: it has none, or a damaged one.
    """
    fields = read_gguf_fields(path)
    model = fields.text("tokenizer.ggml.model")
    if model == "gpt2":
        return _read_byte_level(fields)
    if model == "llama":
        return _read_sentencepiece(fields)
    raise _unknown(fields, "tokenizer.ggml.model", model, ("gpt2", "llama"))


class UnknownTokenizer(CheckpointError):
    """A GGUF file names a kind of tokenizer that is not known here; tokenizer.json would describe it in full."""


def _unknown(fields: Fields, name: str, found: str, known: Iterable[str]) -> UnknownTokenizer:
    return UnknownTokenizer(
        f"{fields.path}: {name} is {found!r}, which is not known here (known: {', '.join(known)}); "
        "put the model's tokenizer.json, tokenizer_config.json and config.json beside the file"
    )


def _read_byte_level(fields: Fields) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    pre = fields.text("tokenizer.ggml.pre")
    if pre not in RULES:
        raise _unknown(fields, "tokenizer.ggml.pre", pre, RULES)
    rules = RULES[pre]
    groups = _groups(fields)
    if groups[TokenType.BYTE]:
        raise fields.refusal("tokenizer.ggml.token_type", "has byte tokens, which byte-level BPE does not use")
    plain = groups[TokenType.USER_DEFINED]
    bpe = {
        "vocab": {**groups[TokenType.NORMAL], **plain},
        "merges": _merges(fields),
        "ignore_merges": rules.ignore_merges,
    }
    parts = {"pre_tokenizer": rules.pre_tokenizer, "normalizer": rules.normalizer, "added_tokens": _added(plain)}
    backend = build_backend(fields.path, bpe, **parts)
    pieces = piece_table(fields.path, BYTE_LEVEL, groups[TokenType.NORMAL], plain, _specials(groups))
    return backend, _vocabulary(fields, pieces, _specials(groups), adds_bos=rules.adds_bos)


def _read_sentencepiece(fields: Fields) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """Return the tokenizer of a file that lists pieces and no merges."""
    groups = _groups(fields)
    bytes_ = groups[TokenType.BYTE]
    if set(bytes_) != set(BYTES):
        raise fields.refusal("tokenizer.ggml.token_type", f"has {len(bytes_)} byte tokens; expected one for each byte")
    # Runs of spaces are listed as added texts, but the model's own tokenizer makes them by merges.
    runs = {spelling for spelling in groups[TokenType.USER_DEFINED] if not spelling.strip(f" {SPACE}")}
    plain = {spelling: i for spelling, i in groups[TokenType.USER_DEFINED].items() if spelling not in runs}
    merged = {
        **groups[TokenType.NORMAL],
        **{spelling.replace(" ", SPACE): groups[TokenType.USER_DEFINED][spelling] for spelling in runs},
    }
    normal = {**merged, **bytes_}
    bpe = {
        "vocab": {**normal, **plain},
        "merges": implied_merges(merged),
        "byte_fallback": True,
        "fuse_unk": True,
    }
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    backend = build_backend(fields.path, bpe, normalizer=normalizer(space_prefix=prefix), added_tokens=_added(plain))
    pieces = piece_table(fields.path, SENTENCEPIECE, normal, plain, _specials(groups))
    return backend, _vocabulary(fields, pieces, _specials(groups), adds_bos=True)


def _added(plain: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"id": i, "content": spelling, **_PLAIN} for spelling, i in plain.items()]


def _specials(groups: Mapping[TokenType, dict[str, int]]) -> dict[str, int]:
    """Return the control tokens. Unused entries are left out: they fill up a round size and stand for nothing."""
    return {**groups[TokenType.CONTROL], **groups[TokenType.UNKNOWN]}


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
    return groups


def _vocabulary(fields: Fields, pieces: tuple[bytes, ...], specials: dict[str, int], *, adds_bos: bool) -> Vocabulary:
    ends = {fields.token_id("tokenizer.ggml.eos_token_id"), fields.token_id("tokenizer.ggml.eot_token_id")}
    template = fields.get("tokenizer.chat_template")
    return Vocabulary(
        pieces=pieces,
        special_ids=specials,
        bos_id=fields.token_id("tokenizer.ggml.bos_token_id"),
        adds_bos=fields.flag("tokenizer.ggml.add_bos_token", default=adds_bos),
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
