"""The nodes' configuration, as processes read it, and the HTTP port when it is not for this machine alone."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muser_wire.cli.__main__ import main as muser
from muser_wire.cli.nodes import Node, Pair, PairOptions, running_pair

START_S = 90.0
KEY = "a-key-of-this-test-0123456789"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("MUSER_HOME", str(home))
    return home


def configure(home: Path, node: str, text: str) -> Path:
    (home / f"{node}.toml").write_text(text)
    return home / f"{node}.toml"


def run_node(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)


@contextlib.contextmanager
def running(module: str, folder: Path, *flags: str) -> Iterator[Node]:
    """A node that is ready, with the flags given here alone."""
    node = Node("node", [sys.executable, "-m", module, "serve", *flags], folder, piped=False)
    try:
        node.wait_ready(START_S, lambda: None)
        yield node
    finally:
        node.stop()


@pytest.mark.parametrize("module", ["muser_prefill", "muser_decode"])
def test_a_file_alone_starts_a_node_and_a_flag_and_a_variable_change_it(
    module: str, home: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = module.removeprefix("muser_")
    ports = "control_port = 0\ndata_port = 0\n" if node == "prefill" else "port = 0\n"
    path = configure(home, node, f"config_version = 1\n[model]\nmodel = '{tiny_llama}'\n[network]\n{ports}")
    monkeypatch.setenv(f"MUSER_{node.upper()}_LOG_LEVEL", "debug")
    shown = run_node(module, "--threads", "1", "--print-config")
    assert shown.returncode == 0
    for line in (f'model = "{tiny_llama}"', f"# {path}:3", f"# environment MUSER_{node.upper()}_LOG_LEVEL"):
        assert line in shown.stdout
    assert "threads = 1 " in shown.stdout
    with running(module, tmp_path, "--threads", "1") as started:
        assert started.process.poll() is None
    assert "serving" in started.log_tail()


@pytest.mark.parametrize(("module", "library"), [("muser_prefill", "torch"), ("muser_decode", "mlx.core")])
def test_help_values_and_services_do_not_wait_for_the_library_that_computes(
    module: str, library: str, home: Path, tiny_llama: Path
) -> None:
    configure(home, module.removeprefix("muser_"), f"model.model = '{tiny_llama}'\n")
    program = (
        f"import contextlib, sys; from {module}.__main__ import main\n"
        "for argv in (['--help'], ['serve', '--print-config'], ['service', 'install', '--dry-run']):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        assert main(argv) == 0, argv\n"
        f"assert '{library}' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "config_version = 1" in done.stdout


@pytest.mark.parametrize("module", ["muser_prefill", "muser_decode"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("config_version = 2\n", "toml:1: config_version is 2, and this Muser reads up to 1"),
        ("[sizes]\nthreads = 1\nthread = 2\n", "toml:3: unknown key sizes.thread: perhaps sizes.threads is meant"),
        ("[process]\ndrain_s = '1 min'\n", "toml:2: drain_s is wrong: '1 min' is not a number of seconds"),
        ("", "--model is needed"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name_before_anything_is_loaded(
    module: str, text: str, problem: str, home: Path
) -> None:
    configure(home, module.removeprefix("muser_"), text)
    done = run_node(module)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_and_serve_start_their_nodes_whatever_the_user_s_own_are_configured_to_do(
    home: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("prefill", "decode"):
        configure(home, node, "this = 'would be refused'\n")
        monkeypatch.setenv(f"MUSER_{node.upper()}_LOG_LEVEL", "nonsense")
    options = PairOptions(tiny_llama, tmp_path, start_timeout_s=START_S, route="remote", threads=1)
    with running_pair(options) as pair:
        pair.start(lambda node: None)
        assert isinstance(pair, Pair)
        assert all(node.process.poll() is None for node in pair.nodes)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is not a loopback address: it needs --api-key-file"),
        (["--host", "0.0.0.0", "--api-key-file", "KEYS"], "it needs TLS, by --tls-cert and --tls-key or by"),
        (["--api-key-file", "LOOSE"], "has mode 0644; others can read it: chmod 600"),
        (["--api-key-file", "EMPTY"], "has no key; make one with"),
        (["--tls-cert", "KEYS", "--tls-key", "KEYS"], "holds no certificate in PEM"),
    ],
)
def test_an_http_port_that_others_could_use_is_refused_at_start(
    flags: list[str], problem: str, home: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    files = {"KEYS": (KEY, 0o600), "LOOSE": (KEY, 0o644), "EMPTY": ("", 0o600)}
    for name, (text, mode) in files.items():
        (home / name).write_text(text)
        (home / name).chmod(mode)
    done = run_node("muser_decode", "--model", str(tiny_llama), "--port", "0", *[
        str(home / flag) if flag in files else flag for flag in flags
    ])  # fmt: skip
    assert done.returncode == 2
    assert problem in done.stderr
    assert KEY not in done.stderr


Ask = Callable[..., tuple[int, dict[str, object]]]


@pytest.fixture
def open_node(home: Path, tmp_path: Path, tiny_llama: Path) -> Iterator[Node]:
    """A node for the whole network: with keys and a certificate of its own making."""
    (home / "keys.txt").write_text(f"{KEY}\n")
    (home / "keys.txt").chmod(0o600)
    text = f"""
        model.model = '{tiny_llama}'
        network = {{ host = "0.0.0.0", port = 0 }}
        access = {{ api_key_file = "keys.txt", tls_self_signed = true }}
    """
    configure(home, "decode", text)
    with running("muser_decode", tmp_path, "--threads", "1") as node:
        yield node


def ask(node: Node, home: Path, path: str, **headers: str) -> tuple[int, dict[str, object]]:
    context = ssl.create_default_context(cafile=home / "http.crt")
    with contextlib.closing(
        http.client.HTTPSConnection("localhost", node.ports["port"], timeout=30, context=context)
    ) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_an_open_node_serves_whoever_has_a_key_over_tls_alone(
    open_node: Node, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = open_node.ports["port"]
    assert ask(open_node, home, "/health") == (200, {"status": "ok"})
    status, answer = ask(open_node, home, "/v1/models")
    assert status == 401
    assert isinstance(answer["error"], dict)
    assert answer["error"]["code"] == "invalid_api_key"
    assert ask(open_node, home, "/v1/models", authorization=f"Bearer {KEY}")[0] == 200
    assert ask(open_node, home, "/v1/models", **{"x-api-key": KEY, "host": "evil.example"})[0] == 403
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as plain:
        plain.request("GET", "/health")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()

    chat = ["chat", "--url", f"https://localhost:{port}", "--tls-cert", str(home / "http.crt"), "--max-tokens", "3"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert muser([*chat, "--api-key-file", str(home / "keys.txt")]) == 0
    assert "3 answered" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert muser(chat) == 2
    assert "An API key is needed" in capsys.readouterr().err
    assert KEY not in open_node.log_file.read_text()


def test_keys_and_certificate_are_changed_without_a_restart(open_node: Node, home: Path) -> None:
    other = "another-key-of-this-test-0123456789"
    (home / "keys.txt").write_text(other)
    open_node.process.send_signal(signal.SIGHUP)
    wait_for_log(open_node, "config_read_again")
    assert ask(open_node, home, "/ready", authorization=f"Bearer {KEY}")[0] == 401
    assert ask(open_node, home, "/ready", authorization=f"Bearer {other}")[0] == 200
    (home / "keys.txt").chmod(0o644)
    open_node.process.send_signal(signal.SIGHUP)
    wait_for_log(open_node, "config_kept key=api_keys")
    assert ask(open_node, home, "/ready", authorization=f"Bearer {other}")[0] == 200


def wait_for_log(node: Node, text: str) -> None:
    for _ in range(600):
        if text in node.log_file.read_text():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.process.wait(0.05)
    raise AssertionError(node.log_tail())
