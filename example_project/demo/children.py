"""The demo's child processes: started in groups of their own, watched, and stopped without a trace."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

HOST = "127.0.0.1"


class ChildError(Exception):
    """A child process did not start, or ended before its time."""


class Child:
    """A Python program in a process group of its own, with a log file."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which stops its children in order
            )

    def check(self) -> None:
        """Raise ``ChildError`` with the end of the log if the process has ended."""
        if (code := self._process.poll()) is not None:
            raise ChildError(f"{self.name} ended by itself with code {code}. The end of {self.log}:\n\n{self.tail()}")

    def wait_until(self, ready: Callable[[], bool], stopped: Callable[[float], bool], seconds: float = 30) -> None:
        """Return once ``ready()``; raise ``ChildError`` if the process ends, or is not ready within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ChildError(
                    f"{self.name} was not ready within {seconds:g} s. The end of {self.log}:\n\n{self.tail()}"
                )
            if stopped(0.1):
                return

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(errors="replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (nothing)"

    def terminate(self) -> None:
        """Ask the process to finish what it is doing and end."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End the process as a crash would."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, seconds: float = 15) -> None:
        """Wait for the end; then, or after ``seconds``, kill whatever is left of the process group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()


def is_free(port: int) -> bool:
    """Say whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
