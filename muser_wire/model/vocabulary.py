"""What the two tokenizer readers have in common: the vocabulary, and the BPE they build."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from muser_wire.errors import CheckpointError
from muser_wire.model import bytelevel, sentencepieces

# Four times the largest published vocabulary; a token id beyond it is damage.
MAX_VOCABULARY = 1 << 20


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer is, beside its merge rules. Token ids index `pieces`.

    `pieces` holds the bytes that each token contributes to text: none for control tokens and for
    ids that stand for nothing.
    """

    pieces: tuple[bytes, ...]
    special_ids: dict[str, int]
    bos_id: int | None
    adds_bos: bool
    eos_ids: frozenset[int]
    chat_template: str | None


@dataclass(frozen=True)
class Spelling:
    """How a kind of vocabulary spells bytes: its normal entries, and those that are added as whole texts."""

    normal: Callable[[str], bytes]
    plain: Callable[[str], bytes]


BYTE_LEVEL = Spelling(normal=bytelevel.piece_bytes, plain=str.encode)
SENTENCEPIECE = Spelling(normal=sentencepieces.piece_bytes, plain=sentencepieces.piece_bytes)


def piece_table(
    path: Path,
    spelling: Spelling,
    normal: Mapping[str, int],
    plain: Mapping[str, int],
    specials: Mapping[str, int],
) -> tuple[bytes, ...]:
    """Return the bytes of every id: normal entries, entries added as whole texts, control tokens.

    Ids that nothing maps to stand for no bytes.

    Raises:
        CheckpointError: an id is out of range or has two spellings.
    """
    table: dict[int, bytes] = {}
    for group, to_bytes in ((normal, spelling.normal), (plain, spelling.plain), (specials, lambda _: b"")):
        for token, i in group.items():
            if not 0 <= i < MAX_VOCABULARY or i in table:
                raise CheckpointError(f"{path}: token {token!r} has the id {i}, which is out of range or taken")
            table[i] = to_bytes(token)
    return tuple(table.get(i, b"") for i in range(max(table, default=-1) + 1))


def build_backend(path: Path, model: Mapping[str, Any], **parts: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer that cuts plain text; `model` and `parts` are in the form of tokenizer.json.

    It has no control tokens and adds none, so nothing in a text can become one.

    Raises:
        CheckpointError: the parts contradict each other, such as a merge of unknown tokens.
    """
    description = {"version": "1.0", "model": {**model, "type": "BPE"}, **parts}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(description))
    # The library raises nothing narrower; this seam is the outermost place that knows the file.
    except Exception as error:
        raise CheckpointError(f"{path}: the tokenizer cannot be built: {error}") from error
