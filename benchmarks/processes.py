"""The first process's side of the measured processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import worker
from benchmarks.contenders.base import Contender

#: How long an answer may take, in seconds, before the run is given up.
PATIENCE = 120.0

_context: Any = None


def context() -> Any:
    """Return the way to start processes: from a fork server that has imported all already, where there is one."""
    global _context
    if _context is None:
        if sys.platform == "win32":
            _context = multiprocessing.get_context("spawn")
        else:
            _context = multiprocessing.get_context("forkserver")
            _context.set_forkserver_preload(["benchmarks.preload", "benchmarks.worker"])
    return _context


class WorkerError(RuntimeError):
    """A measured process failed, or did not answer in time."""


class Process:
    """One measured process. What it is told is one of the roles in ``benchmarks.worker``."""

    def __init__(self, kind: type[Contender], name: str, slots: int, alias: str | None = None, **more: Any) -> None:
        self.kind = kind
        self.pipe, theirs = context().Pipe()
        self.process = context().Process(target=worker.main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.tell("setup", key=kind.key, name=name, slots=slots, alias=alias, **more)

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def tell(self, role: str, **arguments: Any) -> None:
        """Have it take a role; do not wait for the answer."""
        self.pipe.send((role, arguments))

    def answer(self, patience: float = PATIENCE, of: str = "done") -> Any:
        """Wait for an answer. Raises ``WorkerError`` if it fails, dies or takes longer than ``patience`` seconds."""
        if not self.pipe.poll(patience):
            raise WorkerError(f"{self.kind.key}: no answer for {patience:g} s")
        try:
            what, value = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise WorkerError(f"{self.kind.key}: a measured process died") from error
        if what != of:
            raise WorkerError(f"{self.kind.key}: {str(value).strip().splitlines()[-1]}") from RuntimeError(value)
        return value

    def ask(self, role: str, **arguments: Any) -> Any:
        """Have it take a role and return its answer."""
        self.tell(role, **arguments)
        return self.answer()

    def start_to_acquire(self) -> None:
        """Have it acquire; return when it is about to. Its answer will be when it was granted."""
        self.tell("acquire")
        self.answer(of="calling")

    def acquire(self) -> None:
        """Have it acquire, and wait until it has."""
        self.start_to_acquire()
        self.answer()

    def kill(self) -> None:
        """Kill it at once, as ``kill -9`` does."""
        self.process.kill()

    def part(self) -> None:
        """Tell it to end in an orderly way."""
        with contextlib.suppress(OSError):
            self.tell("end")

    def join(self, patience: float = 10.0) -> None:
        """Wait for its end; kill it if that takes longer than ``patience`` seconds."""
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self.pipe.close()


@contextlib.contextmanager
def processes(
    kind: type[Contender], name: str, slots: int, count: int, alias: str | None = None, **more: Any
) -> Iterator[list[Process]]:
    """Start ``count`` processes that use one lock; yield them when all have connected, and end them.

    ``more`` is what else the role ``setup`` is told.
    """
    team: list[Process] = []
    try:
        for _ in range(count):
            team.append(Process(kind, name, slots, alias, **more))  # noqa: PERF401 - those that have started must be ended
        for each in team:
            each.answer()
        yield team
    finally:
        for each in team:
            each.part()
        for each in team:
            each.join()
