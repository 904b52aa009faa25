"""What can be wrong with a pairing. Every message is a line for the person who has to act on it."""

from __future__ import annotations

from muser_wire.errors import RemoteProtocolError, WireError


class PairingError(WireError):
    """Pairing, or what is stored of it, cannot be used. The message says what to do."""

    code = "pairing"


class ClockError(PairingError):
    """A certificate is not valid now, or two machines disagree about now: a clock is wrong, or years went by."""

    code = "clock"


class ExchangeError(RemoteProtocolError):
    """The other side of an interactive exchange sent what the exchange does not allow; nothing was stored."""

    code = "pairing_exchange"


class PeerRefused(RemoteProtocolError):
    """A peer is not paired, was revoked, or shows a certificate that is no longer accepted [9.5]."""

    code = "peer_refused"
