from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muser_decode.engine.request import TokenConstraint
from muser_decode.formats.chatml_hermes import TAGS
from muser_decode.formats.conversation import Tool
from muser_decode.formats.tagged import TaggedParser, call_grammar, read_call
from muser_decode.grammar import (
    ANY_OBJECT,
    AfterReasoning,
    GrammarConstraint,
    GrammarFailed,
    GrammarRefused,
    Grammars,
    json_grammar,
    lark_grammar,
)
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return load_tokenizer(tiny_llama)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.eos_ids)


def allowed(constraint: TokenConstraint) -> list[int]:
    mask = constraint.mask()
    assert mask is not None
    return [int(i) for i in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))]


def wander(constraint: TokenConstraint, tokenizer: Tokenizer, seed: int, steps: int = 400) -> str:
    """A random text that the constraint allows, up to its end."""
    choose = random.Random(seed)
    ids: list[int] = []
    for _ in range(steps):
        token = choose.choice(allowed(constraint))
        constraint.accept(token)
        if token in tokenizer.eos_ids:
            return tokenizer.decode(ids)
        ids.append(token)
    raise AssertionError(f"no end after {tokenizer.decode(ids)!r}")


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 50}, "of": {"enum": ["a", "b c"]}},
    "required": ["n", "of"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_every_allowed_text_follows_the_schema(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    value = json.loads(wander(GrammarConstraint(grammars.matcher(json_grammar(SCHEMA))), tokenizer, seed))
    assert set(value) == {"n", "of"}
    assert 1 <= value["n"] <= 50
    assert value["of"] in ("a", "b c")


def test_an_object_begins_and_ends_with_braces(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = GrammarConstraint(grammars.matcher(json_grammar(ANY_OBJECT)))
    assert {tokenizer.token_bytes(token)[:1] for token in allowed(constraint)} == {b"{"}


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_is_one_that_is_read_back(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    tools = [Tool("f", "", SCHEMA), Tool("g", "", {"type": "object", "additionalProperties": False})]
    grammar = lark_grammar(call_grammar(tools, TAGS))
    text = wander(GrammarConstraint(grammars.matcher(grammar)), tokenizer, seed)
    call = read_call(text.removeprefix(TAGS.start).removesuffix(TAGS.end), tools)
    assert call is not None
    assert call.name in ("f", "g")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"not": {"type": "object"}},
        {"type": "string", "pattern": "("},
        {"properties": 3},
        {"$ref": "https://example.com/schema.json"},
    ],
)
def test_what_cannot_be_followed_is_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused):
        grammars.matcher(json_grammar(schema))


def test_a_token_that_is_not_allowed_breaks_the_generation(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = GrammarConstraint(grammars.matcher(json_grammar(ANY_OBJECT)))
    with pytest.raises(GrammarFailed):
        constraint.accept(tokenizer.encode("x")[0])
    with pytest.raises(GrammarFailed):
        constraint.mask()


def test_reasoning_is_free_and_the_answer_is_not(grammars: Grammars, tokenizer: Tokenizer) -> None:
    inner = GrammarConstraint(grammars.matcher(json_grammar(SCHEMA)))
    parser = TaggedParser([], TAGS, thinks=True, opened=True)
    constraint = AfterReasoning(inner, parser, tokenizer)
    for token in tokenizer.encode("let me see </thi nk> </think"):
        assert constraint.mask() is None
        constraint.accept(token)
    assert constraint.mask() is None
    constraint.accept(tokenizer.encode(">")[0])
    assert {tokenizer.token_bytes(token)[:1] for token in allowed(constraint)} == {b"{"}
    assert set(json.loads(wander(constraint, tokenizer, 1))) == {"n", "of"}
