"""Random strict tools: whatever a grammar allows is read as a call that follows the tool's schema."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
from read_deltas import together
from token_masks import allowed

from muser_decode.formats.channels import ChannelParser
from muser_decode.formats.chatml_hermes import TAGS, ChatmlHermes
from muser_decode.formats.conversation import Call, Reasoning, Tool
from muser_decode.formats.invoked import InvokedCalls
from muser_decode.formats.invoked_grammar import body_grammar
from muser_decode.formats.muse import Muse
from muser_decode.formats.tagged import TaggedParser
from muser_decode.grammar import GrammarConstraint, GrammarFailed, GrammarRefused, Grammars, Listener, lark_grammar
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muser_decode.formats.base import MessageFormat, Parser

TOOLS = 150
STEPS = 1500
HUGE = re.compile(r"\d[eE]\+?\d{3}")
"""JSON has numbers that are out of every reader's range."""


def value(choose: random.Random, depth: int) -> Any:
    """A random schema of a value, such as schema libraries write them and odder ones."""
    words = ["x", "null", "5", "true", 'say "y"', 5, 5.5, True, None, [1], {"k": 2}]
    shallow: list[Any] = [
        {"type": "string"},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": choose.sample(["string", "null", "integer", "boolean"], 2)},
        {"type": "integer", "minimum": 2, "maximum": 30},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 9},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": choose.sample(words, 3)},
        {"const": choose.choice(words)},
        {"type": "string", "enum": ["5", "x"]},
        {"$ref": "#/$defs/one"},
        {"$ref": "#/$defs/an%20other", "description": "It."},
        {"$ref": "#/properties/first"},
        True,
        {},
    ]
    if depth == 0:
        return choose.choice(shallow)
    below = value(choose, depth - 1)
    others = [value(choose, depth - 1) for _ in range(2)]
    return choose.choice(
        [
            *shallow,
            {"anyOf": others},
            {"anyOf": [*others, {"type": "null"}], "default": None},
            {"allOf": [below], "title": "One"},
            {"type": "integer", "anyOf": [{"maximum": 3}, {"minimum": 8, "maximum": 12}]},
            {"anyOf": others, "minimum": 4},
            {"oneOf": others},
            {"type": ["string", "null", "integer"], "anyOf": others},
            {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
            {"anyOf": [{"enum": [10, 5.5, "y"]}, {"type": "string"}]},
            {"const": 5, "enum": [5, 6]},
            {"type": "array", "items": {"anyOf": others}, "maxItems": 2},
            {"type": "object", "properties": {"z": below}, "additionalProperties": {"type": "boolean"}},
            {"$ref": "#/$defs/one", "maximum": 6},
            {"enum": [1, 20], "minimum": 10},
            {"type": "array", "items": below, "maxItems": 2},
            {"type": "object", "properties": {"z": below}, "required": ["z"], "additionalProperties": False},
        ]
    )


def strict_tool(seed: int) -> Tool:
    choose = random.Random(seed)
    properties = {name: value(choose, 2) for name in ("first", "second", "th ird")}
    schema = {"type": "object", "properties": properties, "required": choose.sample(sorted(properties), 2)}
    definitions = {"one": value(choose, 1), "an other": value(choose, 0)}
    return Tool("f", "", {**schema, "additionalProperties": False, "$defs": definitions}, strict=True)


@pytest.mark.parametrize("family", ["llama", "muse_glimmer"])
def test_what_a_grammar_allows_is_read_as_what_the_schema_allows(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("models") / family
    write_tiny(family, path)
    tokenizer = load_tokenizer(path)
    form: MessageFormat = Muse() if family == "muse_glimmer" else ChatmlHermes()
    stops = form.stop_ids(tokenizer.special_ids, tokenizer.eos_ids)
    grammars = Grammars(tokenizer, stops)
    read = 0
    for seed in range(TOOLS):
        tool = strict_tool(seed)
        arguments = called(form, grammars, tokenizer, stops, tool, seed)
        if arguments is not None:
            assert jsonschema_rs.is_valid(tool.parameters, arguments), (seed, tool.parameters, arguments)
            read += 1
    # The others can be held to no grammar, or a random text did not come to its end.
    assert read > TOOLS // 4


def called(
    form: MessageFormat, grammars: Grammars, tokenizer: Tokenizer, stops: frozenset[int], tool: Tool, seed: int
) -> Mapping[str, object] | None:
    """The arguments of a random call; None where the tool cannot be followed, or the call has no end."""
    trials, source = form.trials(tool), form.forced_call([tool]) if form.trials(tool) is not None else None
    if trials is None or source is None:
        return None
    try:
        for trial in trials:
            grammars.check(trial)
        constraint = GrammarConstraint(grammars.matcher(lark_grammar(source)))
    except GrammarRefused:
        return None
    choose, spelled = random.Random(seed), {token: text for text, token in tokenizer.special_ids.items()}
    parser: Parser = ChannelParser([tool])
    if not isinstance(form, Muse):
        parser = TaggedParser([tool], TAGS, thinks=False, opened=False)
    listener, deltas = Listener(parser, tokenizer), []
    for _ in range(STEPS):
        try:
            may = allowed(constraint)
            ends = [
                token for token in may if token in spelled or tokenizer.token_bytes(token)[:1] in (b"<", b'"', b"}")
            ]
            token = choose.choice(ends if ends and choose.random() < 0.3 else may)
            constraint.accept(token)
        except GrammarFailed:
            # An optional argument whose schema refers to itself and nothing else.
            return None
        if token in stops:
            told = [one for one in together([*deltas, *parser.finish()]) if not isinstance(one, Reasoning)]
            assert len(told) == 1, told
            assert isinstance(told[0], Call), told
            if HUGE.search(told[0].text):
                return None
            assert json.loads(told[0].text) == told[0].arguments, (seed, told[0].text, tool.parameters)
            return told[0].arguments
        if token in spelled and isinstance(form, Muse):
            deltas += parser.control(spelled[token])
        else:
            deltas += parser.feed(listener._decoder.feed(token))
    return None


TEXTS = ("1", "5", "5.5", "7", "10", "null", "true", "x", "", "[1]", '{"k": 2}', "nul", "y", "x" * 5, " 5")


def test_each_text_that_the_third_format_s_grammar_allows_is_read_as_the_schema_says(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("models") / "muse"
    write_tiny("muse_glimmer", path)
    tokenizer = load_tokenizer(path)
    grammars = Grammars(tokenizer, Muse().stop_ids(tokenizer.special_ids, tokenizer.eos_ids))
    read = 0
    for seed in range(2 * TOOLS):
        choose = random.Random(seed)
        definitions = {"one": value(choose, 1), "an other": value(choose, 0)}
        properties = {"first": value(choose, 2)}
        schema = {"type": "object", "properties": properties, "required": ["first"], "$defs": definitions}
        tool = Tool("f", "", schema, strict=True)
        try:
            for trial in Muse().trials(tool) or ["start: nothing"]:
                grammars.check(trial)
        except GrammarRefused:
            continue
        matcher = grammars.matcher(lark_grammar(body_grammar([tool])))
        for text in TEXTS:
            body = f'<atem:invoke name="f"><atem:parameter name="first">{text}</atem:parameter></atem:invoke>'
            whole = f"<atem:function_calls>{body}</atem:function_calls>"
            if not allows(matcher, tokenizer, whole):
                continue
            reader = InvokedCalls([tool])
            (call,) = together([*reader.feed(whole), *reader.end()])
            assert isinstance(call, Call)
            assert jsonschema_rs.is_valid(schema, call.arguments), (seed, text, call.text, schema)
            cut = InvokedCalls([tool])
            assert together([delta for one in whole for delta in cut.feed(one)]) == [call]
            read += 1
    assert read > TOOLS


def allows(matcher: Any, tokenizer: Tokenizer, text: str) -> bool:
    own = matcher.deep_copy()
    return bool(own.try_consume_tokens(tokenizer.encode(text)) == len(tokenizer.encode(text)) and own.is_accepting())
