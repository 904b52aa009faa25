"""Structured answers: which tokens a grammar allows next, by the llguidance library."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import llguidance

from muser_decode.engine.request import TokenConstraint
from muser_decode.errors import DecodeError
from muser_decode.formats.base import SPACED, Parser
from muser_decode.tokenizer import StreamDecoder
from muser_wire.model.tokenizer import Tokenizer

MAX_ROW_ITEMS = 4_096
"""Ways in which a grammar may go on at one place: an object of a thousand optional properties has 4,007.

The work is quadratic in them. With such objects and 128,000 tokens the engine's thread takes 5 ms a token on average
and up to 40, less than a unit of prefill; 200 in one answer hold 11 MB. The library's own 2,000 are an object of 498.
"""

_LIMITS = llguidance.LLParserLimits(max_items_in_row=MAX_ROW_ITEMS)

MAX_VERDICTS = 4_096
"""How many grammars it is remembered of whether they can be followed: agents send the same tools with every request."""


class GrammarRefused(DecodeError):
    """A schema that cannot be turned into a grammar. The text says which part."""

    code = "grammar_refused"


class GrammarFailed(DecodeError):
    """A grammar that broke while it was followed: too complex, or a fault of ours."""

    code = "grammar_failed"


def json_grammar(schema: Mapping[str, object]) -> str:
    """Return the grammar of JSON texts that follow a schema, with white space after separators only.

    Raises:
        GrammarRefused: it is no JSON schema that can be followed.
    """
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast("Any", dict(SPACED)))
    except ValueError as error:
        raise GrammarRefused(str(error)) from error


def lark_grammar(source: str) -> str:
    """Return the grammar of a text in llguidance's dialect of Lark."""
    return llguidance.LLMatcher.grammar_from_lark(source)


class Grammars:
    """Makes constraints over one tokenizer. Safe on several threads; the tables are made at the first use."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._lock = threading.Lock()
        self._tables: llguidance.LLTokenizer | None = None
        # By digest, for sources may be large; the oldest first.
        self._verdicts: dict[bytes, str] = {}

    def check(self, source: str) -> None:
        """Refuse a grammar in llguidance's dialect of Lark as `matcher` does.

        Raises:
            GrammarRefused: the grammar is not valid, or too complex.
        """
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            verdict = self._verdicts.get(digest)
        if verdict is None:
            try:
                self.matcher(lark_grammar(source))
                verdict = ""
            except GrammarRefused as error:
                verdict = str(error)
            with self._lock:
                self._verdicts[digest] = verdict
                while len(self._verdicts) > MAX_VERDICTS:
                    del self._verdicts[next(iter(self._verdicts))]
        if verdict:
            raise GrammarRefused(verdict)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Return a grammar at its beginning, tried as far as all texts that it allows agree.

        What lies behind a choice is not tried: a grammar that is too complex there fails in the middle of an answer.

        Raises:
            GrammarRefused: the grammar is not valid, or too complex.
        """
        tables = self._made()
        matcher = llguidance.LLMatcher(tables, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarRefused(_reason(matcher.get_error()))
        trial = matcher.deep_copy()
        # The mask, for which other threads need not wait, computes what all texts begin with.
        trial.compute_bitmask()
        forced = trial.compute_ff_bytes().partition(_CONTROL)[0].decode("utf-8", "ignore")
        trial.try_consume_tokens(tables.greedy_tokenize(forced))
        trial.compute_bitmask()
        if trial.is_error():
            raise GrammarRefused(f"it is too complex, or no text follows it: {_first_line(trial.get_error())}")
        return matcher

    def _made(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tables is None:
                wrapped = llguidance.TokenizerWrapper(_Pieces(self._tokenizer, self._stop_ids))
                self._tables = llguidance.LLTokenizer(wrapped, eos_token=sorted(self._stop_ids) or None)
            return self._tables


class GrammarConstraint:
    """See `TokenConstraint`. `matcher` belongs to this generation alone."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> None:
        """See `TokenConstraint`.

        Raises:
            GrammarFailed: the grammar broke.
        """
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            raise GrammarFailed(_first_line(self._matcher.get_error()))

    def mask(self) -> bytes | None:
        """See `TokenConstraint`. At the end of the grammar only tokens that stop are left.

        Raises:
            GrammarFailed: the grammar broke.
        """
        mask = self._matcher.compute_bitmask()
        # It may break only now, where no text goes on; then the mask has the tokens that stop, as at an end.
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher.get_error()))
        return mask


class Listener:
    """Follows an answer's tokens with a parser of its own."""

    def __init__(self, parser: Parser, tokenizer: Tokenizer) -> None:
        self.parser = parser
        self._decoder = StreamDecoder(tokenizer)
        self._spellings = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}

    def hear(self, token_id: int) -> None:
        """Take one token."""
        if token_id in self._spellings:
            self.parser.control(self._spellings[token_id])
        else:
            self.parser.feed(self._decoder.feed(token_id))


class AfterReasoning:
    """A constraint that begins where the answer does; what the model says to itself before is free."""

    def __init__(self, inner: TokenConstraint, listener: Listener) -> None:
        self._inner, self._listener = inner, listener
        self._answering = listener.parser.answering

    def accept(self, token_id: int) -> None:
        """See `TokenConstraint`."""
        if self._answering:
            self._inner.accept(token_id)
            return
        self._listener.hear(token_id)
        self._answering = self._listener.parser.answering

    def mask(self) -> bytes | None:
        """See `TokenConstraint`."""
        return self._inner.mask() if self._answering else None


class InCalls:
    """A constraint on what stands within calls; everything else is free. `begin` makes one call's."""

    def __init__(self, begin: Callable[[], TokenConstraint], listener: Listener, tokenizer: Tokenizer) -> None:
        self._begin, self._listener, self._tokenizer = begin, listener, tokenizer
        self._inner: TokenConstraint | None = None

    def accept(self, token_id: int) -> None:
        """See `TokenConstraint`.

        Raises:
            GrammarFailed: one token began a call and went on with what its schema does not allow.
        """
        if self._inner is not None:
            self._inner.accept(token_id)
        self._listener.hear(token_id)
        text = self._listener.parser.call_text
        if text is None:
            self._inner = None
        elif self._inner is None:
            self._inner = self._begin()
            for inner_id in self._tokenizer.encode(text):
                self._inner.accept(inner_id)

    def mask(self) -> bytes | None:
        """See `TokenConstraint`."""
        return None if self._inner is None else self._inner.mask()


_CONTROL = b"\xff"
"""No byte of a text: what marks a control token for llguidance."""


class _Pieces:
    """A tokenizer as llguidance wants to see one: bytes by id, control tokens marked by a byte of 0xFF."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        specials = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}
        self._tokenizer = tokenizer
        self.eos_token_id = min(stop_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(specials)
        self.tokens = [
            _CONTROL + specials[token_id].encode() if token_id in specials else tokenizer.token_bytes(token_id)
            for token_id in range(tokenizer.vocab_size)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _reason(error: str) -> str:
    # What the library counts in 16 bits is an assertion there.
    line = _first_line(error)
    return "it is too large" if line.startswith("panic") else line


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
