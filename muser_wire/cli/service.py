"""`muser-prefill service` and `muser-decode service`: install, uninstall, status, logs."""

from __future__ import annotations

import argparse
import pwd
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.private_files import PRIVATE_FOLDER_MODE
from muser_wire.services import launchd, systemd
from muser_wire.services.errors import ServiceError
from muser_wire.services.launchd import Launchd
from muser_wire.services.program import Program, hand_over, installation
from muser_wire.services.systemd import STATE, Systemd, UnitOptions
from muser_wire.settings.keys import Keys
from muser_wire.settings.settings import Read, Settings

LOG_LINES = 100
DEFAULT_DRAIN_S = 30.0

Check = Callable[[argparse.Namespace], object]


class Service(Protocol):
    """One node's service on this machine."""

    @property
    def file(self) -> Path:
        """Where its description lies."""

    def text(self, arguments: argparse.Namespace, read: Read | None) -> str:
        """Return its description, for a configuration or, without one, for the defaults."""

    def install(self, text: str, *, replace: bool) -> bool:
        """Install it; return whether anything was new."""

    def uninstall(self) -> None:
        """Remove it."""

    def home(self, arguments: argparse.Namespace) -> Path:
        """Return the MUSER_HOME that it will have."""

    def status_command(self) -> list[str]:
        """Return what shows its state."""

    def logs_command(self, lines: int, *, follow: bool) -> list[str]:
        """Return what shows its log."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], keys: Keys, check: Check) -> None:
    """Declare `service` for a node whose configuration has `keys`; `check` refuses one that cannot work."""
    kind = "systemd unit" if keys.node == "prefill" else "launchd agent"
    parser = commands.add_parser("service", help=f"run as a {kind}", description=f"This node as a {kind}.")
    steps = parser.add_subparsers(dest="step", required=True)
    install = steps.add_parser("install", help=f"write the {kind}, enable and start it")
    install.add_argument("--config", help=f"its configuration file (default: {keys.node}.toml in its MUSER_HOME)")
    install.add_argument("--dry-run", action="store_true", help="print what would be written, and change nothing")
    install.add_argument("--replace", action="store_true", help="put it in the place of one that differs")
    uninstall = steps.add_parser("uninstall", help="stop and remove it; keys, peers and models stay")
    steps.add_parser("status", help="show whether it runs")
    logs = steps.add_parser("logs", help="show its log")
    logs.add_argument("--lines", type=int, default=LOG_LINES, help="how many (default: %(default)s)")
    logs.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    if keys.node == "prefill":
        _add_systemd(install, uninstall)
    parser.set_defaults(service_keys=keys, service_check=check)


def _add_systemd(install: argparse.ArgumentParser, uninstall: argparse.ArgumentParser) -> None:
    install.add_argument("--user", help="who runs it, with his MUSER_HOME (default: a user that systemd makes for it)")
    install.add_argument("--home", type=Path, help=f"its MUSER_HOME (default: ~/.muser of --user; else {STATE})")
    install.add_argument("--memory-max", default="90%", help="most memory, as systemd writes it (default: %(default)s)")
    for step in (install, uninstall):
        step.add_argument("--root", type=Path, default=Path("/"), help="a system that lies here and does not run")


def run(arguments: argparse.Namespace) -> int:
    """Do one step; return the exit status, or become the system's tool that shows what was asked for.

    Raises:
        WireError: it cannot be done; the message says why.
    """
    keys: Keys = arguments.service_keys
    service: Service = SystemdService(arguments) if keys.node == "prefill" else LaunchdService()
    if arguments.step == "install":
        return _install(service, arguments, keys)
    if arguments.step == "uninstall":
        service.uninstall()
        print(f"removed {service.file}")
        return 0
    if not service.file.exists():
        raise ServiceError(f"{service.file} is not there: not installed")
    if arguments.step == "status":
        return hand_over(service.status_command())
    return hand_over(service.logs_command(arguments.lines, follow=arguments.follow))


def _install(service: Service, arguments: argparse.Namespace, keys: Keys) -> int:
    # What stands in this shell's environment is not the service's.
    settings = Settings(keys, {}, {}, service.home(arguments), arguments.config)
    read: Read | None = None
    try:
        read = settings.read()
        arguments.service_check(read.namespace())
    except WireError as error:
        if not arguments.dry_run:
            file = arguments.config or settings.home / f"{keys.node}.toml"
            raise ServiceError(f"its configuration cannot be used: {error} (a service reads {file} alone)") from error
        print(f"its configuration cannot be used yet: {error}", file=sys.stderr)
    text = service.text(arguments, read)
    if arguments.dry_run:
        print(text, end="")
        print(f"this would be written to {service.file}", file=sys.stderr)
        return 0
    new = service.install(text, replace=arguments.replace)
    print(f"installed {service.file}" if new else f"{service.file} is installed already, as it would be written now")
    return 0


def _program(arguments: argparse.Namespace, keys: Keys, home: Path, read: Read | None) -> Program:
    values = {} if read is None else {setting.key.name: setting.value for setting in read.settings}
    config = Path(arguments.config).expanduser().absolute() if arguments.config else None
    drain_s = values.get("drain_s", DEFAULT_DRAIN_S)
    return Program(keys.node, home, config, float(str(drain_s)))


@dataclass(frozen=True)
class SystemdService:
    """See `Service`: the producer's unit."""

    arguments: argparse.Namespace

    @property
    def systemd(self) -> Systemd:
        """The system that it is installed in."""
        return Systemd(getattr(self.arguments, "root", Path("/")).absolute())

    @property
    def file(self) -> Path:
        """See `Service`."""
        return self.systemd.unit_file

    def home(self, arguments: argparse.Namespace) -> Path:
        """See `Service`.

        Raises:
            ServiceError: there is no such user, or a folder is given for a user that does not exist yet.
        """
        if arguments.user is None:
            if arguments.home is not None:
                raise ServiceError(f"--home needs --user: without one systemd makes a user, whose folder is {STATE}")
            return STATE
        try:
            home = Path(pwd.getpwnam(arguments.user).pw_dir) / ".muser"
        except KeyError as error:
            raise ServiceError(f"--user {arguments.user}: this machine has no such user") from error
        return Path(arguments.home).absolute() if arguments.home else home

    def text(self, arguments: argparse.Namespace, read: Read | None) -> str:
        """See `Service`."""
        program = _program(arguments, arguments.service_keys, self.home(arguments), read)
        paths = [] if program.config is None else [program.config]
        if read is not None:
            paths += [setting.value for setting in read.settings if isinstance(setting.value, Path)]
        readable = (*installation(), *(path for path in paths if path.exists()))
        options = UnitOptions(program, arguments.user, readable, arguments.memory_max)
        return systemd.render(replace(options, version=self.systemd.version()))

    def install(self, text: str, *, replace: bool) -> bool:
        """See `Service`.

        Raises:
            ServiceError: the user's folder is not there, which systemd would only report as 226/NAMESPACE.
        """
        home = self.home(self.arguments)
        if self.arguments.user is not None and not home.is_dir():
            raise ServiceError(f"{home} is not there: make it as {self.arguments.user}, or name another by --home")
        return self.systemd.install(text, replace=replace)

    def uninstall(self) -> None:
        """See `Service`."""
        self.systemd.uninstall()

    def status_command(self) -> list[str]:
        """See `Service`."""
        return ["systemctl", "status", "--no-pager", systemd.UNIT]

    def logs_command(self, lines: int, *, follow: bool) -> list[str]:
        """See `Service`."""
        return ["journalctl", "--no-pager", "-u", systemd.UNIT, "-n", str(lines), *_follow(follow)]


class LaunchdService:
    """See `Service`: the decode node's agent."""

    def __init__(self) -> None:
        self._launchd = Launchd()

    @property
    def file(self) -> Path:
        """See `Service`."""
        return self._launchd.plist_file

    def home(self, arguments: argparse.Namespace) -> Path:
        """See `Service`."""
        return muser_home()

    def text(self, arguments: argparse.Namespace, read: Read | None) -> str:
        """See `Service`."""
        program = _program(arguments, arguments.service_keys, self.home(arguments), read)
        return launchd.render(program, self._launchd.user_home)

    def install(self, text: str, *, replace: bool) -> bool:
        """See `Service`; launchd starts nothing whose working directory is not there."""
        muser_home().mkdir(mode=PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)
        return self._launchd.install(text, replace=replace)

    def uninstall(self) -> None:
        """See `Service`."""
        self._launchd.uninstall()

    def status_command(self) -> list[str]:
        """See `Service`."""
        return ["launchctl", "print", self._launchd.target]

    def logs_command(self, lines: int, *, follow: bool) -> list[str]:
        """See `Service`."""
        return ["tail", "-n", str(lines), *_follow(follow), str(self._launchd.log_file)]


def _follow(follow: bool) -> Sequence[str]:
    return ["-f"] if follow else []
