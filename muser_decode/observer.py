"""What the decode node tells of its requests and handoffs: the contract with whoever counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from muser_decode.engine.request import Failed, Finished, Route, RouteReport


@dataclass(frozen=True)
class HandoffEnd:
    """One handoff with one producer, ended. `code` is "sealed" or says in a stable word why it broke.

    `frame_refused`: it broke on a frame that was not what the protocol allows. `seconds` run from the request.
    """

    producer: str
    code: str
    seconds: float
    segments_verified: int
    payload_nbytes: int
    frame_refused: bool


class Observer(Protocol):
    """Called on whatever thread did the work; must not block, and must not raise."""

    def routed(self, report: RouteReport, code: str) -> None:
        """Note how a prompt's cache came to be; `code` is a stable word for the report's reason, "none" without one."""

    def refused(self, code: str) -> None:
        """Note that the engine did not take a request, with the error's code."""

    def ended(self, route: Route | None, last: Finished | Failed) -> None:
        """Note a generation's end; `route` None: it ended before its cache was complete."""

    def handoff_ended(self, end: HandoffEnd) -> None:
        """Note a handoff's end."""


class Unobserved:
    """See `Observer`: counts nothing."""

    def routed(self, report: RouteReport, code: str) -> None:
        """See `Observer`."""

    def refused(self, code: str) -> None:
        """See `Observer`."""

    def ended(self, route: Route | None, last: Finished | Failed) -> None:
        """See `Observer`."""

    def handoff_ended(self, end: HandoffEnd) -> None:
        """See `Observer`."""
