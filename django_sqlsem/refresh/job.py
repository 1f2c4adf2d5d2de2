"""One call for a refreshed value: what is there, whether it is due, and how a new one is stored.

What counts is decided by tokens, in conditional updates of its row. What operators see of these rows is read on the
alias's ordinary connection.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F
from django.db.models.expressions import Combinable

from django_sqlsem.backends import database_for, get_counting_backend
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.core.clocks import ahead_us
from django_sqlsem.core.durations import duration
from django_sqlsem.core.identity import current
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.cursors import AnyCursor
from django_sqlsem.database.dialects import DatabaseNow, dialect_for
from django_sqlsem.database.errors import database_errors
from django_sqlsem.database.sessions import CallerSession, OwnSession, Session, insert_missing, used_by_orm
from django_sqlsem.database.transactions import at_transaction_end, in_transaction
from django_sqlsem.exceptions import BackendError, SemaphoreError
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import Semaphore
from django_sqlsem.models import RefreshRow
from django_sqlsem.refresh.values import MISSING, Values
from django_sqlsem.runtime.keepers import keeper_for
from django_sqlsem.snapshots import RefreshSnapshot, who

logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")
#: Clocks of a statement and of the one before it may differ by so much, in seconds.
_JITTER = 1.0
#: The keys of the rows that a transaction has written in which a value was built, and which is still open.
_written: Final[WeakKeyDictionary[BaseDatabaseWrapper, set[str]]] = WeakKeyDictionary()


class BuildFailedError(SemaphoreError):
    """The last build failed a moment ago, and there is no old value."""


@dataclass(frozen=True, slots=True)
class RefreshState:
    """What the row says at one instant of the database's clock."""

    #: Whose value counts; 0: there is none.
    token: int = 0
    #: Seconds since that was built; ``None``: never, or before the host's boot where that is the clock.
    age: float | None = None
    #: How often the value was said to be out of date, and of how many of these the builder knew when it began.
    invalidations: int = 0
    built_for: int = 0
    #: Seconds since a build failed, if none has gone well since.
    failed: float | None = None


# Not with the ORM, which takes twenty times as long: each call for a value reads this.
_READ: Final = (
    "SELECT token, built_us, boot_id, invalidations, built_for, failed_us, {now} FROM sqlsem_refresh"
    " WHERE name_key = %(key)s"
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a caller has found: the value, if there is one, and what its row says."""

    state: RefreshState
    value: Any
    fresh: bool
    #: Whether a build has failed so lately that nobody tries again yet.
    resting: bool

    def settles(self, job: Job, forced: bool = False) -> bool:
        """Whether nothing is to be built. Raises ``BuildFailedError`` if nothing may be, and there is no value."""
        if self.fresh or forced:
            return self.fresh
        if self.resting and self.value is MISSING:
            failed = self.state.failed or 0.0
            raise BuildFailedError(
                f"The build of {job.name!r} failed {duration(failed)} ago, and there is no old value; it is tried "
                f"again in {duration((job.retry_after or 0.0) - failed)}."
            )
        return self.resting


class Job:
    """One call."""

    def __init__(self, lock: Semaphore, values: Values, period: float, retry_after: float | None) -> None:
        """Raise ``ImproperlyConfigured`` if the values can't be kept where they are to be."""
        self.lock = lock
        self.name = lock.name
        self.values = values
        self.period = period
        self.retry_after = retry_after
        self.resource = resource_for(lock.name, lock.kind)
        self.alias = database_for(lock.using)
        # Of the rows, also where the lock itself is an application lock.
        self.keeper = keeper_for(get_counting_backend(self.alias))
        values.check(self.alias)

    def look(self, *, again: bool = False) -> Found:
        """Return what there is; ``again``: as committed by now, whatever the caller's transaction sees."""
        state = self._read(self._own if again or self._would_lock else CallerSession(connections[self.alias]))
        value = self._value(state)
        if value is MISSING and state.token:
            # The next builder may have replaced it in between; else the cache has lost it.
            later = self._read(self._own)
            if later.token != state.token:
                state, value = later, self._value(later)
        return self._found(state, value)

    async def alook(self) -> Found:
        """Do as ``look()`` does; the row is read on the keeper's thread, which no build blocks."""
        keeper = self.keeper
        if self.values.release_policy == "on_commit" or not self._has_own_session:
            return await sync_to_async(self.look)()
        state = await keeper.call(self._read)
        value = await self.values.aget(self.resource, state.token) if state.token else MISSING
        if value is MISSING and state.token:
            return await sync_to_async(self.look)(again=True)
        return self._found(state, value)

    @property
    def _would_lock(self) -> bool:
        """Whether a read in the caller's transaction may lock the row until its end, so that no build could end."""
        caller = connections[self.alias]
        kept_there = self.values.release_policy == "on_commit"  # then the row and its value are read as of one moment
        return dialect_for(caller).reads_may_lock and in_transaction(caller) and not kept_there

    @property
    def _has_own_session(self) -> bool:
        """Whether there are sessions for the row apart from the ordinary connection."""
        return not self.keeper.backend.process_local and isinstance(self.keeper.own, OwnSession)

    @cached_property
    def _own(self) -> Session:
        """A session apart from the caller's transaction; the alias's ordinary connection where there is none.

        The latter also if that transaction has written the row: any other session would wait for its end.
        """
        caller = connections[self.alias]
        apart = self._has_own_session and self.resource.key not in _written.get(caller, ())
        return self.keeper.session_here() if apart else CallerSession(caller)

    def _read(self, session: Session) -> RefreshState:
        """Return what the row says. Raises ``BackendError``."""
        dialect = dialect_for(session.connection)

        def work(cursor: AnyCursor) -> Any:
            dialect.execute(cursor, _READ, {"key": self.resource.key})
            return cursor.fetchone()

        row = session.run(work)
        if row is None:
            return RefreshState()
        token, built_us, boot_id, invalidations, built_for, failed_us, there = row
        instant = int(there) + ahead_us()
        # What was before the boot of the host whose clock counts is too long ago to be told.
        known = built_us is not None and boot_id == dialect.boot_id
        return RefreshState(
            token=token,
            age=(instant - built_us) / 1e6 if known else None,
            invalidations=invalidations,
            built_for=built_for,
            failed=None if failed_us is None else (instant - failed_us) / 1e6,
        )

    def _value(self, state: RefreshState) -> Any:
        return self.values.get(self.resource, state.token) if state.token else MISSING

    def _found(self, state: RefreshState, value: Any) -> Found:
        young = state.age is not None and -_JITTER < state.age < self.period
        fresh = value is not MISSING and young and state.built_for == state.invalidations
        rests = self.retry_after is not None and state.failed is not None and 0 <= state.failed < self.retry_after
        return Found(state, value, fresh, rests)

    def refuse_without_token(self, permit: Permit) -> None:
        """Raise ``ImproperlyConfigured`` if nothing tells a late builder from the one who came after it."""
        if permit.token is None:
            raise ImproperlyConfigured(f"{self.name!r} needs the tokens of permits: leave SQLSEM['RECORD'] at True.")

    def store(self, permit: Permit, found: Found, value: Any, took: float) -> Any:
        """Keep what was built, unless a later builder has. Return the value that counts."""
        token, builder = permit.token or 0, current()

        def stamp(session: Session) -> bool:
            built = {
                "token": token,
                "built_us": _now(),
                "took_us": round(took * 1e6),
                "built_for": found.state.invalidations,
                "failed_us": None,
                **who(builder),
                "process_id": builder.process,
                "boot_id": dialect_for(session.connection).boot_id,
            }
            if isinstance(session, CallerSession):
                _written.setdefault(session.connection, set()).add(self.resource.key)
                at_transaction_end(self.alias, lambda: _written.pop(session.connection, None))
            return self._write(session, built, later_than=token)

        if not self.values.put(self._own, self.resource, token, value, stamp):
            logger.warning(
                "The value of %r, built in %.1f s, came too late: somebody who got the lock after it has built a newer "
                "one, which stays.",
                self.name,
                took,
                extra={"semaphore": self.name, "what": "refresh_late", "took": took},
            )
            newer = self.look(again=True).value
            return value if newer is MISSING else newer
        if found.state.token:
            self.values.drop(self.resource, found.state.token)
        return value

    def note_failure(self, permit: Permit) -> None:
        """Note that the build has raised, unless a later one has gone well."""
        with contextlib.suppress(BackendError):  # what the build raised says more
            self._write(self._own, {"failed_us": _now()}, later_than=permit.token or 0)

    def invalidate(self) -> None:
        """Say that the value is out of date, also the one that is being built now."""
        self._write(self._own, {"invalidations": F("invalidations") + 1})

    def _write(self, session: Session, values: dict[str, Any], later_than: int | None = None) -> bool:
        """Update the row, or one of an earlier token than ``later_than``; it is made if it is not there.

        Joins the transaction that is open on ``session``. Returns whether it was written. Raises ``BackendError``.
        """
        period_us = round(self.period * 1e6)

        def update(cursor: AnyCursor) -> bool:
            with used_by_orm(cursor.db):
                rows = RefreshRow._default_manager.using(cursor.db.alias).filter(key=self.resource.key)
                if later_than is not None:
                    rows, values["period_us"] = rows.filter(token__lt=later_than), period_us
                return rows.update(**values) > 0

        def insert(cursor: AnyCursor) -> None:
            with used_by_orm(cursor.db):
                row = RefreshRow(key=self.resource.key, name=self.resource.name, period_us=period_us)
                insert_missing([row], using=cursor.db.alias)

        if session.run(update):
            return True
        session.run(insert)
        return session.run(update)


def _now() -> Combinable:
    """Return the time as this process tells it, which a test may have moved ahead."""
    return DatabaseNow() + ahead_us()


def refreshes(alias: str, prefix: str = "") -> list[RefreshSnapshot]:
    """Return the values whose names begin with ``prefix``, by name. Raises ``BackendError``."""
    with database_errors(alias):
        clock = RowClock.of(alias)
        rows = RefreshRow._default_manager.using(alias).filter(name__startswith=prefix).order_by("name")
        found = [snapshot_of(clock, row) for row in rows]
    # Some databases fold case here.
    return sorted((each for each in found if each.name.startswith(prefix)), key=lambda each: each.name)


def snapshot_of(clock: RowClock, row: RefreshRow) -> RefreshSnapshot:
    """Return what a row says at the clock's instant."""
    built = row.built_us is not None
    age = max(0.0, clock.age(row.built_us, row.boot_id)) if built else None
    period = row.period_us / 1e6
    # One from before the host's boot is due, as is one that was said to be out of date.
    counts = age is not None and row.boot_id == clock.boot_id and row.built_for == row.invalidations
    return RefreshSnapshot(
        name=row.name,
        period=period,
        **who(row),
        built_at=None if age is None else clock.at(age),
        age=age,
        took=row.took_us / 1e6 if built else None,
        due_in=max(0.0, period - age) if age is not None and counts else 0.0,
        failed=None if row.failed_us is None else max(0.0, (clock.now - row.failed_us) / 1e6),
    )
