"""Semaphores on SQL Server's application locks: the server frees them the moment a session ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.applock import install, reading
from django_sqlsem.backends.applock.acquire import Claims, Upgrades
from django_sqlsem.backends.applock.line import Line, UpgradeLine
from django_sqlsem.backends.applock.operator import Operator
from django_sqlsem.backends.applock.pool import LockPool
from django_sqlsem.backends.applock.possession import BUSY_FOR, Fencing, Possession
from django_sqlsem.backends.base import (
    Acquired,
    BaseSemaphoreBackend,
    Forgotten,
    Grant,
    Granted,
    Place,
    Queue,
    Released,
    Renewal,
    Request,
    Waited,
    sizing,
)
from django_sqlsem.core.modes import UPDATE, UPGRADE, WHOLE
from django_sqlsem.database.sqlserver import broke_off
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.clock import RowClock
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.snapshots import HolderSnapshot, Loss, SemaphoreSnapshot


#: For how long an end of the process waits for each thread that stands in line for nobody, in seconds.
LEAVING: Final = 2.0


class ApplockBackend(BaseSemaphoreBackend):
    """Grants are session-owned application locks. Its calls run on the pool's sessions, whatever it is given."""

    released_on_disconnect = True
    supports_renewal = False
    modes = frozenset({WHOLE, UPDATE, UPGRADE})
    heartbeat = 2.0

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self.pool = LockPool(alias)
        self.possession = Possession(self.pool)
        self.claims = Claims(self.pool, self.possession)
        self.upgrades = Upgrades(self.pool, self.possession)
        self._fencing = Fencing(self.pool, self.possession)
        self._operator = Operator(alias)
        #: By the claims' queues.
        self._lines: dict[str, Line] = {}
        self._lines_lock = threading.Lock()
        self.pool.closing = self._end_lines

    def session(self) -> LockPool:
        """Return the pool: which session a call runs on depends on what it is about."""
        return self.pool

    def announce(self, deliver: Callable[..., object]) -> None:
        """Have grants to waiters delivered from their own threads."""
        self.claims.deliver = deliver

    def before_fork(self, frozen: list[Any]) -> None:
        self.pool.freeze(frozen)

    def after_fork(self) -> None:
        self.pool.after_fork()

    # Acquiring.

    def claim(self, session: Session, request: Request) -> Grant | None:
        granted = self._try(request)
        return None if granted is None else granted.grant

    def _try(self, request: Request) -> Granted | None:
        if request.mode == UPGRADE:
            return self.upgrades.ask(request).granted
        return self.claims.try_claim(request).granted

    def enrol(self, session: Session, request: Request, place: Place, *, first: bool) -> Waited:
        """Claim if need be; else have the name's own thread wait in the server."""
        # One that may be refused is tried in any case.
        if first and (request.bounded or not (request.fair and self.claims.is_crowded(request.line))):
            granted = self._try(request)
            if granted is not None:
                return Waited((granted,), at_once=True)
        if first and request.bounded and (crowd := self.crowd(session, request, 0)) is not None:
            return Waited(refused=crowd)
        ended = self._line_ended
        with self._lines_lock:
            line = self._lines.get(request.line)
            if line is None:
                line = Line(self.claims, ended)
                if request.mode == UPGRADE:
                    line = UpgradeLine(self.claims, self.upgrades, ended)
                self._lines[request.line] = line
            line.enrol(request, place, first=first)
            line.start()
        return Waited((), Queue(ahead=0, told=True))

    def _line_ended(self, line: Line) -> bool:
        with self._lines_lock:
            if line.wanted:
                return False
            self._lines = dict(item for item in self._lines.items() if item[1] is not line)
            return True

    def _end_lines(self) -> None:
        with self._lines_lock:
            lines = list(self._lines.values())
        for line in lines:
            line.end(LEAVING)

    def wait(self, session: Session, request: Request, place: Place) -> Waited:
        """See that the waiting goes on; show that it does; seldom, look past a gate behind which nothing moves."""
        line = self._lines.get(request.line)
        if line is None:
            return Waited()
        if (error := line.error) is not None:
            line.leave(request.permit_id)
            raise error
        line.enrol_again(request, place)
        line.start()  # one that ran out of memory may have ended
        if not line.waits_for(request.permit_id):  # its grant is on the way, or it is not known there
            return Waited((), Queue(ahead=0, told=True) if self.pool.holder(request.permit_id) is not None else None)
        line.show(request, place)
        if request.mode != UPGRADE and not line.is_head:
            try:
                granted = line.look_past(request)
            except BaseException as met:
                if isinstance(met, BackendError) and broke_off(met):  # it waits on a session of its own
                    return Waited((), Queue(ahead=0, told=True))
                line.leave(request.permit_id)
                raise
            if granted is not None:
                line.leave(request.permit_id)
                return Waited((granted,))
        return Waited((), Queue(ahead=0, told=True))

    def granted(self, session: Session, request: Request) -> Granted | None:
        """Return what the pool knows: grants are delivered without being asked for."""
        found = self.pool.holder(request.permit_id)
        return None if found is None else Granted(request.permit_id, found[1].grant(), request.lease)

    def leave(self, session: Session, request: Request) -> None:
        self.discard(session, request.resource, request.permit_id)
        line = self._lines.get(request.line)
        if request.mode == UPGRADE and (line is None or not line.wanted):
            self.upgrades.stop(request.resource.key, BUSY_FOR)  # its thread does so a moment later

    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        """Free what a claim may have got, and wait for it no longer."""
        with self._lines_lock:
            lines = tuple(line for key, line in self._lines.items() if key.startswith(resource.key))
        for line in lines:
            line.leave(permit_id)
        return self.possession.discard(resource, permit_id)

    # Holding.

    def release(self, session: Session, held: Acquired, *, wanted: bool = False, hand_on: bool = True) -> Released:
        return Released(self.possession.release(held.permit_id))

    def hand_out(self, session: Session, resource: Resource) -> None:
        """The server hands locks to those who wait for them."""

    def renew(self, session: Session, held: Sequence[Acquired]) -> Renewal:
        return self.possession.renew(held)

    def taken_away(self, held: Acquired) -> Loss | None:
        return self.possession.taken_away(held.permit_id)

    def fence(self, caller: BaseDatabaseWrapper, session: Session, held: Acquired) -> bool:
        return self._fencing.fence(caller, held)

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
        return self._fencing.fenced_sql(caller, held)

    def snapshot(self, session: Session, resource: Resource) -> SemaphoreSnapshot | None:
        """Read one name on a lock session, whatever the caller's transaction is up to."""
        while True:
            with self.pool.shared("") as own:
                try:
                    return reading.read_one(own, resource)
                except BackendError as error:
                    if not error.stale_connection:  # else it had died unnoticed, and another one may do better
                        raise

    # The operator's side, on the alias's ordinary connection.

    def notes(self) -> list[str]:
        return self._operator.notes()

    def inspect(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str = "",
        template: str | None = None,
        at: RowClock | None = None,
    ) -> list[SemaphoreSnapshot]:
        return self._operator.inspect(names, prefix=prefix, template=template)

    def revoke(self, name: str, slot: int, token: int, *, by: str, kill: bool = False) -> HolderSnapshot | None:
        return self._operator.revoke(name, slot, token, by=by, kill=kill)

    def request_stop(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        return self._operator.request_stop(name, slot, token, by=by)

    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        return self._operator.purge_slot(name, slot, token)

    def purge_idle(self, name: str) -> bool:
        return self._operator.purge_idle(name)

    def forget(self, session: Session, *, seconds: float, after: str) -> Forgotten:
        return self._operator.forget(session, seconds, after)

    def set_slots(
        self, name: str, slots: int | None, *, by: str = "", seconds: float | None = None, reason: str = ""
    ) -> bool:
        return self._operator.set_slots(name, sizing(slots, by, seconds, reason))

    def set_paused(self, name: str, paused: bool) -> bool:
        return self._operator.set_paused(name, paused)

    def procedures(self, *, drop: bool = False) -> tuple[str, ...]:
        return install.for_alias(self.alias, drop=drop)
