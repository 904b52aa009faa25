"""`muser pair`: make two machines trust each other, see whom this one trusts, and end that."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from muser_wire.cli.show import bold
from muser_wire.errors import TransportError, WireError
from muser_wire.flags import port as port_number
from muser_wire.home import muser_home
from muser_wire.pairing.card import MAX_CARD_NBYTES, Card, Role
from muser_wire.pairing.certificates import check_time, day, show_fingerprint
from muser_wire.pairing.credentials import (
    OwnCredentials,
    existing_roles,
    load_credentials,
    load_or_create_credentials,
    rotate,
    switch,
)
from muser_wire.pairing.errors import ExchangeError, PairingError
from muser_wire.pairing.exchange import NONCE_NBYTES, Exchange, Side, State
from muser_wire.pairing.store import HOST, Peer, PeerStore
from muser_wire.private_files import publish
from muser_wire.transport import discovery
from muser_wire.transport.pairing import PairingLink, PairingPort, call

DEFAULT_PORT = 4952
LISTEN_S = 600.0
"""How long `muser pair listen` waits for a caller."""

ANSWER_S = 300.0
"""How long a person may take to compare two codes on two machines."""

MAX_CALLERS = 10
"""Callers that may fail before this machine shows its card; then something else calls, and somebody should look."""

HOW = f"""\
To pair two machines, on the one that prefills:

    muser pair listen

and on the one that decodes, with the first one's name or address:

    muser pair connect HOST:{DEFAULT_PORT}

Both show a code. If the codes are equal, answer y on both. From then on the nodes serve each other over
mutual TLS with these keys only:

    muser-prefill serve --model PATH --host ADDRESS
    muser-decode serve --model PATH --producer HOST:4950

Without a person at each machine: `muser pair export FILE` on both, carry the files over by a way that you
trust, `muser pair import FILE` on both. `muser pair list` shows whom this machine trusts, `muser pair
revoke FINGERPRINT` ends that at once, `muser pair rotate` makes a new certificate."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser pair` and its subcommands."""
    parser = commands.add_parser("pair", help="make two machines trust each other; alone: says how")
    parser.set_defaults(run=run_how)
    actions = parser.add_subparsers(metavar="ACTION")
    _add_exchange(actions)
    exporter = actions.add_parser("export", help="write what another machine needs to trust this one; nothing secret")
    exporter.add_argument("file", nargs="?", type=Path, help="default: standard output")
    _add_own(exporter)
    exporter.set_defaults(run=run_export)
    importer = actions.add_parser("import", help="trust the machine whose export this is")
    importer.add_argument("file", type=Path)
    importer.add_argument("--host", default="", help="where its node will be reached, where several are paired")
    importer.add_argument("--fingerprint", help="refuse the file if it is of another node")
    importer.set_defaults(run=run_import)
    actions.add_parser("list", help="show this machine's keys and its peers").set_defaults(run=run_list)
    revoker = actions.add_parser("revoke", help="refuse a peer from its next call on")
    revoker.add_argument("fingerprint", nargs="+", help="as `muser pair list` shows it; its first 8 digits are enough")
    revoker.set_defaults(run=run_revoke)
    rotator = actions.add_parser("rotate", help="make a new certificate; for 7 days the old one is taken as well")
    rotator.add_argument("--switch", action="store_true", help="show the new one from now on, not at the overlap's end")
    _add_own(rotator)
    rotator.set_defaults(run=run_rotate)


def _add_exchange(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listener = actions.add_parser("listen", help="wait for the other machine's `muser pair connect`")
    listener.add_argument("--host", default="0.0.0.0", help="address to bind while this runs")  # noqa: S104 - the other machine calls
    listener.add_argument("--port", type=port_number, default=DEFAULT_PORT, help="TCP port; 0: any")
    _add_own(listener, Role.PREFILL)
    listener.set_defaults(run=run_listen)
    caller = actions.add_parser("connect", help="call the machine that runs `muser pair listen`")
    caller.add_argument("address", metavar="HOST:PORT", help=f"the port may be left out: {DEFAULT_PORT}")
    _add_own(caller, Role.DECODE)
    caller.set_defaults(run=run_connect)


def _add_own(parser: argparse.ArgumentParser, default: Role | None = None) -> None:
    said = f"default: {default.value}" if default else "default: the one that has keys here"
    parser.add_argument(
        "--role", type=Role, choices=list(Role), metavar="prefill|decode", default=default, help=f"this node; {said}"
    )
    parser.add_argument("--name", default="", help="what peers call this machine; default: its host name")


def run_how(arguments: argparse.Namespace) -> int:
    """Print how to pair, and who announces itself on the local link. Nothing connects to anybody."""
    print(HOW)
    if not discovery.available():
        print(f"\nTo see here who is on the link: {discovery.HINT}")
        return 0
    print("\nSeen on this link (what they say of themselves):")
    sys.stdout.flush()
    seen = discovery.look()
    print("\n".join(map(_shown, seen)) if seen else "    nobody")
    return 0


def _shown(seen: discovery.Seen) -> str:
    where = ", ".join(f"{address}:{seen.port}" for address in seen.addresses) or f"port {seen.port}"
    if seen.kind is discovery.Kind.PAIRING:
        return f"    {seen.name} waits for `muser pair connect` at {where}"
    return f"    {seen.name} prefills at {where}" + (f", key {seen.fingerprint}" if seen.fingerprint else "")


def _announce(announcement: contextlib.ExitStack, arguments: argparse.Namespace, port: int) -> None:
    """Say on the link that this machine waits, where somebody could come from and the package for it is there."""
    if not discovery.available() or not discovery.reachable(arguments.host):
        return
    at = (arguments.host, port)
    try:
        announcement.enter_context(
            discovery.announced(discovery.Kind.PAIRING, arguments.name or socket.gethostname(), at, "")
        )
    except TransportError as error:
        print(f"Nobody will see this machine by itself ({error}); that does no harm.")


def run_listen(arguments: argparse.Namespace) -> int:
    """Wait for the other machine, compare codes, store it."""
    own = _own(arguments)
    port = PairingPort(arguments.host, arguments.port)
    announcement = contextlib.ExitStack()
    try:
        _announce(announcement, arguments, port.port)
        _say_own(own)
        print(
            f"Listening on {arguments.host} port {port.port}. On the other machine: muser pair connect HOST:{port.port}"
        )
        sys.stdout.flush()
        for _ in range(MAX_CALLERS):
            with port.accept(LISTEN_S) as link:
                host = _host(link)
                exchange = _exchange(own, Side.LISTENER)
                try:
                    show_cards(exchange, link)
                    return settle(exchange, link, host)
                except (TransportError, ExchangeError, PairingError) as error:
                    if exchange.has_revealed:
                        raise PairingError(
                            f"{error}. Nothing was stored. Nobody gets a second try at a code, so this has ended: "
                            f"start `muser pair listen` again"
                        ) from error
                    print(f"A caller from {host or 'an address that is gone'} failed ({error}); still listening.")
                    _turn_away(exchange, link, error)
    finally:
        announcement.close()
        port.close()
    raise PairingError(f"{MAX_CALLERS} callers failed: something else calls this port")


def _turn_away(exchange: Exchange, link: PairingLink, error: WireError) -> None:
    """Tell a Muser whose card or clock cannot be accepted; what is no Muser would not understand."""
    if isinstance(error, PairingError):
        with contextlib.suppress(TransportError):
            link.send(exchange.decline(error))


def _host(link: PairingLink) -> str:
    """Return the caller's address, or nothing: a connection that was reset has no other end any more."""
    try:
        return link.peer_host
    except OSError:
        return ""


def run_connect(arguments: argparse.Namespace) -> int:
    """Call the other machine, compare codes, store it."""
    own = _own(arguments)
    host, port = _split(arguments.address)
    with call(host, port) as link:
        _say_own(own)
        exchange = _exchange(own, Side.CALLER)
        show_cards(exchange, link)
        return settle(exchange, link, host)


def show_cards(exchange: Exchange, link: PairingLink) -> None:
    """Exchange commitments, then cards; the code is known after.

    Raises:
        TransportError: the connection broke.
        ExchangeError: the other side broke a rule, or declined.
        PairingError: its card or its clock cannot be accepted.
    """
    link.send(exchange.begin())
    while exchange.state in {State.COMMITTED, State.BOUND}:
        link.send(exchange.receive(link.receive()))


def settle(exchange: Exchange, link: PairingLink, host: str) -> int:
    """Ask the person here, hear what the one there said, and store the peer when both agree; return an exit status."""
    peer = exchange.peer
    print(f"The other machine: {_described(peer)}")
    print(f"Code: {bold(exchange.code)}")
    if not _person_agrees(exchange.code):
        link.send(exchange.decline())
        print("Not paired. Nothing was stored. Codes that differ mean that somebody is in between.")
        return 1
    link.send(exchange.agree())
    print("Waiting for the answer on the other machine.")
    sys.stdout.flush()
    while exchange.state is not State.PAIRED:
        exchange.receive(link.receive(ANSWER_S))
    PeerStore(muser_home()).publish(Peer(peer, host, int(time.time())))
    print(f"Paired with {peer.name}.")
    return 0


def _person_agrees(code: str) -> bool:
    """Ask whether the codes are equal. Besides y, the code as the other machine shows it is a yes."""
    try:
        answer = input("Does the other machine show the same code? [y/N] ").strip().lower()
    except EOFError:
        return False
    return answer in {"y", "yes"} or answer.replace(" ", "") == code.replace(" ", "")


def run_export(arguments: argparse.Namespace) -> int:
    """Write this node's card."""
    own = _own(arguments)
    text = own.card().encode()
    if arguments.file is None:
        sys.stdout.write(text.decode("ascii"))
        return 0
    file: Path = arguments.file
    # What is no file, such as a pipe, cannot be replaced.
    write = Path.write_bytes if file.exists() and not file.is_file() else publish
    try:
        write(file, text)
    except OSError as error:
        raise PairingError(f"{arguments.file} cannot be written: {error.strerror or error}") from error
    print(f"Wrote {arguments.file}. On the other machine: muser pair import {arguments.file.name}")
    print(f"It must show this fingerprint: {show_fingerprint(own.card().fingerprint)}")
    return 0


def run_import(arguments: argparse.Namespace) -> int:
    """Store the peer whose card a file holds."""
    card = Card.decode(_read_card(arguments.file))
    expected = (arguments.fingerprint or card.fingerprint).replace(" ", "").lower()
    if expected != card.fingerprint:
        raise PairingError(
            f"{arguments.file} is of the node {show_fingerprint(card.fingerprint)}, not of the one named"
        )
    _check_importable(card)
    store = PeerStore(muser_home())
    known = store.find(card.fingerprint)
    if known is not None and known.revoked_at_s is not None:
        raise PairingError(
            f"{_described(card)} was revoked on {day(known.revoked_at_s)}; "
            f"to trust it again, pair by `muser pair listen` and `muser pair connect`"
        )
    host = arguments.host or (known.host if known else "")
    if not HOST.fullmatch(host):
        raise PairingError(f"--host {host!r} is no host name or address")
    store.publish(Peer(card, host, known.paired_at_s if known else int(time.time())))
    print(f"Trusted from now on: {_described(card)}")
    print("Compare the fingerprint with the one that `muser pair list` shows there; if it differs, revoke it here.")
    return 0


def _check_importable(card: Card) -> None:
    now_s = time.time()
    check_time(card.certificates[-1].certificate, now_s, "the peer's")
    for role in existing_roles(muser_home()):
        if load_credentials(muser_home(), role).node_key.public_bytes == card.node_key:
            raise PairingError("this is this machine's own export")


def run_list(arguments: argparse.Namespace) -> int:
    """Print this machine's keys and its peers."""
    home = muser_home()
    for role in existing_roles(home):
        own = load_credentials(home, role)
        print(f"this machine: {_described(own.card())}, certificate until {_ends(own.card())}")
        if own.switch_at_s is not None and time.time() < own.switch_at_s:
            print(f"  a new certificate takes over on {day(own.switch_at_s)}")
    contents = PeerStore(home).read()
    for peer in contents.peers:
        host, ends = peer.host or "-", _ends(peer.card)
        print(f"{_standing(peer)}: {_described(peer.card)}, met at {host}, certificate until {ends}")
    for reason in contents.damaged:
        print(f"not a peer: {reason}")
    if not contents.peers:
        print("No peer is paired. `muser pair` says how.")
    return 0


def run_revoke(arguments: argparse.Namespace) -> int:
    """Refuse a peer from now on."""
    peer = PeerStore(muser_home()).revoke("".join(arguments.fingerprint), time.time())
    print(f"Revoked: {_described(peer.card)}. Nodes here refuse it from its next call on, without a restart.")
    return 0


def run_rotate(arguments: argparse.Namespace) -> int:
    """Make a new certificate, or end the overlap of the one before."""
    home, role = muser_home(), _role(arguments)
    if arguments.switch:
        switch(home, role, time.time())
        print("The new certificate is shown from now on. A peer that has not imported it refuses this node.")
        return 0
    own = rotate(home, role, time.time())
    if own.switch_at_s is None:
        print("The old certificate had expired: the new one is shown from now on.")
        print("Carry `muser pair export` of this machine to each peer and import it there; until then it is refused.")
        return 0
    print(f"A new certificate takes over on {day(own.switch_at_s)}; until then the old one is shown.")
    print("Before that, carry `muser pair export` of this machine to each peer and import it there: it takes both.")
    return 0


def _own(arguments: argparse.Namespace) -> OwnCredentials:
    name = arguments.name or socket.gethostname().partition(".")[0]
    return load_or_create_credentials(muser_home(), _role(arguments), name, time.time())


def _role(arguments: argparse.Namespace) -> Role:
    if arguments.role is not None:
        return Role(arguments.role)
    roles = existing_roles(muser_home())
    if len(roles) != 1:
        found = "both roles" if roles else "neither role yet"
        raise PairingError(f"this machine has keys for {found}: say --role prefill or --role decode")
    return roles[0]


def _exchange(own: OwnCredentials, side: Side) -> Exchange:
    return Exchange(side, own.node_key, own.card(), os.urandom(NONCE_NBYTES), time.time())


def _split(address: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if not separator or address.endswith("]"):
        return address.strip("[]"), DEFAULT_PORT
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise PairingError(f"{address}: {port!r} is not a port from 1 to 65535")
    return host.strip("[]"), int(port)


def _read_card(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_CARD_NBYTES + 1)
    except OSError as error:
        raise PairingError(f"{path} cannot be read: {error.strerror or error}") from error


def _say_own(own: OwnCredentials) -> None:
    print(f"This machine: {_described(own.card())}")


def _described(card: Card) -> str:
    return f"{card.role.value} node {card.name}, fingerprint {show_fingerprint(card.fingerprint)}"


def _ends(card: Card) -> str:
    return f"{card.certificates[-1].certificate.x509.not_valid_after_utc:%Y-%m-%d}"


def _standing(peer: Peer) -> str:
    if peer.revoked_at_s is not None:
        return f"revoked on {day(peer.revoked_at_s)}"
    try:
        check_time(peer.card.certificates[-1].certificate, time.time(), "the peer's")
    except WireError:
        return "not valid by this machine's clock"
    return "paired"
