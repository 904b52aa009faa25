"""A TCP proxy on loopback that can cut or freeze what it forwards: a cable that tests may pull."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class TcpProxy:
    """Forwards connections to `target`. After `limit_nbytes` from the target it does what `then` says.

    `then` is "cut" (both ends are closed) or "freeze" (nothing moves any more, both ends stay open).
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.limit_nbytes: int | None = None
        self.then = "cut"
        self.forwarded_nbytes = 0
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, limit_nbytes: int, then: str) -> None:
        """Let `limit_nbytes` more come from the target, then cut or freeze every connection."""
        self.then = then
        self.limit_nbytes = self.forwarded_nbytes + limit_nbytes

    def repair(self) -> None:
        """Forward again; frozen connections are closed."""
        self.limit_nbytes = None
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        self._closed.set()
        self._listener.close()
        self.repair()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, client, server:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while not self._closed.is_set():
                for key, _ in selector.select(0.05):
                    if self._tripped():
                        if self.then == "cut":
                            return
                        continue
                    if not self._move(key.fileobj, key.data, server):  # type: ignore[arg-type]
                        return

    def _tripped(self) -> bool:
        return self.limit_nbytes is not None and self.forwarded_nbytes >= self.limit_nbytes

    def _move(self, source: socket.socket, target: socket.socket, server: socket.socket) -> bool:
        """Forward what there is; False at the end of a connection."""
        room = 65536
        if source is server and self.limit_nbytes is not None:
            room = max(1, min(room, self.limit_nbytes - self.forwarded_nbytes))
        try:
            data = source.recv(room)
            target.sendall(data)
        except OSError:
            return False
        if source is server:
            self.forwarded_nbytes += len(data)
        return bool(data)
