"""A folder's tokenizer as a GGUF file's metadata."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gguf import GGUFWriter

from muser_wire.errors import CheckpointError
from muser_wire.model.jsonfile import read_object
from muser_wire.model.probe import PROBES
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer
from muser_wire.model.tokenizer_gguf import RULES, TokenType


class FolderTokenizer:
    """The byte-level BPE tokenizer of a folder, ready to be written under one of the rules that GGUF files name.

    Raises:
        CheckpointError: it is of another kind, or no rules cut text as it does.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._path = folder / "tokenizer.json"
        self._tokenizer = load_tokenizer(folder)
        content = read_object(self._path)
        model = content.get("model")
        if not isinstance(model, dict) or "ByteLevel" not in str(content.get("decoder")):
            raise self._refusal("is no byte-level BPE")
        self._merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
        self._tokens, self._types = self._table(model["vocab"], content.get("added_tokens", []), vocab_size)
        self._rules = self._matching_rules()

    def add_to(self, writer: GGUFWriter) -> None:
        """Add the tokenizer's fields. Of its end tokens a file has room for two."""
        self._add(writer, self._rules)

    def _table(
        self, vocab: dict[str, int], added: list[dict[str, object]], vocab_size: int
    ) -> tuple[list[str], list[int]]:
        tokens = [f"[PAD{i}]" for i in range(vocab_size)]
        types = [int(TokenType.UNUSED)] * vocab_size
        kinds = {str(token["content"]): bool(token.get("special")) for token in added}
        for spelling, i in {**vocab, **{str(token["content"]): int(str(token["id"])) for token in added}}.items():
            if not 0 <= i < vocab_size:
                raise self._refusal(f"has token {i}, the model {vocab_size}")
            kind = TokenType.NORMAL
            if spelling in kinds:
                kind = TokenType.CONTROL if kinds[spelling] else TokenType.USER_DEFINED
            tokens[i], types[i] = spelling, int(kind)
        return tokens, types

    def _matching_rules(self) -> str:
        """Return the name of the rules under which a file read back gives the same ids."""
        with tempfile.TemporaryDirectory() as folder:
            for name in RULES:
                path = Path(folder) / f"{name}.gguf"
                writer = GGUFWriter(path, "llama")
                self._add(writer, name)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
                writer.close()
                if self._same(load_tokenizer(path)):
                    return name
        raise self._refusal(f"cuts text by none of the rules {', '.join(RULES)}")

    def _same(self, other: Tokenizer) -> bool:
        mine = self._tokenizer
        ids = range(min(mine.vocab_size, other.vocab_size))
        return (
            all(mine.encode(text) == other.encode(text) for text in PROBES)
            and mine.special_ids == other.special_ids
            and all(mine.token_bytes(i) == other.token_bytes(i) for i in ids)
        )

    def _add(self, writer: GGUFWriter, rules: str) -> None:
        mine = self._tokenizer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rules)
        writer.add_token_list(self._tokens)
        writer.add_token_types(self._types)
        writer.add_token_merges(self._merges)
        writer.add_add_bos_token(mine.adds_bos)
        if mine.bos_id is not None:
            writer.add_bos_token_id(mine.bos_id)
        for add, i in zip((writer.add_eos_token_id, writer.add_eot_token_id), sorted(mine.eos_ids), strict=False):
            add(i)
        if mine.chat_template is not None:
            writer.add_chat_template(mine.chat_template)

    def _refusal(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} {why}, so it cannot be written into a GGUF file here; convert the folder with llama.cpp's "
            "convert_hf_to_gguf.py and quantize what that writes"
        )
