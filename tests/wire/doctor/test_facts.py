from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from muser_wire.cli.__main__ import main
from muser_wire.doctor.facts import RefusedKernels, ask, gather, identity_facts, system_memory
from muser_wire.errors import WireError
from muser_wire.identities import Digest, Identities


def test_a_part_that_fails_has_its_error_and_the_next_one_is_asked() -> None:
    def fails() -> dict[str, str]:
        raise WireError("no model")

    def breaks() -> dict[str, str]:
        raise RuntimeError

    parts = {"model": fails, "device": lambda: {"name": "CPU"}, "other": breaks}
    assert gather(parts, (RuntimeError,)) == {
        "model": {"error": "no model"},
        "device": {"name": "CPU"},
        "other": {"error": "RuntimeError"},
    }
    with pytest.raises(RuntimeError):
        gather(parts, ())


def test_identities_are_told_whole() -> None:
    one = Digest(bytes(range(32)))
    told = identity_facts(Identities(one, one, "kv", "native", one, 64, one))
    assert told["weights_digest"] == bytes(range(32)).hex()
    assert (told["kv_layout"], told["lane"], told["chunk_tokens"]) == ("kv", "native", "64")


def test_memory_of_the_system(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:  3 kB\nMemAvailable:    400 kB\n")
    assert system_memory(meminfo) == {"total_nbytes": 1_024_000, "available_nbytes": 409_600}
    assert system_memory(tmp_path / "none") == {}


def test_what_kernel_admission_refused_is_kept() -> None:
    refused = RefusedKernels()
    log = logging.getLogger("muser_prefill.test_facts")
    log.addHandler(refused)
    log.warning("kernel_refused name=%s error=%.3g", "linear", 1.0)
    log.warning("other")
    assert refused.seen == ["name=linear error=1"]


@pytest.mark.parametrize("node", ["prefill", "decode"])
@pytest.mark.slow
def test_a_node_says_what_it_would_be(node: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"MUSER_{node.upper()}_MODEL", str(tiny_llama))
    told = ask(node, "none")
    assert told["configuration"]["model"] == str(tiny_llama)
    assert told["device"]["name"].startswith(("CPU", "NVIDIA", "Apple"))
    assert (told["model"]["family"], told["model"]["layers"], told["model"]["lane"]) == ("llama", 6, "native")
    assert len(told["model"]["identities"]["weights_digest"]) == 64
    assert ask(node, "none", model=False)["model"] == {}


def test_every_port_that_a_node_binds_is_told_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"MODEL": "m", "METRICS_PORT": "9", "METRICS_HOST": "127.0.0.3"}.items():
        monkeypatch.setenv(f"MUSER_PREFILL_{name}", text)
    assert ask("prefill", "none", model=False)["configuration"]["ports"] == {
        "control_port": ["127.0.0.1", 4950],
        "data_port": ["127.0.0.1", 4951],
        "metrics_port": ["127.0.0.3", 9],
    }
    monkeypatch.delenv("MUSER_PREFILL_METRICS_PORT")
    assert set(ask("prefill", "none", model=False)["configuration"]["ports"]) == {"control_port", "data_port"}
    monkeypatch.setenv("MUSER_DECODE_MODEL", "m")
    assert ask("decode", "none", model=False)["configuration"]["ports"] == {"port": ["127.0.0.1", 4949]}


@pytest.mark.parametrize("node", ["prefill", "decode"])
def test_a_node_without_a_configuration_says_why(node: str, tmp_path: Path) -> None:
    assert "no such file" in ask(node, str(tmp_path / "none.toml"))["error"]


def test_a_decode_node_says_whether_its_keys_and_certificate_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path))
    keys, config = tmp_path / "api-keys", tmp_path / "decode.toml"
    keys.write_text("k" * 40 + "\n")
    keys.chmod(0o644)
    config.write_text("[model]\nmodel = 'none'\n[access]\napi_key_file = 'api-keys'\ntls_self_signed = true\n")
    assert "mode 0644" in ask("decode", str(config), model=False)["access"]["error"]
    keys.chmod(0o600)
    assert ask("decode", str(config), model=False)["access"] == {"keys": str(keys)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api-keys", "decode.toml"], "it made a certificate"


@pytest.mark.slow
def test_the_whole_check_of_both_nodes(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free_port: int,
) -> None:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path))
    for node in ("PREFILL", "DECODE"):
        monkeypatch.setenv(f"MUSER_{node}_MODEL", str(tiny_llama))
    monkeypatch.setenv("MUSER_DECODE_PRODUCER", f"127.0.0.1:{free_port}")
    for key in ("MUSER_PREFILL_CONTROL_PORT", "MUSER_PREFILL_DATA_PORT", "MUSER_DECODE_PORT"):
        monkeypatch.setenv(key, "0")
    assert main(["doctor", "--json", "--config", "none"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["findings"]}
    assert [name for name, row in rows.items() if row["verdict"] == "bad"] == [f"producer 127.0.0.1:{free_port}"]
    assert rows["decode: model"]["weights_digest"] == rows["prefill: model"]["weights_digest"]
