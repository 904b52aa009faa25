"""The decode node behind the HTTP door: engine, router and producer as one `ChatBackend`."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from muser_decode.api.backend import Cancellable
from muser_decode.client import ProducerClient
from muser_decode.engine.loop import Engine
from muser_decode.engine.request import Event, EventSink, GenerationRequest, RouteReport
from muser_decode.held import HeldSource, Rest
from muser_decode.ingest import RemoteSource
from muser_decode.keeper import Keeper
from muser_decode.router import Router
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


class DecodeNode:
    """See `muser_decode.api.backend.ChatBackend`. `keeper` None: nothing of one request is kept for another."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        router: Router,
        client: ProducerClient | None,
        keeper: Keeper | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._router = router
        self._client = client
        self._keeper = keeper
        self._lock = threading.Lock()

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
        """See `ChatBackend`."""
        return self._model.context_tokens

    @property
    def created(self) -> int:
        """See `ChatBackend`."""
        return self._model.created

    def submit(self, request: GenerationRequest, sink: EventSink) -> Cancellable:
        """Choose the way and start; see `ChatBackend`."""

        def watched(event: Event) -> None:
            if isinstance(event, RouteReport):
                self._learn(request, event)
            sink(event)

        if self._keeper is not None and len(request.prompt_ids) > MIN_HELD_TOKENS:
            source = HeldSource(self._keeper, request.prompt_ids, lambda held: self._rest(request, held))
            return self._engine.submit(request, watched, source)
        rest = self._rest(request, 0)
        if isinstance(rest, str):
            return self._engine.submit(request, watched, None, rest)
        return self._engine.submit(request, watched, rest)

    def _rest(self, request: GenerationRequest, held_tokens: int) -> Rest:
        """Return the handoff that brings the tokens after those held, or why this node computes them."""
        client, tokens = self._client, len(request.prompt_ids) - 1 - held_tokens
        if held_tokens and not tokens:
            return ""
        with self._lock:
            status = client.status if client is not None else None
            plan = self._router.plan(tokens, status, time.monotonic())
        if client is None or not plan.remote:
            return plan.reason
        return RemoteSource(client, request.prompt_ids, held_tokens)

    def ready(self) -> tuple[bool, str]:
        """See `ChatBackend`; a missing producer does not make this node unready."""
        return (True, "") if self._engine.healthy() else (False, "the engine takes no requests or makes no progress")

    def describe_status(self) -> dict[str, object]:
        """See `ChatBackend`."""
        identities = self._model.identities
        producer: dict[str, object] = {"state": "none", "reason": "no producer is configured"}
        if self._client is not None:
            status = self._client.status
            producer = {"state": status.state.value, "reason": status.reason}
        with self._lock:
            rates = self._router.rates()
        return {
            "context_tokens": self._model.context_tokens,
            "lane": identities.lane,
            "kv_layout": identities.kv_layout,
            "chunk_tokens": identities.chunk_tokens,
            "spec_digest": show(identities.spec_digest),
            "weights_digest": show(identities.weights_digest),
            "producer": producer,
            "prefill_tokens_per_s": rates,
            "requests": self._engine.load,
            "cache": self._keeper.store.stats() if self._keeper is not None else None,
        }

    def _learn(self, request: GenerationRequest, report: RouteReport) -> None:
        _log.info(
            "routed request=%s route=%s handoff=%s memory_tokens=%d disk_tokens=%d remote_tokens=%d local_tokens=%d "
            "prefill_s=%.3f reason=%s held=%s",
            request.request_id,
            report.route.value,
            report.handoff_id or "-",
            report.memory_tokens,
            report.disk_tokens,
            report.remote_tokens,
            report.local_tokens,
            report.prefill_s,
            report.reason or "-",
            report.held_reason or "-",
        )
        with self._lock:
            self._router.learn(report, time.monotonic())
