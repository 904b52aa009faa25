from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateRuntimeError

from muser_decode.shadow import PRIVATE_USE, Shadow, Spellings

NAMES = ["<|im_start|>", "<|im_end|>", "<e>", "<e><f>", "||", "\u2581"]

# Text that is made of spellings, halves of them, private-use characters and white space.
hostile = st.lists(
    st.sampled_from(
        [*NAMES, "<|im", "_end|>", "<", ">", "|", "<e", "><f>", "\ue000", "\ue001", " ", "\n", "text", "<E>"]
    ),
    max_size=8,
).map("".join)


def test_split_finds_the_longest_spelling_and_keeps_the_text_between() -> None:
    spellings = Spellings(NAMES)
    assert list(spellings.split("a<e><f>b<e>")) == [("a", "<e><f>"), ("b", "<e>"), ("", "")]
    assert list(spellings.split("")) == [("", "")]
    assert list(Spellings([]).split("<e>")) == [("<e>", "")]
    assert list(Spellings([""]).split("<e>")) == [("<e>", "")]


@given(hostile)
def test_guarded_text_holds_no_spelling_and_lifts_to_itself(text: str) -> None:
    spellings = Spellings(NAMES)
    shadow = Shadow(spellings, [text])
    guarded = shadow.guard(text)
    assert not any(name in guarded for name in NAMES)
    assert len(guarded) == len(text)
    assert shadow.lift(guarded) == text


@given(hostile, st.sampled_from(NAMES), st.data())
def test_no_template_text_beside_it_completes_a_spelling(text: str, name: str, data: st.DataObject) -> None:
    # What a template writes around the text: a head and a tail of one spelling, cut anywhere.
    before = name[: data.draw(st.integers(0, len(name) - 1))]
    after = name[data.draw(st.integers(1, len(name))) :]
    spellings = Spellings(NAMES)
    shadow = Shadow(spellings, [text])
    for inner in (shadow.guard(text), shadow.guard(text).strip()):
        if not inner:
            # Nothing of the user is between them.
            continue
        own = [spelling for part in (before, after) for _, spelling in spellings.split(part) if spelling]
        found = [spelling for _, spelling in spellings.split(before + inner + after) if spelling]
        assert found == own


@pytest.mark.parametrize("text", ["", "  ", "plain", "a < b", "<think>x</think>", "imagine", "say < |", "the end|> of"])
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert Shadow(Spellings(["<|im_start|>", "<|im_end|>"]), [text]).guard(text) == text


def test_white_space_stays_at_the_edges() -> None:
    shadow = Shadow(Spellings(NAMES), [])
    guarded = shadow.guard(" \n<|im_end|>\t")
    assert guarded.strip() == guarded[2:-1]
    assert shadow.lift(guarded.strip()) == "<|im_end|>"


def test_a_text_that_uses_every_private_character_is_refused_only_when_one_is_needed() -> None:
    everything = "".join(chr(code) for block in PRIVATE_USE for code in block)
    shadow = Shadow(Spellings(NAMES), [everything])
    assert shadow.guard(everything) == everything
    with pytest.raises(TemplateRuntimeError, match="every private-use character"):
        shadow.guard("<|im_end|>")
