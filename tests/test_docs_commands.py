"""Every command of README.md and docs/operations.md is run, on a tiny model and with machines that are folders.

Over 400 lines: a runner for each command, which are read side by side with the pages.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documented import Running, Stage, commands_of, documented, filled, has, type_into, wait_for
from made_serve import ROOT, made_serve

from muser_wire.home import muser_home

HOST = "127.0.0.2"
"""What one machine is to the other: an address that is not loopback to Muser, and is this machine all the same."""

CODE = r"Code: (?:\x1b\[\d+m)?(\d{3} \d{3})"
FINGERPRINT = r"fingerprint ((?:[0-9a-f]{4} ){7}[0-9a-f]{4})"
UNIT = "muser-prefill"

NOT_HERE = {
    "make test": "it would run this test",
    "python3 -m venv .venv && . .venv/bin/activate": "the tests run in such an environment",
    "pip install -c constraints.txt '.[prefill]'": "fetches gigabytes; test_install.py resolves it for the GB10",
    "pip install -c constraints.txt '.[decode]'": "fetches; test_install.py resolves it for the Mac",
    "pip install 'muser[discovery]'": "fetches",
    "systemctl reload muser-prefill": "takes a system that systemd has started",
    "systemctl reset-failed muser-prefill": "takes a system that systemd has started",
    "systemd-analyze security muser-prefill": "takes an installed unit; wire/services/test_systemd.py rates the text",
    "sudo sysctl iogpu.wired_limit_mb=N": "a setting of macOS",
    "caffeinate -s": "a command of macOS",
}
"""Commands that cannot be run in a test, and why. What they name is checked all the same, below."""


class Machines(Stage):
    """The stage's machines: one alone, two that are paired, two that exchange cards, one with an open HTTP port."""

    model: Path

    @functools.cached_property
    def alone(self) -> Running:
        """A producer on loopback."""
        return self.serve(filled("muser-prefill serve --model PATH", PATH=self.model), self.folder / "alone")

    @functools.cached_property
    def made(self) -> str:
        """Both nodes as `make serve` runs them: the URL."""
        return self.cleanup.enter_context(made_serve(self.model, self.folder / "made.log"))

    @property
    def made_port(self) -> str:
        return self.made.rpartition(":")[2]

    @functools.cached_property
    def paired(self) -> tuple[Path, Path]:
        """The homes of two machines after `muser pair listen` and `muser pair connect`: producer, consumer."""
        homes = self.folder / "gb10", self.folder / "mac"
        listener = self.start(f"muser pair listen --host {HOST} --port 0", homes[0])
        port = wait_for(listener, r"Listening on \S+ port (\d+)")[1]
        connect = filled("muser pair connect HOST:4952", **{"HOST:4952": f"{HOST}:{port}"})
        caller = self.start(connect, homes[1])
        assert wait_for(listener, CODE)[1] == wait_for(caller, CODE)[1]
        for one in (listener, caller):
            type_into(one, "y")
        assert [one.process.wait(30.0) for one in (listener, caller)] == [0, 0]
        return homes

    @functools.cached_property
    def producer(self) -> Running:
        """The paired producer, on an address that needs it."""
        line = filled("muser-prefill serve --model PATH --host ADDRESS", PATH=self.model, ADDRESS=HOST)
        return self.serve(line, self.paired[0])

    @property
    def control(self) -> str:
        return f"{HOST}:{self.producer.ports['control_port']}"

    @functools.cached_property
    def cards(self) -> tuple[Path, Path]:
        """The homes of two machines that have each other's card."""
        homes = self.folder / "card-gb10", self.folder / "card-mac"
        for home, role in zip(homes, ("prefill", "decode"), strict=True):
            self.run(f"muser pair export {home}.card --role {role}", home)
        for home, other in (homes, homes[::-1]):
            self.run(f"muser pair import {other}.card", home)
        return homes

    @functools.cached_property
    def rotating(self) -> Path:
        """The home of a machine in the middle of a rotation."""
        home = self.folder / "rotating"
        self.run(f"muser pair export {home}.card --role decode", home)
        assert "takes over on" in self.run("muser pair rotate", home)
        return home

    @functools.cached_property
    def open_node(self) -> Running:
        """A decode node that serves the network, with the user's key."""
        self.run(KEYS)
        line = f"muser-decode serve --model {self.model} --host 0.0.0.0 --api-key-file ~/.muser/api-keys"
        return self.serve(f"{line} --tls-self-signed")

    @functools.cached_property
    def root(self) -> Path:
        """A system that does not run, with the unit in it."""
        (self.home / "prefill.toml").write_text(f"[model]\nmodel = '{self.model}'\n")
        system = self.folder / "system"
        install = f'muser-prefill service install --user "$USER" --home {self.home} --root {system}'
        assert "installed" in self.run(install)
        return system

    @functools.cached_property
    def agent(self) -> Path:
        """The agent's property list, put where `install` puts it on a Mac, and a log."""
        (self.home / "decode.toml").write_text(f"[model]\nmodel = '{self.model}'\n")
        command = ["bash", "-c", "muser-decode service install --dry-run"]
        text = subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=True).stdout
        agent = self.user_home / "Library/LaunchAgents/local.muser.decode.plist"
        log = self.user_home / "Library/Logs/Muser/decode.log"
        for file, content in ((agent, text), (log, "serving\n")):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return agent


Runner = Callable[[Machines], object]
RUNNERS: dict[str, Runner] = {}
KEYS = "(umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' >> ~/.muser/api-keys)"
ASK = (
    "curl -N http://127.0.0.1:4949/v1/chat/completions -H 'content-type: application/json' "
    '-d \'{"model": "muser", "stream": true, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}\''
)


def runs(command: str) -> Callable[[Runner], Runner]:
    """Say that a function runs a documented command."""

    def add(runner: Runner) -> Runner:
        RUNNERS[command] = runner
        return runner

    return add


def _found(expect: str, printed: str) -> None:
    assert re.search(expect, printed), printed


def simply(command: str, add: str = "", *, expect: str, status: int = 0, **words: object) -> None:
    """A command that ends by itself, with what is added to it and what it must print."""

    def run(machines: Machines) -> None:
        filling = {word: value(machines) if callable(value) else value for word, value in words.items()}
        _found(expect, machines.run(filled(command, **filling) + add, status=status))

    RUNNERS[command] = run


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Machines]:
    with contextlib.ExitStack() as cleanup:
        machines = Machines(tmp_path_factory.mktemp("machines"), cleanup)
        machines.model = tiny_llama
        yield machines


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [command for command in documented() if command not in NOT_HERE])
def test_a_documented_command_runs(command: str, machines: Machines) -> None:
    assert command in RUNNERS, f"{documented()[command]} has a new command: say in this file how it is run"
    RUNNERS[command](machines)


def test_nothing_is_run_or_excused_that_is_not_documented() -> None:
    assert sorted({*RUNNERS, *NOT_HERE} - set(documented())) == []
    assert sorted(set(RUNNERS) & set(NOT_HERE)) == []


def test_a_command_is_found_in_blocks_and_in_sentences() -> None:
    text = (
        "```sh\nmuser chat \\\n  --port 1   # why\n\n(a; b)\n```\n`make`, `muser`, `muser doctor`, `--flag`, `x.toml`"
    )
    assert list(commands_of(text)) == ["muser chat --port 1", "(a; b)", "make", "muser doctor"]


def test_what_cannot_run_here_names_what_is_there() -> None:
    from muser_wire.services import systemd

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in NOT_HERE:
        if extra := re.search(r"\[(\w+)\]'$", command):
            assert extra[1] in extras
        if command.startswith("systemctl"):
            assert f"{command.split()[-1]}.service" == systemd.UNIT
    assert (ROOT / "constraints.txt").is_file()


def test_make_test_starts_the_tests() -> None:
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m pytest -q" in done.stdout


# README.md

simply("make", expect="make demo .*ask two nodes")
RUNNERS[ASK] = lambda at: _found(r"data: \[DONE\]", at.run(ASK.replace("4949", at.made_port)))
simply("muser-prefill serve", expect="--model is needed", status=2)
simply("muser-decode serve", expect="--model is needed", status=2)
simply("muser pair", expect="muser pair listen(.|\n)*muser pair connect HOST:4952")
simply(
    "muser model verify PATH",
    " --oracle none --tokens 64 --greedy 4",
    expect="within every budget",
    PATH=lambda at: at.model,
)


@runs("make demo")
def _(machines: Machines) -> None:
    """test_demo.py runs it on real weights; here, that this is what it runs."""
    assert "def test_the_demo_runs_and_leaves_nothing" in (ROOT / "tests/test_demo.py").read_text()
    assert "-m muser_wire.cli demo" in machines.run("make -n demo")


@runs("make serve")
def _(machines: Machines) -> None:
    served = json.loads(machines.run(f"curl -s {machines.made}/v1/models"))
    assert [model["id"] for model in served["data"]] == [machines.model.name]


@runs("muser demo")
def _(machines: Machines) -> None:
    assert "muser_wire.cli demo" in machines.run("make -n demo")
    assert "--max-tokens" in machines.run("muser demo --help")


@runs("muser serve")
def _(machines: Machines) -> None:
    """`make serve` runs it, and is up."""
    assert "muser_wire.cli serve" in machines.run("make -n serve")
    assert machines.made


@runs("muser chat")
def _(machines: Machines) -> None:
    printed = machines.run(f"muser chat --port {machines.made_port}", said="Why is the sky blue?\n")
    assert re.search(r"remote|local|warm", printed)


@runs("muser cache explain")
def _(machines: Machines) -> None:
    asked = machines.folder / "chat.json"
    asked.write_text(json.dumps({"model": "muser", "messages": [{"role": "user", "content": "Why? " * 40}]}))
    machines.run(f"muser cache explain --request {asked} --port {machines.made_port}")


# Nodes

simply("muser model path smollm2", expect="smollm2")
simply("muser-decode serve --help", expect="--print-config")
simply("muser-decode serve --port", " 0 --print-config --model x", expect="port = 0 +# flag --port")
simply(
    "muser-prefill serve --control-port",
    " 0 --data-port 0 --print-config --model x",
    expect=r"control_port = 0 +# flag(.|\n)*data_port = 0 +# flag --data-port",
)
RUNNERS["muser-prefill serve --data-port"] = RUNNERS["muser-prefill serve --control-port"]
simply(
    "muser model quantize --to q8_0 SOURCE OUT.gguf",
    expect=r"out\.gguf(.|\n)* Q8_0",
    SOURCE=lambda at: at.model,
    **{"OUT.gguf": lambda at: at.folder / "out.gguf"},
)
simply("muser exact conformance", expect="conformance: [0-9a-f]{16} is what the rules give")
simply(
    "muser-decode serve --model PATH --producer HOST --print-config",
    expect=r'producer = \["127.0.0.1:4950"\] +# flag --producer',
    PATH="x",
    HOST="127.0.0.1:4950",
)
simply(
    "muser-decode serve --host ADDRESS",
    " --model x",
    expect="needs --api-key-file",
    status=2,
    ADDRESS="0.0.0.0",
)
RUNNERS["muser-prefill serve --model PATH"] = lambda at: wait_for(at.alone, r" serving host=127.0.0.1 ")
RUNNERS["muser-prefill serve --model PATH --host ADDRESS"] = lambda at: wait_for(at.producer, f" serving host={HOST} ")


def fetched(command: str, expect: str) -> None:
    """What fetches a model finds it there, as `make test` has fetched it."""
    RUNNERS[command] = lambda at: _found(expect, at.run(command, muser_home()))


fetched("muser model fetch smollm2", r"smollm2\S+\.gguf\n")
fetched("muser model fetch smollm2 --verify", r"\.gguf is intact")


@runs("make device")
def _(machines: Machines) -> None:
    if has_cuda():
        pytest.skip("it measures for minutes: run it by hand, with nothing else on the machine")
    made = f"make -s -o .venv/.installed PY={sys.executable} device"
    assert "not run: no NVIDIA GPU" in machines.run(made, muser_home())


@runs("muser-decode serve --model PATH --producer 127.0.0.1:4950")
def _(machines: Machines) -> None:
    command = "muser-decode serve --model PATH --producer 127.0.0.1:4950"
    producer = f"127.0.0.1:{machines.alone.ports['control_port']}"
    node = machines.serve(filled(command, PATH=machines.model, **{"127.0.0.1:4950": producer}))
    wait_for(node, rf"producer name={producer} state=ready")


@runs("muser-decode serve --model PATH --producer HOST:4950")
def _(machines: Machines) -> None:
    command = "muser-decode serve --model PATH --producer HOST:4950"
    line = filled(command, PATH=machines.model, **{"HOST:4950": machines.control})
    node = machines.serve(line, machines.paired[1])
    wait_for(node, rf"producer name={machines.control} state=ready")


@runs(KEYS)
def _(machines: Machines) -> None:
    assert machines.open_node
    assert (machines.home / "api-keys").stat().st_mode & 0o777 == 0o600


OPEN = "muser-decode serve --model PATH --host 0.0.0.0 --api-key-file ~/.muser/api-keys --tls-self-signed"
RUNNERS[OPEN] = lambda at: wait_for(at.open_node, "serving url=https://0.0.0.0:")


@runs("muser chat --url https://mac.local:4949 --tls-cert http.crt --api-key-file api-keys")
def _(machines: Machines) -> None:
    """On another machine, to which certificate and keys were carried."""
    there = machines.folder / "there"
    there.mkdir()
    port = machines.open_node.ports["port"]
    for name in ("http.crt", "api-keys"):
        shutil.copy(machines.home / name, there / name)
    command = "muser chat --url https://mac.local:4949 --tls-cert http.crt --api-key-file api-keys"
    printed = machines.run(command.replace("mac.local:4949", f"localhost:{port}"), cwd=there, said="Hello\n")
    assert re.search(r"local|warm", printed)


# Doctor


@runs("muser doctor")
def _(machines: Machines) -> None:
    settings = {"MUSER_PREFILL_MODEL": machines.model, "MUSER_DECODE_MODEL": machines.model, "MUSER_DECODE_KV": "f16"}
    printed = machines.run(
        "muser doctor", machines.paired[1], status=None, MUSER_DECODE_PRODUCER=machines.control, **settings
    )
    for expected in (
        "ok       python ",
        r"ok       peer \S+ ",
        rf"ok       producer {machines.control}: weights_digest",
    ):
        assert re.search(expected, printed), printed


@runs("muser doctor link --producer HOST:4950")
def _(machines: Machines) -> None:
    command = filled("muser doctor link --producer HOST:4950", **{"HOST:4950": machines.control})
    assert "throughput" in machines.run(f"{command} --mib 8 --idle-s 0", machines.paired[1], status=None)


# Pairing


@runs("muser pair listen")
@runs("muser pair connect")
@runs("muser pair connect HOST:4952")
def _(machines: Machines) -> None:
    assert all(list((home / "peers").glob("*.json")) for home in machines.paired)


@runs("muser pair export FILE --role prefill")
@runs("muser pair import FILE")
def _(machines: Machines) -> None:
    assert all(list((home / "peers").glob("*.json")) for home in machines.cards)


@runs("muser pair list")
def _(machines: Machines) -> None:
    assert "paired: decode node" in machines.run("muser pair list", machines.cards[0])


@runs("muser pair export FILE")
def _(machines: Machines) -> None:
    """Which keys are meant is clear once there are some."""
    again = machines.folder / "again.card"
    assert "Wrote " in machines.run(filled("muser pair export FILE", FILE=again), machines.cards[0])
    assert again.read_bytes() == machines.cards[0].with_suffix(".card").read_bytes()


@runs("muser pair revoke FINGERPRINT")
def _(machines: Machines) -> None:
    home = machines.folder / "revoking"
    card = machines.cards[0].with_suffix(".card")
    found = re.search(FINGERPRINT, machines.run(f"muser pair import {card}", home))
    assert found
    printed = machines.run(filled("muser pair revoke FINGERPRINT", FINGERPRINT=found[1]), home)
    assert "Revoked: prefill node" in printed


@runs("muser pair rotate")
def _(machines: Machines) -> None:
    assert machines.rotating


@runs("muser pair rotate --switch")
def _(machines: Machines) -> None:
    home = machines.rotating
    assert "is shown from now on" in machines.run("muser pair rotate --switch", home)


# Services


def has_cuda() -> bool:
    """Whether torch sees an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()


def installed_here() -> bool:
    """Whether this machine itself has the services: then nothing of them is touched."""
    return Path(f"/etc/systemd/system/{UNIT}.service").exists() or sys.platform == "darwin"


NEEDS_SYSTEMCTL = "systemctl is not here: the package systemd has it"


@runs('sudo .venv/bin/muser-prefill service install --user "$USER"')
def _(machines: Machines) -> None:
    """On a system that lies in a folder and does not run; its owner needs no sudo for it."""
    if not has("systemctl"):
        pytest.skip(NEEDS_SYSTEMCTL)
    assert "Type=notify" in (machines.root / f"etc/systemd/system/{UNIT}.service").read_text()


@runs("sudo .venv/bin/muser-prefill service uninstall")
def _(machines: Machines) -> None:
    if not has("systemctl"):
        pytest.skip(NEEDS_SYSTEMCTL)
    unit = machines.root / f"etc/systemd/system/{UNIT}.service"
    assert "removed" in machines.run(f"muser-prefill service uninstall --root {machines.root}")
    assert not unit.exists()
    del machines.root


def is_not_installed(command: str) -> None:
    """No systemd runs here, so the unit is not installed, and that is the answer."""

    def run(machines: Machines) -> None:
        if installed_here():
            pytest.skip("this machine's own services are not looked at")
        assert "not installed" in machines.run(command, status=2)

    RUNNERS[command] = run


is_not_installed("muser-prefill service status")
is_not_installed("muser-prefill service logs --follow")


@runs("muser-decode service install")
def _(machines: Machines) -> None:
    assert "<key>KeepAlive</key>" in machines.agent.read_text()


@runs("muser-decode service logs --follow")
def _(machines: Machines) -> None:
    assert machines.agent
    wait_for(machines.start("muser-decode service logs --follow"), "serving")


@runs("muser-decode service status")
def _(machines: Machines) -> None:
    if installed_here():
        pytest.skip("this machine's own services are not looked at")
    assert machines.agent.exists()
    assert "launchctl cannot be run" in machines.run("muser-decode service status", status=2)


@runs("muser-decode service uninstall")
def _(machines: Machines) -> None:
    if installed_here():
        pytest.skip("this machine's own services are not looked at")
    assert machines.agent.exists()
    assert "removed" in machines.run("muser-decode service uninstall")
    assert not machines.agent.exists()
    del machines.agent


@runs("sudo chown -R --reference=/var/lib/muser /var/lib/muser/")
def _(machines: Machines) -> None:
    if sys.platform == "darwin":
        pytest.skip("the producer's system is Linux")
    # For a user that it makes, systemd makes the folder elsewhere, and this name is a link to it.
    real, link = machines.folder / "private", machines.folder / "var-lib-muser"
    real.mkdir()
    link.symlink_to(real)
    (real / "prefill.toml").touch()
    owner = 64_000 if os.geteuid() == 0 else os.geteuid()
    os.chown(real, owner, os.getegid())
    command = "sudo chown -R --reference=/var/lib/muser /var/lib/muser/".removeprefix("sudo ")
    machines.run(command.replace("/var/lib/muser", str(link)))
    assert (real / "prefill.toml").stat().st_uid == owner
