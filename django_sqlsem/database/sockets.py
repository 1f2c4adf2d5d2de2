"""The sockets behind ODBC connections, which no driver tells: found by what a connect adds to the process's files.

A watch over statements that a silent server does not answer: Microsoft's driver gives one up after 15 s, not 5.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from django_sqlsem.core.threads import DaemonThread, Turn

#: A statement of which nothing was heard this many seconds after its answer was due costs its session.
_GRACE: Final = 1.5
#: How often the watch looks, in seconds.
_LOOK: Final = 0.5
#: How long after ``call_soon`` a step is called, in seconds.
SOON: Final = 0.15


class Watched(Protocol):
    """What is watched."""

    #: Since when an answer is owed, by ``time.monotonic()``; 0: none is, or it may take as long as it likes.
    asked: float
    #: For how many seconds it may be owed.
    limit: int

    def cut(self) -> None:
        """End it, also in the middle of a statement."""


class Watch:
    """A thread that runs while there is anything to watch. It takes what is to be done a moment later, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: What is to be called, and when, by ``time.monotonic()``: the delay is the same for all.
        self._steps: queue.SimpleQueue[tuple[float, Callable[[], object]]] = queue.SimpleQueue()
        #: By id. Each change is one step of the interpreter, so an interrupted thread leaves no lock behind.
        self._watched: dict[int, weakref.ref[Watched]] = {}
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Watch this one from now on, until it is removed."""
        self._watched[id(watched)] = weakref.ref(watched)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = DaemonThread("sqlsem-watch", self._run)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can start at the interpreter's end: the driver's own limit holds
                    self._thread = None

    def remove(self, watched: Watched) -> None:
        """Watch this one no longer."""
        self._watched.pop(id(watched), None)

    def call_soon(self, step: Callable[[], object]) -> None:
        """Call ``step`` after ``SOON``, if anything is watched by then. It may be called from any thread."""
        self._steps.put((time.monotonic() + SOON, step))

    def _take_steps(self, until: float) -> None:
        """Sleep until then, but for the steps that are due before."""
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                due, step = self._steps.get(timeout=left)
                time.sleep(max(0.0, due - time.monotonic()))
                step()

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            self._take_steps(began + _LOOK)
            stood_still = time.monotonic() - began > _LOOK + _GRACE
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
            if stood_still:  # so did the others, and their answers may have come meanwhile
                continue
            for number, reference in list(self._watched.items()):
                watched = reference()
                if watched is None:
                    self._watched.pop(number, None)
                    continue
                asked = watched.asked  # once: it is answered at any moment
                if asked and time.monotonic() - asked > watched.limit + _GRACE:
                    watched.cut()


watch = Watch()


T = TypeVar("T")

#: Where SQL Server listens unless an alias says otherwise.
DEFAULT_PORT: Final = 1433
#: Where Azure SQL sends a client on to, unless its policy for connections is "Proxy".
_REDIRECTED: Final = range(11000, 12000)
_OF_MICROSOFT: Final = "ODBC Driver"
_FILES: Final = "/proc/self/fd"
#: One connect at a time, so that what is new is its own; and none during a fork, as driver managers have locks.
gate = Turn(lambda: None)
#: A descriptor, and the number of the file behind it: descriptors are used again by others.
Socket: TypeAlias = tuple[int, int]
#: All that a fork would copy, from the connect on.
_opened: list[Socket] = []
#: After how many silent seconds the other side is asked, how long between two asks, and how often: drivers may not.
_ASK_AFTER, _ASK_EVERY, _ASK_TIMES = 30, 5, 3
#: ODBC's number of that attribute.
_SQL_ATTR_CONNECTION_TIMEOUT: Final = 113
#: States of a TCP socket that the other side has closed, or reset: CLOSE and CLOSE_WAIT (net/tcp_states.h).
_CLOSED: Final = (7, 8)
#: Where Linux tells of a TCP socket how many milliseconds ago it got something: ``tcpi_last_data_recv`` (linux/tcp.h).
_LAST_RECEIVED: Final = struct.Struct("@52xI")


class _Login:
    """A connect under way. Microsoft's driver does not limit the part of it that is encrypted."""

    def __init__(self, limit: int, port: int | None) -> None:
        self.asked, self.limit = time.monotonic(), limit
        self._before, self._port = _sockets(), port

    def opened(self) -> list[int]:
        """Return the TCP sockets that were opened since."""
        return [fd for fd, inode in _sockets().items() if self._before.get(fd) != inode and _is_tcp(fd)]

    def cut(self) -> None:
        """End it: that is, what was opened since, leads to the server and has heard nothing for as long as it may."""
        for fd in self.opened():
            with contextlib.suppress(OSError):
                if (self._port is None or _leads_to(fd, self._port)) and _silence_of(fd) >= self.limit:
                    cut([(fd, os.fstat(fd).st_ino)])


def opening(
    connect: Callable[[], T], port: int | None = None, limit: int = 60, patience: float = -1.0
) -> tuple[T, list[Socket]]:
    """Call ``connect`` in its turn; return what it returns, and the TCP socket that it opened.

    None is known where the system does not list a process's files, or if others were opened at the same moment; those
    that lead to another ``port`` do not count. It fails if the server says nothing for about ``limit`` seconds.
    ``patience``: for how many seconds to wait; then it is called all the same, and no socket is known.
    """
    mine = gate  # whatever takes its place in a forked child
    if not mine.acquire(timeout=patience):
        return connect(), []
    try:
        login = _Login(limit, port)
        watch.add(login)
        try:
            connection = connect()
        finally:
            watch.remove(login)
        new = login.opened()
        if len(new) > 1 or port is not None:
            new = [fd for fd in new if _leads_to(fd, port)]
        found = [(fd, os.fstat(fd).st_ino) for fd in new] if len(new) == 1 else []
        _opened[:] = [*filter(_is_there, _opened), *found]
    finally:
        mine.release()
    for fd, _inode in found:
        _keep_alive(fd)
    return connection, found


def port_in(settings: Mapping[str, Any]) -> int | None:
    """Return the port that an alias's settings name; ``None`` if something else does: an instance, a file, a DSN."""
    options, (host, _, port) = settings.get("OPTIONS") or {}, str(settings.get("HOST") or "").partition(",")
    if not options.get("python_driver"):
        named = not (_OF_MICROSOFT in str(options.get("driver", _OF_MICROSOFT)) or options.get("host_is_server"))
        if named or options.get("dsn"):  # in freetds.conf, in odbc.ini
            return None
    port = str(settings.get("PORT") or port.strip() or ("" if "\\" in host else DEFAULT_PORT))
    return int(port) if port.isdecimal() else None


def limit_reads(raw: Any, seconds: int) -> None:
    """Limit a connection besides its cursors: else Microsoft's driver waits for ever for a silent server."""
    raw.timeout = seconds
    driver = raw.__class__.__module__  # also behind a proxy, as tools for tracing put one there
    if driver.startswith("mssql_python"):  # whose timeout is its cursors' alone
        raw.set_attr(_SQL_ATTR_CONNECTION_TIMEOUT, seconds)


def cut(sockets: list[Socket]) -> None:
    """End the connections behind these sockets at once, for both sides; the driver may be waiting for one."""
    for fd, inode in sockets:
        with contextlib.suppress(OSError), _opened_again(fd) as sock:
            if os.fstat(sock.fileno()).st_ino == inode:  # else the driver has closed it, and it is somebody else's
                sock.shutdown(socket.SHUT_RDWR)


def are_closed(sockets: list[Socket]) -> bool:
    """Whether the other side has closed these, as far as is known here: not if the driver has closed them too."""
    for fd, inode in sockets:
        with contextlib.suppress(OSError, AttributeError), _opened_again(fd) as sock:
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            if os.fstat(sock.fileno()).st_ino == inode and state in _CLOSED:
                return True
    return False


def forget(sockets: list[Socket]) -> None:
    """Know that these have been closed."""
    for each in sockets:
        with contextlib.suppress(ValueError):
            _opened.remove(each)


def let_go(descriptor: int) -> None:
    """In a forked child: drop its copy of a socket, or it would keep a dead parent's session alive."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def after_fork() -> None:
    """In a forked child: nothing is watched, nobody is connecting, and nothing is open."""
    global gate, watch
    gate, watch = Turn(lambda: None), Watch()
    for descriptor, _inode in filter(_is_there, _opened):
        with contextlib.suppress(OSError):
            let_go(descriptor)
    _opened.clear()


def _is_there(opened: Socket) -> bool:
    with contextlib.suppress(OSError):
        return os.fstat(opened[0]).st_ino == opened[1]
    return False


def _sockets() -> dict[int, str]:
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_FILES):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{_FILES}/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def _is_tcp(descriptor: int) -> bool:
    with contextlib.suppress(OSError), _opened_again(descriptor) as sock:
        return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    return False


@contextlib.contextmanager
def _opened_again(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket behind a descriptor, by one of its own. Raises ``OSError`` if there is none."""
    own = os.dup(descriptor)
    try:
        sock = socket.socket(fileno=own)
    except OSError:  # by now it is a file, or the like
        os.close(own)
        raise
    with sock:
        yield sock


def _port_of(descriptor: int) -> int | None:
    with contextlib.suppress(OSError), _opened_again(descriptor) as sock:
        return int(sock.getpeername()[1])
    return None


def _leads_to(descriptor: int, port: int | None) -> bool:
    found = _port_of(descriptor)
    return found is not None and (found == port or found in _REDIRECTED)


def _silence_of(descriptor: int) -> float:
    """Return for how many seconds nothing has come in."""
    with contextlib.suppress(OSError, AttributeError), _opened_again(descriptor) as sock:
        (milliseconds,) = _LAST_RECEIVED.unpack(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.size)
        )
        return float(milliseconds) / 1000
    return 0.0


def _keep_alive(descriptor: int) -> None:
    with contextlib.suppress(OSError, AttributeError), _opened_again(descriptor) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_AFTER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)


def descriptors(raw: Any) -> list[int]:
    """Return the file descriptors of a driver connection's sockets; none for SQLite."""
    if hasattr(raw, "pgconn"):  # psycopg 3
        return [raw.pgconn.socket]
    sock = getattr(raw, "_sock", None)  # PyMySQL
    if sock is not None:
        return [sock.fileno()]
    fileno = getattr(raw, "fileno", None)  # psycopg2, mysqlclient, oracledb
    try:
        return [fileno()] if callable(fileno) else []
    except Exception:  # noqa: BLE001 - a closed connection has none
        return []
