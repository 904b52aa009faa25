from __future__ import annotations

import socket
from typing import Any

import pytest

from muser_wire.doctor.finding import Finding, Verdict
from muser_wire.doctor.node import check_node, check_port


def facts(**changed: Any) -> dict[str, Any]:
    return {
        "configuration": {
            "file": "",
            "model": "/models/m",
            "ports": {"port": ["127.0.0.1", 0]},
            "needs_gpu": True,
        },
        "device": {"name": "GPU", "is_gpu": True, "system": {}, "total_nbytes": 10**10, "available_nbytes": 9 * 10**9},
        "model": {
            "family": "llama",
            "layers": 2,
            "encoding": "Q4_1",
            "nbytes": 10**9,
            "lane": "native",
            "kernels": ["attention"],
            "refused": [],
            "identities": {"weights_digest": "ab" * 32},
        },
        **changed,
    }


def found(told: dict[str, Any], *, named: bool = True) -> dict[str, Finding]:
    return {one.name: one for one in check_node("prefill", told, lambda *_: False, named=named)}


def test_a_node_that_is_well() -> None:
    rows = found(facts())
    assert {one.verdict for one in rows.values()} == {Verdict.OK}
    assert "llama, 2 layers, Q4_1, 1.00 GB, weights abababababababab" in rows["prefill: model"].value
    assert rows["prefill: kernels"].value == "admitted: attention"
    assert rows["prefill: device memory"].value == "10.0 GB, 9.0 GB free"


def test_a_configuration_that_cannot_be_read_ends_it() -> None:
    (row,) = found({"error": "--model is needed"}).values()
    assert (row.verdict, row.value) == (Verdict.BAD, "--model is needed")


def test_of_a_node_that_nobody_named_nothing_is_demanded() -> None:
    (row,) = found({"error": "--model is needed"}, named=False).values()
    assert row.verdict is Verdict.UNKNOWN
    assert "--node prefill" in row.advice


def test_no_gpu_is_a_warning_where_one_belongs() -> None:
    device = {"name": "CPU", "is_gpu": False, "system": {}}
    assert found(facts(device=device))["prefill: device"].verdict is Verdict.WARN
    told = facts(device=device)
    told["configuration"]["needs_gpu"] = False
    assert found(told)["prefill: device"].verdict is Verdict.OK


def test_a_device_or_a_model_that_failed_is_named() -> None:
    rows = found(facts(device={"error": "no CUDA"}, model={"error": "a tensor is missing"}))
    assert (rows["prefill: device"].verdict, rows["prefill: device"].value) == (Verdict.BAD, "no CUDA")
    assert rows["prefill: model"].verdict is Verdict.BAD
    assert "/models/m: a tensor is missing" in rows["prefill: model"].value


def test_a_model_that_does_not_fit() -> None:
    told = facts()
    told["device"]["total_nbytes"] = int(1.1e9)
    assert found(told)["prefill: room for the model"].verdict is Verdict.BAD


def test_a_kernel_that_was_refused_is_told() -> None:
    told = facts()
    told["model"].update(kernels=[], refused=["name=linear error=1"])
    row = found(told)["prefill: kernels"]
    assert (row.verdict, row.value) == (Verdict.WARN, "refused: name=linear error=1")


def test_keys_and_certificate_of_the_http_port() -> None:
    assert "prefill: keys and certificate" not in found(facts(access={}))
    row = found(facts(access={"keys": "/k", "certificate": "/c"}))["prefill: keys and certificate"]
    assert (row.verdict, row.value) == (Verdict.OK, "keys /k, certificate /c")
    row = found(facts(access={"error": "/k has mode 0644"}))["prefill: keys and certificate"]
    assert (row.verdict, row.value) == (Verdict.BAD, "/k has mode 0644")
    assert row.advice


def test_a_port_is_asked_about_by_its_name(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = facts()
        told["configuration"]["ports"] = {"control_port": ["127.0.0.1", free_port], "data_port": ["127.0.0.1", port]}
        asked: list[tuple[str, str, int]] = []
        list(check_node("prefill", told, lambda *to: bool(asked.append(to)), named=True))
    assert asked == [("data_port", "127.0.0.1", port)]


def test_a_port_that_is_taken_by_a_stranger_by_us_and_by_nobody(free_port: int) -> None:
    assert check_port("p", "127.0.0.1", free_port, lambda *_: False).verdict is Verdict.OK
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = check_port("p", "127.0.0.1", port, lambda *_: False)
        assert taken.verdict is Verdict.BAD
        assert str(port) in taken.advice
        asked: list[tuple[str, int]] = []
        assert check_port("p", "127.0.0.1", port, lambda *to: bool(asked.append(to)) or True).verdict is Verdict.OK
        assert asked == [("127.0.0.1", port)]


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_this_machine_does_not_have(host: str, free_port: int) -> None:
    assert check_port("p", host, free_port, lambda *_: False).verdict is Verdict.BAD
