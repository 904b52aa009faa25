"""What the HTTP side needs of the rest of the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from muser_decode.engine.request import EventSink, GenerationRequest
from muser_wire.model.tokenizer import Tokenizer


class Cancellable(Protocol):
    """A generation in progress."""

    def cancel(self) -> None:
        """Ask the engine to stop soon. Harmless when repeated or too late."""


class ChatBackend(Protocol):
    """One served model: the router and the engine behind one door. Every method is quick and never blocks."""

    @property
    def model_id(self) -> str:
        """The name under which the model is served."""

    @property
    def aliases(self) -> frozenset[str]:
        """Other names that a request may use."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""

    @property
    def context_tokens(self) -> int:
        """Prompt and answer together have at most this many tokens."""

    @property
    def created(self) -> int:
        """When the model was loaded, in seconds since 1970."""

    @property
    def places(self) -> int:
        """Generations that run or wait at most: more of them together are never taken."""

    def submit_all(self, parts: Sequence[tuple[GenerationRequest, EventSink]]) -> Sequence[Cancellable]:
        """Start all of several generations, or none. A sink is called on another thread, perhaps before this returns.

        Every generation ends with one `Finished` or `Failed`, a cancelled one too.

        Raises:
            EngineBusy: the queue has no place for all of them.
            EngineStopped: the node is stopping.
            RequestInvalid: a request cannot be run.
        """

    def ready(self) -> tuple[bool, str]:
        """Return whether requests would be answered now, and why not."""

    def explain_held(self, prompt_ids: Sequence[int]) -> Mapping[str, object]:
        """Return what the node holds of a prompt and why no more, as JSON values. It reads files, so it may block."""

    def describe_status(self) -> Mapping[str, object]:
        """Return what the node says of itself, as JSON values."""
