"""The error tree of `muser_wire`. Each class has a stable `code` that crosses the wire and enters logs.

A *local* error says that the caller broke a rule; a *remote* one says that the peer did. They are
different types, so that a node never blames its peer for its own fault.
"""

from __future__ import annotations


class WireError(Exception):
    """Base of every error that this package raises."""

    code = "wire_error"


class GeometryError(WireError):
    """A caller asked for a plane, segment or schedule that cannot exist."""

    code = "geometry"


class IdentityMismatch(WireError):
    """Two nodes differ in something that must be equal [2.2].

    `name` is the field, `here` and `there` are both values as text.
    """

    code = "identity_mismatch"

    def __init__(self, name: str, here: str, there: str) -> None:
        super().__init__(f"{name} differs: {here} here, {there} at the peer")
        self.name = name
        self.here = here
        self.there = there


class LocalProtocolError(WireError):
    """This side tried a step that the protocol does not allow now."""

    code = "local_protocol"


class RemoteProtocolError(WireError):
    """The peer sent something that the protocol does not allow; nothing of it was used."""

    code = "remote_protocol"


class FrameError(RemoteProtocolError):
    """A frame is malformed, out of place or not authentic."""

    code = "frame"


class SealError(RemoteProtocolError):
    """The seal does not match what was received, or its signature does not verify."""

    code = "seal"


class HandoffAborted(RemoteProtocolError):
    """The producer ended the handoff with an abort frame. `reason` is its code."""

    code = "aborted"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"producer aborted ({reason}): {message}")
        self.reason = reason


class HandoffRefused(WireError):
    """The producer refused a handoff request before any work. `reason` is its code."""

    code = "refused"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"producer refused ({reason}): {message}")
        self.reason = reason


class TransportError(WireError):
    """The peer could not be reached, or the connection ended before the seal."""

    code = "transport"


class ProgressTimeout(TransportError):
    """The peer is connected but made no progress within its bound."""

    code = "no_progress"


class CheckpointError(WireError):
    """A model file cannot be used. The message names the file and what is wrong with it."""

    code = "checkpoint"


class FetchError(WireError):
    """A model could not be fetched. The message says from where and what to do."""

    code = "fetch"


class VerificationError(WireError):
    """A model cannot be verified: a contestant is missing or failed."""

    code = "verification"


class NumericsMismatch(WireError):
    """This device does not compute as the lane's rules say, or is asked for what the lane does not have."""

    code = "numerics"


class KernelUnavailable(WireError):
    """Kernels cannot be made or loaded on this machine; plain operations stand in."""

    code = "kernel_unavailable"
