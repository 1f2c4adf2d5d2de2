"""Children of tests that are forked instead of started: what every one of them imports is imported once.

A template process has Django set up, and neither connections nor threads. Asked over a socket, it forks a process that
belongs to the test process, with the given files, arguments and environment, and which then does and ends as
``python -m tests.support.children`` does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

#: Only these may differ from the template's: an interpreter reads others, or a library does, when it starts.
_MAY_DIFFER = ("SQLSEM_TEST_DATABASES", "SQLSEM_TEST_SETTINGS")
#: What most children import anyhow. Not what the library looks for in ``sys.modules``, as Celery and multiprocessing.
_PRELOADED = (
    "asyncio",
    "tests.support.children",
    "tests.programs.lock_clients",
    "tests.programs.contenders",
    "tests.programs.queue_clients",
    "tests.programs.outage_clients",
    "tests.programs.takeover_clients",
    "tests.support.databases",
    "tests.support.threads",
)
_PATIENCE = 120.0
_SET_SUBREAPER = 36  # prctl(2)


class ForkedProcess:
    """A forked child of this process, with what ``subprocess.Popen`` has."""

    def __init__(self, pid: int, args: list[str], stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.args = args
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._file = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its exit code, or ``None`` while it goes on; ``-9`` after SIGKILL."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._file)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code. ``subprocess.TimeoutExpired`` after so many seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with contextlib.suppress(OSError, ValueError):  # another thread has reaped it
                waiting = select.poll()
                waiting.register(self._file, select.POLLIN)
                waiting.poll(min(left, 1.0) * 1000)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has been reaped."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Template:
    """The test process's side of the process that forks."""

    def __init__(self, environment: Mapping[str, str], directory: str | os.PathLike[str]) -> None:
        self.owner = os.getpid()
        self.environment = dict(environment)
        self.directory = directory
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_PATIENCE)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(theirs.fileno())],
                cwd=directory,
                env=self.environment,
                stdin=subprocess.PIPE,  # pipes, as its children's are: text files remember what they cannot do
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a child may be forked for this environment, in this process."""
        return os.getpid() == self.owner and _fixed(environment) == _fixed(self.environment)

    def fork(self, args: list[str], environment: Mapping[str, str], stderr: int) -> ForkedProcess:
        """Fork ``python -m tests.support.children *args``. ``OSError`` if the template has ended."""
        theirs_in, mine_in = os.pipe()
        mine_out, theirs_out = os.pipe()
        stdin, stdout = open(mine_in, "w", encoding="utf-8"), open(mine_out, encoding="utf-8")  # noqa: SIM115
        request = json.dumps({"args": args, "env": {name: environment.get(name) for name in _MAY_DIFFER}}).encode()
        try:
            with self._lock, _adopting():
                socket.send_fds(self._socket, [len(request).to_bytes(4, "big")], [theirs_in, theirs_out, stderr])
                self._socket.sendall(request)
                pid = int.from_bytes(_exactly(self._socket, 4), "big")
        except OSError:
            stdin.close()
            stdout.close()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        return ForkedProcess(pid, args, stdin, stdout)

    def close(self) -> None:
        """End the template. Its children go on."""
        self._socket.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if os.getpid() == self.owner:
            self._process.kill()
            self._process.wait()
        self._process.returncode = self._process.returncode or 0  # in a fork: not ours to wait for


_template: Template | None = None
_starting = threading.Lock()


def fork(
    args: list[str],
    environment: Mapping[str, str],
    usual: Mapping[str, str],
    stderr: int,
    directory: str | os.PathLike[str],
) -> ForkedProcess | None:
    """Fork a child; ``None`` where it has to be started: on other systems, and not in the usual environment."""
    global _template
    if sys.platform != "linux" or _fixed(environment) != _fixed(usual):
        return None
    with _starting:
        if _template is not None and not _template.serves(usual):  # a test had changed a variable, or forked
            _template.close()
            _template = None
        if _template is None:
            _template = Template(usual, directory)
            atexit.register(stop)
        template = _template
    try:
        return template.fork(args, environment, stderr)
    except OSError:
        stop()  # its next answer could be to this request
        raise


def stop() -> None:
    """End the template; the next child starts another."""
    global _template
    with _starting:
        if _template is not None:
            _template.close()
            _template = None


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _MAY_DIFFER}


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans of this process's children become its own inside the block, as the forked ones must."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        libc.prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the template of children has ended")
        data += part
    return data


# The template's side.


def _serve(connection: socket.socket, owner: int) -> dict[str, Any]:
    """Fork when asked. Returns in each forked child, with its request; ends with the test process."""
    while True:
        try:
            head, files, _, _ = socket.recv_fds(connection, 4, 3)
        except OSError:
            os._exit(0)
        if len(head) < 4:
            os._exit(0)
        request: dict[str, Any] = json.loads(_exactly(connection, int.from_bytes(head, "big")))
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # so that the test process gets the child
            os.setsid()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            deadline = time.monotonic() + _PATIENCE
            while os.getppid() != owner:
                if time.monotonic() > deadline:
                    os._exit(70)
                time.sleep(0.0005)
            connection.sendall(os.getpid().to_bytes(4, "big"))
            connection.close()
            return request
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def _become(request: dict[str, Any]) -> None:
    """Be the program that was asked for: its arguments and its databases."""
    from django.conf import settings
    from django.db import connections

    from django_sqlsem import conf
    from tests.support import servers

    for name, value in request["env"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.argv[1:] = request["args"]
    sys.orig_argv[1:] = ["-m", "tests.support.children", *request["args"]]
    settings.DATABASES = servers.given_databases()
    settings.SQLSEM = servers.given_settings()
    for connection in connections.all(initialized_only=True):
        assert connection.connection is None, connection.alias
        del connections[connection.alias]
    connections._settings = None  # it keeps them twice
    vars(connections).pop("settings", None)
    assert connections.settings.keys() == settings.DATABASES.keys()
    conf.config.cache_clear()


def main() -> None:
    """Import what children need, fork them, and be them."""
    import django

    owner = os.getppid()
    connection = socket.socket(fileno=int(sys.argv.pop(1)))
    os.set_inheritable(connection.fileno(), False)
    from tests.support import children, servers

    sys.argv[0] = str(children.__file__)
    django.setup()
    for name in (*_PRELOADED, *(f"{each['ENGINE']}.base" for each in servers.given_databases().values())):
        importlib.import_module(name)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # else the end of each child would look through all of it, and copy it first
    _become(_serve(connection, owner))
    children.main()


if __name__ == "__main__":
    main()
