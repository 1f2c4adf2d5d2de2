"""The servers and workers of the soak test: programs of their own, in which the same semaphore is taken."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support.databases import ROOT
from tests.support.threads import wait_until

PATIENCE: Final = 90.0
#: The command of each program that lives long, after the interpreter.
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "gunicorn": (
        *("-m", "gunicorn", "--no-control-socket", "-k", "gthread", "-w", "2", "--threads", "6"),
        *("--graceful-timeout", "10", "-b", "127.0.0.1:{port}", "tests.places.soak_app:wsgi"),
    ),
    "uvicorn": (
        *("-m", "uvicorn", "--port", "{port}", "--lifespan", "off", "--no-access-log", "--log-level", "warning"),
        "tests.places.soak_app:asgi",
    ),
    "celery": (
        *("-m", "celery", "--app", "tests.places.soak_celery", "worker", "--pool", "prefork", "--concurrency", "4"),
        *("--without-mingle", "--without-gossip", "--loglevel", "WARNING", "--logfile", "{log}"),
    ),
}


class Program:
    """One program that lives long. ``log`` is the file of what it writes."""

    def __init__(self, kind: str, environment: dict[str, str], directory: Path) -> None:
        self.kind, self._environment, self.log = kind, environment, directory / f"{kind}.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [part.format(port=self.port, log=self.log) for part in COMMANDS[self.kind]]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def again(self) -> None:
        """Start it anew, in the place of the one that has ended."""
        self.process.wait(PATIENCE)
        self.process = self._begin()

    def workers(self) -> list[int]:
        """Return the pids of the processes that run bodies."""
        if self.kind == "uvicorn":
            return [self.process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            return [each.pid for each in psutil.Process(self.process.pid).children()]
        return []

    def wait_until_ready(self) -> None:
        """Wait until it serves."""
        wait_until(self._is_ready, timeout=PATIENCE, what=f"{self.kind} is ready")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        if self.kind == "celery":
            return len(self.workers()) >= 4
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"GET /ping HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return b"pong" in connection.makefile("rb").read()
        return False

    def renew(self) -> None:
        """Restart it in order, as a deployment does."""
        if self.kind == "gunicorn":
            self.process.send_signal(signal.SIGHUP)
        else:
            self.process.terminate()
            self.again()

    def end(self) -> None:
        """End it in order, and whatever is left of it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


class Runs:
    """``manage.py locks run``, again and again, until ``stop`` is set. ``ends`` counts its exit codes."""

    def __init__(self, environment: dict[str, str], hold: Any, pause: float, log: Path) -> None:
        self.ends: dict[int, int] = {}
        self.current: subprocess.Popen[bytes] | None = None
        self._environment, self._hold, self._pause, self._log = environment, hold, pause, log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="runs")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            command = [sys.executable, "-m", "tests.places.soak_body", f"{self._hold():.4f}"]
            options = ("locks", "run", "soak", "--slots", "3", "--timeout", "20s", "--database", "postgres", "--")
            with open(self._log, "ab") as log:
                self.current = subprocess.Popen(
                    [sys.executable, "-m", "django", *options, *command],
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            code = self.current.wait()
            self.ends[code] = self.ends.get(code, 0) + 1
            self._stop.wait(self._pause)

    def workers(self) -> list[int]:
        """Return the pid of the one that runs."""
        current = self.current
        return [current.pid] if current is not None and current.poll() is None else []

    def bodies(self) -> list[int]:
        """Return the pids of its command."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for pid in self.workers() for child in psutil.Process(pid).children()]
        return []

    def end(self) -> None:
        """Wait for the last one."""
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def stopped_for(pid: int, seconds: float) -> None:
    """Stop a process by SIGSTOP for so long."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
