"""A TCP proxy in front of a database server: it makes the server go away for one process, and for nobody else."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
from typing import Any, Self, TypeVar

from django.db import connections

from tests.support.databases import child_environment

#: Where a server listens unless its alias says otherwise.
PORTS = {"postgresql": 5432, "mysql": 3306, "microsoft": 1433}
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards bytes between clients on ``port`` of this host and a server, until it is told otherwise.

    ``refuse``: the server has stopped; connections are reset and new ones refused. ``silence``: nothing comes through,
    and nobody says so. ``resume``: all is well again. Leaving the ``with`` block resets what is left.
    """

    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self.port = 0
        #: What clients have said, all of them together.
        self.heard = bytearray()
        #: After so many more answers, whatever was asked, it falls silent by itself.
        self.answers = math.inf
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._listen()

    def refuse(self) -> None:
        """Be a server that has stopped."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()
        self._flows.set()
        with self._lock:
            open_sockets = list(self._sockets)
        for each in open_sockets:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)
        for each in open_sockets:
            each.close()

    def silence(self) -> None:
        """Be a server that has stopped to answer: connections can be made, and nothing comes through."""
        self._flows.clear()

    def resume(self) -> None:
        """Forward everything again, what was sent meanwhile too."""
        self._flows.set()
        if self._listener is None:
            self._listen()

    def close(self) -> None:
        """Stop for good."""
        self.refuse()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _listen(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener)

    def _start(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.server, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
                refusing = self._listener is not listener
            self._start(self._pump, client, client, server)
            self._start(self._pump, client, server, client)
            if refusing:
                self.refuse()

    def passing(self, client: socket.socket, data: bytes, *, asked: bool) -> None:
        """Note what a client asked, or was answered, before it is passed on."""
        if asked:
            self.heard += data
        else:
            self.answers -= 1
            if self.answers < 0:
                self.silence()

    def _pump(self, client: socket.socket, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.passing(client, data, asked=source is client)
                self._flows.wait()
                target.sendall(data)
        self._flows.wait()  # that one side has gone is not told either
        with self._lock:
            self._sockets -= {source, target}
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


_P = TypeVar("_P", bound=Proxy)


def proxy_for(alias: str, kind: type[_P] = Proxy) -> _P:  # type: ignore[assignment]
    """Return a proxy in front of the server of a database alias."""
    parameters = connections[alias].settings_dict
    port = parameters["PORT"] or PORTS[connections[alias].vendor]
    return kind(parameters["HOST"] or "127.0.0.1", int(port))


#: Options of a project that would rather hear of a dead server soon.
IMPATIENT = {
    "postgresql": {"connect_timeout": 2},
    "mysql": {"connect_timeout": 2, "read_timeout": 2},
    "microsoft": {"connection_timeout": 2},
}


def through(proxy: Proxy, alias: str, *, impatient: bool = False) -> dict[str, str]:
    """Return the environment for a child process that reaches an alias through the proxy."""
    databases = json.loads(child_environment()["SQLSEM_TEST_DATABASES"])
    databases[alias] |= {"HOST": "127.0.0.1", "PORT": str(proxy.port)}
    if impatient:
        databases[alias]["OPTIONS"] = (databases[alias].get("OPTIONS") or {}) | IMPATIENT[connections[alias].vendor]
    return {"SQLSEM_TEST_DATABASES": json.dumps(databases)}
