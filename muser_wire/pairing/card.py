"""What a node shows of itself: role, name, node key, certificates. Text that travels by hand or in the exchange [9.3].

A card holds nothing secret. Reading one checks everything but the time, and that it is the right
node's: that is what people compare fingerprints for.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from muser_wire.pairing.certificates import BINDING_NBYTES, BoundCertificate, fingerprint, verify
from muser_wire.pairing.errors import PairingError
from muser_wire.pairing.reading import Fields, parse_object

CARD_VERSION = 1
MAX_CARD_NBYTES = 12 << 10
MAX_CERTIFICATES = 2
"""The one in use, and during a rotation the next."""

NODE_KEY_NBYTES = 32
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names are printed on terminals: nothing that a terminal would act on."""


BASE64 = re.compile(r"[A-Za-z0-9+/=]{1,4096}")


class Role(Enum):
    """What a node is on the wire."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The role that this one pairs with."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True)
class CardCertificate:
    """A certificate, and until when (seconds since 1970) peers take it; None: as long as it is valid."""

    certificate: BoundCertificate
    accepted_until_s: int | None = None


@dataclass(frozen=True)
class Card:
    """A node as its peers know it. Certificates are the oldest first."""

    role: Role
    name: str
    node_key: bytes
    certificates: tuple[CardCertificate, ...]

    @property
    def fingerprint(self) -> str:
        """The node's name in logs and for `muser pair revoke`."""
        return fingerprint(self.node_key)

    def to_json(self) -> dict[str, Any]:
        """Return the card as plain values."""
        return {
            "version": CARD_VERSION,
            "role": self.role.value,
            "name": self.name,
            "node_key": self.node_key.hex(),
            "certificates": [
                {**certificate_fields(one.certificate), "accepted_until_s": one.accepted_until_s}
                for one in self.certificates
            ],
        }

    def encode(self) -> bytes:
        """Return the card as text."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True).encode("ascii") + b"\n"

    @classmethod
    def decode(cls, text: bytes) -> Card:
        """Read a card; see `from_json`."""
        if len(text) > MAX_CARD_NBYTES:
            raise PairingError(f"a card has at most {MAX_CARD_NBYTES} bytes, this one {len(text)}")
        return cls.from_json(parse_object(text, "the card"))

    @classmethod
    def from_json(cls, value: Any) -> Card:
        """Return the card in plain values, every certificate verified against the node key.

        Raises:
            PairingError: a field is absent, unknown or wrong; the message names it.
        """
        fields = Fields(value, "card", {"version", "role", "name", "node_key", "certificates"}, CARD_VERSION)
        role = fields.text("role", re.compile("prefill|decode"))
        node_key = fields.blob("node_key", NODE_KEY_NBYTES)
        entries = fields["certificates"]
        if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_CERTIFICATES:
            raise PairingError(f"card.certificates is not a list of 1 to {MAX_CERTIFICATES}")
        certificates = tuple(_card_certificate(entry, node_key) for entry in entries)
        return cls(Role(role), fields.text("name", NAME), node_key, certificates)


def certificate_fields(certificate: BoundCertificate) -> dict[str, str]:
    """Return a certificate as plain values, as `read_certificate` takes them."""
    return {"der": base64.b64encode(certificate.der).decode("ascii"), "binding": certificate.binding.hex()}


def read_certificate(fields: Fields, node_key: bytes) -> BoundCertificate:
    """Return the certificate in the fields `der` and `binding`, verified against the node key.

    Raises:
        PairingError: it is damaged, or not bound by that key.
    """
    try:
        der = base64.b64decode(fields.text("der", BASE64), validate=True)
    except binascii.Error as error:
        raise PairingError("the certificate is not base64") from error
    certificate = BoundCertificate(der, fields.blob("binding", BINDING_NBYTES))
    verify(certificate, node_key)
    return certificate


def _card_certificate(value: Any, node_key: bytes) -> CardCertificate:
    fields = Fields(value, "certificate", {"der", "binding", "accepted_until_s"})
    return CardCertificate(read_certificate(fields, node_key), fields.time("accepted_until_s"))
