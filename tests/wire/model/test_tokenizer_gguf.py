"""Ids equal those of the reference, `tokenizers` over tokenizer.json, for each family and both containers.

Vocabularies are learned here from a few texts: which rules cut and merge is what families differ in.
Gemma's and SmolLM2's are the real ones, against ids that transformers and llama.cpp gave.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import GGUFWriter
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from muser_decode.tokenizer import StreamDecoder
from muser_wire.errors import CheckpointError
from muser_wire.model.sentencepieces import BYTES, SPACE, implied_merges
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Rules:
    """A family's tokenizer as its tokenizer.json has it, and what llama.cpp calls it."""

    pre: str
    pattern: str
    specials: tuple[str, ...]
    plain: tuple[str, ...] = ()
    nfc: bool = False
    ignore_merges: bool = False
    bos: str | None = None


FAMILIES = {
    "llama": Rules(
        "llama-bpe",
        LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ignore_merges=True,
        bos="<|begin_of_text|>",
    ),
    "qwen3": Rules(
        "qwen2",
        QWEN2,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>"),
        nfc=True,
    ),
    "muse_glimmer": Rules(
        "llama4",
        O200K,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eom|>", "<|eot|>", "<|start|>", "<|message|>"),
        bos="<|begin_of_text|>",
    ),
}


@dataclass(frozen=True)
class Built:
    """One family's tokenizer in both containers, and the reference."""

    rules: Rules
    folder: Path
    file: Path
    reference: tokenizers.Tokenizer = field(repr=False)

    def ids(self, text: str) -> list[int]:
        return list(self.reference.encode(text, add_special_tokens=False).ids)


def learn(rules: Rules, corpus: list[str]) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.BPE(ignore_merges=rules.ignore_merges))
    if rules.nfc:
        found.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(rules.pattern), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(corpus[::4], trainer)
    found.add_special_tokens(list(rules.specials))
    found.add_tokens(list(rules.plain))
    if rules.bos is not None:
        bos = found.token_to_id(rules.bos)
        found.post_processor = processors.TemplateProcessing(
            single=f"{rules.bos} $A", special_tokens=[(rules.bos, bos)]
        )
    return found


def write_gguf(path: Path, rules: Rules, reference: tokenizers.Tokenizer) -> None:
    content = json.loads(reference.to_str())
    ids = reference.get_vocab(with_added_tokens=True)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rules.pre)
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    kinds = {ids[token]: kind for group, kind in ((rules.specials, 3), (rules.plain, 4)) for token in group}
    writer.add_token_types([kinds.get(i, 1) for i in range(len(ids))])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(ids[rules.specials[1]])
    if rules.bos is not None:
        writer.add_bos_token_id(ids[rules.bos])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture(scope="module", params=FAMILIES)
def built(request: pytest.FixtureRequest, corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Built:
    rules = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = learn(rules, corpus)
    reference.save(str(folder / "tokenizer.json"))
    config = {"bos_token": rules.bos, "eos_token": rules.specials[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_gguf(folder / "model.gguf", rules, reference)
    # As transformers does with split_special_tokens: in a text of a user no control token is found.
    reference.encode_special_tokens = True
    return Built(rules, folder, folder / "model.gguf", reference)


def test_the_corpus_is_large_and_varied(corpus: list[str]) -> None:
    assert len(set(corpus)) >= 2000
    joined = "".join(corpus)
    categories = {unicodedata.category(letter) for letter in set(joined)}
    assert {"Lu", "Ll", "Lt", "Lo", "Mn", "Nd", "No", "Nl", "Cc", "Cf", "So", "Sk", "Zs", "Zl", "Zp"} <= categories
    assert {unicodedata.bidirectional(letter) for letter in set(joined)} >= {"L", "R", "AL", "AN", "EN", "NSM"}


def test_ids_equal_the_reference_in_both_containers(built: Built, corpus: list[str]) -> None:
    folder, file = load_tokenizer(built.folder), load_tokenizer(built.file)
    for text in corpus:
        expected = built.ids(text)
        assert folder.encode(text) == expected, repr(text)
        assert file.encode(text) == expected, repr(text)


def test_no_text_becomes_a_control_token_and_tokens_join_to_the_text(built: Built, corpus: list[str]) -> None:
    tokenizer = load_tokenizer(built.file)
    control = set(tokenizer.special_ids.values())
    assert set(tokenizer.special_ids) == set(built.rules.specials)
    for text in [*corpus, *built.rules.specials, "".join(built.rules.specials)]:
        ids = tokenizer.encode(text)
        assert not control & set(ids)
        expected = unicodedata.normalize("NFC", text) if built.rules.nfc else text
        assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text, token by token: what was given at any moment is a prefix of the whole, with no half characters."""
    decoder, shown, whole = StreamDecoder(tokenizer), "", tokenizer.decode(ids)
    for token in ids:
        shown += decoder.feed(token)
        assert whole.startswith(shown)
    return shown + decoder.finish()


def test_a_stream_gives_the_text_back(built: Built, corpus: list[str]) -> None:
    tokenizer, held = load_tokenizer(built.file), 0
    for text in corpus:
        ids = tokenizer.encode(text)
        assert streamed(tokenizer, ids) == (unicodedata.normalize("NFC", text) if built.rules.nfc else text)
        decoder = StreamDecoder(tokenizer)
        held += "" in [decoder.feed(token) for token in ids]
    assert held > 20, "texts with a token that ends inside a character"


def test_both_containers_are_one_tokenizer(built: Built) -> None:
    folder, file = load_tokenizer(built.folder), load_tokenizer(built.file)
    assert folder.digest() == file.digest()
    assert folder.adds_bos == file.adds_bos == (built.rules.bos is not None)
    assert folder.eos_ids == file.eos_ids == {folder.special_ids[built.rules.specials[1]]}


def test_families_cut_differently(corpus: list[str], tmp_path: Path) -> None:
    """The rules matter: with one vocabulary, each family's rules give other ids for some texts."""
    reference = learn(FAMILIES["llama"], corpus)
    found = []
    for name, rules in FAMILIES.items():
        path = tmp_path / f"{name}.gguf"
        write_gguf(path, Rules(rules.pre, rules.pattern, FAMILIES["llama"].specials), reference)
        tokenizer = load_tokenizer(path)
        found.append([tokenizer.encode(text) for text in corpus])
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


def test_a_pre_tokenizer_that_is_not_known_is_read_from_tokenizer_json(built: Built, tmp_path: Path) -> None:
    rules = Rules("muse-glimmer", built.rules.pattern, built.rules.specials, built.rules.plain, bos=built.rules.bos)
    reference = tokenizers.Tokenizer.from_file(str(built.folder / "tokenizer.json"))
    write_gguf(tmp_path / "model.gguf", rules, reference)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.ggml\.pre is 'muse-glimmer'.* put the model's tokenizer\.json"
    ):
        load_tokenizer(tmp_path / "model.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(built.folder / name, tmp_path)
    assert load_tokenizer(tmp_path / "model.gguf").digest() == load_tokenizer(built.folder).digest()


@pytest.fixture(scope="module")
def gemma(gemma3_270m: Path) -> Tokenizer:
    return load_tokenizer(gemma3_270m)


def digest_of_ids(tokenizer: Tokenizer, corpus: list[str]) -> str:
    """Of each text the count and the ids, little-endian, hashed."""
    h = hashlib.sha256()
    for text in corpus:
        ids = tokenizer.encode(text)
        h.update(np.array([len(ids), *ids], "<u4").tobytes())
    return h.hexdigest()


def test_gemma_s_ids_equal_the_reference(gemma: Tokenizer, corpus: list[str]) -> None:
    # Given by transformers 5.24.
    assert digest_of_ids(gemma, corpus) == "a31727e46dd27ff1269fa93b9313e916b5e942f1f03c731c8ec4138aed27360f"


def test_smollm2_s_ids_equal_the_reference(smollm2: Path, corpus: list[str]) -> None:
    # Given by llama.cpp (llama-cpp-python 0.3.36) with special=False. Our ids of each text were compared with its.
    expected = "039b69c5419a5bd0e5a37e3eb53e2d23a805b0bf11bb76e5ac4f367de3bc9e27"
    assert digest_of_ids(load_tokenizer(smollm2), corpus) == expected


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [9259, 236764, 1902, 236888]),
        ("  two\t\tthree\n\n\nfour", [138, 13498, 255969, 19891, 109, 19025]),
        ("<start_of_turn>user <bos>", [236820, 3041, 236779, 1340, 236779, 887, 236813, 2364, 655, 46757, 236813]),
        ("xxx" + " " * 33 + "y", [41128, 152, 153, 236762]),
        ("\u4f60\u597d\U0001f44d\U0001f3fd\x07", [144626, 240493, 242713, 245]),
    ],
)
def test_some_of_gemma_s_ids(gemma: Tokenizer, text: str, ids: list[int]) -> None:
    assert gemma.encode(text) == ids
    assert gemma.decode(ids) == text


def test_gemma_s_tokens_join_to_the_text_and_none_is_a_control_token(gemma: Tokenizer, corpus: list[str]) -> None:
    control = set(gemma.special_ids.values())
    assert {"<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"} <= set(gemma.special_ids)
    for text in [*corpus, "".join(gemma.special_ids)]:
        ids = gemma.encode(text)
        assert not control & set(ids)
        assert b"".join(map(gemma.token_bytes, ids)) == text.encode()
        assert streamed(gemma, ids) == text
    assert (gemma.bos_id, gemma.adds_bos, gemma.eos_ids, gemma.vocab_size) == (2, True, {1}, 262144)


PIECES = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    *BYTES,
    SPACE * 2,
    SPACE * 3,
    "<b>",
    SPACE,
    *"helo wrd".replace(" ", ""),
    "he",
]
PIECES += ["ll", "hell", "hello", SPACE + "w", "or", SPACE + "wor", "ld", "\u00e9"]


def sentencepiece_folder(folder: Path) -> tokenizers.Tokenizer:
    """A small vocabulary as Gemma's tokenizer.json has it; returns the reference."""
    ids = {piece: i for i, piece in enumerate(PIECES)}
    merges = implied_merges({piece: i for piece, i in ids.items() if not piece.startswith("<")})
    model = models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    reference = tokenizers.Tokenizer(model)
    reference.normalizer = normalizers.Replace(" ", SPACE)
    reference.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    reference.decoder = decoders.Sequence(steps)
    reference.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    reference.add_tokens([tokenizers.AddedToken("<b>", normalized=False)])
    reference.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "add_bos_token": True}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    reference.encode_special_tokens = True
    return reference


def sentencepiece_file(path: Path, **changes: Any) -> Path:
    """The same vocabulary as a converter writes it: runs of spaces as added texts, no merges."""
    kinds = [3, 3, 3, 2, *[6] * 256, 4, 4, 4]
    writer = GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(
        [piece.replace(SPACE, " ") if piece.strip(SPACE) == "" and len(piece) > 1 else piece for piece in PIECES]
    )
    writer.add_token_types(changes.get("types", kinds + [1] * (len(PIECES) - len(kinds))))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_space_prefix(changes.get("prefix", False))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_pieces_with_byte_fallback_equal_the_reference_in_both_containers(tmp_path: Path, corpus: list[str]) -> None:
    reference = sentencepiece_folder(tmp_path)
    folder, file = load_tokenizer(tmp_path), load_tokenizer(sentencepiece_file(tmp_path / "m.gguf"))
    for text in [*corpus, "hello world  hello   <b> <bos>hell\u00e9"]:
        expected = list(reference.encode(text, add_special_tokens=False).ids)
        assert folder.encode(text) == file.encode(text) == expected, repr(text)
        assert folder.decode(expected) == text
    assert folder.digest() == file.digest()
    assert (
        (folder.bos_id, folder.adds_bos, folder.eos_ids) == (file.bos_id, file.adds_bos, file.eos_ids) == (2, True, {1})
    )


def test_a_space_before_the_text_is_added_where_the_file_wants_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "m.gguf", prefix=True))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("world")] == [b" wor", b"ld"]


def test_a_vocabulary_without_some_byte_is_refused(tmp_path: Path) -> None:
    kinds = [3, 3, 3, 2, *[6] * 255, 1, 4, 4, 4]
    path = sentencepiece_file(tmp_path / "m.gguf", types=kinds + [1] * (len(PIECES) - len(kinds)))
    with pytest.raises(CheckpointError, match="has 255 byte tokens; expected one for each byte"):
        load_tokenizer(path)
    sentencepiece_folder(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["<0xZZ>"] = content["model"]["vocab"].pop("<0x41>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="a token for each byte is missing"):
        load_tokenizer(tmp_path)
