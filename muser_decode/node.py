"""The decode node behind the HTTP door: engine, router and producers as one `ChatBackend`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from muser_decode.api.backend import Cancellable
from muser_decode.engine.loop import Engine, Submission
from muser_decode.engine.request import Event, EventSink, Failed, Finished, GenerationRequest, Route, RouteReport
from muser_decode.errors import DecodeError
from muser_decode.explaining import explain_held
from muser_decode.held import HeldSource, Rest
from muser_decode.keeper import Keeper
from muser_decode.observer import Observer, Unobserved
from muser_decode.producers import Handoff, Producers
from muser_decode.relay import RelaySource
from muser_wire.identities import Identities, show
from muser_wire.kvpack.index import MIN_HELD_TOKENS
from muser_wire.model.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """The model that this node serves. `created` is in seconds since 1970; the context in tokens."""

    model_id: str
    aliases: frozenset[str]
    tokenizer: Tokenizer
    context_tokens: int
    created: int
    identities: Identities


class _Journey:
    """One request's way through the node. Each method is called on one thread at a time."""

    def __init__(self, producers: Producers, request: GenerationRequest) -> None:
        self._producers = producers
        self._ids = request.prompt_ids
        self._relay: RelaySource | None = None
        self._declined = ""
        self.route: Route | None = None

    def rest(self, held_tokens: int) -> Rest:
        """Return the handoff that brings the tokens after those held, or why this node computes them."""
        if held_tokens and held_tokens == len(self._ids) - 1:
            return ""
        choice = self._producers.choose(self._ids, held_tokens)
        if isinstance(choice, Handoff):
            self._relay = RelaySource(self._producers, self._ids, held_tokens, choice)
            return self._relay
        self._declined = choice.code
        return choice.reason

    def arrived(self, report: RouteReport) -> str:
        """Have the router learn from the way; return a stable word for why it was not one whole handoff."""
        self.route = report.route
        self._producers.learn(report, self._relay.plan if self._relay is not None else None)
        if not report.reason:
            return "none"
        # Without a word from either, the engine did not accept what the source brought.
        return (self._relay.code if self._relay is not None else self._declined) or "chunk_refused"


class DecodeNode:
    """See `muser_decode.api.backend.ChatBackend`. `keeper` None: nothing of one request is kept for another."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        producers: Producers,
        keeper: Keeper | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._producers = producers
        self._keeper = keeper
        self._observer = observer or Unobserved()

    @property
    def model_id(self) -> str:
        """See `ChatBackend`."""
        return self._model.model_id

    @property
    def aliases(self) -> frozenset[str]:
        """See `ChatBackend`."""
        return self._model.aliases

    @property
    def tokenizer(self) -> Tokenizer:
        """See `ChatBackend`."""
        return self._model.tokenizer

    @property
    def context_tokens(self) -> int:
        """See `ChatBackend`. It is what memory holds, where that is less than the model can."""
        return min(self._model.context_tokens, self._engine.context_tokens or self._model.context_tokens)

    @property
    def created(self) -> int:
        """See `ChatBackend`."""
        return self._model.created

    @property
    def places(self) -> int:
        """See `ChatBackend`."""
        return self._engine.places

    def submit(self, request: GenerationRequest, sink: EventSink) -> Cancellable:
        """Start one generation; see `submit_all`."""
        return self.submit_all([(request, sink)])[0]

    def submit_all(self, parts: Sequence[tuple[GenerationRequest, EventSink]]) -> Sequence[Cancellable]:
        """Choose each one's way and start them; see `ChatBackend`."""
        try:
            return self._engine.submit_all([self._submission(request, sink) for request, sink in parts])
        except DecodeError as error:
            self._observer.refused(error.code)
            raise

    def _submission(self, request: GenerationRequest, sink: EventSink) -> Submission:
        journey = _Journey(self._producers, request)

        def watched(event: Event) -> None:
            if isinstance(event, RouteReport):
                code = journey.arrived(event)
                self._observer.routed(event, code)
                _log_route(request, event, code)
            elif isinstance(event, Finished | Failed):
                self._observer.ended(journey.route, event)
            sink(event)

        if self._keeper is not None and len(request.prompt_ids) > MIN_HELD_TOKENS:
            return Submission(request, watched, HeldSource(self._keeper, request.prompt_ids, journey.rest))
        rest = journey.rest(0)
        if isinstance(rest, str):
            return Submission(request, watched, None, rest)
        return Submission(request, watched, rest)

    def ready(self) -> tuple[bool, str]:
        """See `ChatBackend`; a missing producer does not make this node unready."""
        return (True, "") if self._engine.healthy() else (False, "the engine takes no requests or makes no progress")

    def explain_held(self, prompt_ids: Sequence[int]) -> dict[str, object]:
        """See `ChatBackend`."""
        return explain_held(self._keeper, prompt_ids)

    def describe_status(self) -> dict[str, object]:
        """See `ChatBackend`."""
        identities = self._model.identities
        return {
            "context_tokens": self.context_tokens,
            "lane": identities.lane,
            "kv_layout": identities.kv_layout,
            "chunk_tokens": identities.chunk_tokens,
            "spec_digest": show(identities.spec_digest),
            "weights_digest": show(identities.weights_digest),
            "producers": self._producers.describe(),
            "prefill_tokens_per_s": self._producers.rates(),
            "requests": self._engine.load,
            "cache": self._keeper.store.stats() if self._keeper is not None else None,
        }


def _log_route(request: GenerationRequest, report: RouteReport, code: str) -> None:
    _log.info(
        "routed request=%s route=%s code=%s handoff=%s memory_tokens=%d disk_tokens=%d peer_tokens=%d "
        "remote_tokens=%d local_tokens=%d producers=%s prefill_s=%.3f reason=%s held=%s",
        request.request_id,
        report.route.value,
        code,
        report.handoff_id or "-",
        report.memory_tokens,
        report.disk_tokens,
        report.peer_tokens,
        report.remote_tokens,
        report.local_tokens,
        ",".join(f"{name}={tokens}" for name, tokens in report.producers) or "-",
        report.prefill_s,
        report.reason or "-",
        report.held_reason or "-",
    )
