"""Text to token ids and back: byte-level BPE, and SentencePiece-like BPE with byte fallback."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers

from muser_wire.errors import CheckpointError
from muser_wire.identities import Digest, digest_of
from muser_wire.model.probe import PROBES
from muser_wire.model.tokenizer_gguf import UnknownTokenizer, read_gguf
from muser_wire.model.tokenizer_json import read_folder
from muser_wire.model.vocabulary import Vocabulary

LABEL = b"muser tokenizer 1"


class Tokenizer:
    """One model's tokenizer. Text never becomes a control token: those exist as ids only.

    `backend` must not know the control tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self._backend = backend
        self._vocabulary = vocabulary

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id. The model's own vocabulary may be padded beyond it."""
        return len(self._vocabulary.pieces)

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text, if the model has one."""
        return self._vocabulary.bos_id

    @property
    def adds_bos(self) -> bool:
        """Whether a plain text is meant to begin with `bos_id`; `encode` does not add it."""
        return self._vocabulary.adds_bos

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a generation."""
        return self._vocabulary.eos_ids

    @property
    def special_ids(self) -> dict[str, int]:
        """The control tokens: id by spelling."""
        return dict(self._vocabulary.special_ids)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template that came with the model."""
        return self._vocabulary.chat_template

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text. The spelling of a control token inside `text` is ordinary text.

        Raises:
            UnicodeEncodeError: `text` holds a lone surrogate, so it has no UTF-8 form.
        """
        # The library calls a lone surrogate a TypeError; Python's own encoder says where it is.
        text.encode()
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token contributes to text: none for control tokens and unknown ids."""
        pieces = self._vocabulary.pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 show as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def digest(self) -> Digest:
        """Return the identity of this tokenizer, the same from whichever file it was read.

        It covers what each id stands for, the control tokens, the ids that end a generation, and the
        ids that a fixed corpus gives; not how the file writes it down.
        """
        vocabulary = self._vocabulary
        specials = sorted((i, spelling) for spelling, i in vocabulary.special_ids.items())
        return digest_of(
            LABEL,
            digest_of(b"pieces", *vocabulary.pieces),
            digest_of(b"specials", *(part for i, spelling in specials for part in (_u32s([i]), spelling.encode()))),
            digest_of(b"eos", _u32s(sorted(vocabulary.eos_ids))),
            digest_of(b"probes", *(_u32s(self.encode(text)) for text in PROBES)),
        )


def _u32s(ids: Iterable[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a GGUF file or a Hugging Face folder.

    A GGUF file only names the rules by which text is cut. Where the name is not known, a tokenizer.json
    in the same folder is read instead.

    Raises:
        CheckpointError: naming the file and what is wrong: no tokenizer, one of an unknown kind, or damage.
    """
    if path.is_dir():
        return Tokenizer(*read_folder(path))
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; `muser model fetch smollm2` fetches a model to start with")
    try:
        return Tokenizer(*read_gguf(path))
    except UnknownTokenizer:
        if not (path.parent / "tokenizer.json").is_file():
            raise
    return Tokenizer(*read_folder(path.parent))
