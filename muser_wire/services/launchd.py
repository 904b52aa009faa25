"""The decode node's launchd agent, which runs while its user is logged in. Its keys are those of launchd.plist(5)."""

from __future__ import annotations

import os
import plistlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muser_wire.services.errors import ServiceError
from muser_wire.services.program import Program, publish, remove, run_tool

LABEL = "local.muser.decode"
AGENTS = Path("Library/LaunchAgents")
LOGS = Path("Library/Logs/Muser")

THROTTLE_S = 30
"""launchd waits at least so long between two starts, in seconds. It knows no limit to their number."""

STOP_SLACK_S = 15
UNLOAD_S = 120.0
"""How long an agent that was told to end may take, in seconds: its drain, and what launchd waits beyond it."""

STILL_ENDING = "Operation now in progress"
"""What `launchctl bootout` may say, with status 36, of a node that still drains: it does not wait for the end."""

LOOK_S = 0.2
OPEN_FILES = 8192
"""Each client is a file; launchd's own limit of 256 is low."""

UMASK = 0o077


def render(program: Program, user_home: Path) -> str:
    """Return the agent's property list. It has no secrets: they are in files that the configuration names."""
    log = str(user_home / LOGS / "decode.log")
    agent: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": program.command,
        "EnvironmentVariables": {
            "MUSER_HOME": str(program.home),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        },
        "WorkingDirectory": str(program.home),
        "RunAtLoad": True,
        # Started again when it failed, not when it was told to end.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE_S,
        "ExitTimeOut": int(program.drain_s) + STOP_SLACK_S,
        # Somebody waits for the answers: no throttling of processor and disk.
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "HardResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "Umask": UMASK,
    }
    return plistlib.dumps(agent, sort_keys=False).decode()


Tool = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Launchd:
    """The agents of one user; `uid` is his number."""

    user_home: Path = field(default_factory=Path.home)
    uid: int = field(default_factory=os.getuid)
    tool: Tool = field(default=run_tool)
    unload_s: float = UNLOAD_S

    @property
    def plist_file(self) -> Path:
        """Where the agent's property list lies."""
        return self.user_home / AGENTS / f"{LABEL}.plist"

    @property
    def log_file(self) -> Path:
        """Where the node's output goes."""
        return self.user_home / LOGS / "decode.log"

    @property
    def target(self) -> str:
        """The agent's name in launchctl."""
        return f"{self._domain}/{LABEL}"

    def install(self, text: str, *, replace: bool) -> bool:
        """Write the agent and load it; return whether anything was new.

        Raises:
            ServiceError: another one is there and is not to be replaced, or a step failed; one that was not there
                before has then gone again.
        """
        was_there = self.plist_file.exists()
        new = publish(self.plist_file, text, replace=replace)
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            if new and was_there:
                self._unload()
            if new or not self._loaded():
                self.tool(["launchctl", "bootstrap", self._domain, str(self.plist_file)])
        except ServiceError:
            if not was_there:
                remove(self.plist_file)
            raise
        return new

    def uninstall(self) -> None:
        """End the node, unload the agent and remove it. Keys, peers, models and logs stay.

        Raises:
            ServiceError: it is not there, or a step failed.
        """
        if not self.plist_file.exists():
            raise ServiceError(f"{self.plist_file} is not there: nothing to uninstall")
        self._unload()
        remove(self.plist_file)

    @property
    def _domain(self) -> str:
        return f"gui/{self.uid}"

    def _unload(self) -> None:
        """End the node; return once launchd has forgotten the agent, since before that it takes no other one.

        Raises:
            ServiceError: launchctl refuses, or the node has not ended in time.
        """
        if not self._loaded():
            return
        try:
            self.tool(["launchctl", "bootout", self.target])
        except ServiceError as error:
            if STILL_ENDING not in str(error):
                raise
        deadline_s = time.monotonic() + self.unload_s
        while self._loaded():
            if time.monotonic() > deadline_s:
                raise ServiceError(f"{self.target} has not ended within {self.unload_s:g} s: try again")
            time.sleep(LOOK_S)

    def _loaded(self) -> bool:
        try:
            self.tool(["launchctl", "print", self.target])
        except ServiceError:
            return False
        return True
