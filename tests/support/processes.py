"""Child processes of a test, with a protocol of lines over stdin and stdout."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

from tests.support import forks
from tests.support.databases import ROOT, child_environment

#: What a terminal sends. ``nohup`` has the first ignored, a shell's ``&`` the others.
_FROM_A_TERMINAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


@contextlib.contextmanager
def children_hear_signals() -> Iterator[None]:
    """Inside the block new programs start with none of a terminal's signals ignored; this process ignores them still.

    For the main thread. An ignored signal is inherited, and a shell cannot even trap it.
    """
    ignored = [number for number in _FROM_A_TERMINAL if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, a handler ends with exec
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


class Child:
    """One Python process that runs a function, or code, with Django set up on the test's own databases.

    ``target`` is the name of a function in ``tests.support.children``, a path ``package.module:function``, or lines of
    code in which ``args``, ``say`` and ``listen`` are defined. ``args`` are anything that JSON can carry. ``env`` adds
    environment variables. Leaving the ``with`` block kills the process and all that it started.

    It is forked from a process that has imported all it needs (``tests.support.forks``); ``forked=False`` starts a
    program.
    """

    def __init__(self, target: str, *args: Any, env: dict[str, str] | None = None, forked: bool = True) -> None:
        self.target = target
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._stderr = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - closed by close()
        arguments, environment = [target, json.dumps(args)], child_environment(**(env or {}))
        self.process = (
            forked and forks.fork(arguments, environment, child_environment(), self._stderr.fileno(), ROOT)
        ) or subprocess.Popen(
            [sys.executable, "-m", "tests.support.children", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"reader-{self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return os.pread(self._stderr.fileno(), 1 << 20, 0).decode(errors="replace")

    def expect(self, expected: str = "", timeout: float = 60.0) -> str:
        """Wait for the next line, which must be ``expected`` or begin with it and a space; return what follows it.

        With nothing expected, returns the whole line. ``AssertionError``, with its stderr, if another line or none
        comes within ``timeout`` seconds.
        """
        try:
            line = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(self._story(f"said nothing for {timeout} s instead of {expected!r}")) from None
        if line is None:
            self._queue.put(None)  # for the next call
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            raise AssertionError(self._story(f"ended with {self.process.returncode} instead of {expected!r}"))
        if not expected:
            return line
        if line != expected and not line.startswith(f"{expected} "):
            raise AssertionError(self._story(f"said {line!r} instead of {expected!r}"))
        return line[len(expected) + 1 :]

    def silent(self, seconds: float) -> None:
        """Assert that it says nothing for so long."""
        with contextlib.suppress(queue.Empty):
            line = self._queue.get(timeout=seconds)
            raise AssertionError(self._story(f"said {line!r} instead of nothing"))

    def send(self, line: str = "") -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except OSError as error:
            raise AssertionError(self._story(f"does not listen ({error})")) from error

    def kill(self) -> None:
        """End it at once by SIGKILL. What it started goes on until the ``with`` block ends."""
        self.process.kill()
        self.process.wait(60)

    def stop(self, *, anywhere: bool = False) -> None:
        """Stop it by SIGSTOP, and wait until it has stopped.

        Not while it locks an SQLite file: as long as it is stopped, no other process could write to it, or even read.
        Then it goes on and is stopped a little later. ``anywhere``: that is what the test is about.
        """
        deadline = time.monotonic() + 60.0
        while True:
            self.signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
            if anywhere or not (found := sqlite_locks(self.pid)):
                return
            self.cont()
            assert time.monotonic() < deadline, self._story(f"never let go of {found}")
            time.sleep(random.uniform(0.001, 0.05))  # out of step with what it does at intervals

    def cont(self) -> None:
        """Let it go on by SIGCONT."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end and return the exit code. ``AssertionError`` if it goes on."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._story(f"goes on after {timeout} s")) from None

    def finish(self, timeout: float = 60.0) -> None:
        """Wait for its end, which must be a good one."""
        code = self.wait(timeout)
        assert code == 0, self._story(f"ended with {code}")

    def close(self) -> None:
        """Kill it and all that it started, and reap it. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(60)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self._reader.join(60)
        self.process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(self.lines[-1])
        self._queue.put(None)

    def _story(self, what: str) -> str:
        said = "\n".join(self.lines[-20:]) or "nothing"
        return f"The child {self.target!r} {what}.\n--- it said\n{said}\n--- its stderr\n{self.stderr.strip()}"


def sqlite_locks(pid: int) -> list[str]:
    """Return what a stopped process keeps others out of: the exclusive locks of its SQLite files, as Linux tells them.

    In a WAL the one writer's is byte 120 of the file ``-shm``; those of its readers are shared. Empty elsewhere.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):  # not Linux, or it has ended
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if ".sqlite3" in os.path.basename(path):
                with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as lines:
                    locks = [line.strip() for line in lines if line.startswith("lock:")]
                found += [f"{path}: {lock}" for lock in locks if " WRITE " in lock]
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; one that has ended and was not reaped does not count."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or read
        return False


def wait_for_end(pid: int, timeout: float = 30.0) -> None:
    """Wait until a process that need not be a child has ended."""
    deadline = time.monotonic() + timeout
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} goes on after {timeout} s"
        time.sleep(0.01)
