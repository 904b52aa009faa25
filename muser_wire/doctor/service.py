"""Checks of the services that keep nodes running: systemd's unit, launchd's agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muser_wire.doctor.finding import Finding, bad, ok, unknown, warn
from muser_wire.services.errors import ServiceError
from muser_wire.services.launchd import Launchd
from muser_wire.services.program import run_tool
from muser_wire.services.systemd import UNIT, Systemd

Tool = Callable[[Sequence[str]], str]


def check_unit(systemd: Systemd, tool: Tool = run_tool) -> Finding:
    """Check the producer's unit."""
    name = "prefill: service"
    if not systemd.unit_file.exists():
        return ok(name, "not installed: the node is started by hand")
    try:
        told = tool(["systemctl", "show", "--property=ActiveState,SubState,NRestarts", UNIT])
    except ServiceError as error:
        return unknown(name, str(error))
    state = dict(line.split("=", 1) for line in told.split() if "=" in line)
    value = f"{state.get('ActiveState', '?')} ({state.get('SubState', '?')}), {state.get('NRestarts', '?')} restarts"
    if state.get("ActiveState") in {"active", "reloading"}:
        return ok(name, value)
    if state.get("ActiveState") == "activating" and state.get("SubState", "").startswith("start"):
        return warn(
            name, value, "it starts: ask again once the model is loaded; muser-prefill service logs says how far"
        )
    return bad(name, value, "muser-prefill service logs says why; then systemctl restart " + UNIT)


def check_agent(launchd: Launchd, tool: Tool = run_tool) -> Finding:
    """Check the decode node's agent."""
    name = "decode: service"
    if not launchd.plist_file.exists():
        return ok(name, "not installed: the node is started by hand")
    try:
        told = tool(["launchctl", "print", launchd.target])
    except ServiceError as error:
        return bad(name, str(error), "muser-decode service install loads it again")
    state = next(
        (line.split("=", 1)[1].strip() for line in told.splitlines() if line.strip().startswith("state =")), "?"
    )
    if state == "running":
        return ok(name, state)
    return bad(name, state, f"muser-decode service logs says why, or see {launchd.log_file}")
