"""Bounds of the HTTP side. Each default says why it has its size."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BODY_NBYTES = 8 * 1024 * 1024
"""A prompt of 131,072 tokens is about 0.6 MB of text; escaped as \\uXXXX it may grow sixfold."""

HEADER_WAIT_S = 0.1
"""How long a stream's headers wait for the route, which one of them names, and for a refusal, which has a status.

People take less for at once; what is held or short is prefilled by then.
"""

COMMENT_EVERY_S = 5.0
"""Pause between progress comments while a prompt is prefilled: well under the 15 s of impatient proxies."""

CANCEL_WAIT_S = 2.0
"""How long an answer that a stop string ended waits for the engine's closing figures: many decode steps."""

RETRY_AFTER_S = 1
"""What a client is told when the queue is full. A place is free as soon as one request ends."""

MAX_DEPTH = 100
"""Arrays and objects within one another. Schemas of tools have about ten levels; what reads them calls itself."""

MAX_STOPS = 4
"""As many stop strings as OpenAI takes."""

MAX_STOP_CHARS = 512
"""Each token's text is compared with every head of every stop string, so their length costs time."""


MAX_STOP_IDS = 64
"""Stop tokens are looked up in a set; this many are more than any vocabulary has control tokens worth naming."""

MAX_CHOICES = 8
"""Answers of one request: each is a generation of its own, with a cache of its own."""

MAX_LOGPROBS = 20
"""As many alternatives as OpenAI gives."""

MIN_DEADLINE_S = 0.001
"""An answer that is wanted sooner than in a millisecond is not wanted."""

MAX_DEADLINE_S = 86_400.0
"""A day: no answer takes longer."""

MAX_BIASES = 1024
"""Tokens whose logits a request may move. OpenAI takes 1,024 too."""

MAX_MESSAGES = 8192
"""A conversation of more turns does not fit a context: each costs several tokens even when it is empty."""

MAX_TOOLS = 256
"""OpenAI takes 128; agents with several tool servers come near that."""

MAX_SCHEMA_CHARS = 256 * 1024
"""A JSON schema for an answer, written as JSON. It becomes a grammar, which costs time before the first token."""

PROGRESS_EVERY_S = 0.5
"""Pause between progress chunks while a prompt is prefilled, for clients that ask for them."""


@dataclass(frozen=True)
class Limits:
    """The bounds that an operator or a test may set."""

    max_body_nbytes: int = MAX_BODY_NBYTES
    header_wait_s: float = HEADER_WAIT_S
    comment_every_s: float = COMMENT_EVERY_S
    cancel_wait_s: float = CANCEL_WAIT_S
    progress_every_s: float = PROGRESS_EVERY_S
