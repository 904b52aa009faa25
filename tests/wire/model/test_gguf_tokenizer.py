"""A folder's tokenizer in a GGUF file: the rules are found by trying, and other kinds refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from muser_wire.errors import CheckpointError
from muser_wire.model.gguf_tokenizer import FolderTokenizer
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.model.tokenizer_gguf import RULES


def altered(folder: Path, tmp_path: Path, change: Any) -> Path:
    copy = tmp_path / "folder"
    shutil.copytree(folder, copy)
    content = json.loads((copy / "tokenizer.json").read_text())
    change(content)
    (copy / "tokenizer.json").write_text(json.dumps(content))
    return copy


@pytest.mark.parametrize("rules", sorted(RULES))
def test_the_rules_are_found_whatever_they_are(tiny_llama: Path, tmp_path: Path, rules: str) -> None:
    def change(content: dict[str, Any]) -> None:
        content["pre_tokenizer"], content["normalizer"] = RULES[rules].pre_tokenizer, RULES[rules].normalizer
        content["model"]["ignore_merges"] = RULES[rules].ignore_merges

    folder = altered(tiny_llama, tmp_path, change)
    writer = GGUFWriter(tmp_path / "out.gguf", "llama")
    FolderTokenizer(folder, 512).add_to(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert load_tokenizer(tmp_path / "out.gguf").digest() == load_tokenizer(folder).digest()


def test_other_rules_are_refused_with_another_way(tiny_llama: Path, tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["normalizer"] = {"type": "Lowercase"}

    folder = altered(tiny_llama, tmp_path, change)
    with pytest.raises(CheckpointError, match=r"cuts text by none of the rules .*convert_hf_to_gguf\.py"):
        FolderTokenizer(folder, 512)


def test_another_kind_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["decoder"] = {"type": "ByteFallback"}
        content["model"]["vocab"].update({f"<0x{i:02X}>": 1000 + i for i in range(256)})

    folder = altered(tiny_llama, tmp_path, change)
    with pytest.raises(CheckpointError, match="is no byte-level BPE"):
        FolderTokenizer(folder, 512)


def test_a_token_beyond_the_model_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(CheckpointError, match="has token 100, the model 100"):
        FolderTokenizer(tiny_llama, 100)
