"""The interactive exchange, without IO: two machines show each other their cards, two people compare a code [9.3].

Each side first commits to a fresh nonce and its card. The caller reveals them once it holds the listener's
commitment, the listener only after the caller has shown what it committed to. So whoever sits in between must
choose what to show before it knows what the code will be: the two codes differ, but for one chance in a
million. A caller learns nothing of a listener before it has shown a card that counts, and a listener that has
revealed must not take another caller: that would be a second try.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import Enum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from muser_wire.auth import NodeKey
from muser_wire.pairing.card import MAX_CARD_NBYTES, Card
from muser_wire.pairing.certificates import check_clocks, check_time
from muser_wire.pairing.errors import ClockError, ExchangeError, PairingError

NONCE_NBYTES = 32
COMMITMENT_NBYTES = 32
TIME_NBYTES = 8
SIGNATURE_NBYTES = 64
CODE_DIGITS = 6
"""What people compare: a man in the middle has one try, and one chance in a million."""

COMMITMENT_LABEL = b"muser v1 pairing commitment"
TRANSCRIPT_LABEL = b"muser v1 pairing transcript"
CODE_INFO = b"muser v1 pairing code"
CONFIRMATION_LABEL = b"muser v1 pairing confirmation"


class Side(Enum):
    """Who called whom. It is in every hash and signature, so nothing can be sent back to its maker."""

    LISTENER = b"listener"
    CALLER = b"caller"

    @property
    def other(self) -> Side:
        """The side at the other end."""
        return Side.CALLER if self is Side.LISTENER else Side.LISTENER


class Kind(Enum):
    """What a message is: its first byte."""

    COMMIT = 1
    REVEAL = 2
    CONFIRM = 3
    DECLINE = 4


BODY_NBYTES = {
    Kind.COMMIT: (COMMITMENT_NBYTES, COMMITMENT_NBYTES),
    Kind.REVEAL: (NONCE_NBYTES + TIME_NBYTES + 1, NONCE_NBYTES + TIME_NBYTES + MAX_CARD_NBYTES),
    Kind.CONFIRM: (SIGNATURE_NBYTES, SIGNATURE_NBYTES),
    Kind.DECLINE: (1, 1),
}
"""Least and most bytes after the first, for each kind."""

MAX_MESSAGE_NBYTES = 1 + BODY_NBYTES[Kind.REVEAL][1]


class Reason(Enum):
    """Why a side declines: the byte that says so."""

    PERSON = 0
    CLOCK = 1
    CARD = 2


DECLINED = {
    Reason.CLOCK.value: ": the clocks of the two machines differ, or this one's certificate is not valid by that clock",
    Reason.CARD.value: ": it cannot take this machine's card, and shows why",
}
"""What a reason adds to the message here; the words are this machine's, never the other's."""


class State(Enum):
    """Where an exchange is. Only PAIRED says that both people agreed."""

    COMMITTED = "committed"
    BOUND = "both have committed"
    COMPARING = "comparing"
    AGREED_HERE = "agreed here"
    AGREED_THERE = "agreed there"
    PAIRED = "paired"
    FAILED = "failed"


@dataclass(frozen=True)
class Message:
    """What the peer sent, within its bounds; nothing of it is believed yet."""

    kind: Kind
    body: bytes


@dataclass(frozen=True)
class Agreed:
    """The person here says that the codes are equal."""


Event = Kind | type[Agreed]

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.COMMITTED, Kind.COMMIT): State.BOUND,
    (State.BOUND, Kind.REVEAL): State.COMPARING,
    (State.COMPARING, Agreed): State.AGREED_HERE,
    (State.COMPARING, Kind.CONFIRM): State.AGREED_THERE,
    (State.AGREED_HERE, Kind.CONFIRM): State.PAIRED,
    (State.AGREED_THERE, Agreed): State.PAIRED,
}
"""What may happen when. Anything else, a decline among it, ends the exchange."""


def parse_message(raw: bytes) -> Message:
    """Return the message in `raw`.

    Raises:
        ExchangeError: its kind is unknown or its size is not that kind's.
    """
    known = {kind.value: kind for kind in Kind}
    kind = known.get(raw[0]) if raw else None
    if kind is None:
        raise ExchangeError("the other side speaks another protocol than Muser's pairing")
    least, most = BODY_NBYTES[kind]
    if not least <= len(raw) - 1 <= most:
        raise ExchangeError(f"a {kind.name.lower()} message has {len(raw) - 1} bytes, not {least}..{most}")
    return Message(kind, raw[1:])


@dataclass(frozen=True)
class Showing:
    """What one side reveals. `now_s` is its clock, in seconds since 1970; `card` is as encoded."""

    nonce: bytes
    now_s: int
    card: bytes

    def encode(self) -> bytes:
        """Return the body of a reveal."""
        return self.nonce + self.now_s.to_bytes(TIME_NBYTES, "big") + self.card

    @classmethod
    def decode(cls, body: bytes) -> Showing:
        """Return what a reveal's body shows."""
        now_s = int.from_bytes(body[NONCE_NBYTES : NONCE_NBYTES + TIME_NBYTES], "big")
        return cls(body[:NONCE_NBYTES], now_s, body[NONCE_NBYTES + TIME_NBYTES :])

    def commitment(self, side: Side) -> bytes:
        """Return the digest that binds `side` to this before it is shown."""
        return hashlib.sha256(COMMITMENT_LABEL + side.value + self.encode()).digest()


class Exchange:
    """One side of one exchange. Bytes to send are what its methods return, in order.

    `nonce` is 32 fresh random bytes, used for this exchange alone. `has_revealed` says that the other side may
    know the code: whatever happens next, this was its one try.
    """

    def __init__(self, side: Side, node_key: NodeKey, card: Card, nonce: bytes, now_s: float) -> None:
        self._side = side
        self._node_key = node_key
        self._role = card.role
        self._now_s = now_s
        self._ours = Showing(nonce, int(now_s), card.encode())
        self._their_commitment = b""
        self._transcript = b""
        self._peer: Card | None = None
        self._code = ""
        self.state = State.COMMITTED
        self.has_revealed = False

    def begin(self) -> bytes:
        """Return the commitment, the first message of each side."""
        return bytes([Kind.COMMIT.value]) + self._ours.commitment(self._side)

    @property
    def peer(self) -> Card:
        """The other side's card, once it is shown."""
        if self._peer is None:
            raise PairingError("the other side has not shown its card yet")
        return self._peer

    @property
    def code(self) -> str:
        """The code that both people must see, in two groups of digits, once both sides have revealed."""
        if not self._code:
            raise PairingError("there is no code before both sides have shown their cards")
        return self._code

    def receive(self, raw: bytes) -> bytes:
        """Take one message; return what to send now, perhaps nothing.

        Raises:
            ExchangeError: the other side declined, or broke a rule.
            PairingError: its card or its clock cannot be accepted.
        """
        try:
            return self._take(parse_message(raw))
        except (ExchangeError, PairingError):
            self.state = State.FAILED
            raise

    def agree(self) -> bytes:
        """Note that the person here sees equal codes; return the confirmation to send."""
        self._step(Agreed)
        return bytes([Kind.CONFIRM.value]) + self._node_key.sign(self._confirmation(self._side))

    def decline(self, error: PairingError | None = None) -> bytes:
        """End the exchange, for `error` or because the person here said no; return the message that says so."""
        self.state = State.FAILED
        reason = Reason.PERSON
        if error is not None:
            reason = Reason.CLOCK if isinstance(error, ClockError) else Reason.CARD
        return bytes([Kind.DECLINE.value, reason.value])

    def _take(self, message: Message) -> bytes:
        if message.kind is Kind.DECLINE:
            raise ExchangeError("the other side declined" + DECLINED.get(message.body[0], ""))
        self._step(message.kind)
        if message.kind is Kind.COMMIT:
            self._their_commitment = message.body
            return self._reveal() if self._side is Side.CALLER else b""
        if message.kind is Kind.REVEAL:
            self._see(Showing.decode(message.body))
            return self._reveal() if self._side is Side.LISTENER else b""
        self._check_confirmation(message.body)
        return b""

    def _reveal(self) -> bytes:
        self.has_revealed = True
        return bytes([Kind.REVEAL.value]) + self._ours.encode()

    def _step(self, event: Event) -> None:
        before, self.state = self.state, State.FAILED
        following = TRANSITIONS.get((before, event))
        if following is None:
            raise ExchangeError(
                f"{event.__name__ if isinstance(event, type) else event.name} does not follow {before.value}"
            )
        self.state = following

    def _see(self, theirs: Showing) -> None:
        if not hmac.compare_digest(theirs.commitment(self._side.other), self._their_commitment):
            raise ExchangeError("the other side shows something else than it committed to")
        check_clocks(self._now_s, theirs.now_s)
        peer = Card.decode(theirs.card)
        # The newest is the one to come: an older one may have ended since it was replaced.
        check_time(peer.certificates[-1].certificate, self._now_s, "the peer's")
        if peer.role is self._role:
            raise PairingError(f"both machines say {peer.role.value}: one must pair as prefill, the other as decode")
        if peer.node_key == self._node_key.public_bytes:
            raise PairingError("the other side shows this node's own key")
        self._peer = peer
        self._finish_transcript(theirs)

    def _finish_transcript(self, theirs: Showing) -> None:
        shown = {self._side: self._ours, self._side.other: theirs}
        hashed = hashlib.sha256(TRANSCRIPT_LABEL)
        for side in (Side.LISTENER, Side.CALLER):
            # Commitments have one length, so the pieces cannot be cut otherwise.
            hashed.update(shown[side].commitment(side))
        self._transcript = hashed.digest()
        nonces = shown[Side.LISTENER].nonce + shown[Side.CALLER].nonce
        derived = HKDF(hashes.SHA256(), 8, salt=self._transcript, info=CODE_INFO).derive(nonces)
        digits = f"{int.from_bytes(derived, 'big') % 10**CODE_DIGITS:0{CODE_DIGITS}}"
        self._code = f"{digits[:3]} {digits[3:]}"

    def _confirmation(self, side: Side) -> bytes:
        return CONFIRMATION_LABEL + side.value + self._transcript

    def _check_confirmation(self, signature: bytes) -> None:
        try:
            Ed25519PublicKey.from_public_bytes(self.peer.node_key).verify(
                signature, self._confirmation(self._side.other)
            )
        except InvalidSignature as error:
            raise ExchangeError("the confirmation is not signed with the other side's node key") from error
