"""Calls in the XML-like body of a message to a tool, read while the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from muser_decode.formats.conversation import Call, CallDelta, CallPart, CallStart, Tool
from muser_decode.formats.streamed import head_at_end, mended, read_object
from muser_decode.formats.typed import Signatures

CALLS, CALLS_END = "<atem:function_calls>", "</atem:function_calls>"
INVOKE_END, PARAMETER_END = "</atem:invoke>", "</atem:parameter>"
_INVOKE = re.compile(r'<atem:invoke name="([^"<>]*)">')
_PARAMETER = re.compile(rf'<atem:parameter name="([^"<>]*)">|{INVOKE_END}')


class InvokedCalls:
    """Reads one body. Values are texts up to their closing tag, whatever they hold; what is between tags is left out.

    Text arguments go out as they come, others once they are whole and have their type.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._signatures = Signatures(tools)
        self._rest = ""
        self._name: str | None = None
        self._key: str | None = None
        self._within = False
        """Whether the open parameter is a text, of which a part was shown."""
        self._text = ""
        self.begun = False
        """Whether any call was shown to begin."""

    def feed(self, text: str) -> list[CallDelta]:
        """Take text; return what is certain."""
        self._rest += text
        deltas: list[CallDelta] = []
        while self._step(deltas):
            pass
        return deltas

    def end(self) -> list[CallDelta]:
        """Take the end of the body; a call that is open ends as far as it came."""
        deltas: list[CallDelta] = []
        if self._name is not None:
            if self._within:
                self._add(deltas, _escaped(self._rest))
            deltas.append(self._ended(self._name))
        return deltas

    def _step(self, deltas: list[CallDelta]) -> bool:
        """Take what the text decides; return whether there may be more."""
        if self._key is not None:
            return self._value(deltas, str(self._name), self._key)
        tag = (_INVOKE if self._name is None else _PARAMETER).search(self._rest)
        if tag is None:
            # A tag that has begun may go on.
            self._rest = self._rest[self._rest.rfind("<") :] if "<" in self._rest else ""
            return False
        self._rest = self._rest[tag.end() :]
        if self._name is None:
            self._name, self.begun = tag.group(1), True
            deltas.append(CallStart(self._name))
            self._add(deltas, "{")
        elif tag.group(1) is None:
            self._add(deltas, "}")
            deltas.append(self._ended(self._name))
        else:
            self._key = tag.group(1)
            self._add(deltas, f"{', ' * (len(self._text) > 1)}{_json(self._key)}: ")
        return True

    def _value(self, deltas: list[CallDelta], name: str, key: str) -> bool:
        value, found, after = self._rest.partition(PARAMETER_END)
        shown = value[: len(value) - (0 if found else head_at_end(value, PARAMETER_END))]
        kinds = self._signatures.of(name, key)
        if self._within or kinds.is_text(shown):
            quote = '"' * (not self._within)
            self._within = True
            self._rest = after if found else value[len(shown) :]
            self._add(deltas, quote + _escaped(shown) + '"' * bool(found))
        elif found:
            self._rest = after
            self._add(deltas, _json(kinds.from_text(value)))
        if not found:
            return False
        self._key, self._within = None, False
        return True

    def _add(self, deltas: list[CallDelta], text: str) -> None:
        self._text += text
        if deltas and isinstance(deltas[-1], CallPart):
            deltas[-1] = CallPart(deltas[-1].text + text)
        elif text:
            deltas.append(CallPart(text))

    def _ended(self, name: str) -> Call:
        call = Call(name, read_object(self._text), self._text)
        self._name, self._key, self._within, self._text = None, None, False, ""
        return call


def _json(value: object) -> str:
    return mended(json.dumps(value, ensure_ascii=False))


def _escaped(text: str) -> str:
    return _json(text)[1:-1]
