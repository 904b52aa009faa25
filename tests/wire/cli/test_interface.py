"""What the system's tools say, read from texts that they wrote."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from muser_wire.cli.interface import Interface, Tool, _on_linux, interface_to, run_tool

ROUTE = '[{"dst":"10.0.0.2","dev":"enp1s0","prefsrc":"10.0.0.1","flags":[],"uid":0,"cache":[]}]'
ROUTED = '[{"dst":"10.9.0.2","gateway":"10.0.0.254","dev":"enp1s0","prefsrc":"10.0.0.1","flags":[]}]'
EEE = "EEE settings for enp1s0:\n\tEEE status: {}\n\tTx LPI: 17 (us)\n"
MAC_ROUTE = "   route to: 10.0.0.1\ndestination: 10.0.0.0\n  interface: en8\n      flags: <UP,DONE>\n"
MAC_ROUTED = "   route to: 10.9.0.1\ndestination: default\n    gateway: 10.0.0.254\n  interface: en8\n"
MAC_INTERFACE = (
    "en8: flags=8863<UP,BROADCAST> mtu 9000\n\tinet 10.0.0.2 netmask 0xffffff00\n"
    "\tmedia: autoselect (10Gbase-T <full-duplex{}>)\n\tstatus: active\n"
)
MAC_PORTS = "\nHardware Port: Wi-Fi\nDevice: en0\nEthernet Address: aa\n\nHardware Port: Ethernet\nDevice: en8\n"


def tool(answers: dict[str, str]) -> Tool:
    """Answers by the command's name; other tools are missing."""

    def run(command: Sequence[str]) -> str | None:
        return answers.get(command[0])

    return run


def device(root: Path, **values: str) -> Path:
    folder = root / "enp1s0"
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(value + "\n")
    return root


def test_linux_tells_interface_mtu_and_speed(tmp_path: Path) -> None:
    device(tmp_path, mtu="9000", speed="10000")
    way = _on_linux("10.0.0.2", tool({"ip": ROUTE, "ethtool": EEE.format("disabled")}), tmp_path)
    assert way == Interface("enp1s0", "10.0.0.1", None, 9000, 10_000_000_000, False, False)


def test_linux_tells_a_gateway(tmp_path: Path) -> None:
    way = _on_linux("10.9.0.2", tool({"ip": ROUTED}), tmp_path)
    assert way == Interface("enp1s0", "10.0.0.1", "10.0.0.254")


@pytest.mark.parametrize(
    ("status", "on"),
    [("enabled - active", True), ("enabled - inactive", False), ("disabled", False), ("not supported", None)],
)
def test_ethtool_s_word_on_energy_saving(tmp_path: Path, status: str, on: bool | None) -> None:
    way = _on_linux("10.0.0.2", tool({"ip": ROUTE, "ethtool": EEE.format(status)}), device(tmp_path))
    assert way is not None
    assert way.eee is on


def test_a_speed_that_has_no_meaning_is_unknown(tmp_path: Path) -> None:
    way = _on_linux("10.0.0.2", tool({"ip": ROUTE}), device(tmp_path, speed="-1"))
    assert way is not None
    assert (way.speed_bits, way.mtu) == (None, None)


@pytest.mark.parametrize("answer", [None, "", "[]", "[{}]", "{}", "Error: ..."])
def test_a_routing_tool_that_is_missing_or_babbles_is_unknown(answer: str | None, tmp_path: Path) -> None:
    answers = {} if answer is None else {"ip": answer}
    assert _on_linux("10.0.0.2", tool(answers), tmp_path) is None


def test_macos_tells_the_same() -> None:
    answers = {
        "route": MAC_ROUTE,
        "ifconfig": MAC_INTERFACE.format(",energy-efficient-ethernet"),
        "networksetup": MAC_PORTS,
    }
    way = interface_to("10.0.0.1", tool(answers), "darwin")
    assert way == Interface("en8", "10.0.0.2", None, 9000, 10_000_000_000, False, True)
    answers |= {"route": MAC_ROUTED.replace("en8", "en0"), "ifconfig": MAC_INTERFACE.format("")}
    way = interface_to("10.9.0.1", tool(answers), "darwin")
    assert way is not None
    assert (way.gateway, way.wireless, way.eee) == ("10.0.0.254", True, False)
    assert interface_to("10.9.0.1", tool({}), "darwin") is None


def test_loopback_is_known_by_name() -> None:
    assert [Interface(name).is_loopback for name in ("lo", "lo0", "lonely0")] == [True, True, False]


def test_a_missing_tool_is_none_and_a_real_one_answers() -> None:
    assert run_tool(["no-such-tool-anywhere"]) is None
    assert run_tool([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert run_tool([sys.executable, "-c", "print(5)"]) == "5\n"
