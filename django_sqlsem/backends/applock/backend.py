"""Semaphores on SQL Server's application locks: the server frees them the moment a session ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.applock.acquire import FIRST_TRY, Stand
from django_sqlsem.backends.applock.queue import Line
from django_sqlsem.backends.applock.sessions import LockSession
from django_sqlsem.backends.applock.tsql import line as tsql_line
from django_sqlsem.backends.applock.tsql import parts
from django_sqlsem.backends.applock.upgrades import ApplockUpgrades, UpgradeLine
from django_sqlsem.backends.base import Granted, Place, Queue, Request, Waited
from django_sqlsem.core.modes import SHARED, UPDATE, UPGRADE, WHOLE, line_of
from django_sqlsem.database.sqlserver import LockNames, lock_names
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.backends.applock.pool import LockPool
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.sessions import Session


#: For how long an end of the process waits for each thread that stands in line for nobody, in seconds.
LEAVING: Final = 2.0


class ApplockBackend(ApplockUpgrades):
    """Grants are session-owned application locks. Its statements run on the pool's sessions, whatever it is given."""

    released_on_disconnect = True
    supports_renewal = False
    modes = frozenset({WHOLE, UPDATE, UPGRADE})
    heartbeat = 2.0

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        #: By the claims' lines.
        self._lines: dict[str, Line] = {}
        self._lines_lock = threading.Lock()
        self.deliver: Callable[..., object] = lambda granted, sent, resource, *, at_once: None
        self.pool.closing = self._end_lines

    def session(self) -> LockPool:
        """Return the pool: which session a statement runs on depends on what it is about."""
        return self.pool

    def announce(self, deliver: Callable[..., object]) -> None:
        """Have grants to waiters delivered from their own threads."""
        self.deliver = deliver

    def before_fork(self, frozen: list[Any]) -> None:
        """Let short statements under way finish."""
        self.pool.freeze(frozen)

    def after_fork(self) -> None:
        """In a forked child: leave the parent's sessions alone."""
        self.pool.after_fork()

    # Waiting.

    def enrol(self, session: Session, request: Request, place: Place, *, first: bool) -> Waited:
        """Claim if need be; else have the name's own thread stand in line in the server."""
        if first and not (request.fair and self.is_crowded(request.line)):
            granted = self.try_claim(request, FIRST_TRY).granted
            if granted is not None:
                return Waited((granted,), at_once=True)
        names = lock_names(request.resource.name).line(request.mode)
        kind: Callable[..., Line] = UpgradeLine if request.mode == UPGRADE else Line
        with self._lines_lock:
            line = self._lines.get(request.line)
            if line is None:
                line = self._lines[request.line] = kind(self, names, self._line_ended)
            line.enrol(request, place, first=first)
            line.start()
        return Waited((), Queue(ahead=0, told=True))

    def _line_ended(self, line: Line) -> bool:
        with self._lines_lock:
            if line.wanted:
                return False
            self._lines = {key: each for key, each in self._lines.items() if each is not line}
            return True

    def _end_lines(self) -> None:
        with self._lines_lock:
            lines = list(self._lines.values())
        for line in lines:
            line.end(LEAVING)

    def wait(self, session: Session, request: Request, place: Place) -> Waited:
        """See that the waiting goes on, and whether the first in line has stopped while a slot is free."""
        line = self._lines.get(request.line)
        if line is None:
            return Waited()
        if (error := line.error) is not None:
            line.leave(request.permit_id)
            raise error
        line.enrol_again(request, place)
        if line.is_head or not line.waits_for(request.permit_id):
            # Its grant is on the way, or it is not known there.
            there = line.is_head or self.pool.holder(request.permit_id) is not None
            return Waited((), Queue(ahead=0, told=True) if there else None)
        try:
            granted, status, *_ = self.try_claim(request, Stand(line.ticket, place.waiting))
        except BaseException:
            line.leave(request.permit_id)
            raise
        if granted is not None:
            line.leave(request.permit_id)
            return Waited((granted,))
        return Waited((), Queue(ahead=1, suspects=int(status == parts.GATED), told=True))

    def granted(self, session: Session, request: Request) -> Granted | None:
        """Return what the pool knows: grants are delivered without being asked for."""
        found = self.pool.holder(request.permit_id)
        if found is None:
            return None
        return Granted(request.permit_id, found[1].grant(), request.lease)

    def leave(self, session: Session, request: Request) -> None:
        """Have the thread wait for this claim no longer."""
        self.discard(session, request.resource, request.permit_id)

    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        """Free what a claim may have got, and wait for it no longer."""
        for each in (SHARED, UPDATE, UPGRADE):
            line = self._lines.get(line_of(resource.key, each))
            if line is not None:
                line.leave(permit_id)
        return super().discard(session, resource, permit_id)

    def step_out(self, session: LockSession, names: LockNames, ticket: str) -> None:
        """Open the gate if it is held, and take the waiter's row away."""
        with contextlib.suppress(BackendError):
            if not session.ended:
                values = {"stamp": session.stamp, "gate": names.gate, "ticket": ticket}
                session.run(tsql_line.step_out(record=self.record), values)
            elif self.record:
                with self.pool.shared("") as other:
                    other.run(tsql_line.UNWAIT, {"ticket": ticket})
