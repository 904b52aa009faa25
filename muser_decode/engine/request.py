"""What goes into the engine and what comes out: plain frozen values, no mlx."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class Route(Enum):
    """Which way a prompt's KV cache came to be. WARM and others join when they exist."""

    REMOTE = "remote"
    LOCAL = "local"
    SALVAGED = "salvaged"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 switch a filter off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to answer. `max_new_tokens` counts generated tokens, a stop token not among them."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()


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


@dataclass(frozen=True)
class TokenEvent:
    """One generated token. The first one is preceded by a RouteReport."""

    token_id: int


class FinishReason(Enum):
    """Why a generation ended, in OpenAI's words where they have one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


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
