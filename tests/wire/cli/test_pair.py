"""`muser pair` as two people use it, each on a machine with a MUSER_HOME of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paired_homes import YEAR_S, own, paired, reissue, stranger

from muser_wire.cli.__main__ import main
from muser_wire.errors import TransportError
from muser_wire.pairing.card import Card, Role
from muser_wire.pairing.credentials import load_credentials
from muser_wire.pairing.errors import ExchangeError, PairingError
from muser_wire.pairing.exchange import Exchange, Side
from muser_wire.pairing.store import PeerStore
from muser_wire.pairing.trust import consumer_trust, producer_trust
from muser_wire.transport import discovery
from muser_wire.transport.pairing import PairingLink, call

HOST = "127.0.0.2"
START_S = 30.0
CODE = re.compile(r"Code: (?:\x1b\[\d+m)?(\d{3} \d{3})")

Muser = Callable[..., tuple[int, str]]


@pytest.fixture
def muser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Muser:
    """Run `muser pair` on a machine; return its exit status and what it printed."""

    def run(home: Path, *arguments: str) -> tuple[int, str]:
        monkeypatch.setenv("MUSER_HOME", str(home))
        status = main(["pair", *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


Started = Callable[..., subprocess.Popen[str]]

# `muser`, killed as by a power cut in the moment before a file gets its name: FOLDER:ENDING.
KILLED = """
import os, signal, sys
folder, ending = sys.argv.pop(1).split(":")
for name in ("replace", "link"):
    def call(source, target, real=getattr(os, name)):
        if os.path.basename(os.path.dirname(target)) == folder and str(target).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target)
    setattr(os, name, call)
from muser_wire.cli.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def started() -> Iterator[Started]:
    """Start `muser pair` as a process on a machine."""
    processes: list[subprocess.Popen[str]] = []

    def start(home: Path, *arguments: str, killed_at: str | None = None) -> subprocess.Popen[str]:
        program = ["-m", "muser_wire.cli"] if killed_at is None else ["-c", KILLED, killed_at]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-u", *program, "pair", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "MUSER_HOME": str(home)},
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read a process's lines until one matches."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError("".join(lines))


def meet(
    started: Started, folder: Path, caller_killed_at: str | None = None
) -> tuple[subprocess.Popen[str], subprocess.Popen[str], str, str]:
    """Start both commands; return them at the question, and the codes that they show."""
    listener = started(folder / "p", "listen", "--host", HOST, "--port", "0", "--name", "gx10")
    port = read_until(listener, r"Listening on \S+ port (\d+)")[1]
    caller = started(folder / "c", "connect", f"{HOST}:{port}", "--name", "mac", killed_at=caller_killed_at)
    return listener, caller, read_until(listener, CODE.pattern)[1], read_until(caller, CODE.pattern)[1]


def answer(process: subprocess.Popen[str], text: str) -> tuple[int, str]:
    out, _ = process.communicate(text + "\n", timeout=START_S)
    return process.returncode, out


def test_two_people_compare_a_code_and_both_machines_are_paired(tmp_path: Path, started: Started) -> None:
    listener, caller, shown, seen = meet(started, tmp_path)
    assert shown == seen
    assert listener.stdin is not None
    listener.stdin.write("y\n")
    listener.stdin.flush()
    # The code as the other machine shows it is a yes too: a script need not know it beforehand.
    assert answer(caller, shown)[0] == 0
    assert listener.wait(START_S) == 0
    here, there = PeerStore(tmp_path / "p").read().peers, PeerStore(tmp_path / "c").read().peers
    assert [peer.card for peer in here] == [load_credentials(tmp_path / "c", Role.DECODE).card()]
    assert [peer.card for peer in there] == [load_credentials(tmp_path / "p", Role.PREFILL).card()]
    assert there[0].host == HOST
    assert (here[0].card.name, there[0].card.name) == ("mac", "gx10")


def test_a_kill_between_node_key_and_certificate_leaves_a_machine_that_can_pair(
    tmp_path: Path, started: Started, muser: Muser
) -> None:
    home = tmp_path / "p"
    killed = started(home, "export", "--role", "prefill", killed_at="keys:.certificates.json")
    assert killed.wait(START_S) == -signal.SIGKILL
    key = (home / "keys" / "prefill.ed25519").read_bytes()
    assert not (home / "keys" / "prefill.certificates.json").exists()
    assert "No peer is paired" in muser(home, "list")[1]
    with pytest.raises(PairingError, match="no certificate as a prefill node"):
        load_credentials(home, Role.PREFILL)
    assert muser(home, "export", "--role", "prefill")[0] == 0
    assert (home / "keys" / "prefill.ed25519").read_bytes() == key


def test_a_kill_before_one_side_has_stored_the_other_is_named_there_and_pairing_again_heals_it(
    tmp_path: Path, started: Started, muser: Muser
) -> None:
    """Both people agreed; the machine that called lost its power before its peer's file had a name."""
    listener, caller, _, _ = meet(started, tmp_path, caller_killed_at="peers:.json")
    assert listener.stdin is not None
    listener.stdin.write("y\n")
    listener.stdin.flush()
    assert answer(caller, "y")[0] == -signal.SIGKILL
    assert listener.wait(START_S) == 0
    assert len(PeerStore(tmp_path / "p").read().peers) == 1
    contents = PeerStore(tmp_path / "c").read()
    assert (contents.peers, contents.damaged) == ((), ())
    assert "No peer is paired" in muser(tmp_path / "c", "list")[1]
    with pytest.raises(PairingError, match=r"no producer there is paired.*muser pair"):
        consumer_trust(tmp_path / "c", HOST, time.time)
    listener, caller, code, _ = meet(started, tmp_path)
    listener.stdin.write("y\n")
    listener.stdin.flush()
    assert answer(caller, code)[0] == 0
    assert listener.wait(START_S) == 0
    assert [len(PeerStore(tmp_path / side).read().peers) for side in "pc"] == [1, 1]
    assert consumer_trust(tmp_path / "c", HOST, time.time).material().trusted_pem


@pytest.mark.parametrize("said", ["n", "", "000 000"])
def test_a_no_stores_nothing_on_either_machine(tmp_path: Path, started: Started, said: str) -> None:
    listener, caller, code, _ = meet(started, tmp_path)
    assert code != "000 000"
    status, out = answer(caller, said)
    assert status == 1
    assert "Nothing was stored" in out
    status, out = answer(listener, "y")
    assert status == 2
    assert "the other side declined" in out
    assert PeerStore(tmp_path / "p").read().peers == ()
    assert PeerStore(tmp_path / "c").read().peers == ()


def test_a_caller_that_is_no_muser_does_not_end_the_listening(tmp_path: Path, started: Started) -> None:
    listener = started(tmp_path / "p", "listen", "--host", HOST, "--port", "0")
    port = int(read_until(listener, r"Listening on \S+ port (\d+)")[1])
    with socket.create_connection((HOST, port), START_S) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        read_until(listener, "speaks another protocol|announces.*still listening")
    caller = started(tmp_path / "c", "connect", f"{HOST}:{port}")
    read_until(caller, CODE.pattern)


def attack(listener: subprocess.Popen[str], folder: Path, *, reveals: bool) -> tuple[Exchange, PairingLink]:
    """Call a listener with keys of one's own; return the exchange with its code known, or one step before."""
    port = int(read_until(listener, r"Listening on \S+ port (\d+)")[1])
    thief = own(folder / "thief", Role.DECODE)
    exchange = Exchange(Side.CALLER, thief.node_key, thief.card(), os.urandom(32), time.time())
    link = call(HOST, port)
    link.send(exchange.begin())
    reveal = exchange.receive(link.receive())
    if reveals:
        link.send(reveal)
        exchange.receive(link.receive())
    return exchange, link


def test_an_attacker_that_hangs_up_after_our_reveal_ends_the_listening(tmp_path: Path, started: Started) -> None:
    """It knows the code by then. If it could call again, it would go on until the code suits it."""
    listener = started(tmp_path / "p", "listen", "--host", HOST, "--port", "0")
    exchange, link = attack(listener, tmp_path, reveals=True)
    assert read_until(listener, CODE.pattern)[1] == exchange.code
    port = link._connection.getpeername()[1]
    link.close()
    status, out = answer(listener, "y")
    assert status == 2
    assert re.search(r"closed the connection\. Nothing was stored.*start `muser pair listen` again", out)
    assert PeerStore(tmp_path / "p").read().peers == ()
    with pytest.raises(TransportError, match="does not answer"):
        call(HOST, port)


@pytest.mark.parametrize("how", ["closes", "resets", "shows a card of the same role", "shows another card"])
def test_an_attacker_that_fails_before_our_reveal_does_not_end_the_listening(
    tmp_path: Path, started: Started, how: str
) -> None:
    listener = started(tmp_path / "p", "listen", "--host", HOST, "--port", "0")
    exchange, link = attack(listener, tmp_path, reveals=False)
    port = link._connection.getpeername()[1]
    if how == "resets":
        link._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "shows another card":
        link.send(bytes([2]) + bytes(40) + own(tmp_path / "thief", Role.PREFILL).card().encode())
    elif how == "shows a card of the same role":
        link.close()
        link = call(HOST, port)
        same = own(tmp_path / "thief", Role.PREFILL)
        exchange = Exchange(Side.CALLER, same.node_key, same.card(), os.urandom(32), time.time())
        link.send(exchange.begin())
        link.send(exchange.receive(link.receive()))
        with pytest.raises(ExchangeError, match="cannot take this machine's card"):
            exchange.receive(link.receive())
    link.close()
    read_until(listener, r"A caller from .* failed \(.*\); still listening")
    with pytest.raises(PairingError, match="no code"):
        _ = exchange.code
    caller = started(tmp_path / "c", "connect", f"{HOST}:{port}")
    assert read_until(caller, CODE.pattern)[1] == read_until(listener, CODE.pattern)[1]


def test_callers_that_fail_are_bounded(tmp_path: Path, started: Started) -> None:
    listener = started(tmp_path / "p", "listen", "--host", HOST, "--port", "0")
    port = int(read_until(listener, r"Listening on \S+ port (\d+)")[1])
    for _ in range(10):
        call(HOST, port).close()
        read_until(listener, "still listening")
    assert listener.wait(START_S) == 2
    read_until(listener, "10 callers failed: something else calls this port")


def test_a_machine_whose_clock_is_a_year_off_is_told_so(
    tmp_path: Path, started: Started, muser: Muser, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = started(tmp_path / "p", "listen", "--host", HOST, "--port", "0")
    port = read_until(listener, r"Listening on \S+ port (\d+)")[1]
    late = time.time() + YEAR_S
    monkeypatch.setattr(time, "time", lambda: late)
    status, out = muser(tmp_path / "c", "connect", f"{HOST}:{port}")
    assert status == 2
    assert "the clocks of the two machines differ" in out
    assert PeerStore(tmp_path / "c").read().peers == ()


def test_alone_it_says_how(tmp_path: Path, muser: Muser) -> None:
    status, out = muser(tmp_path)
    assert status == 0
    for command in ("muser pair listen", "muser pair connect HOST:4952", "muser pair export", "muser pair import"):
        assert command in out


def test_export_and_import_pair_two_machines_without_a_person(tmp_path: Path, muser: Muser) -> None:
    producer, consumer = tmp_path / "p", tmp_path / "c"
    status, out = muser(producer, "export", str(tmp_path / "p.card"), "--role", "prefill")
    assert status == 0
    fingerprint = load_credentials(producer, Role.PREFILL).card().fingerprint
    spelled = " ".join(re.findall("....", fingerprint))
    assert spelled in out
    status, out = muser(consumer, "import", str(tmp_path / "p.card"), "--host", HOST, "--fingerprint", spelled)
    assert (status, spelled in out) == (0, True)
    status, text = muser(consumer, "export", "--role", "decode")
    assert Card.decode(text.encode()) == load_credentials(consumer, Role.DECODE).card()
    (tmp_path / "c.card").write_text(text)
    assert muser(producer, "import", str(tmp_path / "c.card"))[0] == 0
    assert PeerStore(consumer).read().peers[0].host == HOST
    assert "PRIVATE" not in text


def test_an_import_of_another_node_than_named_is_refused(tmp_path: Path, muser: Muser) -> None:
    (tmp_path / "x.card").write_bytes(stranger(Role.PREFILL, time.time()).encode())
    status, out = muser(tmp_path / "c", "import", str(tmp_path / "x.card"), "--fingerprint", "0" * 32)
    assert status == 2
    assert "not of the one named" in out
    assert PeerStore(tmp_path / "c").read().peers == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "damaged"),
        (b"{}", "card.version"),
        (stranger(Role.PREFILL).encode()[:-9], "damaged"),
        (stranger(Role.PREFILL, time.time() - 6 * YEAR_S).encode(), "expired"),
        (stranger(Role.PREFILL, time.time() + YEAR_S).encode(), "clock"),
    ],
)
def test_an_import_that_cannot_be_used_is_named_and_stores_nothing(
    tmp_path: Path, muser: Muser, content: bytes, reason: str
) -> None:
    (tmp_path / "x.card").write_bytes(content)
    status, out = muser(tmp_path / "c", "import", str(tmp_path / "x.card"))
    assert status == 2
    assert reason in out
    assert PeerStore(tmp_path / "c").read().peers == ()
    assert muser(tmp_path / "c", "import", str(tmp_path / "none"))[0] == 2


def test_an_own_export_is_not_imported(tmp_path: Path, muser: Muser) -> None:
    (tmp_path / "p.card").write_bytes(own(tmp_path, Role.PREFILL).card().encode())
    status, out = muser(tmp_path, "import", str(tmp_path / "p.card"))
    assert status == 2
    assert "this machine's own" in out


def test_a_revoked_peer_is_listed_as_such_and_an_old_export_does_not_bring_it_back(
    tmp_path: Path, muser: Muser
) -> None:
    homes = paired(tmp_path)
    fingerprint = homes.consumer_fingerprint()
    assert "paired: decode node decode-box" in muser(homes.producer, "list")[1]
    status, out = muser(homes.producer, "revoke", fingerprint[:4], fingerprint[4:8])
    assert (status, "Revoked: decode node decode-box" in out) == (0, True)
    assert re.search(r"revoked on \d{4}-\d\d-\d\d .*decode-box", muser(homes.producer, "list")[1])
    (tmp_path / "old.card").write_bytes(own(homes.consumer, Role.DECODE).card().encode())
    status, out = muser(homes.producer, "import", str(tmp_path / "old.card"))
    assert status == 2
    assert "was revoked on" in out
    status, out = muser(homes.producer, "revoke", "0" * 32)
    assert (status, "no peer has a fingerprint" in out) == (2, True)


def test_list_shows_keys_peers_and_what_is_damaged(tmp_path: Path, muser: Muser) -> None:
    assert "No peer is paired" in muser(tmp_path / "nobody", "list")[1]
    homes = paired(tmp_path)
    (homes.producer / "peers" / "bad.json").write_text("{")
    (homes.producer / "peers" / "bad.json").chmod(0o600)
    out = muser(homes.producer, "list")[1]
    assert "this machine: prefill node prefill-box" in out
    assert f"met at {HOST}" in out
    assert re.search(r"not a peer: \S+bad\.json", out)


def test_a_rotation_is_carried_by_export_and_import(tmp_path: Path, muser: Muser) -> None:
    homes = paired(tmp_path)
    status, out = muser(homes.producer, "rotate")
    assert status == 0
    assert "takes over on" in out
    muser(homes.producer, "export", str(tmp_path / "new.card"))
    assert muser(homes.consumer, "import", str(tmp_path / "new.card"))[0] == 0
    peer = PeerStore(homes.consumer).read().peers[0]
    assert len(peer.card.certificates) == 2
    assert peer.host == HOST
    assert "a new certificate takes over" in muser(homes.producer, "list")[1]
    assert muser(homes.producer, "rotate")[0] == 2
    assert muser(homes.producer, "rotate", "--switch")[0] == 0


def test_an_expired_certificate_is_replaced_at_once_and_the_peer_takes_it(tmp_path: Path, muser: Muser) -> None:
    homes = paired(tmp_path)
    reissue(homes.producer, Role.PREFILL, time.time() - 6 * YEAR_S)
    status, out = muser(homes.producer, "rotate")
    assert (status, "the new one is shown from now on" in out) == (0, True)
    muser(homes.producer, "export", str(tmp_path / "new.card"))
    assert muser(homes.consumer, "import", str(tmp_path / "new.card"))[0] == 0
    shown = producer_trust(homes.producer, HOST, time.time).material().certificate_pem
    assert consumer_trust(homes.consumer, HOST, time.time).material().trusted_pem == (shown,)


def test_a_role_must_be_said_where_it_is_not_clear(tmp_path: Path, muser: Muser) -> None:
    status, out = muser(tmp_path, "export")
    assert status == 2
    assert "neither role yet: say --role" in out
    own(tmp_path, Role.PREFILL)
    assert muser(tmp_path, "export")[0] == 0
    own(tmp_path, Role.DECODE)
    assert "both roles: say --role" in muser(tmp_path, "export")[1]


@pytest.mark.parametrize("address", [f"{HOST}:0", f"{HOST}:x", f"{HOST}:65536"])
def test_an_address_without_a_port_number_is_refused(tmp_path: Path, muser: Muser, address: str) -> None:
    status, out = muser(tmp_path, "connect", address)
    assert status == 2
    assert "is not a port" in out


@pytest.mark.parametrize(("address", "reason"), [("[::1]", "::1:4952 does not"), (f"{HOST}..x", "is no host name")])
def test_an_address_in_brackets_needs_no_port_and_a_name_that_is_none_is_named(
    tmp_path: Path, muser: Muser, address: str, reason: str
) -> None:
    status, out = muser(tmp_path, "connect", address)
    assert (status, reason in out) == (2, True), out


def test_a_port_that_there_is_not_is_refused_by_the_flag_s_name(
    tmp_path: Path, muser: Muser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        muser(tmp_path, "listen", "--port", "65536")
    assert "--port: '65536' is not a whole number from 0 to 65535" in capsys.readouterr().err


def test_alone_it_says_how_and_lists_who_is_on_the_link(
    tmp_path: Path, muser: Muser, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = discovery.look
    monkeypatch.setattr(discovery, "look", lambda: hear(1.5, ["127.0.0.1"]))
    with (
        discovery.announced(discovery.Kind.PRODUCER, "gx10", ("127.0.0.1", 4950), "ab" * 16, ["127.0.0.1"]),
        discovery.announced(discovery.Kind.PAIRING, "gx11", ("127.0.0.1", 4952), "", ["127.0.0.1"]),
    ):
        status, printed = muser(tmp_path)
    assert status == 0
    assert "muser pair listen" in printed
    assert f"gx10 prefills at 127.0.0.1:4950, key {'ab' * 16}" in printed
    assert "gx11 waits for `muser pair connect` at 127.0.0.1:4952" in printed
    assert not (tmp_path / "peers").exists()


def test_without_the_package_it_says_what_would_show_them(
    tmp_path: Path, muser: Muser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    status, printed = muser(tmp_path)
    assert status == 0
    assert "muser[discovery]" in printed
