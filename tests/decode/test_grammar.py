from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
from token_masks import allowed

from muser_decode.engine.request import TokenConstraint
from muser_decode.formats.base import ANY_OBJECT
from muser_decode.formats.chatml_hermes import TAGS
from muser_decode.formats.conversation import Tool
from muser_decode.formats.tagged import TaggedParser, body_grammar, call_grammar, read_call
from muser_decode.grammar import (
    AfterReasoning,
    GrammarConstraint,
    GrammarFailed,
    GrammarRefused,
    Grammars,
    InCalls,
    Listener,
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


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


@pytest.mark.parametrize(
    "schema",
    [
        optional(1000),
        {"anyOf": [optional(25)] * 20},
        {"type": "object", "properties": {"a": {"type": "array", "items": optional(1000)}}},
        {"const": "ä" * 20_000},
        {"enum": ["äx", "ây"]},
    ],
)
def test_large_schemas_are_followed(grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    constraint = GrammarConstraint(grammars.matcher(json_grammar(schema)))
    choose = random.Random(1)
    for _ in range(60):
        token = choose.choice([token for token in allowed(constraint) if token not in tokenizer.eos_ids] or [-1])
        if token < 0:
            break
        constraint.accept(token)


@pytest.mark.parametrize(
    "schema",
    [
        optional(1100),
        {"anyOf": [optional(50)] * 30},
        {"type": "object", "properties": {"a": optional(1100)}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False},
    ],
)
def test_what_is_too_complex_where_every_answer_goes_is_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused, match="too complex"):
        grammars.matcher(json_grammar(schema))


def test_a_matcher_that_was_tried_is_at_its_beginning(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = GrammarConstraint(grammars.matcher(json_grammar({"const": "all of it"})))
    for token in tokenizer.encode('"all of it"'):
        constraint.accept(token)
    assert set(allowed(constraint)) == set(tokenizer.eos_ids)


def test_a_token_that_is_not_allowed_breaks_the_generation(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = GrammarConstraint(grammars.matcher(json_grammar(ANY_OBJECT)))
    with pytest.raises(GrammarFailed):
        constraint.accept(tokenizer.encode("x")[0])
    with pytest.raises(GrammarFailed):
        constraint.mask()


def test_an_answer_that_cannot_go_on_breaks_the_generation_and_does_not_end(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    properties = {"n": {"type": "boolean"}, "a": {"$ref": "#/properties/a"}}
    schema = {"type": "object", "properties": properties, "required": ["n", "a"], "additionalProperties": False}
    constraint = GrammarConstraint(grammars.matcher(json_grammar(schema)))
    for token in tokenizer.encode('{"n": true, "a": '):
        constraint.accept(token)
    with pytest.raises(GrammarFailed, match="NoExtensionBias"):
        constraint.mask()


def test_reasoning_is_free_and_the_answer_is_not(grammars: Grammars, tokenizer: Tokenizer) -> None:
    inner = GrammarConstraint(grammars.matcher(json_grammar(SCHEMA)))
    parser = TaggedParser([], TAGS, thinks=True, opened=True)
    constraint = AfterReasoning(inner, Listener(parser, tokenizer))
    for token in tokenizer.encode("let me see </thi nk> </think"):
        assert constraint.mask() is None
        constraint.accept(token)
    assert constraint.mask() is None
    constraint.accept(tokenizer.encode(">")[0])
    assert {tokenizer.token_bytes(token)[:1] for token in allowed(constraint)} == {b"{"}
    assert set(json.loads(wander(constraint, tokenizer, 1))) == {"n", "of"}


def test_within_a_strict_call_the_schema_holds_and_around_it_nothing_does(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    empty = {"type": "object", "additionalProperties": False}
    tools = [Tool("f", "", SCHEMA, strict=True), Tool("g", "", empty, strict=True)]
    matcher = grammars.matcher(lark_grammar(body_grammar(tools, TAGS)))
    parser = TaggedParser(tools, TAGS, thinks=False, opened=False)
    constraint = InCalls(lambda: GrammarConstraint(matcher.deep_copy()), Listener(parser, tokenizer), tokenizer)
    choose = random.Random(4)
    for _ in range(2):
        assert constraint.mask() is None
        for token in tokenizer.encode("words <tool_call>"):
            assert constraint.mask() is None
            constraint.accept(token)
        ids: list[int] = []
        while constraint.mask() is not None:
            # The end of a generation is no end of a call.
            assert not tokenizer.eos_ids & set(allowed(constraint))
            ids.append(choose.choice(allowed(constraint)))
            constraint.accept(ids[-1])
        call = read_call(tokenizer.decode(ids).removesuffix(TAGS.end), tools)
        assert call is not None, tokenizer.decode(ids)
        if call.name == "f":
            assert set(call.arguments) == {"n", "of"}


def test_what_came_with_the_mark_of_a_call_counts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tools = [Tool("f", "", SCHEMA, strict=True)]
    matcher = grammars.matcher(lark_grammar(body_grammar(tools, TAGS)))

    class OneToken:
        """A vocabulary in which one token begins a call and goes on with its body."""

        special_ids: ClassVar[dict[str, int]] = {}
        encode = staticmethod(tokenizer.encode)

        def token_bytes(self, token_id: int) -> bytes:
            return [b'<tool_call>\n{"na', b"<tool_call>["][token_id]

    def constraint() -> InCalls:
        parser = TaggedParser(tools, TAGS, thinks=False, opened=False)
        odd: Any = OneToken()
        return InCalls(lambda: GrammarConstraint(matcher.deep_copy()), Listener(parser, odd), odd)

    good = constraint()
    good.accept(0)
    assert {tokenizer.token_bytes(token)[:1] for token in allowed(good)} == {b"m"}
    with pytest.raises(GrammarFailed):
        constraint().accept(1)


def test_a_call_or_an_answer_that_follows_the_schema(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tools = [Tool("f", "", {"type": "object", "additionalProperties": False})]
    matcher = grammars.matcher(lark_grammar(call_grammar(tools, TAGS, SCHEMA)))
    texts = [wander(GrammarConstraint(matcher.deep_copy()), tokenizer, seed) for seed in range(12)]
    assert {text[0] for text in texts} == {"<", "{"}
    assert all(set(json.loads(text)) == {"n", "of"} for text in texts if text[0] == "{")


def test_arguments_of_a_tool_that_is_not_strict_are_free(grammars: Grammars, tokenizer: Tokenizer) -> None:
    def fits(text: str, *, strict: bool) -> bool:
        matcher = grammars.matcher(lark_grammar(body_grammar([Tool("f", "", SCHEMA, strict=strict)], TAGS)))
        constraint = GrammarConstraint(matcher)
        for token in tokenizer.encode(text):
            try:
                constraint.accept(token)
            except GrammarFailed:
                return False
        return True

    other = '{"name": "f", "arguments": {"z": 1}}\n</tool_call>'
    assert fits(other, strict=False)
    assert not fits(other, strict=True)
    assert fits('\n{"name": "f", "arguments": {"n": 1, "of": "a"}}\n</tool_call>', strict=True)
