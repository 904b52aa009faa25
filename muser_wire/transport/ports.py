"""What is wrong with a port that cannot be bound."""

from __future__ import annotations

import contextlib
import errno
import socket

from muser_wire.errors import WireError


class PortTaken(WireError):
    """A port cannot be bound. The message names it and the reason, such as who may hold it."""

    code = "port_taken"


def port_taken(command: str, host: str, port: int, error: Exception) -> PortTaken:
    """Return the error of a port that `command` could not bind; `error` says why, or the system is asked again."""
    what = f"port {port} on {host} cannot be bound"
    reason = error if isinstance(error, OSError | UnicodeError) else _asked_again(host, port)
    number = reason.errno if isinstance(reason, OSError) else None
    if isinstance(reason, socket.gaierror | UnicodeError) or number == errno.EADDRNOTAVAIL:
        return PortTaken(f"{what}: this machine does not have that address")
    if reason is None or number == errno.EADDRINUSE:
        return PortTaken(
            f"{what}: another process, perhaps a {command} that still runs, holds it (see: ss -ltnp 'sport = :{port}', "
            f"or lsof -i :{port})"
        )
    return PortTaken(f"{what}: {getattr(reason, 'strerror', None) or reason}")


def _asked_again(host: str, port: int) -> OSError | UnicodeError | None:
    """Return what the system says to a bind by hand; None where it takes it now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as tried:
        try:
            tried.bind((host, port))
        except (OSError, UnicodeError) as error:
            return error
    return None
