"""Calls that are read while the model writes them: what is certain of their arguments goes out as JSON text at once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from muser_decode.formats.conversation import Call, CallDelta, CallPart, CallStart, Tool
from muser_decode.formats.typed import Kinds, Signatures, parse_json

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""How a call begins whose arguments can be told apart from what surrounds them."""

_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_OTHER = r"\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u]"
_ALONE = rf"{_HIGH}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{{4}})"
_CHARS = re.compile(rf'(?:[^"\\]|{_HIGH}{_LOW}|{_ALONE}|{_OTHER})+', re.DOTALL)
"""Whole characters and escapes of a JSON string. Half of a surrogate pair waits for what comes after it."""

_ODD = re.compile(rf"{_HIGH}{_LOW}|{_HIGH}|{_OTHER}|[\x00-\x1f]", re.DOTALL)
"""Those that may be written otherwise."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LITERAL = re.compile(r'[^\s",:\[\]{}]+')
_MARKS = {",": ", ", ":": ": "}


class JsonCall:
    """Reads the body of one call: an object with the name first and then the arguments.

    A body of another kind shows nothing before it is whole, which is not this reader's business.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._taken = 0
        self._arguments: _Arguments | None = None
        self._name = ""
        self._text = ""

    @property
    def begun(self) -> bool:
        """Whether the call was shown to begin."""
        return self._arguments is not None

    def read(self, body: str) -> list[CallDelta]:
        """Take the body as far as it has come, every time from its start; return what is new."""
        deltas: list[CallDelta] = []
        if self._arguments is None:
            head = _HEAD.match(body)
            if head is None:
                return []
            self._name, self._taken = head.group(1), head.end()
            self._arguments = _Arguments(self._tools, self._name)
            deltas.append(CallStart(self._name))
        text = self._arguments.feed(body[self._taken :])
        self._taken = len(body)
        self._text += text
        return [*deltas, CallPart(text)] if text else deltas

    def end(self) -> Call:
        """Return the call that was begun, as far as it came."""
        return Call(self._name, read_object(self._text), self._text)


def read_object(text: str) -> dict[str, object]:
    """Return the JSON object that `text` holds; an empty one where it holds none."""
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _Arguments:
    """Rewrites a JSON object piece by piece as Python's `json.dumps` writes it, each argument coerced to its schema.

    What is not JSON goes through as it is: whoever reads the whole finds out.
    """

    def __init__(self, tools: Sequence[Tool], name: str) -> None:
        self._signatures, self._name = Signatures(tools), name
        self._rest = ""
        self._depth = 0
        self._within = False
        self._key = ""
        self._is_value = False
        self._ended = False

    def feed(self, text: str) -> str:
        """Take text; return what is certain."""
        self._rest += text
        pieces: list[str] = []
        while not self._ended:
            piece = self._characters() if self._within else self._token()
            if piece is None:
                break
            pieces.append(piece)
        return "".join(pieces)

    def _characters(self) -> str | None:
        """Return what is certain within a string; None where more is needed."""
        if self._rest.startswith('"'):
            self._rest, self._within = self._rest[1:], False
            return '"'
        found = _CHARS.match(self._rest)
        if found is None:
            return None
        self._rest = self._rest[found.end() :]
        return _ODD.sub(lambda one: _rewritten(f'"{one.group()}"')[1:-1], found.group())

    def _token(self) -> str | None:
        self._rest = self._rest.lstrip()
        first = self._rest[:1]
        if not first:
            return None
        if first == '"':
            return self._string()
        if first in "{}[],:":
            self._rest = self._rest[1:]
            return self._mark(first)
        literal = _LITERAL.match(self._rest)
        if literal is None or literal.end() == len(self._rest):
            return None
        self._rest = self._rest[literal.end() :]
        return self._coerced(literal.group())

    def _string(self) -> str | None:
        """Begin a string, or take it whole where its text decides: a key's, or one that is to be another type."""
        names = self._kinds().told if self._is_value else ()
        if self._depth > 1 or (self._is_value and (not names or "string" in names)):
            self._rest, self._within = self._rest[1:], True
            return '"'
        whole = _STRING.match(self._rest)
        if whole is None:
            return None
        self._rest = self._rest[whole.end() :]
        text = _rewritten(whole.group())
        if self._is_value:
            return self._coerced(text)
        self._key = _loads(text) or ""
        return text

    def _mark(self, mark: str) -> str:
        self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
        self._ended = self._depth == 0
        if self._depth == 1 and mark in ",:":
            self._is_value = mark == ":"
        return _MARKS.get(mark, mark)

    def _kinds(self) -> Kinds:
        return self._signatures.of(self._name, self._key)

    def _coerced(self, text: str) -> str:
        """Return a scalar as JSON; one of the arguments themselves has the type that its schema names."""
        try:
            value = parse_json(text)
        except ValueError:
            return text
        if self._depth == 1 and self._is_value:
            value = self._kinds().coerced(value)
        return json.dumps(value, ensure_ascii=False)


def _rewritten(text: str) -> str:
    """Return a JSON string with no escapes but those that it needs; what is none stays as it is."""
    value = _loads(text)
    return text if value is None else json.dumps(value, ensure_ascii=False)


def _loads(text: str) -> str | None:
    try:
        # Line ends that the model forgot to escape are meant.
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return mended(str(value))


def mended(text: str) -> str:
    """Return a text that has a UTF-8 form: half of a surrogate pair stands for no character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def head_at_end(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that begins `tag`.

    >>> head_at_end("a <thi", "<think>"), head_at_end("a <b", "<think>")
    (4, 0)
    """
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
