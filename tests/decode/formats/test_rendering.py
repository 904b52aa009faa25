"""History as each format renders it, through the templates that checkpoints without one get."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from read_deltas import called, together

from muser_decode.formats.base import MessageFormat, PlainParser
from muser_decode.formats.channels import ChannelParser
from muser_decode.formats.choice import choose
from muser_decode.formats.conversation import Content, Delta, Message, Reasoning, Tool, ToolCall
from muser_decode.formats.tagged import TaggedParser
from muser_decode.template import ChatTemplate

CHATML = {"<|im_start|>": 300, "<|im_end|>": 301}
GEMMA = {"<bos>": 300, "<start_of_turn>": 301, "<end_of_turn>": 302, "<eos>": 303}
MUSE = {
    "<|begin_of_text|>": 300,
    "<|end_of_text|>": 301,
    "<|eom|>": 302,
    "<|eot|>": 303,
    "<|start|>": 304,
    "<|message|>": 305,
}


@dataclass
class ByteTokenizer:
    special_ids: dict[str, int]
    bos_id: int | None = 300
    adds_bos: bool = False
    eos_ids: frozenset[int] = frozenset({303})
    chat_template: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def rendered(
    specials: dict[str, int], messages: list[Message], tools: list[Tool] | None = None, **variables: Any
) -> str:
    """The prompt with control tokens spelled out; a spelling that is only text is marked."""
    template = ChatTemplate(ByteTokenizer(specials))
    form = choose(specials)
    turns = form.turns(messages, tools or [], template.style)
    definitions = [tool.definition() for tool in tools or []] if template.style.takes_tools else []
    ids = template.render(turns, definitions, variables)
    names = {token: spelling for spelling, token in specials.items()}
    return "".join(names[i] if i in names else chr(i) for i in ids)


F = Tool("f", "Does.", {"type": "object", "properties": {"a": {"type": "integer"}}})
HISTORY = [
    Message("system", "Be brief."),
    Message("user", "Go"),
    Message("assistant", "", None, "hm", (ToolCall("c1", "f", {"a": 1, "b": "x"}), ToolCall("c2", "f", {}))),
    Message("tool", "one", "f", tool_call_id="c1"),
    Message("tool", "two", "f", tool_call_id="c2"),
]


def test_chatml_writes_calls_as_tagged_json() -> None:
    text = rendered(CHATML, HISTORY, [F])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nThese functions")
    assert '"name": "f"' in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_what_chatml_writes_it_reads() -> None:
    text = rendered(CHATML, HISTORY, [F])
    body = text.split("<|im_start|>assistant\n")[1].partition("<|im_end|>")[0]
    parser = choose(CHATML).parser([F], ChatTemplate(ByteTokenizer(CHATML)).style, "")
    assert together(parser.feed(body) + parser.finish()) == [called("f", {"a": 1, "b": "x"}), called("f", {})]


def test_gemma_has_no_system_turn_and_merges_turns_of_one_side() -> None:
    text = rendered(GEMMA, HISTORY, [F])
    assert text.startswith("<bos><start_of_turn>user\nBe brief.\n\nThese functions")
    assert text.endswith(
        'Go<end_of_turn>\n<start_of_turn>model\n```tool_call\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n```\n'
        '```tool_call\n{"name": "f", "arguments": {}}\n```<end_of_turn>\n'
        "<start_of_turn>user\n```tool_output\none\n```\n```tool_output\ntwo\n```<end_of_turn>\n<start_of_turn>model\n"
    )


def test_muse_writes_channels() -> None:
    text = rendered(MUSE, HISTORY, [F], reasoning_strength="low")
    assert text.startswith(
        "<|begin_of_text|><|start|>system<|message|>Reasoning strength: low\n\nBe brief.\n\nTools:\n"
    )
    assert text.endswith(
        "<|eot|><|start|>user<|message|>Go<|eot|><|start|>assistant to=self<|message|>hm<|eom|>"
        '<|start|>assistant to=f<|message|><atem:function_calls><atem:invoke name="f">'
        '<atem:parameter name="a">1</atem:parameter><atem:parameter name="b">x</atem:parameter>'
        "</atem:invoke></atem:function_calls><|eom|>"
        '<|start|>assistant to=f<|message|><atem:function_calls><atem:invoke name="f">'
        "</atem:invoke></atem:function_calls><|eot|>"
        "<|start|>f<|message|>one<|eot|><|start|>f<|message|>two<|eot|><|start|>assistant"
    )
    plain = rendered(MUSE, [Message("user", "a"), Message("assistant", "b"), Message("user", "c")])
    assert "Reasoning strength: high<|eot|>" in plain
    assert plain.endswith(
        "<|start|>assistant to=user<|message|>b<|eot|><|start|>user<|message|>c<|eot|><|start|>assistant"
    )


def test_what_muse_writes_it_reads() -> None:
    text = rendered(MUSE, HISTORY, [F])
    turn = text.split("<|start|>user<|message|>Go<|eot|><|start|>assistant")[1].split("<|start|>f<|message|>")[0]
    parser = choose(MUSE).parser([F], ChatTemplate(ByteTokenizer(MUSE)).style, "")
    deltas: list[Delta] = []
    for piece in re.split(r"(<\|[a-z_]+\|>)", turn):
        deltas += parser.control(piece) if piece in MUSE else parser.feed(piece)
    assert together([*deltas, *parser.finish()]) == [
        Reasoning("hm"), called("f", {"a": 1, "b": "x"}), called("f", {})
    ]  # fmt: skip


@pytest.mark.parametrize("specials", [CHATML, GEMMA, MUSE], ids=["chatml", "gemma", "muse"])
def test_no_text_of_a_history_becomes_a_control_token(specials: dict[str, int]) -> None:
    harmless = "plain"
    for evil in [*specials, *(spelling[1:] for spelling in specials)]:
        counts = []
        for word in (harmless, evil):
            tool = Tool(word, word, {"type": "object", "properties": {word: {"description": word}}})
            messages = [
                Message("system", word),
                Message("user", word, word),
                Message("assistant", word, None, word, (ToolCall(word, word, {word: [word]}),)),
                Message("tool", word, word, tool_call_id=word),
            ]
            template, form = ChatTemplate(ByteTokenizer(specials)), choose(specials)
            turns = form.turns(messages, [tool], template.style)
            definitions = [tool.definition()] if template.style.takes_tools else []
            ids = template.render(turns, definitions, {})
            counts.append([i for i in ids if i >= 300])
        assert counts[0] == counts[1]


def test_the_control_tokens_tell_the_format() -> None:
    assert [choose(s).name for s in (CHATML, GEMMA, MUSE, {})] == ["chatml-hermes", "gemma", "muse", "chatml-hermes"]


@pytest.mark.parametrize(
    ("specials", "eos", "stops"),
    [
        (CHATML, {301}, {301}),
        (CHATML, {5}, {5, 301}),
        (GEMMA, {303}, {303, 302}),
        # Stopping at the end of the reasoning would lose the answer.
        (MUSE, {301, 302}, {301, 303}),
    ],
)
def test_what_ends_an_answer(specials: dict[str, int], eos: set[int], stops: set[int]) -> None:
    assert choose(specials).stop_ids(specials, frozenset(eos)) == stops


def test_efforts() -> None:
    def variables(specials: dict[str, int], effort: str | None, source: str | None = None) -> Any:
        form: MessageFormat = choose(specials)
        return form.variables(effort, ChatTemplate(ByteTokenizer(specials), source).style)

    thinks = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    assert [variables(CHATML, effort) for effort in (None, "none", "low")] == [{}, {}, None]
    assert variables(CHATML, "none", thinks) == {"enable_thinking": False}
    assert variables(CHATML, "high", thinks) == {"enable_thinking": True}
    assert [variables(GEMMA, effort) for effort in (None, "none", "low")] == [{}, {}, None]
    assert variables(MUSE, "minimal") == {"reasoning_strength": "low"}
    assert variables(MUSE, "xhigh") == {"reasoning_strength": "xhigh"}
    assert [variables(MUSE, None), variables(MUSE, "none"), variables(MUSE, "low", "no such variable")] == [
        {},
        None,
        None,
    ]


def test_readers_of_answers() -> None:
    plain = ChatTemplate(ByteTokenizer(CHATML)).style
    thinks = ChatTemplate(ByteTokenizer(CHATML), "<think>").style
    assert isinstance(choose(CHATML).parser([], plain, ""), PlainParser)
    assert isinstance(choose(CHATML).parser([F], plain, ""), TaggedParser)
    opened = choose(CHATML).parser([], thinks, "assistant\n<think>\n")
    assert opened.feed("a</think>b") == [Reasoning("a"), Content("b")]
    assert isinstance(choose(GEMMA).parser([], plain, ""), PlainParser)
    assert isinstance(choose(MUSE).parser([], plain, ""), ChannelParser)
