"""``counter()``: a counting semaphore without a maximum. Anybody adds units; who acquires them has used them up.

Workers produce and consume: one process releases a unit for each piece of work that is ready, others acquire them.
A grant is not kept: its units are taken for good at once, on the keeper's side, where no exception interrupts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from django_sqlsem.backends.base import COUNTER, LAPSE_US, Request
from django_sqlsem.core import identity
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.durations import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.core.names import Resource, refuse_fields, resource_for, validate_name, validate_slots
from django_sqlsem.core.text import shown
from django_sqlsem.database import transactions
from django_sqlsem.database.sessions import CallerSession, Session
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError, wrong_kind
from django_sqlsem.locks.acquire import aread_status, read_status, refused_by_tests, seconds_to_wait
from django_sqlsem.runtime import callers
from django_sqlsem.runtime.acquisition import Acquisition, AcquisitionKeeper
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.keepers import keeper_at
from django_sqlsem.snapshots import SemaphoreSnapshot

logger = logging.getLogger("django_sqlsem")

#: The most that one call adds or takes.
MOST_AT_ONCE: Final = 1_000_000_000
_units: Final = functools.partial(validate_slots, most=MOST_AT_ONCE)
LAPSE: Final = LAPSE_US / 1e6  #: A grant that is not taken by then goes back into the count, in seconds.


@dataclass(frozen=True)
class Taken:
    """Units that were taken: how many, and for how many seconds that waited. They are used up, unless put back."""

    counter: Counter
    count: int
    waited: float

    @property
    def name(self) -> str:
        """The name that they were taken from."""
        return self.counter.name

    def put_back(self) -> None:
        """Add as many units again, as after work that failed. Every call does."""
        self.counter.release(self.count)

    async def aput_back(self) -> None:
        """Add as many units again, from a coroutine."""
        await self.counter.arelease(self.count)


@dataclass(frozen=True)
class Counter:
    """A named count of units that anybody may add to. Make it with ``counter()``.

    It holds no state and touches nothing before its first use: one object at module level may be used by any number
    of threads and tasks at once.
    """

    name: str
    initial: int = 0
    _: dataclasses.KW_ONLY
    take: int = 1
    timeout: float | Unset | None = UNSET
    using: str | None = None

    def release(self, n: int = 1) -> None:
        """Add ``n`` units, and wake the waiters that they suffice for. Any program may, also one that acquires none.

        They are there at once, whatever becomes of the caller's transaction; on SQLite inside ``atomic()``, with its
        commit. Raises ``BackendError``.
        """
        count = _units(n, what="n")
        _refuse_event_loop("arelease")
        keeper = self._keeper()
        self._add(keeper, keeper.session_here(), count)
        keeper.post(lambda: None)  # its thread closes the connection that was opened for this, once it is idle

    async def arelease(self, n: int = 1) -> None:
        """Add ``n`` units from a coroutine; see ``release()``."""
        count = _units(n, what="n")
        keeper = self._keeper()
        await keeper.call(lambda session: self._add(keeper, session, count))

    def acquire(self, n: int | None = None, *, timeout: Seconds | Unset | None = UNSET) -> Taken:
        """Take ``n`` units for good, all or none, waiting up to ``timeout`` seconds (``None``: for ever).

        An omitted ``n`` is the counter's ``take``, an omitted timeout is its own, else
        ``SQLSEM["TIMEOUT"]``. First come, first served: who wants many is not overtaken. Raises
        ``AcquireTimeoutError``; ``BackendError``.
        """
        take, seconds = self._wanted(n), seconds_to_wait(timeout, self.timeout, self._keeper().alias)
        return self._acquire(take, seconds) or self._refuse(self.status(), take, seconds)

    def try_acquire(self, n: int | None = None) -> Taken | None:
        """Take ``n`` units if they are there and no other caller waits, without waiting; else return ``None``."""
        return self._acquire(self._wanted(n), 0.0)

    async def aacquire(self, n: int | None = None, *, timeout: Seconds | Unset | None = UNSET) -> Taken:
        """Take ``n`` units from a coroutine: see ``acquire()``. Waiting holds no thread."""
        take, seconds = self._wanted(n), seconds_to_wait(timeout, self.timeout, self._keeper().alias)
        return await self._aacquire(take, seconds) or self._refuse(await self.astatus(), take, seconds)

    async def atry_acquire(self, n: int | None = None) -> Taken | None:
        """Take ``n`` units if they are there and no other caller waits for them; else return ``None``."""
        return await self._aacquire(self._wanted(n), 0.0)

    def status(self) -> SemaphoreSnapshot:
        """Return a frozen snapshot: ``units``, ``waiting``, ``waiters``. A name never used has its initial units."""
        return self._snapshot(read_status(self._keeper(), self._resource()))

    async def astatus(self) -> SemaphoreSnapshot:
        """Return what ``status()`` does, without blocking the event loop."""
        return self._snapshot(await aread_status(self._keeper(), self._resource()))

    def value(self) -> int:
        """Return how many units there are to take: as of now, and no promise that they are there when you ask."""
        return self.status().units or 0

    async def avalue(self) -> int:
        """Return how many units there are to take."""
        return (await self.astatus()).units or 0

    def __enter__(self, *exc_info: object) -> NoReturn:
        raise TypeError(
            f"Units are used up, and nothing is given back at the end of a block: use {self.name!r} by acquire(), "
            "or a semaphore()."
        )

    __exit__ = __aenter__ = __aexit__ = __enter__

    def _resource(self) -> Resource:
        return resource_for(self.name, COUNTER)

    def _keeper(self) -> Keeper:
        return keeper_at(self.using, counter=True)

    def _snapshot(self, found: SemaphoreSnapshot | None) -> SemaphoreSnapshot:
        if found is None:
            return SemaphoreSnapshot(self.name, COUNTER, self.initial, self.initial, None, False, units=self.initial)
        if found.kind != COUNTER:
            raise wrong_kind(self.name, found.kind, COUNTER, self._keeper().alias, found)
        return found

    def _wanted(self, n: int | None) -> int:
        return self.take if n is None else _units(n, what="n")

    def _acquire(self, take: int, timeout: float | None) -> Taken | None:
        _refuse_event_loop("aacquire")
        if self.name in refused_by_tests:
            return None
        keeper = self._keeper()
        acquisition = self._acquisition(keeper, take)
        with acquisition as _asking:
            return self._taken_here(acquisition, timeout)

    def _taken_here(self, acquisition: Acquisition, timeout: float | None) -> Taken | None:
        while acquisition.keeper.acquire(acquisition, timeout):
            if _take_here(acquisition):
                return self._taken(acquisition)
            acquisition.ask_anew()  # they were taken too late: it goes on where it stood in the queue
        acquisition.keeper.drop(acquisition)
        return None

    async def _aacquire(self, take: int, timeout: float | None) -> Taken | None:
        if self.name in refused_by_tests:
            return None
        keeper = self._keeper()
        acquisition = self._acquisition(keeper, take)
        with acquisition as _asking:
            return await self._taken_there(keeper, acquisition, timeout)

    async def _taken_there(self, keeper: Keeper, acquisition: Acquisition, timeout: float | None) -> Taken | None:
        while await keeper.aacquire(acquisition, timeout):
            if await _take_there(acquisition):
                return self._taken(acquisition)
            acquisition.ask_anew()
        keeper.drop(acquisition)
        return None

    def _acquisition(self, keeper: Keeper, take: int) -> Acquisition:
        request = Request(
            resource=self._resource(),
            permit_id=secrets.token_hex(16),
            slots=self.initial,
            take=take,
            lease=LAPSE,
            fair=True,
            holder=identity.current(),
            presence=keeper.reach.presence,
        )
        return Acquisition(keeper, request, max_hold=None, undo=self._put_back)

    def _taken(self, acquisition: Acquisition) -> Taken:
        told = {
            "semaphore": self.name,
            "what": "counter_taken",
            "count": acquisition.request.take,
            "waited": acquisition.waited,
        }
        logger.debug("Took %(count)d of %(semaphore)r, after %(waited).3f s.", told, extra=told)
        return Taken(self, acquisition.request.take, acquisition.waited)

    def _put_back(self, acquisition: Acquisition) -> None:
        """On the keeper's side: add the units again that were taken for a caller whom an exception interrupted."""
        if not acquisition.put_back():
            return  # they were not taken, or have gone back already
        keeper, count = acquisition.keeper, acquisition.request.take
        try:
            self._add(keeper, keeper.own, count)
        except BackendError:
            message = "%d units of %r were taken for a caller that was interrupted, and could not be put back."
            extra = {"semaphore": self.name, "what": "units_lost", "count": count}
            logger.exception(message, count, self.name, extra=extra)

    def _add(self, keeper: AcquisitionKeeper, session: Session, count: int) -> None:
        """Add units, and give them to those of this process who wait for them. Raises ``BackendError``."""
        backend, resource, sent = keeper.backend, self._resource(), boot_now()
        hand_on = True
        if isinstance(session, CallerSession):
            hand_on = False
            session.become_writer()
        options: dict[str, Any] = {"initial": self.initial, "presence": keeper.reach.presence, "hand_on": hand_on}
        for granted in backend.add(session, resource, count, **options):
            keeper.deliver(granted, sent, resource)
        if not hand_on:  # after the commit: a rollback would take them back
            transactions.at_transaction_end(
                keeper.alias, lambda: keeper.post(lambda: keeper.backend.hand_out(keeper.own, resource))
            )
        if keeper.backend.process_local:
            keeper.look_at_all()

    def _refuse(self, snapshot: SemaphoreSnapshot, take: int, timeout: float | None) -> NoReturn:
        wanted = "No unit" if take == 1 else f"No {take} units"
        when = "at once" if timeout == 0 else f"within {timeout:g} s" if timeout is not None else "ever"
        message = f"{wanted} of {snapshot.name!r} {when} (there are {snapshot.units}, {snapshot.waiting} waiting)"
        message += "; it is paused by an operator" if snapshot.paused else ""
        message += f" ({snapshot.paused_reason})." if snapshot.paused_reason else "."
        raise AcquireTimeoutError(message, name=self.name, timeout=timeout, waiting=snapshot.waiting)


def counter(
    name: str,
    initial: int = 0,
    *,
    take: int = 1,
    timeout: Seconds | Unset | None = UNSET,
    using: str | None = None,
) -> Counter:
    """Return the counter ``name``: a semaphore without a maximum, whose units are used up as they are acquired.

    ``initial``: how many there are when the name is used for the first time; say the same everywhere. ``take``: how
    many an acquire takes unless it says otherwise, all or none. ``timeout``: seconds or ``timedelta`` to wait,
    ``None`` for ever, 0 not at all; omitted, 30 s. ``using``: alias of the database that keeps the locks.

    Nothing is looked up before the first use. Raises ``TypeError`` or ``ValueError`` for a bad argument.
    """
    if not isinstance(timeout, Unset):
        timeout = to_seconds(timeout, what="timeout", allow_none=True)
    if using is not None and not isinstance(using, str):
        raise TypeError(f"using must be the alias of a database or None, not {shown(using)}.")
    if isinstance(name, str):
        refuse_fields(name)
    return Counter(
        validate_name(name),
        _units(initial, what="initial", least=0),
        take=_units(take, what="take"),
        timeout=timeout,
        using=using,
    )


def _take_here(acquisition: Acquisition) -> bool:
    """Do what ``_take()`` does, blocking this thread."""
    keeper = acquisition.keeper
    session = keeper.session_here()
    if isinstance(session, CallerSession):  # whose transaction keeps all others from writing
        return _take(acquisition, session)
    return keeper.submit(lambda: _take(acquisition, keeper.own)).result()


async def _take_there(acquisition: Acquisition) -> bool:
    """Do what ``_take()`` does, from a coroutine."""
    return await acquisition.keeper.call(lambda session: _take(acquisition, session))


def _take(acquisition: Acquisition, session: Session) -> bool:
    """Take a grant for good. Return whether it still was there. Raises ``BackendError``."""
    if acquisition.abandoned:  # its caller has gone meanwhile: what it was granted goes back
        return False
    taken = acquisition.keeper.backend.take(session, acquisition.request.resource, acquisition.permit_id)
    if taken:
        acquisition.keeper.used(acquisition)
        if isinstance(session, CallerSession):
            acquisition.put_back()  # if that is undone, then by the end of the transaction
    return taken


def _refuse_event_loop(verb: str) -> None:
    callers.refuse_event_loop(f"An event loop must not be blocked: use `await counter.{verb}()`.")
