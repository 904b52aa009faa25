"""`muser chat`: a conversation in the terminal with a decode node that runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TextIO

from muser_wire.cli import endpoint
from muser_wire.cli.ask import Answer, AskFailed, JsonObject, json_object
from muser_wire.cli.progress import BAR_CELLS

FAILED = 1
"""Exit status of a script's conversation in which an answer failed."""

PROMPT, MORE = "> ", ". "
HELP = "A line is a message; a backslash at its end continues it. /new starts over, /quit or Ctrl-D ends."


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser chat`."""
    parser = commands.add_parser("chat", help="talk to a running decode node")
    endpoint.add_arguments(parser)
    parser.add_argument("--system", default="", help="what the model is told before the conversation")
    parser.add_argument(
        "--max-tokens", type=int, help="length of each answer, in tokens (default: the model's context)"
    )
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest token (default: the node's)")
    parser.add_argument("--seed", type=int, help="repeats an answer where the temperature is above 0")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends; return the exit status.

    Somebody at a terminal sees an answer that fails; a script sees the status.
    """
    node = endpoint.endpoint(arguments)
    options = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
    wanted: JsonObject = {name: value for name, value in options.items() if value is not None}
    conversation = Conversation(node.model_id(), arguments.system, wanted)
    interactive = sys.stdin.isatty()
    if interactive:
        edit_lines()
        print(f"{conversation.model} at {node.url}. {HELP}")
    screen = Screen(sys.stdout)
    failed = False
    for message in messages(lambda prompt: input(prompt if interactive else "")):
        if message == "/new":
            conversation.clear()
        elif message == "/help":
            print(HELP)
        elif not take_turn(conversation, node.chunks, screen, message):
            failed = True
    return FAILED if failed and not interactive else 0


def edit_lines() -> None:
    """Let `input` edit and remember lines, where the module that does it is there."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")


def messages(read: Callable[[str], str]) -> Iterator[str]:
    """Yield messages and commands until the input or the user ends the conversation."""
    while True:
        try:
            lines = [read(PROMPT)]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read(MORE))
        except EOFError:
            return
        message = "\n".join(lines).strip()
        if message in {"/quit", "/exit"}:
            return
        if message:
            yield message


@dataclass
class Conversation:
    """The turns so far. `wanted` are parameters of every request."""

    model: str
    system: str
    wanted: JsonObject
    turns: list[JsonObject] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the turns."""
        self.turns = []

    def body(self, message: str) -> JsonObject:
        """Return the request that asks for an answer to `message`."""
        first: list[JsonObject] = [{"role": "system", "content": self.system}] if self.system else []
        return {
            **self.wanted,
            "model": self.model,
            "messages": [*first, *self.turns, {"role": "user", "content": message}],
            "stream": True,
            "stream_options": {"include_usage": True, "progress": True},
        }

    def add(self, message: str, answer: str) -> None:
        """Remember a turn that was answered."""
        self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]


def take_turn(
    conversation: Conversation,
    ask: Callable[[JsonObject], Generator[JsonObject, None, None]],
    screen: Screen,
    message: str,
) -> bool:
    """Ask, show the answer as it comes, and what it took; say whether it did not fail.

    Ctrl-C ends the answer and keeps the conversation.
    """
    chunks = ask(conversation.body(message))
    answer = Answer("")
    try:
        for chunk in chunks:
            answer = add_chunk(answer, chunk, screen)
    except KeyboardInterrupt:
        screen.line("(stopped)")
    except AskFailed as error:
        screen.line(f"(failed: {error})")
        return False
    finally:
        # Closing the connection is what stops the node.
        chunks.close()
    if answer.text:
        conversation.add(message, answer.text)
    if answer.account:
        screen.line(summary(answer))
    return True


def add_chunk(answer: Answer, chunk: JsonObject, screen: Screen) -> Answer:
    """Show what a chunk adds; return the answer with it."""
    account = json_object(chunk, "muser")
    prefill = json_object(account, "prefill")
    if prefill:
        screen.progress(number(prefill, "done"), number(prefill, "total"))
        return answer
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = json_object(first, "delta")
    screen.reasoning(str(delta.get("reasoning_content") or ""))
    text = str(delta.get("content") or "")
    screen.text(text)
    return Answer(answer.text + text, account or answer.account, json_object(chunk, "usage") or answer.usage)


def number(holder: JsonObject, name: str) -> float:
    """Return the number under `name`; 0 where there is none."""
    value = holder.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def summary(answer: Answer) -> str:
    """Return what an answer took, in one line.

    >>> summary(Answer("x", {"route": "local", "reason": "no producer", "timings": {"tokens_per_second": 9.96}}))
    '(local: no producer; 10.0 tokens/s)'
    """
    timings = json_object(answer.account, "timings")
    held = number(answer.account, "memory_tokens") + number(answer.account, "disk_tokens")
    parts = [f"{answer.route}: {answer.reason}" if answer.reason else answer.route]
    if answer.usage:
        prompt, made = number(answer.usage, "prompt_tokens"), number(answer.usage, "completion_tokens")
        parts.append(
            f"{prompt:,.0f} prompt tokens{f', {held:,.0f} of them kept' if held else ''}, {made:,.0f} answered"
        )
    if "first_token_s" in timings:
        split = f"prefill {number(timings, 'prefill_s'):.2f} s, wire {number(timings, 'wire_s'):.2f} s"
        parts.append(f"first token after {number(timings, 'first_token_s'):.2f} s ({split})")
    if timings.get("tokens_per_second"):
        parts.append(f"{number(timings, 'tokens_per_second'):.1f} tokens/s")
    return f"({'; '.join(parts)})"


class Screen:
    """Where answers are shown. Bars and dim text are for terminals alone."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self._bar = False
        self._column = 0
        self._dim = False

    def progress(self, done: float, total: float) -> None:
        """Draw how far the prompt is read."""
        if not self._tty:
            return
        filled = int(BAR_CELLS * done // max(total, 1))
        cells = "#" * filled + "." * (BAR_CELLS - filled)
        self._out.write(f"\r[{cells}] {done:,.0f} of {total:,.0f} prompt tokens")
        self._out.flush()
        self._bar = True

    def reasoning(self, text: str) -> None:
        """Show what the model says to itself."""
        if text:
            self._style(dim=True)
            self._write(text)

    def text(self, text: str) -> None:
        """Show a piece of the answer."""
        if text:
            self._style(dim=False)
            self._write(text)

    def line(self, text: str) -> None:
        """Show a line of ours, below what was shown."""
        self._style(dim=True)
        if self._column:
            self._write("\n")
        self._write(f"{text}\n")
        self._style(dim=False)

    def _write(self, text: str) -> None:
        if self._bar:
            # Back to the line's start, and erase it.
            self._out.write("\r\x1b[K")
            self._bar = False
        self._out.write(text)
        self._out.flush()
        self._column = 0 if text.endswith("\n") else 1

    def _style(self, *, dim: bool) -> None:
        if dim == self._dim:
            return
        self._dim = dim
        if self._column:
            self._write("\n")
        if self._tty and "NO_COLOR" not in os.environ:
            self._out.write("\x1b[2m" if dim else "\x1b[0m")
