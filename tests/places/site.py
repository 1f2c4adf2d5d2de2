"""Real web servers with a chosen module of urls, and clients that can leave at any moment.

A test and the views talk through files: ``marks`` of the site's directory (``tests.places.marks``).
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Self

import psutil

from tests.places.marks import Marks
from tests.support.databases import ROOT, child_environment
from tests.support.threads import wait_until

#: Seconds for what takes a moment, on a machine that has much else to do.
PATIENCE = 60.0

_GUNICORN = ("-m", "gunicorn", "--no-control-socket", "--graceful-timeout", "5", "--bind", "127.0.0.1:{port}")
_WAITRESS = ("-m", "waitress", "--listen=127.0.0.1:{port}", "--threads=12", "--channel-request-lookahead=1")
#: The command of each kind of server, after the interpreter.
COMMANDS: dict[str, tuple[str, ...]] = {
    "sync": (*_GUNICORN, "-k", "sync", "-w", "4", "tests.places.wsgi"),
    "gthread": (*_GUNICORN, "-k", "gthread", "-w", "2", "--threads", "8", "tests.places.wsgi"),
    "preload": (*_GUNICORN, "-k", "gthread", "-w", "2", "--threads", "8", "--preload", "tests.places.wsgi"),
    "gevent": (*_GUNICORN, "-k", "gevent", "-w", "1", "tests.places.wsgi"),
    "waitress": (*_WAITRESS, "tests.places.wsgi:application"),
    "uvicorn": ("-m", "uvicorn", "--port", "{port}", "--lifespan", "off", "tests.places.asgi:application"),
    "gunicorn-uvicorn": (*_GUNICORN, "-k", "uvicorn.workers.UvicornWorker", "-w", "1", "tests.places.asgi:application"),
    "gunicorn-asgi": (*_GUNICORN, "-k", "asgi", "-w", "1", "tests.places.asgi:application"),
    "daphne": ("-m", "daphne", "-b", "127.0.0.1", "-p", "{port}", "tests.places.asgi:application"),
}


class Site:
    """One running server with the tests' databases, whose locks are in ``alias``.

    ``urls`` is its module of urls, ``middleware`` its list of middleware; ``options`` go to the server's command
    before the application, and ``env`` into its environment. ``marks`` are the files through which its views and the
    test talk. Leaving the ``with`` block ends it and all its workers.
    """

    def __init__(
        self,
        kind: str,
        alias: str,
        *options: str,
        urls: str = "tests.places.urls",
        middleware: tuple[str, ...] = (),
        atomic_requests: bool = False,
        env: dict[str, str] | None = None,
        sqlsem: dict[str, Any] | None = None,
    ) -> None:
        self.kind, self.alias, self.options = kind, alias, options
        self._directory = tempfile.TemporaryDirectory(prefix="sqlsem-site-")
        self.marks = Marks(self._directory.name)
        self._environment = child_environment(
            DJANGO_SETTINGS_MODULE="tests.places.settings",
            SQLSEM_TEST_SETTINGS=json.dumps({"DATABASE": alias, **(sqlsem or {})}),
            SQLSEM_TEST_URLS=urls,
            SQLSEM_TEST_MIDDLEWARE=json.dumps(middleware),
            SQLSEM_TEST_ATOMIC_REQUESTS="1" if atomic_requests else "",
            SQLSEM_TEST_MARKS=self._directory.name,
            PYTHONUNBUFFERED="1",
            **(env or {}),
        )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start it at a free port, and wait until it answers."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [part.format(port=self.port) for part in COMMANDS[self.kind]]
        self.process = subprocess.Popen(
            [sys.executable, *command[:-1], *self.options, command[-1]],
            cwd=ROOT,
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        deadline = time.monotonic() + 2 * PATIENCE
        while not self._listens():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    @property
    def url(self) -> str:
        """Its address, for clients other than ``Caller``."""
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """Return what it has written."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def logged(self, *words: str, since: int = 0) -> list[str]:
        """Return the lines of its log, from character ``since`` on, in which all these words are."""
        return [line for line in self.log()[since:].splitlines() if all(word in line for word in words)]

    def workers(self) -> list[int]:
        """Return the pids of its worker processes; where it has none, its own."""
        children = [child.pid for child in psutil.Process(self.process.pid).children()]
        return children if COMMANDS[self.kind][1] == "gunicorn" else [self.process.pid]

    def call(self, path: str, **options: Any) -> Caller:
        """Send a request on a connection of its own. The caller closes it."""
        caller = Caller(self.port, tls="--certfile" in self.options)
        try:
            caller.send(path, **options)
        except BaseException:
            caller.close()
            raise
        return caller

    def get(self, path: str, *, timeout: float = PATIENCE, **options: Any) -> Answer:
        """Send a request and return the whole answer. ``TimeoutError`` if it takes longer than ``timeout`` seconds."""
        with self.call(path, **options) as caller:
            caller.socket.settimeout(timeout)
            return caller.answer()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal, kindly by default; ``start()`` begins anew."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)  # workers that are left
            self.process.wait(PATIENCE)

    def close(self) -> None:
        """End it for good. Idempotent."""
        if hasattr(self, "process"):
            self.marks.release_all()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self._log.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _listens(self) -> bool:
        try:
            with self.call("/ping") as caller:
                return caller.answer().status == 200
        except (OSError, http.client.HTTPException):
            return False


class Answer:
    """The answer to one request."""

    def __init__(self, response: http.client.HTTPResponse, body: bytes) -> None:
        self.status, self.headers, self.body = response.status, response.headers, body

    @property
    def text(self) -> str:
        """The body."""
        return self.body.decode()


class Caller:
    """One raw connection to a site: it can send without reading, pipeline, half-close, hang up and reset."""

    def __init__(self, port: int, *, tls: bool = False) -> None:
        self.socket: socket.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            try:
                self.socket = context.wrap_socket(self.socket)
            except BaseException:
                self.socket.close()
                raise
        self._reader = _Reader(socket.SocketIO(self.socket, "r"))
        self._methods: list[str] = []
        self._keep = True

    def send(
        self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None, keep: bool = False
    ) -> None:
        """Send a request; ``keep``: the connection is to stay open after it."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Connection: {'keep-alive' if keep else 'close'}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._methods.append(method)
        self._keep = keep
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def begin(self) -> http.client.HTTPResponse:
        """Wait for the head of the next answer, and return the answer with its body unread."""
        response = http.client.HTTPResponse(_Borrowed(self._reader), method=self._methods.pop(0))  # type: ignore[arg-type]
        response.begin()
        return response

    def answer(self) -> Answer:
        """Wait for the next answer as a whole. After the last one the connection is closed, as servers linger else."""
        response = self.begin()
        answer = Answer(response, response.read())
        if not self._methods and not self._keep:
            self.close()
        return answer

    def half_close(self) -> None:
        """Send no more, but go on reading: the server sees the end of the stream."""
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Leave with a reset, as a crashed client's host sends it."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._reader.really_close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Reader(io.BufferedReader):
    """Outlives the answers that are read from it: bytes of the next one may be in its buffer."""

    def close(self) -> None:
        """Do nothing: an answer closes what it was read from."""

    def really_close(self) -> None:
        super().close()


class _Borrowed:
    def __init__(self, reader: _Reader) -> None:
        self.reader = reader

    def makefile(self, *args: Any, **kwargs: Any) -> _Reader:
        return self.reader


def waiters(alias: str, name: str) -> int:
    """Return how many wait for a name: what the rows of the waiting processes say."""
    from django_sqlsem.models import WaiterRow

    rows = WaiterRow.objects.using(alias).filter(semaphore__name=name)
    return sum(rows.values_list("waiting", flat=True))


def wait_for_waiters(alias: str, name: str, count: int, *, timeout: float = PATIENCE) -> None:
    """Wait until so many, neither more nor fewer, wait for a name."""
    found: Callable[[], bool] = lambda: waiters(alias, name) == count  # noqa: E731
    wait_until(found, timeout=timeout, what=f"{count} waiters for {name!r}, there are {waiters(alias, name)}")
