"""What is wrong with a node's configuration."""

from __future__ import annotations

from muser_wire.errors import WireError


class SettingsError(WireError):
    """A value, a key or a file cannot be used. The message names it, its place, and what would do."""

    code = "settings"
