"""The producer's systemd unit: hardened, ready when the model is loaded, watched by the engine's own progress.

The text follows systemd.unit(5), systemd.service(5), systemd.exec(5) and systemd.resource-control(5). What the
sandbox leaves open, and why: the network, since the node serves one; NVIDIA's devices and /proc/driver/nvidia, hence
no PrivateDevices and no ProcSubset; memory that is written and then executed, which CUDA and Triton need.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muser_wire.services.errors import ServiceError
from muser_wire.services.program import Program, publish, remove, run_tool

UNIT = "muser-prefill.service"
UNIT_FOLDER = Path("etc/systemd/system")
STATE = Path("/var/lib/muser")
"""Where a service without a user of its own keeps keys, peers and models: systemd's StateDirectory."""

STOP_SLACK_S = 15
"""What a stop may take beyond the drain, in seconds."""

WATCHDOG_S = 120
"""Without progress for so long, in seconds, the engine is stuck: a layer takes a few, a slow reader may cost 60."""

BACKOFF_VERSION = 254
"""The systemd that can wait longer after each failure. An older one waits the same time each."""

HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
"""What ProtectHome hides."""

NVIDIA = ("char-nvidia*", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")

HARDENING = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
PrivateTmp=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
KeyringMode=private
UMask=0077
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
"""


@dataclass(frozen=True)
class UnitOptions:
    """How the unit runs. `user` None: a user that systemd makes for it, and STATE as its folder.

    `readable` are files and folders that it must see although they may lie in a home. `memory_max` is a size or a
    percentage as systemd writes them. `version` is systemd's.
    """

    program: Program
    user: str | None
    readable: Sequence[Path]
    memory_max: str = "90%"
    version: int = 0


def render(options: UnitOptions) -> str:
    """Return the unit's text."""
    program = options.program
    lines = [
        "# Written by `muser-prefill service install`; it is replaced, not edited.",
        "[Unit]",
        "Description=Muser prefill node",
        "Wants=network-online.target",
        "After=network-online.target nvidia-persistenced.service",
        "StartLimitIntervalSec=900",
        "StartLimitBurst=8",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={' '.join(quoted(word, '$') for word in program.command)}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        f"Environment={quoted(f'MUSER_HOME={program.home}')}",
        # The watchdog ends the node with SIGABRT: then each thread's place goes to the log.
        "Environment=PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1",
        "TimeoutStartSec=120",
        f"TimeoutStopSec={int(program.drain_s) + STOP_SLACK_S}",
        f"WatchdogSec={WATCHDOG_S}",
        "KillMode=mixed",
        "Restart=on-failure",
        *restart_lines(options.version),
        "",
        *user_lines(options),
        "",
        *resource_lines(options),
        "",
        "DevicePolicy=closed",
        *(f"DeviceAllow={device} rw" for device in NVIDIA),
        HARDENING,
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def restart_lines(version: int) -> list[str]:
    """Return how long to wait before a failed node is started again. After 8 tries in 15 minutes it stays down."""
    if version < BACKOFF_VERSION:
        return ["RestartSec=15"]
    return ["RestartSec=5", "RestartSteps=5", "RestartMaxDelaySec=120"]


def user_lines(options: UnitOptions) -> Iterator[str]:
    """Yield who runs the node and what of the file system it sees and may write."""
    home = options.program.home
    # Triton compiles kernels into this folder.
    yield "CacheDirectory=muser"
    yield "Environment=TRITON_CACHE_DIR=/var/cache/muser/triton"
    if options.user is None:
        yield from ("DynamicUser=yes", "User=muser", f"StateDirectory={STATE.name}", "StateDirectoryMode=0700")
    else:
        yield f"User={options.user}"
    hidden = [path for path in options.readable if _in_a_home(path)]
    if options.user is not None and _in_a_home(home):
        yield "ProtectHome=tmpfs"
        yield f"BindPaths={quoted(str(home))}"
    else:
        yield "ProtectHome=tmpfs" if hidden else "ProtectHome=yes"
        if options.user is not None:
            yield f"ReadWritePaths={quoted(str(home))}"
    for path in hidden:
        if not path.is_relative_to(home):
            yield f"BindReadOnlyPaths={quoted(str(path))}"


def resource_lines(options: UnitOptions) -> list[str]:
    """Return the limits. Pages that the GPU reads are locked in memory, and a model is most of it."""
    return [
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=65536",
        f"MemoryMax={options.memory_max}",
        "OOMPolicy=stop",
        "TasksMax=4096",
    ]


def quoted(text: str, doubled: str = "") -> str:
    """Return a word as a unit file takes it; `doubled` are signs that mean something in this place besides "%".

    >>> quoted("/opt/my muser/100%")
    '"/opt/my muser/100%%"'

    Raises:
        ServiceError: it has a line break, or another control character.
    """
    if not text.isprintable():
        raise ServiceError(f"{text!r} cannot stand in a unit file")
    for sign in "%" + doubled:
        text = text.replace(sign, 2 * sign)
    if re.fullmatch(r"[\w@%+=:,./$-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _in_a_home(path: Path) -> bool:
    return any(path.is_relative_to(home) for home in HOMES)


Tool = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Systemd:
    """Units of this machine, or, with another `root`, of a system that lies there and does not run."""

    root: Path = Path("/")
    tool: Tool = field(default=run_tool)

    @property
    def unit_file(self) -> Path:
        """Where the unit lies."""
        return self.root / UNIT_FOLDER / UNIT

    def version(self) -> int:
        """Return the version of this machine's systemd; 0 where it has none."""
        try:
            found = re.match(r"systemd (\d+)", self.tool(["systemctl", "--version"]))
        except ServiceError:
            return 0
        return int(found[1]) if found else 0

    def install(self, text: str, *, replace: bool) -> bool:
        """Write the unit, enable it, and start it where the system runs; return whether anything was new.

        Raises:
            ServiceError: another unit is there and is not to be replaced, or a step failed; a unit that was not
                there before has then gone again.
        """
        was_there = self.unit_file.exists()
        new = publish(self.unit_file, text, replace=replace)
        try:
            self._enable(restart=new)
        except ServiceError:
            if not was_there:
                self._take_back()
            raise
        return new

    def _take_back(self) -> None:
        """Undo a first install as far as it came: systemd would try to start the node again and again."""
        with contextlib.suppress(ServiceError):
            self._systemctl("disable", *self._now(), UNIT)
        remove(self.unit_file)
        with contextlib.suppress(ServiceError):
            self._reload()

    def uninstall(self) -> None:
        """Stop the node, disable the unit and remove it. Keys, peers and models stay.

        Raises:
            ServiceError: it is not there, or a step failed.
        """
        if not self.unit_file.exists():
            raise ServiceError(f"{self.unit_file} is not there: nothing to uninstall")
        self._systemctl("disable", *self._now(), UNIT)
        remove(self.unit_file)
        self._reload()

    def _enable(self, *, restart: bool) -> None:
        self._reload()
        self._systemctl("enable", UNIT)
        if self._runs():
            # Starting a node that serves already does nothing.
            self._systemctl("restart" if restart else "start", UNIT)

    def _reload(self) -> None:
        if self._runs():
            self._systemctl("daemon-reload")

    def _now(self) -> list[str]:
        return ["--now"] if self._runs() else []

    def _runs(self) -> bool:
        return self.root == Path("/")

    def _systemctl(self, *words: str) -> None:
        root = [] if self._runs() else [f"--root={self.root}"]
        self.tool(["systemctl", *root, *words])
