"""One call for a refreshed value: what is there, whether it is due, and how a new one is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.models import F

from django_sqlsem.backends import database_for, get_counting_backend
from django_sqlsem.core.durations import duration
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import CallerSession, Session
from django_sqlsem.database.transactions import in_transaction
from django_sqlsem.exceptions import SemaphoreError
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import Semaphore
from django_sqlsem.refresh import rows
from django_sqlsem.refresh.rows import RefreshState
from django_sqlsem.refresh.values import MISSING, Values
from django_sqlsem.runtime.keepers import keeper_for

logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")
#: Clocks of a statement and of the one before it may differ by so much, in seconds.
_JITTER = 1.0


class BuildFailedError(SemaphoreError):
    """The last build failed a moment ago, and there is no old value."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a caller has found: the value, if there is one, and what its row says."""

    state: RefreshState
    value: Any
    fresh: bool
    #: Whether a build has failed so lately that nobody tries again yet.
    resting: bool

    def value_or(self, other: Any) -> Any:
        """Return the value, or ``other`` if there is none."""
        return other if self.value is MISSING else self.value

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
        if self.values.release_policy == "on_commit" or not rows.has_own_session(keeper):
            return await self.here(self.look)
        state = await keeper.call(lambda: self._read(keeper.own))
        value = await self.values.aget(self.resource, state.token) if state.token else MISSING
        if value is MISSING and state.token:
            return await self.here(self.look, again=True)
        return self._found(state, value)

    async def here(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call what may use the database or the cache, in the thread in which Django wants that."""
        return await sync_to_async(function)(*args, **kwargs)

    @property
    def _would_lock(self) -> bool:
        """Whether a read in the caller's transaction may lock the row until its end, so that no build could end."""
        caller = connections[self.alias]
        kept_there = self.values.release_policy == "on_commit"  # then the row and its value are read as of one moment
        return dialect_for(caller).reads_may_lock and in_transaction(caller) and not kept_there

    @cached_property
    def _own(self) -> Session:
        return rows.own_session(self.keeper)

    def _read(self, session: Session) -> RefreshState:
        return rows.read(session, self.resource)

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

    def store(self, permit: Permit, found: Found, value: Any, took: float) -> bool:
        """Keep what was built, unless a later builder has. Return whether it counts."""
        token = permit.token or 0

        def stamp(session: Session) -> bool:
            built = rows.built(session, took, found.state.invalidations)
            return self._write(session, built | {"token": token}, later_than=token)

        if not self.values.put(self._own, self.resource, token, value, stamp):
            logger.warning(
                "The value of %r, built in %.1f s, came too late: somebody who got the lock after it has built a newer "
                "one, which stays.",
                self.name,
                took,
                extra={"semaphore": self.name, "what": "refresh_late", "took": took},
            )
            return False
        if found.state.token:
            self.values.drop(self.resource, found.state.token)
        return True

    def note_failure(self, permit: Permit) -> None:
        """Note that the build has raised, unless a later one has gone well."""
        self._write(self._own, {"failed_us": rows.now()}, later_than=permit.token or 0)

    def invalidate(self) -> None:
        """Say that the value is out of date, also the one that is being built now."""
        self._write(self._own, {"invalidations": F("invalidations") + 1})

    def _write(self, session: Session, values: dict[str, Any], later_than: int | None = None) -> bool:
        return rows.write(session, self.resource, self.period, values, later_than=later_than)
