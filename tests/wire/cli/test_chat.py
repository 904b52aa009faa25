from __future__ import annotations

import io
from collections.abc import Generator
from typing import Any

import pytest

from muser_wire.cli.ask import AskFailed, Endpoint
from muser_wire.cli.chat import Conversation, Screen, messages, take_turn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(*lines: str) -> list[str]:
    waiting = list(lines)
    prompts: list[str] = []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return list(messages(read))


def content(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


ACCOUNT = {
    "route": "warm",
    "reason": "",
    "memory_tokens": 1024,
    "disk_tokens": 0,
    "timings": {"prefill_s": 0.5, "wire_s": 0.25, "first_token_s": 0.75, "tokens_per_second": 42.26},
}
CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {}}], "muser": {"prefill": {"done": 512, "total": 2048}}},
    {"choices": [{"delta": {"reasoning_content": "hm"}}]},
    content("Good "),
    content("day"),
    {"choices": [{"delta": {}, "finish_reason": "stop"}], "muser": ACCOUNT},
    {"choices": [], "usage": {"prompt_tokens": 2048, "completion_tokens": 2}},
]


def test_lines_become_messages() -> None:
    assert typed("a", "", "  ", "b\\", "c ", "/new", "/quit", "d") == ["a", "b\nc", "/new"]
    assert typed("a\\") == []


def turn(chunks: list[dict[str, Any]], out: io.StringIO, error: BaseException | None = None) -> Conversation:
    asked: list[dict[str, Any]] = []

    def ask(body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        asked.append(body)
        yield from chunks
        if error is not None:
            raise error

    conversation = Conversation("m", "Be brief.", {"temperature": 0.0})
    take_turn(conversation, ask, Screen(out), "Hi")
    assert asked == [
        {
            "temperature": 0.0,
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True, "progress": True},
        }
    ]
    return conversation


TOLD = (
    "(warm; 2,048 prompt tokens, 1,024 of them kept, 2 answered; "
    "first token after 0.75 s (prefill 0.50 s, wire 0.25 s); 42.3 tokens/s)"
)


def test_an_answer_is_shown_and_remembered() -> None:
    out = io.StringIO()
    conversation = turn(CHUNKS, out)
    assert out.getvalue() == f"hm\nGood day\n{TOLD}\n"
    assert conversation.body("More")["messages"][1:] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Good day"},
        {"role": "user", "content": "More"},
    ]
    conversation.clear()
    assert len(conversation.body("x")["messages"]) == 2


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    turn(CHUNKS, out)
    shown = out.getvalue()
    assert "[#######.......................] 512 of 2,048 prompt tokens" in shown
    assert shown.index("prompt tokens") < shown.index("\r\x1b[K") < shown.index("hm")
    assert shown.endswith(f"{TOLD}\n\x1b[0m")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    turn(CHUNKS, plain)
    assert "\x1b[2m" not in plain.getvalue()


def test_an_interruption_keeps_what_was_said() -> None:
    out = io.StringIO()
    conversation = turn([content("Goo")], out, KeyboardInterrupt())
    assert out.getvalue() == "Goo\n(stopped)\n"
    assert conversation.turns[-1] == {"role": "assistant", "content": "Goo"}


def test_a_failure_is_told_and_the_conversation_goes_on_without_it() -> None:
    out = io.StringIO()
    conversation = turn([content("Goo")], out, AskFailed("device lost"))
    assert out.getvalue() == "Goo\n(failed: device lost)\n"
    assert conversation.turns == []


def test_the_command_talks_to_a_node(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Endpoint, "model_id", lambda _self: "m")
    monkeypatch.setattr(Endpoint, "chunks", lambda _self, _body: (chunk for chunk in CHUNKS))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/help\n/new\n"))
    from muser_wire.cli.__main__ import main

    assert main(["chat", "--port", "1", "--max-tokens", "3"]) == 0
    assert "Good day" in capsys.readouterr().out


@pytest.mark.parametrize(("stdin", "status"), [(io.StringIO, 1), (Terminal, 0)], ids=["a script", "a terminal"])
@pytest.mark.parametrize("lines", ["Hi\n", "Hi\nMore\n", "More\nHi\n"])
def test_a_script_learns_that_an_answer_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdin: Any, status: int, lines: str
) -> None:
    def chunks(_self: Endpoint, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        yield from CHUNKS[:2]
        if body["messages"][-1]["content"] == "Hi":
            raise AskFailed("device lost")
        yield from CHUNKS[2:]

    monkeypatch.setattr(Endpoint, "model_id", lambda _self: "m")
    monkeypatch.setattr(Endpoint, "chunks", chunks)
    monkeypatch.setattr("sys.stdin", stdin(lines))
    waiting = lines.splitlines()

    def read(_prompt: str = "") -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    monkeypatch.setattr("builtins.input", read)
    from muser_wire.cli.__main__ import main

    assert main(["chat", "--port", "1"]) == status
    out = capsys.readouterr().out
    assert "(failed: device lost)" in out
    assert ("Good day" in out) == ("More" in lines)
