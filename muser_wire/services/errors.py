"""What can go wrong with a service."""

from __future__ import annotations

from muser_wire.errors import WireError


class ServiceError(WireError):
    """A service cannot be installed, removed or looked at. The message says why, and what would do."""

    code = "service"
