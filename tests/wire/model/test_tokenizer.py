from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from muser_wire.errors import CheckpointError
from muser_wire.model.bytelevel import byte_letters, piece_bytes
from muser_wire.model.probe import PROBES
from muser_wire.model.tiny import write_tiny_llama
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer

# SmolLM2's vocabulary has no token for these bytes, so its tokenizer drops the characters they stand for.
ABSENT_IN_SMOLLM2 = dict.fromkeys((0x04, 0x06, 0x13, 0x14, 0x16, 0x1D))


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Tokenizer:
    return load_tokenizer(tiny_llama)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint's folder with one file changed by a function on its JSON value."""

    def changed(file: str, change: Callable[[dict[str, Any]], object]) -> Path:
        write_tiny_llama(tmp_path, layers=1)
        value = json.loads((tmp_path / file).read_text())
        change(value)
        (tmp_path / file).write_text(json.dumps(value))
        return tmp_path

    return changed


def texts(count: int) -> list[str]:
    """Varied texts: words, digits, scripts, emoji, runs of space, control characters."""
    rng = random.Random(7)
    alphabets = [
        "abcdefghijklmnopqrstuvwxyz",
        "ABC XYZ abc xyz  ",
        "0123456789 .,",
        " \t\n\r\u00a0\u3000",
        "'s't're've'm'll'd",
        "!?.,;:-_()[]{}<>|/\\@#$%^&*+=~`\"'",
        "\u00e9\u00e8\u00fc\u00df\u00f1\u0301\u0308",
        "\u0430\u0431\u0432\u03b1\u03b2\u03b3\u05d0\u05d1\u0627\u0628",
        "\u4f60\u597d\u4e16\u754c\u3042\u30a2\ud55c\uae00\u0939\u093f",
        "\U0001f600\U0001f44d\U0001f3fd\u200d\u2764\ufe0f",
        "\x00\x01\x07\x08\x1b\x7f\x85\u2028\ufeff\ufffd",
    ]
    return ["".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 60))) for _ in range(count)]


def test_the_letters_of_bytes_are_distinct_and_printable_bytes_stand_for_themselves() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert letters[ord("A")] == "A"
    assert letters[0x20] == "\u0120"
    assert letters[0x0A] == "\u010a"
    assert not any(letter.isspace() for letter in letters)


def test_a_piece_is_bytes_or_plain_text() -> None:
    assert piece_bytes("\u0120the") == b" the"
    assert piece_bytes("\u00c3\u00a9") == "\u00e9".encode()
    assert piece_bytes("\u4f60") == "\u4f60".encode()


def test_known_ids_of_the_real_vocabulary(real: Tokenizer) -> None:
    # Each digit is a token of its own, and the space before digits is one as well: ids 32 to 41 are "0" to "9".
    assert real.encode("123") == [33, 34, 35]
    assert [real.token_bytes(i) for i in real.encode("a 12")] == [b"a", b" ", b"1", b"2"]
    assert [real.token_bytes(i) for i in real.encode("Hello world")] == [b"Hello", b" world"]
    assert (real.vocab_size, real.bos_id, real.adds_bos, real.eos_ids) == (49152, 1, False, frozenset({2}))
    assert real.special_ids["<|im_start|>"] == 1
    assert len(real.special_ids) == 17
    assert "<|im_start|>" in (real.chat_template or "")


def test_real_tokens_join_to_the_text(real: Tokenizer) -> None:
    for text in [*texts(400), *PROBES]:
        ids = real.encode(text)
        expected = text.translate(ABSENT_IN_SMOLLM2)
        assert b"".join(map(real.token_bytes, ids)) == expected.encode()
        assert real.decode(ids) == expected


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tiny_tokens_join_to_any_text(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert b"".join(map(tiny.token_bytes, ids)) == text.encode()
    assert tiny.decode(ids) == text


@pytest.mark.parametrize("which", ["real", "tiny"])
def test_the_spelling_of_a_control_token_is_ordinary_text(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(which)
    for spelling, i in tokenizer.special_ids.items():
        for text in (spelling, f"a{spelling}b", f" {spelling} {spelling}"):
            ids = tokenizer.encode(text)
            assert not set(ids) & set(tokenizer.special_ids.values())
            assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes(i) == b""


def test_unknown_ids_and_control_tokens_are_no_text(tiny: Tokenizer) -> None:
    assert tiny.token_bytes(-1) == tiny.token_bytes(512) == tiny.token_bytes(10**9) == b""
    assert tiny.decode([1, *tiny.encode("hi"), 2, 99999]) == "hi"


def test_half_a_character_shows_as_a_replacement(tiny: Tokenizer) -> None:
    ids = tiny.encode("\u00e9")
    assert len(ids) == 2
    assert tiny.decode(ids[:1]) == "\ufffd"


def test_a_lone_surrogate_is_python_s_own_error(tiny: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tiny.encode("a\ud800b")


def test_no_text_is_no_token(tiny: Tokenizer) -> None:
    assert tiny.encode("") == []
    assert tiny.decode([]) == ""


def test_the_digest_is_stable_and_differs_between_tokenizers(real: Tokenizer, tiny: Tokenizer, smollm2: Path) -> None:
    assert real.digest() == load_tokenizer(smollm2).digest()
    assert real.digest() != tiny.digest()
    assert len(real.digest()) == 32


def swap(vocab: dict[str, int]) -> None:
    a, b = list(vocab)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def cut_digits(value: dict[str, Any]) -> None:
    steps = [{"type": "Digits", "individual_digits": True}, value["pre_tokenizer"]]
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "two ids swapped": ("tokenizer.json", lambda v: swap(v["model"]["vocab"])),
    "merge order": ("tokenizer.json", lambda v: v["model"]["merges"].reverse()),
    "one more end": ("config.json", lambda v: v.update(eos_token_id=[2, 0])),
    "an ordinary token": ("tokenizer.json", lambda v: v["added_tokens"].pop(0)),
}


@pytest.mark.parametrize(("file", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_meaning_changes_the_digest(
    tiny: Tokenizer, changed: Callable[..., Path], file: str, change: Callable[[dict[str, Any]], object]
) -> None:
    assert load_tokenizer(changed(file, change)).digest() != tiny.digest()


def test_rules_that_give_the_same_ids_give_the_same_digest(tiny: Tokenizer, changed: Callable[..., Path]) -> None:
    # The tiny vocabulary joins no digits, so cutting them apart first changes nothing.
    assert load_tokenizer(changed("tokenizer.json", cut_digits)).digest() == tiny.digest()


def test_rules_that_cut_elsewhere_change_the_digest(tmp_path: Path) -> None:
    digests = {load_tokenizer(gguf_tokenizer(tmp_path / pre, pre=pre)).digest() for pre in ("gpt-2", "smollm")}
    assert len(digests) == 2


def test_a_template_is_not_part_of_the_digest(tiny: Tokenizer, changed: Callable[..., Path]) -> None:
    other = load_tokenizer(changed("tokenizer_config.json", lambda v: v.update(chat_template="x")))
    assert other.chat_template == "x"
    assert other.digest() == tiny.digest()


def test_added_tokens_that_are_text_are_found_in_text(changed: Callable[..., Path]) -> None:
    def add(value: dict[str, Any]) -> None:
        plain = {**value["added_tokens"][0], "id": 512, "content": "<tool>", "special": False}
        value["added_tokens"].append(plain)

    tokenizer = load_tokenizer(changed("tokenizer.json", add))
    ids = tokenizer.encode("a<tool>b")
    assert 512 in ids
    assert tokenizer.decode(ids) == "a<tool>b"
    assert (tokenizer.vocab_size, tokenizer.token_bytes(512)) == (513, b"<tool>")


def test_control_tokens_beyond_the_vocabulary_keep_their_ids(changed: Callable[..., Path]) -> None:
    def add(value: dict[str, Any]) -> None:
        value["added_tokens"] += [
            {**value["added_tokens"][0], "id": 600, "content": "<|late|>"},
            {**value["added_tokens"][0], "id": 601, "content": "<later>", "special": False},
        ]

    tokenizer = load_tokenizer(changed("tokenizer.json", add))
    assert tokenizer.special_ids["<|late|>"] == 600
    assert tokenizer.encode("<later>") == [601]
    assert 600 not in tokenizer.encode("<|late|>")


def test_bos_from_a_post_processor(changed: Callable[..., Path]) -> None:
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}]}
    folder = changed(
        "tokenizer.json", lambda v: v.update(post_processor={"type": "Sequence", "processors": [template]})
    )
    assert not load_tokenizer(folder).adds_bos
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["add_bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).adds_bos
    # The post-processor says that it is meant; it does not act.
    assert 1 not in load_tokenizer(folder).encode("hi")


def test_a_template_of_its_own_file_comes_first(changed: Callable[..., Path]) -> None:
    folder = changed("tokenizer_config.json", lambda v: v)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(folder).chat_template == "{{ messages }}"


def test_the_default_of_several_templates(changed: Callable[..., Path]) -> None:
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    folder = changed("tokenizer_config.json", lambda v: v.update(chat_template=several))
    assert load_tokenizer(folder).chat_template == "b"


def test_ends_are_collected_from_every_file(changed: Callable[..., Path]) -> None:
    folder = changed("config.json", lambda v: v.update(eos_token_id=0))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_tokenizer(folder).eos_ids == {0, 2, 5, 6}


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "model": (
        "tokenizer.json",
        lambda v: v["model"].update(type="Unigram"),
        "neither a byte-level BPE nor one with byte fallback",
    ),
    "decoder": (
        "tokenizer.json",
        lambda v: v.update(decoder={"type": "Metaspace"}),
        "neither a byte-level BPE nor one with byte fallback",
    ),
    "vocab": ("tokenizer.json", lambda v: v["model"].update(vocab=[1]), "model.vocab is missing"),
    "merges": ("tokenizer.json", lambda v: v["model"].update(merges=[["a", "\u00e9\u00e9"]]), "cannot be built"),
    "same id": ("tokenizer.json", lambda v: v["model"]["vocab"].update({"qq": 300}), "has the id 300"),
    "huge id": ("tokenizer.json", lambda v: v["model"]["vocab"].update({"qq": 2**40}), "has the id 1099511627776"),
    "added": ("tokenizer.json", lambda v: v.update(added_tokens=[{"id": 1}]), "entry without content and id"),
    "eos": ("config.json", lambda v: v.update(eos_token_id="two"), "eos_token_id is 'two'"),
}


@pytest.mark.parametrize(("file", "change", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_tokenizer_that_cannot_be_used_is_refused(
    changed: Callable[..., Path], file: str, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_tokenizer(changed(file, change))
    assert file in str(caught.value)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"nothing does not exist"):
        load_tokenizer(tmp_path / "nothing")


def gguf_tokenizer(path: Path, *, model: str = "gpt2", pre: str | None = "gpt-2", **changes: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = [*byte_letters(), "ab", "12", "<|end|>", "<tool>", "[PAD]"]
    writer.add_token_list(changes.get("tokens", tokens))
    writer.add_token_types(changes.get("types", [1] * 258 + [3, 4, 5]))
    writer.add_token_merges(changes.get("merges", ["a b", "1 2"]))
    writer.add_eos_token_id(258)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "pieces", "adds_bos"),
    [
        ("gpt-2", [b"12", b"3", b"4", b" ", b" ", b"ab"], False),
        ("smollm", [b"1", b"2", b"3", b"4", b" ", b" ", b"ab"], False),
        ("llama-bpe", [b"12", b"3", b"4", b" ", b" ", b"ab"], True),
    ],
)
def test_each_known_rule_cuts_its_way(tmp_path: Path, pre: str, pieces: list[bytes], adds_bos: bool) -> None:
    tokenizer = load_tokenizer(gguf_tokenizer(tmp_path / "t.gguf", pre=pre))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("1234  ab")] == pieces
    assert tokenizer.adds_bos is adds_bos


def test_types_of_tokens_in_gguf(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gguf_tokenizer(tmp_path / "t.gguf"))
    assert tokenizer.special_ids == {"<|end|>": 258}
    assert tokenizer.encode("<tool>") == [259]
    assert 258 not in tokenizer.encode("<|end|>")
    # The unused entry at the end stands for nothing.
    assert tokenizer.vocab_size == 260
    assert tokenizer.decode(tokenizer.encode("[PAD]")) == "[PAD]"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, {258}, None)


def test_a_control_token_that_reads_like_a_word_is_ordinary_text(tmp_path: Path) -> None:
    # These rules look a whole word up before they merge, so the vocabulary must not have it.
    tokens = [*byte_letters(), "ab", "12", "end", "<tool>", "[PAD]"]
    tokenizer = load_tokenizer(gguf_tokenizer(tmp_path / "t.gguf", pre="llama-bpe", tokens=tokens))
    assert tokenizer.special_ids == {"end": 258}
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("end")] == [b"e", b"n", b"d"]
    assert tokenizer.encode("ab") == [256]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pre": "muse"}, r"tokenizer\.ggml\.pre is 'muse', which is not known here \(known: gpt-2, smollm.*beside"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model is 't5', which is not known here \(known: gpt2, llama\)"),
        ({"model": "llama"}, r"has 0 byte tokens; expected one for each byte"),
        ({"types": [1] * 260}, "does not give a type for each of 261 tokens"),
        ({"types": [1] * 260 + [9]}, "gives token 260 the unknown type 9"),
        ({"types": [1] * 260 + [6]}, "byte tokens"),
        ({"tokens": ["a"] * 261, "types": [1] * 261}, "has 'a' twice"),
        ({"merges": ["ab"]}, "has 'ab', which is not a pair"),
        ({"merges": ["a zz"]}, "cannot be built"),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = gguf_tokenizer(tmp_path / "t.gguf", **changes)
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
