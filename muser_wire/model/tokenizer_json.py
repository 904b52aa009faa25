"""The tokenizer in a Hugging Face folder: tokenizer.json and the small files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from muser_wire.errors import CheckpointError
from muser_wire.model.jsonfile import read_bounded, read_object
from muser_wire.model.sentencepieces import BYTES
from muser_wire.model.vocabulary import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    Spelling,
    Vocabulary,
    build_backend,
    piece_table,
)

MAX_TEMPLATE_NBYTES = 1 << 20


def read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """Return the tokenizer of a Hugging Face folder.

    Raises:
        CheckpointError: it has none, or one of a kind that is not known here.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json: fetch the tokenizer files too")
    content = read_object(path)
    model = content.get("model")
    spelling = _spelling_of(content.get("decoder"))
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or spelling is None:
        raise CheckpointError(f"{path}: neither a byte-level BPE nor one with byte fallback; others are not known here")
    added = list(_added_tokens(path, content))
    specials = {token["content"]: token["id"] for token in added if token.get("special")}
    plain = {token["content"]: token["id"] for token in added if not token.get("special")}
    vocab = _ids(path, "model.vocab", model.get("vocab"))
    normal = {spelling: i for spelling, i in vocab.items() if spelling not in specials and spelling not in plain}
    if spelling is SENTENCEPIECE and not all(byte in vocab for byte in BYTES):
        raise CheckpointError(f"{path}: a token for each byte is missing, so some text would be unknown")
    pieces = piece_table(path, spelling, normal, plain, specials)
    backend = build_backend(
        path,
        # An added token keeps its id only when the model's vocabulary has it. Dropout is for training, and a
        # token for unknown text would be a control token that text can become.
        {**model, "vocab": {**normal, **plain}, "dropout": None, "unk_token": None},
        normalizer=content.get("normalizer"),
        pre_tokenizer=content.get("pre_tokenizer"),
        added_tokens=[token for token in added if not token.get("special")],
    )
    return backend, _vocabulary(folder, content, pieces, specials)


def _spelling_of(decoder: object) -> Spelling | None:
    """Return how the vocabulary spells bytes, as the decoder's steps tell; None when they do not."""
    steps = set(_step_types(decoder))
    if "ByteLevel" in steps:
        return BYTE_LEVEL
    return SENTENCEPIECE if "ByteFallback" in steps else None


def _step_types(decoder: object) -> Iterator[object]:
    if isinstance(decoder, dict):
        yield decoder.get("type")
        for step in _list(decoder.get("decoders")):
            yield from _step_types(step)


def _added_tokens(path: Path, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    tokens = content.get("added_tokens") or []
    if not isinstance(tokens, list):
        raise CheckpointError(f"{path}: added_tokens is not a list")
    for token in tokens:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or type(token.get("id")) is not int:
            raise CheckpointError(f"{path}: added_tokens has an entry without content and id")
        yield token


def _ids(path: Path, name: str, value: object) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(i) is int for i in value.values()):
        raise CheckpointError(f"{path}: {name} is missing or does not give ids")
    return value


def _vocabulary(
    folder: Path, content: dict[str, Any], pieces: tuple[bytes, ...], specials: dict[str, int]
) -> Vocabulary:
    config = _optional(folder / "tokenizer_config.json")
    bos = _spelling(config.get("bos_token"))
    eos = _spelling(config.get("eos_token"))
    ends = {specials[eos]} if eos in specials else set()
    for name in ("config.json", "generation_config.json"):
        ends.update(_end_ids(folder / name))
    return Vocabulary(
        pieces=pieces,
        special_ids=specials,
        bos_id=specials.get(bos) if bos is not None else None,
        adds_bos=_adds_bos(config, content.get("post_processor"), bos),
        eos_ids=frozenset(ends),
        chat_template=_chat_template(folder, config),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _spelling(token: object) -> str | None:
    """Return the spelling of a token that a config names as text or as an object."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _end_ids(path: Path) -> set[int]:
    """Return the ids that a config says end a generation: none, one or a list."""
    value = _optional(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; expected token ids")
    return set(ids)


def _adds_bos(config: dict[str, Any], post_processor: object, bos: str | None) -> bool:
    """Tell whether text begins with `bos`: as the config says, else as the post-processor would do."""
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    return bos is not None and bos in _leading_tokens(post_processor)


def _leading_tokens(post_processor: object) -> Iterator[str]:
    """Yield the control tokens that a post-processor's templates put before a text."""
    if not isinstance(post_processor, dict):
        return
    for step in _list(post_processor.get("processors")):
        yield from _leading_tokens(step)
    first = next(iter(_list(post_processor.get("single"))), None)
    if isinstance(first, dict) and isinstance(first.get("SpecialToken"), dict):
        yield str(first["SpecialToken"].get("id"))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the template from its own file, else from the config: one text, or the default of a list."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_bounded(path, MAX_TEMPLATE_NBYTES).decode("utf-8", errors="replace")
    template = config.get("chat_template")
    for entry in _list(template):
        if isinstance(entry, dict) and entry.get("name") == "default":
            template = entry.get("template")
    return template if isinstance(template, str) else None
