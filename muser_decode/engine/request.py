"""What goes into the engine and what comes out: plain frozen values, no mlx."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Route(Enum):
    """Which way a prompt's KV cache came to be, as far as this node did not hold it. WARM: it held all of it."""

    REMOTE = "remote"
    LOCAL = "local"
    SALVAGED = "salvaged"
    WARM = "warm"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 switch a filter off.

    The presence and frequency penalties look at generated tokens, the repetition penalty (1 is off) at the
    prompt's too. `logit_bias` pairs token ids with what is added to their logits. `logprobs` is the number of
    alternatives to report beside each token; None reports nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


class TokenConstraint(Protocol):
    """Which tokens may come next: a grammar's state. Used on the engine's thread only."""

    def accept(self, token_id: int) -> None:
        """Go on by one token, which was allowed."""

    def mask(self) -> bytes | None:
        """Return one bit for each token id, lowest bit first, set where it may come next; None allows all."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to answer. `max_new_tokens` counts generated tokens, a stop token not among them.

    `constrain` makes the grammar's state of one generation. It ends, in order, `deadline_s` seconds after it was
    submitted if it has not ended by then; None sets no such limit. `open_ended`: nobody asked for so many tokens,
    so memory for all of them is not taken at the start, and the answer ends earlier should there be no more.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    constrain: Callable[[], TokenConstraint] | None = field(default=None, compare=False)
    deadline_s: float | None = None
    open_ended: bool = False


@dataclass(frozen=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the cache."""

    done: int
    total: int


@dataclass(frozen=True)
class RouteReport:
    """How the prompt was prefilled. Times in seconds; counts of tokens, segments and bytes.

    `reason` says in a few words why the route is not remote, or is empty. `prefill_s` runs from admission to
    a complete cache; `wire_s` from the first frame to the verified seal (0 without a handoff).

    `memory_tokens` and `disk_tokens` were held by this node; `held_reason` says why no more were, and
    `held_decoded` whether decode, and not prefill, had produced part of them. Of the `remote_tokens`, a producer had
    computed `peer_tokens` before; that is known from its seal alone. `producers` says who brought how many of them.
    """

    route: Route
    reason: str
    prefill_s: float
    wire_s: float = 0.0
    remote_tokens: int = 0
    local_tokens: int = 0
    segments_verified: int = 0
    payload_nbytes: int = 0
    handoff_id: str = ""
    memory_tokens: int = 0
    disk_tokens: int = 0
    peer_tokens: int = 0
    producers: tuple[tuple[str, int], ...] = ()
    held_reason: str = ""
    held_decoded: bool = False

    @property
    def held_tokens(self) -> int:
        """Tokens that this node held and nobody computed for this request."""
        return self.memory_tokens + self.disk_tokens

    @property
    def tokens_by_origin(self) -> dict[str, int]:
        """Every token of the prompt but the last, once, by where its keys and values came from."""
        return {
            "memory": self.memory_tokens,
            "disk": self.disk_tokens,
            "peer": self.peer_tokens,
            "remote_computed": self.remote_tokens - self.peer_tokens,
            "local_computed": self.local_tokens,
        }


@dataclass(frozen=True)
class Likelihood:
    """Natural logarithms of probabilities that the model gave, before any penalty, bias, temperature or filter.

    `alternatives` are the likeliest tokens, the likeliest first.
    """

    chosen: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One generated token. The first one is preceded by a RouteReport."""

    token_id: int
    likelihood: Likelihood | None = None


class FinishReason(Enum):
    """Why a generation ended, in OpenAI's words where they have one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Finished:
    """The last event of a generation that did not fail. `first_token_s` counts from submission, in seconds."""

    reason: FinishReason
    generated_tokens: int
    first_token_s: float
    decode_s: float


@dataclass(frozen=True)
class Failed:
    """The last event of a generation that failed inside the engine; `message` may be shown to the user."""

    message: str


Event = PrefillProgress | RouteReport | TokenEvent | Finished | Failed
EventSink = Callable[[Event], None]
"""Called on the engine's thread; must not block."""
