from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from read_deltas import together
from token_masks import allowed

from muser_decode.engine.request import TokenConstraint
from muser_decode.formats.channels import ChannelParser
from muser_decode.formats.conversation import Call, Reasoning, Tool
from muser_decode.formats.invoked_grammar import NotSayable, body_grammar, forced_grammar
from muser_decode.formats.muse import Muse
from muser_decode.grammar import GrammarConstraint, GrammarFailed, Grammars, InCalls, Listener, lark_grammar
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "kind": {"enum": ["a", "b c", 'say "x"', "é"]},
        "note": {"type": "string", "minLength": 1, "maxLength": 8},
        "count": {"anyOf": [{"$ref": "#/$defs/small"}, {"type": "null"}]},
        "path": {"type": "array", "items": {"$ref": "#/$defs/small"}, "maxItems": 3},
        "mixed": {"type": ["boolean", "null"]},
    },
    "required": ["sure", "note"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 20}},
}
TOOLS = [Tool("f", "", SCHEMA, strict=True), Tool("g", "", {"type": "object", "additionalProperties": False})]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("models") / "muse"
    write_tiny("muse_glimmer", path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, Muse().stop_ids(tokenizer.special_ids, tokenizer.eos_ids))


def wander(constraint: TokenConstraint, tokenizer: Tokenizer, seed: int, tools: list[Tool]) -> list[Any]:
    """What a random answer is read as that the constraint allows; it says to itself what it likes, but not for ever."""
    choose, spelled = random.Random(seed), {token: text for text, token in tokenizer.special_ids.items()}
    stops = Muse().stop_ids(tokenizer.special_ids, tokenizer.eos_ids)
    listener, deltas = Listener(ChannelParser(tools), tokenizer), []
    for _ in range(600):
        may = allowed(constraint)
        ends = [token for token in may if token in spelled]
        token = choose.choice(ends if ends and choose.random() < 0.2 else may)
        constraint.accept(token)
        if token in stops:
            return together([*deltas, *listener.parser.finish()])
        if token in spelled:
            deltas += listener.parser.control(spelled[token])
        else:
            deltas += listener.parser.feed(listener._decoder.feed(token))
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(12))
def test_every_allowed_answer_calls_a_tool_as_its_schema_says(
    grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    constraint = GrammarConstraint(grammars.matcher(lark_grammar(forced_grammar(TOOLS))))
    *before, call = wander(constraint, tokenizer, seed, TOOLS)
    assert all(isinstance(delta, Reasoning) for delta in before)
    assert isinstance(call, Call)
    assert json.loads(call.text) == call.arguments
    if call.name == "g":
        assert call.arguments == {}
        return
    told = dict(call.arguments)
    assert isinstance(told.pop("sure"), bool)
    assert 1 <= len(told.pop("note")) <= 8  # type: ignore[arg-type]
    assert told.pop("kind", "a") in ("a", "b c", 'say "x"', "é")
    assert told.pop("count", None) in (None, *range(21))
    assert all(one in range(21) for one in told.pop("path", []))  # type: ignore[attr-defined]
    assert told.pop("mixed", None) in (None, True, False)
    assert told == {}


def fits(grammars: Grammars, tokenizer: Tokenizer, grammar: str, *pieces: str) -> bool:
    constraint = GrammarConstraint(grammars.matcher(lark_grammar(grammar)))
    stops = Muse().stop_ids(tokenizer.special_ids, tokenizer.eos_ids)
    for piece in pieces:
        ids = [tokenizer.special_ids[piece]] if piece in tokenizer.special_ids else tokenizer.encode(piece)
        for token in ids:
            try:
                constraint.accept(token)
            except GrammarFailed:
                return False
    return bool(stops & set(allowed(constraint)))


def call(*parameters: str, name: str = "f") -> str:
    inside = "".join(parameters)
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inside}</atem:invoke>\n</atem:function_calls>'


def parameter(name: str, value: str) -> str:
    return f'<atem:parameter name="{name}">{value}</atem:parameter>\n'


SURE, NOTE = parameter("sure", "true"), parameter("note", "x < y")


def test_the_spellings_that_the_format_knows_are_allowed_and_no_others(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = forced_grammar(TOOLS)

    def fit(*pieces: str) -> bool:
        return fits(grammars, tokenizer, grammar, *pieces)

    assert fit(" to=f", "<|message|>", call(SURE, NOTE))
    assert fit(
        " to=self", "<|message|>", "hm\n", "<|eom|>", "<|start|>", "assistant to=f", "<|message|>", call(SURE, NOTE)
    )
    assert not fit(" to=self", "<|message|>", "hm\n", "<|eot|>")
    assert not fit(" to=user")
    assert not fit(" to=f", "<|message|>", call(SURE))
    assert not fit(" to=f", "<|message|>", call(parameter("sure", "maybe"), NOTE))
    assert not fit(" to=f", "<|message|>", call(SURE, parameter("note", "nine char")))
    assert not fit(" to=f", "<|message|>", call(SURE, NOTE, parameter("other", "x")))
    assert not fit(" to=f", "<|message|>", call(SURE, NOTE, name="g"))


def test_a_tool_that_names_no_arguments_takes_any(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = forced_grammar([Tool("f")])
    assert fits(grammars, tokenizer, grammar, " to=f", "<|message|>", call(SURE, parameter("other", "{x}")))
    assert fits(grammars, tokenizer, grammar, " to=f", "<|message|>", call())


def test_strict_tools_are_held_to_their_schemas_and_others_are_not(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = body_grammar([TOOLS[0], Tool("loose", "", SCHEMA)])

    def fit(*pieces: str) -> bool:
        return fits(grammars, tokenizer, grammar, *pieces)

    assert fit(call(SURE, NOTE))
    assert fit(call(SURE, NOTE), "<|eom|>")
    assert not fit(call(SURE))
    assert fit(call(parameter("sure", "maybe"), name="loose"))
    assert not fit("Free text.")


def test_nothing_but_calls_is_held(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(lark_grammar(body_grammar(TOOLS[:1])))
    parser = ChannelParser(TOOLS)
    constraint = InCalls(lambda: GrammarConstraint(matcher.deep_copy()), Listener(parser, tokenizer), tokenizer)
    body = call(SURE, NOTE)
    for piece in (" to=self", "<|message|>", "free", "<|eom|>", "<|start|>", "assistant to=f", "<|message|>"):
        assert constraint.mask() is None
        ids = [tokenizer.special_ids[piece]] if piece in tokenizer.special_ids else tokenizer.encode(piece)
        for token in ids:
            constraint.accept(token)
    for token in tokenizer.encode(body):
        assert token in allowed(constraint)
        constraint.accept(token)
    assert tokenizer.special_ids["<|eom|>"] in allowed(constraint)
    constraint.accept(tokenizer.special_ids["<|eom|>"])
    assert constraint.mask() is None


@pytest.mark.parametrize(
    "one",
    [
        {"type": "string", "pattern": "^a"},
        {"type": "string", "format": "date"},
        {"minLength": 10**6},
        {"type": "string", "minLength": 0.5},
        {"type": "string", "maxLength": True},
        {"not": {"const": "a"}},
        {"allOf": [{"minLength": 1}, {"maxLength": 2}]},
        {"anyOf": [{"$ref": "#/properties/x"}]},
        {"anyOf": [{"type": "string", "title": str(i)} for i in range(2100)]},
    ],
)
def test_what_no_text_can_be_held_to_is_refused_where_it_must_hold(one: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"x": one}}
    for make in (forced_grammar, body_grammar):
        with pytest.raises(NotSayable):
            make([Tool("f", "", schema, strict=True)])
    assert body_grammar([Tool("f", "", schema)])


@pytest.mark.parametrize(
    "more",
    [
        {"patternProperties": {"^a": {"type": "integer"}}},
        {"minProperties": 1},
        {"required": ["a"]},
        {"additionalProperties": {"type": "integer"}},
        {"anyOf": [{"required": ["a"]}]},
    ],
)
def test_arguments_that_no_body_can_be_held_to_are_refused_where_they_must_hold(more: dict[str, Any]) -> None:
    for make in (forced_grammar, body_grammar):
        with pytest.raises(NotSayable):
            make([Tool("f", "", {"type": "object", **more}, strict=True)])
        assert make([Tool("f", "", {"type": "object", **more})])


def test_a_count_may_be_written_as_a_number(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = {"type": "string", "minLength": 1.0, "maxLength": 2.0}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    grammar = forced_grammar([Tool("f", "", schema, strict=True)])
    fit = [fits(grammars, tokenizer, grammar, " to=f", "<|message|>", call(parameter("a", "x" * n))) for n in range(4)]
    assert fit == [False, True, True, False]


def test_values_that_refer_to_a_schema_too_large_for_all_are_not_sayable() -> None:
    """Each brings the whole schema along."""
    many = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/n"}} for i in range(400)}
    schema = {"type": "object", "properties": many, "$defs": {"n": {"enum": ["x" * 100] * 200}}}
    with pytest.raises(NotSayable):
        forced_grammar([Tool("f", "", schema)])
