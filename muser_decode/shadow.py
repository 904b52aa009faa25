"""Control tokens in rendered text: the template's own are found, those that users spell are not.

While a template runs, characters of the users' text that could take part in a control token's
spelling stand in for themselves under another, private-use character (their shadow). Lengths and
white space stay as they are, so that a template trims and tests the text as usual. Afterwards the
spellings that are found in the output are the template's, and the shadows are lifted. Not covered:
a template that takes characters out of the middle of a text and joins what is left; none is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from jinja2 import TemplateRuntimeError

PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class Spellings:
    """The spellings of a vocabulary's control tokens. Where two begin together, the longer one counts."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self._all = sorted(filter(None, spellings), key=lambda text: (-len(text), text))
        alternatives = "|".join(map(re.escape, self._all)) or r"(?!)"
        self._found = re.compile(alternatives)
        # Case is ignored here, for templates that change it.
        self._begins = re.compile(f"(?={alternatives})", re.IGNORECASE)
        self._heads = {text[:cut] for text in self._all for cut in range(1, len(text))}
        self._tails = {text[cut:] for text in self._all for cut in range(1, len(text))}
        self._longest = len(self._all[0]) if self._all else 0

    def split(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (plain text, the spelling after it) in order; the last spelling is empty."""
        start = 0
        for match in self._found.finditer(text):
            yield text[start : match.start()], match.group()
            start = match.end()
        yield text[start:], ""

    def dangerous(self, text: str) -> set[int]:
        """Return the places in `text` to alter so that no spelling is in it, nor can be completed around it.

        The first character of each spelling, overlapping ones too; and the outermost characters that
        are not white space, if a template that writes the rest beside them would complete a spelling.
        """
        places = {match.start() for match in self._begins.finditer(text)}
        inner = text.strip()
        if not inner:
            return places
        first = len(text) - len(text.lstrip())
        last = first + len(inner) - 1
        within = len(inner) < self._longest and any(inner in spelling for spelling in self._all)
        cuts = range(1, min(len(inner), self._longest) + 1)
        if within or any(inner[:cut] in self._tails for cut in cuts):
            places.add(first)
        if any(inner[-cut:] in self._heads for cut in cuts):
            places.add(last)
        return places


class Shadow:
    """The substitutions of one rendering. `known` is every text that takes part; shadows occur in none of it."""

    def __init__(self, spellings: Spellings, known: Iterable[str]) -> None:
        self._spellings = spellings
        self._known = known
        self._fresh: Iterator[str] | None = None
        self._shadows: dict[str, str] = {}

    def guard(self, text: str) -> str:
        """Return `text` with dangerous characters replaced by their shadows.

        Raises:
            TemplateRuntimeError: the conversation uses every private-use character itself.
        """
        places = self._spellings.dangerous(text)
        if not places:
            return text
        return "".join(self._shadow(char) if place in places else char for place, char in enumerate(text))

    def lift(self, text: str) -> str:
        """Return `text` with its shadows replaced by what they stand for."""
        return text.translate({ord(shadow): char for char, shadow in self._shadows.items()})

    def _shadow(self, char: str) -> str:
        if char not in self._shadows:
            if self._fresh is None:
                self._fresh = self._unused()
            fresh = next(self._fresh, None)
            if fresh is None:
                raise TemplateRuntimeError("they use every private-use character of Unicode")
            self._shadows[char] = fresh
        return self._shadows[char]

    def _unused(self) -> Iterator[str]:
        used = set().union(*self._known)
        return (char for block in PRIVATE_USE for char in map(chr, block) if char not in used)
