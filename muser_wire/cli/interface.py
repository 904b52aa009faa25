"""Which way bytes to a host go from here: interface, gateway, MTU, speed, power saving. Asks the system's own tools.

What a tool does not tell, or a tool that is not there, leaves None: nobody is blamed for what is not known.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOL_TIMEOUT_S = 5.0

Tool = Callable[[Sequence[str]], str | None]
"""Runs a command; returns what it wrote to standard output, or None where it is missing or failed."""


@dataclass(frozen=True)
class Interface:
    """The way to a host. `speed_bits` is the link's rate in bit/s; `eee`: whether Energy-Efficient Ethernet is on."""

    name: str
    source: str | None = None
    gateway: str | None = None
    mtu: int | None = None
    speed_bits: int | None = None
    wireless: bool | None = None
    eee: bool | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether the bytes never leave this machine."""
        return re.fullmatch(r"lo\d*", self.name) is not None


def run_tool(command: Sequence[str]) -> str | None:
    """See `Tool`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def interface_to(address: str, tool: Tool = run_tool, platform: str = sys.platform) -> Interface | None:
    """Return the way to an IP address, or None where the system does not say."""
    return _on_macos(address, tool) if platform == "darwin" else _on_linux(address, tool)


def _on_linux(address: str, tool: Tool, devices: Path = Path("/sys/class/net")) -> Interface | None:
    answer = tool(["ip", "-j", "route", "get", address])
    try:
        route = json.loads(answer or "[]")[0]
        name = str(route["dev"])
    except (ValueError, LookupError, TypeError):
        return None
    # A driver says -1 where a speed has no meaning.
    speed = _number(devices / name / "speed")
    return Interface(
        name=name,
        source=route.get("prefsrc"),
        gateway=route.get("gateway"),
        mtu=_number(devices / name / "mtu"),
        speed_bits=speed * 10**6 if speed is not None and speed > 0 else None,
        wireless=(devices / name / "wireless").exists() if (devices / name).exists() else None,
        eee=_ethtool_eee(tool(["ethtool", "--show-eee", name])),
    )


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _ethtool_eee(text: str | None) -> bool | None:
    """Return whether EEE is on; "enabled - inactive" is off: the other end does not take part."""
    status = re.search(r"EEE status:\s*(\S.*)", text or "")
    if status is None or "not supported" in status[1]:
        return None
    return status[1].startswith("enabled") and "inactive" not in status[1]


def _on_macos(address: str, tool: Tool) -> Interface | None:
    route = tool(["route", "-n", "get", address]) or ""
    name = re.search(r"interface: (\S+)", route)
    if name is None:
        return None
    gateway = re.search(r"gateway: ([0-9a-f.:]+)\s", route)
    details = tool(["ifconfig", name[1]]) or ""
    mtu = re.search(r"\bmtu (\d+)", details)
    source = re.search(r"\binet (\S+)", details)
    media = re.search(r"media: (.*)", details)
    ports = tool(["networksetup", "-listallhardwareports"])
    return Interface(
        name=name[1],
        source=source[1] if source else None,
        gateway=gateway[1] if gateway else None,
        mtu=int(mtu[1]) if mtu else None,
        speed_bits=_media_bits(media[1]) if media else None,
        wireless=f"Wi-Fi\nDevice: {name[1]}\n" in ports if ports is not None else None,
        eee="energy-efficient-ethernet" in media[1] if media and "base" in media[1] else None,
    )


def _media_bits(media: str) -> int | None:
    """Return the rate in bit/s of ifconfig's media line.

    >>> _media_bits("autoselect (10Gbase-T <full-duplex,energy-efficient-ethernet>)")
    10000000000
    """
    rate = re.search(r"(\d+)(G?)base", media)
    return int(rate[1]) * (10**9 if rate[2] else 10**6) if rate else None
